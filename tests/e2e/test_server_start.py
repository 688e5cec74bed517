"""A server on a directory that takes a while to open: the port and health are there at once."""

from __future__ import annotations

import asyncio
import shutil

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.clock import SystemClock
from kvstore.config import Setting, load_config
from kvstore.server import Server, StartInterruptedError
from kvstore_bench.server_start import started_server
from kvstore_bench.sparse_store import Conversations, fill, open_store, store_config

BLOCKS = 60_000
CAPACITY = store_config(BLOCKS).capacity


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Holds 60,000 blocks, their payloads holes."""
    path = tmp_path_factory.mktemp("start") / "data"
    store = open_store(path, BLOCKS)
    fill(store, Conversations(1, BLOCKS), lambda _: None)
    store.close()
    return path


def health_of(target):
    with grpc.insecure_channel(target) as channel:
        return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10).status


def test_health_answers_before_the_store_is_ready(directory):
    """Without an index there is work to do before the first call can be served."""
    log = directory.with_name("rebuild.log")
    shutil.rmtree(directory / "index")
    with started_server(directory, CAPACITY, log) as start:
        assert start.first_status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert start.port_s < start.ready_s
        assert health_of(start.target) == health_pb2.HealthCheckResponse.SERVING
    assert f"{BLOCKS} blocks of" in log.read_text()


def test_after_a_kill_nothing_is_lost_and_little_is_done(directory):
    log = directory.with_name("killed.log")
    with started_server(directory, CAPACITY, log) as start:
        start.process.kill()
        start.process.wait()
    with started_server(directory, CAPACITY, log) as start:
        assert start.port_s <= start.ready_s
    assert "rebuilding" not in log.read_text()
    store = open_store(directory, BLOCKS)
    try:
        assert store.status().live.blocks == BLOCKS
    finally:
        store.close()


def test_a_signal_ends_a_rebuild_and_the_next_start_does_it(directory, tmp_path):
    """A rebuild may take longer than a service manager waits before it kills."""
    shutil.rmtree(directory / "index")
    config = load_config(
        flags=[
            Setting(("server", "data_dir"), str(directory), "test"),
            Setting(("server", "listen"), "127.0.0.1:0", "test"),
            Setting(("server", "metrics_listen"), "127.0.0.1:0", "test"),
            Setting(("store", "capacity"), str(CAPACITY), "test"),
        ]
    ).config
    asked = []

    def stopping() -> bool:
        asked.append(True)
        return len(asked) > 1

    async def start_and_stop() -> None:
        server = Server(config, SystemClock(), stopping)
        with pytest.raises(StartInterruptedError):
            await server.start()
        await server.close()

    asyncio.run(start_and_stop())
    with started_server(directory, CAPACITY, tmp_path / "log") as start:
        assert health_of(start.target) == health_pb2.HealthCheckResponse.SERVING
    assert f"{BLOCKS} blocks of" in (tmp_path / "log").read_text()
