"""A plan as tables for eyes and as JSON for machines."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvstore_bench.machine import describe_commit
from kvstore_bench.report import plain, print_tables, utc_now
from kvstore_bench.units import format_count, format_days, format_rate, format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore_bench.plan.compare import Comparison
    from kvstore_bench.plan.config import PlanConfig
    from kvstore_bench.plan.model import PlanFigures, WindowKv


def plan_json(config: PlanConfig, figures: PlanFigures, comparisons: Sequence[Comparison]) -> dict[str, object]:
    """All inputs and outputs, as plain dicts, lists and numbers: bytes, seconds, tokens, and those per second."""
    return {
        "benchmark": "plan",
        "kvstore_version": version("kvstore"),
        "commit": describe_commit(),
        "time": utc_now(),
        "config": config.model_dump(mode="json", by_alias=True),
        "figures": asdict(figures),
        "published": [asdict(comparison) for comparison in comparisons],
    }


def print_plan(config: PlanConfig, figures: PlanFigures, comparisons: Sequence[Comparison]) -> None:
    """The plan on stdout."""
    tables = [_classes(config, figures), _bandwidth(figures), _hardware(config, figures)]
    if figures.window_every_token is not None and figures.window_snapshots is not None:
        tables.append(_windows(config, figures.window_every_token, figures.window_snapshots))
    if figures.prefill is not None:
        tables.append(_prefill(config, figures))
    if comparisons:
        tables.append(_published(comparisons))
    print_tables(_head(config, figures), tables, _foot(config))


def _head(config: PlanConfig, figures: PlanFigures) -> str:
    load = config.load
    return (
        f"{plain(config.name)}: {format_count(load.tokens_per_day)} input tokens a day, {load.hit_rate:.1%} hit, "
        f"{figures.bytes_per_token:,.0f} B per token, peak factor {load.peak_factor:g}"
    )


def _foot(config: PlanConfig) -> str:
    store = config.store
    return (
        "new tokens: missed ones and stored answers, each stored once; hit ones are read once. Mean life: reuse span + TTL.\n"
        "resident: new tokens a day x bytes per token x mean life, one copy. "
        f"SSD: x copies ({store.copies}) / {store.fill:.0%} full.\n"
        f"to drives: x copies ({store.copies}) x write amplification ({store.write_amplification:g}). "
        "All is arithmetic on the inputs, nothing is measured; see docs/capacity-plan.md.\n"
        f"kvstore {version('kvstore')}, commit {describe_commit()}, {utc_now()}"
    )


def _classes(config: PlanConfig, figures: PlanFigures) -> Table:
    heads = ("share", "hit rate", "TTL", "mean life", "input/day", "missed/day", "new/day", "resident", "SSD")
    table = _table("SSD by class", *heads)
    for name, item in figures.classes.items():
        table.add_row(
            plain(name),
            f"{item.share:.1%}",
            f"{item.hit_rate:.1%}",
            format_days(item.ttl_s),
            format_days(item.mean_life_s),
            format_count(item.input_tokens_per_day),
            format_count(item.missed_tokens_per_day),
            format_count(item.written_tokens_per_day),
            format_size(item.resident_bytes),
            format_size(item.ssd_bytes),
        )
    table.add_row(
        "all",
        "100.0%",
        f"{config.load.hit_rate:.1%}",
        "",
        "",
        format_count(config.load.tokens_per_day),
        format_count(figures.missed_tokens_per_day),
        format_count(figures.written_tokens_per_day),
        format_size(figures.resident_bytes),
        format_size(figures.ssd_bytes),
    )
    return table


def _bandwidth(figures: PlanFigures) -> Table:
    table = _table("bandwidth", "average", "peak")
    flows = figures.bandwidth
    for title, flow in (("read", flows.read), ("written", flows.written), ("written to drives", flows.drive_written)):
        table.add_row(title, format_rate(flow.average), format_rate(flow.peak))
    return table


def _hardware(config: PlanConfig, figures: PlanFigures) -> Table:
    drives, nics, drive = figures.drives, figures.nics, config.drive
    table = _table("hardware", "needed", "")
    table.columns[2].justify = "left"
    for need, count in drives.by.items():
        table.add_row(f"drives, for {need}", f"{count:,}", "binds" if need == drives.binding else "")
    table.add_row("  for reads alone", f"{drives.by_reads:,}", f"{_gb(drive.read)} each, {drive.utilisation:.0%} used")
    table.add_row(
        "  for writes alone", f"{drives.by_writes:,}", f"{_gb(drive.write)} each, {drive.utilisation:.0%} used"
    )
    table.add_row("drives", f"{drives.count:,}", f"{format_size(drive.size)} each")
    table.add_row(
        "drive-writes per day",
        f"{drives.writes_per_day:.3f}",
        f"{drives.rating_used:.1%} of the rated {drive.writes_per_day:g}; {format_size(drives.written_bytes_per_day)} a day",
    )
    port = f"{config.nic.speed * 8 / 1e9:,.0f} Gbps each, {config.nic.utilisation:.0%} used"
    table.add_row("NIC ports", f"{nics.count:,}", f"{port}; out {nics.by_out:,}, in {nics.by_in:,}")
    return table


def _windows(config: PlanConfig, every_token: WindowKv, snapshots: WindowKv) -> Table:
    assert config.window is not None
    table = _table("window KV, not stored; would add", "B per token", "SSD", "written, average", "share of all bytes")
    for title, window in (
        ("of every token", every_token),
        (f"a snapshot every {config.window.snapshot_every_tokens:,.0f} tokens", snapshots),
    ):
        table.add_row(
            title,
            f"{window.bytes_per_token:,.0f}",
            format_size(window.ssd_bytes),
            format_rate(window.average_written),
            f"{window.share:.1%}",
        )
    return table


def _prefill(config: PlanConfig, figures: PlanFigures) -> Table:
    prefill, wanted = figures.prefill, config.prefill
    assert prefill is not None
    assert wanted is not None
    speed = f"{wanted.tokens_per_second:,.0f} tokens/s, {wanted.utilisation:.0%} busy"
    table = _table("prefill", "missed tokens/s", f"instances of {speed}")
    flow = prefill.missed_tokens_per_s
    table.add_row("average", format_count(flow.average), f"{prefill.average_instances:,}")
    table.add_row(f"peak, factor {wanted.peak_factor:g}", format_count(flow.peak), f"{prefill.peak_instances:,}")
    if prefill.measured_tokens_per_s is not None:
        table.add_row("as measured", format_count(prefill.measured_tokens_per_s), f"{prefill.measured_instances:,}")
    return table


def _published(comparisons: Sequence[Comparison]) -> Table:
    table = _table("published figures", "published", "computed", "ratio", "")
    table.columns[4].justify = "left"
    for line in comparisons:
        ratio = "-" if line.ratio is None else f"{line.ratio:.2f}"
        table.add_row(line.what, line.published, line.computed, ratio, line.says)
    return table


def _table(title: str, *heads: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column(f"\n{title}")
    for head in heads:
        table.add_column(head, justify="right", vertical="top")
    return table


def _gb(bytes_per_s: float) -> str:
    """As drives are sold, in decimal units."""
    return f"{bytes_per_s / 1e9:g} GB/s"
