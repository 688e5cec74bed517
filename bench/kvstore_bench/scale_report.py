"""The result of `kvstore-bench scale`: a column for each number of blocks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvstore_bench.report import circumstances, print_tables, utc_now

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore_bench.machine import Machine
    from kvstore_bench.scale import ScaleConfig, ScalePoint

# Field, what it is called, and how it is printed.
_ROWS = (
    ("match1024_hit_us_p50", "match of 1,024, all there, the same 4 chains, p50 µs", ",.0f"),
    ("match1024_hit_many_us_p50", "match of 1,024, all there, many chains, p50 µs", ",.0f"),
    ("match1024_hit_unshared_us_p50", "match of 1,024, all there, no shared prompt, p50 µs", ",.0f"),
    ("match1024_prompt_us_p50", "match of 1,024, the shared prompt there, p50 µs", ",.0f"),
    ("match1024_miss_us_p50", "match of 1,024, nothing there, p50 µs", ",.0f"),
    ("match_chains", "different chains matched", ","),
    ("rss_anon_bytes_per_block", "memory of the process's own, B/block", ",.1f"),
    ("index_bytes_per_block", "index file, B/block", ",.1f"),
    ("index_bytes_written_per_block", "index, brought to the disk by the kernel, B/block", ",.1f"),
    ("index_bytes_handed_per_block", "index, handed to the kernel, B/block", ",.1f"),
    ("start_clean_s", "ready after a clean stop, s", ",.2f"),
    ("start_kill9_port_s", "health answers after kill -9, s", ",.2f"),
    ("start_kill9_ready_s", "ready after kill -9, s", ",.2f"),
    ("reclaim_blocks_per_s", "reclaim, blocks/s", ",.0f"),
    ("fill_us_per_block", "put, payload left out, µs/block", ",.1f"),
)


@dataclass(frozen=True, slots=True)
class ScaleReport:
    """Everything there is to say about a run; its fields are the keys of the JSON."""

    benchmark: str
    kvstore_version: str
    commit: str
    time: str
    seed: int
    config: ScaleConfig
    machine: Machine
    points: Sequence[ScalePoint]

    def to_json(self) -> dict[str, object]:
        """The report as plain dicts, lists and numbers."""
        return asdict(self)


def make_scale_report(config: ScaleConfig, points: Sequence[ScalePoint], machine: Machine, commit: str) -> ScaleReport:
    """Put points together with what they must be read with."""
    return ScaleReport("scale", version("kvstore"), commit, utc_now(), config.seed, config, machine, points)


def print_scale_report(report: ScaleReport) -> None:
    """The report as a table on stdout."""
    config = report.config
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("blocks")
    for point in report.points:
        table.add_column(f"{point.blocks:,}", justify="right")
    for field, title, form in _ROWS:
        values = [getattr(point, field) for point in report.points]
        table.add_row(title, *("-" if value is None else format(value, form) for value in values))
    print_tables(
        f"Blocks of {config.block_bytes:,} bytes, their payloads holes, in chains of {config.chain_blocks:,}, three of four "
        f"behind one system prompt of {config.prompt_blocks}; everything in the page cache",
        [table],
        circumstances(report.kvstore_version, report.commit, report.seed, report.time, report.machine),
    )
