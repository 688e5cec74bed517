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
from kvstore.census import taken_bytes
from kvstore.expiry import TtlTable
from kvstore.index_room import Tree, growth_pages, reserved_bytes
from kvstore.log import format as fmt
from kvstore.log.segment import marks_of, row_capacity, used_once_more
from kvstore.log.streams import Lanes, Stream, crowded
from kvstore.log.writer import NEW_SEGMENT_BYTES
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
    Price,
    Prices,
    at_once,
    cheapest,
    some_of,
)
from kvstore.worth import PROTECTION, Valuation, middle_age_s
from kvstore_bench.hitrate.prefix_hashes import PrefixHashes
from kvstore_bench.hitrate.replay import Counts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvstore.dropped import Tags
    from kvstore_bench.hitrate.settings import ReplaySettings

_NOWHERE: Final = -1


@dataclass(frozen=True, slots=True)
class _Summary:
    """What a segment held when it was counted."""

    live: int
    next_expiry_s: float
    changes: int


class _Segment:
    """A file: the blocks in its slots, as far as they have not moved on."""

    def __init__(self, segment_id: int, class_id: int, rows: int) -> None:
        self.segment_id, self.class_id = segment_id, class_id
        self.blocks = np.empty(rows, dtype=np.int32)
        self.count = 0
        self.lease_until_s = 0.0
        self.changes = 0
        self.summary = _Summary(0, math.inf, -1)
        # Slots of blocks that had expired when they were put again, and their use rows as they were.
        self.superseded: list[tuple[NDArray[np.int32], NDArray[np.uint32]]] = []


@dataclass(slots=True)  # not frozen: that takes three times as long, and all segments are candidates at each choice
class _Candidate:
    segment: _Segment
    live_share: float
    cost: float

    @property
    def lease_until_s(self) -> float:
        return self.segment.lease_until_s


class _NoRoomError(Exception):
    """Nothing more can be reclaimed now."""


class SimulatedLog:
    """Blocks are numbers; each is in at most one slot of one segment."""

    def __init__(self, unique_blocks: int, settings: ReplaySettings) -> None:
        config = settings.store_config()
        self._bytes_put = self._bytes_written = self._evicted = self._expired = 0
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
        self._valuation = Valuation(lambda: self._ttls)
        self._prices = Prices(self._price, self._valuation.repriced)
        self._tags = np.zeros((unique_blocks, 2), dtype=np.uint64)  # each block's, and that of the one before it
        self._tags[:, 0] = PrefixHashes(unique_blocks).tags
        self._uses = np.zeros((unique_blocks, fmt.USE_COLUMNS), dtype=np.uint32)
        self._uses[:, fmt.USE_LENGTH] = settings.block_bytes
        self._segment_of = np.full(unique_blocks, _NOWHERE, dtype=np.int32)
        self._slot_of = np.zeros(unique_blocks, dtype=np.int32)
        self._segments: dict[int, _Segment] = {}
        self._retiring: list[_Segment] = []
        self._open: dict[Stream, _Segment] = {}
        self._lanes = Lanes(
            self._open,
            self._tags_in,
            lambda: crowded(len(self._segments), self._capacity_bytes, self._segment_bytes),
            self._segment_bytes,
        )
        self._uncommitted: set[int] = set()
        self._unindexed = 0  # blocks of the put that is being written
        self._next_number = 0
        self._used_bytes = 0  # of segment files, retired ones included
        self._indexed = self._indexed_max = 0  # as of the last commit
        self._added = 0  # entries that the put that is being written adds
        self._protected: set[int] = set()
        self._above_low = False
        self._ticks = 0
        self._now_s = 0.0

    # Requests

    def match(self, chain: NDArray[np.int32], class_id: int, now_s: float) -> int:
        """Leading blocks that are alive; they are used now."""
        if not len(chain):
            return 0
        alive = self._alive(chain, now_s)
        hit = len(chain) if alive.all() else int(np.argmin(alive))
        found = chain[:hit]
        if hit:
            self._touch(found, class_id, int(now_s))
        return hit

    def put(self, chain: NDArray[np.int32], first: int, class_id: int, now_s: float) -> None:
        """Store the blocks of the chain from `first` on that are not alive; the others are used now."""
        blocks = chain[first:]
        if not len(blocks):
            return
        self._tags[chain[1:], 1] = self._tags[chain[:-1], 0]
        alive = self._alive(blocks, now_s)
        self._touch(blocks[alive], class_id, int(now_s))
        new = blocks[~alive]
        seen = self._valuation.arrive(self._tags[blocks, 0], ~alive, int(now_s))
        self._added = 0
        levels = self._valuation.levels_of_new(class_id, seen)
        lane = self._lane(chain, first + np.flatnonzero(~alive), class_id)
        for level in dict.fromkeys(levels.tolist()):
            part = np.flatnonzero(levels == level)
            start = 0
            while start < len(part):
                some = part[start:]
                start += self._append_some(new[some], seen[some], Stream(class_id, level, lane=lane), now_s)
        for stream in self._lanes.surplus():
            del self._open[stream]
        self._uncommitted.clear()
        self._unindexed = 0
        self._indexed += self._added
        self._indexed_max = max(self._indexed_max, self._indexed)

    def _lane(self, chain: NDArray[np.int32], new: NDArray[np.intp], class_id: int) -> int:
        """As `LogWriter._by_stream`. Args: new: positions in the chain."""
        if not len(new):
            return 0
        return self._lanes.of(class_id, int(self._tags[chain[new[0]], 1]), int(new[-1] + 1) * self._taken_bytes)

    def _alive(self, blocks: NDArray[np.int32], now_s: float) -> NDArray[np.bool_]:
        alive: NDArray[np.bool_] = self._ttls.live(self._uses[blocks], now_s)
        alive &= self._segment_of[blocks] != _NOWHERE
        return alive

    def _touch(self, blocks: NDArray[np.int32], class_id: int, now_s: int) -> None:
        """As `Segment.touch`."""
        uses = self._uses[blocks]
        self._uses[blocks, fmt.USE_LENGTH] = used_once_more(uses, now_s)
        self._uses[blocks, class_id] = np.maximum(uses[:, class_id], np.uint32(now_s))
        self._valuation.note_use(uses, now_s)

    def _supersede(self, blocks: NDArray[np.int32]) -> None:
        """As `LogWriter._supersede`: what is left of the blocks has expired, and stays in its slots until these are reclaimed."""
        there = blocks[self._segment_of[blocks] != _NOWHERE]
        for number in np.unique(self._segment_of[there]).tolist():
            segment, left = self._segments[number], there[self._segment_of[there] == number]
            segment.superseded.append((self._slot_of[left], self._uses[left]))
            segment.changes += 1
        self._added += len(blocks) - len(there)
        self._expired += len(there)

    def _use_table(self, segment: _Segment) -> NDArray[np.uint32]:
        """As `Segment.uses`."""
        uses = self._uses[segment.blocks[: segment.count]]
        for slots, before in segment.superseded:
            uses[slots] = before
        return uses

    # Writing

    def _append_some(self, blocks: NDArray[np.int32], seen: NDArray[np.uint32], stream: Stream, now_s: float) -> int:
        """Append as many as one batch takes, as `LogWriter._batch_with_room`; returns how many are dealt with."""
        try:
            batch = blocks[: self._room_in(self._segment_with_room(stream, now_s))]
            payload_bytes = len(batch) * self._taken_bytes
            table_bytes = len(batch) * (fmt.ROW_BYTES + fmt.USE_BYTES) + 2 * fmt.ALIGNMENT_BYTES
            self._make_room(payload_bytes + table_bytes + NEW_SEGMENT_BYTES, now_s, self._unindexed + len(batch))
            segment = self._segment_with_room(stream, now_s)
            batch = batch[: self._room_in(segment)]
        except _NoRoomError:
            return len(blocks)  # rejected, all that is left for this stream
        self._supersede(batch)
        self._uses[batch, : fmt.LAST_CLASS_COLUMN + 1] = 0
        self._uses[batch, stream.class_id] = int(now_s)
        self._uses[batch, fmt.USE_LENGTH] = marks_of(seen[: len(batch)]) | np.uint32(self._block_bytes)
        self._place(segment, batch)
        self._uncommitted.add(segment.segment_id)
        self._unindexed += len(batch)
        self._bytes_put += len(batch) * self._block_bytes
        return len(batch)

    def _segment_with_room(self, stream: Stream, now_s: float) -> _Segment:
        segment = self._roomy(stream)
        if segment is None:
            self._make_room(NEW_SEGMENT_BYTES, now_s, self._unindexed)
            segment = self._open[stream] = self._new_segment(stream.class_id)
        return segment

    def _roomy(self, stream: Stream) -> _Segment | None:
        segment = self._open.get(stream)
        if segment is not None and not self._room_in(segment):
            del self._open[stream]
            return None
        return segment

    def _new_segment(self, class_id: int) -> _Segment:
        segment = _Segment(self._next_number, class_id, self._rows)
        self._segments[segment.segment_id] = segment
        self._next_number += 1
        self._used_bytes += self._file_bytes(0)
        return segment

    def _room_in(self, segment: _Segment) -> int:
        return self._rows - segment.count

    def _tags_in(self, segment: _Segment) -> Tags:
        tags: Tags = self._tags[segment.blocks[: segment.count], 0]
        return tags

    def _place(self, segment: _Segment, blocks: NDArray[np.int32]) -> None:
        first, end = segment.count, segment.count + len(blocks)
        segment.blocks[first:end] = blocks
        self._valuation.place(segment.segment_id, self._tags[blocks])
        self._segment_of[blocks], self._slot_of[blocks] = segment.segment_id, np.arange(first, end)
        self._used_bytes += self._file_bytes(end) - self._file_bytes(first)
        segment.count = end
        segment.changes += 1
        self._bytes_written += len(blocks) * (self._taken_bytes + fmt.ROW_BYTES + fmt.USE_BYTES)

    def _file_bytes(self, count: int) -> int:
        """What `du` counts of a segment file with so many slots taken."""
        uses = fmt.align(fmt.HEADER_BYTES + count * fmt.USE_BYTES)
        return uses + fmt.align(count * fmt.ROW_BYTES) + count * self._taken_bytes

    # Room

    def _used(self) -> int:
        """As `Reclaimer._counted_bytes`, while index and small files are within what is set aside for them."""
        return self._used_bytes + reserved_bytes(self._indexed_max, self._capacity_bytes)

    def _put_limit(self, new_blocks: int) -> int:
        """As in `Reclaimer.make_room`: less room for puts where a commit may make the index grow by more than its slack."""
        growth_bytes = max(self._growth_bytes(self._layout.row_capacity), self._growth_bytes(0, new_blocks))
        return self._limits.put - max(0, growth_bytes - self._limits.index_slack)

    def _growth_bytes(self, changed: int, added: int = 0) -> int:
        """As `BlockIndex.growth_bytes`."""
        return fmt.ALIGNMENT_BYTES * growth_pages(Tree.assumed(self._indexed), changed, added)

    def _retiring_bytes(self) -> int:
        return sum(self._file_bytes(segment.count) for segment in self._retiring)

    def _reap(self, now_s: float) -> None:
        self._used_bytes -= self._retiring_bytes()
        self._retiring = []

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
        self._valuation.learn_if_due(lambda: [self._use_table(segment) for segment in self._segments.values()], now_s)
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
        shares = [
            (self._summary(segment, now_s).live / max(1, segment.count), segment) for segment in self._reclaimable()
        ]
        for _, segment in sorted(
            (pair for pair in shares if pair[0] < SWEEP_BELOW_LIVE_SHARE), key=lambda pair: pair[0]
        ):
            live = self._live_slots(segment, now_s)
            left_s = float(self._ttls.expiry_s(self._uses[segment.blocks[live]]).max(initial=0)) - now_s
            if left_s > EXPIRES_SOON_SHARE * self._ttls.ttl_s(segment.class_id):
                self._reclaim(segment, live, now_s, may_lose=False)
                break

    def _reclaim_one(self, now_s: float, *, urgent: bool) -> bool:
        """As `Reclaimer._reclaim_one`."""
        self._now_s = now_s
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
        if math.isnan(self._valuation.threshold):
            self._valuation.begin_threshold(
                self._worths(candidate.segment, now_s)[0] for candidate in some_of(candidates)
            )
        victim = cheapest(candidates, lambda candidate: self._renewed(candidate, now_s))
        self._evict_from(victim.segment, now_s)
        return True

    def _evict_from(self, segment: _Segment, now_s: float) -> None:
        """As `Reclaimer._evict_from`."""
        worth, live = self._worths(segment, now_s)
        if segment.class_id in self._protected:
            worth += PROTECTION
        size_bytes = segment.count * self._taken_bytes
        keep = self._valuation.judge(worth, live, self._taken(segment), size_bytes).keep
        self._reclaim(segment, np.flatnonzero(keep), now_s)
        chosen_bytes = float((keep & (worth < PROTECTION)).sum()) * self._taken_bytes
        dropped_bytes = size_bytes - float(keep.sum()) * self._taken_bytes
        self._valuation.steer(chosen_bytes, dropped_bytes, self._segment_bytes)

    def _reclaimable(self) -> list[_Segment]:
        opened = {segment.segment_id for segment in self._open.values()}
        return [
            segment
            for number, segment in self._segments.items()
            if number not in self._uncommitted and (segment.count or number not in opened)
        ]

    def _candidates(self, now_s: float) -> list[_Candidate]:
        self._prices.begin()
        return [self._candidate(segment, now_s) for segment in self._reclaimable()]

    def _candidate(self, segment: _Segment, now_s: float) -> _Candidate:
        live = self._summary(segment, now_s).live
        protection = PROTECTION if live and segment.class_id in self._protected else 0.0
        return _Candidate(segment, live / max(1, segment.count), self._prices.about(segment, now_s) + protection)

    def _renewed(self, candidate: _Candidate, now_s: float) -> _Candidate:
        self._prices.renew(candidate.segment)
        return self._candidate(candidate.segment, now_s)

    def _summary(self, segment: _Segment, now_s: float) -> _Summary:
        summary = segment.summary
        is_right = summary.changes == segment.changes and now_s < summary.next_expiry_s
        return summary if is_right else self._renew(segment, now_s)

    def _renew(self, segment: _Segment, now_s: float) -> _Summary:
        """As `Census.of`."""
        uses = self._uses[segment.blocks[self._live_slots(segment, now_s)]]
        next_expiry_s = float(self._ttls.expiry_s(uses).min(initial=math.inf))
        segment.summary = _Summary(len(uses), next_expiry_s, segment.changes)
        return segment.summary

    def _price(self, segment: _Segment) -> Price:
        """As `Reclaimer._price`."""
        now_s = self._now_s
        worth, live = self._worths(segment, now_s)
        cost = self._valuation.judge(worth, live, self._taken(segment), max(1, segment.count * self._taken_bytes)).cost
        return Price(cost, middle_age_s(self._uses[segment.blocks[: segment.count][live]], now_s), now_s)

    def _worths(self, segment: _Segment, now_s: float) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """As `Reclaimer._worths`, but for protection."""
        blocks = segment.blocks[: segment.count]
        live = np.zeros(segment.count, dtype=bool)
        live[self._live_slots(segment, now_s)] = True
        worth = np.where(live, self._valuation.worth(self._uses[blocks], now_s), 0.0)
        tags = self._tags[blocks]
        worth[self._valuation.lost(tags, live, now_s)] = 0
        return worth, live

    def _taken(self, segment: _Segment) -> NDArray[np.int64]:
        return taken_bytes(np.full(segment.count, self._block_bytes))

    def _held_slots(self, segment: _Segment) -> NDArray[np.bool_]:
        """Shape (row capacity,): slots whose blocks have not moved on, whether they live or have expired."""
        held = np.zeros(len(segment.blocks), dtype=bool)
        blocks = segment.blocks[: segment.count]
        held[: segment.count] = (self._segment_of[blocks] == segment.segment_id) & (
            self._slot_of[blocks] == np.arange(segment.count)
        )
        return held

    def _live_slots(self, segment: _Segment, now_s: float) -> NDArray[np.intp]:
        blocks = segment.blocks[: segment.count]
        here = self._held_slots(segment)[: segment.count]
        return np.flatnonzero(here & self._ttls.live(self._uses[blocks], now_s))

    def _protect(self, now_s: float) -> None:
        """As `QuotaBook.refresh`: which classes hold no more than is their own."""
        if not any(self._share_bytes.values()):
            return
        held = dict.fromkeys(self._share_bytes, 0)
        for segment in self._segments.values():
            held[segment.class_id] += self._summary(segment, now_s).live * self._taken_bytes
        self._protected = {number for number, share in self._share_bytes.items() if share and held[number] <= share}

    def _reclaim(self, segment: _Segment, kept: NDArray[np.intp], now_s: float, *, may_lose: bool = True) -> bool:
        """As `Reclaimer._reclaim`: move the slots to keep, drop the others, retire the file."""
        for stream in [stream for stream, other in self._open.items() if other is segment]:
            del self._open[stream]
        streams = len(np.unique(self._levels(segment.blocks[kept], now_s)))
        needed = len(kept) * self._taken_bytes + self._limits.move_slack + self._growth_bytes(len(kept))
        needed += max(0, streams - 1) * NEW_SEGMENT_BYTES
        if self._used() + needed > self._capacity_bytes:
            if not may_lose:
                return False
            kept = kept[:0]
        live = self._live_slots(segment, now_s)
        blocks = segment.blocks[: segment.count]
        held = self._held_slots(segment)[: segment.count]
        here = blocks[held]
        is_live = np.zeros(segment.count, dtype=bool)
        is_live[live] = True
        ended = np.ones(segment.count, dtype=bool)
        ended[kept] = False
        uses = self._use_table(segment)[ended]
        self._evicted += len(live) - len(kept)
        self._expired += len(here) - len(live)
        moved = blocks[kept]
        self._segment_of[here] = _NOWHERE
        self._indexed -= len(here) - len(kept)
        self._move(moved, segment.class_id, now_s)
        self._valuation.drop(self._tags[blocks[ended], 0], uses, is_live[ended], now_s)
        del self._segments[segment.segment_id]
        self._retiring.append(segment)
        self._reap(now_s)
        return True

    def _levels(self, blocks: NDArray[np.int32], now_s: float) -> NDArray[np.intp]:
        return self._valuation.levels(self._valuation.worth(self._uses[blocks], now_s))

    def _move(self, blocks: NDArray[np.int32], class_id: int, now_s: float) -> None:
        """As `LogWriter.rewrite`."""
        levels = self._levels(blocks, now_s)
        for level in np.unique(levels).tolist():
            part = blocks[levels == level]
            stream, start = Stream(class_id, level, moved=True), 0
            while start < len(part):
                segment = self._roomy(stream)
                if segment is None:
                    segment = self._open[stream] = self._new_segment(class_id)
                some = part[start : start + self._room_in(segment)]
                self._place(segment, some)
                start += len(some)
