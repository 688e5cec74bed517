"""What came out of the hand-over demo: for eyes as a table, for later as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvstore_bench.report import utc_now

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore_bench.machine import Machine
    from kvstore_bench.node_process import Event

_PIPE_WIDTH = 200


@dataclass(frozen=True, slots=True)
class Move:
    """A request's way from one worker to the next."""

    kv_bytes: int  # complete blocks and the unfinished tail, in the store
    ticket_bytes: int
    hand_over_s: float  # until the store had confirmed it all
    take_over_s: float  # from the store into the next engine's memory
    recomputed_tokens: int  # tokens whose KV the first worker had, and that the next one computed

    @classmethod
    def between(cls, gave: Event, took: Event) -> Move:
        """A move as its two workers saw it."""
        return cls(
            kv_bytes=gave["kv_bytes"],
            ticket_bytes=gave["ticket_bytes"],
            hand_over_s=gave["hand_over_s"],
            take_over_s=took["take_over_s"],
            recomputed_tokens=took["recomputed_tokens"],
        )


@dataclass(frozen=True, slots=True)
class HandoffRequest:
    """One request on its way through the workers."""

    title: str
    traffic_class: str
    prompt_tokens: int
    tokens_at: Sequence[int]  # new tokens of each worker: prefill, A and, unless it finished there, B
    moves: Sequence[Move]
    answers_equal: bool  # token by token, with the worker that was alone
    answer: str

    @property
    def recomputed_tokens(self) -> int:
        """Tokens computed twice."""
        return sum(move.recomputed_tokens for move in self.moves)

    @property
    def passed(self) -> bool:
        """Whether the answer is right, and nothing was computed twice."""
        return self.answers_equal and not self.recomputed_tokens

    def to_json(self) -> dict[str, object]:
        """Plain values; `class` is the traffic class."""
        fields = asdict(self)
        return {"name": fields.pop("title"), "class": fields.pop("traffic_class"), **fields, "passed": self.passed}


@dataclass(frozen=True, slots=True)
class HandoffReport:
    """Everything there is to say about a run."""

    commit: str
    machine: Machine
    requests: Sequence[HandoffRequest]
    max_new_tokens: int
    grace_s: float
    grace_used_s: float
    worker: Event  # what a worker said of itself when it was ready

    @property
    def moved_twice(self) -> int:
        """Requests that A had to hand over."""
        return sum(len(request.moves) == 2 for request in self.requests)

    @property
    def passed(self) -> bool:
        """Whether every answer is right, nothing was computed twice, and the drain had something to hand over."""
        return all(request.passed for request in self.requests) and self.moved_twice > 0

    def to_json(self) -> dict[str, Any]:
        """The report as plain dicts, lists and numbers."""
        return {
            "benchmark": "demo-handoff",
            "kvstore_version": version("kvstore"),
            "commit": self.commit,
            "time": utc_now(),
            "machine": {**asdict(self.machine), "torch": version("torch")},
            "config": {"max_new_tokens": self.max_new_tokens, "grace_s": self.grace_s, "sampling": "greedy"},
            "passed": self.passed,
            "answers_equal": all(request.answers_equal for request in self.requests),
            "recomputed_tokens": sum(request.recomputed_tokens for request in self.requests),
            "moved_twice": self.moved_twice,
            "grace_used_s": self.grace_used_s,
            "requests": [request.to_json() for request in self.requests],
            "worker": {name: value for name, value in self.worker.items() if name != "event"},
        }


def print_handoff_report(report: HandoffReport) -> None:
    """The report on stdout."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    console.print(_table(report))
    for line in _summary(report):
        console.print(line, soft_wrap=True)


def _table(report: HandoffReport) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for name in ("request", "class"):
        table.add_column(name, no_wrap=True)
    columns = ("prompt tokens", "new tokens prefill+A+B", "KV handed over", "hand-over", "take-over", "computed twice")
    for name in (*columns, "answers"):
        table.add_column(name, justify="right")
    for request in report.requests:
        moves = request.moves
        table.add_row(
            request.title,
            request.traffic_class,
            f"{request.prompt_tokens:,}",
            " + ".join(map(str, request.tokens_at)),
            ", ".join(f"{move.kv_bytes / 1e6:.1f}" for move in moves) + " MB",
            ", ".join(f"{move.hand_over_s:.2f}" for move in moves) + " s",
            ", ".join(f"{move.take_over_s:.2f}" for move in moves) + " s",
            f"{request.recomputed_tokens:,}",
            "equal" if request.answers_equal else "DIFFERENT",
        )
    return table


def _summary(report: HandoffReport) -> list[str]:
    requests = report.requests
    equal = sum(request.answers_equal for request in requests)
    recomputed = sum(request.recomputed_tokens for request in requests)
    verdict = (
        "PASSED" if report.passed else "FAILED: an answer differs, tokens were computed twice, or nothing was moved"
    )
    return [
        f"decode worker A was told to drain, went on for {report.grace_used_s:.1f} s of {report.grace_s:g} s, and handed over "
        f"{report.moved_twice} of {len(requests)} requests; B finished them at the exact token",
        f"answers equal to those of one worker alone: {equal} of {len(requests)} (greedy, {report.max_new_tokens} tokens each); "
        f"tokens computed twice: {recomputed:,}",
        verdict,
    ]
