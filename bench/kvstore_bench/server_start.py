"""How long a real kvstore-server takes, on a directory that is there already, from exec to health answering and to being ready."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore_bench.processes import ProcessError, child_environment, end_process, interrupts_deferred, log_tail

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_TIMEOUT_S = 900
_POLL_S = 0.005
_CALL_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Start:
    """A server that has just become ready, and how long that took."""

    process: subprocess.Popen[bytes]
    target: str
    port_s: float  # until health answered anything
    ready_s: float  # until it answered SERVING


@contextmanager
def started_server(directory: Path, capacity_bytes: int, log_path: Path) -> Iterator[Start]:
    """Start a server and time it; it is stopped in order at the end, unless it is dead by then.

    Raises: ProcessError: it ended, or was not ready in time.
    """
    target = f"127.0.0.1:{_free_port()}"
    options = ["--data-dir", str(directory), "--listen", target, "--metrics-listen", "", "--capacity"]
    process = None
    try:
        with log_path.open("wb") as log, interrupts_deferred():
            start_s = time.perf_counter()
            process = subprocess.Popen(
                [sys.executable, "-m", "kvstore.cli.server", *options, str(capacity_bytes)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=child_environment(),
                start_new_session=True,
            )
        watch = _Watch(process, target, log_path, start_s)
        port_s = watch.until(any_status=True)
        yield Start(process, target, port_s, watch.until(any_status=False))
    finally:
        if process is not None:
            end_process(process)


@dataclass(frozen=True, slots=True)
class _Watch:
    process: subprocess.Popen[bytes]
    target: str
    log_path: Path
    start_s: float

    def until(self, *, any_status: bool) -> float:
        """Seconds from exec until health answers, or answers SERVING."""
        while True:
            status = self._status()
            now_s = time.perf_counter() - self.start_s
            if status is not None and (any_status or status == health_pb2.HealthCheckResponse.SERVING):
                return now_s
            if self.process.poll() is not None:
                raise ProcessError(f"kvstore-server ended with {self.process.returncode}:\n{log_tail(self.log_path)}")
            if now_s > _TIMEOUT_S:
                raise ProcessError(f"kvstore-server was not ready within {_TIMEOUT_S} s:\n{log_tail(self.log_path)}")
            time.sleep(_POLL_S)

    def _status(self) -> int | None:
        """What health says now; None while nobody answers. A channel for each try: one that failed waits before the next."""
        host, _, port = self.target.rpartition(":")
        try:
            socket.create_connection((host, int(port)), _CALL_TIMEOUT_S).close()
        except OSError:
            return None
        with contextlib.suppress(grpc.RpcError), grpc.insecure_channel(self.target) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            status: int = stub.Check(health_pb2.HealthCheckRequest(), timeout=_CALL_TIMEOUT_S).status
            return status
        return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
