"""Which lines the plots of a hit-rate report have: points, names and axes, before anything is drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from kvstore_bench.hitrate.report_tables import class_names, labels, share_words, sweep_results
from kvstore_bench.hitrate.report_words import duration, short_percent
from kvstore_bench.report import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from kvstore_bench.hitrate.result import HitRateReport, Result

Kind = Literal["ours", "class", "LRU", "FIFO", "Belady", "ceiling"]
OVERALL: Final = "all classes"
EVERY_CLASS: Final = "every class"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a plot. `points`: (x, share of input tokens)."""

    label: str
    kind: Kind
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """A plot, or one of several side by side.

    `ticks`: words at places of the x axis; `results`: what it shows; `differences`: how far our lines are above LRU.
    """

    title: str
    x_label: str
    is_log: bool
    ticks: Mapping[float, str]
    lines: Sequence[Line]
    results: Sequence[Result]
    differences: Sequence[Line] = ()


def capacity_panel(report: HitRateReport) -> list[Panel]:
    """Hit rates over the capacity, ours beside the baselines; nothing for fewer than two capacities."""
    results = [result for result in sweep_results(report, "capacity") if result.capacity_share]
    if len({result.capacity_share for result in results}) < 2:
        return []
    lines = [
        *_ours(results),
        *_baseline("LRU", results, lambda result: result.lru),
        *_baseline("FIFO", results, lambda result: result.fifo),
        *_baseline("Belady", results, lambda result: result.belady),
        *_ceiling("ceiling", results, lambda result: result.ceiling),
        *_ceiling("ceiling with TTLs", results, lambda result: result.ceiling_with_ttl),
    ]
    ticks = {result.capacity_share * 100: short_percent(result.capacity_share) for result in results}
    x_label = "capacity, % of the workload's unique blocks"
    return [Panel("", x_label, True, ticks, lines, results, _above_lru(results))]


def ttl_panels(report: HitRateReport) -> list[Panel]:
    """Hit rates over a class's TTL, or over all classes' at once: a panel for each series of rows that differ in it only."""
    panels = []
    for name, series in _ttl_series(sweep_results(report, "ttl")):
        lines = _by_class(report, {_ttl_of(result, name): result for result in series})
        ticks = {float(_ttl_of(result, name)): duration(_ttl_of(result, name)) for result in series}
        others = ", ".join(f"{plain(other)} {duration(ttl)}" for other, ttl in series[0].ttl.items() if other != name)
        shown = EVERY_CLASS if name == EVERY_CLASS or not others else f"{plain(name)} ({others})"
        panels.append(
            Panel(f"TTL of {shown}", f"TTL of {shown.partition(' (')[0]}, refreshed by use", True, ticks, lines, series)
        )
    return panels


def class_share_panel(report: HitRateReport) -> list[Panel]:
    """Hit rates for one division of the capacity after the other; nothing for fewer than two."""
    results = sweep_results(report, "class-share")
    if len(results) < 2:
        return []
    ticks = {float(place): share_words(result.class_share) for place, result in enumerate(results)}
    lines = _by_class(report, dict(enumerate(results)))
    return [Panel("", "share of the capacity that is a class's own", False, ticks, lines, results)]


def _ours(results: Sequence[Result]) -> list[Line]:
    """A line for each policy and replay."""
    groups = _grouped(results, lambda result: (result.policy, result.replay))
    names = labels([group[0] for group in groups])
    return [
        Line(f"kvstore ({name})", "ours", _points(group, lambda result: result.hit_rate))
        for name, group in zip(names, groups, strict=True)
    ]


def _above_lru(results: Sequence[Result]) -> list[Line]:
    """As `_ours`, as differences."""
    groups = _grouped(results, lambda result: (result.policy, result.replay))
    lines = (Line("", "ours", _points(group, _difference)) for group in groups)
    return [line for line in lines if line.points]


def _difference(result: Result) -> float | None:
    return None if result.lru is None else result.hit_rate - result.lru


def _points(results: Iterable[Result], rate: Callable[[Result], float | None]) -> list[tuple[float, float]]:
    """Over the capacity in per cent, where the rate is known."""
    known = {result.capacity_share * 100: rate(result) for result in results}
    return [(share, value) for share, value in known.items() if value is not None]


def _baseline(kind: Kind, results: Iterable[Result], rate: Callable[[Result], float | None]) -> list[Line]:
    points = _points(results, rate)
    return [Line(kind, kind, points)] if points else []


def _ceiling(label: str, results: Sequence[Result], rate: Callable[[Result], float]) -> list[Line]:
    """A level, which no capacity changes."""
    shares = [result.capacity_share * 100 for result in results]
    return [Line(label, "ceiling", [(min(shares), rate(results[0])), (max(shares), rate(results[0]))])]


def _by_class(report: HitRateReport, results: Mapping[int, Result]) -> list[Line]:
    """All tokens and each class's, over x; classes without tokens have no rate."""
    lines = [Line(OVERALL, "ours", [(x, result.hit_rate) for x, result in results.items()])]
    names = class_names(report)
    for name in names if len(names) > 1 else []:
        points = [(float(x), result.hit_rate_by_class.get(name)) for x, result in results.items()]
        known = [(x, rate) for x, rate in points if rate is not None and rate == rate]
        lines += [Line(plain(name), "class", known)] if known else []
    return lines


def _ttl_of(result: Result, name: str) -> int:
    """Seconds of a class's TTL, or of all of them."""
    return next(iter(result.ttl.values())) if name == EVERY_CLASS else result.ttl[name]


def _ttl_series(results: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    """Series that differ in one class's TTL, or in a TTL of all classes; those first that show most rows not shown before."""
    candidates: list[tuple[str, list[Result]]] = []
    for name in list(results[0].ttl) if results else []:
        candidates += [(name, group) for group in _grouped(results, lambda result, name=name: _all_but(result, name))]  # type: ignore[misc]
    equal = [result for result in results if len(set(result.ttl.values())) == 1]
    candidates += [(EVERY_CLASS, group) for group in _grouped(equal, lambda result: _all_but(result, None))]
    found: list[tuple[str, list[Result]]] = []
    shown: set[int] = set()
    while True:
        new = [len({id(result) for result in group} - shown) for _, group in candidates]
        if not candidates or max(new) < 1:
            return found
        name, group = candidates.pop(new.index(max(new)))
        if len({_ttl_of(result, name) for result in group}) > 1:
            found.append((name, group))
            shown |= {id(result) for result in group}


def _all_but(result: Result, name: str | None) -> Hashable:
    """Settings other than the TTL of `name`, or than all of them if that is None."""
    others = frozenset((other, ttl) for other, ttl in result.ttl.items() if other != name) if name else None
    shares = frozenset(result.class_share.items())
    return (result.policy, result.replay, result.capacity_share, shares, others)


def _grouped(results: Iterable[Result], key: Callable[[Result], Hashable]) -> list[list[Result]]:
    groups: dict[Hashable, list[Result]] = {}
    for result in results:
        groups.setdefault(key(result), []).append(result)
    return list(groups.values())
