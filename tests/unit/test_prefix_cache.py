"""The prefix cache between an engine and a real server: what it loads, what it saves, and that no trouble gets through."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvstore_api.v1 import block_store_pb2 as pb
from kvstore_client import (
    GetResult,
    KvGroup,
    KvGroupKind,
    KVStoreClient,
    KVStoreConfigError,
    MatchResult,
    NamespaceHandle,
    NamespaceSpec,
    NamespaceSpecError,
    ParallelDimension,
    PutReport,
    PutResult,
    PutStatus,
    ReplayMode,
    ResumePlan,
)
from kvstore_engine.benefit import MinimumHit
from kvstore_engine.engine import Engine, Generation
from kvstore_engine.hook import LoadedPrefix, RequestContext
from kvstore_engine.identity import namespace_spec
from kvstore_engine.kv_pool import BLOCK_TOKENS, KVPool
from kvstore_engine.model import Llama
from kvstore_engine.prefix_cache import PrefixCache
from kvstore_engine.sampling import SamplingParams
from nodes import CONFIG, PATIENCE_S, WEIGHTS, make_pool, patient_client, prompt_of
from serving import running_server
from wire_server import wire_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from serving import RunningServer

MODEL = Llama(CONFIG, WEIGHTS)
FEW = SamplingParams(max_new_tokens=5)
LOGGER = "kvstore_engine.prefix_cache"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server for all tests that leave it as it is; each works in a namespace of its own."""
    with running_server(tmp_path_factory.mktemp("shared")) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[KVStoreClient]:
    with patient_client(server.target) as patient:
        yield patient


@pytest.fixture
def spec(request: pytest.FixtureRequest) -> NamespaceSpec:
    """A namespace of the test's own."""
    return namespace_spec(request.node.name, "weights-1", make_pool())


def make_cache(handle: Any, **options: Any) -> PrefixCache:
    """A cache that uses every hit: this model computes faster than any store brings."""
    options = {"benefit": MinimumHit(1), **options}
    return PrefixCache(handle, block_tokens=BLOCK_TOKENS, block_bytes=handle.block_bytes, **options)


def generate(cache: PrefixCache | None, prompt: list[int], params: SamplingParams = FEW, **options: Any) -> Generation:
    """Serve a prompt on a node that has nothing in its memory, and wait for its saves."""
    generation = Engine(MODEL, make_pool(), prefix_cache=cache).generate(prompt, params, **options)
    assert cache is None or cache.flush(PATIENCE_S)
    return generation


def save(cache: PrefixCache, tokens: list[int], first_block: int, views: list[memoryview]) -> None:
    assert cache.save_blocks(tokens, first_block, views, RequestContext()).wait(PATIENCE_S)
    assert cache.flush(PATIENCE_S)


def assert_same_answer(one: Generation, other: Generation) -> None:
    assert one.tokens == other.tokens
    assert torch.equal(one.first_logits, other.first_logits)


class Handle:
    """A namespace handle whose calls can be replaced one by one; keeps the arguments of the others."""

    def __init__(self, real: NamespaceHandle, **replaced: Callable[..., Any]) -> None:
        self._real = real
        self._replaced = replaced
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        found = self._replaced.get(name) or getattr(self._real, name)
        if name not in {"chain", "match", "get", "put"}:
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append((name, options))
            return found(*arguments, **options)

        return call

    def count(self, name: str) -> int:
        return sum(called == name for called, _ in self.calls)


def test_prefix_stored_by_one_node_is_hit_by_another_with_the_same_bits(client: KVStoreClient, spec: NamespaceSpec):
    prompt = prompt_of(600)
    cold = generate(make_cache(client.namespace(spec)), prompt)
    cache = make_cache(client.namespace(spec))
    warm = generate(cache, prompt)
    assert (cold.hit_tokens, warm.hit_tokens) == (0, 512)
    assert_same_answer(warm, cold)
    stats = cache.stats()
    assert (stats.requests, stats.asked_tokens, stats.hit_tokens, stats.loaded_tokens) == (1, 512, 512, 512)
    assert (stats.misses, stats.saved_blocks, stats.unsaved_blocks) == ({}, 0, {})
    assert stats.load_s > 0


def test_only_the_same_salt_hits(client: KVStoreClient, spec: NamespaceSpec):
    cache, prompt = make_cache(client.namespace(spec)), prompt_of(300)
    generate(cache, prompt, salt=b"a")
    for salt, hit_tokens in ((b"b", 0), (b"", 0), (b"a\0", 0), (b"a", 256)):
        assert generate(cache, prompt, salt=salt).hit_tokens == hit_tokens
    # The misses above were saved under their own salts: each now has a copy of its own.
    assert cache.stats().stored_blocks == 4 * 2
    assert cache.stats().exists_blocks == 0


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"revision": "weights-2"},
        {"kv_dtype": "bfloat16"},
        {"layout": "thin-paged-LKHTD-v0"},
        {"engine": "other"},
        {"tenant": "other"},
        {"parallel": (ParallelDimension("tp", 0, 2),)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_kv_of_anything_that_differs_is_never_loaded(
    client: KVStoreClient, spec: NamespaceSpec, change: dict[str, Any]
):
    prompt = prompt_of(300)
    generate(make_cache(client.namespace(spec)), prompt)
    assert generate(make_cache(client.namespace(replace(spec, **change))), prompt).hit_tokens == 0
    assert generate(make_cache(client.namespace(spec)), prompt).hit_tokens == 256


CHILD = """
import json, random, sys
from kvstore_client import ClientConfig, KVStoreClient, NamespaceSpec
from kvstore_engine.hook import RequestContext
from kvstore_engine.prefix_cache import PrefixCache
assert "torch" not in sys.modules
target, model = sys.argv[1:]
spec = NamespaceSpec(model=model, revision="r", engine="e", layout="l", kv_dtype="uint8", block_bytes=1000)
tokens = [random.Random(1).randrange(2**32) for _ in range(10 * 128 + 1)]
with KVStoreClient(ClientConfig(target=target, base_budget_s=60)) as client:
    cache = PrefixCache.connect(client, spec, block_tokens=128, block_bytes=1000)
    memory = [memoryview(bytearray(1000)) for _ in range(10)]
    context = RequestContext(salt=b"salt")
    hit = cache.start_load(tokens, context, memory).wait().hit_blocks
    sound = [bytes(memory[n]) == random.Random(n).randbytes(1000) for n in range(hit)]
    for n, view in enumerate(memory):
        view[:] = random.Random(n).randbytes(1000)
    cache.save_blocks(tokens, hit, memory[hit:], context)
    assert cache.flush(60)
    print(json.dumps([hit, sound, cache.stats().stored_blocks]))
"""


def test_processes_with_different_hash_seeds_share_everything(server: RunningServer):
    outcomes = []
    for seed in ("1", "2", "random"):
        ran = subprocess.run(
            [sys.executable, "-W", "error", "-c", CHILD, server.target, "hash-seeds"],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        outcomes.append(json.loads(ran.stdout))
    assert outcomes == [[0, [], 10], [10, [True] * 10, 0], [10, [True] * 10, 0]]


@pytest.mark.parametrize(("length", "hit_tokens"), [(128, 0), (129, 128), (384, 256), (385, 384), (512, 384)])
def test_block_of_the_last_prompt_token_is_never_loaded(
    client: KVStoreClient, spec: NamespaceSpec, length: int, hit_tokens: int
):
    cache, prompt = make_cache(client.namespace(spec)), prompt_of(640)
    generate(cache, prompt)
    warm = generate(cache, prompt[:length])
    assert warm.hit_tokens == hit_tokens
    assert_same_answer(warm, generate(None, prompt[:length]))


@pytest.mark.parametrize("output", [1, 2, 100])
@pytest.mark.parametrize(("total", "complete_blocks"), [(127, 0), (128, 0), (129, 1), (255, 1), (256, 1), (257, 2)])
def test_only_blocks_whose_every_token_was_computed_are_stored(
    client: KVStoreClient, spec: NamespaceSpec, total: int, complete_blocks: int, output: int
):
    handle = client.namespace(spec)
    cache, prompt = make_cache(handle), prompt_of(total - output)
    generation = generate(cache, prompt, SamplingParams(max_new_tokens=output))
    chain = handle.chain(prompt + generation.tokens + prompt_of(128, seed=1))
    assert handle.match(chain).hit_length_blocks == complete_blocks
    assert cache.stats().stored_blocks == complete_blocks


def test_longer_prompt_hits_what_a_shorter_one_stored(client: KVStoreClient, spec: NamespaceSpec):
    cache, prompt = make_cache(client.namespace(spec)), prompt_of(700)
    generate(cache, prompt[:300])
    warm = generate(cache, prompt)
    assert warm.hit_tokens == 256
    assert_same_answer(warm, generate(None, prompt))
    stats = cache.stats()
    assert (stats.asked_blocks, stats.hit_blocks, stats.loaded_blocks) == (2 + 5, 2, 2)
    assert stats.misses == {"NOT_STORED": 2}
    assert (stats.stored_blocks, stats.exists_blocks) == (5, 0)


def test_other_kv_under_the_right_name_changes_the_answer(client: KVStoreClient, spec: NamespaceSpec):
    # The control of all tests that compare answers: the engine does read what was loaded, valid checksums and all.
    handle, prompt = client.namespace(spec), prompt_of(600)
    foreign = torch.randn(4, spec.block_bytes // 4, generator=torch.Generator().manual_seed(1))
    assert handle.put(handle.chain(prompt), list(foreign)).stored == 4
    misled = generate(make_cache(handle), prompt)
    assert misled.hit_tokens == 512
    assert not torch.equal(misled.first_logits, generate(None, prompt).first_logits)


CONTEXT_OPTIONS = {"salt": b"s", "adapter": b"a", "extra_keys": {1: [b"image"]}}


def test_salt_class_and_one_chain_are_handed_to_every_call(client: KVStoreClient, spec: NamespaceSpec):
    handle = Handle(client.namespace(spec))
    cache = make_cache(handle)
    generate(cache, prompt_of(600), SamplingParams(max_new_tokens=1), traffic_class="agent", **CONTEXT_OPTIONS)
    generate(cache, prompt_of(600), SamplingParams(max_new_tokens=1), traffic_class="agent", **CONTEXT_OPTIONS)
    assert [name for name, _ in handle.calls] == ["chain", "match", "chain", "put", "chain", "match", "get"]
    assert [options for name, options in handle.calls if name == "chain"] == [CONTEXT_OPTIONS] * 3
    assert handle.calls[3][1]["traffic_class"] == "agent"
    assert handle.calls[6][1]["lease"]


def test_short_prompt_costs_no_call(client: KVStoreClient, spec: NamespaceSpec):
    handle = Handle(client.namespace(spec))
    cache = make_cache(handle)
    generate(cache, prompt_of(100))
    assert handle.calls == []
    assert (cache.stats().requests, cache.stats().misses) == (1, {})


def corrupt(data_dir: Path, block: bytes) -> None:
    """Flip a bit in the middle of a stored block, in whichever file it is."""
    for path in data_dir.rglob("*"):
        if path.is_file() and (start := path.read_bytes().find(block)) >= 0:
            with path.open("r+b") as file:
                file.seek(start + len(block) // 2)
                file.write(bytes([block[len(block) // 2] ^ 0x10]))
            return
    raise AssertionError("the block is in no file")


@pytest.mark.parametrize("bad", [0, 3, 7])
def test_exactly_the_blocks_before_a_corrupt_one_are_hit(tmp_path: Path, spec: NamespaceSpec, bad: int):
    prompt = prompt_of(8 * 128 + 10)
    with running_server(tmp_path / "data") as own, patient_client(own.target) as client:
        pool, writer = make_pool(), make_cache(client.namespace(spec))
        cold = Engine(MODEL, pool, prefix_cache=writer).generate(prompt, FEW)
        assert writer.flush(PATIENCE_S)
        # A fresh pool hands out its blocks in order, and nothing has overwritten them since.
        corrupt(tmp_path / "data", bytes(pool.block_view(bad)))
        cache = make_cache(client.namespace(spec))
        partial = generate(cache, prompt)
        assert partial.hit_tokens == bad * 128
        assert_same_answer(partial, cold)
        stats = cache.stats()
        assert (stats.asked_blocks, stats.hit_blocks, stats.loaded_blocks) == (8, 8, bad)
        assert sum(stats.misses.values()) == 1
        # What was computed anew has replaced the bad block: the next node hits all of it.
        assert (stats.stored_blocks, stats.exists_blocks) == (1, 7 - bad)
        mended = generate(cache, prompt)
        assert mended.hit_tokens == 1024
        assert_same_answer(mended, cold)


OK = "OK"


@pytest.mark.parametrize(
    ("statuses", "hit_blocks", "miss"),
    [
        ([OK] * 3, 3, "NO_RESULT"),
        ([OK] * 7, 7, "NO_RESULT"),
        ([], 0, "NO_RESULT"),
        ([OK, OK, "CORRUPT", OK, OK, OK, OK, OK], 2, "CORRUPT"),
        (["NOT_FOUND"] + [OK] * 7, 0, "NOT_FOUND"),
        ([OK] * 9, 8, None),
    ],
)
def test_blocks_without_a_good_status_do_not_count(
    client: KVStoreClient, spec: NamespaceSpec, statuses: list[str], hit_blocks: int, miss: str | None
):
    real, prompt = client.namespace(spec), prompt_of(8 * 128 + 10)
    cold = generate(make_cache(real), prompt)

    def get(chain: Any, out: list[memoryview], **options: Any) -> GetResult:
        real.get(chain, out, **options)
        for index, view in enumerate(out):
            if (statuses[index] if index < len(statuses) else "") != OK:
                view[:] = b"\x77" * len(view)
        return GetResult(statuses)

    cache = make_cache(Handle(real, get=get))
    partial = generate(cache, prompt)
    assert partial.hit_tokens == hit_blocks * 128
    assert_same_answer(partial, cold)
    assert cache.stats().misses == ({miss: 1} if miss else {})


def test_server_killed_between_match_and_get_is_a_miss(tmp_path: Path, spec: NamespaceSpec):
    prompt = prompt_of(600)
    with running_server(tmp_path) as own, patient_client(own.target) as client:
        real = client.namespace(spec)
        cold = generate(make_cache(real), prompt)

        def get(*arguments: Any, **options: Any) -> GetResult:
            own.kill()
            return real.get(*arguments, **options)

        handle = Handle(real, get=get)
        cache = make_cache(handle)
        answered = generate(cache, prompt)
    assert answered.hit_tokens == 0
    assert_same_answer(answered, cold)
    stats = cache.stats()
    assert (stats.hit_blocks, stats.loaded_blocks) == (4, 0)
    assert list(stats.misses.values()) == [1]
    assert stats.unsaved_blocks == {"UNREACHABLE": 4}


def test_server_that_was_never_there_costs_hits_only_and_is_used_once_it_comes(tmp_path: Path, spec: NamespaceSpec):
    prompt = prompt_of(300)
    with running_server(tmp_path) as first:
        listen = first.target
    with patient_client(listen) as client:
        cache = PrefixCache.connect(
            client, spec, block_tokens=BLOCK_TOKENS, block_bytes=spec.block_bytes, benefit=MinimumHit(1)
        )
        cold = [generate(cache, prompt) for _ in range(3)]
        assert [generation.hit_tokens for generation in cold] == [0, 0, 0]
        gone = {"UNREACHABLE", "BREAKER_OPEN"}
        for counts, total in ((cache.stats().misses, 3), (cache.stats().unsaved_blocks, 6)):
            assert sum(counts.values()) == total
            assert counts.keys() <= gone
        with running_server(tmp_path, listen=listen):
            deadline_s = time.monotonic() + PATIENCE_S
            while not (warm := generate(cache, prompt)).hit_tokens:
                assert time.monotonic() < deadline_s, cache.stats()
            assert warm.hit_tokens == 256
            assert_same_answer(warm, cold[0])


def fail(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("a bug")


@pytest.mark.parametrize("broken", ["chain", "match", "get", "put"])
def test_no_exception_of_the_client_reaches_the_engine(
    client: KVStoreClient, spec: NamespaceSpec, caplog: pytest.LogCaptureFixture, broken: str
):
    real, prompt = client.namespace(spec), prompt_of(600)
    if broken != "put":
        generate(make_cache(real), prompt)
    cache = make_cache(Handle(real, **{broken: fail}))
    with caplog.at_level(logging.WARNING, LOGGER):
        for _ in range(3):
            answered = generate(cache, prompt)
            assert answered.hit_tokens == 0
            assert_same_answer(answered, generate(None, prompt))
    assert len(caplog.records) == (2 if broken == "chain" else 1)  # a line per step: look-up and save
    assert "ZeroDivisionError: a bug [UNEXPECTED_ERROR]" in caplog.text
    stats = cache.stats()
    assert stats.misses == {"NOT_STORED" if broken == "put" else "UNEXPECTED_ERROR": 3}
    assert stats.unsaved_blocks == {"put": {"UNEXPECTED_ERROR": 12}, "chain": {"SKIPPED": 12}}.get(broken, {})


def test_closed_client_is_a_miss(client: KVStoreClient, spec: NamespaceSpec):
    cache = make_cache(client.namespace(spec))
    client.close()
    generate(cache, prompt_of(300))
    assert cache.stats().misses == {"CLIENT_CLOSED": 1}


def test_unknown_traffic_class_is_a_miss_that_is_logged_once(
    client: KVStoreClient, spec: NamespaceSpec, caplog: pytest.LogCaptureFixture
):
    cache, prompt = make_cache(client.namespace(spec)), prompt_of(300)
    with caplog.at_level(logging.INFO, LOGGER):
        for _ in range(3):
            generate(cache, prompt, traffic_class="nonsense")
        assert cache.stats().misses == {"UNKNOWN_TRAFFIC_CLASS": 3}
        assert len(caplog.records) == 2  # a line per step: look-up and save
        assert all("nonsense" in record.getMessage() for record in caplog.records)
        generate(cache, prompt, traffic_class="agent")
        generate(cache, prompt, traffic_class="agent")
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2 + ["INFO"] * 2
    assert cache.stats().hit_blocks == 2


@pytest.mark.parametrize("plan", [ResumePlan(256, 128, ReplayMode.BOUNDED), ResumePlan(256, 128)])
def test_tokens_that_the_plan_replays_do_not_cost_the_hit(client: KVStoreClient, spec: NamespaceSpec, plan: ResumePlan):
    real, prompt = client.namespace(spec), prompt_of(300)
    generate(make_cache(real), prompt)
    cache = make_cache(Handle(real, match=lambda *_, **__: MatchResult(2, b"", plan)))
    loaded = cache.start_load(prompt, RequestContext(), memory_of(2, spec.block_bytes)).wait()
    assert (loaded.hit_blocks, loaded.replay_start_token) == (2, plan.replay_start_token)


def memory_of(count: int, block_bytes: int) -> list[memoryview]:
    return [memoryview(bytearray(random.Random(n).randbytes(block_bytes))) for n in range(count)]


def test_saves_go_in_puts_of_bounded_size(client: KVStoreClient, spec: NamespaceSpec):
    handle = Handle(client.namespace(spec))
    cache = make_cache(handle, max_put_bytes=3 * spec.block_bytes + 1)
    tokens = prompt_of(10 * 128)
    save(cache, tokens, 0, memory_of(2, spec.block_bytes))
    save(cache, tokens, 2, memory_of(8, spec.block_bytes))
    assert [options["first_block"] for name, options in handle.calls if name == "put"] == [0, 2, 5, 8]
    assert cache.stats().stored_blocks == 10
    assert cache.stats().save_s > 0


def test_block_larger_than_a_put_is_saved_all_the_same(client: KVStoreClient, spec: NamespaceSpec):
    handle = Handle(client.namespace(spec))
    cache = make_cache(handle, max_put_bytes=1)
    save(cache, prompt_of(256), 0, memory_of(2, spec.block_bytes))
    assert (handle.count("put"), cache.stats().stored_blocks) == (2, 2)


def test_put_that_fails_loses_its_own_blocks_and_ends_the_save(client: KVStoreClient, spec: NamespaceSpec):
    real = client.namespace(spec)

    def put(chain: Any, blocks: Any, *, first_block: int, **options: Any) -> PutReport:
        # The second put has no time left.
        options["budget_s"] = 0 if first_block == 3 else None
        return real.put(chain, blocks, first_block=first_block, **options)

    handle = Handle(real, put=put)
    cache = make_cache(handle, max_put_bytes=3 * spec.block_bytes)
    tokens = prompt_of(9 * 128)
    save(cache, tokens, 0, memory_of(8, spec.block_bytes))
    assert handle.count("put") == 2
    assert cache.stats().stored_blocks == 3
    assert cache.stats().unsaved_blocks == {"DEADLINE": 3, "SKIPPED": 2}
    assert real.match(real.chain(tokens)).hit_length_blocks == 3


def test_refused_block_ends_the_save(client: KVStoreClient, spec: NamespaceSpec, caplog: pytest.LogCaptureFixture):
    def put(chain: Any, blocks: list[Any], *, first_block: int, **_: Any) -> PutReport:
        stored = PutResult(first_block, PutStatus.STORED)
        full = [PutResult(first_block + n, PutStatus.REJECTED, "STORE_FULL", "no room") for n in range(1, len(blocks))]
        return PutReport([stored, *full])

    handle = Handle(client.namespace(spec), put=put)
    cache = make_cache(handle, max_put_bytes=3 * spec.block_bytes)
    with caplog.at_level(logging.WARNING, LOGGER):
        save(cache, prompt_of(8 * 128), 0, memory_of(8, spec.block_bytes))
    assert handle.count("put") == 1
    assert cache.stats().stored_blocks == 1
    assert cache.stats().unsaved_blocks == {"STORE_FULL": 2, "SKIPPED": 5}
    assert "block 1 was refused: no room [STORE_FULL]" in caplog.text


@pytest.mark.parametrize("tokens", [16, 64, 256])
def test_engine_with_other_blocks_than_the_store_is_refused_with_both_numbers(
    client: KVStoreClient, spec: NamespaceSpec, tokens: int
):
    with pytest.raises(ValueError, match=f"{tokens} tokens and the store's 128"):
        PrefixCache(client.namespace(spec), block_tokens=tokens, block_bytes=spec.block_bytes)


def test_engine_with_blocks_of_another_size_is_refused_with_both_numbers(client: KVStoreClient, spec: NamespaceSpec):
    with pytest.raises(ValueError, match=f"have 1000 bytes.* is {spec.block_bytes}"):
        PrefixCache.connect(client, spec, block_tokens=BLOCK_TOKENS, block_bytes=1000)


FULL = KvGroup("main", KvGroupKind.FULL, (0,))
RECURRENT = KvGroup("ssm", KvGroupKind.STATE, (2,), replay_rule=ReplayMode.SNAPSHOT)


def window(rule: ReplayMode) -> KvGroup:
    return KvGroup("swa", KvGroupKind.SLIDING_WINDOW, (1,), window_tokens=128, replay_rule=rule)


@pytest.mark.parametrize(
    ("group", "plan"),
    [
        (window(ReplayMode.BOUNDED), ResumePlan(256, 256)),
        (window(ReplayMode.BOUNDED), ResumePlan(256, 129, ReplayMode.BOUNDED)),
        (window(ReplayMode.EXACT), ResumePlan(256, 256, ReplayMode.EXACT)),
        (window(ReplayMode.BOUNDED), ResumePlan(256, 256, ReplayMode.SNAPSHOT)),
        (window(ReplayMode.SNAPSHOT), ResumePlan(256, 256, ReplayMode.NONE)),
        (RECURRENT, ResumePlan(256, 256)),
        (RECURRENT, ResumePlan(256, 128, ReplayMode.BOUNDED)),
    ],
)
def test_plan_that_would_leave_layers_empty_is_not_followed(
    client: KVStoreClient, spec: NamespaceSpec, group: KvGroup, plan: ResumePlan
):
    hybrid = replace(spec, groups=(FULL, group))
    handle = Handle(client.namespace(hybrid), match=lambda *_, **__: MatchResult(2, b"", plan))
    cache = make_cache(handle)
    loaded = cache.start_load(prompt_of(300), RequestContext(), memory_of(2, spec.block_bytes)).wait()
    # Two blocks are enough to replay a window, so a snapshot that is promised and not there costs no more than that.
    assert loaded == LoadedPrefix()
    assert sum(cache.stats().misses.values()) == 1
    assert handle.count("get") <= (plan.mode is ReplayMode.SNAPSHOT)


def test_incomplete_namespace_is_refused(client: KVStoreClient, spec: NamespaceSpec):
    with pytest.raises(NamespaceSpecError, match="revision is empty"):
        PrefixCache.connect(client, replace(spec, revision=""), block_tokens=BLOCK_TOKENS, block_bytes=spec.block_bytes)


def test_server_that_refuses_the_namespace_stops_the_engines_start(spec: NamespaceSpec):
    with wire_server() as peer, patient_client(peer.target) as client:
        peer.answers["RegisterNamespace"] = lambda *_: pb.RegisterNamespaceResponse(namespace=bytes(32))
        with pytest.raises(KVStoreConfigError, match="NAMESPACE_MISMATCH"):
            PrefixCache.connect(client, spec, block_tokens=BLOCK_TOKENS, block_bytes=spec.block_bytes)


def test_connect_makes_the_namespace_known(client: KVStoreClient, spec: NamespaceSpec):
    cache = PrefixCache.connect(client, spec, block_tokens=BLOCK_TOKENS, block_bytes=spec.block_bytes)
    assert client.stats().calls["register"] == 1
    assert cache.check() is None


@pytest.mark.parametrize("fingerprint", ["", "  "])
def test_model_without_a_fingerprint_gets_no_namespace(fingerprint: str):
    with pytest.raises(NamespaceSpecError, match="model 'm' have no fingerprint"):
        namespace_spec("m", fingerprint, make_pool())


def test_namespace_names_all_that_the_bytes_depend_on():
    pool = make_pool()
    spec = namespace_spec("m", "f", pool)
    assert (spec.engine, spec.layout, spec.kv_dtype) == ("kvstore-thin", KVPool.layout, "float32")
    half = KVPool(num_blocks=1, layers=4, kv_heads=2, head_dim=8, dtype=torch.bfloat16)
    assert half.block_bytes == pool.block_bytes
    others = [namespace_spec("n", "f", pool), namespace_spec("m", "g", pool), namespace_spec("m", "f", half)]
    assert len({spec.digest(), *(other.digest() for other in others)}) == 4
