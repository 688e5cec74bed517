"""Space comes back by whole segments: dead blocks are dropped, live ones worth it are appended again, the file is unlinked.

One mechanism for TTL, capacity, quotas, eviction and delete. A segment in which nothing lives any more goes at once; because
segments are filled by class and time, that is how most blocks leave whose TTL has passed. When room is needed, the segment goes
that costs least for each byte that comes back (see `worth.py`): what is worth it is moved, the rest evicted.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.census import expired_mask, live_mask, taken_bytes
from kvstore.errors import KvStoreError, StoreFullError
from kvstore.expiry import last_use_s
from kvstore.index import row_keys, row_tags
from kvstore.index_room import reserved_bytes
from kvstore.log import format as fmt
from kvstore.log.segment import row_capacity
from kvstore.log.streams import Stream
from kvstore.log.writer import NEW_SEGMENT_BYTES, NewEntry
from kvstore.types import BlockAddr
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
from kvstore.worth import PROTECTION, middle_age_s, payload_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from kvstore.census import Census, Rules
    from kvstore.clock import Clock
    from kvstore.config import StoreConfig
    from kvstore.counters import StoreCounters
    from kvstore.index import BlockIndex
    from kvstore.log.segment import Segment
    from kvstore.log.segments import SegmentSet
    from kvstore.log.writer import LogWriter
    from kvstore.quotas import QuotaBook
    from kvstore.worth import Valuation

_log = logging.getLogger(__name__)

_UNREADABLE_S = 60.0  # before a segment is tried again whose rows could not be read
_MOVED_BYTES_AT_A_TIME = 16 << 20  # of payloads held in memory


@dataclass(slots=True)  # not frozen: that takes three times as long, and all segments are candidates at each choice
class _Candidate:
    """A segment that could be reclaimed, and what lives in it."""

    segment: Segment
    live_bytes: int  # with padding
    cost: float  # for each byte that comes back, as it was counted

    @property
    def lease_until_s(self) -> float:
        """The last deadline of a lease that names it."""
        return self.segment.lease_until_s

    @property
    def live_share(self) -> float:
        """Of the payload bytes that the file takes."""
        return self.live_bytes / payload_bytes(self.segment)


class Reclaimer:
    """Keeps the directory under its cap. All methods are for the writer thread, but `used_bytes`."""

    def __init__(
        self,
        segments: SegmentSet,
        index: BlockIndex,
        clock: Clock,
        counters: StoreCounters,
        census: Census,
        quotas: QuotaBook,
        *,
        config: StoreConfig,
        small_files_bytes: Callable[[], int],
        rules: Callable[[], Rules],
        valuation: Valuation,
    ) -> None:
        self._segments, self._index, self._clock, self._counters = segments, index, clock, counters
        self._census, self._quotas = census, quotas
        self._small_files_bytes, self._rules, self._valuation = small_files_bytes, rules, valuation
        self._ticks = 0
        self._prices = Prices(self._price, valuation.repriced)
        self._obsolete: list[tuple[bytes, BlockAddr]] = []
        self._capacity_bytes = config.capacity
        self._limits = Limits.of(
            config.capacity, segments.segment_size_bytes, config.high_watermark, config.low_watermark
        )
        self._rows_max = row_capacity(segments.segment_size_bytes)
        self._above_low = False  # reclaiming from the high mark down to the low one

    def used_bytes(self) -> int:
        """Allocated bytes of the whole directory, as `du` counts."""
        return self._segments.used_bytes() + self._beside_bytes()

    def _beside_bytes(self) -> int:
        return self._index.used_bytes() + self._small_files_bytes()

    def _counted_bytes(self) -> int:
        """The same, with all that is set aside for what lies beside the segments."""
        reserved = reserved_bytes(self._index.entry_count_max, self._capacity_bytes)
        return self._segments.used_bytes() + max(reserved, self._beside_bytes())

    def room_bytes(self, new_entries: int = 0) -> int:
        """What puts of so many new entries may take without anything being reclaimed."""
        return self._limit_bytes(new_entries) - self._counted_bytes()

    def _limit_bytes(self, new_entries: int) -> int:
        # The index grows by one or the other before it is measured again: when a segment's blocks are moved, or by the new ones.
        index_bytes = max(self._index.growth_bytes(self._rows_max), self._index.growth_bytes(0, new_entries))
        return self._limits.put - max(0, index_bytes - self._limits.index_slack)

    def make_room(self, need_bytes: int, writer: LogWriter, new_entries: int = 0) -> None:
        """Reclaim until `need_bytes` more fit, and what the index takes for so many entries that it does not know yet.

        Raises: StoreFullError: nothing more can be reclaimed now.
        """
        limit = self._limit_bytes(new_entries)
        if need_bytes <= self.room_bytes(new_entries):
            return
        self._counters.add(bytes_reclaimed=self._segments.reap(self._clock.now_s(), self._clock.steady_s()))
        while (used := self._counted_bytes()) + need_bytes > limit:
            # Files that only wait for a lease to pass will be room soon; taking more blocks now would not help this put.
            coming = self._segments.retiring_bytes()
            enough_coming = used - coming + need_bytes <= min(self._limits.low, limit)
            stuck = self._segments.nothing_can_be_unlinked(self._clock.steady_s())
            if need_bytes > limit or enough_coming or stuck or not self._reclaim_one(writer, urgent=True):
                raise StoreFullError(
                    f"{need_bytes} bytes do not fit: {used} of store.capacity {self._capacity_bytes} used, of which "
                    f"{coming} wait for leases to pass and nothing more can be reclaimed now"
                )

    def tick(self, writer: LogWriter) -> None:
        """Once a second: finish what waited for leases, keep ahead of the cap, give back what is dead."""
        used_before = self._segments.used_bytes()
        self._counters.add(bytes_reclaimed=self._segments.reap(self._clock.now_s(), self._clock.steady_s()))
        self._quotas.refresh()
        self._learn()
        self._drop_dead(writer)
        self._relieve_disk(writer, used_before)
        self._keep_ahead(writer)
        self._drop_obsolete()
        self._ticks += 1
        if self._ticks % TICKS_PER_COMPACTION == 0:
            self._compact_one(writer)
            self._index.clear_dead_readers()
            self._census.forget_others(self._segments.all())
            self._prices.forget_others(self._segments.all())

    def _learn(self) -> None:
        self._valuation.learn_if_due(self._use_tables, self._clock.now_s())

    def _use_tables(self) -> list[NDArray[np.uint32]]:
        """Of all segments whose blocks have neither moved nor gone."""
        in_use = [segment for segment in self._segments.all() if segment.state != fmt.STATE_RETIRED]
        return [segment.uses[: segment.slot_count] for segment in in_use]

    def _keep_ahead(self, writer: LogWriter) -> None:
        """From the high mark down to the low one, a few segments a tick."""
        for _ in range(RECLAIMS_PER_TICK):
            used = self._counted_bytes() - self._segments.retiring_bytes()
            self._above_low = used > (self._limits.low if self._above_low else self._limits.high)
            stuck = self._segments.nothing_can_be_unlinked(self._clock.steady_s())
            if not self._above_low or stuck or not self._reclaim_one(writer, urgent=False):
                break

    def _relieve_disk(self, writer: LogWriter, used_before: int) -> None:
        """The disk is full below the cap: of the segment that is deadest what cannot be moved is lost, or nothing would go on.

        Unless what was missing has been given back since `used_before` was used, or will be by files that wait for leases.
        """
        coming = used_before - self._segments.used_bytes() + self._segments.retiring_bytes()
        segments = self._reclaimable(self._segments.all(), writer) if coming < writer.disk_short_bytes else []
        if segments and not self._segments.nothing_can_be_unlinked(self._clock.steady_s()):
            deadest = min(segments, key=self._live_share)
            self._reclaim(deadest, live_mask(deadest, self._rules(), self._clock.now_s()), writer)
        writer.disk_short_bytes = 0

    def sweep(self, writer: LogWriter) -> None:
        """Give back dead space now."""
        used_before = self._segments.used_bytes()
        self._drop_dead(writer)
        self._compact_one(writer)
        self._relieve_disk(writer, used_before)

    def _drop_dead(self, writer: LogWriter) -> None:
        for segment in self._reclaimable(self._census.lifeless(self._segments.all()), writer):
            self._reclaim(segment, keep=None, writer=writer)

    def _compact_one(self, writer: LogWriter) -> None:
        """Of the segments that are mostly dead one, because moving blocks costs writes; none that will soon be dead by itself."""
        segments = self._reclaimable(self._segments.all(), writer)
        shares = [(self._live_share(segment), segment) for segment in segments]
        dead = [pair for pair in shares if pair[0] < SWEEP_BELOW_LIVE_SHARE]
        for _, segment in sorted(dead, key=lambda pair: pair[0]):
            if not self._expires_soon(segment):
                self._compact(segment, writer)
                break

    def _live_share(self, segment: Segment) -> float:
        live_bytes = sum(share.taken_bytes for share in self._census.live_shares(segment).values())
        return live_bytes / payload_bytes(segment)

    def _expires_soon(self, segment: Segment) -> bool:
        """Whether the last of its blocks has little of the class's TTL left."""
        rules, now_s = self._rules(), self._clock.now_s()
        live = live_mask(segment, rules, now_s)
        expiry_s = rules.ttls.expiry_s(segment.uses[: len(live)][live])
        left_s = float(expiry_s.max(initial=0)) - now_s
        return left_s <= EXPIRES_SOON_SHARE * rules.ttls.ttl_s(segment.header.class_id)

    def _reclaim_one(self, writer: LogWriter, *, urgent: bool) -> bool:
        """Reclaim the segment that costs least; False if there is none.

        When it is urgent, those that no lease names come first, because their space is there at once. Else a lease makes no
        difference: a prompt that everyone uses is always leased, and would save the cold blocks around it for ever.
        """
        if self._segments.drop_damaged():
            return True
        now_s = self._clock.now_s()
        self._quotas.refresh()
        candidates: Sequence[_Candidate] = self._candidates(writer)
        if urgent:
            candidates = at_once(candidates, now_s)
        if not candidates:
            return False
        deadest = min(candidates, key=lambda candidate: candidate.live_share)
        if deadest.live_share < COMPACT_BELOW_LIVE_SHARE and self._compact(deadest.segment, writer):
            return True
        if math.isnan(self._valuation.threshold):
            self._valuation.begin_threshold(self._worths(candidate.segment)[0] for candidate in some_of(candidates))
        victim = cheapest(candidates, self._renewed)
        self._evict_from(victim.segment, writer)
        return True

    def _price(self, segment: Segment) -> Price:
        worth, live = self._worths(segment)
        taken = taken_bytes(segment.lengths[: len(live)])
        cost = self._valuation.judge(worth, live, taken, payload_bytes(segment)).cost
        now_s = self._clock.now_s()
        return Price(cost, middle_age_s(segment.uses[: len(live)][live], now_s), now_s)

    def _evict_from(self, segment: Segment, writer: LogWriter) -> None:
        worth, live = self._worths(segment)
        protected = self._quotas.protected_namespaces(segment, self._census.live_shares(segment))
        worth[np.isin(segment.namespace_ids[: len(live)], protected)] += PROTECTION
        size_bytes = payload_bytes(segment)
        taken = taken_bytes(segment.lengths[: len(live)])
        keep = self._valuation.judge(worth, live, taken, size_bytes).keep
        self._reclaim(segment, keep, writer)
        chosen_bytes = float(taken[keep & (worth < PROTECTION)].sum())
        dropped_bytes = size_bytes - float(taken[keep].sum())
        self._valuation.steer(chosen_bytes, dropped_bytes, self._segments.segment_size_bytes)

    def _candidates(self, writer: LogWriter) -> list[_Candidate]:
        self._prices.begin()
        return [self._candidate(segment) for segment in self._reclaimable(self._segments.all(), writer)]

    def _reclaimable(self, segments: Iterable[Segment], writer: LogWriter) -> list[Segment]:
        """Of the segments those whose rows the index knows; open ones too, or a class that nobody uses would keep its last."""
        steady_s = self._clock.steady_s()
        return [
            segment
            for segment in segments
            if segment.unreadable_until_s <= steady_s
            and segment.segment_id not in writer.uncommitted
            and (state := segment.state) != fmt.STATE_RETIRED
            and (segment.slot_count or state == fmt.STATE_SEALED)
        ]

    def _candidate(self, segment: Segment) -> _Candidate:
        summary, tenants = self._census.of(segment), self._rules().tenants
        shares = {namespace_id: share for namespace_id, share in summary.shares.items() if namespace_id in tenants}
        live_bytes = sum(share.taken_bytes for share in shares.values())
        protected_bytes = sum(shares[ns].taken_bytes for ns in self._quotas.protected_namespaces(segment, shares))
        protection = PROTECTION * protected_bytes / live_bytes if live_bytes else 0.0
        return _Candidate(segment, live_bytes, self._prices.about(segment, self._clock.now_s()) + protection)

    def _renewed(self, candidate: _Candidate) -> _Candidate:
        self._prices.renew(candidate.segment)
        return self._candidate(candidate.segment)

    def _worths(self, segment: Segment) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """What the slots' blocks are worth, and which of them live."""
        rules, now_s = self._rules(), self._clock.now_s()
        live = live_mask(segment, rules, now_s)
        uses = segment.uses[: len(live)]
        worth = self._valuation.worth(uses, now_s)
        worth[self._valuation.lost(segment.tags[: len(live)], live, now_s)] = 0
        return worth, live

    def _compact(self, segment: Segment, writer: LogWriter) -> bool:
        """Reclaim a segment by moving all that lives in it; False if that cannot be done now."""
        live = live_mask(segment, self._rules(), self._clock.now_s())
        return self._reclaim(segment, live, writer, may_lose=False)

    def _reclaim(
        self, segment: Segment, keep: NDArray[np.bool_] | None, writer: LogWriter, *, may_lose: bool = True
    ) -> bool:
        """Move the blocks to keep, if any, drop the index entries of the others, retire the file.

        Args: may_lose: whether blocks to keep may go too when they cannot be moved, because the disk is full or does not give them.
        Returns: False if the segment was left as it is.

        Copies, flags, new places and retirement come in this order, so that a crash anywhere leaves one place of each block that is
        not flagged, or that is found again because its segment was open: two would come back to life in turn. A match that runs
        meanwhile waits for the new place, or has its lease seen here. Deletes and evictions run on this thread too, so that no
        other flag is set on a block while it moves.
        """
        writer.seal_segment(segment)
        try:
            rows = segment.read_rows(0, segment.slot_count)
        except OSError as error:
            if keep is not None:
                return self._leave_alone(segment, error)
            # Nothing lives there, so it can go all the same; entries left over are only misses.
            rows = np.zeros(segment.slot_count, dtype=fmt.ROW_DTYPE)
        whole = fmt.valid_rows(rows, segment.segment_id)
        kept = np.flatnonzero(keep & whole[: len(keep)]) if keep is not None else np.zeros(0, dtype=np.intp)
        keys = row_keys(rows)
        size_bytes = int(taken_bytes(segment.lengths[kept]).sum())
        moved = None
        streams = len(np.unique(self._levels(segment.uses[kept])))
        needed = size_bytes + self._limits.move_slack + self._index.growth_bytes(len(kept))
        needed += max(0, streams - 1) * NEW_SEGMENT_BYTES
        if self._counted_bytes() + needed <= self._capacity_bytes:
            moved = self._move(segment, rows, keys, kept, writer, may_lose=may_lose)
        if moved is None:
            if not may_lose:
                return False
            moved = {}
        dropped = np.setdiff1d(np.arange(segment.slot_count), list(moved))
        self._count_losses(segment, rows, dropped)
        removed = [(keys[slot], BlockAddr(segment.segment_id, slot)) for slot in dropped[whole[dropped]].tolist()]
        segment.moving = bool(moved)
        segment.flag(np.arange(segment.slot_count), fmt.FLAG_EVICTED)
        if moved:
            self._point_to_new_places(segment, keys, moved, writer)
        self._segments.retire(segment)
        freed = self._segments.reap(self._clock.now_s(), self._clock.steady_s())
        # Last, so that a disk too full for a commit gets its room first. Until it is done the entries name a segment id that is
        # never used again, so they can only ever be a miss.
        self._obsolete += removed
        self._drop_obsolete()
        self._counters.add(
            segments_reclaimed=1, segments_dropped_whole=int(not moved), blocks_moved=len(moved), bytes_reclaimed=freed
        )
        _log.info(
            "reclaimed segment %d: %d blocks kept, %d dropped, %d bytes free",
            segment.segment_id,
            len(moved),
            len(dropped),
            freed,
        )
        return True

    def _leave_alone(self, segment: Segment, error: OSError) -> bool:
        segment.unreadable_until_s = self._clock.steady_s() + _UNREADABLE_S
        if not segment.unreadable_told:
            _log.warning("segment %d cannot be read and keeps its space: %s", segment.segment_id, str(error))
        segment.unreadable_told = True
        return False

    def _drop_obsolete(self) -> None:
        """Remove index entries of segments that are gone; the next tick tries again if there is no room even for that."""
        try:
            while self._obsolete:
                some = self._obsolete[: self._rows_max]
                if self.used_bytes() + self._index.growth_bytes(len(some)) > self._capacity_bytes:
                    break
                self._index.commit({}, some)
                self._obsolete = self._obsolete[len(some) :]
        except KvStoreError as error:
            # As text: a log handler that kept the exception would keep its frames, and so the unlinked files open.
            _log.warning("index: %d entries of reclaimed segments stay for now: %s", len(self._obsolete), str(error))

    def _point_to_new_places(
        self, segment: Segment, keys: Sequence[bytes], moved: dict[int, BlockAddr], writer: LogWriter
    ) -> None:
        try:
            self._index.commit({keys[slot]: addr for slot, addr in moved.items()})
        except KvStoreError:
            writer.take_back([(segment, slot) for slot in moved])
            for addr in moved.values():
                writer.flag(addr, fmt.FLAG_DELETED)  # the copies must not turn up when the index is rebuilt
            raise
        finally:
            segment.moving = False
            writer.moves_committed()

    def _move(
        self,
        segment: Segment,
        rows: NDArray[np.void],
        keys: Sequence[bytes],
        kept: NDArray[np.intp],
        writer: LogWriter,
        *,
        may_lose: bool,
    ) -> dict[int, BlockAddr] | None:
        """Append the kept slots again; returns where they went, or None if they could not be read or written.

        With `may_lose` those that cannot be read are left out. So are those that are not whole, which would be misses.
        """
        moved: dict[int, BlockAddr] = {}
        size_max = max(1, int(segment.lengths.max(initial=0)))
        step = max(1, _MOVED_BYTES_AT_A_TIME // size_max)
        levels = self._levels(segment.uses[kept])
        try:
            for level in np.unique(levels).tolist():
                stream = Stream(segment.header.class_id, level, moved=True)
                alike = kept[levels == level].tolist()
                for first in range(0, len(alike), step):
                    part = alike[first : first + step]
                    moved |= self._move_some(segment, rows, keys, part, stream, writer, may_lose=may_lose)
        except OSError as error:
            for addr in moved.values():
                writer.flag(addr, fmt.FLAG_DELETED)
            writer.moves_committed()
            writer.note_failure(error, int(taken_bytes(segment.lengths[kept]).sum()))
            _log.warning("segment %d: %d live blocks could not be moved: %s", segment.segment_id, len(kept), str(error))
            return None
        return moved

    def _move_some(
        self,
        segment: Segment,
        rows: NDArray[np.void],
        keys: Sequence[bytes],
        kept: Sequence[int],
        stream: Stream,
        writer: LogWriter,
        *,
        may_lose: bool,
    ) -> dict[int, BlockAddr]:
        entries, slots = [], []
        for slot in kept:
            try:
                payload = _payload(segment, rows[slot])
            except OSError as error:
                if may_lose:
                    continue
                self._leave_alone(segment, error)
                raise
            if payload is not None:
                # Not checked here: the checksum moves along, and whoever reads the block checks it.
                entries.append(NewEntry(keys[slot], fmt.Entry.of_row(rows[slot]), payload, int(segment.tags[slot, 1])))
                slots.append(slot)
        addrs = writer.rewrite(stream, entries, segment.uses[slots].copy())
        return dict(zip(slots, addrs, strict=True))

    def _levels(self, uses: NDArray[np.uint32]) -> NDArray[np.intp]:
        return self._valuation.levels(self._valuation.worth(uses, self._clock.now_s()))

    def _count_losses(self, segment: Segment, rows: NDArray[np.void], dropped: NDArray[np.intp]) -> None:
        # The others were counted when they were flagged, or their namespace dropped.
        rules, now_s = self._rules(), self._clock.now_s()
        live, expired = live_mask(segment, rules, now_s), expired_mask(segment, rules, now_s)
        self._counters.add(blocks_evicted=int(live[dropped].sum()), blocks_expired=int(expired[dropped].sum()))
        ended = dropped[last_use_s(segment.uses[dropped]) > 0]
        self._valuation.drop(row_tags(rows[ended]), segment.uses[ended], live[ended], now_s)


def _payload(segment: Segment, row: np.void) -> bytearray | None:
    """A block's bytes, or None if the file ends before they do. Raises: OSError."""
    payload = bytearray(int(row["length_bytes"]))
    size = segment.read_payloads([memoryview(payload)], int(row["offset_bytes"]))
    return payload if size == len(payload) else None
