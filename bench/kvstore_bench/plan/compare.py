"""What is published of a deployment beside what its own figures make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore_bench.plan.model import class_figures, resident_bytes
from kvstore_bench.units import DAY_S, format_count, format_days, format_rate, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore_bench.plan.config import PlanConfig, Published, TtlCut
    from kvstore_bench.plan.model import ClassFigures, PlanFigures


@dataclass(frozen=True, slots=True)
class Comparison:
    """One line: `ratio` is published / computed, None where that says nothing."""

    what: str
    published: str
    computed: str
    ratio: float | None
    says: str


def compare(config: PlanConfig, figures: PlanFigures) -> list[Comparison]:
    """The lines for a configuration that has published figures; none for any other."""
    published = config.published
    if published is None:
        return []
    lines = [
        _token(published, figures),
        *_reads(config, published, figures),
        *_writes(config, published, figures),
        *_space(config, published, figures),
    ]
    if figures.window_snapshots is not None:
        lines.append(_window(published, figures.window_snapshots.share, config))
    return [*lines, _ttl_cut(config, published.ttl_cut, figures)]


def _token(published: Published, figures: PlanFigures) -> Comparison:
    return Comparison(
        "bytes per token",
        f"{published.bytes_per_token:,.0f} B",
        f"{figures.bytes_per_token:,.0f} B",
        _ratio(published.bytes_per_token, figures.bytes_per_token),
        "The layout alone, and with the padding of its block, which is stored and sent too.",
    )


def _reads(config: PlanConfig, published: Published, figures: PlanFigures) -> Iterator[Comparison]:
    read = figures.bandwidth.read
    implied = _ratio(published.peak_read, read.average)
    yield Comparison(
        "read, average",
        f"{format_rate(published.peak_read)} peak",
        format_rate(read.average),
        implied,
        "Hit tokens, each read once. The ratio is the implied peak factor. A daily curve alone seldom exceeds 2: so there are "
        "bursts, or tokens are read more than once, or it is what the cluster can do.",
    )
    yield Comparison(
        "read, peak",
        format_rate(published.peak_read),
        format_rate(read.peak),
        _ratio(published.peak_read, read.peak),
        f"Average x peak factor {config.load.peak_factor:g}. The reference's factor comes from this line, so a 1 confirms nothing.",
    )


def _writes(config: PlanConfig, published: Published, figures: PlanFigures) -> Iterator[Comparison]:
    copies = config.store.copies
    average, peak = figures.bandwidth.written.average * copies, figures.bandwidth.written.peak * copies
    yield Comparison(
        "written, average",
        f"{format_rate(published.peak_write)} peak",
        format_rate(average),
        _ratio(published.peak_write, average),
        f"New tokens x {figures.bytes_per_token:,.0f} B x copies ({copies}) are {format_size(average * DAY_S)} a day. "
        "The ratio is the peak factor that writes would have.",
    )
    yield Comparison(
        "written, peak",
        format_rate(published.peak_write),
        format_rate(peak),
        _ratio(published.peak_write, peak),
        "With the peak factor of reads. Above 1, more is written than missed tokens make, or writes come in steeper bursts.",
    )
    published_ratio = published.peak_read / published.peak_write
    computed = figures.bandwidth.read.average / average if average else None
    gap_tokens = abs(figures.hit_tokens_per_day / published_ratio - figures.written_tokens_per_day * copies)
    yield Comparison(
        "read : written",
        f"{published_ratio:.1f}",
        "-" if computed is None else f"{computed:.1f}",
        None if computed is None else published_ratio / computed,
        f"Whatever the peak factor is. The difference is {format_count(gap_tokens)} tokens a day, "
        f"{gap_tokens / config.load.tokens_per_day:.1%} of the input: a second copy of each block would do it, or stored answers, "
        "or state objects beside the blocks.",
    )


def _space(config: PlanConfig, published: Published, figures: PlanFigures) -> Iterator[Comparison]:
    ttls = {item.ttl for item in config.classes.values() if item.share}
    for ttl in sorted({min(ttls), max(ttls)}):
        resident = resident_bytes(figures.written_tokens_per_day, figures.bytes_per_token, ttl)
        yield Comparison(
            f"resident, all for {format_days(ttl)}",
            format_size(published.capacity),
            format_size(resident),
            _ratio(published.capacity, resident),
            "Each new token kept for one TTL and never used again: a lower bound, one copy, no free space.",
        )
    life_s = published.capacity * DAY_S / (figures.written_tokens_per_day * figures.bytes_per_token or 1)
    yield Comparison(
        "SSD of this plan",
        format_size(published.capacity),
        format_size(figures.ssd_bytes),
        _ratio(published.capacity, figures.ssd_bytes),
        f"Classes with their TTL and reuse span; copies: {config.store.copies}; {config.store.fill:.0%} full. The published size "
        f"is {format_days(life_s)} of writes: room to grow, more copies, longer lives than assumed, or more that is stored.",
    )


def _window(published: Published, computed: float, config: PlanConfig) -> Comparison:
    assert config.window is not None
    every = config.window.snapshot_every_tokens
    return Comparison(
        "window KV's share of the bytes",
        f"{published.window_share:.1%}",
        f"{computed:.1%}",
        _ratio(published.window_share, computed),
        f"One snapshot every {every:,.0f} new tokens, kept as long as the blocks. The service has stopped storing it.",
    )


def _ttl_cut(config: PlanConfig, cut: TtlCut, figures: PlanFigures) -> Comparison:
    """What the cut frees, against what it adds to prefill."""
    before = figures.classes[cut.traffic_class]
    ends = (cut.points_low, cut.points_high)
    low, high = (points * config.load.tokens_per_day for points in ends)
    changes = [_ssd_after(config, cut, before, points) - before.ssd_bytes for points in ends]
    missed = figures.missed_tokens_per_day or 1
    return Comparison(
        f"{cut.traffic_class}'s TTL from {format_days(before.ttl_s)} to {format_days(cut.to)}",
        f"{cut.points_low:.1%} to {cut.points_high:.1%} of input tokens",
        f"{format_count(low)} to {format_count(high)} tokens a day",
        None,
        f"That is {low / missed:.0%} to {high / missed:.0%} more to prefill, and {_signed(changes[0])} to {_signed(changes[1])} "
        "of SSD: what is missed more is written more. With the reuse span as it is, though a shorter TTL shortens it too.",
    )


def _ssd_after(config: PlanConfig, cut: TtlCut, before: ClassFigures, points: float) -> float:
    """What a class takes with the shorter TTL, where `points` of all input tokens are not hit any more, all of them its own."""
    item = config.classes[cut.traffic_class]
    hit_rate = before.hit_rate - (points / item.share if item.share else 0.0)
    return class_figures(config, item, max(0.0, hit_rate), cut.to).ssd_bytes


def _signed(size_bytes: float) -> str:
    return f"{'-' if size_bytes < 0 else '+'}{format_size(abs(size_bytes))}"


def _ratio(published: float, computed: float) -> float | None:
    return published / computed if computed else None
