"""Space comes back by whole segments: dead blocks are dropped, live ones worth it are appended again, the file is unlinked.

One mechanism for TTL, capacity, eviction and delete. Which segment: one that is more than a quarter dead, the deadest first, before
anything live is lost; else the coldest, judged by the median last use of its live blocks. Of that one the blocks used more
recently than most of the store are kept (a system prompt that everyone shares lies among its first writer's cold blocks), up to
half of it, so that reclaiming always gains; the rest is evicted.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import KvStoreError, StoreFullError
from kvstore.expiry import last_use_s
from kvstore.index import row_key
from kvstore.log import format as fmt
from kvstore.log.writer import NewEntry
from kvstore.types import BlockAddr

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvstore.clock import Clock
    from kvstore.counters import StoreCounters
    from kvstore.index import BlockIndex
    from kvstore.log.segment import Segment
    from kvstore.log.segments import SegmentSet
    from kvstore.log.writer import LogWriter

_log = logging.getLogger(__name__)

# Before anything live is evicted, dead space is given back down to this share of live blocks; unasked, only below the other.
_COMPACT_BELOW_LIVE_SHARE = 0.75
_SWEEP_BELOW_LIVE_SHARE = 0.5
_KEEP_SHARE_MAX = 0.5
_INDEX_SLACK_BYTES = 256 << 10  # what commits may add to the index before it is measured again
_AHEAD_SHARE = 1 / 32  # of the capacity, kept free or on its way to be, so that puts need not wait for leases
_RECLAIMS_PER_TICK = 4
_TICKS_PER_SWEEP = 10


@dataclass(frozen=True, slots=True)
class _Worth:
    """A segment as a candidate: what reclaiming it would cost and gain."""

    segment: Segment
    live: NDArray[np.bool_]
    live_bytes: int  # with padding
    live_share: float

    def median_use_s(self) -> float:
        """When the typical live block was used last; 0 if none is alive."""
        uses = last_use_s(self.segment.uses[: self.segment.slot_count][self.live])
        return float(np.median(uses)) if len(uses) else 0.0


class Reclaimer:
    """Keeps the directory under its cap. All methods are for the writer thread, but `used_bytes` and `live`."""

    def __init__(
        self,
        segments: SegmentSet,
        index: BlockIndex,
        clock: Clock,
        counters: StoreCounters,
        *,
        capacity_bytes: int,
        small_files_bytes: Callable[[], int],
        live: Callable[[Segment], NDArray[np.bool_]],
        expired: Callable[[Segment], NDArray[np.bool_]],
    ) -> None:
        self._segments, self._index, self._clock, self._counters = segments, index, clock, counters
        self._capacity_bytes = capacity_bytes
        self._small_files_bytes = small_files_bytes
        self._live, self._expired = live, expired
        self._ticks = 0
        self._obsolete: list[tuple[bytes, BlockAddr]] = []
        # Room that puts leave free: for the blocks a reclaim moves, and for the index to grow in.
        self._headroom_bytes = segments.segment_size_bytes * 3 // 4 + min(_INDEX_SLACK_BYTES, capacity_bytes // 16)
        self._ahead_bytes = int(_AHEAD_SHARE * capacity_bytes)

    def used_bytes(self) -> int:
        """Allocated bytes of the whole directory, as `du` counts."""
        return self._segments.used_bytes() + self._index.used_bytes() + self._small_files_bytes()

    def make_room(self, need_bytes: int, writer: LogWriter) -> None:
        """Reclaim until `need_bytes` more fit. Raises: StoreFullError: nothing more can be reclaimed now."""
        limit = self._capacity_bytes - self._headroom_bytes
        if self.used_bytes() + need_bytes <= limit:
            return
        self._segments.reap(self._clock.now_s())
        while (used := self.used_bytes()) + need_bytes > limit:
            # Files that only wait for a lease to pass will be room soon; taking more blocks now would not help this put.
            coming = self._segments.retiring_bytes()
            enough_coming = used - coming + need_bytes <= limit - self._ahead_bytes
            if need_bytes > limit or enough_coming or not self._reclaim_one(writer):
                raise StoreFullError(
                    f"{need_bytes} bytes do not fit: {used} of store.capacity {self._capacity_bytes} used, of which "
                    f"{coming} wait for leases to pass and nothing more can be reclaimed now"
                )

    def tick(self, writer: LogWriter) -> None:
        """Once a second: finish what waited for leases, keep ahead of the cap, and now and then look for dead space."""
        self._counters.add(bytes_reclaimed=self._segments.reap(self._clock.now_s()))
        limit = self._capacity_bytes - self._headroom_bytes - self._ahead_bytes
        for _ in range(_RECLAIMS_PER_TICK):
            if self.used_bytes() - self._segments.retiring_bytes() <= limit or not self._reclaim_one(writer):
                break
        self._drop_obsolete()
        self._ticks += 1
        if self._ticks % _TICKS_PER_SWEEP == 0:
            self.sweep(writer)
            self._index.clear_dead_readers()

    def sweep(self, writer: LogWriter) -> None:
        """Give back dead space. Walks all use tables, so it is not for every tick."""
        dead = [worth for worth in self._candidates(writer) if worth.live_share < _SWEEP_BELOW_LIVE_SHARE]
        for worth in sorted(dead, key=lambda worth: worth.live_share):
            # Whatever is wholly dead goes at once; of the others one a sweep, because moving blocks costs writes.
            self._reclaim(worth, worth.live, writer, may_lose=False)
            if worth.live_bytes:
                break

    def _reclaim_one(self, writer: LogWriter) -> bool:
        """Reclaim the segment that costs least; False if there is none.

        Those that no lease names come first, because their space is there at once; a leased one keeps its file for a while.
        """
        now_s = self._clock.now_s()
        everything = self._candidates(writer)
        worths = [worth for worth in everything if worth.segment.lease_until_s < now_s] or everything
        if not worths:
            return False
        deadest = min(worths, key=lambda worth: worth.live_share)
        if deadest.live_share < _COMPACT_BELOW_LIVE_SHARE and self._reclaim(
            deadest, deadest.live, writer, may_lose=False
        ):
            return True
        uses_s = [worth.median_use_s() for worth in worths]
        coldest = worths[int(np.argmin(uses_s))]
        self._reclaim(coldest, _worth_keeping(coldest, float(np.median(uses_s))), writer, may_lose=True)
        return True

    def _candidates(self, writer: LogWriter) -> list[_Worth]:
        """Segments that nobody appends to and whose rows the index knows."""
        worths = []
        for segment in self._segments.all():
            if segment.state != fmt.STATE_SEALED or segment.segment_id in writer.uncommitted or segment.unreadable:
                self._seal_if_dead(segment, writer)
                continue
            live = self._live(segment)
            live_bytes = int(_taken_bytes(segment.lengths[: len(live)][live]).sum())
            share = live_bytes / max(1, segment.end_bytes - segment.layout.payload_offset)
            worths.append(_Worth(segment, live, live_bytes, share))
        return worths

    def _seal_if_dead(self, segment: Segment, writer: LogWriter) -> None:
        if segment.state == fmt.STATE_OPEN and segment.slot_count and not self._live(segment).any():
            class_id = writer.open_class_of(segment)
            if class_id is not None:
                writer.seal(class_id)

    def _reclaim(self, worth: _Worth, keep: NDArray[np.bool_], writer: LogWriter, *, may_lose: bool) -> bool:
        """Move the blocks to keep, drop the index entries of the others, retire the file.

        Args: may_lose: whether blocks to keep may go too when they cannot be moved, because the disk is full, say.
        Returns: False if the segment was left as it is.

        Flags, new places and retirement come in this order so that a crash anywhere leaves each block right or missing, and a
        match that runs meanwhile either sees the new place, or has its lease seen here. Deletes and evictions run on this thread
        too, so no flag is set on a block while it moves.
        """
        segment = worth.segment
        try:
            rows = segment.read_rows(0, segment.slot_count)
        except OSError as error:
            segment.unreadable = True
            _log.warning("segment %d cannot be read and keeps its space: %s", segment.segment_id, str(error))
            return False
        whole = fmt.valid_rows(rows, segment.segment_id)
        moved = self._move(segment, rows, np.flatnonzero(keep & whole), writer)
        if moved is None:
            if not may_lose:
                return False
            moved = {}
        dropped = np.setdiff1d(np.arange(segment.slot_count), list(moved))
        self._count_losses(segment, dropped, worth.live)
        segment.flag(dropped, fmt.FLAG_EVICTED)
        removed = [(row_key(rows[slot]), BlockAddr(segment.segment_id, int(slot))) for slot in dropped if whole[slot]]
        if moved:
            self._point_to_new_places(segment, rows, moved, writer)
        self._segments.retire(segment)
        freed = self._segments.reap(self._clock.now_s())
        # Last, so that a disk too full for a commit gets its room first. Until it is done the entries name a segment id that is
        # never used again, so they can only ever be a miss.
        self._obsolete += removed
        self._drop_obsolete()
        self._counters.add(segments_reclaimed=1, bytes_reclaimed=freed)
        _log.info(
            "reclaimed segment %d: %d blocks kept, %d dropped, %d bytes free",
            segment.segment_id,
            len(moved),
            len(dropped),
            freed,
        )
        return True

    def _drop_obsolete(self) -> None:
        """Remove index entries of segments that are gone; the next tick tries again if the disk is too full even for that."""
        if self._obsolete:
            try:
                self._index.commit({}, self._obsolete)
            except KvStoreError as error:
                # As text: a log handler that kept the exception would keep its frames, and so the unlinked files open.
                _log.warning(
                    "index: %d entries of reclaimed segments stay for now: %s", len(self._obsolete), str(error)
                )
            else:
                self._obsolete = []

    def _point_to_new_places(
        self, segment: Segment, rows: NDArray[np.void], moved: dict[int, BlockAddr], writer: LogWriter
    ) -> None:
        try:
            self._index.commit({row_key(rows[slot]): addr for slot, addr in moved.items()})
        except KvStoreError:
            for addr in moved.values():
                writer.flag(addr, fmt.FLAG_DELETED)  # the copies must not turn up when the index is rebuilt
            raise
        segment.flag(np.array(list(moved), dtype=np.int64), fmt.FLAG_EVICTED)

    def _move(
        self, segment: Segment, rows: NDArray[np.void], kept: NDArray[np.intp], writer: LogWriter
    ) -> dict[int, BlockAddr] | None:
        """Append the kept slots again; returns where those went that could be read, or None if they could not be written."""
        entries, slots = [], []
        for slot in kept:
            payload = _payload(segment, rows[slot])
            if payload is not None:
                # Not checked here: the checksum moves along, and whoever reads the block checks it.
                entries.append(NewEntry(row_key(rows[slot]), _entry(rows[slot]), payload))
                slots.append(int(slot))
        uses = segment.uses[slots].copy()
        try:
            addrs = writer.rewrite(segment.header.class_id, entries, uses)
        except OSError as error:
            _log.warning(
                "segment %d: %d live blocks could not be moved: %s", segment.segment_id, len(entries), str(error)
            )
            return None
        return dict(zip(slots, addrs, strict=True))

    def _count_losses(self, segment: Segment, dropped: NDArray[np.intp], live: NDArray[np.bool_]) -> None:
        # The others were counted when they were flagged, or their namespace dropped.
        expired = self._expired(segment)
        self._counters.add(blocks_evicted=int(live[dropped].sum()), blocks_expired=int(expired[dropped].sum()))


def _worth_keeping(worth: _Worth, typical_s: float) -> NDArray[np.bool_]:
    """The live blocks used later than is typical for the store, up to half of the segment's bytes.

    Latest first, and of those used together the earlier slots, which are the beginnings of chains.
    """
    segment = worth.segment
    uses = last_use_s(segment.uses[: segment.slot_count])
    keep = worth.live & (uses > typical_s)
    order = np.flatnonzero(keep)[np.argsort(-uses[keep].astype(np.int64), kind="stable")]
    sizes = np.cumsum(_taken_bytes(segment.lengths[order]))
    budget = _KEEP_SHARE_MAX * (segment.end_bytes - segment.layout.payload_offset)
    keep[order[sizes > budget]] = False
    return keep


def _payload(segment: Segment, row: np.void) -> bytearray | None:
    """A block's bytes, or None if they cannot be read."""
    payload = bytearray(int(row["length_bytes"]))
    try:
        size = segment.read_payloads([memoryview(payload)], int(row["offset_bytes"]))
    except OSError:
        return None
    return payload if size == len(payload) else None


def _taken_bytes(lengths: NDArray[np.uint32]) -> NDArray[np.int64]:
    """What payloads of these lengths take in the file: whole pages."""
    pages: NDArray[np.int64] = -(-lengths.astype(np.int64) // fmt.ALIGNMENT_BYTES)
    return pages * fmt.ALIGNMENT_BYTES


def _entry(row: np.void) -> fmt.Entry:
    return fmt.Entry(
        namespace_id=int(row["namespace_id"]),
        kind=int(row["kind"]),
        class_id=int(row["class_id"]),
        position=int(row["position"]),
        anchor=row["anchor"].tobytes(),
        prefix_hash=row["prefix_hash"].tobytes(),
        length_bytes=int(row["length_bytes"]),
        create_time_s=int(row["create_time_s"]),
        checksum=int(row["checksum"]),
    )
