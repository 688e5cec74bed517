"""A store that dies, hangs, crawls or lies: SGLang's threads go on, and get exactly the leading pages that are right."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from contextlib import contextmanager

import psutil
import pytest
import torch

from administering import flip_a_byte_of
from fault_proxy import Fault, fault_proxy
from hicaches import PAGE, back_up, contents, controller, device_pool, host_pool, prefetch, start_prefetch
from kvstore_api.v1 import block_store_pb2 as pb
from kvstore_client import Chain
from serving import running_server, start_server
from wire_server import frame, wire_server

TOKENS = list(range(8 * PAGE))
# Far beyond every budget here, and far below for ever.
LATE_S = 30
PAGE_BYTES = 49_152


@contextmanager
def _attached(target, model, **settings):
    device = device_pool()
    with controller(target, host_pool(device), device, **{"model": model, "base_budget_s": 0.5, **settings}) as made:
        yield made


def _moved(made, call):
    """Pages that a direct call says it moved, and the seconds it took."""
    names = made.get_hash_str(TOKENS, None, page_size=PAGE)
    indices = made.mem_pool_host.alloc(len(TOKENS))
    began_s = time.monotonic()
    result = call(names, indices)
    took_s = time.monotonic() - began_s
    made.mem_pool_host.free(indices)
    return result, took_s


def _all_calls(made):
    backend = made.storage_backend
    return {
        "exists": _moved(made, lambda names, _: backend.batch_exists(names)),
        "get": _moved(made, lambda names, indices: sum(backend.batch_get_v1(names, indices))),
        "set": _moved(made, lambda names, indices: sum(backend.batch_set_v1(names, indices))),
        "plain": _moved(
            made, lambda names, _: backend.get(names[0], backend.mem_pool_host.get_dummy_flat_data_page()) is not None
        ),
    }


@pytest.mark.parametrize("trouble", ["killed", "stopped"])
def test_a_store_that_dies_or_hangs_costs_the_pages_and_no_more_than_the_budget(tmp_path, model, trouble):
    with running_server(tmp_path / "data") as server, _attached(server.target, model) as made:
        _, saved, _ = back_up(made, TOKENS, seed=1)
        assert prefetch(made, TOKENS)[1] == saved
        if trouble == "killed":
            server.kill()
        else:
            os.kill(server.pid, signal.SIGSTOP)
        try:
            for moved, took_s in _all_calls(made).values():
                assert moved == 0
                assert took_s < LATE_S
            assert prefetch(made, TOKENS)[:2] == (0, [])
            assert back_up(made, TOKENS, seed=2)[2] == 0
            assert made.backup_thread.is_alive()
            assert made.prefetch_thread.is_alive()
        finally:
            if trouble == "stopped":
                os.kill(server.pid, signal.SIGCONT)


@pytest.mark.parametrize("trouble", ["killed", "stopped"])
def test_pages_come_again_by_themselves_when_the_store_is_back(tmp_path, model, trouble):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    server = start_server(tmp_path / "data", scratch)
    try:
        with _attached(server.target, model) as made:
            _, saved, _ = back_up(made, TOKENS, seed=1)
            if trouble == "stopped":
                os.kill(server.pid, signal.SIGSTOP)
            else:
                server.kill()
            for _ in range(4):
                assert prefetch(made, TOKENS)[0] == 0
            if trouble == "stopped":
                os.kill(server.pid, signal.SIGCONT)
            else:
                server = start_server(tmp_path / "data", scratch, listen=server.target)
            deadline_s = time.monotonic() + LATE_S
            while prefetch(made, TOKENS)[1] != saved:
                assert time.monotonic() < deadline_s, "the store is back, and pages do not come"
                time.sleep(0.05)
    finally:
        server.kill()


@pytest.mark.parametrize("damaged", [0, 4, 7])
def test_a_damaged_page_ends_the_hit_and_is_not_promised_again(tmp_path, model, damaged):
    with running_server(tmp_path / "data") as server, _attached(server.target, model, base_budget_s=10.0) as made:
        _, saved, _ = back_up(made, TOKENS, seed=1)
        flip_a_byte_of(saved[damaged], tmp_path / "data")
        found, came, _ = prefetch(made, TOKENS)
        assert (found, came) == (len(TOKENS), saved[:damaged])
        # The store has noticed, and says so the next time.
        assert prefetch(made, TOKENS)[:2] == (damaged * PAGE, saved[:damaged])


def test_bits_flipped_on_the_way_never_make_a_wrong_page(server, model):
    with fault_proxy(server.target) as proxy, _attached(proxy.target, model, base_budget_s=2.0) as made:
        _, saved, _ = back_up(made, TOKENS, seed=1)
        names = made.get_hash_str(TOKENS, None, page_size=PAGE)
        indices = made.mem_pool_host.alloc(len(TOKENS))
        for position in range(1_000, 8 * len(saved[0]), 43_210):
            proxy.set(Fault(flip_after_bytes=position))
            said = made.storage_backend.batch_get_v1(names, indices)
            got = contents(made.mem_pool_host, indices)
            assert said == sorted(said, reverse=True)
            assert all(page == right for ok, page, right in zip(said, got, saved, strict=True) if ok)
        assert proxy.faults_done > 3


def test_a_crawling_store_gives_leading_pages_within_the_budget(server, model):
    # Eight pages of 49 KB at 100 KB/s are four seconds; the budget is for less than half of them.
    settings = {"base_budget_s": 0.3, "budget_bandwidth_bytes_per_s": 300e3, "breaker_failures": 0}
    with fault_proxy(server.target) as proxy:
        with _attached(server.target, model, base_budget_s=10.0) as made:
            _, saved, _ = back_up(made, TOKENS, seed=1)
        with _attached(proxy.target, model, **settings) as made:
            proxy.set(Fault(bytes_per_s=100e3))
            found, came, took_s = prefetch(made, TOKENS)
            assert found == len(TOKENS)
            assert came == saved[: len(came)]
            assert len(came) < len(saved)
            assert took_s < LATE_S


def test_nothing_writes_to_a_page_after_the_call_has_returned(server, model):
    """SGLang gives the pages of a failed load to others at once."""
    settings = {"base_budget_s": 2.0, "budget_bandwidth_bytes_per_s": 1e6, "breaker_failures": 0}
    with fault_proxy(server.target) as proxy:
        with _attached(server.target, model, base_budget_s=10.0) as made:
            back_up(made, TOKENS, seed=1)
        with _attached(proxy.target, model, **settings) as made:
            names = made.get_hash_str(TOKENS, None, page_size=PAGE)
            indices = made.mem_pool_host.alloc(len(TOKENS))
            proxy.set(Fault(bytes_per_s=100e3))
            said = made.storage_backend.batch_get_v1(names, indices)
            assert not all(said)
            made.mem_pool_host.kv_buffer.view(torch.uint8).fill_(0x5A)
            before = contents(made.mem_pool_host, indices)
            proxy.set(Fault())
            time.sleep(1.0)
            assert contents(made.mem_pool_host, indices) == before


def test_saves_that_hang_hold_up_no_look_up(model):
    with wire_server() as peer:
        peer.answers["PutBlocks"] = peer.stall
        hit = pb.MatchPrefixResponse(hit_length_blocks=1)
        hit.plan.hit_tokens = hit.plan.replay_start_token = PAGE
        peer.answers["MatchPrefix"] = lambda *_: hit
        with _attached(peer.target, model, base_budget_s=LATE_S) as made:
            names = made.get_hash_str(TOKENS, None, page_size=PAGE)
            saves = threading.Thread(target=back_up, args=(made, TOKENS, 1))
            saves.start()
            while peer.calls.count("PutBlocks") < 2:
                time.sleep(0.01)
            assert made.storage_backend.batch_exists(names) == len(names)
            assert saves.is_alive()
            peer.released.set()
            saves.join(LATE_S)
            assert not saves.is_alive()


@pytest.mark.parametrize("slow", ["MatchPrefix", "GetBlocks"])
def test_a_slow_store_does_not_end_a_server_that_empties_its_cache(model, monkeypatch, slow):
    """SGLang waits 10 s for its threads, one of which may still be at work for a request that was cancelled."""
    monkeypatch.setattr("kvstore_engine.sglang.hicache.LONGEST_S", 2.0)
    hit = pb.MatchPrefixResponse(hit_length_blocks=1)
    hit.plan.hit_tokens = hit.plan.replay_start_token = PAGE
    tokens = list(range(64 * PAGE))
    with wire_server() as peer:

        def late(answer):
            peer.released.wait(1.0)
            return answer

        answers = {
            "MatchPrefix": lambda *_: hit,
            "GetBlocks": lambda request, _: iter([frame(Chain(request.chain), {0: bytes(PAGE_BYTES)})]),
        }
        peer.answers |= answers
        peer.answers[slow] = lambda *asked: late(answers[slow](*asked))
        # The budget stands for that of larger pages.
        with _attached(peer.target, model, base_budget_s=LATE_S, breaker_failures=0) as made:
            asked = peer.calls.count(slow)
            operation = start_prefetch(made, tokens)
            if slow == "GetBlocks":
                assert made.prefetch_hit_queue.get(timeout=60) is operation
                operation.host_indices = made.mem_pool_host.alloc(len(tokens))
                made.prefetch_buffer.put(operation)
            while (
                peer.calls.count(slow) < asked + 1
                and made.prefetch_hit_queue.empty()
                and made.ack_prefetch_queue.empty()
            ):
                time.sleep(0.01)
            made.terminate_prefetch(operation)
            made.reset()
            assert made.prefetch_thread.is_alive()


def test_calls_that_cannot_be_right_are_misses(server, model):
    with _attached(server.target, model, base_budget_s=5.0) as made:
        backend, names = made.storage_backend, made.get_hash_str(TOKENS, None, page_size=PAGE)
        indices = made.mem_pool_host.alloc(len(TOKENS))
        assert backend.batch_set_v1(names, indices) == [True] * 8
        assert backend.batch_exists([*names[:2], "no hash", *names[2:]]) == 0
        assert backend.batch_exists(["abcd"]) == 0
        assert backend.batch_exists([]) == 0
        assert backend.batch_get_v1(names, indices[:-1]) == [False] * 8
        assert backend.batch_get_v1(names, indices[:PAGE]) == [False] * 8
        assert backend.get(names[0], torch.empty(5)) is None
        assert backend.set(names[0], torch.empty(5)) is False
        assert backend.batch_exists(names) == 8


def test_a_closed_backend_finds_and_saves_nothing(server, model):
    with _attached(server.target, model, base_budget_s=5.0) as made:
        back_up(made, TOKENS, seed=1)
        made.storage_backend.close()
        assert [moved for moved, _ in _all_calls(made).values()] == [0, 0, 0, False]


def test_a_thousand_failed_or_cancelled_operations_leave_nothing_behind(tmp_path, model):
    with running_server(tmp_path / "data") as server, _attached(server.target, model, base_budget_s=0.2) as made:
        back_up(made, TOKENS, seed=1)
        free = made.mem_pool_host.available_size()

        def cancelled():
            operation = start_prefetch(made, TOKENS)
            made.terminate_prefetch(operation)
            operation.host_indices = made.mem_pool_host.alloc(len(TOKENS))
            assert made.prefetch_hit_queue.get(timeout=60) is operation
            made.prefetch_buffer.put(operation)
            while not made.ack_prefetch_queue.get(timeout=60).completed_req:
                pass
            made.mem_pool_host.free(operation.host_indices)

        def failed():
            back_up(made, TOKENS, seed=2)
            prefetch(made, TOKENS)

        def held():
            gc.collect()
            process = psutil.Process()
            return process.num_fds(), process.memory_info().rss

        for _ in range(20):
            cancelled()
        server.kill()
        for _ in range(20):
            failed()
        threads = threading.active_count()
        fds, rss_bytes = held()
        for _ in range(500):
            cancelled()
            failed()
        assert made.mem_pool_host.available_size() == free
        assert threading.active_count() <= threads + 1  # the breaker's probe comes and goes
        now_fds, now_rss_bytes = held()
        assert now_fds <= fds + 5
        assert now_rss_bytes - rss_bytes < 30 << 20  # 1,000 pages lost would be 49 MB
