"""The demo's side of a prefill node: its process, and the JSON lines that go to and fro."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Final

from kvstore_bench.processes import ProcessError, interrupts_deferred, log_tail

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kvstore_bench.demo_prompts import Message

STOP_TIMEOUT_S = 60

# For whatever computes with torch: threads that wait for each other sleep instead of spinning. Spinning is a little faster on an
# idle machine, and several times slower as soon as anything else runs: measured on 2 cores with 5 busy processes, prefill at
# 16 tokens/s spinning and 90 sleeping.
THREAD_WAITING: Final = {"OMP_WAIT_POLICY": "PASSIVE"}

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request to a node."""

    title: str
    traffic_class: str
    messages: list[Message]


class NodeProcess:
    """A running prefill node that has loaded its model."""

    def __init__(self, process: subprocess.Popen[str], log_path: Path) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._log_path = log_path
        self._requests: IO[str] = process.stdin
        self._events: IO[str] = process.stdout
        self.facts = self._wait_for("ready")

    def answer(self, prompt: Prompt, max_new_tokens: int, on_progress: Callable[[int, int], None]) -> Event:
        """Serve one request. Raises: ProcessError: the node has ended."""
        request = {
            "traffic_class": prompt.traffic_class,
            "messages": prompt.messages,
            "max_new_tokens": max_new_tokens,
        }
        try:
            print(json.dumps(request), file=self._requests, flush=True)
        except BrokenPipeError:
            raise self._ended() from None
        return self._wait_for("answer", on_progress)

    def finish(self) -> Event:
        """Let it end. Returns: the counts of its prefix cache."""
        self._requests.close()
        return self._wait_for("end")

    def _wait_for(self, wanted: str, on_progress: Callable[[int, int], None] | None = None) -> Event:
        for line in self._events:
            event: Event = json.loads(line)
            if event["event"] == wanted:
                return event
            if on_progress is not None:
                on_progress(event["done_tokens"], event["total_tokens"])
        raise self._ended()

    def _ended(self) -> ProcessError:
        return ended("the prefill node", self._process, self._log_path)


@contextmanager
def running_node(target: str, log_path: Path, *options: str) -> Iterator[NodeProcess]:
    """Start a node and wait until it has loaded its model; end it at the end.

    Raises: ProcessError: it ended before it was ready; with the end of its log.
    """
    with running_module("kvstore_bench.prefill_node", ["--target", target, *options], log_path) as process:
        yield NodeProcess(process, log_path)
        process.wait(STOP_TIMEOUT_S)


def ended(what: str, process: subprocess.Popen[str], log_path: Path) -> ProcessError:
    """The error that a process has ended when it should not; waits until it has."""
    return ProcessError(f"{what} ended with {process.wait(STOP_TIMEOUT_S)}:\n{log_tail(log_path)}")


@contextmanager
def running_module(module: str, options: Sequence[str], log_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A Python module as a process with pipes for its input and output; killed at the end if it has not ended.

    It has a session of its own: an interrupt from the keyboard reaches the demo alone, which then ends it.
    """
    with ExitStack() as ending:
        with log_path.open("wb") as log, interrupts_deferred():
            process = subprocess.Popen(
                [sys.executable, "-m", module, *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=_environment(),
                start_new_session=True,
            )
            ending.enter_context(process)
            ending.callback(process.kill)  # does nothing to one that has ended
        yield process


def _environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    return {**THREAD_WAITING, **inherited}
