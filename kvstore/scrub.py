"""Scrubbing: reading every block that is still offered, while the store serves, to find damage before a request does.

One walk reads the segments oldest first, in steps of about 1 MiB that its caller paces. It holds no lock and pins nothing: a
segment reclaimed under it is simply the end of that segment. What was stored after the walk began waits for the next one.

Only bytes that were read and are wrong condemn a block. One that the disk does not give is not known to be damaged: it is not
offered for a minute, as after a get, and the next walk reads it again. A cable that somebody is plugging in must not cost a cache
that is whole.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvstore.errors import InvalidArgumentError
from kvstore.log import format as fmt
from kvstore.log.check import IO_ERROR, Alive, Damage, check_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore.log.segment import Segment
    from kvstore.log.segments import SegmentSet

_CURSOR = re.compile(r"(\d{1,14}):(\d{1,7})", re.ASCII)


class Cursor(NamedTuple):
    """Where a walk goes on: in that segment, or in the next one that is still there."""

    segment_id: int
    slot: int

    def __str__(self) -> str:
        return f"{self.segment_id}:{self.slot}"


BEGINNING = Cursor(0, 0)


def parse_cursor(text: str) -> Cursor:
    """A cursor from its text; empty means the beginning. Raises: InvalidArgumentError."""
    if not text:
        return BEGINNING
    match = _CURSOR.fullmatch(text)
    if match is None:
        raise InvalidArgumentError(f"cursor is {text[:64]!r}, which no scrub has given; it looks like 17:2048")
    return Cursor(int(match[1]), int(match[2]))


@dataclass(frozen=True, slots=True)
class DamagedBlock:
    """A block that was found damaged, and is not offered any more; or one that cannot be read, and is not offered for a minute."""

    segment_id: int
    slot: int
    reason: str  # see `log/check.py`
    namespace: bytes  # its digest; empty when the row is damaged, too
    prefix_hash: bytes  # likewise


@dataclass(frozen=True, slots=True)
class UnreadableSegment:
    """A segment that was left alone because the disk does not give it."""

    segment_id: int
    why: str


@dataclass(frozen=True, slots=True)
class ScrubStep:
    """How far a walk is after a step, and what that step has found."""

    cursor: Cursor
    segments_done: int
    segments_total: int
    blocks_checked: int  # by this walk
    bytes_done: int  # payload bytes read by this walk
    bytes_total: int  # live payload bytes from where it began, as counted then
    damaged: Sequence[DamagedBlock]
    unreadable: Sequence[UnreadableSegment]
    finished: bool


class Scrubber:
    """One walk.

    Args:
        live_bytes: a segment's live payload bytes.
        condemn: flags those of the slots that are still offered and counts them; returns which they were.
        suspect: likewise, for blocks that cannot be read, but only for a minute.
        digest: a namespace id's digest; empty if it was dropped.
    """

    def __init__(
        self,
        segments: SegmentSet,
        alive: Alive,
        *,
        live_bytes: Callable[[Segment], int],
        condemn: Callable[[Segment, Sequence[int]], set[int]],
        suspect: Callable[[Segment, Sequence[int]], set[int]],
        digest: Callable[[int], bytes],
    ) -> None:
        self._segments, self._alive, self._live_bytes = segments, alive, live_bytes
        self._condemn, self._suspect, self._digest = condemn, suspect, digest
        self._blocks_checked = self._bytes_done = 0

    def steps(self, begin: Cursor, max_bytes: int) -> Iterator[ScrubStep]:
        """Walk from `begin` to the newest segment there is now, or until `max_bytes` were read (0: no limit).

        Each step does I/O. The last one says whether the walk is finished.
        """
        everything = [segment.segment_id for segment in self._segments.all()]
        ids = [segment_id for segment_id in everything if segment_id >= begin.segment_id]
        before, total_bytes = len(everything) - len(ids), self._bytes_from(ids)
        for done, segment_id in enumerate(ids):
            first_slot = begin.slot if segment_id == begin.segment_id else 0
            for cursor, damaged, unreadable in self._segment_steps(segment_id, first_slot):
                stop = 0 < max_bytes <= self._bytes_done
                yield ScrubStep(
                    cursor,
                    before + done,
                    len(everything),
                    self._blocks_checked,
                    self._bytes_done,
                    total_bytes,
                    damaged,
                    unreadable,
                    finished=False,
                )
                if stop:
                    return
        end = Cursor(everything[-1] + 1 if everything else 0, 0)
        total = len(everything)
        yield ScrubStep(end, total, total, self._blocks_checked, self._bytes_done, total_bytes, [], [], finished=True)

    def _bytes_from(self, ids: Sequence[int]) -> int:
        found = (self._segments.get(segment_id) for segment_id in ids)
        return sum(self._live_bytes(segment) for segment in found if segment is not None)

    def _segment_steps(
        self, segment_id: int, first_slot: int
    ) -> Iterator[tuple[Cursor, list[DamagedBlock], list[UnreadableSegment]]]:
        segment = self._segments.get(segment_id)
        if segment is None or segment.state == fmt.STATE_RETIRED:
            return
        try:
            for checked in check_blocks(segment, first_slot, self._alive):
                self._blocks_checked += checked.blocks
                self._bytes_done += checked.bytes
                yield Cursor(segment_id, checked.next_slot), self._settle(segment, checked.damaged), []
                if segment.state == fmt.STATE_RETIRED:
                    return
        except OSError as error:
            yield Cursor(segment_id + 1, 0), [], [UnreadableSegment(segment_id, str(error))]

    def _settle(self, segment: Segment, damaged: Sequence[Damage]) -> list[DamagedBlock]:
        """Take blocks out of the offer. One that was dropped or moved while it was read is no news."""
        wrong = [damage.slot for damage in damaged if damage.reason != IO_ERROR]
        unread = [damage.slot for damage in damaged if damage.reason == IO_ERROR]
        news = self._condemn(segment, wrong) if wrong else set()
        news |= self._suspect(segment, unread) if unread else set()
        return [self._describe(segment, damage) for damage in damaged if damage.slot in news]

    def _describe(self, segment: Segment, damage: Damage) -> DamagedBlock:
        row = damage.row
        if row is None:
            return DamagedBlock(segment.segment_id, damage.slot, damage.reason, b"", b"")
        namespace = self._digest(int(row["namespace_id"]))
        return DamagedBlock(segment.segment_id, damage.slot, damage.reason, namespace, row["prefix_hash"].tobytes())


class Pace:
    """Spreads reads over time. What was missed while a disk was slow is not made up for in a burst.

    Args: bytes_per_second: 0 for no limit.
    """

    def __init__(self, bytes_per_second: int, now_s: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_s = now_s  # when the next read may begin

    def pause_s(self, read_bytes: int, now_s: float) -> float:
        """How long to wait after reading so much, with the read's own time counted in.

        Args: now_s: of the same monotonic clock as at the start.
        """
        if not self._bytes_per_second:
            return 0.0
        self._free_s = max(self._free_s, now_s - _BEHIND_MAX_S) + read_bytes / self._bytes_per_second
        return max(0.0, self._free_s - now_s)


_BEHIND_MAX_S = 0.1
