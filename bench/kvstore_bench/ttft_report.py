"""The result of `kvstore-bench ttft`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvstore_api.limits import BLOCK_TOKENS
from kvstore_bench.report import circumstances, print_tables, utc_now

if TYPE_CHECKING:
    from kvstore_bench.machine import Machine
    from kvstore_bench.ttft import TtftConfig, TtftMeasurements


@dataclass(frozen=True, slots=True)
class TtftReport:
    """Everything there is to say about a run; its fields are the keys of the JSON, those of `measured` beside the others."""

    benchmark: str
    kvstore_version: str
    commit: str
    time: str
    seed: int
    config: TtftConfig
    machine: Machine
    measured: TtftMeasurements

    def to_json(self) -> dict[str, object]:
        """The report as plain dicts, lists and numbers."""
        fields = asdict(self)
        measured = fields.pop("measured")
        return {**fields, **measured}


def make_ttft_report(config: TtftConfig, measured: TtftMeasurements, machine: Machine, commit: str) -> TtftReport:
    """Put measurements together with what they must be read with."""
    return TtftReport("ttft", version("kvstore"), commit, utc_now(), config.seed, config, machine, measured)


def print_ttft_report(report: TtftReport) -> None:
    """The report as tables on stdout."""
    measured = report.measured
    print_tables(
        f"{measured.model}, {measured.kv_bytes_per_token:,.0f} B of KV a token; time to first token, medians of "
        f"{report.config.rounds} rounds",
        [_lengths_table(measured), _facts_table(measured)],
        circumstances(report.kvstore_version, report.commit, report.seed, report.time, report.machine),
    )


def _lengths_table(measured: TtftMeasurements) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in ("prompt tokens", "hit tokens", "computed, s", "loaded, s", "of it loading, s", "computed ÷ loaded"):
        table.add_column(title, justify="right")
    for line in measured.lengths:
        table.add_row(
            f"{line.prompt_tokens:,}",
            f"{line.hit_tokens:,}",
            f"{line.ttft_cold_s:.3f}",
            f"{line.ttft_hit_s:.3f}",
            f"{line.load_s:.3f}",
            f"{line.ratio:.1f}",
        )
    return table


def _facts_table(measured: TtftMeasurements) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, show_header=False)
    table.add_row("a look-up takes", f"{measured.look_up_s * 1000:.1f} ms")
    table.add_row("blocks arrive at", f"{measured.load_bytes_per_s / 1e6:,.0f} MB/s")
    table.add_row("tokens are computed at", f"{measured.prefill_tokens_per_s:,.0f} tokens/s")
    table.add_row("break-even length", break_even_words(measured.break_even_tokens))
    return table


def break_even_words(tokens: float | None) -> str:
    """From how many tokens on a hit pays."""
    if tokens is None:
        return "none: computing is faster at any length"
    if tokens <= BLOCK_TOKENS:
        return f"{tokens:,.1f} tokens, less than a block: every hit pays"
    return f"{tokens:,.0f} tokens: a hit of {-(-tokens // BLOCK_TOKENS):,.0f} blocks pays"
