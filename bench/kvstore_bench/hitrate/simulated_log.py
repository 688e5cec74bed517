"""The store as arrays: what decides about hits, and nothing else.

That is: segments that fill by class, room made for each batch of a put, leases, housekeeping, shares of the capacity, and all
sizes as `du` would count them. What blocks are worth, which segment goes and what is moved out of it is decided by the functions
that the store itself calls, in `kvstore.expiry`, `kvstore.census`, `kvstore.worth` and `kvstore.victims`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore.catalog import ClassRecord
from kvstore.census import colder_half, taken_bytes
from kvstore.expiry import TtlTable
from kvstore.log import format as fmt
from kvstore.log.segment import row_capacity
from kvstore.store import segment_size_bytes
from kvstore.traffic import TrafficClass
from kvstore.types import ClassId
from kvstore.victims import (
    COMPACT_BELOW_LIVE_SHARE,
    EXPIRES_SOON_SHARE,
    RECLAIMS_PER_TICK,
    SWEEP_BELOW_LIVE_SHARE,
    TICKS_PER_COMPACTION,
    Limits,
    at_once,
    least_worth,
)
from kvstore.worth import segment_worth, worth_keeping
from kvstore_bench.hitrate.replay import Counts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvstore_bench.hitrate.settings import ReplaySettings

_NOWHERE: Final = -1
_NEW_SEGMENT_BYTES: Final = 4 * fmt.ALIGNMENT_BYTES
# Of the index, as measured on the store: entries in a leaf, leaves under a branch, and the file's pages, with those that commits
# write anew. And the sizes of all other files together.
_ENTRIES_PER_LEAF: Final = 36
_LEAVES_PER_BRANCH: Final = 36
_DEPTH: Final = 3
_FILE_PAGES_PER_LEAF: Final = 1.55
_FILE_PAGES: Final = 32
_FILES_BYTES: Final = 12 << 10


@dataclass(frozen=True, slots=True)
class _Summary:
    """What a segment held when it was counted."""

    live: int
    worth: float
    fading: float
    as_of_s: float
    next_expiry_s: float
    changes: int


class _Segment:
    """A file: the blocks in its slots, as far as they have not moved on."""

    def __init__(self, number: int, class_id: int, rows: int) -> None:
        self.number, self.class_id = number, class_id
        self.blocks = np.empty(rows, dtype=np.int32)
        self.count = 0
        self.lease_until_s = 0.0
        self.changes = 0
        self.summary = _Summary(0, 0.0, 0.0, 0.0, math.inf, -1)


@dataclass(frozen=True, slots=True)
class _Candidate:
    segment: _Segment
    live: int
    worth: float

    @property
    def lease_until_s(self) -> float:
        return self.segment.lease_until_s

    @property
    def live_share(self) -> float:
        return self.live / max(1, self.segment.count)


class _NoRoomError(Exception):
    """Nothing more can be reclaimed now."""


class SimulatedLog:
    """Blocks are numbers; each is in at most one slot of one segment."""

    def __init__(self, unique_blocks: int, settings: ReplaySettings) -> None:
        config = settings.store_config()
        self._bytes_put = self._bytes_written = self._evicted = self._expired = 0
        self._lease_s = config.lease_s
        self._capacity_bytes = int(config.capacity)
        self._segment_bytes = segment_size_bytes(config)
        self._layout = fmt.Layout(row_capacity(self._segment_bytes))
        self._block_bytes = settings.block_bytes
        self._taken_bytes = fmt.align(settings.block_bytes)
        rows = (self._segment_bytes - self._layout.payload_offset) // self._taken_bytes
        self._rows = min(self._layout.row_capacity, rows)
        self._limits = Limits.of(self._capacity_bytes, self._segment_bytes, config.high_watermark, config.low_watermark)
        self._ttls = TtlTable(
            ClassRecord(ClassId(number), TrafficClass(name, ttl_s), ttl_s)
            for number, (name, ttl_s) in enumerate(settings.ttls_s.items(), 1)
        )
        self._share_bytes = {
            number: settings.class_shares.get(name, 0.0) * self._capacity_bytes
            for number, name in enumerate(settings.ttls_s, 1)
        }
        self._uses = np.zeros((unique_blocks, fmt.USE_COLUMNS), dtype=np.uint32)
        self._uses[:, fmt.USE_LENGTH] = settings.block_bytes
        self._segment_of = np.full(unique_blocks, _NOWHERE, dtype=np.int32)
        self._slot_of = np.zeros(unique_blocks, dtype=np.int32)
        self._segments: dict[int, _Segment] = {}
        self._retiring: list[_Segment] = []
        self._open: dict[tuple[int, bool], _Segment] = {}  # by class, and whether it takes moved blocks
        self._uncommitted: set[int] = set()
        self._unindexed = 0  # blocks of the put that is being written
        self._next_number = 0
        self._used_bytes = 0  # of segment files, retired ones included
        self._indexed = self._indexed_max = 0
        self._protected: set[int] = set()
        self._above_low = False
        self._ticks = 0

    # Requests

    def match(self, chain: NDArray[np.int32], class_id: int, now_s: float) -> int:
        """Leading blocks that are alive; they are used now."""
        if not len(chain):
            return 0
        alive = self._alive(chain, now_s)
        hit = len(chain) if alive.all() else int(np.argmin(alive))
        found = chain[:hit]
        if hit:
            for number in np.unique(self._segment_of[found]).tolist():
                segment = self._segments[number]
                segment.lease_until_s = max(segment.lease_until_s, math.ceil(now_s + self._lease_s))
            self._touch(found, class_id, int(now_s))
        return hit

    def put(self, blocks: NDArray[np.int32], class_id: int, now_s: float) -> None:
        """Store the blocks that are not alive; the others are used now."""
        alive = self._alive(blocks, now_s)
        self._touch(blocks[alive], class_id, int(now_s))
        new = blocks[~alive]
        self._leave(new)  # what is left of them has expired
        start = 0
        while start < len(new):
            count = self._append_some(new[start:], class_id, now_s)
            start += count
        self._uncommitted.clear()
        self._unindexed = 0

    def _alive(self, blocks: NDArray[np.int32], now_s: float) -> NDArray[np.bool_]:
        alive: NDArray[np.bool_] = self._ttls.live(self._uses[blocks], now_s)
        alive &= self._segment_of[blocks] != _NOWHERE
        return alive

    def _touch(self, blocks: NDArray[np.int32], class_id: int, now_s: int) -> None:
        """As `Segment.touch`."""
        before = self._uses[blocks, class_id]
        self._uses[blocks, fmt.USE_LENGTH] |= np.where(before < now_s, np.uint32(fmt.REUSED), np.uint32(0))
        self._uses[blocks, class_id] = np.maximum(before, np.uint32(now_s))

    def _leave(self, blocks: NDArray[np.int32]) -> None:
        """The blocks' slots hold nothing that lives any more."""
        there = blocks[self._segment_of[blocks] != _NOWHERE]
        for number in np.unique(self._segment_of[there]).tolist():
            self._segments[number].changes += 1
        self._segment_of[there] = _NOWHERE
        self._indexed -= len(there)
        self._expired += len(there)

    # Writing

    def _append_some(self, blocks: NDArray[np.int32], class_id: int, now_s: float) -> int:
        """Append as many as one batch takes, as `LogWriter._batch_with_room`; returns how many are dealt with."""
        batch = blocks
        try:
            batch = blocks[: self._room_in(self._segment_with_room(class_id, now_s))]
            payload_bytes = len(batch) * self._taken_bytes
            table_bytes = len(batch) * (fmt.ROW_BYTES + fmt.USE_BYTES) + 2 * fmt.ALIGNMENT_BYTES
            self._make_room(payload_bytes + table_bytes + _NEW_SEGMENT_BYTES, now_s, self._unindexed + len(batch))
            segment = self._segment_with_room(class_id, now_s)
            batch = batch[: self._room_in(segment)]
        except _NoRoomError:
            return len(batch)  # rejected
        self._uses[batch, : fmt.LAST_CLASS_COLUMN + 1] = 0
        self._uses[batch, class_id] = int(now_s)
        self._uses[batch, fmt.USE_LENGTH] = self._block_bytes
        self._place(segment, batch)
        self._uncommitted.add(segment.number)
        self._unindexed += len(batch)
        self._bytes_put += len(batch) * self._block_bytes
        return len(batch)

    def _segment_with_room(self, class_id: int, now_s: float) -> _Segment:
        segment = self._roomy((class_id, False))
        if segment is None:
            self._make_room(_NEW_SEGMENT_BYTES, now_s, self._unindexed)
            segment = self._open[class_id, False] = self._new_segment(class_id)
        return segment

    def _roomy(self, stream: tuple[int, bool]) -> _Segment | None:
        segment = self._open.get(stream)
        if segment is not None and not self._room_in(segment):
            del self._open[stream]
            return None
        return segment

    def _new_segment(self, class_id: int) -> _Segment:
        segment = _Segment(self._next_number, class_id, self._rows)
        self._segments[segment.number] = segment
        self._next_number += 1
        self._used_bytes += self._file_bytes(0)
        return segment

    def _room_in(self, segment: _Segment) -> int:
        return self._rows - segment.count

    def _place(self, segment: _Segment, blocks: NDArray[np.int32]) -> None:
        first, end = segment.count, segment.count + len(blocks)
        segment.blocks[first:end] = blocks
        self._segment_of[blocks], self._slot_of[blocks] = segment.number, np.arange(first, end)
        self._used_bytes += self._file_bytes(end) - self._file_bytes(first)
        segment.count = end
        segment.changes += 1
        self._indexed += len(blocks)
        self._indexed_max = max(self._indexed_max, self._indexed)
        self._bytes_written += len(blocks) * (self._taken_bytes + fmt.ROW_BYTES + fmt.USE_BYTES)

    def _file_bytes(self, count: int) -> int:
        """What `du` counts of a segment file with so many slots taken."""
        uses = fmt.align(fmt.HEADER_BYTES + count * fmt.USE_BYTES)
        return uses + fmt.align(count * fmt.ROW_BYTES) + count * self._taken_bytes

    # Room

    def _used(self) -> int:
        index_pages = _FILE_PAGES + int(self._indexed_max / _ENTRIES_PER_LEAF * _FILE_PAGES_PER_LEAF)
        return self._used_bytes + _FILES_BYTES + index_pages * fmt.ALIGNMENT_BYTES

    def _put_limit(self, new_blocks: int) -> int:
        """As in `Reclaimer.make_room`: less room for puts where a commit may make the index grow by more than its slack."""
        growth_pages = max(self._growth_pages(self._layout.row_capacity, 0), self._growth_pages(0, new_blocks))
        return self._limits.put - max(0, growth_pages * fmt.ALIGNMENT_BYTES - self._limits.index_slack)

    def _growth_pages(self, changed: int, added: int) -> int:
        """As `BlockIndex.growth_bytes`."""
        all_leaves = -(-self._indexed // _ENTRIES_PER_LEAF)
        leaves = min(changed + added, all_leaves)
        branches = min(leaves * _DEPTH, -(-all_leaves // _LEAVES_PER_BRANCH))
        split = min(added, leaves) + added // 32
        return leaves + branches + split + split // 32 + 4

    def _retiring_bytes(self) -> int:
        return sum(self._file_bytes(segment.count) for segment in self._retiring)

    def _reap(self, now_s: float) -> None:
        for segment in self._retiring:
            segment.lease_until_s = min(segment.lease_until_s, math.ceil(now_s + self._lease_s))
        gone = [segment for segment in self._retiring if segment.lease_until_s < now_s]
        self._retiring = [segment for segment in self._retiring if segment.lease_until_s >= now_s]
        self._used_bytes -= sum(self._file_bytes(segment.count) for segment in gone)

    def _make_room(self, need_bytes: int, now_s: float, new_blocks: int) -> None:
        """As `Reclaimer.make_room`. Raises: _NoRoomError."""
        limit = self._put_limit(new_blocks)
        if self._used() + need_bytes <= limit:
            return
        self._reap(now_s)
        while (used := self._used()) + need_bytes > limit:
            coming = self._retiring_bytes()
            enough_coming = used - coming + need_bytes <= min(self._limits.low, limit)
            if need_bytes > limit or enough_coming or not self._reclaim_one(now_s, urgent=True):
                raise _NoRoomError

    def tick(self, now_s: float) -> None:
        """As `Reclaimer.tick`."""
        self._reap(now_s)
        for segment in self._reclaimable():
            if not self._summary(segment, now_s).live:
                self._reclaim(segment, np.zeros(0, dtype=np.intp), now_s)
        for _ in range(RECLAIMS_PER_TICK):
            used = self._used() - self._retiring_bytes()
            self._above_low = used > (self._limits.low if self._above_low else self._limits.high)
            if not self._above_low or not self._reclaim_one(now_s, urgent=False):
                break
        self._ticks += 1
        if self._ticks % TICKS_PER_COMPACTION == 0:
            self._compact_one(now_s)

    def counts(self) -> Counts:
        """What was done until now."""
        return Counts(self._bytes_put, self._bytes_written, self._evicted, self._expired)

    def live_bytes(self, now_s: float) -> int:
        """Payload bytes of live blocks."""
        return sum(self._summary(s, now_s).live for s in self._segments.values()) * self._block_bytes

    def _compact_one(self, now_s: float) -> None:
        dead = [c for c in self._candidates(now_s) if c.live_share < SWEEP_BELOW_LIVE_SHARE]
        for candidate in sorted(dead, key=lambda candidate: candidate.live_share):
            live = self._live_slots(candidate.segment, now_s)
            expiry_s, _, _ = self._ttls.prospects(self._uses[candidate.segment.blocks[live]], now_s)
            left_s = float(expiry_s.max(initial=0)) - now_s
            if left_s > EXPIRES_SOON_SHARE * self._ttls.ttl_s(candidate.segment.class_id):
                self._reclaim(candidate.segment, live, now_s, may_lose=False)
                break

    def _reclaim_one(self, now_s: float, *, urgent: bool) -> bool:
        """As `Reclaimer._reclaim_one`."""
        self._protect(now_s)
        candidates: Sequence[_Candidate] = self._candidates(now_s)
        if urgent:
            candidates = at_once(candidates, now_s)
        if not candidates:
            return False
        deadest = min(candidates, key=lambda candidate: candidate.live_share)
        if deadest.live_share < COMPACT_BELOW_LIVE_SHARE:
            live = self._live_slots(deadest.segment, now_s)
            if self._reclaim(deadest.segment, live, now_s, may_lose=False):
                return True
        typical = float(np.median([candidate.worth for candidate in candidates]))
        victim = least_worth(candidates, lambda candidate: self._renewed(candidate, now_s))
        self._reclaim(victim.segment, self._worth_keeping(victim.segment, typical, now_s), now_s)
        return True

    def _reclaimable(self) -> list[_Segment]:
        return [s for s in self._segments.values() if s.count and s.number not in self._uncommitted]

    def _candidates(self, now_s: float) -> list[_Candidate]:
        return [self._candidate(segment, now_s) for segment in self._reclaimable()]

    def _candidate(self, segment: _Segment, now_s: float) -> _Candidate:
        summary = self._summary(segment, now_s)
        protected = summary.live if segment.class_id in self._protected else 0
        return _Candidate(segment, summary.live, segment_worth(summary, now_s, summary.live, protected))

    def _renewed(self, candidate: _Candidate, now_s: float) -> _Candidate:
        self._renew(candidate.segment, now_s)
        return self._candidate(candidate.segment, now_s)

    def _summary(self, segment: _Segment, now_s: float) -> _Summary:
        summary = segment.summary
        is_right = summary.changes == segment.changes and now_s < summary.next_expiry_s
        return summary if is_right else self._renew(segment, now_s)

    def _renew(self, segment: _Segment, now_s: float) -> _Summary:
        """As `Census.renew`."""
        uses = self._uses[segment.blocks[self._live_slots(segment, now_s)]]
        worth, fading, next_expiry_s = 0.0, 0.0, math.inf
        if len(uses):
            expiries_s, worths, fadings = self._ttls.prospects(uses, now_s)
            taken = taken_bytes(np.full(len(uses), self._block_bytes))
            worth, fading = colder_half(worths, fadings, taken)
            next_expiry_s = float(expiries_s.min())
        segment.summary = _Summary(len(uses), worth, fading, now_s, next_expiry_s, segment.changes)
        return segment.summary

    def _live_slots(self, segment: _Segment, now_s: float) -> NDArray[np.intp]:
        blocks = segment.blocks[: segment.count]
        here = (self._segment_of[blocks] == segment.number) & (self._slot_of[blocks] == np.arange(segment.count))
        return np.flatnonzero(here & self._ttls.live(self._uses[blocks], now_s))

    def _protect(self, now_s: float) -> None:
        """As `QuotaBook.refresh`: which classes hold no more than is their own."""
        if not any(self._share_bytes.values()):
            return
        held = dict.fromkeys(self._share_bytes, 0)
        for segment in self._segments.values():
            held[segment.class_id] += self._summary(segment, now_s).live * self._taken_bytes
        self._protected = {number for number, share in self._share_bytes.items() if share and held[number] <= share}

    def _worth_keeping(self, segment: _Segment, typical: float, now_s: float) -> NDArray[np.intp]:
        uses = self._uses[segment.blocks[: segment.count]]
        live = np.zeros(segment.count, dtype=bool)
        live[self._live_slots(segment, now_s)] = True
        protected = np.full(segment.count, segment.class_id in self._protected)
        payload_bytes = segment.count * self._taken_bytes
        return np.flatnonzero(worth_keeping(uses, live, protected, self._ttls, typical, now_s, payload_bytes))

    def _reclaim(self, segment: _Segment, kept: NDArray[np.intp], now_s: float, *, may_lose: bool = True) -> bool:
        """As `Reclaimer._reclaim`: move the slots to keep, drop the others, retire the file."""
        for stream in [stream for stream, other in self._open.items() if other is segment]:
            del self._open[stream]
        if self._used() + len(kept) * self._taken_bytes + self._limits.move_slack > self._capacity_bytes:
            if not may_lose:
                return False
            kept = kept[:0]
        live = self._live_slots(segment, now_s)
        blocks = segment.blocks[: segment.count]
        here = blocks[
            (self._segment_of[blocks] == segment.number) & (self._slot_of[blocks] == np.arange(segment.count))
        ]
        self._evicted += len(live) - len(kept)
        self._expired += len(here) - len(live)
        moved = blocks[kept]
        self._segment_of[here] = _NOWHERE
        self._indexed -= len(here)
        self._move(moved, segment.class_id)
        del self._segments[segment.number]
        self._retiring.append(segment)
        self._reap(now_s)
        return True

    def _move(self, blocks: NDArray[np.int32], class_id: int) -> None:
        """As `LogWriter.rewrite`."""
        stream, start = (class_id, True), 0
        while start < len(blocks):
            segment = self._roomy(stream)
            if segment is None:
                segment = self._open[stream] = self._new_segment(class_id)
            some = blocks[start : start + self._room_in(segment)]
            self._place(segment, some)
            start += len(some)
