"""Long silent calls and the server's patience with pings, with every interval a hundredth of what production has."""

from __future__ import annotations

import sys
import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import serving
from kvstore.server import CLIENT_PING_INTERVAL_MIN_MS
from kvstore_client import ClientConfig
from kvstore_client.channel import channel_options
from serving import running_server

SCALE = 100
PING_MS = (
    CLIENT_PING_INTERVAL_MIN_MS // SCALE * 11 // 10
)  # a client at the server's limit: three times as often as ours
SCRIPT = """
import kvstore.server as server
options = dict(server.GRPC_OPTIONS)
options["grpc.http2.min_ping_interval_without_data_ms"] //= {divisor}
server.GRPC_OPTIONS = tuple(options.items())
from kvstore.cli.server import main
main()
"""


class Watch:
    """A call that stays open and says nothing after the first message, on a channel that pings as often as it may."""

    def __init__(self, target: str) -> None:
        options = dict(channel_options(ClientConfig(target=target)))
        # Of itself gRPC pings a silent server twice only, then more rarely; not counting on that, the test is the stricter.
        options |= {"grpc.keepalive_time_ms": PING_MS, "grpc.http2.max_pings_without_data": 0}
        self._channel = grpc.insecure_channel(target, options=list(options.items()))
        self._call = health_pb2_grpc.HealthStub(self._channel).Watch(health_pb2.HealthCheckRequest())
        assert next(self._call).status == health_pb2.HealthCheckResponse.SERVING
        self.error: grpc.RpcError | None = None
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            next(self._call)
        except grpc.RpcError as error:
            self.error = error

    def close(self) -> None:
        self._call.cancel()
        self._thread.join()
        self._channel.close()


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Makes a server whose ping interval is divided."""

    def start(divisor: int):
        script = SCRIPT.format(divisor=divisor)
        monkeypatch.setattr(serving, "server_command", lambda *flags: [sys.executable, "-c", script, *flags])
        return running_server(tmp_path / str(divisor))

    return start


def test_client_that_pings_as_often_as_the_server_allows_is_not_sent_away(serve):
    with serve(1) as impatient, serve(SCALE) as patient:
        sent_away, kept = Watch(impatient.target), Watch(patient.target)
        try:
            started_s = time.monotonic()
            while sent_away.error is None:  # or else the test would prove nothing
                time.sleep(0.01)
            assert "too many pings" in sent_away.error.details().lower()
            time.sleep(time.monotonic() - started_s)
            assert kept.error is None
        finally:
            sent_away.close()
            kept.close()
