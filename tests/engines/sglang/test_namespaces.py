"""Pages of other weights, types, layouts, ranks or tenants are never a hit, whatever their tokens are."""

from __future__ import annotations

import pytest
import torch

from hicaches import PAGE, back_up, controller, device_pool, host_pool, prefetch, server_arguments

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
    ],
    ids=str,
)
def test_one_difference_in_how_the_model_runs_is_enough_to_miss(server, model, other):
    saved = _save(server, arguments={}, model=model)
    assert _found(server, arguments=other, model=model) == []
    assert _found(server, arguments={}, model=model) == saved


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
