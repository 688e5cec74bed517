"""Checks an index file from end to end, in a process of its own: `python -m kvstore.index_check DIRECTORY`.

LMDB trusts its pages. Following a damaged one can end in a signal, which no handler in the server could survive, so a file that
was not closed in order is looked through here first: every page of the tree, without LMDB, for what LMDB would rely on. All
entries have one size, which makes that a matter of arrays: 10 million take a second, walking them one by one takes several.
Exits with 0 when it is whole.
"""

from __future__ import annotations

import mmap
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import lmdb
import numpy as np

from kvstore.errors import StorageError
from kvstore.index import ENTRY_BYTES, open_environment

if TYPE_CHECKING:
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
_PAGES_AT_A_TIME = 1024


class _DamagedError(Exception):
    """A page that LMDB must not follow."""


def check(directory: Path) -> str | None:
    """What is wrong, or None; may also end the process."""
    try:
        env = open_environment(directory, map_size_bytes=0)
        blocks, main = env.open_db(b"blocks", create=False), env.open_db(None)
        with env.begin() as txn:
            tree = txn.get(b"blocks", db=main) or b""
            if len(tree) != _TREE.size:
                return f"what it says of its tree has {len(tree)} bytes"
            _check_tree(directory / "data.mdb", env.stat()["psize"], tree)
        with env.begin(write=True, db=blocks) as txn:
            # A write looks at the list of free pages; nothing of it is kept.
            txn.put(bytes(ENTRY_BYTES[0]), bytes(ENTRY_BYTES[1]))
            txn.abort()
    except (lmdb.Error, StorageError, OSError, _DamagedError) as error:
        return str(error)
    return None


def _check_tree(path: Path, page_bytes: int, tree: bytes) -> None:
    """Raises: _DamagedError."""
    _, depth, _, _, _, entries, root = _TREE.unpack(tree)
    found = 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        pages = np.frombuffer(mapped, dtype="<u2", count=len(mapped) // page_bytes * page_bytes // 2)
        pages = pages.reshape(-1, page_bytes // 2)
        try:
            level = np.array([root] if root != _NO_PAGE else [], dtype=np.uint64)
            for height in range(depth - 1, -1, -1):
                _check_numbers(level, len(pages))
                parts = range(0, len(level), _PAGES_AT_A_TIME)
                chunks = (level[start : start + _PAGES_AT_A_TIME].astype(np.intp) for start in parts)
                if height:
                    level = np.concatenate([_children(pages[numbers], numbers, page_bytes) for numbers in chunks])
                else:
                    found = sum(_leaf_entries(pages[numbers], numbers, page_bytes) for numbers in chunks)
        finally:
            del pages  # or the mapping could not be closed
    if found != entries:
        raise _DamagedError(f"{found} entries, it says {entries}")


def _check_numbers(level: NDArray[np.uint64], page_count: int) -> None:
    """Every page is in the file, and has one parent."""
    if len(level) and int(level.max()) >= page_count:
        raise _DamagedError(f"a page {int(level.max())}, the file has {page_count}")
    if len(np.unique(level)) < len(level):
        raise _DamagedError("a page with two parents")


def _children(pages: NDArray[np.uint16], numbers: NDArray[np.intp], page_bytes: int) -> NDArray[np.uint64]:
    """The pages below branch pages."""
    heads, counts = _nodes(pages, numbers, _BRANCH, page_bytes, data_bytes=0)
    first = np.cumsum(counts) - counts
    wanted = np.full(len(heads), ENTRY_BYTES[0])
    wanted[first] = 0  # the key that begins a branch page is left out
    if (heads[:, 3] != wanted).any() or (counts < 2).any():
        raise _DamagedError("a branch page without the keys it should have")
    parts = heads[:, :3].astype(np.uint64)
    numbers_below: NDArray[np.uint64] = parts[:, 0] | parts[:, 1] << np.uint64(16) | parts[:, 2] << np.uint64(32)
    return numbers_below


def _leaf_entries(pages: NDArray[np.uint16], numbers: NDArray[np.intp], page_bytes: int) -> int:
    """How many entries leaf pages hold."""
    heads, _ = _nodes(pages, numbers, _LEAF, page_bytes, data_bytes=ENTRY_BYTES[1])
    wrong = np.flatnonzero((heads != (ENTRY_BYTES[1], 0, 0, ENTRY_BYTES[0])).any(axis=1))
    if len(wrong):
        low, high, _, key_bytes = heads[wrong[0]].tolist()
        raise _DamagedError(f"an entry of {key_bytes} and {low + (high << 16)} bytes")
    return len(heads)


def _nodes(
    pages: NDArray[np.uint16], numbers: NDArray[np.intp], kind: int, page_bytes: int, *, data_bytes: int
) -> tuple[NDArray[np.uint16], NDArray[np.intp]]:
    """The heads of all nodes, shape (n, 4), in the order of their keys, and how many each page has.

    Raises: _DamagedError: a page is of another kind or under another number, or its nodes are not where they should be.
    """
    own_numbers = np.ascontiguousarray(pages[:, :4]).view("<u8").ravel()
    lower, upper = pages[:, _LOWER].astype(np.intp), pages[:, _UPPER].astype(np.intp)
    good = (own_numbers == numbers) & (pages[:, _FLAGS] == kind) & (lower % 2 == 0)
    good &= (lower > _PAGE_HEAD_BYTES) & (lower <= upper) & (upper < page_bytes)
    if not good.all():
        raise _DamagedError(f"page {int(numbers[np.argmin(good)])} is none of its tree")
    counts = (lower - _PAGE_HEAD_BYTES) // 2
    columns = np.arange(int(counts.max()))
    offsets = pages[:, _PAGE_HEAD_BYTES // 2 :][:, : len(columns)][columns < counts[:, None]].astype(np.intp)
    owner = np.repeat(np.arange(len(pages)), counts)
    inside = (offsets % 2 == 0) & (offsets >= upper[owner]) & (offsets <= page_bytes - _NODE_HEAD_BYTES - data_bytes)
    if not inside.all():
        raise _DamagedError(f"page {int(numbers[owner[np.argmin(inside)]])} has a node outside")
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
        raise _DamagedError(f"page {int(numbers[owner[np.argmin(packed)]])} has nodes that overlap")
    return heads, counts


if __name__ == "__main__":
    sys.exit(check(Path(sys.argv[1])))
