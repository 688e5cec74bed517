"""A real `kvstore-server` process for tests: started on free ports, waited for, and ended by its process id."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 60


@dataclass
class RunningServer:
    """A server that answers; `stop` and `kill` may be called more than once."""

    process: subprocess.Popen[bytes]
    target: str  # for grpc.insecure_channel
    metrics_url: str
    log_path: Path

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self.process.pid

    def log(self) -> str:
        """What the server has written to stderr so far."""
        return self.log_path.read_text()

    def stop(self) -> int:
        """End it in order (SIGTERM) and return its exit code."""
        return self._end(signal.SIGTERM)

    def kill(self) -> int:
        """End it without warning (SIGKILL) and return its exit code, -9."""
        return self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(STOP_TIMEOUT_S)


@contextmanager
def running_server(
    data_dir: Path | str, *flags: str, listen: str = "127.0.0.1:0", env: Mapping[str, str] | None = None
) -> Iterator[RunningServer]:
    """Start `kvstore-server` on `data_dir` with more `flags`; kill it at the end unless it has ended before.

    Raises: RuntimeError: it ended before it served; the message holds its stderr.
    """
    with tempfile.TemporaryDirectory(prefix="kvstore-serving-") as scratch:
        server = start_server(data_dir, Path(scratch), *flags, listen=listen, env=env)
        try:
            yield server
        finally:
            server.kill()


def start_server(
    data_dir: Path | str, scratch: Path, *flags: str, listen: str = "127.0.0.1:0", env: Mapping[str, str] | None = None
) -> RunningServer:
    """Start a server and wait until it serves; the caller ends it. Log and port file go to `scratch`."""
    port_file, log_path = scratch / "ports.json", scratch / "server.log"
    port_file.unlink(missing_ok=True)
    command = server_command("--data-dir", str(data_dir), "--listen", listen, "--metrics-listen", "127.0.0.1:0")
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*command, "--port-file", str(port_file), *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=server_environment(env),
        )
    try:
        ports = _wait_for_ports(process, port_file, log_path)
        _wait_for_health(ports["listen"])
    except BaseException:
        process.kill()
        process.wait()
        raise
    return RunningServer(process, ports["listen"], f"http://{ports['metrics']}/metrics", log_path)


def run_server(*flags: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a `kvstore-server` that is expected to end by itself: a refused start, or `config show`."""
    return subprocess.run(
        server_command(*flags),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        env=server_environment(env),
        check=False,
    )


def server_command(*flags: str) -> list[str]:
    """The command line of a server."""
    return [sys.executable, "-m", "kvstore.cli.server", *flags]


def server_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without its KVSTORE_ variables, plus `extra`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    return {**inherited, **(extra or {})}


def _wait_for_ports(process: subprocess.Popen[bytes], port_file: Path, log_path: Path) -> dict[str, str]:
    # The file appears in one piece once the server serves, so looking for it again and again is safe.
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not port_file.exists():
        if process.poll() is not None:
            raise RuntimeError(f"kvstore-server ended with {process.returncode}:\n{log_path.read_text()}")
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"kvstore-server wrote no port file in {START_TIMEOUT_S} s:\n{log_path.read_text()}")
        time.sleep(0.01)
    ports: dict[str, str] = json.loads(port_file.read_text())
    return ports


def _wait_for_health(target: str) -> None:
    with grpc.insecure_channel(target) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=START_TIMEOUT_S
        )
    if reply.status != health_pb2.HealthCheckResponse.SERVING:
        raise RuntimeError(f"kvstore-server at {target} says {reply.status}")
