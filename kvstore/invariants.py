"""Checks the store against itself: index against tables, tables against what is kept in memory, accounting against the disk.

It runs in small steps on the writer thread, which makes every change to index and segments, so that what one step compares holds
still meanwhile while puts go on between two steps. Each step reads the index in a transaction of its own. What only readers change
(a flag on a block they found damaged) and what the clock changes is looked at again before it is called a violation.

What must hold, between any two tasks of the writer:

1. The row of every live slot is whole, says the length and namespace that are kept beside it, and lies before the segment's end.
2. The index has the key of every live slot's row, and points there. So no two live slots hold one block.
3. Every index entry names a slot whose row carries its key, or a slot that was flagged when its row was found damaged, or a
   segment that is gone: reclaim drops entries last, and a crash may leave some.
4. What the census counts is what a recount of the tables gives.
5. No file takes more than is counted for it, no file is counted that is not there, and none is there that is not counted.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvstore.census import taken_bytes
from kvstore.errors import KvStoreError
from kvstore.index import row_keys
from kvstore.log import format as fmt
from kvstore.log.check import whole_rows
from kvstore.log.segments import DAMAGED_SUFFIX
from kvstore.types import BlockAddr, InvariantReport, SegmentId, Usage
from kvstore_api.limits import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from kvstore.census import Census
    from kvstore.clock import Clock
    from kvstore.index import BlockIndex
    from kvstore.log.segment import Segment
    from kvstore.log.segments import SegmentSet

_SLOTS_PER_STEP = 512  # about 2 ms of the writer's time
_ENTRIES_PER_STEP = 512
_FILES_PER_STEP = 64
_VIOLATIONS_MAX = 100
# Rows of one segment that entries ask for are read in one go when no more than this many others lie between them.
_ROW_GAP = 64
# A file system may add a page or two of its own to a file after it was measured, for the list of its extents.
_FILE_SLACK_BYTES = 8192
_BESIDE_SLACK_BYTES = 64 << 10
_RECOUNTS = 3


class InvariantCheck:
    """One check.

    Args:
        directory: the data directory.
        live: which slots of a segment are live, as the census asks it.
        used_bytes: what the store thinks its directory takes.
        segment_ids_end: ids from here on were never given to a segment.
        on_writer: runs a function on the writer thread and waits for it.
    """

    def __init__(
        self,
        directory: Path,
        segments: SegmentSet,
        index: BlockIndex,
        census: Census,
        clock: Clock,
        *,
        live: Callable[[Segment], NDArray[np.bool_]],
        used_bytes: Callable[[], int],
        segment_ids_end: Callable[[], int],
        on_writer: Callable[[Callable[[], None]], None],
    ) -> None:
        self._directory, self._segments, self._index = directory, segments, index
        self._census, self._clock = census, clock
        self._live, self._used_bytes = live, used_bytes
        self._segment_ids_end, self._on_writer = segment_ids_end, on_writer
        self._segment_count = self._slots = self._live_blocks = self._entries = self._stale = 0
        self._accounted_bytes = self._allocated_bytes = 0
        self._last_key = b""
        self._walked = False
        self._violation_count = 0
        self._violations: list[str] = []

    def steps(self) -> Iterator[float]:
        """Run the check, yielding how much of it is done, 0 to 1, after each step on the writer thread."""
        segments = self._segments.all()
        self._segment_count = len(segments)
        for done, pieces in enumerate(steps := list(_pieces(segments))):
            self._on_writer(partial(self._check_pieces, pieces))
            yield 0.5 * done / len(steps)
        entries_expected = max(1, self._live_blocks)
        while not self._walked:
            self._on_writer(self._check_entries)
            yield 0.5 + 0.4 * min(1.0, self._entries / entries_expected)
        for first in range(0, len(segments), _FILES_PER_STEP):
            part = segments[first : first + _FILES_PER_STEP]
            self._on_writer(partial(self._check_files, part))
            yield 0.9 + 0.1 * first / len(segments)
        self._on_writer(self._check_directory)

    def report(self) -> InvariantReport:
        """What the steps have found."""
        return InvariantReport(
            time_s=self._clock.now_s(),
            segments=self._segment_count,
            slots=self._slots,
            live_blocks=self._live_blocks,
            index_entries=self._entries,
            stale_entries=self._stale,
            accounted_bytes=self._accounted_bytes,
            allocated_bytes=self._allocated_bytes,
            violation_count=self._violation_count,
            violations=tuple(self._violations),
        )

    def _violated(self, sentence: str) -> None:
        self._violation_count += 1
        if len(self._violations) < _VIOLATIONS_MAX:
            self._violations.append(sentence)

    # Tables

    def _check_pieces(self, pieces: Sequence[tuple[Segment, int, int]]) -> None:
        for segment, first_slot, count in pieces:
            if segment.state == fmt.STATE_RETIRED:
                continue  # all its slots are flagged, and its file may go at any moment
            if first_slot == 0:
                self._check_census(segment)
            try:
                self._check_slots(segment, first_slot, count)
                self._check_end(segment, first_slot + count)
            except OSError as error:
                self._violated(f"segment {segment.segment_id}: its row table cannot be read: {error}")
            except KvStoreError as error:
                self._violated(f"segment {segment.segment_id}: its blocks cannot be looked up: {error}")

    def _check_slots(self, segment: Segment, first_slot: int, count: int) -> None:
        rows = segment.read_rows(first_slot, count)
        whole = whole_rows(segment, rows, first_slot)
        live = self._live(segment)[first_slot : first_slot + count]
        self._slots += count
        self._live_blocks += int(live.sum())
        self._check_facts(segment, rows, whole, first_slot)
        for at in self._still_live(segment, first_slot, np.flatnonzero(live & ~whole)):
            self._violated(f"segment {segment.segment_id} slot {first_slot + at}: live, but its row is damaged")
        self._check_lookups(segment, rows, first_slot, np.flatnonzero(live & whole))

    def _check_facts(self, segment: Segment, rows: NDArray[np.void], whole: NDArray[np.bool_], first_slot: int) -> None:
        here = slice(first_slot, first_slot + len(rows))
        ends = rows["offset_bytes"] + rows["length_bytes"]
        for wrong, words in (
            (rows["length_bytes"] != segment.lengths[here], "another length than is kept beside it"),
            (rows["namespace_id"] != segment.namespace_ids[here], "another namespace than is kept beside it"),
            (ends > segment.end_bytes, f"a payload behind byte {segment.end_bytes}, where the segment ends"),
        ):
            for at in np.flatnonzero(wrong & whole).tolist():
                self._violated(f"segment {segment.segment_id} slot {first_slot + at}: its row says {words}")

    def _check_end(self, segment: Segment, slot: int) -> None:
        """No row lies behind the last slot, unless an append failed there, which flagged it."""
        if slot != segment.slot_count or slot == segment.header.row_capacity or segment.uses[slot, fmt.USE_FLAGS]:
            return
        if segment.read_rows(slot, 1)["magic"][0]:
            self._violated(
                f"segment {segment.segment_id} slot {slot}: there is a row, but the segment has {slot} slots"
            )

    def _check_lookups(
        self, segment: Segment, rows: NDArray[np.void], first_slot: int, offered: NDArray[np.intp]
    ) -> None:
        keys = row_keys(rows[offered])
        found = self._index.lookup(keys)
        wrong = [
            (int(at), found.get(key))
            for at, key in zip(offered, keys, strict=True)
            if found.get(key) != BlockAddr(segment.segment_id, first_slot + int(at))
        ]
        still = self._still_live(segment, first_slot, np.array([at for at, _ in wrong], dtype=np.intp))
        for at, other in wrong:
            if at in still:
                where = f"points to segment {other.segment_id} slot {other.slot}" if other else "does not have it"
                self._violated(f"segment {segment.segment_id} slot {first_slot + at}: live, but the index {where}")

    def _still_live(self, segment: Segment, first_slot: int, positions: NDArray[np.intp]) -> list[int]:
        """Which of them are: a reader may have flagged one in the meantime, or its time may have run out."""
        if not len(positions):
            return []
        live = self._live(segment)
        return [int(at) for at in positions if live[first_slot + at]]

    def _check_census(self, segment: Segment) -> None:
        for _ in range(_RECOUNTS):
            counted = _sum(self._census.by_class([segment]).values())
            by_namespace = _sum(self._census.by_namespace([segment]).values())
            live = self._live(segment)
            lengths = segment.lengths[: len(live)][live].astype(np.int64)
            recount = Usage(len(lengths), int(lengths.sum()), int(taken_bytes(lengths).sum()))
            if counted == by_namespace == recount:
                return
            # A second may have ended in between, and blocks with it.
        self._violated(
            f"segment {segment.segment_id}: the census counts {_amount(counted)} by class and {_amount(by_namespace)} by "
            f"namespace, its tables hold {_amount(recount)}"
        )

    # Index

    def _check_entries(self) -> None:
        try:
            entries = self._index.entries(self._last_key, _ENTRIES_PER_STEP)
        except KvStoreError as error:
            self._violated(f"index: cannot be walked behind key {self._last_key.hex() or '(none)'}: {error}")
            self._walked = True
            return
        self._entries += len(entries)
        self._walked = len(entries) < _ENTRIES_PER_STEP
        if entries:
            self._last_key = entries[-1][0]
        stale: list[tuple[bytes, BlockAddr]] = []
        by_segment: dict[SegmentId, list[tuple[int, bytes]]] = {}
        for key, addr in entries:
            by_segment.setdefault(addr.segment_id, []).append((addr.slot, key))
        for segment_id, wanted in by_segment.items():
            segment = self._segments.get(segment_id)
            if segment is not None:
                for sentence in misplaced_entries(segment, wanted):
                    self._violated(f"index: {sentence}")
            elif segment_id < self._segment_ids_end():
                self._stale += len(wanted)
                stale += [(key, BlockAddr(segment_id, slot)) for slot, key in wanted]
            else:
                for _, key in wanted:
                    self._violated(f"index: {named(key)} is said to lie in segment {segment_id}, which never was")
        if stale:
            # Left by a process that died between removing a file and its entries; they would stay for good.
            with contextlib.suppress(KvStoreError):
                self._index.commit({}, stale)

    # Accounting

    def _check_files(self, segments: Sequence[Segment]) -> None:
        accounted = self._segments.accounted()
        for segment in segments:
            counted = accounted.get(segment.segment_id)
            if counted is None:
                continue  # reclaimed meanwhile
            try:
                taken = segment.path.stat().st_blocks * 512
            except OSError as error:
                self._violated(f"{segment.path.name}: {counted} bytes are counted for it, but {error.strerror}")
                continue
            self._allocated_bytes += taken
            # Less than was counted is no error: some file systems allocate ahead of a file that grows, and take it back later.
            if taken > counted + _FILE_SLACK_BYTES:
                self._violated(f"{segment.path.name}: takes {taken} bytes, {counted} are counted for it")
            self._segments.note_growth(segment)

    def _check_directory(self) -> None:
        """What lies beside the segments in the directory, and no segment file that nothing knows."""
        accounted = sum(self._segments.accounted().values())
        known = {segment.path for segment in self._segments.all()}
        beside_bytes, aside_bytes = _taken_bytes(self._directory), 0
        for path in self._directory.rglob("*"):
            if path.suffix == DAMAGED_SUFFIX:
                aside_bytes += _taken_bytes(path)
            elif path.suffix != ".seg":
                beside_bytes += _taken_bytes(path)
            elif path not in known:
                self._violated(f"{path.name}: is in the directory, but nothing knows it")
        self._accounted_bytes, in_segments = self._used_bytes(), self._segments.used_bytes()
        self._allocated_bytes += beside_bytes + aside_bytes
        if in_segments != accounted + aside_bytes:
            self._violated(
                f"{in_segments} bytes are counted for all segment files, {accounted} for each of them added up and "
                f"{aside_bytes} for those set aside"
            )
        if beside_bytes > self._accounted_bytes - in_segments + _BESIDE_SLACK_BYTES:
            self._violated(
                f"{self._directory}: takes {beside_bytes} bytes beside its segments, "
                f"{self._accounted_bytes - in_segments} are counted for it"
            )


def misplaced_entries(segment: Segment, wanted: Iterable[tuple[int, bytes]]) -> Iterator[str]:
    """A sentence for each index entry whose slot does not hold what the entry says.

    Damaged rows and tables that cannot be read are passed over: who checks the tables tells them.

    Args: wanted: slots of the segment, and the keys that the index has for them.
    """
    in_order = sorted(wanted)
    there = [(slot, key) for slot, key in in_order if slot < segment.slot_count]
    for slot, key in in_order[len(there) :]:
        yield (
            f"{named(key)} is said to lie in segment {segment.segment_id} slot {slot}, which has {segment.slot_count} slots"
        )
    for run in _runs(there):
        first_slot = run[0][0]
        try:
            rows = segment.read_rows(first_slot, run[-1][0] - first_slot + 1)
        except OSError:
            continue
        rows = rows[[slot - first_slot for slot, _ in run]]
        for (slot, key), other, row in zip(run, row_keys(rows), rows, strict=True):
            if other != key and whole_rows(segment, row.reshape(1), slot)[0]:
                yield (
                    f"{named(key)} is said to lie in segment {segment.segment_id} slot {slot}, which holds {named(other)}"
                )


def _pieces(segments: Iterable[Segment]) -> Iterator[list[tuple[Segment, int, int]]]:
    """Stretches of slots (segment, first, count), as many as one step takes."""
    step: list[tuple[Segment, int, int]] = []
    room = _SLOTS_PER_STEP
    for segment in segments:
        first = 0
        while first < segment.slot_count:
            count = min(room, segment.slot_count - first)
            step.append((segment, first, count))
            first, room = first + count, room - count
            if not room:
                yield step
                step, room = [], _SLOTS_PER_STEP
    if step:
        yield step


def _runs(wanted: Sequence[tuple[int, bytes]]) -> Iterator[list[tuple[int, bytes]]]:
    """Slots that lie close together, to be read in one go."""
    run: list[tuple[int, bytes]] = []
    for item in wanted:
        if run and item[0] - run[-1][0] > _ROW_GAP:
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def _sum(parts: Iterable[Usage]) -> Usage:
    blocks = size = taken = 0
    for part in parts:
        blocks, size, taken = blocks + part.blocks, size + part.bytes, taken + part.taken_bytes
    return Usage(blocks, size, taken)


def _amount(usage: Usage) -> str:
    return f"{usage.blocks} live blocks of {usage.bytes} bytes in {usage.taken_bytes}"


def named(key: bytes) -> str:
    """An index key for people."""
    return f"block {key[-HASH_BYTES:].hex()[:16]}… of namespace {int.from_bytes(key[:4], 'big')}"


def _taken_bytes(path: Path) -> int:
    """What `du` counts for it."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0  # another thread's scratch file, replaced meanwhile
