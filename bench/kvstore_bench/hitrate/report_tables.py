"""What the reports of `kvstore-bench hitrate` say, as tables of words: the terminal and the HTML page show the same."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from kvstore_bench.hitrate.misses import CAUSES, EVICTED, EXPIRED
from kvstore_bench.hitrate.report_words import duration, percent, short_percent, size, value_words
from kvstore_bench.hitrate.result import DEFINITION_FULL_BLOCKS
from kvstore_bench.report import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvstore_bench.hitrate.result import HitRateReport, Result

MAIN: Final = ""
SWEEPS: Final = {"capacity": "Capacity sweep", "ttl": "TTL sweep", "class-share": "Class-share sweep"}
GENERATED_NOTE: Final = (
    "This workload is generated. Reproducing a published figure with a generator shows consistency, not confirmation."
)
_CONFIGURATIONS_A_TABLE = 4
_CLASSES_A_SWEEP = 4
# Where LRU is as good as the optimum, a share of the way between them is noise: replays agree within this only.
_SHORTEST_WAY = 0.001

Figures = list[tuple[str, "Callable[[Result], str]"]]


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table: with a head, cells behind the first are figures; without one, rows are a name and words. `wide`: has words last."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    wide: bool = False


def title(report: HitRateReport) -> str:
    """What the report is about."""
    return f"Hit rate: {plain(report.workload.name)}"


def definitions(report: HitRateReport) -> list[str]:
    """What is counted, one sentence or more each, and what the figures do not show."""
    sentences = [plain(report.definition)]
    if DEFINITION_FULL_BLOCKS not in report.definition:
        sentences.append(DEFINITION_FULL_BLOCKS)
    if is_generated(report):
        sentences.append(GENERATED_NOTE)
    return sentences


def is_generated(report: HitRateReport) -> bool:
    """Whether a generator has made the workload."""
    return "generator" in report.workload.origin


def sheets(report: HitRateReport) -> list[Sheet]:
    """All tables, in the order in which they are read."""
    main = main_results(report)
    found = [workload_sheet(report)]
    for start in range(0, len(main), _CONFIGURATIONS_A_TABLE):
        some = main[start : start + _CONFIGURATIONS_A_TABLE]
        found += [_main_sheet(some), _storage_sheet(some)]
    found += [
        _missed_sheet(result, label, explain=not i)
        for i, (result, label) in enumerate(zip(main, labels(main), strict=True))
    ]
    found += [_sweep_sheet(report, sweep) for sweep in SWEEPS if sweep_results(report, sweep)]
    return found


def main_results(report: HitRateReport) -> list[Result]:
    """Results that belong to no sweep."""
    return [result for result in report.results if result.sweep == MAIN]


def sweep_results(report: HitRateReport, sweep: str) -> list[Result]:
    """Results of a sweep, in the order of the report."""
    return [result for result in report.results if result.sweep == sweep]


def workload_sheet(report: HitRateReport) -> Sheet:
    """What was replayed."""
    facts = report.workload
    by_class = (f"{plain(name)} {share * 100:.1f} %" for name, share in facts.input_share_by_class.items())
    warm_up = f", after {facts.warm_up_days:,.1f} days of warm-up" if facts.warm_up_days else ", no warm-up"
    rows = [
        ("requests", f"{facts.requests:,} in {facts.days:,.1f} days{warm_up}"),
        ("input tokens", f"{facts.input_tokens:,}"),
        ("of them by class", ", ".join(by_class)),
        ("unique blocks", f"{facts.unique_blocks:,} of {facts.block_tokens} tokens, those of the warm-up included"),
        *((plain(name).replace("_", " "), _short(value)) for name, value in facts.origin.items()),
    ]
    return Sheet("Workload", (), tuple(rows))


def configuration_sheet(report: HitRateReport) -> Sheet:
    """What the run was asked for."""
    return Sheet("Configuration", (), tuple((plain(name), value_words(value)) for name, value in report.config.items()))


def origin_sheet(report: HitRateReport) -> Sheet:
    """Values of the workload's origin that are many themselves, such as a generator's parameters."""
    many = [(name, value) for name, value in report.workload.origin.items() if isinstance(value, dict)]
    rows = (
        (f"{plain(name)}: {plain(key)}", value_words(inner)) for name, value in many for key, inner in value.items()
    )
    return Sheet("Origin of the workload", (), tuple(rows))


def of_the_way(result: Result) -> float | None:
    """How far it is from LRU (0) to Belady's policy (1); None if that is not known, or they are as good as equal."""
    if result.lru is None or result.belady is None or result.belady - result.lru < _SHORTEST_WAY:
        return None
    return (result.hit_rate - result.lru) / (result.belady - result.lru)


def settings(result: Result) -> dict[str, str]:
    """What a result is the result of, in words."""
    return {
        "policy": plain(result.policy),
        "replay": plain(result.replay),
        "capacity": short_percent(result.capacity_share) if result.capacity_share else "no limit",
        "TTL": ", ".join(f"{plain(name)} {duration(ttl_s)}" for name, ttl_s in result.ttl.items()),
        "own share": share_words(result.class_share),
    }


def share_words(shares: Mapping[str, float]) -> str:
    """Shares of the capacity by class."""
    return ", ".join(f"{plain(name)} {short_percent(share)}" for name, share in shares.items()) or "none"


def varying(results: Sequence[Result]) -> list[str]:
    """Names of the settings in which results differ."""
    all_settings = [settings(result) for result in results]
    return [name for name, value in all_settings[0].items() if any(other[name] != value for other in all_settings)]


def constant(results: Sequence[Result]) -> str:
    """Settings that results have in common, in words."""
    different = varying(results)
    return "; ".join(f"{name} {value}" for name, value in settings(results[0]).items() if name not in different)


def labels(results: Sequence[Result]) -> list[str]:
    """What tells each result from the others; the policy, if there is nothing."""
    names = (varying(results) if results else []) or ["policy"]
    return [", ".join(settings(result)[name] for name in names) for result in results]


def class_names(report: HitRateReport) -> list[str]:
    """Traffic classes, those with most input tokens first."""
    shares = report.workload.input_share_by_class
    return sorted(shares, key=lambda name: -shares[name])


def _short(value: object) -> str:
    """Values that are many themselves, such as a generator's parameters, are for the page and the JSON."""
    return f"{len(value)} values" if isinstance(value, dict | list | tuple) else value_words(value)


def _main_sheet(results: Sequence[Result]) -> Sheet:
    rows: Figures = [
        *((name, _setting(name)) for name in settings(results[0])),
        ("capacity, blocks", lambda result: f"{result.capacity_blocks:,}" if result.capacity_share else "-"),
        ("capacity, size", lambda result: size(result.capacity_bytes) if result.capacity_share else "-"),
        ("hit rate, %", lambda result: percent(result.hit_rate)),
        *((f"  {plain(name)}", _hit_rate_of(name)) for name in results[0].hit_rate_by_class),
        ("hit rate of full blocks", lambda result: percent(result.hit_rate_of_full_blocks)),
        ("ceiling: no limit, no TTLs", lambda result: percent(result.ceiling)),
        ("ceiling with these TTLs", lambda result: percent(result.ceiling_with_ttl)),
        ("LRU", lambda result: percent(result.lru)),
        ("FIFO", lambda result: percent(result.fifo)),
        ("Belady", lambda result: percent(result.belady)),
        ("of the way from LRU to Belady, %", lambda result: _way_words(result)),
    ]
    note = "LRU, FIFO and Belady: block by block, with the same capacity, without TTLs. Belady knows the future: nothing is better."
    return _by_configuration("Hit rate", rows, results, note)


def _storage_sheet(results: Sequence[Result]) -> Sheet:
    rows: Figures = [
        ("resident, mean", lambda result: size(result.storage.resident_bytes_mean)),
        ("resident, most", lambda result: size(result.storage.resident_bytes_max)),
        ("put a day", lambda result: size(result.storage.bytes_put_per_day)),
        ("written a day", lambda result: size(result.storage.bytes_written_per_day)),
        ("write amplification (WA)", lambda result: f"{result.storage.write_amplification:.3f}"),
        ("drive writes per day (DWPD)", _drive_writes),
    ]
    note = (
        "A store of the workload's size: multiply for yours. WA = bytes written ÷ bytes put, moved blocks and tables included; "
        "DWPD = bytes written a day ÷ capacity."
    )
    return _by_configuration("Storage", rows, results, note)


def _by_configuration(title: str, rows: Figures, results: Sequence[Result], note: str) -> Sheet:
    head = ("", *labels(results))
    return Sheet(title, head, tuple((name, *map(words, results)) for name, words in rows), note)


def _missed_sheet(result: Result, label: str, *, explain: bool) -> Sheet:
    """Missed tokens by cause and class. `explain`: with what the causes mean, which is said once."""
    columns = {"all": result.missed, **{plain(name): missed for name, missed in result.missed_by_class.items()}}
    rows = [
        (cause.replace("_", " "), *(percent(missed[cause]) for missed in columns.values()), meaning)
        for cause, meaning in CAUSES.items()
    ]
    rows.append(("together", *(percent(sum(missed.values())) for missed in columns.values()), "what is not hit"))
    sheet = Sheet(f"Missed tokens, % of input tokens: {label}", ("cause", *columns, ""), tuple(rows), wide=True)
    return sheet if explain else replace(sheet, head=sheet.head[:-1], rows=tuple(row[:-1] for row in rows), wide=False)


def _sweep_sheet(report: HitRateReport, sweep: str) -> Sheet:
    results = sweep_results(report, sweep)
    names = varying(results) or [{"capacity": "capacity", "ttl": "TTL", "class-share": "own share"}[sweep]]
    figures: Figures = [
        ("hit rate", lambda result: percent(result.hit_rate)),
        *((plain(name), _hit_rate_of(name)) for name in class_names(report)[:_CLASSES_A_SWEEP]),
        *_FIGURES_OF_SWEEP[sweep],
        ("expired", lambda result: percent(result.missed[EXPIRED])),
        ("evicted", lambda result: percent(result.missed[EVICTED])),
        *_STORAGE_OF_SWEEP[sweep],
    ]
    rows = (
        (*(settings(result)[name] for name in names), *(words(result) for _, words in figures)) for result in results
    )
    head = (*names, *(name for name, _ in figures))
    return Sheet(f"{SWEEPS[sweep]}, % of input tokens", head, tuple(rows), f"all with: {constant(results)}")


def _setting(name: str) -> Callable[[Result], str]:
    return lambda result: settings(result)[name]


def _hit_rate_of(class_name: str) -> Callable[[Result], str]:
    return lambda result: percent(result.hit_rate_by_class.get(class_name))


def _way_words(result: Result) -> str:
    way = of_the_way(result)
    return "-" if way is None else f"{way * 100:.1f}"


def _drive_writes(result: Result) -> str:
    writes = result.storage.capacity_writes_per_day
    return "-" if writes is None or not result.capacity_share else f"{writes:.2f}"


_FIGURES_OF_SWEEP: Final[dict[str, Figures]] = {
    "capacity": [
        ("LRU", lambda result: percent(result.lru)),
        ("FIFO", lambda result: percent(result.fifo)),
        ("Belady", lambda result: percent(result.belady)),
        ("of the way", _way_words),
    ],
    "ttl": [("ceiling", lambda result: percent(result.ceiling_with_ttl))],
    "class-share": [],
}
_AMPLIFICATION: Final[Figures] = [("WA", lambda result: f"{result.storage.write_amplification:.2f}")]
_STORAGE_OF_SWEEP: Final[dict[str, Figures]] = {
    "capacity": [*_AMPLIFICATION, ("DWPD", _drive_writes)],
    "ttl": [
        ("resident", lambda result: size(result.storage.resident_bytes_mean)),
        ("written a day", lambda result: size(result.storage.bytes_written_per_day)),
    ],
    "class-share": _AMPLIFICATION,
}
