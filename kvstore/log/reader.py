"""Reading blocks: rows are checked against their crcs and names, bytes against their checksums; what fails is a miss."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvstore.log import format as fmt
from kvstore.log.check import whole_rows
from kvstore.types import BlockAddr, Miss, ReadFrame
from kvstore_api.checksum import block_checksum
from kvstore_api.framing import MessageBuffer
from kvstore_api.limits import HASH_BYTES, MAX_FRAME_BLOCKS, MAX_FRAME_DATA_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from kvstore.counters import StoreCounters
    from kvstore.log.segment import Segment
    from kvstore.log.segments import SegmentSet

    _Files = Mapping[int, Segment | None]  # by segment id; None: reclaimed
    # Reads blocks (indices of a request) into a buffer, one after the other; returns checksums of those that are right, and misses.
    # Checksums of what was read, misses, and the checksums of the whole blocks where those are others.
    _Read = Callable[[range, memoryview], tuple[dict[int, int], list[Miss], dict[int, int]]]

_FIRST_FRAME_DIVISOR = 4
# Where only parts of blocks are wanted: bytes that are read whole at a time, to be checked, and those that are read for a frame at
# most, so that a frame of small parts of large blocks does not keep its reader waiting for gigabytes.
_SCRATCH_BYTES = 1 << 20
_READ_PER_FRAME_BYTES = 8 << 20
_SCRAP = memoryview(bytearray(fmt.ALIGNMENT_BYTES))  # padding between payloads is read into it and never looked at


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Blocks to read, in order: places and whether there is one, an item per block of [first_block, …)."""

    namespace_id: int
    block_bytes: int
    chain: bytes
    first_block: int
    segment_ids: Sequence[int]
    slots: Sequence[int]
    present: Sequence[bool]
    leased: bool  # the places are a lease's; else the index's
    part: range  # the bytes of each block that are wanted, at least one; the others are read and checked all the same

    @property
    def whole(self) -> bool:
        """Whether blocks are wanted as they are."""
        return len(self.part) == self.block_bytes

    def prefix_hash(self, index: int) -> bytes:
        """The hash of the index-th block asked for."""
        start = (self.first_block + index) * HASH_BYTES
        return self.chain[start : start + HASH_BYTES]


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring blocks in neighbouring slots of one segment."""

    index: int  # of the first block, in the request
    segment: Segment
    slot: int
    count: int


class BlockReader:
    """Reads for any number of threads."""

    def __init__(
        self,
        segments: SegmentSet,
        counters: StoreCounters,
        correct_index: Callable[[int, bytes, int, BlockAddr], None],
    ) -> None:
        self._segments = segments
        self._counters = counters
        self._correct_index = correct_index

    def frames(self, request: ReadRequest, *, in_messages: bool = False) -> Iterator[ReadFrame]:
        """The blocks, or the wanted part of each, in frames of up to 1 MiB, misses among them, in order. Each step does I/O.

        The files are held from now on, so a stream that outlasts its lease goes on reading them.
        With `in_messages`, frames without misses are read into messages that only want their other fields.
        """
        files = {segment_id: self._segments.get(segment_id) for segment_id in set(request.segment_ids)}
        if len(request.part) > MAX_FRAME_DATA_BYTES:
            return self._large_blocks(request, files)
        step = min(MAX_FRAME_DATA_BYTES // len(request.part), MAX_FRAME_BLOCKS)
        if request.whole:
            return self._frames(request, step, partial(self._read_whole, request, files), in_messages)
        step = max(1, min(step, _READ_PER_FRAME_BYTES // request.block_bytes))
        scratch = memoryview(bytearray(max(1, _SCRATCH_BYTES // request.block_bytes) * request.block_bytes))
        return self._frames(request, step, partial(self._read_parts, request, files, scratch), in_messages)

    def _frames(self, request: ReadRequest, step: int, read: _Read, in_messages: bool) -> Iterator[ReadFrame]:
        # The first frame is short, so that the others are read while it travels.
        end = min(max(1, step // _FIRST_FRAME_DIVISOR), len(request.slots))
        yield self._frame(request, range(end), read, in_messages)
        for first in range(end, len(request.slots), step):
            yield self._frame(request, range(first, min(first + step, len(request.slots))), read, in_messages)

    def _frame(self, request: ReadRequest, indices: range, read: _Read, in_messages: bool) -> ReadFrame:
        size = len(request.part)
        message = MessageBuffer(len(indices) * size) if in_messages else None
        view = message.view() if message is not None else memoryview(bytearray(len(indices) * size))
        checksums, misses, wholes = read(indices, view)
        blocks = [request.first_block + index for index in checksums]
        sums, whole_sums = list(checksums.values()), list(wholes.values())
        if not misses and message is not None:
            return ReadFrame(blocks, sums, 0, [], len(view), [], whole_sums, message)
        at = [(index - indices.start) * size for index in checksums]
        parts = [view[start : start + size] for start in at] if misses else [view]
        return ReadFrame(blocks, sums, 0, parts, len(checksums) * size, misses, whole_sums)

    def _large_blocks(self, request: ReadRequest, files: _Files) -> Iterator[ReadFrame]:
        buffer = memoryview(bytearray(request.block_bytes))
        for index in range(len(request.slots)):
            checksums, misses = self._read(request, files, range(index, index + 1), buffer)
            block = request.first_block + index
            if misses:
                yield ReadFrame([], [], 0, [], 0, misses)
                continue
            part = buffer[request.part.start : request.part.stop]
            checksum = checksums[index] if request.whole else block_checksum(part, request.prefix_hash(index))
            wholes = [] if request.whole else [checksums[index]]
            for offset in range(0, len(part), MAX_FRAME_DATA_BYTES):
                data = part[offset : offset + MAX_FRAME_DATA_BYTES]
                yield ReadFrame([block], [checksum], offset, [data], len(data), [], wholes)

    def _read_parts(
        self, request: ReadRequest, files: _Files, scratch: memoryview, indices: range, buffer: memoryview
    ) -> tuple[dict[int, int], list[Miss], dict[int, int]]:
        """As `_read`, but of each block only the part wanted comes into `buffer`, with a checksum of its own.

        That is of the very bytes that were checked as a part of their block, so nothing can happen to them in between unseen.
        """
        size, step = len(request.part), len(scratch) // request.block_bytes
        sums: dict[int, int] = {}
        wholes: dict[int, int] = {}
        misses: list[Miss] = []
        for first in range(indices.start, indices.stop, step):
            whole, missed = self._read(request, files, range(first, min(first + step, indices.stop)), scratch)
            misses += missed
            wholes |= whole
            for index in whole:
                start = (index - first) * request.block_bytes
                part = scratch[start + request.part.start : start + request.part.stop]
                sums[index] = block_checksum(part, request.prefix_hash(index))
                at = (index - indices.start) * size
                buffer[at : at + size] = part
        return sums, misses, wholes

    def _read_whole(
        self, request: ReadRequest, files: _Files, indices: range, buffer: memoryview
    ) -> tuple[dict[int, int], list[Miss], dict[int, int]]:
        return *self._read(request, files, indices, buffer), {}

    def _read(
        self, request: ReadRequest, files: _Files, indices: range, buffer: memoryview
    ) -> tuple[dict[int, int], list[Miss]]:
        """Read blocks into `buffer`, one after the other; returns checksums of those that are right, and the misses."""
        checksums: dict[int, int] = {}
        reasons: dict[int, str] = {}
        for run in _runs(request, files, indices):
            start = (run.index - indices.start) * request.block_bytes
            end = start + run.count * request.block_bytes
            self._read_run(request, run, buffer[start:end], checksums, reasons)
        misses = [
            Miss(request.first_block + index, reasons.get(index, "NOT_FOUND"))
            for index in indices
            if index not in checksums
        ]
        self._counters.add(
            blocks_read=len(checksums), bytes_read=len(checksums) * request.block_bytes, blocks_missed=len(misses)
        )
        return checksums, misses

    def _read_run(
        self, request: ReadRequest, run: _Run, target: memoryview, checksums: dict[int, int], reasons: dict[int, str]
    ) -> None:
        size = request.block_bytes
        indices = range(run.index, run.index + run.count)
        try:
            rows = run.segment.read_rows(run.slot, run.count)
            named = self._rightly_named(request, run, rows)
            got = self._read_payloads(run, rows, named, target, size)
        except OSError:
            if run.count > 1:  # one bad sector must not cost its neighbours
                for position in range(run.count):
                    one = _Run(run.index + position, run.segment, run.slot + position, 1)
                    self._read_run(request, one, target[position * size : (position + 1) * size], checksums, reasons)
                return
            run.segment.suspect(run.slot)
            reasons[run.index] = "IO_ERROR"
            self._counters.add(blocks_unreadable=1)
            return
        sums = rows["checksum"].tolist()
        for position, (index, is_named) in enumerate(zip(indices, named.tolist(), strict=True)):
            if not is_named:
                reasons[index] = self._misnamed(request, run, position, rows)
                continue
            block = target[position * size : (position + 1) * size]
            if position < got and block_checksum(block, request.prefix_hash(index)) == sums[position]:
                checksums[index] = sums[position]
            else:
                reasons[index] = "CORRUPT"
                run.segment.flag(np.array([run.slot + position]), fmt.FLAG_DELETED)
                self._counters.add(blocks_corrupt=1)

    def _misnamed(self, request: ReadRequest, run: _Run, position: int, rows: NDArray[np.void]) -> str:
        """Why a slot does not hold what was asked for; what can be mended is, so that it is not offered again."""
        slot = run.slot + position
        if run.segment.uses[slot, fmt.USE_FLAGS] & fmt.FLAG_DELETED:
            return "NOT_FOUND"
        if not whole_rows(run.segment, rows[position : position + 1], slot)[0]:
            run.segment.flag(np.array([slot]), fmt.FLAG_DELETED)
            self._counters.add(blocks_corrupt=1)
            return "CORRUPT"
        if not request.leased:
            block = request.first_block + run.index + position
            self._correct_index(request.namespace_id, request.chain, block, BlockAddr(run.segment.segment_id, slot))
        return "NOT_FOUND"

    def _rightly_named(self, request: ReadRequest, run: _Run, rows: NDArray[np.void]) -> NDArray[np.bool_]:
        first = request.first_block + run.index
        hashes = np.frombuffer(request.chain, dtype="V32")[first : first + run.count]
        named = whole_rows(run.segment, rows, run.slot)  # before anything else that a row says is believed
        named &= (rows["namespace_id"] == request.namespace_id) & (rows["kind"] == fmt.KIND_BLOCK)
        named &= (rows["prefix_hash"] == hashes) & (rows["length_bytes"] == request.block_bytes)
        named &= (run.segment.uses[run.slot : run.slot + run.count, 0] & fmt.FLAG_DELETED) == 0
        return named

    def _read_payloads(
        self, run: _Run, rows: NDArray[np.void], named: NDArray[np.bool_], target: memoryview, size: int
    ) -> int:
        """Fill `target`; returns how many leading blocks of the run were read whole."""
        stride = fmt.align(size)
        offsets = rows["offset_bytes"]
        if named.all() and (np.diff(offsets) == stride).all():
            return _read_neighbours(run.segment, int(offsets[0]), target, size)
        for position in np.flatnonzero(named):
            block = target[position * size : (position + 1) * size]
            if run.segment.read_payloads([block], int(offsets[position])) != size:
                block[:] = bytes(size)  # what was there before must not pass for the block
        return run.count


def _runs(request: ReadRequest, files: _Files, indices: range) -> Iterator[_Run]:
    run: _Run | None = None
    for index in indices:
        if not request.present[index]:
            continue
        segment_id, slot = request.segment_ids[index], request.slots[index]
        if (
            run is not None
            and run.index + run.count == index
            and run.segment.segment_id == segment_id
            and run.slot + run.count == slot
        ):
            run = _Run(run.index, run.segment, run.slot, run.count + 1)
            continue
        if run is not None:
            yield run
        segment = files[segment_id]
        run = _Run(index, segment, slot, 1) if segment is not None else None
    if run is not None:
        yield run


def _read_neighbours(segment: Segment, offset_bytes: int, target: memoryview, size: int) -> int:
    """One read for payloads that lie side by side; returns the whole blocks read."""
    padding = fmt.align(size) - size
    if not padding:
        return segment.read_payloads([target], offset_bytes) // size
    count = len(target) // size
    done = 0
    for first in range(0, count, _NEIGHBOURS_MAX):
        buffers = []
        for position in range(first, min(first + _NEIGHBOURS_MAX, count)):
            buffers += [target[position * size : (position + 1) * size], _SCRAP[:padding]]
        got = segment.read_payloads(buffers, offset_bytes + first * (size + padding))
        done += (got + padding) // (size + padding)
    return done


_NEIGHBOURS_MAX = 512  # payload and padding each take a buffer of one call, which takes at most 1,024
