"""Looks through the pages of an index file for whatever LMDB would follow to a bad end, without LMDB.

LMDB trusts its pages: an offset or a size that is wrong takes it out of the page, or out of the file. All entries of the index have
one size, which makes checking them a matter of arrays: 10 million take a second, walking them one by one takes several. Pages
are read and not mapped, so that a disk that cannot read one is an error and not a signal.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

# LMDB's data format, version 1; it refuses files of another one itself. A page: its number (u64), 2 bytes, flags, `lower` and
# `upper` (u16 each), then as many u16 offsets of nodes as there are up to `lower`; the nodes fill the page from `upper` on. A node:
# four u16, which are the size of its data (lower, upper half), flags and the size of its key; in a branch the first three are the
# number of a page instead. Then key and data, filled up to an even number of bytes.
_BRANCH, _LEAF = 1, 2
_PAGE_HEAD_BYTES, _NODE_HEAD_BYTES = 16, 8
_FLAGS, _LOWER, _UPPER = 5, 6, 7  # in units of u16
_NO_PAGE = 2**64 - 1
# What the main tree says of a named one: 4 bytes, flags, depth, numbers of branch, leaf and overflow pages, entries, root.
_TREE = struct.Struct("<4xHHQQQQQ")
_DEPTH_MAX = 32  # LMDB's own
_PAGES_AT_A_TIME = 1024


def check_tree(path: Path, page_bytes: int, tree: bytes, entry_bytes: tuple[int, int]) -> None:
    """Check every page of a tree.

    Args:
        tree: what the main tree says of it, 48 bytes.
        entry_bytes: of each key and value.
    Raises: StorageError: something is wrong; OSError: it cannot be read.
    """
    if len(tree) != _TREE.size:
        raise StorageError(f"what it says of its tree has {len(tree)} bytes")
    _, depth, _, _, _, entries, root = _TREE.unpack(tree)
    if depth > _DEPTH_MAX or (depth == 0) != (root == _NO_PAGE):
        raise StorageError(f"a tree of depth {depth}")
    with path.open("rb") as file:
        found = _Tree(file.fileno(), page_bytes, *entry_bytes).entries(root, depth)
    if found != entries:
        raise StorageError(f"{found} entries, it says {entries}")


class _Tree:
    def __init__(self, descriptor: int, page_bytes: int, key_bytes: int, value_bytes: int) -> None:
        self._descriptor, self._page_bytes = descriptor, page_bytes
        self._key_bytes, self._value_bytes = key_bytes, value_bytes
        self._page_count = os.fstat(descriptor).st_size // page_bytes

    def entries(self, root: int, depth: int) -> int:
        """How many there are; level by level from the root, so that no loop among the pages is followed."""
        level = np.array([root] if depth else [], dtype=np.uint64)
        for _ in range(depth - 1):
            level = np.concatenate([self._children(*part) for part in self._read(level)])
        return sum(self._leaf_entries(*part) for part in self._read(level))

    def _read(self, level: NDArray[np.uint64]) -> Iterator[tuple[NDArray[np.uint16], NDArray[np.intp]]]:
        """Some pages after others, shape (n, page bytes / 2), with their numbers; in the order in which they lie in the file."""
        level = np.sort(level)
        if len(level) and int(level[-1]) >= self._page_count:
            raise StorageError(f"a page {int(level[-1])}, the file has {self._page_count}")
        if (level[1:] == level[:-1]).any():
            raise StorageError("a page with two parents")
        for start in range(0, len(level), _PAGES_AT_A_TIME):
            numbers = level[start : start + _PAGES_AT_A_TIME].astype(np.intp)
            pages = np.empty((len(numbers), self._page_bytes // 2), dtype="<u2")
            runs = np.flatnonzero(np.diff(numbers) != 1) + 1
            for first, end in zip([0, *runs.tolist()], [*runs.tolist(), len(numbers)], strict=True):
                run = pages[first:end]
                size = os.preadv(self._descriptor, [run.data.cast("B")], int(numbers[first]) * self._page_bytes)
                if size != run.nbytes:
                    raise StorageError(f"page {int(numbers[first])} cannot be read: {size} of {run.nbytes} bytes")
            yield pages, numbers

    def _children(self, pages: NDArray[np.uint16], numbers: NDArray[np.intp]) -> NDArray[np.uint64]:
        """The pages below branch pages."""
        heads, counts = self._nodes(pages, numbers, _BRANCH, data_bytes=0)
        first = np.cumsum(counts) - counts
        wanted = np.full(len(heads), self._key_bytes)
        wanted[first] = 0  # the key that begins a branch page is left out
        if (heads[:, 3] != wanted).any() or (counts < 2).any():
            raise StorageError("a branch page without the keys it should have")
        parts = heads[:, :3].astype(np.uint64)
        numbers_below: NDArray[np.uint64] = parts[:, 0] | parts[:, 1] << np.uint64(16) | parts[:, 2] << np.uint64(32)
        return numbers_below

    def _leaf_entries(self, pages: NDArray[np.uint16], numbers: NDArray[np.intp]) -> int:
        """How many entries leaf pages hold."""
        heads, _ = self._nodes(pages, numbers, _LEAF, data_bytes=self._value_bytes)
        wrong = np.flatnonzero((heads != (self._value_bytes, 0, 0, self._key_bytes)).any(axis=1))
        if len(wrong):
            low, high, _, key_bytes = heads[wrong[0]].tolist()
            raise StorageError(f"an entry of {key_bytes} and {low + (high << 16)} bytes")
        return len(heads)

    def _nodes(
        self, pages: NDArray[np.uint16], numbers: NDArray[np.intp], kind: int, *, data_bytes: int
    ) -> tuple[NDArray[np.uint16], NDArray[np.intp]]:
        """The heads of all nodes, shape (n, 4), in the order of their keys, and how many each page has.

        Raises: StorageError: a page is of another kind or under another number, or its nodes are not where they should be.
        """
        page_bytes = self._page_bytes
        own_numbers = np.ascontiguousarray(pages[:, :4]).view("<u8").ravel()
        lower, upper = pages[:, _LOWER].astype(np.intp), pages[:, _UPPER].astype(np.intp)
        good = (own_numbers == numbers) & (pages[:, _FLAGS] == kind) & (lower % 2 == 0)
        good &= (lower > _PAGE_HEAD_BYTES) & (lower <= upper) & (upper < page_bytes)
        if not good.all():
            raise StorageError(f"page {int(numbers[np.argmin(good)])} is none of its tree")
        counts = (lower - _PAGE_HEAD_BYTES) // 2
        columns = np.arange(int(counts.max()))
        offsets = pages[:, _PAGE_HEAD_BYTES // 2 :][:, : len(columns)][columns < counts[:, None]].astype(np.intp)
        owner = np.repeat(np.arange(len(pages)), counts)
        inside = (
            (offsets % 2 == 0) & (offsets >= upper[owner]) & (offsets <= page_bytes - _NODE_HEAD_BYTES - data_bytes)
        )
        if not inside.all():
            raise StorageError(f"page {int(numbers[owner[np.argmin(inside)]])} has a node outside")
        starts, flat = owner * page_bytes + offsets, pages.ravel()
        heads = np.stack([flat[starts // 2 + part] for part in range(4)], axis=1)
        ends = starts + (_NODE_HEAD_BYTES + data_bytes + heads[:, 3] + 1) // 2 * 2
        # Nodes side by side from `upper` to the end of the page: nothing overlaps, and nothing reaches over the end.
        starts.sort()
        ends.sort()
        last = np.cumsum(counts) - 1
        following = np.append(starts[1:], 0)
        following[last] = (np.arange(len(pages)) + 1) * page_bytes
        packed = ends == following
        if not packed.all() or (starts[last - counts + 1] != np.arange(len(pages)) * page_bytes + upper).any():
            raise StorageError(f"page {int(numbers[owner[np.argmin(packed)]])} has nodes that overlap")
        return heads, counts
