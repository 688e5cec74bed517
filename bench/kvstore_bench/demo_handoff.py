"""The hand-over demo: requests go from a prefill worker to decode worker A, and from A, which is drained, to B.

    one worker alone    no store, nothing moves                                        -> the tokens to compare with
    kvstore-server      on a scratch directory
    prefill worker      computes each prompt and its first token, hands the request over, and ends
    decode worker A     decodes all of them in a batch; SIGTERM; after its grace period hands over what is not finished, and ends
    decode worker B     finishes them

Each is a process of its own. Tokens are chosen greedily. A batch of another composition computes the same numbers but for
rounding, so the tokens are equal unless two of them are equally likely to the last digits.
"""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore_bench.demo import demo_store, show_logs
from kvstore_bench.demo_handoff_report import HandoffReport, HandoffRequest, Move, print_handoff_report
from kvstore_bench.demo_prompts import SCHEDULE, conversations
from kvstore_bench.demo_screen import DemoScreen
from kvstore_bench.machine import describe_commit, describe_machine
from kvstore_bench.node_process import Prompt
from kvstore_bench.options import write_json
from kvstore_bench.worker_process import WorkerProcess, running_worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore_bench.node_process import Event

GRACE_S = 3.0
FIRST_TURNS = tuple(name for name, turn in SCHEDULE if turn == 0)


def run_handoff_demo(request_count: int, max_new_tokens: int, data_dir: Path | None, json_file: Path | None) -> int:
    """Run it, print the outcome, and write the figures to `json_file`. What it needs is there: `check_packages`, `NEEDED_BYTES`.

    Args:
        request_count: how many requests to move, from the first of `FIRST_TURNS` on.
        max_new_tokens: tokens of each answer.
        data_dir: where the scratch directory is made; the system's default when None.
    Returns: the exit code: 0 if all tokens are equal and none was computed twice, else 1.
    Raises: ProcessError: a process ended or did not start.
    """
    parent = data_dir or Path(tempfile.gettempdir())
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-", dir=parent) as scratch, DemoScreen() as screen:
        report = _run(_prompts(request_count), max_new_tokens, Path(scratch), screen)
    print_handoff_report(report)
    write_json(json_file, report.to_json())
    return 0 if report.passed else 1


def _prompts(count: int) -> list[Prompt]:
    talks = conversations()
    return [Prompt(name, talks[name].traffic_class, talks[name].messages(0, [])) for name in FIRST_TURNS[:count]]


def _run(prompts: Sequence[Prompt], max_new_tokens: int, scratch: Path, screen: DemoScreen) -> HandoffReport:
    requests = [_request(prompt, max_new_tokens) for prompt in prompts]
    screen.say("one worker alone: the answers to compare with")
    with running_worker("alone", scratch / "alone.log") as alone:
        expected = _work(alone, requests, screen).finished
    with demo_store(scratch, "store") as target:
        screen.say("the prefill worker computes each prompt and its first token, and hands the request over")
        with running_worker("prefill", scratch / "prefill.log", "--target", target) as prefill:
            prefilled = _work(prefill, requests, screen).tickets
        screen.say(f"decode worker A takes {len(prefilled)} requests over")
        with (
            running_worker("decode", scratch / "a.log", "--target", target, "--grace-s", str(GRACE_S)) as a,
            running_worker("decode", scratch / "b.log", "--target", target) as b,
        ):
            decoded = _work(a, _handed(prefilled), screen, drain_at=max_new_tokens // 4)
            screen.say(f"decode worker A has ended; B takes {len(decoded.tickets)} requests over")
            completed = _work(b, _handed(decoded.tickets), screen).finished
        machine = describe_machine(scratch)
    rows = [_row(prompt, expected, prefilled, decoded.tickets, {**decoded.finished, **completed}) for prompt in prompts]
    report = HandoffReport(
        describe_commit(), machine, rows, max_new_tokens, GRACE_S, decoded.end["grace_used_s"], alone.facts
    )
    if not report.passed:
        show_logs(scratch, screen)
    return report


class _Outcome:
    """What a worker did, by the names of requests."""

    def __init__(self) -> None:
        self.finished: dict[str, Event] = {}
        self.tickets: dict[str, Event] = {}
        self.end: Event = {}


def _work(
    worker: WorkerProcess, requests: Sequence[Event], screen: DemoScreen, *, drain_at: int | None = None
) -> _Outcome:
    """Let a worker do all it can.

    Args: drain_at: tell it to drain when all its requests have so many tokens, and to be quick when one has twice as many, so
        that there is something left on a fast machine.
    """
    worker.send(requests)
    outcome, told = _Outcome(), 0
    screen.begin("tokens there")
    for event in worker.events():
        match event["event"]:
            case "finished":
                outcome.finished[event["name"]] = event
            case "ticket":
                outcome.tickets[event["name"]] = event
                screen.say(
                    f"  {event['name']}: handed over {event['kv_bytes'] / 1e6:.0f} MB of KV at token "
                    f"{event['prompt_tokens'] + event['output_tokens']:,} in {event['hand_over_s']:.2f} s"
                )
            case "end":
                outcome.end = event
            case "step":
                counts = event["output_tokens"].values()
                screen.progress(f"{event['prefilled_tokens']:,} prompt tokens, {sum(counts):,} new tokens")
                if drain_at is not None and len(counts) == len(requests):
                    wanted = (min(counts) >= drain_at) + (max(counts) >= 2 * drain_at)
                    if told < wanted:
                        screen.say("  SIGTERM: drain" if not told else "  SIGTERM again: at once")
                        worker.terminate()
                        told += 1
    return outcome


def _request(prompt: Prompt, max_new_tokens: int) -> Event:
    return {
        "name": prompt.title,
        "messages": prompt.messages,
        "traffic_class": prompt.traffic_class,
        "max_new_tokens": max_new_tokens,
    }


def _handed(tickets: dict[str, Event]) -> list[Event]:
    return [{"name": name, "ticket": event["ticket"]} for name, event in tickets.items()]


def _row(
    prompt: Prompt,
    expected: dict[str, Event],
    first: dict[str, Event],
    second: dict[str, Event],
    last: dict[str, Event],
) -> HandoffRequest:
    name = prompt.title
    stops = [first[name], *([second[name]] if name in second else []), last[name]]
    moves = [Move.between(gave, took) for gave, took in pairwise(stops)]
    counts = [0, *(stop["output_tokens"] for stop in stops[:-1]), len(last[name]["tokens"])]
    return HandoffRequest(
        title=name,
        traffic_class=prompt.traffic_class,
        prompt_tokens=last[name]["prompt_tokens"],
        tokens_at=[after - before for before, after in pairwise(counts)],
        moves=moves,
        answers_equal=expected[name]["tokens"] == last[name]["tokens"],
        answer=last[name]["text"],
    )
