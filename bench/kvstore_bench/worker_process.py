"""The hand-over demo's side of a worker: its process, and the JSON lines that go to and fro."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvstore_bench.node_process import STOP_TIMEOUT_S, ended, running_module

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvstore_bench.node_process import Event
    from kvstore_bench.processes import ProcessError


class WorkerProcess:
    """A running worker that has loaded its model."""

    def __init__(self, process: subprocess.Popen[str], log_path: Path) -> None:
        self._process = process
        self._log_path = log_path
        self.facts = next(self.events())

    def send(self, requests: Sequence[Event]) -> None:
        """Give it all its requests. Raises: ProcessError: it has ended."""
        assert self._process.stdin is not None
        try:
            with self._process.stdin as stdin:
                for request in requests:
                    print(json.dumps(request), file=stdin)
        except BrokenPipeError:
            raise self._ended() from None

    def terminate(self) -> None:
        """Tell it to drain."""
        self._process.terminate()

    def events(self) -> Iterator[Event]:
        """What it says, to the last event. Raises: ProcessError: it ended without saying that it does."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event: Event = json.loads(line)
            yield event
            if event["event"] == "end":
                return
        raise self._ended()

    def _ended(self) -> ProcessError:
        return ended("a worker", self._process, self._log_path)


@contextmanager
def running_worker(role: str, log_path: Path, *options: str) -> Iterator[WorkerProcess]:
    """Start a worker and wait until it has loaded its model; end it at the end.

    Raises: ProcessError: it ended before it was ready; with the end of its log.
    """
    with running_module("kvstore_bench.decode_worker", ["--role", role, *options], log_path) as process:
        yield WorkerProcess(process, log_path)
        process.wait(STOP_TIMEOUT_S)
