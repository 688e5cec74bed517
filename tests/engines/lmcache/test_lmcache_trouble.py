"""LMCache goes on without its store: what cannot be had is a miss, exactly, and nothing waits or raises; wrong settings stop it."""

from __future__ import annotations

import io
import logging
import os
import signal
import time
from pathlib import Path

import pytest
from lmcache.v1.distributed.config import EvictionConfig
from lmcache_node import CHUNK, MODEL, Engine, Node, kv_bytes, running_node

from fault_proxy import Fault, fault_proxy
from kvstore_client import KVStoreConfigError
from serving import running_server, start_server

TOKENS = list(range(6 * CHUNK))
ENGINE = Engine()
KEYS = ENGINE.keys(TOKENS)
PATIENT_S = 60


def params(target: str, **more) -> dict[str, object]:
    return {"target": target, "model": MODEL, "revision": "r", **more}


def until_all_hit(node) -> None:
    deadline_s = time.monotonic() + PATIENT_S
    while not all(node.prefetch(ENGINE, KEYS)):
        assert time.monotonic() < deadline_s, node.adapter.report_status()
        time.sleep(0.1)
        node.forget()


def stored(node) -> None:
    """A patient first save, however busy the machine is."""
    deadline_s = time.monotonic() + PATIENT_S
    while node.save(ENGINE, KEYS) < len(KEYS):
        assert time.monotonic() < deadline_s
        node.forget()
    node.forget()
    until_all_hit(node)
    node.forget()


class Killed:
    def __init__(self, server, proxy, scratch):
        self.server, self.scratch = server, scratch
        self.target, self.settings = server.target, {}

    def begin(self):
        self.server.kill()

    def end(self):
        self.server = start_server(self.scratch / "data", self.scratch, listen=self.server.target)

    def clean_up(self):
        self.server.kill()


class Stopped:
    def __init__(self, server, proxy, scratch):
        self.pid, self.target, self.settings = server.pid, server.target, {}
        self.stopped = []

    def begin(self):
        # Its worker processes too: the supervisor alone serves nothing.
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        self.stopped = [self.pid, *map(int, children)]
        for pid in self.stopped:
            os.kill(pid, signal.SIGSTOP)

    def end(self):
        for pid in self.stopped:
            os.kill(pid, signal.SIGCONT)

    def clean_up(self):
        pass


class Slow:
    def __init__(self, server, proxy, scratch):
        self.proxy, self.target = proxy, proxy.target
        # The proxy is a thread beside LMCache's own in one process, and seldom passes a save on in the usual 50 ms.
        self.settings = {"base_budget_s": 0.5}

    def begin(self):
        self.proxy.set(Fault(delay_s=8.0))

    def end(self):
        self.proxy.set(Fault())

    def clean_up(self):
        pass


@pytest.mark.parametrize("kind", [Killed, Stopped, Slow])
def test_while_the_store_is_sick_all_is_a_miss_nothing_waits_and_hits_come_back_by_themselves(tmp_path, kind):
    with running_server(tmp_path / "data") as server, fault_proxy(server.target) as proxy:
        trouble = kind(server, proxy, tmp_path)
        with running_node(params(trouble.target, **trouble.settings)) as node:
            stored(node)
            trouble.begin()
            began_s = time.monotonic()
            try:
                for _ in range(20):
                    assert not any(node.prefetch(ENGINE, KEYS))
                assert node.save(ENGINE, KEYS) == 0
                assert all(node.prefetch(ENGINE, KEYS))  # LMCache's own memory
                waited_s = time.monotonic() - began_s
                failures = node.adapter._store.client.stats().failures
                assert failures["BREAKER_OPEN"] >= 10, failures
                assert waited_s < 20  # 22 calls to a store that takes 8 s, or for ever, are minutes
                assert node.adapter.report_status()["is_healthy"]
            finally:
                trouble.end()
            node.forget()
            until_all_hit(node)
        trouble.clean_up()


def test_a_store_that_dies_between_the_look_up_and_the_load_is_a_miss(tmp_path):
    with running_server(tmp_path / "data") as server, running_node(params(server.target)) as node:
        stored(node)
        load = node.adapter.submit_load_task

        def kill_and_load(keys, objects):
            server.kill()
            return load(keys, objects)

        node.adapter.submit_load_task = kill_and_load
        assert not any(node.prefetch(ENGINE, KEYS))
        load_status = node.adapter.report_status()["load"]
        assert load_status["failures"], load_status


@pytest.mark.parametrize(("step", "slow_from"), [("match", "prefetch"), ("get", "load")])
def test_many_chains_at_a_slow_store_together_take_no_longer_than_four_calls(tmp_path, step, slow_from):
    """Each call ends within its own budget, so that nothing else would end the batch; the calls that were made count."""
    chains = 40
    keys = ENGINE.keys(range(chains * CHUNK))
    with running_server(tmp_path / "data") as server, fault_proxy(server.target) as proxy:
        with running_node(params(server.target, base_budget_s=10.0)) as node:
            for key in keys:  # that nobody looked up: each is a chain of its own
                assert node.save(ENGINE, [key]) == 1
        with running_node(params(proxy.target, base_budget_s=0.5, breaker_failures=0)) as node:
            node.prefetch(ENGINE, keys)  # connected, registered
            node.forget()
            load = node.adapter.submit_load_task

            def make_slow_and_load(keys, objects):
                proxy.set(Fault(delay_s=0.1))
                return load(keys, objects)

            if slow_from == "load":
                node.adapter.submit_load_task = make_slow_and_load
            else:
                proxy.set(Fault(delay_s=0.1))
            before = node.adapter._store.client.stats().calls.get(step, 0)
            hits = node.prefetch(ENGINE, keys)
            calls = node.adapter._store.client.stats().calls[step] - before
    assert calls <= 4 * 0.5 / 0.2 + 1  # 0.2 s each, and the last one cut short
    assert hits == [True] * hits.count(True) + [False] * hits.count(False)
    assert not all(hits)


def test_that_the_store_stopped_answering_and_that_it_is_back_is_in_lmcaches_log(tmp_path, monkeypatch):
    log = io.StringIO()
    for handler in logging.getLogger("kvstore_client").handlers:
        if isinstance(handler, logging.StreamHandler):
            monkeypatch.setattr(handler, "stream", log)
    with running_server(tmp_path / "data") as server, running_node(params(server.target)) as node:
        stored(node)
        server.kill()
        assert not any(node.prefetch(ENGINE, KEYS))
        again = start_server(tmp_path / "data", tmp_path, listen=server.target)
        try:
            until_all_hit(node)
        finally:
            again.kill()
    lines = [line for line in log.getvalue().splitlines() if "LMCache" in line]
    assert any("does not answer" in line for line in lines), lines
    assert any("answers again" in line for line in lines), lines


@pytest.mark.parametrize("place", [0, 2, 5])
@pytest.mark.parametrize("piece", [0, 1])
def test_an_object_that_rotted_on_disk_is_the_only_miss_and_is_not_claimed_again(tmp_path, place, piece):
    with running_server(tmp_path / "data") as server, running_node(params(server.target, base_budget_s=10.0)) as node:
        stored(node)
        loaded = node.adapter.report_status()["load"]["good_keys"]
        content = bytes(kv_bytes(KEYS[place], 2 * 2 * CHUNK * 16 * 2).numpy())
        spoil(tmp_path / "data", content[piece * len(content) // 2 :][:64])
        assert node.prefetch(ENGINE, KEYS) == [True] * place + [False] * (6 - place)
        assert node.adapter.report_status()["load"]["good_keys"] - loaded == 5
        node.forget()
        deadline_s = time.monotonic() + PATIENT_S
        while node.adapter._store.look_up(KEYS, {0: layout()}).done != [True] * place + [False] * (6 - place):
            assert time.monotonic() < deadline_s, "the store goes on claiming what it cannot give"
            time.sleep(0.1)


def layout():
    from kvstore_engine.lmcache.identity import Layout

    return Layout.of(ENGINE.layout.shapes, ENGINE.layout.dtypes)


def spoil(data_dir, needle: bytes) -> None:
    """Turn one bit of the stored bytes that begin with `needle`."""
    for path in data_dir.glob("segments/**/*.seg"):
        offset = path.read_bytes().find(needle)
        if offset >= 0:
            with path.open("r+b") as file:
                file.seek(offset + 7)
                file.write(bytes([needle[7] ^ 4]))
            return
    raise AssertionError("no segment has these bytes")


def test_a_batch_in_which_a_call_has_failed_makes_no_further_ones():
    """Six chains of one object each, at a store that nobody serves: one budget, not six."""
    with running_node(params("127.0.0.1:9", base_budget_s=10.0)) as node:
        assert node.save(ENGINE, KEYS) == 0
        calls = node.adapter._store.client.stats().calls
        assert calls["put"] == 1, calls
        assert node.adapter.report_status()["store"]["failures"] == {"UNREACHABLE": 1}


def test_stores_beyond_what_may_wait_are_refused_at_once(tmp_path):
    with (
        running_server(tmp_path / "data") as server,
        running_node(params(server.target, max_pending_save_bytes=100)) as node,
    ):
        assert node.save(ENGINE, KEYS) == 0
        assert node.adapter.report_status()["store"]["failures"] == {"QUEUE_FULL": 1}


def test_hits_below_the_least_are_left_in_the_store(tmp_path):
    settings = {"base_budget_s": 10.0, "min_hit_tokens": 4 * CHUNK}
    with running_server(tmp_path / "data") as server, running_node(params(server.target, **settings)) as node:
        node.save(ENGINE, KEYS[:3])
        node.forget()
        assert not any(node.prefetch(ENGINE, KEYS))
        node.save(ENGINE, KEYS[3:4])
        node.forget()
        assert node.prefetch(ENGINE, KEYS) == [True] * 4 + [False] * 2


@pytest.mark.parametrize(
    ("given", "told"),
    [
        pytest.param({"chunk_sise": 256}, "did you mean 'chunk_size'", id="misspelt"),
        pytest.param({"chunk_size": 100}, "100, wanted is a multiple of 128", id="no multiple of a block"),
        pytest.param({"chunk_size": "256"}, "'256', wanted is", id="text for a number"),
        pytest.param({"hash_algorithm": "builtin"}, "can collide", id="hash that collides"),
        pytest.param({"hash_algorithm": "sha256_cbor"}, "set PYTHONHASHSEED", id="hash with a seed per process"),
        pytest.param({"model": ""}, "model is not set", id="no model"),
        pytest.param({"revision": ""}, "cannot be told from others", id="revision neither given nor found"),
        pytest.param({"revision": "r" * 5000}, "revision has 5000 bytes", id="revision too long for a namespace"),
        pytest.param({"tenant": "\ud800"}, "tenant is no valid Unicode", id="text that is none"),
        pytest.param({"target": "nowhere"}, "target", id="impossible target"),
        pytest.param({"kv_dtype": 8}, "kv_dtype is 8", id="number for text"),
    ],
)
def test_a_setting_that_cannot_work_stops_lmcache_and_names_it(given, told, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    settings = {**params("127.0.0.1:9"), **given}
    with pytest.raises(KVStoreConfigError, match=told), running_node(settings):
        pass


def test_eviction_by_lmcache_which_could_not_delete_anything_stops_it_and_is_named():
    with pytest.raises(KVStoreConfigError, match="eviction is set for this adapter"):
        Node(params("127.0.0.1:9"), eviction=EvictionConfig("IsolatedLRU"))


def test_a_hash_with_a_seed_that_all_processes_share_is_taken(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    with running_node(params("127.0.0.1:9", hash_algorithm="sha256_cbor")) as node:
        assert node.adapter.report_status()["is_healthy"]
