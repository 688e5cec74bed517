"""The one writer: group commit of puts, and every other change to segments and index.

Order, for each group: payloads, use rows, rows (then fdatasync, if durable), then the index commit, then the answers.
*The index may lag the log, never lead it.*
"""

from __future__ import annotations

import errno
import logging
import math
import queue
import threading
import time
from collections import defaultdict
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from kvstore.dropped import tags_of
from kvstore.errors import KvStoreError, StorageError, StoreFullError
from kvstore.log import format as fmt
from kvstore.log.segment import marks_of
from kvstore.log.streams import Lanes, Stream
from kvstore.reuse import USES_SEEN
from kvstore.traffic import RefreshRule
from kvstore.types import BlockAddr
from kvstore_api.results import PutStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from kvstore.catalog import ClassRecord
    from kvstore.clock import Clock
    from kvstore.counters import StoreCounters
    from kvstore.index import BlockIndex
    from kvstore.log.segment import Segment
    from kvstore.log.segments import SegmentSet
    from kvstore.worth import Valuation

T = TypeVar("T")

_log = logging.getLogger(__name__)

_GROUP_BYTES = 32 << 20  # more than this is not gathered into one group; it bounds what one answer waits for
TICK_S = 1.0
_WAIT_MAX_S = 3600.0  # for something to do; a lock takes no infinity
_MOVED_AT_A_TIME = (
    256  # blocks appended in one go when a segment is reclaimed: three writes for all instead of for each
)


@dataclass(frozen=True, slots=True)
class NewEntry:
    """Something to store: where the index will file it, what its row says, and its bytes."""

    key: bytes
    entry: fmt.Entry
    payload: Buffer
    parent_tag: int = 0  # what `kvstore.dropped` knows the block before it by; 0: there is none, or it is not known


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an entry."""

    status: PutStatus
    error: KvStoreError | None = None


STORED, EXISTS = Outcome(PutStatus.STORED), Outcome(PutStatus.EXISTS)


@dataclass(slots=True)
class PutJob:
    """Entries of one call, for one traffic class."""

    traffic_class: ClassRecord
    entries: Sequence[NewEntry]
    size_bytes: int
    future: Future[list[Outcome]] = field(default_factory=Future)
    outcomes: list[Outcome | None] = field(init=False)  # writer thread only, until the future is resolved

    def __post_init__(self) -> None:
        self.outcomes = [None] * len(self.entries)


@dataclass(frozen=True, slots=True)
class Task:
    """Anything else that has to happen on the writer thread; does not raise."""

    run: Callable[[], None]


class Admission(Protocol):
    """Who may store more; see `quotas.py`."""

    def begin(self) -> None:
        """A group begins."""
        ...

    def admit(self, class_id: int, namespace_id: int, taken_bytes: int) -> KvStoreError | None:
        """Count a block, or say why it must not be stored."""
        ...


@dataclass(slots=True)
class _Pending:
    """An entry on its way to disk, and everyone who waits for it: (job, position) pairs, the first stores it."""

    new: NewEntry
    class_id: int
    waiting: list[tuple[PutJob, int]]
    replaced: BlockAddr | None
    uses_seen: int = 0  # before it was evicted, as far as that is known
    addr: BlockAddr | None = None
    error: KvStoreError | None = None


class LogWriter:
    """Owns the open segments and the index's write transactions."""

    def __init__(
        self,
        segments: SegmentSet,
        index: BlockIndex,
        clock: Clock,
        counters: StoreCounters,
        *,
        live: Callable[[BlockAddr], bool],
        admission: Admission,
        valuation: Valuation,
        crowded: Callable[[], bool],
        new_segment: Callable[[int], Segment],
        make_room: Callable[[int, int], None],
        housekeeping: Callable[[], None],
        durable: bool,
        queue_max_bytes: int,
        tick_s: float | None = TICK_S,
    ) -> None:
        """Args: tick_s: seconds between two times of housekeeping; None: it is done by whoever opened the store."""
        self._segments, self._index, self._clock, self._counters = segments, index, clock, counters
        self._live, self._admission, self._new_segment = live, admission, new_segment
        self._valuation = valuation
        self._make_room, self._housekeeping = make_room, housekeeping
        self._durable = durable
        self._tick_s = math.inf if tick_s is None else tick_s
        self._queue_max_bytes = queue_max_bytes
        self._queue: queue.SimpleQueue[PutJob | Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queued_bytes = 0  # guarded by _lock
        self._closed = False  # guarded by _lock
        self._open: dict[Stream, Segment] = {}  # writer thread only
        self._lanes = Lanes(
            self._open,
            lambda segment: segment.tags[:, 0],
            crowded,
            segments.segment_size_bytes,
        )
        # Segments with rows the index does not know yet: of puts, and of moves. Writer thread only.
        self.uncommitted: set[int] = set()
        self._uncommitted_moves: set[int] = set()
        self._unindexed = 0  # blocks of the group that is being written; writer thread only
        # The most that one write wanted which met a full disk; cleared by who makes room there; writer thread only.
        self.disk_short_bytes = 0
        self._full: list[
            Segment
        ] = []  # of those, the ones that are full: to be sealed once it does; writer thread only
        self._thread = threading.Thread(target=self._run, name="kvstore-writer", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, job: PutJob) -> bool:
        """Queue a put; False, and nothing queued, if too many bytes wait already."""
        with self._lock:
            if self._closed:
                raise StorageError("the store is closed")
            # A put larger than the queue goes through when nothing else waits.
            if self._queued_bytes and self._queued_bytes + job.size_bytes > self._queue_max_bytes:
                return False
            self._queued_bytes += job.size_bytes
            self._queue.put(job)
        return True

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run something on the writer thread, after what is queued."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise StorageError("the store is closed")
            self._queue.put(Task(lambda: _settle(future, function)))
        return future

    def close(self) -> None:
        """Finish what is queued, seal the open segments, stop the thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        next_tick = time.monotonic() + self._tick_s
        stopping = False
        while not stopping:
            jobs, stopping = self._gather(min(_WAIT_MAX_S, max(0.0, next_tick - time.monotonic())))
            if jobs:
                self._commit_group(jobs)
            if time.monotonic() >= next_tick:
                try:
                    self._housekeeping()
                except Exception:  # the thread's edge: puts must go on, and the next tick tries again
                    _log.exception("housekeeping failed")
                next_tick = time.monotonic() + self._tick_s
        for stream in list(self._open):
            self.seal(stream)

    def _gather(self, timeout_s: float) -> tuple[list[PutJob], bool]:
        """Puts that can be committed together; runs a task when it comes to one. The flag says that it is time to stop."""
        jobs: list[PutJob] = []
        size = 0
        while size < _GROUP_BYTES:
            try:
                item = self._queue.get(timeout=timeout_s) if not jobs else self._queue.get_nowait()
            except queue.Empty:
                break
            if item is None:
                return jobs, True
            if isinstance(item, Task):
                if jobs:
                    self._commit_group(jobs)
                item.run()
                return [], False
            jobs.append(item)
            size += item.size_bytes
        return jobs, False

    def _commit_group(self, jobs: list[PutJob]) -> None:
        try:
            self._commit(jobs)
        except Exception as error:  # the thread's edge: an error here must fail the puts, not the writer
            _log.exception("group commit failed")
            failure = Outcome(PutStatus.REJECTED, StorageError(f"group commit failed: {error}"))
            for job in jobs:
                job.outcomes = [outcome or failure for outcome in job.outcomes]
        with self._lock:
            self._queued_bytes -= sum(job.size_bytes for job in jobs)
        for job in jobs:
            job.future.set_result([outcome for outcome in job.outcomes if outcome is not None])

    def _commit(self, jobs: list[PutJob]) -> None:
        try:
            self._write_and_commit(jobs)
        finally:
            self.uncommitted.clear()
            self._unindexed = 0
            self._seal_full()

    def _write_and_commit(self, jobs: list[PutJob]) -> None:
        now_s = int(self._clock.now_s())
        pending = self._sort_out(jobs, now_s)
        for stream, items in self._by_stream(pending).items():
            self._append(stream, items, now_s)
        for stream in self._lanes.surplus():
            self.seal(stream)
        written = [item for item in pending if item.addr is not None]
        self._make_findable(written)
        self._answer(pending)

    def _by_stream(self, pending: list[_Pending]) -> dict[Stream, list[_Pending]]:
        """Where to write what."""
        by_put: dict[int, list[_Pending]] = defaultdict(list)
        for item in pending:
            by_put[id(item.waiting[0][0])].append(item)
        by_stream: dict[Stream, list[_Pending]] = defaultdict(list)
        levels: dict[int, list[int]] = {}
        for items in by_put.values():
            first, last, class_id = items[0].new, items[-1].new.entry, items[0].class_id
            lane = self._lanes.of(class_id, first.parent_tag, (last.position + 1) * fmt.align(last.length_bytes))
            if class_id not in levels:
                levels[class_id] = self._valuation.levels_of_new(class_id, np.arange(USES_SEEN)).tolist()
            alike: dict[int, list[_Pending]] = {}  # by uses: a stream takes long to look up, for thousands of blocks
            for item in items:
                if item.uses_seen not in alike:
                    alike[item.uses_seen] = by_stream[Stream(class_id, levels[class_id][item.uses_seen], lane=lane)]
                alike[item.uses_seen].append(item)
        return by_stream

    def _sort_out(self, jobs: list[PutJob], now_s: int) -> list[_Pending]:
        """Answer what is there already; what is left has to be written, once each."""
        self._admission.begin()
        known = self._index.lookup([new.key for job in jobs for new in job.entries])
        pending: dict[bytes, _Pending] = {}
        for job in jobs:
            class_id = job.traffic_class.class_id
            for position, new in enumerate(job.entries):
                addr = known.get(new.key)
                if addr is not None and self._live(addr):
                    job.outcomes[position] = EXISTS
                    self._touch(addr, job.traffic_class, now_s)
                elif new.key in pending:
                    pending[new.key].waiting.append((job, position))
                else:
                    pending[new.key] = _Pending(new, class_id, [(job, position)], addr)
        accepted = {key: item for key, item in pending.items() if not self._refuse(item)}
        refused = pending.keys() - accepted.keys()
        self._recognize([new for job in jobs for new in job.entries if new.key not in refused], accepted, now_s)
        return list(accepted.values())

    def _recognize(self, entries: list[NewEntry], accepted: dict[bytes, _Pending], now_s: int) -> None:
        """Blocks that were evicted come back with what is known of them. Args: entries: those there already too."""
        is_new = np.array([new.key in accepted for new in entries], dtype=bool)
        seen = self._valuation.arrive(tags_of(b"".join(new.entry.prefix_hash for new in entries)), is_new, now_s)
        for slot, uses_seen in zip(np.flatnonzero(is_new).tolist(), seen.tolist(), strict=True):
            item = accepted[entries[slot].key]
            item.uses_seen = max(item.uses_seen, uses_seen)

    def _refuse(self, item: _Pending) -> bool:
        """Answer a block that a quota leaves no room for."""
        entry = item.new.entry
        error = self._admission.admit(item.class_id, entry.namespace_id, fmt.align(entry.length_bytes))
        if error is not None:
            for job, position in item.waiting:
                job.outcomes[position] = Outcome(PutStatus.REJECTED, error)
        return error is not None

    def _touch(self, addr: BlockAddr, record: ClassRecord, now_s: int) -> None:
        """Note the use. For an on-write class only the first put counts, even if another class stored the block."""
        segment = self._segments.get(addr.segment_id)
        if segment is None:
            return
        known = segment.uses[addr.slot, record.class_id] != 0
        if record.traffic_class.refresh is RefreshRule.ON_ACCESS or not known:
            self._valuation.note_use(segment.touch(np.array([addr.slot]), record.class_id, now_s), now_s)

    def _append(self, stream: Stream, items: list[_Pending], now_s: int) -> None:
        """Write items to the stream's open segments, rolling as they fill. Failed items get an error, the others an address."""
        start = 0
        while start < len(items):
            batch: list[_Pending] = []
            try:
                batch = self._batch_with_room(stream, items[start:])
                self._write(self._open[stream], batch, now_s)
            except (OSError, KvStoreError) as error:
                batch = batch or items[start:]
                for item in batch:
                    item.error = storage_error(error)
                self.note_failure(error, sum(_written_bytes(item.new) for item in batch))
                if isinstance(error, OSError):
                    self.seal(stream)  # what a failed write left behind must stay the segment's end
            start += len(batch)

    def note_failure(self, error: Exception, size_bytes: int) -> None:
        """Note what a write wanted, if it was a full disk that it met; writer thread only."""
        if disk_is_full(error):
            self.disk_short_bytes = max(self.disk_short_bytes, size_bytes)

    def _batch_with_room(self, stream: Stream, items: list[_Pending]) -> list[_Pending]:
        """The leading items that the stream's open segment takes, with room for them under the cap.

        Making room may move blocks into that very segment or seal it, so what fits is looked at again afterwards.
        """
        size_bytes = items[0].new.entry.length_bytes
        batch = self._fitting(self._segment_with_room(stream, size_bytes), items)
        if not batch:
            raise StorageError(f"a block of {size_bytes} bytes fits into no segment")
        payload_bytes = sum(fmt.align(item.new.entry.length_bytes) for item in batch)
        table_bytes = len(batch) * (fmt.ROW_BYTES + fmt.USE_BYTES) + 2 * fmt.ALIGNMENT_BYTES
        self._make_room(payload_bytes + table_bytes + NEW_SEGMENT_BYTES, self._unindexed + len(batch))
        return self._fitting(self._segment_with_room(stream, size_bytes), batch)

    def _segment_with_room(self, stream: Stream, size_bytes: int) -> Segment:
        segment = self._roomy(stream, size_bytes)
        if segment is None:
            self._make_room(NEW_SEGMENT_BYTES, self._unindexed)
            segment = self._open[stream] = self._new_segment(stream.class_id)
        return segment

    def _roomy(self, stream: Stream, size_bytes: int) -> Segment | None:
        """The stream's open segment, if it takes that much more; a full one is sealed."""
        segment = self._open.get(stream)
        if segment is not None and not segment.has_room(size_bytes, self._segments.segment_size_bytes):
            self.seal(stream)
            return None
        return segment

    def _fitting(self, segment: Segment, items: list[_Pending]) -> list[_Pending]:
        return items[: self._room_for(segment, [item.new for item in items])]

    def _room_for(self, segment: Segment, entries: Sequence[NewEntry]) -> int:
        """How many of the leading entries the segment takes."""
        end, slots = segment.end_bytes, segment.header.row_capacity - segment.slot_count
        for count, new in enumerate(entries[:slots]):
            end += fmt.align(new.entry.length_bytes)
            if end > self._segments.segment_size_bytes:
                return count
        return min(slots, len(entries))

    def _write(self, segment: Segment, batch: list[_Pending], now_s: int) -> None:
        uses = np.zeros((len(batch), fmt.USE_COLUMNS), dtype="<u4")
        for row, item in enumerate(batch):
            uses[row, [job.traffic_class.class_id for job, _ in item.waiting]] = now_s
        uses[:, fmt.USE_LENGTH] = marks_of(np.array([item.uses_seen for item in batch]))
        try:
            tags = _tags([item.new for item in batch])
            first_slot = segment.append([(item.new.entry, item.new.payload) for item in batch], uses, tags)
            self._valuation.place(segment.segment_id, tags)
            if self._durable:
                self._sync(segment, first_slot, len(batch))
        finally:
            self._segments.note_growth(segment)
        self._counters.add(bytes_written=sum(_written_bytes(item.new) for item in batch))
        self.uncommitted.add(segment.segment_id)
        self._unindexed += len(batch)
        for row, item in enumerate(batch):
            item.addr = BlockAddr(segment.segment_id, first_slot + row)

    def _sync(self, segment: Segment, first_slot: int, count: int) -> None:
        try:
            segment.sync()
        except OSError:
            # Whether the bytes are durable is unknown now, and a second sync would not tell: they are given up.
            segment.flag(np.arange(first_slot, first_slot + count), fmt.FLAG_DELETED)
            raise

    def _make_findable(self, written: list[_Pending]) -> None:
        if not written:
            return
        superseded: list[tuple[Segment, int]] = []
        try:
            # Where they are now: making room for the new ones may have moved them.
            keys = [item.new.key for item in written if item.replaced is not None]
            replaced = self._index.lookup(keys) if keys else {}
            # First, as in a move: a process that dies in between must not leave two places of a block.
            superseded = self._supersede(replaced.values())
            self._index.commit({item.new.key: item.addr for item in written if item.addr is not None})
        except KvStoreError as error:
            self.take_back(superseded)
            for item in written:
                self.flag(item.addr, fmt.FLAG_DELETED)
                item.addr, item.error = None, error
            return
        # Counted here, because their segments will not count them any more. One that is only suspected has not expired: the disk
        # did not give it when it was read, and it was counted then.
        expired = [slot for segment, slot in superseded if not segment.suspected(np.array([slot]))]
        self._counters.add(blocks_expired=len(expired))

    def _supersede(self, replaced: Iterable[BlockAddr]) -> list[tuple[Segment, int]]:
        """Flag the older copies; returns those that no flag had ended, which have expired or are suspected."""
        superseded = []
        for addr in replaced:
            segment = self._segments.get(addr.segment_id)
            # A damaged index may name a slot that no segment has.
            if segment is not None and addr.slot < segment.header.row_capacity:
                if not segment.uses[addr.slot, fmt.USE_FLAGS]:
                    superseded.append((segment, addr.slot))
                segment.flag(np.array([addr.slot]), fmt.FLAG_EVICTED)
        return superseded

    def take_back(self, places: Sequence[tuple[Segment, int]]) -> None:
        """Places that were flagged for new ones stay what they were, because the index did not take those.

        Durably, and before the new ones are flagged: a power loss must leave one of them.
        """
        for segment, slot in places:
            segment.take_back(np.array([slot]), fmt.FLAG_EVICTED)
        for segment in {segment for segment, _ in places} if self._durable else ():
            try:
                segment.sync()
            except OSError as error:
                _log.warning("segment %d cannot be synced: a power loss may take blocks: %s", segment.segment_id, error)

    def flag(self, addr: BlockAddr | None, flags: int) -> None:
        """Flag a slot, if there is one."""
        segment = self._segments.get(addr.segment_id) if addr is not None else None
        # A damaged index may name a slot that no segment has.
        if segment is not None and addr is not None and addr.slot < segment.header.row_capacity:
            segment.flag(np.array([addr.slot]), flags)

    def _answer(self, pending: list[_Pending]) -> None:
        for item in pending:
            first, *others = item.waiting
            failure = Outcome(PutStatus.REJECTED, item.error or StorageError("not written"))
            for job, position in others:
                job.outcomes[position] = EXISTS if item.addr is not None else failure
            job, position = first
            job.outcomes[position] = STORED if item.addr is not None else failure

    def seal(self, stream: Stream) -> None:
        """Stop appending to the stream's open segment; writer thread only.

        The header says so only when the index knows all its rows, because a start after a crash files those of open segments.
        """
        segment = self._open.pop(stream, None)
        if segment is not None:
            self._full.append(segment)
            self._seal_full()

    def _seal_full(self) -> None:
        unknown = self.uncommitted | self._uncommitted_moves
        for segment in self._full:
            if segment.segment_id not in unknown:
                segment.seal()
        self._full = [segment for segment in self._full if segment.segment_id in unknown]

    def moves_committed(self) -> None:
        """The index knows where moved entries are now, or they do not count; writer thread only."""
        self._uncommitted_moves.clear()
        self._seal_full()

    def seal_segment(self, segment: Segment) -> None:
        """Stop appending to it, if it is open; writer thread only."""
        for stream in [stream for stream, other in self._open.items() if other is segment]:
            self.seal(stream)

    def rewrite(self, stream: Stream, entries: Sequence[NewEntry], uses: NDArray[np.uint32]) -> list[BlockAddr]:
        """Append entries that are moved, with their use rows; writer thread only.

        The caller commits the index and then calls `moves_committed`.

        Needs room for them already: it never reclaims. Raises: OSError: none of them counts.
        """
        addrs: list[BlockAddr] = []
        try:
            self._rewrite(stream, entries, uses, addrs)
        except OSError:
            for addr in addrs:
                self.flag(addr, fmt.FLAG_DELETED)
            raise
        return addrs

    def _rewrite(
        self, stream: Stream, entries: Sequence[NewEntry], uses: NDArray[np.uint32], addrs: list[BlockAddr]
    ) -> None:
        while len(addrs) < len(entries):
            rest = entries[len(addrs) : len(addrs) + _MOVED_AT_A_TIME]
            segment = self._roomy(stream, rest[0].entry.length_bytes)
            if segment is None:
                segment = self._open[stream] = self._new_segment(stream.class_id)
            batch = rest[: max(1, self._room_for(segment, rest))]
            try:
                part = uses[len(addrs) : len(addrs) + len(batch)]
                tags = _tags(batch)
                slot = segment.append([(new.entry, new.payload) for new in batch], part, tags)
                self._valuation.place(segment.segment_id, tags)
            except OSError:
                self.seal(stream)
                raise
            finally:
                self._segments.note_growth(segment)
            self._uncommitted_moves.add(segment.segment_id)
            addrs += [BlockAddr(segment.segment_id, slot + position) for position in range(len(batch))]
            self._counters.add(bytes_written=sum(_written_bytes(new) for new in batch))
        for segment_id in {addr.segment_id for addr in addrs} if self._durable else ():
            moved_to = self._segments.get(segment_id)
            if moved_to is not None:
                moved_to.sync()


# A new file's header page, and the first page of each table.
NEW_SEGMENT_BYTES = 4 * fmt.ALIGNMENT_BYTES


def _tags(entries: Sequence[NewEntry]) -> NDArray[np.uint64]:
    """Shape (n, 2): as `Segment.append` wants them."""
    own = tags_of(b"".join(new.entry.prefix_hash for new in entries))
    return np.stack([own, np.array([new.parent_tag for new in entries], dtype=np.uint64)], axis=1)


def _written_bytes(new: NewEntry) -> int:
    return fmt.align(new.entry.length_bytes) + fmt.ROW_BYTES + fmt.USE_BYTES


def disk_is_full(error: Exception) -> bool:
    """Whether it is the disk that has no room, below the cap."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def storage_error(error: Exception) -> KvStoreError:
    """An operating system's error as one of ours."""
    if isinstance(error, KvStoreError):
        return error
    if disk_is_full(error):
        return StoreFullError(f"the disk is full: {error}")
    return StorageError(f"the disk or the file system failed: {error}")


def _settle(future: Future[T], function: Callable[[], T]) -> None:
    try:
        future.set_result(function())
    except Exception as error:  # the thread's edge: it belongs to whoever asked
        future.set_exception(error)
