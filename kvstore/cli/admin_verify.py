"""`kvstore-admin verify`: read every stored block of a running server, and find the damaged ones before a request does."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.admin_client import exit_code, session_of, stream
from kvstore.cli.admin_errors import CommandError, ExitCode
from kvstore.cli.admin_values import format_bytes, parse_duration, parse_size
from kvstore.cli.output import Cell, Digest, Facts, Listing, Result, Section, Sentence, format_time, time_of
from kvstore.cli.progress import ProgressShow, progress_show
from kvstore_api.v1 import admin_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime

    from kvstore.cli.admin_client import Session

_ROWS_SHOWN = 50  # of damaged blocks in a table; JSON has them all
_IO_ERROR = "IO_ERROR"  # the reason of a block that is not damaged but cannot be read; see admin.proto
_INVARIANTS_SHARE = 0.02  # of the bar, for the check at the end


@dataclass(frozen=True, slots=True)
class DamagedBlock:
    """A block that was found damaged, and is not offered any more; or one that cannot be read, and is not offered for a minute."""

    namespace: bytes | None  # None, like the hash, when the row that named it is damaged, too
    prefix_hash: bytes | None
    segment_id: int
    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class UnreadableSegment:
    """A segment that was left alone because the disk does not give it."""

    segment_id: int
    detail: str


@dataclass(frozen=True, slots=True)
class Invariants:
    """A check of the store against itself."""

    time: datetime
    segments: int
    slots: int
    live_blocks: int
    index_entries: int
    stale_entries: int
    accounted_bytes: int
    allocated_bytes: int
    violation_count: int
    violations: Sequence[str]


@dataclass(frozen=True, slots=True)
class Stop:
    """The error that ended a scrub early."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Verification(Result):
    """What a scrub has done and found."""

    finished: bool
    resume: str | None  # what --from continues with; None when finished
    stopped: Stop | None  # None: finished, or a limit that was asked for
    segments_done: int
    segments_total: int
    blocks_checked: int
    bytes_done: int
    bytes_total: int
    elapsed_s: float
    damaged: Sequence[DamagedBlock]
    unreadable_blocks: Sequence[DamagedBlock]
    unreadable: Sequence[UnreadableSegment]
    invariants: Invariants | None  # None: it was not come to

    def sections(self) -> Iterable[Section]:
        """The result for people's eyes."""
        yield Facts(
            [
                ("checked", f"{self.blocks_checked:,} blocks, {format_bytes(self.bytes_done)}"),
                ("segments", f"{self.segments_done:,} of {self.segments_total:,}"),
                ("time", f"{self.elapsed_s:.1f} s"),
                ("damaged blocks", len(self.damaged)),
                ("unreadable blocks", len(self.unreadable_blocks)),
                ("unreadable segments", len(self.unreadable)),
                (
                    "store against itself",
                    invariants_text(self.invariants, never="not checked, the scrub did not finish"),
                ),
            ]
        )
        bad = [*self.damaged, *self.unreadable_blocks]
        if bad:
            rows: list[Sequence[Cell]] = [_cells(block) for block in bad[:_ROWS_SHOWN]]
            yield Listing(("namespace", "prefix hash", "segment", "slot", "reason"), rows)
        if len(bad) > _ROWS_SHOWN:
            yield Sentence(f"and {len(bad) - _ROWS_SHOWN:,} more, which -o json shows")
        for segment in self.unreadable:
            yield Sentence(f"segment {segment.segment_id} cannot be read: {segment.detail}")
        for violation in self.invariants.violations if self.invariants else ():
            yield Sentence(f"violated: {violation}")
        if self.finished and not self.blocks_checked:
            yield Sentence("0 blocks checked: there are none from there on that are still offered")
        if self.resume is not None:
            yield Sentence(f"not finished; continue with: kvstore-admin verify --from {self.resume}")

    def complaint(self) -> CommandError | None:
        """The damage found, or else what ended the scrub. A limit that was asked for is no error."""
        violations = self.invariants.violation_count if self.invariants else 0
        found = [
            _count(len(self.damaged), "damaged block"),
            _count(len(self.unreadable_blocks), "unreadable block"),
            _count(len(self.unreadable), "unreadable segment"),
            _count(violations, "violated invariant"),
        ]
        words = ", ".join(filter(None, found))
        if words:
            before = f" before it ended: {self.stopped.message}" if self.stopped else ""
            return CommandError(
                f"found {words}{before}",
                reason="CORRUPTION_FOUND",
                exit_code=ExitCode.CORRUPTION,
                fix="check the disk; damaged blocks are misses from now on and need nothing else"
                + ("; unreadable ones are offered again after a minute" if self.unreadable_blocks else "")
                + ("; report violated invariants, they are a defect" if violations else ""),
            )
        if self.stopped is None:
            return None
        return CommandError(
            self.stopped.message,
            reason=self.stopped.reason,
            exit_code=exit_code(self.stopped.reason),
            fix=f"continue with: kvstore-admin verify --from {self.resume}",
        )


def verify(
    ctx: typer.Context,
    begin: Annotated[
        str | None,
        typer.Option("--from", metavar="CURSOR", help="Continue where an earlier run ended; it printed the cursor."),
    ] = None,
    rate: Annotated[
        str, typer.Option(metavar="SIZE", help="Payload bytes to read in a second, at most, e.g. 1GiB; 0 for no limit.")
    ] = "100MiB",
    max_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Stop after about so many payload bytes and print the cursor.")
    ] = None,
    max_time: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Stop after so long and print the cursor, e.g. 2h.")
    ] = None,
) -> Verification:
    """Read every block that is still offered, take damaged ones out of the offer, and check the store against itself.

    What the disk does not give is not known to be damaged: it is told, and not offered for a minute.

    The server goes on serving. Segments are read oldest first; what is stored meanwhile waits for the next run. Progress and what
    is found go to stderr, the result to stdout. Interrupted, cut off or stopped by a limit, it prints the cursor that continues.

    Exits 9 when a block is damaged, a block or segment unreadable, or the store does not agree with itself; a limit reached is
    no error.

    RPC: Admin.Verify. Example: kvstore-admin verify --rate 500MiB
    """
    session = session_of(ctx)
    request = admin_pb2.VerifyRequest(
        cursor=begin or "",
        bytes_per_second=parse_size(rate, "--rate"),
        max_bytes=0 if max_bytes is None else parse_size(max_bytes, "--max-bytes"),
    )
    limit_s = None if max_time is None else parse_duration(max_time, "--max-time")
    scrub = _Scrub(begin or "")
    with progress_show("verify") as show:
        stopped = _run(session, request, limit_s, scrub, show)
    return scrub.result(stopped)


def _run(
    session: Session, request: admin_pb2.VerifyRequest, limit_s: int | None, scrub: _Scrub, show: ProgressShow
) -> Stop | None:
    """Follow the stream to its end; returns the error that ended it early. Raises: CommandError: nothing was done at all."""
    try:
        with stream(session, "Verify", request) as answers:
            alarm = threading.Timer(limit_s or 0, answers.cancel)
            alarm.daemon = True
            if limit_s is not None:
                alarm.start()
            try:
                for answer in answers:
                    scrub.add(answer, show)
            finally:
                alarm.cancel()
    except KeyboardInterrupt:
        return Stop("INTERRUPTED", "interrupted")
    except CommandError as error:
        if not scrub.began:
            raise
        return Stop(error.reason, error.message)
    return None


class _Scrub:
    """What a stream of answers adds up to."""

    def __init__(self, begin: str) -> None:
        self.began = False
        self._last = admin_pb2.VerifyResponse(cursor=begin)
        self._started_s = time.monotonic()
        self._damaged: list[DamagedBlock] = []
        self._unreadable_blocks: list[DamagedBlock] = []
        self._unreadable: list[UnreadableSegment] = []

    def add(self, answer: admin_pb2.VerifyResponse, show: ProgressShow) -> None:
        """Take an answer in and show it."""
        self.began, self._last = True, answer
        for block in answer.damaged:
            bad, unreadable = _damaged(block), block.reason == _IO_ERROR
            (self._unreadable_blocks if unreadable else self._damaged).append(bad)
            show.note(f"{'unreadable' if unreadable else 'damaged'}: {_words(bad)}")
        for segment in answer.unreadable:
            self._unreadable.append(UnreadableSegment(segment.segment_id, segment.detail))
            show.note(f"unreadable: segment {segment.segment_id}: {segment.detail}")
        show.update(_share(answer), self._numbers())

    def _numbers(self) -> str:
        last = self._last
        if last.finished and not last.HasField("invariants"):
            return f"checking the store against itself, {last.invariants_done:.0%}"
        return (
            f"{last.segments_done:,} of {last.segments_total:,} segments, {format_bytes(last.bytes_done)} of "
            f"{format_bytes(last.bytes_total)}, {last.blocks_checked:,} blocks, {len(self._damaged):,} damaged"
            + (f", {len(self._unreadable_blocks):,} unreadable" if self._unreadable_blocks else "")
        )

    def result(self, stopped: Stop | None) -> Verification:
        """The whole of it."""
        last = self._last
        complete = last.HasField("invariants")
        return Verification(
            finished=complete,
            resume=None if complete else last.cursor or "0:0",
            stopped=stopped,
            segments_done=last.segments_done,
            segments_total=last.segments_total,
            blocks_checked=last.blocks_checked,
            bytes_done=last.bytes_done,
            bytes_total=last.bytes_total,
            elapsed_s=round(time.monotonic() - self._started_s, 3),
            damaged=self._damaged,
            unreadable_blocks=self._unreadable_blocks,
            unreadable=self._unreadable,
            invariants=invariants_of(last.invariants) if complete else None,
        )


def _share(answer: admin_pb2.VerifyResponse) -> float:
    if answer.finished:
        return 1 - _INVARIANTS_SHARE * (1 - answer.invariants_done)
    # Blocks that have expired since the beginning are not read, so bytes alone might never come to an end.
    by_bytes = answer.bytes_done / answer.bytes_total if answer.bytes_total else 0.0
    return min(by_bytes, 1.0) * (1 - _INVARIANTS_SHARE)


def _damaged(block: admin_pb2.DamagedBlock) -> DamagedBlock:
    return DamagedBlock(block.namespace or None, block.prefix_hash or None, block.segment_id, block.slot, block.reason)


def _words(block: DamagedBlock) -> str:
    name = f"block {block.prefix_hash.hex()}" if block.prefix_hash else "a block whose row is damaged, too"
    return f"{name}, segment {block.segment_id} slot {block.slot}: {block.reason}"


def _cells(block: DamagedBlock) -> Sequence[Cell]:
    return (
        Digest(block.namespace.hex()) if block.namespace else "-",
        Digest(block.prefix_hash.hex()) if block.prefix_hash else "-",
        block.segment_id,
        block.slot,
        block.reason,
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}" if number else ""


def invariants_of(report: admin_pb2.InvariantReport) -> Invariants:
    """A check of the wire."""
    return Invariants(
        time=time_of(report.time),
        segments=report.segments,
        slots=report.slots,
        live_blocks=report.live_blocks,
        index_entries=report.index_entries,
        stale_entries=report.stale_entries,
        accounted_bytes=report.accounted_bytes,
        allocated_bytes=report.allocated_bytes,
        violation_count=report.violation_count,
        violations=list(report.violations),
    )


def invariants_text(invariants: Invariants | None, *, never: str) -> str:
    """A check in a few words; `never` when there was none."""
    if invariants is None:
        return never
    result = _count(invariants.violation_count, "violation") or "ok"
    return f"{result}, checked at {format_time(invariants.time)}"
