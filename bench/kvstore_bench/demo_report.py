"""What came out of the demo: for eyes as a table, for later as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.metadata import version
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvstore_api.limits import BLOCK_TOKENS
from kvstore_bench.report import utc_now

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore_bench.machine import Machine
    from kvstore_bench.node_process import Event

_PIPE_WIDTH = 200
_ANSWER_CHARS = 90


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """One request, as node A answered it from scratch and node B with what A had stored."""

    title: str
    traffic_class: str
    prompt_tokens: int
    expected_hit_tokens: int  # in all full blocks but the one that holds the prompt's last token
    hit_tokens: int
    ttft_cold_s: float
    ttft_hit_s: float
    load_s: float  # of ttft_hit_s: from the store into the engine's memory
    answers_equal: bool  # token by token
    logits_equal: bool  # of the first token, bit by bit
    answer: str

    @classmethod
    def compare(cls, title: str, traffic_class: str, cold: Event, hit: Event) -> DemoRequest:
        """Put the two answers beside each other. Raises: ValueError: they are not answers to the same prompt."""
        if cold["prompt_sha256"] != hit["prompt_sha256"] or cold["hit_tokens"]:
            raise ValueError(f"{title}: the nodes were not asked the same, or the cold one was not cold")
        return cls(
            title=title,
            traffic_class=traffic_class,
            prompt_tokens=hit["prompt_tokens"],
            expected_hit_tokens=(hit["prompt_tokens"] - 1) // BLOCK_TOKENS * BLOCK_TOKENS,
            hit_tokens=hit["hit_tokens"],
            ttft_cold_s=cold["ttft_s"],
            ttft_hit_s=hit["ttft_s"],
            load_s=hit["load_s"],
            answers_equal=cold["tokens"] == hit["tokens"],
            logits_equal=cold["logits_sha256"] == hit["logits_sha256"],
            answer=hit["text"],
        )

    @property
    def speed_up(self) -> float:
        """How many times sooner the first token came."""
        return self.ttft_cold_s / self.ttft_hit_s

    @property
    def passed(self) -> bool:
        """Whether the answer is right and the hit complete."""
        return self.answers_equal and self.hit_tokens == self.expected_hit_tokens

    def to_json(self) -> dict[str, object]:
        """Plain values; `class` is the traffic class."""
        fields = asdict(self)
        return {
            "name": fields.pop("title"),
            "class": fields.pop("traffic_class"),
            **fields,
            "speed_up": self.speed_up,
        }


@dataclass(frozen=True, slots=True)
class DemoReport:
    """Everything there is to say about a run."""

    commit: str
    machine: Machine
    requests: Sequence[DemoRequest]
    node: Event  # what node B said of itself when it was ready
    stored: Event  # counts of node A's prefix cache
    loaded: Event  # counts of node B's prefix cache

    @property
    def passed(self) -> bool:
        """Whether every answer is right and every hit complete."""
        return all(request.passed for request in self.requests)

    @property
    def hit_rate(self) -> float:
        """Hit tokens ÷ tokens in full blocks asked for, as node B counted them when the store answered."""
        rate: float = self.loaded["hit_blocks"] / max(1, self.loaded["asked_blocks"])
        return rate

    def to_json(self) -> dict[str, Any]:
        """The report as plain dicts, lists and numbers."""
        node_facts = {name: value for name, value in self.node.items() if name != "event"}
        return {
            "benchmark": "demo",
            "kvstore_version": version("kvstore"),
            "commit": self.commit,
            "time": utc_now(),
            "machine": {**asdict(self.machine), "torch": version("torch")},
            "passed": self.passed,
            "hit_rate": self.hit_rate,
            "median_speed_up": median(request.speed_up for request in self.requests),
            "answers_equal": all(request.answers_equal for request in self.requests),
            "requests": [request.to_json() for request in self.requests],
            "node": node_facts,
            "node_a_prefix_cache": {name: value for name, value in self.stored.items() if name != "event"},
            "node_b_prefix_cache": {name: value for name, value in self.loaded.items() if name != "event"},
        }


def print_demo_report(report: DemoReport) -> None:
    """The report on stdout."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    console.print(_table(report))
    for request in report.requests:
        console.print(f"{request.title}: “{_shortened(request.answer)}”", soft_wrap=True)
    console.print()
    for line in _summary(report):
        console.print(line, soft_wrap=True)


def _table(report: DemoReport) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for name in ("request", "class"):
        table.add_column(name, no_wrap=True)
    for name in ("prompt tokens", "hit tokens", "TTFT cold", "TTFT hit", "of which load", "speed-up", "answers"):
        table.add_column(name, justify="right")
    for request in report.requests:
        missing = "" if request.hit_tokens == request.expected_hit_tokens else f" of {request.expected_hit_tokens:,}"
        table.add_row(
            request.title,
            request.traffic_class,
            f"{request.prompt_tokens:,}",
            f"{request.hit_tokens:,}{missing}",
            f"{request.ttft_cold_s:.2f} s",
            f"{request.ttft_hit_s:.2f} s",
            f"{request.load_s:.2f} s",
            f"{request.speed_up:.1f}x",
            "equal" if request.answers_equal else "DIFFERENT",
        )
    return table


def _summary(report: DemoReport) -> list[str]:
    requests, stored = report.requests, report.stored
    equal = sum(request.answers_equal for request in requests)
    identical = sum(request.logits_equal for request in requests)
    lines = [
        f"hit tokens ÷ tokens in full blocks asked for: {report.hit_rate:.1%}; median speed-up "
        f"{median(request.speed_up for request in requests):.1f}x; answers equal: {equal} of {len(requests)} "
        f"(first logits bit-identical: {identical})",
        f"time to first token of all requests: {sum(r.ttft_cold_s for r in requests):.1f} s cold, "
        f"{sum(r.ttft_hit_s for r in requests):.1f} s with hits; node A stored {stored['stored_blocks']:,} blocks of "
        f"{report.node['block_bytes'] / 1e6:.1f} MB and found {stored['exists_blocks']:,} there already",
    ]
    for node, what, reasons in (
        ("A", "blocks not stored", stored["unsaved_blocks"]),
        ("B", "requests with incomplete hits", report.loaded["misses"]),
    ):
        if reasons:
            counts = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items())
            lines.append(f"node {node}: {what}: {counts}")
    lines.append("PASSED" if report.passed else "FAILED: an answer differs, or a hit is not complete")
    return lines


def _shortened(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _ANSWER_CHARS else words[: _ANSWER_CHARS - 1] + "…"
