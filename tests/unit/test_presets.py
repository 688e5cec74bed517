"""A model's KV computed from its configuration: the published sizes, and what changes them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_client import (
    KvGroupKind,
    ModelConfigError,
    NamespaceSpecError,
    ReplayMode,
    UnknownPresetError,
    model_kv_layout,
    preset,
    preset_names,
)
from kvstore_client.number_formats import MXFP4, MXFP8, NVFP4
from kvstore_client.presets import preset_config

V41 = "deepseek-v4.1-flash"
LLAMA = {  # SmolLM2-135M
    "model_type": "llama",
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "torch_dtype": "bfloat16",
}
GEMMA3 = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "dtype": "bfloat16",
    },
}
LATENT = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
}


def changed(config, **keys):
    """The configuration with keys replaced, or left out where None; in `text_config` when it has one."""
    inner = config.get("text_config", config)
    inner = {name: value for name, value in {**inner, **keys}.items() if value is not None}
    return {**config, "text_config": inner} if "text_config" in config else inner


# The published sizes


def test_an_entry_is_356_bytes_in_fp4_and_a_window_slot_528():
    assert (NVFP4.vector_bytes(512), MXFP4.vector_bytes(128), MXFP8.vector_bytes(512)) == (288, 68, 528)


@pytest.mark.parametrize(
    ("kv_dtype", "engine", "raw_bytes", "block_bytes"),
    [
        ("fp4", "vllm", 113_920, 114_688),
        ("fp4", "deepinfer", 113_920, 114_048),
        ("fp8", "vllm", 190_720, 191_488),  # the padding is computed, the raw size published
        ("fp8", "deepinfer", 190_720, 191_232),
    ],
)
def test_v41_flash_blocks_have_their_published_sizes(kv_dtype, engine, raw_bytes, block_bytes):
    known = preset(V41, revision="r1", kv_dtype=kv_dtype, engine=engine)
    assert sum(part.size_bytes for part in known.layout.parts) == raw_bytes
    assert known.spec.block_bytes == known.layout.block_bytes == block_bytes


def test_v41_flash_has_four_parts_two_groups_and_a_snapshot():
    known = preset(V41, revision="r1")
    assert [(part.layers, part.offset_bytes, part.size_bytes) for part in known.layout.parts] == [
        ((2,), 0, 22_784),
        ((8,), 23_040, 22_784),
        ((14,), 46_080, 22_784),
        ((20,), 69_120, 45_568),
    ]
    assert known.snapshot_bytes == 20 * 134 * 528 == 1_415_040
    full, window = known.spec.groups
    assert (full.kind, full.layers) == (KvGroupKind.FULL, (2, 8, 14, 20))
    assert (window.kind, window.layers, window.window_tokens) == (KvGroupKind.SLIDING_WINDOW, tuple(range(20)), 128)
    assert window.replay_rule is ReplayMode.BOUNDED
    assert (known.spec.model, known.spec.revision, known.spec.engine, known.spec.kv_dtype, known.spec.tenant) == (
        V41,
        "r1",
        "vllm",
        "fp4",
        "default",
    )


# What makes another namespace


def test_whatever_changes_the_bytes_or_the_replay_makes_another_namespace():
    specs = [
        preset(V41, revision="r1").spec,
        preset(V41, revision="r2").spec,
        preset(V41, revision="r1", tenant="acme").spec,
        preset(V41, revision="r1", kv_dtype="fp8").spec,
        preset(V41, revision="r1", engine="deepinfer").spec,
        preset(V41, revision="r1", engine="other", padding_bytes=768).spec,
        preset(V41, revision="r1", padding_bytes=0).spec,
        preset(V41, revision="r1", replay=ReplayMode.EXACT).spec,
        preset(V41, revision="r1", replay=ReplayMode.SNAPSHOT).spec,
    ]
    assert len({spec.digest() for spec in specs}) == len(specs)
    assert preset(V41, revision="r1").spec.digest() == specs[0].digest()


def test_the_layout_names_the_padding_that_the_block_size_does_not_show():
    assert preset(V41, revision="r1").spec.layout != preset(V41, revision="r1", padding_bytes=0).spec.layout


def test_as_much_padding_in_other_places_makes_another_namespace():
    paged, packed = preset(V41, revision="r1"), preset(V41, revision="r1", padding_bytes=768)
    assert paged.spec.block_bytes == packed.spec.block_bytes
    assert paged.layout != packed.layout
    assert paged.spec.digest() != packed.spec.digest()


@pytest.mark.parametrize("revision", ["", None])
def test_a_preset_needs_a_revision(revision):
    with pytest.raises(NamespaceSpecError, match="revision"):
        preset(V41, revision=revision)


def test_windows_cannot_be_left_without_a_rule():
    with pytest.raises(NamespaceSpecError, match="replay_rule is missing"):
        preset(V41, revision="r1", replay=ReplayMode.NONE)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("DeepSeek-V4.1-Flash", "did you mean 'deepseek-v4.1-flash'"),
        ("deepseek-v4-flash", "did you mean 'deepseek-v4.1-flash'"),
        ("llama", "no preset is called 'llama'; known are: deepseek-v4.1-flash"),
        ("../presets", "known are: deepseek-v4.1-flash"),
        ("", "known are"),
    ],
)
def test_an_unknown_preset_lists_the_known_ones(name, message):
    with pytest.raises(UnknownPresetError, match=message):
        preset(name, revision="r1")


@pytest.mark.parametrize(("keys", "key"), [({"kv_dtype": "bfloat16"}, "kv_dtype"), ({"engine": "mine"}, "engine")])
def test_an_unknown_format_or_padding_is_refused_by_name(keys, key):
    with pytest.raises(ModelConfigError, match=key) as raised:
        preset(V41, revision="r1", **keys)
    assert raised.value.key == key


def test_every_preset_can_be_made():
    for name in preset_names():
        preset(name, revision="r1").spec.validate()


# Properties of models that compress


@given(
    sources=st.sets(st.integers(0, 39), min_size=1, max_size=6),
    ratio=st.sampled_from([1, 2, 4, 8, 128]),
    head_dim=st.sampled_from([32, 64, 512]),
    kv_dtype=st.sampled_from(["fp4", "fp8"]),
    engine=st.sampled_from(["vllm", "deepinfer"]),
)
def test_parts_tile_the_block_and_the_engines_padding_is_the_rest(sources, ratio, head_dim, kv_dtype, engine):
    ids = sorted(sources)
    config = changed(
        preset_config(V41),
        kv_source_layer_ids=ids,
        index_source_layer_ids=ids,
        compress_ratios=[ratio] * 40,
        head_dim=head_dim,
    )
    kv = model_kv_layout(config, kv_dtype, engine=engine)
    offset = 0
    for part in kv.layout.parts:
        # vLLM pads in place, page by page; DeepInfer behind all parts.
        assert part.offset_bytes == (offset + -offset % 512 if engine == "vllm" else offset)
        offset = part.end_bytes
    assert kv.layout.layers == tuple(ids)
    assert kv.layout.padding_bytes == kv.block_bytes - sum(part.size_bytes for part in kv.layout.parts)
    assert kv.block_bytes - offset >= 0
    if engine == "deepinfer":
        assert kv.block_bytes % 576 == 0
        assert kv.layout.padding_bytes < 576
    else:
        assert kv.block_bytes % 512 == 0
        assert kv.layout.padding_bytes < 512 * 2 * len(ids)
    assert kv.window_layers == tuple(range(ids[-1]))


@pytest.mark.parametrize(
    ("keys", "block", "snapshot"),
    [
        ({"head_dim": 1024}, 1, 1),
        ({"index_head_dim": 256}, 1, 0),
        ({"compress_ratios": [1] * 43}, 1, 0),
        ({"compress_ratios": [4] * 43}, -1, 0),
        ({"kv_source_layer_ids": [2, 8, 20]}, -1, 0),
        ({"kv_source_layer_ids": [2, 8, 14]}, -1, -1),
        ({"sliding_window": 256}, 0, 1),
        ({"dspark_block_size": None}, 0, -1),
    ],
)
def test_a_change_of_the_configuration_moves_sizes_the_right_way(keys, block, snapshot):
    before, after = (model_kv_layout(changed(preset_config(V41), **extra)) for extra in ({}, keys))
    assert np.sign(after.block_bytes - before.block_bytes) == block
    assert np.sign(after.snapshot_bytes - before.snapshot_bytes) == snapshot


# Ordinary models


def test_smollm2_is_layer_after_layer_of_23040_bytes_a_token():
    kv = model_kv_layout(LLAMA)
    assert kv.block_bytes == 128 * 23_040
    assert kv.layout.range_of(7, 8) == (7 * 98_304, 2 * 98_304)
    assert (kv.kv_dtype, kv.window_layers, kv.snapshot_bytes) == ("bfloat16", (), 0)
    assert [(group.kind, group.layers) for group in kv.groups()] == [(KvGroupKind.FULL, tuple(range(30)))]


SIX = ["sliding_attention"] * 5 + ["full_attention"]


@pytest.mark.parametrize("keys", [{}, {"sliding_window_pattern": None, "layer_types": (SIX * 6)[:34]}])
def test_gemma3_keeps_every_sixth_layer_and_leaves_the_windows_out(keys):
    kv = model_kv_layout(changed(GEMMA3, **keys))
    per_token = 2 * 4 * 256 * 2
    assert kv.layout.layers == (5, 11, 17, 23, 29)
    assert kv.block_bytes == 5 * 128 * per_token
    assert kv.window_layers == tuple(layer for layer in range(34) if layer not in kv.layout.layers)
    assert kv.window_block_bytes == 29 * 128 * per_token
    assert kv.snapshot_bytes == 29 * 1024 * per_token
    assert kv.groups(ReplayMode.SNAPSHOT)[1].replay_rule is ReplayMode.SNAPSHOT


def test_latent_attention_keeps_one_vector_and_not_its_heads():
    assert model_kv_layout(LATENT).block_bytes == 61 * 128 * 576 * 2


@pytest.mark.parametrize(
    ("dtype", "factor"), [("float32", 4), ("float16", 2), ("fp8_e4m3", 1), ("fp8_e5m2", 1), ("int8", 1)]
)
def test_the_number_format_that_is_asked_for_counts_before_the_configurations(dtype, factor):
    assert model_kv_layout(LLAMA, dtype).block_bytes == 128 * 23_040 // 2 * factor


@pytest.mark.parametrize(
    ("keys", "window_layers"),
    [
        ({"sliding_window": None}, 0),
        ({"sliding_window": 512, "use_sliding_window": False}, 0),
        ({"sliding_window": 512, "max_window_layers": 28, "use_sliding_window": False}, 0),
        ({"sliding_window": 512, "max_window_layers": 28, "use_sliding_window": True}, 2),
        ({"sliding_window": 512, "layer_types": ["full_attention"] * 30}, 0),
        ({"sliding_window": 512, "layer_types": ["full_attention", "sliding_attention"] * 15}, 15),
        ({"sliding_window": 512, "sliding_window_pattern": 3}, 20),
    ],
)
def test_windows_are_where_the_configuration_says(keys, window_layers):
    kv = model_kv_layout(changed(LLAMA, **keys))
    assert (len(kv.window_layers), len(kv.layout.layers)) == (window_layers, 30 - window_layers)
    assert kv.window_tokens == (512 if window_layers else 0)


@pytest.mark.parametrize(
    ("config", "keys", "key"),
    [
        (LLAMA, {"num_hidden_layers": None}, "num_hidden_layers"),
        (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers"),
        (LLAMA, {"num_hidden_layers": "30"}, "num_hidden_layers"),
        (LLAMA, {"num_hidden_layers": True}, "num_hidden_layers"),
        (LLAMA, {"num_hidden_layers": 10**9}, "num_hidden_layers"),
        (LLAMA, {"head_dim": 10**400}, "head_dim"),
        (LLAMA, {"num_key_value_heads": None}, "num_key_value_heads"),
        (LLAMA, {"num_key_value_heads": 2}, "num_key_value_heads"),
        (LLAMA, {"hidden_size": None}, "hidden_size"),
        (LLAMA, {"hidden_size": 577}, "hidden_size"),
        (LLAMA, {"torch_dtype": None}, "kv_dtype"),
        (LLAMA, {"torch_dtype": "complex64"}, "kv_dtype"),
        (LLAMA, {"sliding_window": 512}, "layer_types"),
        (LLAMA, {"sliding_window": 512, "layer_types": ["full_attention"] * 29}, "layer_types"),
        (LLAMA, {"layer_types": ["linear_attention"] * 30}, "layer_types"),
        (LLAMA, {"layer_types": ["sliding_attention", "full_attention"] * 15}, "sliding_window"),
        (LLAMA, {"sliding_window": 512, "layer_types": ["sliding_attention"] * 30}, "sliding_window"),
        (LLAMA, {"attention_chunk_size": 8192}, "attention_chunk_size"),
        (LLAMA, {"compress_ratios": [4] * 30}, "compress_ratios"),
        (LATENT, {"index_head_dim": 128}, "index_head_dim"),
        (LATENT, {"qk_rope_head_dim": None}, "qk_rope_head_dim"),
        (GEMMA3, {"head_dim": None, "hidden_size": 2560}, "head_dim"),  # 256 there, not 2560 ÷ 8
        (preset_config(V41), {"head_dim": None}, "head_dim"),
        (preset_config(V41), {"head_dim": 500}, "head_dim"),
        (preset_config(V41), {"index_head_dim": None}, "index_head_dim"),
        (preset_config(V41), {"index_head_dim": 40}, "index_head_dim"),
        (preset_config(V41), {"num_key_value_heads": 8}, "num_key_value_heads"),
        (preset_config(V41), {"sliding_window": None}, "sliding_window"),
        (preset_config(V41), {"compress_ratios": None}, "compress_ratios"),
        (preset_config(V41), {"compress_ratios": [2] * 39}, "compress_ratios"),
        (preset_config(V41), {"compress_ratios": [0] * 43}, "compress_ratios"),
        (preset_config(V41), {"compress_ratios": [3] * 43}, "compress_ratios"),
        (preset_config(V41), {"kv_source_layer_ids": [8, 2]}, "kv_source_layer_ids"),
        (preset_config(V41), {"kv_source_layer_ids": [2, 40]}, "kv_source_layer_ids"),
        (preset_config(V41), {"kv_source_layer_ids": 2}, "kv_source_layer_ids"),
        (preset_config(V41), {"index_source_layer_ids": [2, 8, 14]}, "index_source_layer_ids"),
    ],
)
def test_a_missing_or_contradictory_key_is_named(config, keys, key):
    with pytest.raises(ModelConfigError, match=key) as raised:
        model_kv_layout(changed(config, **keys))
    assert raised.value.key == key


@pytest.mark.parametrize(("config", "key"), [([], "config"), ({"text_config": 3}, "text_config")])
def test_what_is_no_configuration_at_all_is_told(config, key):
    with pytest.raises(ModelConfigError) as raised:
        model_kv_layout(config)
    assert raised.value.key == key


@pytest.mark.parametrize("config", [LLAMA, preset_config(V41)])
def test_padding_is_never_negative(config):
    with pytest.raises(ModelConfigError, match="is -1; wanted is 0 or more") as raised:
        model_kv_layout(config, padding_bytes=-1)
    assert raised.value.key == "padding_bytes"
