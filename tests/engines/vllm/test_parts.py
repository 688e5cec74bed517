"""The connector's parts with vLLM's real types: which bytes are where, and what a request's KV is called."""

from __future__ import annotations

import time
from contextlib import closing, contextmanager

import grpc
import pytest
import torch
from engine import transfer_config
from models import save_lora
from vllm import SamplingParams
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention import Attention
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvstore_api.v1 import block_store_pb2 as pb
from kvstore_client import ClientConfig, KVStoreClient, KVStoreConfigError, NamespaceSpec, prefix_hashes, prefix_seed
from kvstore_engine.plug_settings import PlugSettings
from kvstore_engine.store_steps import StoreSteps
from kvstore_engine.vllm.identity import attention_of, media_have_names, media_labels
from kvstore_engine.vllm.messages import NOT_HERE, QUEUE_S, WINDOW_GONE, StepMetadata, Transfer, WorkerReport
from kvstore_engine.vllm.placement import Placement, stored_groups
from kvstore_engine.vllm.requests import Adapters, Chains, has_name
from kvstore_engine.vllm.scheduler import SchedulerHalf
from kvstore_engine.vllm.tracked import AGAIN_S
from kvstore_engine.vllm.worker import WorkerHalf, _Ready
from wire_server import refuse, wire_server

BLOCKS = 40
DIGEST = bytes(range(32))
PLACE = (0, 0)


def full(block_size: int = 32) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=4, dtype=torch.float32)


def window(block_size: int = 32) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=2, head_size=4, dtype=torch.float32, sliding_window=200
    )


def config_of(*groups: tuple[list[str], object], **more) -> KVCacheConfig:
    specs = [KVCacheGroupSpec(layer_names=names, kv_cache_spec=spec, **more) for names, spec in groups]
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=specs)


def caches_of(config: KVCacheConfig) -> dict[str, torch.Tensor]:
    """Memory as vLLM lays it out: any order of the axes behind that of the blocks."""
    caches = {}
    for group in config.kv_cache_groups:
        for number, name in enumerate(group.layer_names):
            cache = torch.randn(BLOCKS, 2, group.kv_cache_spec.block_size, 8)
            caches[name] = cache.transpose(1, 2).contiguous().transpose(1, 2) if number % 2 else cache
    return caches


HYBRID = config_of((["w0", "w1"], window()), (["f0", "f1", "f2"], full()))


def test_blocks_come_back_where_they_belong_and_nothing_else_is_touched():
    caches = caches_of(HYBRID)
    before = {name: cache.clone() for name, cache in caches.items()}
    placement = Placement(HYBRID, caches)
    assert [group.has_window for group in placement.groups] == [False, True]
    assert (placement.full_bytes, placement.block_bytes) == (3 * 4 * 2048, 5 * 4 * 2048)
    ids = [[[5, 9, 1, 30], [7, 8, 2, 3]], [[11, 12, 13, 14], [20, 21, 22, 23]]]
    stored = torch.empty((2, placement.block_bytes), dtype=torch.uint8)
    placement.copy_out(ids, range(2), stored)
    for cache in caches.values():
        cache.zero_()
    to = [[[1, 2, 3, NOT_HERE], [4, 5, 6, 7]], [[NOT_HERE] * 4, [31, 32, 33, 34]]]
    assert [placement.needs_windows(to, block) for block in range(2)] == [False, True]
    assert [placement.is_whole(to, block) for block in range(2)] == [False, True]
    placement.copy_in(to, range(1), stored[:1], windows=False)
    placement.copy_in(to, range(1, 2), stored[1:], windows=True)
    for name, cache in caches.items():
        group = 0 if name.startswith("f") else 1
        expected = torch.zeros_like(cache)
        for source, target in zip(ids[group], to[group], strict=True):
            for one, other in zip(source, target, strict=True):
                if other != NOT_HERE:
                    expected[other] = before[name][one]
        assert torch.equal(cache, expected), name


def test_layout_tells_whatever_changes_the_bytes_apart():
    caches = caches_of(HYBRID)
    layouts = {Placement(HYBRID, caches).layout}
    assert layouts == {Placement(HYBRID, caches_of(HYBRID)).layout}
    half = {name: cache.to(torch.float16) for name, cache in caches.items()}
    other_order = {**caches, "f0": caches["f0"].transpose(1, 2).contiguous().transpose(1, 2)}
    renamed = config_of((["w0", "w1"], window()), (["f0", "f1", "f9"], full()))
    finer = config_of((["w0", "w1"], window(16)), (["f0", "f1", "f2"], full(16)))
    one_kind = config_of((["w0", "w1", "f0", "f1", "f2"], full()))
    variants = [
        (HYBRID, half),
        (HYBRID, other_order),
        (renamed, {**caches, "f9": caches["f2"]}),
        (finer, caches_of(finer)),
        (one_kind, caches_of(one_kind)),
    ]
    layouts |= {Placement(config, memory).layout for config, memory in variants}
    assert len(layouts) == 1 + len(variants)


def test_group_that_vllm_computes_anew_after_a_hit_is_not_stored():
    ring = CircularBufferSpec(block_size=32, num_kv_heads=2, head_size=4, dtype=torch.float32)
    assert not ring.prefix_cacheable
    config = config_of((["r0"], ring), (["f0"], full()))
    assert [group.index for group in stored_groups(config)] == [1]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (config_of((["f0"], full(256))), "hold 256 tokens, the store's 128"),
        (config_of((["f0"], full(48))), "hold 48 tokens, the store's 128"),
        (config_of((["w0"], window())), "sees all tokens"),
        (
            config_of((["f0"], full()), (["m0"], MambaSpec(block_size=32, shapes=((2, 2),), dtypes=(torch.float32,)))),
            "MambaSpec",
        ),
        (config_of((["f0"], full()), is_eagle_group=True), "draft model"),
    ],
)
def test_memory_that_cannot_be_stored_rightly_is_refused(config, message):
    with pytest.raises(KVStoreConfigError, match=message):
        stored_groups(config)


def spec_of(placement: Placement) -> NamespaceSpec:
    about = {"layout": placement.layout, "kv_dtype": placement.dtype, "block_bytes": placement.block_bytes}
    return NamespaceSpec(model="m", revision="r", engine="e", **about)


def request_of(tokens: int, name: str = "r", **more) -> Request:
    return Request(name, list(range(tokens)), SamplingParams(max_tokens=1), None, **more)


def image(identifier: str, offset: int, length: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset=offset, length=length))


def test_chain_that_grows_is_that_of_the_whole():
    request = request_of(1000, mm_features=[image("a", 100, 60), image("b", 500, 300)])
    whole, grown = (Chains.of(request, {PLACE: DIGEST}, b"") for _ in range(2))
    whole.grow(request, 7)
    for blocks in (1, 2, 2, 4, 7):
        grown.grow(request, blocks)
    assert grown.first(7) == whole.first(7)
    assert grown.first(3)[PLACE] == whole.first(7)[PLACE][: 3 * 32]


def test_plain_request_has_the_chain_that_every_client_computes():
    chains = Chains.of(request_of(300), {PLACE: DIGEST}, b"")
    chains.grow(request_of(300), 2)
    assert chains.first(2)[PLACE] == prefix_hashes(prefix_seed(DIGEST), range(256)).data


def name_of(request: Request, digest: bytes = DIGEST, adapter: bytes = b"", weights: bytes = b"") -> bytes:
    chains = Chains.of(request, {PLACE: digest}, adapter, weights)
    chains.grow(request, 2)
    return chains.first(2)[PLACE]


def test_whatever_kv_depends_on_is_in_its_name():
    names = [
        name_of(request_of(256)),
        name_of(request_of(256), digest=bytes(32)),
        name_of(request_of(256), adapter=b"x"),
        name_of(request_of(256), weights=b"x"),
        name_of(request_of(256, cache_salt="x")),
        name_of(request_of(256, mm_features=[image("x", 10, 20)])),
        name_of(request_of(256, mm_features=[image("y", 10, 20)])),
        name_of(request_of(256, mm_features=[image("x", 11, 20)])),
        name_of(request_of(256, mm_features=[image("x", 10, 20), image("y", 40, 20)])),
    ]
    assert len(set(names)) == len(names)
    # What comes after a block does not change its name; what reaches into it does.
    later, reaching = image("x", 128, 20), image("x", 100, 40)
    assert name_of(request_of(256, mm_features=[later]))[:32] == names[0][:32]
    assert name_of(request_of(256, mm_features=[later])) != names[0]
    assert name_of(request_of(256, mm_features=[reaching]))[:32] != names[0][:32]


def test_request_without_token_ids_for_good_has_no_name():
    assert has_name(request_of(256))
    assert not has_name(request_of(256, resumable=True))
    embeddings = torch.zeros(256, 8)
    assert not has_name(Request("r", None, SamplingParams(max_tokens=1), None, prompt_embeds=embeddings))


def test_transfer_is_as_good_as_in_the_worker_with_the_least():
    one = WorkerReport({"a": 3, "b": 4}, {"a"}, {"a"}, {"c": (2, 9, "X"), "d": (5, 9, "X")}, {"e"}, 10, 1.0)
    other = WorkerReport({"a": 5, "b": 2}, {"b"}, set(), {"c": (1, 3, "Y")}, {"f"}, 20, 2.0)
    assert one.aggregate(other) == WorkerReport(
        {"a": 3, "b": 2}, {"a", "b"}, {"a"}, {"c": (1, 3, "Y"), "d": (5, 9, "X")}, {"e", "f"}, 30, 3.0
    )


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"mm_processor_cache_gb": 0, "enable_prefix_caching": False}, False),
        ({"mm_processor_cache_gb": 0, "enable_prefix_caching": True}, True),
        ({"enable_prefix_caching": False}, True),
        ({"mm_encoder_attn_dtype": "fp8"}, False),
    ],
)
def test_image_that_vllm_only_numbers_or_sees_by_what_it_saw_before_has_no_name(seeing, settings, named):
    """With both of its caches off, its hash of an image is a count, and two processes count different images alike."""
    assert media_have_names(EngineArgs(str(seeing), **settings).create_engine_config()) is named
    request = request_of(256, mm_features=[image("renderer0-mm-1-image-0", 10, 20)])
    assert has_name(request, media_have_names=named) is named
    assert has_name(request_of(256), media_have_names=named)


def test_whatever_changes_what_a_model_sees_is_in_the_namespace(seeing, hybrid):
    def labels(**settings) -> str:
        return media_labels(EngineArgs(str(seeing), **settings).create_engine_config())["media"]

    one = labels()
    assert labels(mm_processor_cache_gb=1, limit_mm_per_prompt={"image": 3}, mm_hasher_algorithm="sha256") == one
    others = [
        labels(mm_processor_kwargs={"rescale_factor": 0.001}),
        labels(media_io_kwargs={"image": {"rgba_background_color": [0, 0, 0]}}),
        labels(mm_encoder_attn_backend="TORCH_SDPA"),
        labels(video_pruning_rate=0.5),
    ]
    assert len({one, *others}) == 1 + len(others)
    assert media_labels(EngineArgs(str(hybrid)).create_engine_config()) == {}


def test_kernels_for_other_instructions_are_another_attention(hybrid):
    """On a CPU with AMX vLLM keeps keys and values of the same shape and type in another order."""
    config = EngineArgs(str(hybrid)).create_engine_config()
    placement = Placement(one := config_of((["f0"], full())), caches_of(one))
    with set_current_vllm_config(config):
        layer = Attention(num_heads=2, head_size=32, scale=1.0, prefix="f0")
    names = set()
    for isa in ("amx", "vec"):
        layer.isa = isa  # as vLLM's own builder of metadata does
        names.add(attention_of(config, placement))
    assert names == {"CPU_ATTN amx", "CPU_ATTN vec"}


def test_adapter_whose_files_change_under_its_number_is_not_named_any_more(tmp_path):
    """VLLM has read them once, and says nothing of when it reads them again."""
    adapters, path = Adapters(), save_lora(tmp_path / "lora", 1)
    lora = LoRARequest("same", 1, str(path))
    first = adapters.identity_of(request_of(256, lora_request=lora))
    assert first
    assert adapters.identity_of(request_of(256, lora_request=lora)) == first
    save_lora(tmp_path / "new", 2)
    (tmp_path / "new" / "adapter_model.safetensors").replace(path / "adapter_model.safetensors")
    assert adapters.identity_of(request_of(256, lora_request=lora)) is None
    other = adapters.identity_of(request_of(256, lora_request=LoRARequest("same", 2, str(path))))
    assert other not in (None, first)


def test_steps_that_compute_nothing_are_not_taken_for_those_that_do(hybrid):
    """Else a step of a thousand tokens is timed by one of none, and every hit seems not worth its load."""
    transfer = transfer_config("127.0.0.1:1")
    config = EngineArgs(str(hybrid), kv_transfer_config=KVTransferConfig(**transfer)).create_engine_config()
    settings = PlugSettings.read({"target": "127.0.0.1:1"})
    with (
        closing(SchedulerHalf(settings, config, HYBRID)) as scheduler,
        closing(WorkerHalf(settings, config, HYBRID)) as worker,
    ):
        for tokens in (0, 0, 100):
            output = SchedulerOutput.make_empty()
            output.total_num_scheduled_tokens = tokens
            metadata = scheduler.step(output)
            assert isinstance(metadata, StepMetadata)
            time.sleep(0.01)
            worker.start_loads(metadata, PLACE)
            worker.finished_loads()
            handed_on = KVConnectorOutput(kv_connector_worker_meta=worker.report())
            if not handed_on.is_empty():  # as vLLM does after a step that computes nothing
                scheduler.learn(handed_on)
        assert scheduler._benefit.prefill_s(100) >= 0.01


@pytest.mark.parametrize(
    ("waited_s", "stored", "blocks", "is_absent"),
    [(QUEUE_S / 2, True, 1, False), (QUEUE_S * 2, True, 0, False), (0, False, 0, True)],
)
def test_load_that_waited_for_others_has_a_budget_of_its_own(hybrid, store, waited_s, stored, blocks, is_absent):
    """But a request does not wait for ever for those before it. And what is stored need not be saved again."""
    transfer = transfer_config(store.target)
    config = EngineArgs(str(hybrid), kv_transfer_config=KVTransferConfig(**transfer)).create_engine_config()
    caches = caches_of(HYBRID)
    with (
        KVStoreClient(ClientConfig(target=store.target, base_budget_s=30)) as filler,
        KVStoreClient(ClientConfig(target=store.target, base_budget_s=QUEUE_S / 4)) as client,
        closing(WorkerHalf(PlugSettings.read({"target": store.target}), config, HYBRID)) as worker,
    ):
        placement = Placement(HYBRID, caches)
        spec = spec_of(placement)
        chain = filler.namespace(spec).chain(range(128))
        assert filler.namespace(spec).put(chain, bytes(placement.block_bytes)).stored == 1
        if not stored:
            assert filler.namespace(spec).delete(chain).failure is None
        namespace = client.namespace(spec)
        assert namespace.register(budget_s=30) is None
        worker._ready = _Ready(placement, namespace, StoreSteps(namespace), b"")
        load = Transfer("r", {PLACE: chain.data}, {}, 0, [[[1, 2, 3, 4]], [[5, 6, 7, 8]]], "")
        worker._load(load, PLACE, time.monotonic() - waited_s)
        assert worker.finished_loads() == ({"r"}, set() if blocks else {"r"})
        report = worker.report()
        assert report is not None
        assert report.loaded_blocks == {"r": blocks}
        assert report.absent == ({"r"} if is_absent else set())


LASTING, PASSING = ("UNKNOWN_TRAFFIC_CLASS", False), ("OVERLOADED", True)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def scheduler_of_a_store_that(hybrid, clock):
    """A scheduler's half by `clock`, and a request of three full blocks that has been looked up."""

    @contextmanager
    def made(role, **answers):
        with wire_server() as peer:
            peer.answers.update(answers)
            transfer = {**transfer_config(peer.target), "kv_role": role}
            config = EngineArgs(str(hybrid), kv_transfer_config=KVTransferConfig(**transfer)).create_engine_config()
            settings = PlugSettings.read({"target": peer.target, "base_budget_s": 5})
            spec = NamespaceSpec(model="m", revision="r", engine="e", layout="l", kv_dtype="d", block_bytes=64)
            with closing(SchedulerHalf(settings, config, HYBRID, clock=clock)) as scheduler:
                scheduler.meet_workers({PLACE: spec.to_proto().SerializeToString()})
                request = request_of(400)
                while scheduler.matched_tokens(request, 0) is None:
                    time.sleep(0.01)
                yield scheduler, request, peer

    return made


def compute(scheduler: SchedulerHalf, *requests: Request) -> list[Transfer]:
    """All of them in one step. Returns: what is to be saved."""
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [NewRequestData.from_request(request, ([], [])) for request in requests]
    output.num_scheduled_tokens = {request.request_id: request.num_tokens for request in requests}
    output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
    return scheduler.step(output).saves


def nothing(*_: object) -> pb.MatchPrefixResponse:
    """What a store finds that has nothing."""
    return pb.MatchPrefixResponse()


def counts_of(scheduler: SchedulerHalf) -> dict[str, float]:
    stats = scheduler.stats()
    return {name: count for name, count in stats.data.items() if ":" in name} if stats is not None else {}


@pytest.mark.parametrize("role", ["kv_both", "kv_producer"])
@pytest.mark.parametrize(("reason", "is_asked_again"), [LASTING, PASSING])
def test_look_up_that_the_store_refuses_is_tried_again_only_if_that_may_change(
    scheduler_of_a_store_that, clock, role, reason, is_asked_again
):
    def refusal(_, context):
        refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, reason)

    with scheduler_of_a_store_that(role, MatchPrefix=refusal) as (scheduler, request, peer):
        for _ in range(10):
            assert compute(scheduler, request) == []
            clock.now_s += 2 * AGAIN_S
            time.sleep(0.02)
        assert (peer.calls.count("MatchPrefix") > 1) is is_asked_again
        scheduler.forget(request)
        # A miss is counted once, and what was never saved as well, whoever only saves included.
        misses = {f"misses:{reason}": 1} if role == "kv_both" else {}
        assert counts_of(scheduler) == {f"unsaved_blocks:{reason}": 3, **misses}


@pytest.mark.parametrize(
    ("reason", "is_saved_again"), [("STORE_FULL", False), ("OVERLOADED", True), ("NOT_SERVING", True)]
)
def test_block_that_the_store_refuses_is_tried_again_only_if_that_may_change(hybrid, reason, is_saved_again):
    with wire_server() as peer:
        peer.answers["PutBlocks"] = lambda _, context: refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        transfer, caches = transfer_config(peer.target), caches_of(HYBRID)
        config = EngineArgs(str(hybrid), kv_transfer_config=KVTransferConfig(**transfer)).create_engine_config()
        settings = PlugSettings.read({"target": peer.target, "base_budget_s": 5})
        with KVStoreClient(settings.client) as client, closing(WorkerHalf(settings, config, HYBRID)) as worker:
            namespace = client.namespace(spec_of(Placement(HYBRID, caches)))
            worker._ready = _Ready(Placement(HYBRID, caches), namespace, StoreSteps(namespace), b"")
            chain = namespace.chain(range(256))
            blocks = [[[1, 2, 3, 4], [5, 6, 7, 8]], [[9, 10, 11, 12], [13, 14, 15, 16]]]
            worker.start_saves(StepMetadata([], [Transfer("r", {PLACE: chain.data}, {}, 0, blocks, "")]), PLACE)
            assert worker.flush(30)
            worker.finished_loads()
            report = worker.report()
    assert report is not None
    assert report.gaps == ({"r": (0, 2, reason)} if is_saved_again else {})
    assert report.given_up == (set() if is_saved_again else {"r"})


@pytest.mark.parametrize("end", [WorkerReport(given_up={"r"}), WorkerReport(gaps={"r": (1, 3, WINDOW_GONE)})], ids=str)
def test_request_that_was_refused_or_has_lost_its_window_is_not_taken_up_again(scheduler_of_a_store_that, end):
    """Not for a passing reason either, of a block that was on its way behind the refused one, where it could not be hit."""
    with scheduler_of_a_store_that("kv_both", MatchPrefix=nothing) as (scheduler, request, _):
        compute(scheduler, request)
        for report in (end, WorkerReport(gaps={"r": (2, 3, "QUEUE_FULL")})):
            scheduler.learn(KVConnectorOutput(kv_connector_worker_meta=report))
            assert not scheduler._requests["r"].is_due(1e9)


def test_blocks_that_find_no_store_are_offered_by_one_request_a_step_and_less_and_less_often(
    scheduler_of_a_store_that, clock
):
    """To offer them costs the scheduler milliseconds, in which no request is computed."""
    with scheduler_of_a_store_that("kv_both", MatchPrefix=nothing) as (scheduler, _, _peer):
        manager = KVCacheManager(HYBRID, 1000, scheduler_block_size=32, hash_block_size=32, enable_caching=False)
        scheduler.bind(manager)
        requests = [request_of(260, name) for name in ("a", "b")]
        for request in requests:
            while scheduler.matched_tokens(request, 0) is None:
                time.sleep(0.01)
            assert manager.allocate_slots(request, request.num_tokens) is not None
        offered = []
        while clock.now_s < 60:
            saves = compute(scheduler, *requests)
            assert len(saves) == (2 if clock.now_s == 0 else len(saves[:1]))
            offered += [save.request_id for save in saves]
            gaps = {save.request_id: (0, 2, "BREAKER_OPEN") for save in saves}
            scheduler.learn(KVConnectorOutput(kv_connector_worker_meta=WorkerReport(gaps=gaps)))
            clock.now_s += 0.1
        assert 8 < offered.count("a") == offered.count("b") < 16
        # Once some of it is taken, it goes on as at first.
        clock.now_s += 10
        (save,) = compute(scheduler, *requests)
        gaps = {save.request_id: (1, 2, "QUEUE_FULL")}
        scheduler.learn(KVConnectorOutput(kv_connector_worker_meta=WorkerReport(gaps=gaps)))
        clock.now_s += 0.6
        request = next(request for request in requests if request.request_id in gaps)
        assert [save.first_block for save in compute(scheduler, request)] == [1]
