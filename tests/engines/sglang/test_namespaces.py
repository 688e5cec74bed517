"""Pages of other weights, types, layouts, ranks or tenants are never a hit, whatever their tokens are."""

from __future__ import annotations

import pytest
import torch

from hicaches import PAGE, back_up, controller, device_pool, get_context, host_pool, prefetch, server_arguments
from kvstore_engine.sglang.namespace import CONFIG, PLAIN

TOKENS = list(range(3 * PAGE))


def _save(server, *, kind="mha", dtype=torch.bfloat16, layout="page_first", arguments=None, **others):
    device = device_pool(kind, dtype=dtype)
    with server_arguments(arguments), controller(server.target, host_pool(device, layout), device, **others) as made:
        return back_up(made, TOKENS, seed=1)[1]


def _found(server, *, kind="mha", dtype=torch.bfloat16, layout="page_first", arguments=None, **others):
    device = device_pool(kind, dtype=dtype)
    with server_arguments(arguments), controller(server.target, host_pool(device, layout), device, **others) as made:
        return prefetch(made, TOKENS)[1]


@pytest.mark.parametrize(
    "other",
    [
        {"model": "other"},
        {"revision": "r2"},
        {"tenant": "other"},
        {"dtype": torch.float16},
        {"layout": "page_first_direct"},
        {"tp": (1, 2)},
        {"tp": (0, 4)},
        {"pp": (0, 2)},
        {"kind": "mla"},
    ],
    ids=str,
)
def test_one_difference_is_enough_to_miss(server, model, other):
    same = {"model": model, "tp": (0, 2)}
    saved = _save(server, **same)
    assert _found(server, **{**same, **other}) == []
    assert _found(server, **same) == saved


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "half"},
        {"json_model_override_args": '{"rope_theta": 5}'},
        {"load_format": "dummy"},
        {"quantization": "fp8"},
        {"attention_backend": "triton"},
        {"kt_weight_path": "/experts"},
        {"weight_version": "2"},
    ],
    ids=str,
)
def test_one_difference_in_how_the_model_runs_is_enough_to_miss(server, model, other):
    saved = _save(server, arguments={}, model=model)
    assert _found(server, arguments=other, model=model) == []
    assert _found(server, arguments={}, model=model) == saved


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_kernels_that_keep_a_page_in_another_order_miss(server, model, layout, monkeypatch):
    way = {"layout": layout, "model": model}
    saved = _save(server, **way)
    with monkeypatch.context() as patched:
        patched.setenv("SGLANG_USE_HND_KVCACHE", "1")
        assert _found(server, **way) == []
    assert _found(server, **way) == saved


def test_all_arguments_that_are_looked_at_are_sglang_s():
    with server_arguments({}):
        for name in (*CONFIG.split(), *PLAIN):
            get_context().config_leaf(name)


def test_kinds_of_fp8_are_kept_apart_though_both_are_bytes(server, model):
    ways = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    saved = {}
    for name, dtype in ways.items():
        assert _found(server, dtype=dtype, arguments={"kv_cache_dtype": name}, model=model) == []
        saved[name] = _save(server, dtype=dtype, arguments={"kv_cache_dtype": name}, model=model)
    for name, dtype in ways.items():
        assert _found(server, dtype=dtype, arguments={"kv_cache_dtype": name}, model=model) == saved[name]


def test_ranks_of_an_mla_model_share_what_one_of_them_saved(server, model):
    saved = _save(server, kind="mla", tp=(0, 2), model=model)
    assert _found(server, kind="mla", tp=(1, 2), model=model) == saved
    assert _found(server, kind="mla", tp=(3, 8), model=model) == saved
    assert _found(server, kind="mla", tp=(0, 2), pp=(1, 2), model=model) == []


def test_weights_are_told_by_their_files(server, tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    way = {"arguments": {"model_path": str(tmp_path)}, "revision": None}
    saved = _save(server, **way)
    assert _found(server, **way) == saved
    weights.write_bytes(b"two")
    assert _found(server, **way) == []


def test_a_directory_is_told_by_its_files_whatever_commit_sglang_is_told(server, tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"three")
    way = {"arguments": {"model_path": str(tmp_path), "revision": "c" * 40}, "revision": None}
    saved = _save(server, **way)
    assert _found(server, **way) == saved
    weights.write_bytes(b"four")
    assert _found(server, **way) == []


def test_a_hub_s_model_is_looked_for_where_sglang_has_it(server, tmp_path):
    ways = [
        {"arguments": {"model_path": "some/model", "download_dir": str(tmp_path / digit)}, "revision": None}
        for digit in "de"
    ]
    for digit in "de":
        repository = tmp_path / digit / "models--some--model"
        (repository / "snapshots" / (digit * 40)).mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(digit * 40)
    saved = _save(server, **ways[0])
    assert _found(server, **ways[1]) == []
    assert _found(server, **ways[0]) == saved


@pytest.mark.parametrize("other", [{"model_path": "/other"}, {"weight_version": "2"}], ids=str)
def test_weights_that_are_exchanged_in_a_running_server_find_and_save_nothing_under_the_name_of_the_old(
    server, model, other
):
    more = list(range(7, 3 * PAGE + 7))
    device = device_pool()
    with server_arguments({}):
        with controller(server.target, host_pool(device), device, model=model) as made:
            saved = back_up(made, TOKENS, seed=1)[1]
            get_context().override("test", **other)
            assert prefetch(made, TOKENS)[:2] == (0, [])
            assert back_up(made, more, seed=2)[2] == 0
        # Attached again with a configuration that nobody has changed.
        with controller(server.target, host_pool(device), device, model=model) as made:
            assert prefetch(made, TOKENS)[:2] == (0, [])
            assert back_up(made, more, seed=2)[2] == len(more)
    with server_arguments({}), controller(server.target, host_pool(device), device, model=model) as made:
        assert prefetch(made, TOKENS)[1] == saved
        assert prefetch(made, more)[0] == 0


def test_an_adapter_with_other_weights_under_its_name_and_path_misses(server, model, tmp_path):
    """SGLang names adapters by name and path."""
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"one")
    way = {"arguments": {"lora_paths": [f"tuned={tmp_path}"]}, "model": model}
    saved = _save(server, **way)
    assert _found(server, **way) == saved
    weights.write_bytes(b"two")
    assert _found(server, **way) == []


def test_a_commit_given_to_sglang_is_the_revision(server, model):
    one, two = ({"model_path": "some/model", "revision": digit * 40} for digit in "ab")
    saved = _save(server, arguments=one, revision=None, model=model)
    assert _found(server, arguments=one, revision=None, model=model) == saved
    assert _found(server, arguments=two, revision=None, model=model) == []
