"""Checking a segment's blocks against what their rows say: for scrubbing a running store and for checking one that is stopped.

Changes nothing. Reads in small steps, so that whoever walks a store can pause, and be stopped, between any two of them.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.log import format as fmt
from kvstore_api.checksum import block_checksum
from kvstore_api.limits import MAX_BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from kvstore.log.segment import Segment

# Why a block is damaged, or for `IO_ERROR` not known to be whole; stable names, printed by the commands.
ROW_DAMAGED = "ROW_DAMAGED"
BAD_CHECKSUM = "BAD_CHECKSUM"
TRUNCATED = "TRUNCATED"
IO_ERROR = "IO_ERROR"

_ROWS_PER_STEP = 256  # their crcs hold the interpreter's lock for about 0.4 ms
_BYTES_PER_STEP = 1 << 20
_OFFSET_END = 1 << 62  # no read takes an offset of 2^63 or more
# So many failed reads in a row are the disk's trouble and not the blocks': the segment is left alone, because each may take a
# disk that is in trouble half a minute.
_FAILED_READS_MAX = 8


@dataclass(frozen=True, slots=True)
class Alive:
    """Says which blocks are worth reading.

    Args:
        unexpired: use rows, shape (n, 16), to which of them are neither flagged nor expired.
        known: namespace ids to which of them are not dropped.
    """

    unexpired: Callable[[NDArray[np.uint32]], NDArray[np.bool_]]
    known: Callable[[NDArray[np.uint32]], NDArray[np.bool_]]


@dataclass(frozen=True, slots=True)
class Damage:
    """A block that is not what was stored, or one that the disk does not give."""

    slot: int
    reason: str
    row: np.void | None  # None when the row itself is damaged: nobody knows whose block it was


@dataclass(frozen=True, slots=True)
class Checked:
    """What one step has found."""

    next_slot: int  # where to go on
    blocks: int
    bytes: int
    damaged: Sequence[Damage]


def check_blocks(segment: Segment, first_slot: int, alive: Alive) -> Iterator[Checked]:
    """Read the blocks from `first_slot` on that are still offered, about 1 MiB a step.

    Blocks that were flagged, have expired or whose namespace is dropped are passed over: nobody will get them.
    Raises: OSError: the row table cannot be read, or block after block cannot, the last of which were told.
    """
    reader = _PayloadReader(segment)
    while first_slot < segment.slot_count:
        count = min(_ROWS_PER_STEP, segment.slot_count - first_slot)
        rows = segment.read_rows(first_slot, count)
        whole = whole_rows(segment, rows, first_slot)
        here = slice(first_slot, first_slot + count)
        namespace_ids = np.where(whole, rows["namespace_id"], segment.namespace_ids[here])  # a damaged row may say any
        wanted = alive.unexpired(segment.uses[here]) & alive.known(namespace_ids)
        damaged = [Damage(first_slot + int(at), ROW_DAMAGED, None) for at in np.flatnonzero(wanted & ~whole)]
        yield Checked(first_slot, len(damaged), 0, damaged)
        for run in _runs(rows, np.flatnonzero(wanted & whole).tolist()):
            yield reader.check(first_slot, rows, run)
            if reader.gave_up:
                raise OSError(errno.EIO, reader.gave_up)
        first_slot += count
        yield Checked(first_slot, 0, 0, [])


def whole_rows(segment: Segment, rows: NDArray[np.void], first_slot: int) -> NDArray[np.bool_]:
    """Which rows are whole, belong where they stand, and name a place where a payload can be."""
    whole = fmt.valid_rows(rows, segment.segment_id, first_slot)
    whole &= (rows["offset_bytes"] >= segment.layout.payload_offset) & (rows["offset_bytes"] < _OFFSET_END)
    whole &= rows["length_bytes"] <= MAX_BLOCK_BYTES
    return whole


def payload_is_right(row: np.void, payload: memoryview) -> bool:
    """Whether these are the bytes that were stored under the row's name."""
    is_state = row["kind"] == fmt.KIND_STATE
    seed = row["anchor"].tobytes() + bytes([row["seed_byte"]]) if is_state else row["prefix_hash"].tobytes()
    return block_checksum(payload, seed) == int(row["checksum"])


def _runs(rows: NDArray[np.void], positions: Sequence[int]) -> Iterator[list[int]]:
    """Rows whose payloads lie side by side, so many that one read of about 1 MiB takes them; a larger block comes alone."""
    run: list[int] = []
    begin = end = 0
    for position in positions:
        offset, length = int(rows["offset_bytes"][position]), int(rows["length_bytes"][position])
        if run and (offset != fmt.align(end) or offset + length - begin > _BYTES_PER_STEP):
            yield run
            run = []
        if not run:
            begin = offset
        run.append(position)
        end = offset + length
    if run:
        yield run


class _PayloadReader:
    """Reads and checks runs of payloads of one segment, into one buffer."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._buffer = memoryview(b"")
        self._failed_reads = 0  # in a row
        self.gave_up = ""  # why, once block after block could not be read

    def check(self, first_slot: int, rows: NDArray[np.void], run: Sequence[int]) -> Checked:
        """Check the payloads of the rows at `run`, or of the first of them if the reader gives up."""
        begin = int(rows["offset_bytes"][run[0]])
        try:
            damaged = self._check(first_slot, rows, run, begin)
        except OSError as error:
            if len(run) > 1:
                return self._check_one_by_one(first_slot, rows, run)
            self._note_failure(error)
            damaged = [Damage(first_slot + run[0], IO_ERROR, rows[run[0]])]
        return _checked(first_slot, rows, run, damaged)

    def _check_one_by_one(self, first_slot: int, rows: NDArray[np.void], run: Sequence[int]) -> Checked:
        """One bad sector must not cost its neighbours."""
        done: list[int] = []
        damaged: list[Damage] = []
        for position in run:
            damaged += self.check(first_slot, rows, [position]).damaged
            done.append(position)
            if self.gave_up:
                break
        return _checked(first_slot, rows, done, damaged)

    def _note_failure(self, error: OSError) -> None:
        self._failed_reads += 1
        if self._failed_reads >= _FAILED_READS_MAX:
            self.gave_up = f"{self._failed_reads} reads in a row failed, the last with: {error}"

    def _check(self, first_slot: int, rows: NDArray[np.void], run: Sequence[int], begin: int) -> list[Damage]:
        last = rows[run[-1]]
        view = self._room(int(last["offset_bytes"]) + int(last["length_bytes"]) - begin)
        got = self._segment.read_payloads([view], begin)
        self._failed_reads = 0
        damaged = []
        for position in run:
            row = rows[position]
            start = int(row["offset_bytes"]) - begin
            end = start + int(row["length_bytes"])
            if end > got:
                damaged.append(Damage(first_slot + position, TRUNCATED, row))
            elif not payload_is_right(row, view[start:end]):
                damaged.append(Damage(first_slot + position, BAD_CHECKSUM, row))
        return damaged

    def _room(self, size_bytes: int) -> memoryview:
        if len(self._buffer) < size_bytes:
            self._buffer = memoryview(bytearray(max(size_bytes, _BYTES_PER_STEP)))
        return self._buffer[:size_bytes]


def _checked(first_slot: int, rows: NDArray[np.void], run: Sequence[int], damaged: Sequence[Damage]) -> Checked:
    size = sum(int(rows["length_bytes"][position]) for position in run)
    return Checked(first_slot + run[-1] + 1, len(run), size, damaged)
