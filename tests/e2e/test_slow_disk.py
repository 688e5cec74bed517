"""A server whose disk does not answer: gets wait or are refused, and nothing else waits with them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from faults import FaultyDevice
from kvstore.clock import SystemClock
from kvstore.config import Setting, load_config
from kvstore.server import Server
from kvstore_api.v1 import admin_pb2
from third_party import STORED, WAIT_S, Client, block_of, get_request, make_chain, make_spec, refused, until

READ_THREADS, READS_AT_A_TIME = 2, 4
BLOCK_BYTES, BLOCKS = 5000, 8


class SlowDisk(FaultyDevice):
    """Reads wait while the disk is told to hang; `waiting` do."""

    def __init__(self):
        super().__init__()
        self.answers = threading.Event()
        self.answers.set()
        self.waiting = []  # a thread each
        self.fail_read_of = self._wait

    def _wait(self, path, begin, end):
        if not self.answers.is_set():
            self.waiting.append(threading.current_thread().name)
            assert self.answers.wait(WAIT_S)
        return 0


@contextlib.contextmanager
def server_on(device, directory):
    """A server in this process, on a loop in a thread of its own; yields it and its address."""
    port_file = directory / "ports.json"
    settings = {
        ("server", "data_dir"): directory / "data",
        ("server", "listen"): "127.0.0.1:0",
        ("server", "metrics_listen"): "",
        ("server", "port_file"): port_file,
        ("server", "read_threads"): READ_THREADS,
        ("server", "read_pending_max"): READS_AT_A_TIME,
        ("store", "capacity"): "64MiB",
    }
    config = load_config(flags=[Setting(key, str(value), "test") for key, value in settings.items()]).config
    loop, stop, servers = asyncio.new_event_loop(), asyncio.Event(), []

    async def run():
        server = Server(config, SystemClock(), lambda: False, device)
        servers.append(server)
        try:
            await server.start()
            await stop.wait()
        finally:
            await server.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        until(lambda: port_file.exists() or not thread.is_alive())
        yield servers[0], json.loads(port_file.read_text())["listen"]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@pytest.fixture
def disk():
    return SlowDisk()


@pytest.fixture
def server_and_client(disk, tmp_path):
    with server_on(disk, tmp_path) as (server, target), grpc.insecure_channel(target) as channel:
        try:
            yield server, Client(channel)
        finally:
            disk.answers.set()


@pytest.mark.parametrize("part", [{}, {"part_offset_bytes": 100, "part_bytes": 50}])
def test_gets_that_wait_for_the_disk_hold_up_neither_match_nor_health_nor_puts(server_and_client, disk, part):
    server, client = server_and_client
    namespace = client.register(make_spec(BLOCK_BYTES))
    chain = make_chain("slow disk", BLOCKS)
    client.put_blocks(namespace, chain, BLOCK_BYTES)
    disk.answers.clear()
    slow = [client.blocks.GetBlocks(get_request(namespace, chain, **part)) for _ in range(READS_AT_A_TIME)]
    until(lambda: server._pools.read.pending == READS_AT_A_TIME and len(disk.waiting) == READ_THREADS)

    health = health_pb2_grpc.HealthStub(client.channel)
    for turn in range(20):
        with refused(grpc.StatusCode.UNAVAILABLE, "OVERLOADED", f"the limit is {READS_AT_A_TIME}"):
            client.get(namespace, chain)
        assert client.match(namespace, chain).hit_length_blocks == BLOCKS
        assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
        other = make_chain(f"meanwhile {turn}", 2)
        assert {result.status for result in client.put_blocks(namespace, other, BLOCK_BYTES)} == {STORED}
        assert client.admin.GetStatus(admin_pb2.GetStatusRequest()).live.blocks == BLOCKS + 2 * (turn + 1)
    assert len(disk.waiting) == READ_THREADS, "the gets still wait, and so did nobody else"

    disk.answers.set()
    begin = part.get("part_offset_bytes", 0)
    wanted = b"".join(
        block_of(prefix_hash, BLOCK_BYTES)[begin : begin + part.get("part_bytes", BLOCK_BYTES)] for prefix_hash in chain
    )
    for stream in slow:
        assert b"".join(frame.data for frame in stream) == wanted
