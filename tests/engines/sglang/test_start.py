"""What cannot work is refused when SGLang starts, by name; a store that is away is no obstacle."""

from __future__ import annotations

import pytest
import torch

from hicaches import (
    PAGE,
    AsymmetricMHATokenToKVPoolHost,
    MLAHostAllocation,
    MLATokenToKVPoolHost,
    PoolName,
    back_up,
    controller,
    device_pool,
    extra_config,
    host_pool,
    parse,
    prefetch,
    server_arguments,
)
from kvstore_client import KVStoreConfigError
from kvstore_engine.sglang.settings import read_settings

# Nobody listens there.
NOBODY = "127.0.0.1:1"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"traget": "x:1"}, "did you mean 'target'"),
        ({"min_hit_token": 5}, "did you mean 'min_hit_tokens'"),
        ({"file_path": "/x"}, "no setting is called 'file_path'"),
        ({"min_hit_tokens": 5}, "prefetch_threshold"),
        ({"max_pending_save_bytes": 5}, "host memory"),
        ({"interface_v1": 0}, "interface_v1"),
        ({"interface_v1": None}, "interface_v1"),
        ({"base_budget_s": -1}, "base_budget_s is -1"),
        ({"tenant": ""}, "tenant is empty"),
        ({"target": "nowhere"}, "target is 'nowhere'"),
    ],
    ids=str,
)
def test_a_setting_that_is_wrong_or_without_effect_is_refused_by_name(settings, said):
    device = device_pool()
    with pytest.raises(KVStoreConfigError, match=said), controller(NOBODY, host_pool(device), device, **settings):
        pass


def test_a_traffic_class_that_the_store_does_not_know_is_refused_by_name(server, model):
    device = device_pool()
    with (
        pytest.raises(KVStoreConfigError, match=r"traffic_class.*'chatbox'.*known are agent, chatbot"),
        controller(server.target, host_pool(device), device, model=model, traffic_class="chatbox"),
    ):
        pass
    with controller(server.target, host_pool(device), device, model=model, traffic_class="chatbot") as made:
        assert back_up(made, list(range(PAGE)), seed=1)[2] == PAGE


def test_keys_that_are_sglang_s_own_are_left_alone():
    given = {**extra_config(NOBODY), "prefetch_threshold": 5, "prefetch_timeout_base": 2, "file_storage_path": "/x"}
    assert read_settings(parse(given)).client.target == NOBODY
    # A decoding server hands over the configuration as it is written.
    assert read_settings(given).client.target == NOBODY


@pytest.mark.parametrize("page_size", [1, 64, 256])
def test_pages_of_another_size_than_blocks_are_refused_with_both_numbers(page_size):
    device = device_pool(page_size=page_size)
    pool = host_pool(device, page_size=page_size)
    with (
        pytest.raises(
            KVStoreConfigError,
            match=rf"pages hold {page_size} tokens and the store's blocks {PAGE}.*--page-size {PAGE}.*--attention-backend",
        ),
        controller(NOBODY, pool, device),
    ):
        pass


def test_a_layout_that_is_not_supported_is_refused_by_name():
    device = device_pool()
    with (
        pytest.raises(KVStoreConfigError, match="page_unified"),
        controller(NOBODY, host_pool(device, "page_unified"), device),
    ):
        pass


def test_a_kind_of_pool_that_is_not_supported_is_refused_by_name():
    device = device_pool(v_head_dim=8)
    pool = host_pool(device, host_class=AsymmetricMHATokenToKVPoolHost)
    with pytest.raises(KVStoreConfigError, match="AsymmetricMHATokenToKVPoolHost"), controller(NOBODY, pool, device):
        pass


def test_a_rank_without_host_memory_of_its_own_is_refused():
    device = device_pool("mla")
    geometry = MLAHostAllocation(
        dtype=device.dtype, kv_lora_rank=24, qk_rope_head_dim=8, kv_cache_dim=32, size_per_token=192
    )
    pool = MLATokenToKVPoolHost(
        geometry,
        2.0,
        0,
        PAGE,
        "page_first",
        device_capacity_tokens=device.size,
        start_layer=0,
        end_layer=3,
        target_layer_num=3,
    )
    with pytest.raises(KVStoreConfigError, match="start it with this backend"), controller(NOBODY, pool, device):
        pass


def test_a_page_larger_than_a_block_may_be_is_refused_with_both_numbers():
    device = device_pool(head_dim=8192, heads=8, pages=1)
    pool = host_pool(device, pages=1)
    with pytest.raises(KVStoreConfigError, match=r"100663296 bytes.*67108864"), controller(NOBODY, pool, device):
        pass


@pytest.mark.parametrize("pool_name", [PoolName.SWA, PoolName.MAMBA, PoolName.DRAFT, PoolName.INDEXER])
def test_a_pool_beside_that_of_the_kv_is_refused_by_name(server, model, pool_name):
    device = device_pool()
    with (
        pytest.raises(KVStoreConfigError, match=f"pool '{pool_name.value}'"),
        controller(server.target, host_pool(device), device, hybrid=True, more_pools=[pool_name], model=model),
    ):
        pass


def test_a_backend_that_a_running_server_keeps_although_it_has_refused_does_nothing(server, model):
    tokens = list(range(3 * PAGE))
    device = device_pool()
    pool = host_pool(device)
    with controller(server.target, pool, device, hybrid=True, model=model) as made:
        names, _, saved = back_up(made, tokens, seed=1)
        assert saved == len(tokens)
        assert made.storage_backend.batch_exists(names) == 3
        with pytest.raises(KVStoreConfigError, match="detach"):
            made.storage_backend.register_mem_host_pool_v2(pool, PoolName.SWA)
        assert made.storage_backend.batch_exists(names) == 0
        assert prefetch(made, tokens)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (None, "weights of model 'tiny'"),
        ({"model_path": "no/such-model"}, "weights of model 'no/such-model'"),
        ({"model_path": "no/such-model", "revision": "main"}, "--revision main"),
    ],
    ids=str,
)
def test_weights_that_cannot_be_told_from_others_are_refused(arguments, said):
    device = device_pool()
    with (
        server_arguments(arguments),
        pytest.raises(KVStoreConfigError, match=said),
        controller(NOBODY, host_pool(device), device, revision=None),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("load_format", "dummy"),
        ("load_format", "remote_instance"),
        ("weight_cache_mode", "client"),
        ("checkpoint_engine_wait_weights_before_ready", True),
        ("quantization_param_path", "/scales.json"),
        ("kt_weight_path", "/experts"),
    ],
)
def test_weights_that_are_not_the_model_s_files_alone_are_refused_without_a_revision(tmp_path, name, value):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    device = device_pool()
    for model, revision in ((str(tmp_path), None), ("some/model", "a" * 40)):
        with (
            server_arguments({"model_path": model, "revision": revision, name: value}),
            pytest.raises(KVStoreConfigError, match=rf"{name} {value!r}.*set 'revision'"),
            controller(NOBODY, host_pool(device), device, revision=None),
        ):
            pass


@pytest.mark.parametrize(
    ("arguments", "settings", "said"),
    [
        ({}, {"revision": None}, "set 'revision'"),
        ({"lora_paths": ["tuned=here"]}, {}, "--lora-paths"),
    ],
    ids=str,
)
def test_files_that_may_have_changed_since_a_running_server_loaded_them_are_refused(
    tmp_path, arguments, settings, said
):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    device = device_pool()
    running = {"model_path": str(tmp_path), "hicache_storage_backend": None, **arguments}
    with (
        server_arguments(running),
        pytest.raises(KVStoreConfigError, match=said),
        controller(NOBODY, host_pool(device), device, **settings),
    ):
        pass


def test_adapters_that_cannot_be_told_from_others_are_refused(tmp_path):
    device = device_pool()
    with (
        server_arguments({"lora_paths": [f"tuned={tmp_path / 'gone'}"]}),
        pytest.raises(KVStoreConfigError, match="gone"),
        controller(NOBODY, host_pool(device), device),
    ):
        pass


def test_bytes_of_an_unknown_type_are_refused():
    device = device_pool(dtype=torch.float8_e4m3fn)
    with pytest.raises(KVStoreConfigError, match="of which type"), controller(NOBODY, host_pool(device), device):
        pass


def test_a_store_that_is_away_at_the_start_is_no_obstacle():
    tokens = list(range(3 * PAGE))
    device = device_pool()
    with controller(NOBODY, host_pool(device), device, base_budget_s=0.2) as made:
        assert back_up(made, tokens, seed=1)[2] == 0
        assert prefetch(made, tokens)[:2] == (0, [])
