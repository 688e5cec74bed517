"""LMCache's own storage manager over a real server: what it stores is found and loaded again, by the same process and by others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lmcache.v1.distributed.api import ObjectKey
from lmcache_node import CHUNK, MODEL, Engine, Node, kv_bytes, running_node

from serving import RunningServer, running_server

# A machine that is busy with other things must not turn a hit into a miss.
PATIENT = {"base_budget_s": 10.0}
TOKENS = list(range(1000, 1000 + 6 * CHUNK))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running_server(tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.fixture(scope="module")
def ours(server):
    """Settings with which all chunks of TOKENS are found."""
    settings = {"target": server.target, "model": MODEL, "revision": "ours", **PATIENT}
    engine = Engine()
    with running_node(settings) as node:
        assert node.save(engine, engine.keys(TOKENS)) == 6
        node.forget()
        assert all(node.prefetch(engine, engine.keys(TOKENS)))
    return settings


def params(server: RunningServer, request: pytest.FixtureRequest, **more) -> dict[str, object]:
    """Settings with which no other test's objects are found."""
    return {"target": server.target, "model": MODEL, "revision": request.node.name, **PATIENT, **more}


def run_process(request: dict, hash_seed: str) -> dict:
    """One engine's prompt in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("lmcache_node.py")), json.dumps(request)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def counts(node: Node) -> dict:
    return node.adapter.report_status()


def test_what_one_process_stored_another_loads_byte_by_byte_whatever_their_hash_seeds(server, request):
    order = {"params": params(server, request), "tokens": TOKENS}
    assert run_process(order, "1") == {"hits": 0, "kept": 6}
    assert run_process(order, "random") == {"hits": 6, "kept": 0}
    other = {**order, "tokens": [*TOKENS[:512], 7, *TOKENS[513:]]}
    assert run_process(other, "2") == {"hits": 2, "kept": 4}


@pytest.mark.parametrize(
    ("setting", "engine"),
    [
        pytest.param({"revision": "others"}, {}, id="revision"),
        pytest.param({"tenant": "others"}, {}, id="tenant"),
        pytest.param({"model": "others", "lmcache_model": MODEL}, {}, id="model"),
        pytest.param({"kv_dtype": "fp8_e5m2"}, {}, id="kv dtype as told"),
        pytest.param({}, {"dtype": "float16"}, id="dtype"),
        pytest.param({}, {"kv_rank": ObjectKey.ComputeKVRank(2, 0, 2, 0)}, id="world size"),
        pytest.param({}, {"kv_rank": ObjectKey.ComputeKVRank(1, 1, 1, 0)}, id="rank"),
        pytest.param({}, {"salt": "others"}, id="salt"),
        pytest.param({}, {"group": 1}, id="object group"),
        pytest.param({}, {"shape": (2, 4, CHUNK, 8)}, id="shape of as many bytes"),
    ],
)
def test_objects_that_differ_in_anything_else_than_tokens_are_not_found(ours, setting, engine):
    theirs = Engine(**engine)
    with running_node({**ours, **setting}) as node:
        assert not any(node.prefetch(theirs, theirs.keys(TOKENS)))


def test_salts_have_objects_of_their_own_and_find_them_again(server, request):
    engines = [Engine(salt=salt) for salt in ("", "a", "b")]
    with running_node(params(server, request)) as node:
        for engine in engines:
            assert not any(node.prefetch(engine, engine.keys(TOKENS)))
            assert node.save(engine, engine.keys(TOKENS)) == 6
        for engine in engines:
            node.forget()
            assert all(node.prefetch(engine, engine.keys(TOKENS)))


def test_a_prompt_that_was_looked_up_is_stored_and_found_with_one_call_each_way(server, request):
    engine = Engine()
    keys = engine.keys(TOKENS)
    with running_node(params(server, request)) as node:
        node.prefetch(engine, keys)
        before = node.adapter._store.client.stats()
        node.save(engine, keys)
        node.forget()
        assert all(node.prefetch(engine, keys))
        after = node.adapter._store.client.stats()
    assert {method: after.calls[method] - before.calls.get(method, 0) for method in ("put", "match", "get")} == {
        "put": 1,
        "match": 1,
        "get": 1,
    }


def test_a_conversation_hits_all_it_has_stored_generated_chunks_too(server, request):
    """Chunks that nobody looked up begin chains of their own, and the next turn's go on behind them."""
    engine = Engine()
    keys = engine.keys(list(range(14 * CHUNK)))
    settings = params(server, request)
    with running_node(settings) as node:
        node.prefetch(engine, keys[:4])
        node.save(engine, keys[:4])
        node.save(engine, keys[4:5])  # generated
        node.save(engine, keys[5:6])
        node.forget()
        assert node.prefetch(engine, keys[:10]) == [True] * 6 + [False] * 4
        node.save(engine, keys[6:10])
    with running_node(settings) as node:
        assert node.prefetch(engine, keys) == [True] * 10 + [False] * 4
        node.save(engine, keys[10:])
        node.forget()
        assert all(node.prefetch(engine, keys))


def test_requests_that_lmcache_stores_in_one_batch_are_found_one_by_one(server, request):
    engine = Engine()
    one, two = engine.keys(range(4 * CHUNK)), engine.keys([9] * 4 * CHUNK)
    with running_node(params(server, request)) as node:
        node.prefetch(engine, one)
        node.prefetch(engine, two)
        assert node.save(engine, one + two) == 8
        node.forget()
        assert all(node.prefetch(engine, one))
        assert all(node.prefetch(engine, two))


def test_objects_that_lmcache_has_itself_are_not_loaded_and_the_rest_is(server, request):
    engine = Engine()
    keys = engine.keys(TOKENS)
    with running_node(params(server, request)) as node:
        node.prefetch(engine, keys)
        node.save(engine, keys)
        node.manager.delete_l1_keys(keys[3:])
        assert all(node.prefetch(engine, keys))
        assert counts(node)["load"]["keys"] == 3


@pytest.mark.parametrize(
    ("settings", "engine", "reason"),
    [
        pytest.param({}, {"model": "another"}, "of model 'another'", id="another model"),
        pytest.param({}, {"dtype": "uint8"}, "set kv_dtype", id="bytes without a type"),
        pytest.param({"chunk_size": 128}, {}, "chunk_size is 128", id="another chunk size"),
        pytest.param({}, {"dtype": "uint8", "shape": (32768,)}, "leave its serde off", id="what a serde made"),
    ],
)
def test_objects_whose_identity_is_not_known_are_neither_stored_nor_loaded_and_the_status_says_why(
    server, request, settings, engine, reason
):
    engine = Engine(**engine)
    keys = engine.keys(TOKENS)
    with running_node(params(server, request, **settings)) as node:
        assert node.save(engine, keys) == 0
        node.forget()
        assert not any(node.prefetch(engine, keys))
        (told,) = counts(node)["not_kept"]
        assert reason in told


def test_weights_that_change_on_disk_under_a_running_lmcache_end_the_use_of_the_store(server, tmp_path, monkeypatch):
    """The engine is started anew with them and LMCache is not: what it computes now is not the old revision's."""
    monkeypatch.setattr("kvstore_engine.model_identity._WATCH_S", 0.0)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"old")
    engine = Engine(model=str(tmp_path))
    keys = engine.keys(TOKENS)
    settings = {"target": server.target, "model": "ours", "lmcache_model": str(tmp_path), **PATIENT}
    with running_node(settings) as node:
        assert node.save(engine, keys[:3]) == 3
        weights.rename(tmp_path / "gone")
        node.forget()
        assert node.prefetch(engine, keys[:3]) == [True] * 3  # no other weights yet
        weights.write_bytes(b"new ones")
        node.forget()
        assert not any(node.prefetch(engine, keys))
        assert node.save(engine, keys) == 0
        (told,) = counts(node)["not_kept"]
        assert "restart `lmcache server`" in told
        weights.unlink()
        (tmp_path / "gone").rename(weights)
        node.forget()
        assert not any(node.prefetch(engine, keys))  # LMCache's memory has had both
    with running_node(settings) as node:
        assert node.prefetch(engine, keys) == [True] * 3 + [False] * 3


def test_hashes_that_can_collide_are_refused(server, request):
    engine = Engine()
    keys = [ObjectKey(place.to_bytes(8, "big"), MODEL, engine.kv_rank) for place in range(4)]
    with running_node(params(server, request)) as node:
        assert node.save(engine, keys) == 0
        node.forget()
        assert not any(node.prefetch(engine, keys))
        assert sum(counts(node)["not_kept"].values()) == 8


@pytest.mark.parametrize("chunk", [128, 512])
def test_any_multiple_of_a_block_is_regrouped_exactly(server, request, chunk):
    engine = Engine(chunk=chunk)
    keys = engine.keys(TOKENS)
    with running_node(params(server, request, chunk_size=chunk)) as node:
        assert node.save(engine, keys) == len(keys)
        node.forget()
        assert all(node.prefetch(engine, keys))


def test_the_status_counts_what_was_asked_found_loaded_and_stored(server, request):
    engine = Engine()
    keys = engine.keys(TOKENS)
    with running_node(params(server, request)) as node:
        node.save(engine, keys[:4])
        node.forget()
        node.prefetch(engine, keys)
        status = counts(node)
    size = 4 * engine.layout.shapes[0].numel() * 2
    expected = {"batches": 1, "failures": {}}
    assert status["store"] == {**expected, "keys": 4, "good_keys": 4, "moved_bytes": size}
    assert status["lookup"] == {**expected, "keys": 6, "good_keys": 4, "moved_bytes": 0}
    assert status["load"] == {**expected, "keys": 4, "good_keys": 4, "moved_bytes": size}
    assert status["is_healthy"]
    assert status["refused_now"] == {}


def test_the_check_of_bytes_sees_bytes_that_are_not_those_stored(server, request):
    """That the tests here can fail: other bytes under the right name are noticed."""
    engine = Engine()
    keys = engine.keys(TOKENS)
    with running_node(params(server, request)) as node:
        node.save(engine, keys, content=lambda key, size_bytes: kv_bytes(key, size_bytes) ^ 1)
        node.forget()
        with pytest.raises(AssertionError, match="wrong bytes"):
            node.prefetch(engine, keys)
