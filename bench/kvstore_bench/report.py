"""Figures from measurements: for eyes as tables, for later as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from statistics import median
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvstore_bench.throughput import BARE_BATCHES, BARE_STREAM, GET, LINES, PREAD, PUT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from kvstore_bench.machine import Machine
    from kvstore_bench.memory import MemoryGrowth
    from kvstore_bench.throughput import Measurements, Sample, ThroughputConfig

_TITLES = {
    PUT: "put",
    GET: "get",
    BARE_STREAM: "bare gRPC stream, one call",
    BARE_BATCHES: "bare gRPC stream, a call per batch",
    PREAD: "warm pread",
}
_RATIOS = ((GET, BARE_STREAM), (GET, BARE_BATCHES), (GET, PREAD), (PUT, BARE_STREAM))
_PIPE_WIDTH = 200


@dataclass(frozen=True, slots=True)
class LineFigures:
    """A line of the table. Medians over the rounds, except for the percentiles, which are over all calls of all rounds."""

    gb_per_s: float
    gb_per_s_rounds: Sequence[float]
    us_per_block: float
    calls: int
    call_ms_p50: float
    call_ms_p99: float
    call_ms_max: float
    client_cpu_us_per_block: float
    server_cpu_us_per_block: float | None


@dataclass(frozen=True, slots=True)
class MatchFigures:
    """How long a match takes."""

    blocks: int
    calls: int
    ms_p50: float
    ms_p99: float


@dataclass(frozen=True, slots=True)
class ThroughputReport:
    """Everything there is to say about a run; its fields are the keys of the JSON."""

    benchmark: str
    kvstore_version: str
    commit: str
    time: str
    seed: int
    config: ThroughputConfig
    machine: Machine
    lines: dict[str, LineFigures]
    ratios: dict[str, float]
    match: MatchFigures
    memory: MemoryGrowth | None
    bytes_written_per_byte_put: float  # to segment files, as the server counts
    kernel_bytes_written_per_byte_put: float  # by the server's process altogether, index and log included

    def to_json(self) -> dict[str, object]:
        """The report as plain dicts, lists and numbers."""
        return asdict(self)


def make_report(config: ThroughputConfig, measured: Measurements, machine: Machine, commit: str) -> ThroughputReport:
    """Make figures of measurements."""
    return ThroughputReport(
        benchmark="throughput",
        kvstore_version=version("kvstore"),
        commit=commit,
        time=utc_now(),
        seed=config.seed,
        config=config,
        machine=machine,
        lines={line: _line_figures(measured.lines[line], config, has_server=line != PREAD) for line in LINES},
        ratios={
            f"{line}_to_{yardstick}": _median_ratio(measured.lines[line], measured.lines[yardstick])
            for line, yardstick in _RATIOS
        },
        match=MatchFigures(
            blocks=measured.match_blocks,
            calls=len(measured.match_s),
            ms_p50=percentile(measured.match_s, 0.50) * 1e3,
            ms_p99=percentile(measured.match_s, 0.99) * 1e3,
        ),
        memory=measured.memory,
        bytes_written_per_byte_put=measured.written_bytes / measured.put_bytes,
        kernel_bytes_written_per_byte_put=measured.kernel_written_bytes / measured.put_bytes,
    )


def utc_now() -> str:
    """The time for a report."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-round(share * 1e9) * len(ordered) // 10**9) - 1)]


def print_report(report: ThroughputReport) -> None:
    """The report as tables on stdout."""
    config = report.config
    print_tables(
        f"{config.blocks:,} blocks of {config.block_bytes:,} bytes in batches of {config.batch_blocks}, "
        f"medians of {config.rounds} interleaved rounds, everything in the page cache",
        [_lines_table(report), _facts_table(report)],
        circumstances(report.kvstore_version, report.commit, report.seed, report.time, report.machine),
    )


def circumstances(kvstore_version: str, commit: str, seed: int | None, time: str, machine: Machine) -> str:
    """What a table must be read with, in two lines. `seed`: None if nothing was drawn."""
    drawn = "no seed" if seed is None else f"seed {seed}"
    return (
        f"kvstore {kvstore_version}, commit {commit}, {drawn}, {time}\n"
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_bytes / 2**30:.0f} GiB, Linux {machine.kernel}, "
        f"{machine.filesystem}; Python {machine.python}, grpcio {machine.grpcio}, numpy {machine.numpy}, "
        f"xxhash {machine.xxhash}"
    )


def plain(text: object) -> str:
    """Text of which nothing steers a terminal or breaks a line: names come from files."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))


def print_tables(head: str, tables: Sequence[RenderableType], foot: str) -> None:
    """A text, tables and a text on stdout."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    with console.capture() as captured:
        console.print(head, soft_wrap=True)
        for table in tables:
            console.print(table)
        console.print(f"\n{foot}", soft_wrap=True)
    # Tables are filled up to their full width, which nobody wants in a file.
    for line in captured.get().splitlines():
        print(line.rstrip())


def _line_figures(samples: Sequence[Sample], config: ThroughputConfig, *, has_server: bool) -> LineFigures:
    round_s = [sum(sample.call_s) for sample in samples]
    call_ms = [call_s * 1e3 for sample in samples for call_s in sample.call_s]
    rates = [config.round_bytes / seconds / 1e9 for seconds in round_s]
    # The processor's clock ticks are coarse, so times of all rounds are added up before they are divided.
    blocks = config.blocks * len(samples)
    server_cpu_s = sum(sample.server_cpu_s for sample in samples)
    return LineFigures(
        gb_per_s=median(rates),
        gb_per_s_rounds=rates,
        us_per_block=median(round_s) / config.blocks * 1e6,
        calls=len(call_ms),
        call_ms_p50=percentile(call_ms, 0.50),
        call_ms_p99=percentile(call_ms, 0.99),
        call_ms_max=max(call_ms),
        client_cpu_us_per_block=sum(sample.client_cpu_s for sample in samples) / blocks * 1e6,
        server_cpu_us_per_block=server_cpu_s / blocks * 1e6 if has_server else None,
    )


def _median_ratio(line: Sequence[Sample], yardstick: Sequence[Sample]) -> float:
    """Of the speeds, round by round: what slows a whole round down does not change it."""
    return median(sum(theirs.call_s) / sum(ours.call_s) for ours, theirs in zip(line, yardstick, strict=True))


def _lines_table(report: ThroughputReport) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("")
    for head in ("GB/s", "µs/block", "p50 ms/batch", "p99 ms/batch", "client CPU µs/block", "server CPU µs/block"):
        table.add_column(head, justify="right")
    for line, figures in report.lines.items():
        batches = line != BARE_STREAM
        server_cpu = figures.server_cpu_us_per_block
        table.add_row(
            _TITLES[line],
            f"{figures.gb_per_s:.2f}",
            f"{figures.us_per_block:.1f}",
            f"{figures.call_ms_p50:.2f}" if batches else "-",
            f"{figures.call_ms_p99:.2f}" if batches else "-",
            f"{figures.client_cpu_us_per_block:.1f}",
            "-" if server_cpu is None else f"{server_cpu:.1f}",
        )
    return table


def _facts_table(report: ThroughputReport) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column()
    for line, yardstick in _RATIOS:
        table.add_row(f"{_TITLES[line]} ÷ {_TITLES[yardstick]}", f"{report.ratios[f'{line}_to_{yardstick}']:.2f}")
    match = report.match
    table.add_row(f"match of {match.blocks:,} blocks", f"p50 {match.ms_p50:.2f} ms, p99 {match.ms_p99:.2f} ms")
    table.add_row(
        "bytes written ÷ bytes put",
        f"{report.bytes_written_per_byte_put:.3f} to segments, "
        f"{report.kernel_bytes_written_per_byte_put:.3f} by the server altogether",
    )
    memory = report.memory
    if memory is not None:
        table.add_row(
            "server memory per stored block",
            f"{memory.anon_bytes_per_block:.0f} bytes of its own, {memory.file_bytes_per_block:.0f} of mapped files "
            f"({memory.blocks:,} blocks of {memory.block_bytes} bytes)",
        )
    return table
