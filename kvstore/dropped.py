"""Blocks that were evicted lately, by their prefix hashes: whether one comes back, and which blocks lost their beginning with it.

A table of small sets: some bits of the hash choose one, in which who was used longest ago gives way. So every step is a few array
operations, and memory is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore_api.limits import HASH_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Tags = NDArray[np.uint64]

NO_TAG: Final = np.uint64(0)  # of a block of which nothing is known
UNREACHABLE: Final = 255  # kind of blocks that live, but behind an evicted one
_WAYS: Final = 8  # entries of a set
_SET_SHIFT: Final = 16  # the bits of a tag that choose its set begin here
_SETS_MIN: Final = 1 << 9
_SPARE: Final = 2  # entries for each block that is to be remembered, so that few give way before their time


@dataclass(frozen=True, slots=True)
class Remembered:
    """Some evicted blocks. `kind` and `last_use_s` are what `add` was told."""

    kind: NDArray[np.uint8]
    last_use_s: NDArray[np.uint32]

    def evicted(self) -> Remembered:
        """Those that do not live."""
        evicted = self.kind != UNREACHABLE
        return Remembered(self.kind[evicted], self.last_use_s[evicted])


class DroppedBlocks:
    """Tags of blocks, each with a kind and the time of its last use. Not thread-safe."""

    def __init__(self, blocks_max: int) -> None:
        """Args: blocks_max: a power of two, at least 4,096; a block takes 13 bytes."""
        self._sets_max = blocks_max // _WAYS
        self._tags = np.zeros((_SETS_MIN, _WAYS), dtype=np.uint64)
        self._kind = np.zeros((_SETS_MIN, _WAYS), dtype=np.uint8)
        self._last_use_s = np.zeros((_SETS_MIN, _WAYS), dtype=np.uint32)

    def make_room_for(self, blocks: int) -> None:
        """Grow so that about so many are remembered at once, as far as that is allowed."""
        while len(self._tags) < self._sets_max and len(self._tags) * _WAYS < blocks * _SPARE:
            # One more bit of a hash says in which half of the larger table its set is.
            upper = (self._tags >> np.uint64(_SET_SHIFT) & np.uint64(len(self._tags))) != 0
            halves = ~upper, upper
            self._tags = np.concatenate([np.where(half, self._tags, NO_TAG) for half in halves])
            self._last_use_s = np.concatenate([np.where(half, self._last_use_s, np.uint32(0)) for half in halves])
            self._kind = np.concatenate([self._kind, self._kind])

    def add(self, tags: Tags, kind: NDArray[np.uint8], last_use_s: NDArray[np.uint32]) -> Remembered:
        """Remember blocks, or other things of those that are. Returns what is forgotten for them. All of shape (n,)."""
        sets = self._set(tags)
        there, ways = self._locate(tags, sets)
        self._kind[sets[there], ways[there]] = kind[there]
        self._last_use_s[sets[there], ways[there]] = last_use_s[there]
        rest = np.flatnonzero(~there & (tags != NO_TAG))
        forgotten = [np.zeros((0, 2), dtype=np.uint32)]
        while len(rest):  # one of each set at a time
            _, first = np.unique(sets[rest], return_index=True)
            now = rest[first]
            at = sets[now]
            # An empty place first: its time is 0.
            ways_now = self._last_use_s[at].argmin(axis=1)
            taken = self._tags[at, ways_now] != NO_TAG
            gone = at[taken], ways_now[taken]
            forgotten.append(np.stack([self._kind[gone], self._last_use_s[gone]], axis=1))
            self._tags[at, ways_now], self._kind[at, ways_now] = tags[now], kind[now]
            self._last_use_s[at, ways_now] = last_use_s[now]
            rest = np.delete(rest, first)
            rest = rest[~self.holds(tags[rest])]  # named twice
        both = np.concatenate(forgotten)
        return Remembered(both[:, 0].astype(np.uint8), both[:, 1])

    def find(self, tags: Tags) -> tuple[NDArray[np.bool_], Remembered]:
        """Which of the tags (shape (n,)) are remembered, and, of those, what is."""
        sets = self._set(tags)
        there, ways = self._locate(tags, sets)
        found = sets[there], ways[there]
        return there, Remembered(self._kind[found], self._last_use_s[found])

    def holds(self, tags: Tags) -> NDArray[np.bool_]:
        """Shape (n,): which of them are remembered."""
        held: NDArray[np.bool_] = (self._tags[self._set(tags)] == tags[:, None]).any(axis=1) & (tags != NO_TAG)
        return held

    def forget(self, tags: Tags) -> None:
        """They are no longer dropped."""
        sets = self._set(tags)
        there, ways = self._locate(tags, sets)
        self._tags[sets[there], ways[there]] = NO_TAG
        self._last_use_s[sets[there], ways[there]] = 0

    def sample(self, places_max: int) -> tuple[Remembered, float]:
        """A part of what is remembered, and how many each block in it stands for."""
        sets = min(len(self._tags), places_max // _WAYS)  # which hashes chose, so any are as good as others
        there = self._tags[:sets] != NO_TAG
        return Remembered(self._kind[:sets][there], self._last_use_s[:sets][there]), len(self._tags) / sets

    def _locate(self, tags: Tags, sets: NDArray[np.intp]) -> tuple[NDArray[np.bool_], NDArray[np.intp]]:
        same = self._tags[sets] == tags[:, None]
        same &= (tags != NO_TAG)[:, None]
        return same.any(axis=1), same.argmax(axis=1)

    def _set(self, tags: Tags) -> NDArray[np.intp]:
        return ((tags >> np.uint64(_SET_SHIFT)) & np.uint64(len(self._tags) - 1)).astype(np.intp)


class Children:
    """In which segment the block behind another is, where that one is elsewhere: of several the last."""

    def __init__(self, places: int) -> None:
        """Args: places: a power of two; a place takes 16 bytes."""
        self._tags = np.zeros(places, dtype=np.uint64)
        self._segments = np.zeros(places, dtype=np.int64)

    def add(self, parents: Tags, segment: int) -> None:
        """Blocks whose parents have these tags are in the segment."""
        places = self._place(parents)
        self._tags[places], self._segments[places] = parents, segment

    def segments_of(self, parents: Tags) -> set[int]:
        """Where the blocks behind these are."""
        places = self._place(parents)
        found = self._segments[places[(self._tags[places] == parents) & (parents != NO_TAG)]]
        return set(found.tolist())

    def _place(self, tags: Tags) -> NDArray[np.intp]:
        return ((tags >> np.uint64(_SET_SHIFT)) & np.uint64(len(self._tags) - 1)).astype(np.intp)


def tag_of(prefix_hash: bytes) -> int:
    """A block's tag: the first 8 bytes of its prefix hash."""
    return int.from_bytes(prefix_hash[:8], "little")


def tags_of(hashes: bytes) -> Tags:
    """The same for prefix hashes that follow one another."""
    return np.frombuffer(hashes, dtype="<u8").reshape(-1, HASH_BYTES // 8)[:, 0]
