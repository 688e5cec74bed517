"""The processes a benchmark measures: started, waited for, read from /proc, and ended by their id."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

_START_TIMEOUT_S = 60
_STOP_TIMEOUT_S = 60
_DEATH_TIMEOUT_S = 1.0
_LOG_TAIL_CHARS = 2000
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ProcessError(RuntimeError):
    """A process that was to be measured did not start, or died."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A process's resident memory: its own pages, and pages of files that it maps and the kernel can take back."""

    anon_bytes: int
    file_bytes: int


@dataclass(frozen=True, slots=True)
class Child:
    """A process that serves at `target`."""

    process: subprocess.Popen[bytes]
    target: str
    log_path: Path

    def cpu_s(self) -> float:
        """User and system time since its start, its children's included; in steps of one clock tick, usually 10 ms."""
        return sum(_cpu_ticks(pid) for pid in _family(self.process.pid)) / _TICKS_PER_S

    def memory(self) -> Memory:
        """Its resident memory now, its children's included."""
        fields = [_memory_fields(pid) for pid in _family(self.process.pid)]
        return Memory(sum(each["RssAnon"] for each in fields), sum(each["RssFile"] for each in fields))

    def written_bytes(self) -> int:
        """Bytes it has given to file systems that keep them on a device, its children's included."""
        return sum(_written_bytes(pid) for pid in _family(self.process.pid))

    def check_alive(self) -> None:
        """Raises: ProcessError: it has ended; with the end of its log."""
        try:
            # Its sockets close a moment before it counts as ended.
            code = self.process.wait(_DEATH_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return
        raise ProcessError(f"{_words(self.process)} ended with {code}:\n{log_tail(self.log_path)}")


@contextmanager
def running_store(scratch: Path, name: str, capacity_bytes: int) -> Iterator[Child]:
    """A real kvstore-server on a data directory of its own under `scratch`."""
    options = {
        "--data-dir": str(scratch / name),
        "--listen": "127.0.0.1:0",
        "--metrics-listen": "127.0.0.1:0",
        "--capacity": str(capacity_bytes),
    }
    words = [word for option in options.items() for word in option]
    with running_child("kvstore.cli.server", words, scratch, name) as child:
        yield child


@contextmanager
def running_child(module: str, options: Sequence[str], scratch: Path, name: str) -> Iterator[Child]:
    """A Python module as a process that writes `{"listen": "HOST:PORT"}` to its --port-file once it serves.

    It has a session of its own: an interrupt from the keyboard reaches the benchmark alone, which then ends it in order.
    Raises: ProcessError: it ended or did not serve in time.
    """
    port_file, log_path = scratch / f"{name}.ports.json", scratch / f"{name}.log"
    process = None
    try:
        with log_path.open("wb") as log, interrupts_deferred():
            process = subprocess.Popen(
                [sys.executable, "-m", module, "--port-file", str(port_file), *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=child_environment(),
                start_new_session=True,
            )
        yield Child(process, _wait_for_target(process, port_file, log_path), log_path)
    finally:
        if process is not None:
            end_process(process)


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Let SIGINT and SIGTERM come through at the end only: a process that has just been made must be known, or nobody
    ends it. Masking them would not do, since a new process inherits the mask.
    """
    came: list[int] = []
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt


def interrupt(_: int, __: FrameType | None) -> NoReturn:
    """A handler of signals that ends the command as Ctrl-C does: servers are ended and scratch directories go on the way out."""
    raise KeyboardInterrupt


def child_environment() -> dict[str, str]:
    """This process's environment for a child."""
    # The configuration of somebody's own server must not find its way into a measurement.
    return {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}


def _wait_for_target(process: subprocess.Popen[bytes], port_file: Path, log_path: Path) -> str:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while not port_file.exists():
        if process.poll() is not None:
            raise ProcessError(f"{_words(process)} ended with {process.returncode}:\n{log_tail(log_path)}")
        if time.monotonic() > deadline_s:
            raise ProcessError(f"{_words(process)} did not serve within {_START_TIMEOUT_S} s")
        time.sleep(0.01)
    target: str = json.loads(port_file.read_text())["listen"]
    return target


def _words(process: subprocess.Popen[bytes]) -> str:
    assert isinstance(process.args, list)
    return shlex.join(map(str, process.args))


def log_tail(log_path: Path) -> str:
    """The end of a log, for a message."""
    return log_path.read_text(errors="replace")[-_LOG_TAIL_CHARS:].strip()


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Ask it to stop, and make it after a while."""
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _family(pid: int) -> list[int]:
    """The process and all its descendants."""
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [pid, *(member for child in children for member in _family(child))]


def _cpu_ticks(pid: int) -> int:
    # The name, in parentheses, may hold blanks; utime and stime are the 12th and 13th field after it.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def own_memory() -> Memory:
    """This process's resident memory, without its children's."""
    fields = _memory_fields(os.getpid())
    return Memory(fields["RssAnon"], fields["RssFile"])


def own_io() -> dict[str, int]:
    """What the kernel counts of this process's reading and writing, by the names it gives them in /proc."""
    return _io_fields(os.getpid())


def _written_bytes(pid: int) -> int:
    return _io_fields(pid)["write_bytes"]


def _io_fields(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def _memory_fields(pid: int) -> dict[str, int]:
    fields = {"RssAnon": 0, "RssFile": 0}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in fields:
            fields[name] = int(value.split()[0]) * 1024
    return fields
