"""`kvstore-admin status`: what the server is, holds and has done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.admin_client import call, session_of
from kvstore.cli.admin_errors import CommandError, ExitCode
from kvstore.cli.admin_ttl import ClassUsage, class_listing, class_usage
from kvstore.cli.admin_values import format_amount, format_bytes, format_hit_rate
from kvstore.cli.admin_verify import Invariants, invariants_of, invariants_text
from kvstore.cli.output import Cell, Facts, Listing, Result, Section, format_time, time_of
from kvstore_api.v1 import admin_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime

_CORRUPT_COUNTER = "blocks_corrupt"
# A clock is always a little off, and NTP sets it right; more than this is worth a line.
_CLOCK_TOLD_FROM_S = 1.0


@dataclass(frozen=True, slots=True)
class LiveUsage:
    """Live blocks, state objects included, and their bytes without padding and tables."""

    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Status(Result):
    """The server's status; counters count since its start."""

    version: str
    store_id: str
    start_time: datetime
    data_dir: str
    durability: str
    capacity_bytes: int
    used_bytes: int
    retiring_bytes: int
    live: LiveUsage
    segment_count: int
    namespace_count: int
    hit_rate: float
    write_amplification: float  # bytes written to segment files / bytes stored; 0 when nothing was stored
    clock_ahead_s: (
        float  # the store's time minus the wall clock; negative while a jump of the clock is not believed yet
    )
    invariants: Invariants | None  # the last check of the store against itself; None: never
    classes: Sequence[ClassUsage]
    counters: Mapping[str, int]

    def sections(self) -> Iterable[Section]:
        """The result for people's eyes."""
        share = self.used_bytes / self.capacity_bytes if self.capacity_bytes else 0.0
        asked = self.counters.get("asked_tokens", 0)
        yield Facts(
            [
                ("version", self.version),
                ("store", self.store_id),
                ("started", format_time(self.start_time)),
                ("data directory", self.data_dir),
                ("durability", self.durability),
                ("capacity", format_bytes(self.capacity_bytes)),
                ("used", f"{format_bytes(self.used_bytes)} ({share:.1%} of the capacity)"),
                ("waiting for leases", format_bytes(self.retiring_bytes)),
                ("live", format_amount(self.live.blocks, self.live.bytes)),
                ("segments", self.segment_count),
                ("namespaces", self.namespace_count),
                ("store against itself", invariants_text(self.invariants, never="never checked; verify does it")),
                ("hit rate", format_hit_rate(self.counters.get("hit_tokens", 0), asked)),
                ("write amplification", self._writes_text()),
                *([("clock", self._clock_text())] if abs(self.clock_ahead_s) > _CLOCK_TOLD_FROM_S else []),
            ]
        )
        yield class_listing(self.classes)
        rows: list[Sequence[Cell]] = list(self.counters.items())
        yield Listing(("counter since the start", "value"), rows)

    def _writes_text(self) -> str:
        if not self.counters.get("bytes_stored", 0):
            text = "nothing stored yet"
        else:
            text = f"{self.write_amplification:.2f} bytes written per byte put"
        reclaimed, whole = (self.counters.get(name, 0) for name in ("segments_reclaimed", "segments_dropped_whole"))
        if not reclaimed:
            return text
        noun = "segment" if reclaimed == 1 else "segments"
        return f"{text}, {whole:,} of {reclaimed:,} reclaimed {noun} without moving a block"

    def _clock_text(self) -> str:
        if self.clock_ahead_s > 0:
            return f"{self.clock_ahead_s:,.0f} s behind the store's time, which never turns back"
        return (
            f"{-self.clock_ahead_s:,.0f} s ahead of the store's time; that is believed once it has lasted for a while"
        )


@dataclass(frozen=True, slots=True)
class CheckedStatus(Status):
    """A status that is an error when damage was met, or the store does not agree with itself."""

    def complaint(self) -> CommandError | None:
        """The damage, if any."""
        corrupt = self.counters.get(_CORRUPT_COUNTER, 0)
        if not corrupt:
            return self._disagreement()
        noun = "damaged block was" if corrupt == 1 else "damaged blocks were"
        return CommandError(
            f"{corrupt:,} {noun} met since {format_time(self.start_time)}, and answered as misses",
            reason="CORRUPTION_FOUND",
            exit_code=ExitCode.CORRUPTION,
            fix=f"see the server's log for the segments, and check the disk under {self.data_dir}",
        )

    def _disagreement(self) -> CommandError | None:
        if self.invariants is None or not self.invariants.violation_count:
            return None
        return CommandError(
            f"the store does not agree with itself: {invariants_text(self.invariants, never='')}",
            reason="CORRUPTION_FOUND",
            exit_code=ExitCode.CORRUPTION,
            fix="see the server's log for what is violated and report it, it is a defect; `kvstore-admin verify` checks again",
        )


def status(
    ctx: typer.Context,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Exit 9 if a damaged block has been met since the server's start, or its last check of itself found anything.",
        ),
    ] = False,
) -> Status:
    """What the server is, holds and has done since its start.

    RPC: Admin.GetStatus. Example: kvstore-admin -o json status
    """
    answer: admin_pb2.GetStatusResponse = call(session_of(ctx), "GetStatus", admin_pb2.GetStatusRequest())
    kind = CheckedStatus if check else Status
    return kind(
        version=answer.version,
        store_id=answer.store_id,
        start_time=time_of(answer.start_time),
        data_dir=answer.data_dir,
        durability=answer.durability,
        capacity_bytes=answer.capacity_bytes,
        used_bytes=answer.used_bytes,
        retiring_bytes=answer.retiring_bytes,
        live=LiveUsage(answer.live.blocks, answer.live.bytes),
        segment_count=answer.segment_count,
        namespace_count=answer.namespace_count,
        hit_rate=answer.hit_rate,
        write_amplification=answer.write_amplification,
        clock_ahead_s=answer.clock_ahead_s,
        invariants=invariants_of(answer.invariants) if answer.HasField("invariants") else None,
        classes=[class_usage(usage) for usage in answer.classes],
        counters={counter.name: counter.value for counter in answer.counters},
    )
