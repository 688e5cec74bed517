"""The client in front of a real server that is killed, stopped, slow, cut off, replaced, full or garbled on the wire.

What comes is right or a miss; an outage is two log lines; calls cost next to nothing while it lasts; hits come back by
themselves. Nothing here asserts a time that a slow machine could miss: counts say that nothing was waited for. The times
themselves are printed (pytest -s).
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import statistics
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import numpy as np
import pytest

from fault_proxy import Fault, fault_proxy
from kvstore_client import ClientConfig, KVStoreClient, KVStoreConfigError, NamespaceSpec, channel
from kvstore_client.breaker import LANES
from serving import running_server, start_server

SPEC = NamespaceSpec(model="m", revision="r", engine="e", layout="l", kv_dtype="bfloat16", block_bytes=114_688)
SMALL = replace(SPEC, block_bytes=10_000)
PATIENT_S = 60  # for what must succeed on a busy machine


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running_server(tmp_path_factory.mktemp("data"), "--capacity", "2GiB") as server:
        yield server


@pytest.fixture
def proxy(server):
    with fault_proxy(server.target) as proxy:
        yield proxy


@contextmanager
def client_of(target: str, **settings):
    with KVStoreClient(ClientConfig(target=target, **settings)) as client:
        yield client


def until(true) -> float:
    """Wait; the seconds it took. No call to the store is made by this."""
    started_s = time.monotonic()
    while not true():
        assert time.monotonic() - started_s < PATIENT_S
        time.sleep(0.005)
    return time.monotonic() - started_s


def until_quiet(proxy) -> None:
    """Wait until the server has sent nothing for a while."""
    so_far_bytes = -1
    while proxy.bytes_from_server != so_far_bytes:
        so_far_bytes = proxy.bytes_from_server
        time.sleep(0.2)


@dataclass
class Stored:
    """A chain of blocks that the server holds."""

    chain: object
    data: bytes
    block_bytes: int

    def right(self, out: bytearray, statuses) -> bool:
        """Whether every block that is called OK is what was put."""
        size = self.block_bytes
        return all(
            out[i * size : (i + 1) * size] == self.data[i * size : (i + 1) * size]
            for i, status in enumerate(statuses)
            if status == "OK"
        )


def make(namespace, blocks: int) -> Stored:
    tokens = np.frombuffer(random.randbytes(blocks * 512), dtype="<u4")
    return Stored(namespace.chain(tokens), random.randbytes(blocks * namespace.block_bytes), namespace.block_bytes)


def store(namespace, blocks: int) -> Stored:
    stored = make(namespace, blocks)
    assert namespace.put(stored.chain, stored.data, budget_s=PATIENT_S).stored == blocks
    return stored


def get(namespace, stored: Stored, **more):
    """Get all of it; whatever is called OK is checked."""
    out = bytearray(len(stored.data))
    result = namespace.get(stored.chain, out, **more)
    assert stored.right(out, result.statuses)
    return result


def assert_whole(namespace, stored: Stored) -> None:
    result = get(namespace, stored, budget_s=PATIENT_S)
    assert (result.failure, result.leading_blocks) == (None, len(stored.chain))


def levels(caplog) -> list[str]:
    return [record.levelname for record in caplog.records if record.name == "kvstore_client"]


SICKNESSES = {
    "answers 8 s late": (lambda _, proxy: proxy.set(Fault(delay_s=8)), lambda _, proxy: proxy.set(Fault())),
    "stopped": (lambda pid, _: os.kill(pid, signal.SIGSTOP), lambda pid, _: os.kill(pid, signal.SIGCONT)),
    "behind a black hole": (lambda _, proxy: proxy.set(Fault(black_hole=True)), lambda _, proxy: proxy.set(Fault())),
    "gone": (lambda _, proxy: proxy.refuse(), lambda _, proxy: proxy.accept()),
}


@pytest.mark.parametrize("sickness", SICKNESSES)
def test_sick_server_is_cut_off_after_three_calls_and_let_back_in_without_a_request(server, proxy, caplog, sickness):
    caplog.set_level(logging.INFO, "kvstore_client")
    fall_sick, recover = SICKNESSES[sickness]
    with client_of(proxy.target) as client:
        namespace = client.namespace(SMALL)
        stored = store(namespace, 16)
        assert_whole(namespace, stored)
        fall_sick(server.pid, proxy)
        try:
            reasons = [get(namespace, stored).failure.reason for _ in range(4)]
            assert set(reasons[:3]) <= {"DEADLINE", "UNREACHABLE"}
            assert reasons[3] == "BREAKER_OPEN"
            sent_bytes, took_s, out = proxy.bytes_from_client, [], bytearray(len(stored.data))
            for _ in range(1000):
                started_s = time.perf_counter()
                result = namespace.get(stored.chain, out)
                took_s.append(time.perf_counter() - started_s)
                assert result.failure.reason == "BREAKER_OPEN"
            # A get sends its chain. A probe or two may have gone out, and nothing else.
            assert proxy.bytes_from_client - sent_bytes < 1000 * len(stored.chain.data) / 20
            assert client.stats().failures["BREAKER_OPEN"] == 1001
        finally:
            recover(server.pid, proxy)
        back_s = until(lambda: namespace.cut_off("read") is None)
        assert_whole(namespace, stored)
        p50_us, p99_us = (1e6 * statistics.quantiles(took_s, n=100)[i] for i in (49, 98))
        print(f"{sickness}: refused in {p50_us:.0f} µs (p50), {p99_us:.0f} µs (p99); back after {back_s:.2f} s")
    assert levels(caplog) == ["WARNING", "INFO"]


def test_server_stopped_in_the_middle_of_a_large_get_costs_part_of_it_and_serves_as_usual_afterwards(
    server, proxy, caplog
):
    caplog.set_level(logging.INFO, "kvstore_client")
    with client_of(proxy.target) as client:
        namespace = client.namespace(SPEC)
        stored = store(namespace, 585)  # 64 MiB
        proxy.set(Fault(bytes_per_s=32e6))
        results: list[object] = []
        reader = threading.Thread(target=lambda: results.append(get(namespace, stored, budget_s=2)))
        came_bytes = proxy.bytes_from_server
        reader.start()
        until(lambda: results or proxy.bytes_from_server > came_bytes + (4 << 20))
        os.kill(server.pid, signal.SIGSTOP)
        try:
            reader.join()
            assert results[0].failure.reason == "DEADLINE"
            assert 0 < results[0].leading_blocks < 585
            reasons = [get(namespace, stored).failure.reason for _ in range(4)]
            assert reasons[-1] == "BREAKER_OPEN"
            assert levels(caplog) == ["WARNING"]
        finally:
            os.kill(server.pid, signal.SIGCONT)
            proxy.set(Fault())
        until(lambda: namespace.cut_off("read") is None)
        assert_whole(namespace, stored)
        assert namespace.put(make(namespace, 1).chain, bytes(SPEC.block_bytes), budget_s=PATIENT_S).stored == 1
    assert levels(caplog) == ["WARNING", "INFO"]


@pytest.fixture
def patient_kernel(monkeypatch):
    """A full connection is given up by nobody else within a test's time: what waits for that hangs, and is seen to hang."""
    monkeypatch.setattr(channel, "KEEPALIVE_TIMEOUT_MS", 1_000_000)


def end_by_themselves(threads: list[threading.Thread]) -> bool:
    """Whether the threads, started here, end while the server is still stopped."""
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENT_S)
    return not any(thread.is_alive() for thread in threads)


@pytest.mark.usefixtures("patient_kernel")
def test_put_that_fills_the_connection_of_a_stopped_server_holds_up_no_call(server):
    data = random.Random(8).randbytes(60 * SPEC.block_bytes)
    for attempt in range(8):  # whether a put fills the connection depends on how far it got
        with client_of(server.target, breaker_failures=0) as client:
            namespace = client.namespace(replace(SPEC, model="full"))
            assert namespace.register(budget_s=PATIENT_S) is None
            chain, failures = namespace.chain([attempt] * (60 * 128)), []

            def put(namespace=namespace, chain=chain, failures=failures) -> None:
                failures += [namespace.put(chain, data).failure for _ in range(3)]

            writer = threading.Thread(target=put)

            def ask(namespace=namespace, chain=chain, failures=failures, writer=writer) -> None:
                while writer.is_alive():
                    failures.append(namespace.match(chain).failure)

            os.kill(server.pid, signal.SIGSTOP)
            try:
                assert end_by_themselves([writer, threading.Thread(target=ask)])
            finally:
                os.kill(server.pid, signal.SIGCONT)
            assert None not in failures


LARGE_CALLS = {
    "match": lambda namespace, chain: namespace.match(chain),
    "delete": lambda namespace, chain: namespace.delete(chain),
    "get": lambda namespace, chain: namespace.get(chain, bytearray(SMALL.block_bytes), first_block=len(chain) - 1),
}


@pytest.mark.usefixtures("patient_kernel")
@pytest.mark.parametrize("call", LARGE_CALLS)
def test_large_requests_that_fill_the_connection_of_a_stopped_server_hold_up_no_call(server, call):
    with client_of(server.target, breaker_failures=0) as client:
        namespace = client.namespace(replace(SMALL, model="large requests"))
        assert namespace.register(budget_s=PATIENT_S) is None
        large = namespace.chain(np.arange(65_536 * 128, dtype=np.uint32))  # requests of 2 MB
        small, failures = large.first(1), []

        def ask() -> None:
            for _ in range(3):
                failures.append(LARGE_CALLS[call](namespace, large).failure)
                failures.append(namespace.match(small).failure)

        os.kill(server.pid, signal.SIGSTOP)
        try:
            assert end_by_themselves([threading.Thread(target=ask) for _ in range(8)])
        finally:
            os.kill(server.pid, signal.SIGCONT)
    assert len(failures) == 8 * 3 * 2
    assert None not in failures


def test_slow_link_brings_leading_parts_and_is_not_cut_off(proxy, caplog):
    with client_of(proxy.target) as client:
        namespace = client.namespace(SPEC)
        stored = store(namespace, 128)
        for _ in range(4):
            proxy.set(Fault(bytes_per_s=4e6))
            result = get(namespace, stored, budget_s=1.5)
            assert result.failure.reason == "DEADLINE"
            assert 0 < result.leading_blocks < 128
            proxy.set(Fault())
            until_quiet(proxy)  # megabytes of it are still on their way, and the next get would stand behind them
    assert levels(caplog) == []


class Load:
    """Threads that get the same chain over and over, as an engine's requests do: after a miss they have work of their own."""

    def __init__(self, namespace, stored: Stored, threads: int) -> None:
        self._namespace, self._stored = namespace, stored
        self.hits, self.wrong = [0] * threads, 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(number,)) for number in range(threads)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _work(self, number: int) -> None:
        out = bytearray(len(self._stored.data))
        while not self._stop.is_set():
            result = self._namespace.get(self._stored.chain, out, lease=self._namespace.match(self._stored.chain).lease)
            self.wrong += not self._stored.right(out, result.statuses)
            if result.leading_blocks == len(self._stored.chain):
                self.hits[number] += 1
            else:
                time.sleep(0.05)


def test_server_killed_under_load_is_found_again_by_itself_and_never_answers_wrong(tmp_path, caplog):
    """100 requests are under way at each kill; whatever they get is right, and hits come back without their doing."""
    caplog.set_level(logging.INFO, "kvstore_client")
    server = start_server(tmp_path / "data", tmp_path)
    try:
        with client_of(server.target, base_budget_s=5) as client:
            namespace = client.namespace(SMALL)
            stored = store(namespace, 8)
            with Load(namespace, stored, threads=100) as load:
                until(lambda: sum(load.hits) > 200)
                for _ in range(2):
                    server.kill()
                    until(lambda: namespace.cut_off("read") is not None)
                    server = start_server(tmp_path / "data", tmp_path, listen=server.target)
                    before = sum(load.hits)
                    back_s = until(lambda before=before: sum(load.hits) > before)
                    print(f"first hit {back_s:.2f} s after the restarted server serves")
                before = list(load.hits)
                until(lambda: sum(now > then for now, then in zip(load.hits, before, strict=True)) > 50)
            assert load.wrong == 0
    finally:
        server.kill()
    assert levels(caplog)[0] == "WARNING"
    assert levels(caplog)[-1] == "INFO"


@pytest.mark.parametrize("data", ["kept", "lost"])
def test_restarted_server_is_let_back_in_without_a_request_whether_it_kept_its_data_or_not(tmp_path, data):
    data_dir = tmp_path / "data"
    server = start_server(data_dir, tmp_path)
    try:
        with client_of(server.target) as client:
            namespace = client.namespace(SPEC)
            stored = store(namespace, 2)
            server.kill()
            while namespace.cut_off("read") is None:
                assert get(namespace, stored).failure is not None
            assert {lane for lane in LANES if namespace.cut_off(lane)} == set(LANES)
            if data == "lost":
                shutil.rmtree(data_dir)
            server = start_server(data_dir, tmp_path, listen=server.target)
            until(lambda: namespace.cut_off("lookup") is None)
            hit_blocks = 2 if data == "kept" else 0
            match = namespace.match(stored.chain, budget_s=PATIENT_S)
            assert (match.failure, match.hit_length_blocks) == (None, hit_blocks)
            assert namespace.put(stored.chain, stored.data, budget_s=PATIENT_S).stored == 2 - hit_blocks
            assert_whole(namespace, stored)
    finally:
        server.kill()


def test_full_store_rejects_puts_with_a_reason_and_is_not_cut_off(tmp_path, caplog):
    with (
        running_server(tmp_path / "data", "--capacity", "32MiB") as server,
        client_of(server.target, base_budget_s=PATIENT_S) as client,
    ):
        namespace = client.namespace(SPEC)
        kept, rejected = [], 0
        while rejected < 10:
            stored = make(namespace, 16)
            report = namespace.put(stored.chain, stored.data)
            assert report.failure is None
            assert {result.reason for result in report.results} <= {"", "STORE_FULL"}
            rejected += bool(report.rejected)
            if not report.rejected:
                kept.append((stored, namespace.match(stored.chain, lease_s=60).lease))  # so no file may go
        assert kept
        for stored, lease in kept:
            assert get(namespace, stored, lease=lease).leading_blocks == 16
        assert [namespace.cut_off(lane) for lane in LANES] == [None] * 3
    assert levels(caplog) == []


@pytest.mark.parametrize("direction", ["get", "put"])
def test_bits_flipped_on_the_wire_never_make_a_wrong_block(proxy, direction):
    """In payload, message, frame or trailer, on the way in or out: wherever it falls, what is called OK is right."""
    positions = [0, 3, 9, 40, 200] + [random.randrange(8 * SPEC.block_bytes) for _ in range(15)]
    with client_of(proxy.target, breaker_failures=0) as client:
        namespace, lost = client.namespace(SPEC), 0
        stored = store(namespace, 8)
        for position in positions:
            proxy.set(Fault(flip_after_bytes=position, spoils_client=direction == "put"))
            if direction == "put":
                stored, stored_blocks = make(namespace, 8), 0
                with suppress(KVStoreConfigError):  # the call's name was hit, and no server has such a method
                    stored_blocks = namespace.put(stored.chain, stored.data, budget_s=0.5).stored
                lost += stored_blocks < 8
            else:
                lost += get(namespace, stored, budget_s=0.5).ok_blocks < 8
            proxy.set(Fault())
            proxy.refuse()  # a connection whose framing is broken may wait for ever for a frame's end
            proxy.accept()
            while get(namespace, stored, budget_s=PATIENT_S).failure is not None:
                time.sleep(0.01)
        assert proxy.faults_done == len(positions)
        assert lost >= len(positions) / 2
