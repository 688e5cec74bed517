"""The result of `kvstore-bench sliding-window`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvstore_bench.report import circumstances, print_tables, utc_now

if TYPE_CHECKING:
    from kvstore_bench.machine import Machine
    from kvstore_bench.sliding_window import SlidingWindowConfig, SlidingWindowMeasurements

_NOTE = """everything stored: the same blocks with the window layers' KV in them; bytes only, computed
bounded: by design not a cold run; its window layers know nothing from before the replay
exact, snapshot: a cold run but for rounding, or the exit code is 1"""


@dataclass(frozen=True, slots=True)
class SlidingWindowReport:
    """Everything there is to say about a run; its fields are the keys of the JSON, those of `measured` beside the others."""

    benchmark: str
    kvstore_version: str
    commit: str
    time: str
    seed: int
    config: SlidingWindowConfig
    machine: Machine
    measured: SlidingWindowMeasurements

    def to_json(self) -> dict[str, object]:
        """The report as plain dicts, lists and numbers."""
        fields = asdict(self)
        measured = fields.pop("measured")
        return {**fields, **measured}


def make_sliding_window_report(
    config: SlidingWindowConfig, measured: SlidingWindowMeasurements, machine: Machine, commit: str
) -> SlidingWindowReport:
    """Put measurements together with what they must be read with."""
    return SlidingWindowReport(
        "sliding-window", version("kvstore"), commit, utc_now(), config.seed, config, machine, measured
    )


def print_sliding_window_report(report: SlidingWindowReport) -> None:
    """The report as tables on stdout."""
    config, measured = report.config, report.measured
    print_tables(
        f"{measured.model}, a window of {config.window_tokens} tokens in {measured.window_layers} of "
        f"{measured.window_layers + measured.full_layers} layers ({config.pattern}); {config.prompts} prompts of "
        f"{min(measured.prompt_tokens):,} to {max(measured.prompt_tokens):,} tokens, {measured.scored_tokens:,} tokens scored",
        [_modes_table(report)],
        f"{_NOTE}\n\n" + circumstances(report.kvstore_version, report.commit, report.seed, report.time, report.machine),
    )


def _modes_table(report: SlidingWindowReport) -> Table:
    config, measured = report.config, report.measured
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("")
    for title in (
        "stored per 128 tokens, kB",
        "tokens replayed",
        "top-1 agreement",
        "KL per token, nats",
        "equal answers",
        "first token, s",
        "cold ÷ this",
    ):
        table.add_column(title, justify="right")
    everything = f"{measured.all_layers_bytes_per_128_tokens / 1e3:,.0f}"
    table.add_row("cold run", "-", "-", "-", "-", "-", f"{measured.cold_ttft_s:.2f}", "1.0")
    table.add_row("everything stored", everything, "0", "-", "-", "-", "-", "-")
    for name, mode in measured.modes.items():
        table.add_row(
            name,
            f"{mode.bytes_per_128_tokens / 1e3:,.0f}",
            f"{mode.replay_tokens:,.0f}",
            f"{mode.top1_agreement:.2%}",
            f"{mode.kl_per_token:.2g}",
            f"{mode.equal_answers} of {config.prompts}",
            f"{mode.ttft_s:.2f}",
            f"{mode.ttft_cold_to_ttft:.1f}",
        )
    return table
