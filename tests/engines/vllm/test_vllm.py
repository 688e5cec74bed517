"""Real vLLM, real model, real store: the same tokens as without a store, with what was computed elsewhere or before."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from engine import ROOT, engine, transfer_config
from models import save_lora

from fault_proxy import Fault, fault_proxy
from kvstore_api.v1 import types_pb2
from kvstore_client import ClientConfig, KVStoreClient, NamespaceSpec
from kvstore_engine.plug_settings import PlugSettings
from serving import running_server, start_server

# Around the ends of blocks: the last token of a prompt is always computed, and only full blocks are stored.
LENGTHS = (127, 128, 129, 255, 256, 257, 513, 700)


def prompt(tokens: int, seed: int = 0) -> list[int]:
    draw = random.Random(f"{seed} {tokens}")
    return [draw.randrange(3, 1000) for _ in range(tokens)]


PROMPTS = [prompt(tokens) for tokens in LENGTHS]
# Enough for SmolLM2, which computes a token in the time that the small model takes for twenty.
FEW_PROMPTS = [ids for ids in PROMPTS if len(ids) in (129, 256, 700)]
# Goes on differently from the middle of another: its windows end where the other's were long past.
BRANCH = PROMPTS[-1][:300] + prompt(100, 1)


def usable(tokens: int) -> int:
    return (tokens - 1) // 128 * 128


def tokens_of(outputs) -> list[list[int]]:
    return [output["tokens"] for output in outputs]


def cached_of(outputs) -> list[int]:
    return [output["cached"] for output in outputs]


both_models = pytest.mark.parametrize("model", ["smollm2", "hybrid"], indirect=True, scope="module")


@pytest.fixture(scope="module")
def model(request):
    """The hybrid one is small and quick, and has KV groups of two kinds."""
    return request.getfixturevalue(getattr(request, "param", "hybrid"))


@pytest.fixture(scope="module")
def prompts(model):
    return FEW_PROMPTS if model.name == "smollm2" else PROMPTS


@pytest.fixture(scope="module")
def plain_answers(model, prompts, tmp_path_factory):
    """What vLLM answers without a connector, and with nothing cached."""
    with engine(model, tmp_path_factory.mktemp("log") / "plain.log", enable_prefix_caching=False) as plain:
        return tokens_of([plain.generate(ids)[0] for ids in [*prompts, BRANCH]])


@pytest.fixture(scope="module")
def expected(plain_answers):
    return plain_answers[:-1]


@pytest.fixture
def start(model, store, tmp_path):
    """Start an engine with the store."""

    @contextmanager
    def started(settings: dict | None = None, role: str = "kv_both", **more):
        transfer = {**transfer_config(store.target, **(settings or {})), "kv_role": role}
        with engine(model, tmp_path / "engine.log", transfer, **more) as running:
            yield running

    return started


@both_models
def test_process_that_computed_nothing_answers_the_same_from_what_another_stored(
    start, prompts, expected, plain_answers
):
    lengths = [len(ids) for ids in prompts]
    with start(max_num_batched_tokens=256, max_num_seqs=2) as first:  # long prompts in several steps
        outputs = [first.generate(ids)[0] for ids in prompts]
        assert tokens_of(outputs) == expected
        assert cached_of(outputs) == [0] * len(prompts)
        first.flush()
        counts = first.metrics()
        # Prompt and answer, but for the very last token, whose KV is not computed: full blocks of them are stored.
        assert counts["kvstore_stored_blocks"] == sum((tokens + 15) // 128 for tokens in lengths)
        assert counts.get("kvstore_loaded_blocks", 0) == 0
    for caching in (True, False):
        with start(enable_prefix_caching=caching) as other:
            outputs = other.generate(*prompts)
            assert tokens_of(outputs) == expected
            assert cached_of(outputs) == [usable(tokens) for tokens in lengths]
            counts = other.metrics()
            assert counts["kvstore_hit_tokens"] == counts["kvstore_asked_tokens"] == sum(map(usable, lengths))
            assert counts["external_prefix_cache_hits"] == sum(map(usable, lengths))
            assert counts["kvstore_loaded_blocks"] == sum(map(usable, lengths)) // 128
            # What vLLM has itself is not loaded again; without a cache of its own everything is.
            again = other.generate(prompts[-1])
            assert tokens_of(again) == expected[-1:]
            loaded = other.metrics()["kvstore_loaded_blocks"] - counts["kvstore_loaded_blocks"]
            assert loaded == (0 if caching else usable(lengths[-1]) // 128)
    with start() as third:
        branch = third.generate(BRANCH)
        assert cached_of(branch) == [256]
        assert tokens_of(branch) == plain_answers[-1:]


def test_prefix_grows_over_turns_and_processes(start):
    """Each turn goes on from the one before: a chat. Every process finds all that those before it have stored."""
    talk, stored = prompt(200), 0
    for turn in range(3):
        with start() as running:
            output = running.generate(talk, max_tokens=60)[0]
            assert output["cached"] == min(stored, usable(len(talk)))
            running.flush()
        stored = (len(talk) + 59) // 128 * 128  # the last token of an answer has no KV
        talk = talk + output["tokens"] + prompt(100, turn)


def test_salts_and_traffic_classes(start, expected):
    ids = PROMPTS[-1]
    with start() as running:
        for salt in (None, "a", "b@/\n\u00e9", "\ud800"):
            outputs = running.generate(ids, salt=salt, traffic_class="agent")
            assert tokens_of(outputs) == expected[-1:]
            assert cached_of(outputs) == [0], salt
        running.flush()
    with start(enable_prefix_caching=False) as other:
        for salt in (None, "a", "b@/\n\u00e9", "\ud800"):
            assert cached_of(other.generate(ids, salt=salt, traffic_class="agent")) == [usable(len(ids))], salt
        for salt in ("", "A", "ab", "b"):
            output = other.generate(ids, salt=salt) if salt else other.generate(prompt(len(ids), 1))
            assert cached_of(output) == [0], salt
        # A class that the store does not know is trouble with the store, and none of the request's.
        assert tokens_of(other.generate(ids, traffic_class="no-such-class")) == expected[-1:]
        assert sum(count for name, count in other.metrics().items() if name.startswith("kvstore_misses")) == 1


def specs_of(running) -> list[NamespaceSpec]:
    return [NamespaceSpec.from_proto(types_pb2.NamespaceSpec.FromString(data)) for data in running.namespaces()]


def namespace_of(client, running):
    return client.namespace(specs_of(running)[0])


def test_other_bytes_under_the_same_names_change_the_answer(start, store, expected):
    """So these tests do see the KV. The store cannot know what bytes mean; it can only give back what was put."""
    ids = PROMPTS[-1]
    with start() as first, KVStoreClient(ClientConfig(target=store.target, base_budget_s=30)) as client:
        first.generate(ids)
        first.flush()
        namespace = namespace_of(client, first)
        chain = namespace.chain(ids[: usable(len(ids))])
        assert namespace.match(chain).hit_length_blocks == len(chain)
        blocks = bytearray(len(chain) * namespace.block_bytes)
        assert namespace.get(chain, blocks).failure is None
        assert namespace.delete(chain).failure is None
        middle = len(blocks) // 2
        assert namespace.put(chain, bytes(blocks[middle:] + blocks[:middle])).stored == len(chain)
    with start() as other:
        outputs = other.generate(ids)
        assert cached_of(outputs) == [usable(len(ids))]
        assert tokens_of(outputs) != expected[-1:]


@pytest.mark.parametrize(
    ("model", "damaged"), [("smollm2", 3), ("hybrid", 0), ("hybrid", 3)], indirect=["model"], scope="module"
)
def test_block_that_is_damaged_on_the_disk_is_computed_and_stored_anew(model, tmp_path, expected, damaged):
    ids = PROMPTS[-1]
    data_dir = tmp_path / "data"
    with running_server(data_dir, "--capacity", "4GiB") as store:
        with engine(model, tmp_path / "1.log", transfer_config(store.target)) as first:
            first.generate(ids)
            first.flush()
            with KVStoreClient(ClientConfig(target=store.target, base_budget_s=30)) as client:
                namespace = namespace_of(client, first)
                block = bytearray(namespace.block_bytes)
                chain = namespace.chain(ids)
                assert namespace.get(chain, block, first_block=damaged, block_count=1).failure is None
        store.stop()
    flip_a_bit_of(data_dir, bytes(block))
    with (
        running_server(data_dir, "--capacity", "4GiB") as store,
        engine(model, tmp_path / "2.log", transfer_config(store.target)) as other,
    ):
        assert tokens_of(other.generate(ids)) == expected[-1:]
        other.flush()
        counts = other.metrics()
        # With KV groups of several kinds vLLM starts such a request anew; else what came before the damage counts.
        assert counts["kvstore_loaded_blocks"] == damaged
        assert sum(count for name, count in counts.items() if name.startswith("kvstore_misses")) == 1
        assert counts["kvstore_stored_blocks"] >= 1
        with engine(model, tmp_path / "3.log", transfer_config(store.target)) as third:
            outputs = third.generate(ids)
            assert tokens_of(outputs) == expected[-1:]
            assert cached_of(outputs) == [usable(len(ids))]


def flip_a_bit_of(data_dir, block: bytes) -> None:
    """Find a block in the segments, and change one bit in its middle."""
    for path in data_dir.rglob("*"):
        if path.is_file() and path.stat().st_size >= len(block):
            at = path.read_bytes().find(block)
            if at >= 0:
                with path.open("r+b") as file:
                    file.seek(at + len(block) // 2)
                    file.write(bytes([block[len(block) // 2] ^ 1]))
                return
    raise AssertionError("the block is in no segment")


SICKNESSES = {
    "killed": (lambda store, proxy: store.kill(), None),
    "stopped": (
        lambda store, proxy: os.kill(store.pid, signal.SIGSTOP),
        lambda store, proxy: os.kill(store.pid, signal.SIGCONT),
    ),
    "slow": (lambda store, proxy: proxy.set(Fault(delay_s=8)), lambda store, proxy: proxy.set(Fault())),
}


@pytest.mark.parametrize("sickness", SICKNESSES)
def test_store_that_goes_away_and_comes_back_costs_hits_and_no_answer(model, tmp_path, expected, sickness):
    fall_ill, recover = SICKNESSES[sickness]
    data_dir, log = tmp_path / "data", tmp_path / "engine.log"
    store = start_server(data_dir, tmp_path, "--capacity", "4GiB")
    try:
        with (
            fault_proxy(store.target) as proxy,
            # A proxy whose server is gone leaves sockets behind, and is only needed to be slow.
            engine(
                model,
                log,
                transfer_config(proxy.target if sickness == "slow" else store.target, base_budget_s=0.5),
                enable_prefix_caching=False,
            ) as running,
        ):
            assert tokens_of(running.generate(*PROMPTS)) == expected
            running.flush()
            fall_ill(store, proxy)
            for _ in range(2):
                outputs = running.generate(*PROMPTS)
                assert tokens_of(outputs) == expected
                assert cached_of(outputs) == [0] * len(PROMPTS)
            counts = running.metrics()
            # After a few calls, nothing is even sent: not for one request of the second round that could hit something.
            assert counts["kvstore_misses:BREAKER_OPEN"] >= sum(usable(tokens) > 0 for tokens in LENGTHS)
            if recover is not None:
                recover(store, proxy)
            else:
                store = start_server(data_dir, tmp_path, "--capacity", "4GiB", listen=store.target)
            outputs = until_hits(running)
            assert tokens_of(outputs) == expected
            assert cached_of(outputs) == [usable(tokens) for tokens in LENGTHS]
    finally:
        store.kill()


def until_hits(running):
    for _ in range(60):
        outputs = running.generate(*PROMPTS)
        if cached_of(outputs) == [usable(tokens) for tokens in LENGTHS]:
            break
    return outputs


def test_pages_smaller_than_a_block_are_regrouped_and_are_another_namespace(start, expected):
    with start(block_size=32) as first:
        assert tokens_of(first.generate(*PROMPTS)) == expected
        first.flush()
    with start(block_size=32) as other:
        # Of what is shared with a request before it, vLLM has pages that are no whole block of the store.
        shared = PROMPTS[-1][: 5 * 32] + prompt(300)
        other.generate(PROMPTS[-1][: 5 * 32 + 1], max_tokens=1)
        outputs = other.generate(*PROMPTS, shared)
        assert tokens_of(outputs[:-1]) == expected
        assert cached_of(outputs[:-1]) == [usable(tokens) for tokens in LENGTHS]
        assert outputs[-1]["cached"] == 5 * 32
    with start(block_size=128) as third:
        assert cached_of(third.generate(*PROMPTS)) == [0] * len(PROMPTS)


def test_hit_of_two_workers_is_that_of_the_one_with_the_least(start, store):
    """Each has KV of its own, of half the heads. One worker alone has another, and shares nothing with them."""
    cpus = sorted(os.sched_getaffinity(0))
    two = {"tensor_parallel_size": 2, "environ": {"VLLM_CPU_OMP_THREADS_BIND": f"{cpus[0]}|{cpus[-1]}"}}
    with KVStoreClient(ClientConfig(target=store.target, base_budget_s=30)) as client, start(**two) as first:
        answers = tokens_of(first.generate(*PROMPTS))
        namespaces = [client.namespace(spec) for spec in specs_of(first)]
        assert len({namespace.digest for namespace in namespaces}) == 2
        chains = [(namespace, namespace.chain(ids)) for namespace in namespaces for ids in PROMPTS]
        while any(namespace.match(chain, peek=True).hit_length_blocks < len(chain) for namespace, chain in chains):
            time.sleep(0.1)  # until the test's time is up
        namespace, chain = chains[-1]
        assert namespace.delete(chain, first_block=2).failure is None
    with start(**two) as other:
        outputs = other.generate(*PROMPTS)
        assert tokens_of(outputs) == answers
        assert cached_of(outputs) == [*(usable(tokens) for tokens in LENGTHS[:-1]), 256]
    with start() as alone:
        assert cached_of(alone.generate(*PROMPTS)) == [0] * len(PROMPTS)


def test_weights_that_are_replaced_in_a_running_engine_share_nothing_with_those_before(start, expected):
    ids = PROMPTS[-1]
    with start() as running:
        running.generate(ids)
        running.flush()
        assert running.reset()
        assert "shares nothing" in running.log()
        assert cached_of(running.generate(ids)) == [0]
        running.flush()
        assert running.reset()
        assert cached_of(running.generate(ids)) == [0]


def test_nothing_is_stored_of_a_step_that_fails(start, store):
    """VLLM ends a step that fails as it ends any other: what lies in its memory then is anything."""
    ids = PROMPTS[-1]
    with start() as running, KVStoreClient(ClientConfig(target=store.target, base_budget_s=30)) as client:
        assert running.generate_with_a_layer_that_fails(ids) == "a layer fails"
        running.flush()
        namespace = namespace_of(client, running)
        assert namespace.match(namespace.chain(ids), peek=True).hit_length_blocks == 0


@pytest.mark.parametrize(
    ("settings", "more", "message"),
    [
        ({"taget": "x:1"}, {}, "'taget'; did you mean 'target'"),
        ({}, {"load_format": "dummy"}, "set 'revision' to name them"),
        ({}, {"block_size": 256}, "hold 256 tokens, the store's 128"),
        ({}, {"policy": "fail"}, "kv_load_failure_policy is 'fail'"),
    ],
)
def test_start_that_could_not_go_well_is_refused_naming_what_to_change(hybrid, tmp_path, settings, more, message):
    transfer = transfer_config("127.0.0.1:1", **settings)
    transfer["kv_load_failure_policy"] = more.pop("policy", "recompute")
    log = tmp_path / "engine.log"
    with pytest.raises(AssertionError), engine(hybrid, log, transfer, **more) as running:
        running.metrics()
    assert message in log.read_text()


def test_adapters_of_one_name_and_other_weights_share_nothing(smollm2, store, tmp_path):
    ids = prompt(257)
    one, two = save_lora(tmp_path / "one" / "lora", 1), save_lora(tmp_path / "two" / "lora", 2)
    with engine(smollm2, tmp_path / "1.log", transfer_config(store.target), enable_lora=True, max_lora_rank=8) as first:
        answers = {None: tokens_of(first.generate(ids))}
        for path in (one, two):
            output = first.generate(ids, lora=["same", str(path), 1 if path is one else 2])
            assert cached_of(output) == [0]
            answers[path] = tokens_of(output)
        first.flush()
    assert answers[one] != answers[two]
    with engine(smollm2, tmp_path / "2.log", transfer_config(store.target), enable_lora=True, max_lora_rank=8) as other:
        for path in (two, one):
            output = other.generate(ids, lora=["same", str(path), 1 if path is one else 2])
            assert tokens_of(output) == answers[path]
            assert cached_of(output) == [usable(len(ids))]
        output = other.generate(ids)
        assert tokens_of(output) == answers[None]
        assert cached_of(output) == [usable(len(ids))]


def test_hit_that_is_not_worth_it_is_computed_and_counted(start, expected):
    with start({"min_hit_tokens": 512}, enable_prefix_caching=False) as running:
        running.generate(*PROMPTS)
        running.flush()
        outputs = running.generate(*PROMPTS)
        assert tokens_of(outputs) == expected
        assert cached_of(outputs) == [usable(tokens) if usable(tokens) >= 512 else 0 for tokens in LENGTHS]
        turned_down = sum(usable(tokens) for tokens in LENGTHS if usable(tokens) < 512)
        assert running.metrics()["kvstore_not_worth_it_tokens"] == turned_down


@pytest.mark.parametrize("model", ["smollm2"], indirect=True, scope="module")  # slow enough to be asked about in time
def test_request_that_must_compute_its_prompt_asks_for_no_hit_and_is_saved(start, expected):
    """vLLM loads nothing for it, as when the log-probabilities of its prompt are asked for."""
    ids = FEW_PROMPTS[1]
    with start(enable_prefix_caching=False) as running:
        for _ in range(2):
            assert running.generate(ids, reads_cache=False) == [{"tokens": expected[1], "cached": 0}]
            running.flush()
        counts = running.metrics()
        assert counts["kvstore_stored_blocks"] == len(ids) // 128
        assert counts.get("kvstore_exists_blocks", 0) == 0
        assert counts.get("kvstore_asked_tokens", 0) == 0
        assert cached_of(running.generate(ids)) == [usable(len(ids))]


def test_producer_only_saves_and_consumer_only_loads(start, expected):
    with start(role="kv_producer", enable_prefix_caching=False) as producer:
        for _ in range(2):
            outputs = producer.generate(*PROMPTS[:-1])
            assert tokens_of(outputs) == expected[:-1]
            assert cached_of(outputs) == [0] * len(outputs)
            producer.flush()
        assert producer.metrics().get("kvstore_asked_tokens", 0) == 0
    with start(role="kv_consumer") as consumer:
        outputs = consumer.generate(*PROMPTS)
        assert tokens_of(outputs) == expected
        assert cached_of(outputs)[:-1] == [usable(tokens) for tokens in LENGTHS[:-1]]
        consumer.flush()
        assert consumer.metrics().get("kvstore_stored_blocks", 0) == 0


# A request of so many tokens is under way for some seconds. Of a model with windows these would be gone by then.
LONG = 1000
without_windows = pytest.mark.parametrize("model", ["small"], indirect=True, scope="module")


@without_windows
def test_what_the_queue_had_no_room_for_is_saved_when_it_has(start, store):
    """And nothing is ever stored behind a gap, where it could not be hit."""
    ids, other_ids = PROMPTS[-1], prompt(700, 2)
    with start() as first:
        block_bytes = specs_of(first)[0].block_bytes
    with start({"max_pending_save_bytes": block_bytes - 1}) as first:
        first.generate(ids)
        first.generate(prompt(100))
        assert first.metrics()["kvstore_unsaved_blocks:QUEUE_FULL"] == len(ids) // 128
    with start({"max_pending_save_bytes": 2 * block_bytes}) as first:
        ids = ids + first.generate(ids, max_tokens=100)[0]["tokens"]  # fills a block behind those there was no room for
        first.flush()
        first.generate(other_ids, max_tokens=LONG)
        first.flush()
    with start() as other, KVStoreClient(ClientConfig(target=store.target, base_budget_s=30)) as client:
        namespace = namespace_of(client, other)
        chain = namespace.chain(ids)
        statuses = namespace.get(chain, bytearray(len(chain) * block_bytes)).statuses
        assert list(statuses) == sorted(statuses, key="OK".__ne__)
        assert cached_of(other.generate(other_ids)) == [usable(len(other_ids))]


@without_windows
def test_request_begun_without_a_store_is_saved_once_there_is_one(model, tmp_path):
    ids = PROMPTS[-1]
    with running_server(tmp_path / "store", "--capacity", "4GiB") as store:
        target = store.target
    with (
        engine(model, tmp_path / "engine.log", transfer_config(target, base_budget_s=1)) as running,
        ThreadPoolExecutor(1) as thread,
    ):
        assert cached_of(running.generate(prompt(100))) == [0]
        answer = thread.submit(running.generate, ids, max_tokens=LONG)
        with running_server(tmp_path / "store", "--capacity", "4GiB", listen=target):
            assert cached_of(answer.result()) == [0]
            running.flush()
            print(running.metrics(), running.log()[-3000:])
            assert sum(n for name, n in running.metrics().items() if name.startswith("kvstore_misses")) == 1
            with engine(model, tmp_path / "other.log", transfer_config(target)) as other:
                assert cached_of(other.generate(ids)) == [usable(len(ids))]


def test_json_in_the_docs_is_what_the_tests_start_vllm_with():
    page = (ROOT / "docs" / "engines" / "vllm.md").read_text()
    text = page[page.index("--kv-transfer-config '") :].split("'")[1]
    given, ours = json.loads(text), transfer_config("127.0.0.1:7420")
    assert given.keys() == ours.keys()
    assert all(given[key] == ours[key] for key in given if key != "kv_connector_extra_config")
    PlugSettings.read(given["kv_connector_extra_config"])
