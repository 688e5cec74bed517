"""What a model's KV looks like in a store, computed from its configuration: the parts of a block, and the windows beside it.

Ordinary models (Llama, Qwen, Gemma 3): keys and values of `num_key_value_heads` heads of `head_dim` per layer and token, or with
`kv_lora_rank` one latent vector. Layers with full attention are in the block; layers with a sliding window are not.

Models of DeepSeek-V4.1's kind: the layers `kv_source_layer_ids` keep compressed KV for themselves and the layers after them, one
entry per `compress_ratios[layer]` tokens. An entry is a vector of `head_dim` values and an index key of `index_head_dim` values:

    main KV, NVFP4    512 values of 4 bits + 1 scale byte per 16    288 B
    main KV, MXFP8    512 values of 8 bits + 1 scale byte per 32    528 B
    index key, MXFP4  128 values of 4 bits + 1 scale byte per 32     68 B

That makes 356 B an entry with FP4, and 890 B a token over the four sources, as published. vLLM's pull requests 56893 and 48993
document the MXFP8 and MXFP4 records; 16 values a scale is what 356 B leaves for NVFP4, and that format's usual group.

Beside that, each layer has a window of `sliding_window` tokens, one MXFP8 vector (528 B) a token. A snapshot holds the windows of
the layers before the last KV source: the layers after it compute theirs from that source's KV again for every prompt. It has room
for the window and for a speculative step, `dspark_block_size` + 1 tokens: 20 layers of 134 slots, as published.

Engines pad: vLLM each page, which is one layer's main KV or index keys of a block, to 512 B; DeepInfer the whole block to 576 B.
(The first is in vLLM's sources; the second is derived from the one published size, 114,048 B.) In a store's block the layers stand
in order with their padding where the engine has it: a copy of the engine's pages, one after the other, is a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore_api.limits import BLOCK_TOKENS
from kvstore_api.namespace import KvGroup, KvGroupKind, ReplayMode
from kvstore_client.layout import BlockLayout, BlockPart
from kvstore_client.model_config import ModelConfig, ModelConfigError
from kvstore_client.number_formats import MXFP4, MXFP8, NVFP4, PLAIN_FORMATS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstore_client.number_formats import NumberFormat

FULL_GROUP = "full"
WINDOW_GROUP = "window"  # and the name of its snapshots, which are state objects

VLLM, DEEPINFER = "vllm", "deepinfer"
_VLLM_PAGE_BYTES = 512
_DEEPINFER_BLOCK_BYTES = 576

_COMPRESSED_FORMATS = {"fp4": NVFP4, "fp8": MXFP8}
_INDEX_FORMAT = MXFP4
_COMPRESSED_WINDOW_FORMAT = MXFP8

# Keys of models whose KV is of another kind; to take them for ordinary ones would give wrong sizes without a word.
_OTHER_KINDS = (
    "attention_chunk_size",
    "attn_layer_period",
    "compress_rates",
    "compress_ratios",
    "full_attention_interval",
    "global_head_dim",
    "hybrid_override_pattern",
    "index_head_dim",
    "is_encoder_decoder",
    "linear_attn_config",
    "mamba_d_state",
    "num_kv_shared_layers",
    "ssm_cfg",
    "ssm_state_size",
)


@dataclass(frozen=True, slots=True)
class ModelKv:
    """A model's KV as a store sees it.

    Attributes:
        layout: of a block: the layers that attend to everything before them.
        layout_name: what the bytes of a block mean: a name with a version, and the padding.
        kv_dtype: the number format of a block's KV.
        window_layers: layers whose window KV is needed to resume, and is not in the block; ascending, may be empty.
        window_tokens: how far back they look; 0 when there are none.
        window_slots: tokens that a snapshot has room for, per layer.
        window_token_bytes: window KV of one token in one layer.
    """

    layout: BlockLayout
    layout_name: str
    kv_dtype: str
    window_layers: tuple[int, ...]
    window_tokens: int
    window_slots: int
    window_token_bytes: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of 128 tokens, padding included."""
        return self.layout.block_bytes

    @property
    def window_block_bytes(self) -> int:
        """Bytes of the window KV of 128 tokens in all window layers: what a block would take in addition, were it stored."""
        return len(self.window_layers) * BLOCK_TOKENS * self.window_token_bytes

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of one snapshot of all window layers; 0 when there are none."""
        return len(self.window_layers) * self.window_slots * self.window_token_bytes

    def groups(self, replay: ReplayMode = ReplayMode.BOUNDED) -> tuple[KvGroup, ...]:
        """The namespace's KV groups. `replay` says how windows come back after a hit: BOUNDED, EXACT or SNAPSHOT."""
        full = KvGroup(FULL_GROUP, KvGroupKind.FULL, self.layout.layers)
        if not self.window_layers:
            return (full,)
        window = KvGroup(WINDOW_GROUP, KvGroupKind.SLIDING_WINDOW, self.window_layers, self.window_tokens, replay)
        return full, window


def model_kv_layout(
    config: Mapping[str, object], kv_dtype: str | None = None, *, engine: str = VLLM, padding_bytes: int | None = None
) -> ModelKv:
    """Compute a model's KV from its configuration.

    Args:
        config: as in a Hugging Face config.json. Multimodal ones have the language model's keys in `text_config`.
        kv_dtype: the KV's number format. Ordinary models: float32, bfloat16, float16, fp8_e4m3, fp8_e5m2 or int8, by default
            what `dtype` or `torch_dtype` says. Models with `kv_source_layer_ids`: fp4 (the default) or fp8.
        engine: whose padding; it is known for "vllm" and "deepinfer". Blocks of ordinary models have none.
        padding_bytes: of a block, for any other engine.
    Raises: ModelConfigError: a key is missing, impossible, contradicts another, or tells of KV of another kind; names the key.
    """
    if padding_bytes is not None and padding_bytes < 0:
        raise ModelConfigError("padding_bytes", f"is {padding_bytes}; wanted is 0 or more")
    reader = ModelConfig(config)
    if reader.has("kv_source_layer_ids"):
        return _compressed(reader, kv_dtype or "fp4", engine, padding_bytes)
    for key in _OTHER_KINDS:
        if reader.has(key):
            raise ModelConfigError(
                key, "tells of a kind of KV that is not known here; give NamespaceSpec its sizes yourself"
            )
    return _ordinary(reader, kv_dtype, padding_bytes or 0)


def _named(name: str, padding: str) -> str:
    return f"{name}/1+{padding}"


def _pads_pages(engine: str, padding_bytes: int | None) -> bool:
    """Whether the padding is between the parts of a block; else all of it is at the end."""
    return padding_bytes is None and engine == VLLM


def _format(formats: Mapping[str, NumberFormat], kv_dtype: str) -> NumberFormat:
    if kv_dtype not in formats:
        raise ModelConfigError("kv_dtype", f"is {kv_dtype!r}; wanted is one of {', '.join(formats)}")
    return formats[kv_dtype]


def _vector_bytes(form: NumberFormat, key: str, values: int) -> int:
    try:
        return form.vector_bytes(values)
    except ValueError as error:
        raise ModelConfigError(key, f"is {values}: {error}") from None


def _compressed(config: ModelConfig, kv_dtype: str, engine: str, padding_bytes: int | None) -> ModelKv:
    head_dim, index_dim = config.number("head_dim"), config.number("index_head_dim")
    if config.number("num_key_value_heads", default=1) != 1:
        raise ModelConfigError(
            "num_key_value_heads", "is not 1, which contradicts kv_source_layer_ids: entries have one head"
        )
    main_bytes = _vector_bytes(_format(_COMPRESSED_FORMATS, kv_dtype), "head_dim", head_dim)
    index_bytes = _vector_bytes(_INDEX_FORMAT, "index_head_dim", index_dim)
    entries = _entries_per_block(config)
    pages = {layer: (count * main_bytes, count * index_bytes) for layer, count in entries.items()}
    layout = _padded_layout(pages, engine, padding_bytes)
    # As many bytes between the parts and behind them would be two layouts of one size.
    padding = f"page{_VLLM_PAGE_BYTES}" if _pads_pages(engine, padding_bytes) else f"pad{layout.padding_bytes}"
    window_tokens, draft_tokens = config.number("sliding_window"), config.number("dspark_block_size", default=0)
    return ModelKv(
        layout=layout,
        layout_name=_named(f"kv-sources-{_INDEX_FORMAT.name}-index", padding),
        kv_dtype=kv_dtype,
        window_layers=tuple(range(max(entries))),
        window_tokens=window_tokens,
        window_slots=window_tokens + (draft_tokens + 1 if draft_tokens else 0),
        window_token_bytes=_vector_bytes(_COMPRESSED_WINDOW_FORMAT, "head_dim", head_dim),
    )


def _entries_per_block(config: ModelConfig) -> dict[int, int]:
    """How many entries each KV source has for 128 tokens."""
    layers = config.layer_count()
    sources = config.layer_ids("kv_source_layer_ids", layers)
    if not set(sources) <= set(config.layer_ids("index_source_layer_ids", layers)):
        raise ModelConfigError("index_source_layer_ids", f"leaves out some of kv_source_layer_ids, {sources}")
    ratios = config.numbers("compress_ratios", at_least=layers)  # draft layers may follow
    for layer in sources:
        if ratios[layer] == 0 or BLOCK_TOKENS % ratios[layer]:
            raise ModelConfigError(
                "compress_ratios",
                f"has {ratios[layer]} for layer {layer} of kv_source_layer_ids; wanted is a divisor of {BLOCK_TOKENS}",
            )
    return {layer: BLOCK_TOKENS // ratios[layer] for layer in sources}


def _padded_layout(pages: Mapping[int, Sequence[int]], engine: str, padding_bytes: int | None) -> BlockLayout:
    """Each layer's pages, given by their bytes, in order, padded as the engine does; or packed, with so much padding behind."""
    if _pads_pages(engine, padding_bytes):
        return _page_by_page(pages)
    sizes = [(layer, sum(layer_pages)) for layer, layer_pages in pages.items()]
    if padding_bytes is None:
        if engine != DEEPINFER:
            raise ModelConfigError(
                "engine", f"is {engine!r}, whose padding is not known; give padding_bytes, or {VLLM} or {DEEPINFER}"
            )
        padding_bytes = -sum(size for _, size in sizes) % _DEEPINFER_BLOCK_BYTES
    return BlockLayout.packed(sizes, padding_bytes=padding_bytes)


def _page_by_page(pages: Mapping[int, Sequence[int]]) -> BlockLayout:
    parts, offset = [], 0
    for layer, layer_pages in pages.items():
        start = offset
        for page_bytes in layer_pages:
            end = offset + page_bytes
            offset = end + -end % _VLLM_PAGE_BYTES
        parts.append(BlockPart((layer,), start, end - start))
    return BlockLayout(tuple(parts), offset)


def _ordinary(config: ModelConfig, kv_dtype: str | None, padding_bytes: int) -> ModelKv:
    layers = config.layer_count()
    dtype = kv_dtype or _config_dtype(config)
    token_bytes = _vector_bytes(_format(PLAIN_FORMATS, dtype), "head_dim", _values_per_token(config))
    window_layers = _window_layers(config, layers)
    full_layers = [layer for layer in range(layers) if layer not in window_layers]
    if not full_layers:
        raise ModelConfigError(
            "sliding_window", "holds for every layer: nothing is left that could be stored in blocks"
        )
    window_tokens = config.number("sliding_window") if window_layers else 0
    return ModelKv(
        layout=BlockLayout.uniform(full_layers, BLOCK_TOKENS * token_bytes, padding_bytes),
        layout_name=_named("layer-major", f"pad{padding_bytes}"),
        kv_dtype=dtype,
        window_layers=window_layers,
        window_tokens=window_tokens,
        window_slots=window_tokens,
        window_token_bytes=token_bytes if window_layers else 0,
    )


def _config_dtype(config: ModelConfig) -> str:
    dtype = (config.text("dtype") or config.text("torch_dtype")).removeprefix("torch.")
    if not dtype:
        raise ModelConfigError("kv_dtype", "is not given, and the configuration has neither dtype nor torch_dtype")
    return dtype


def _values_per_token(config: ModelConfig) -> int:
    """Values that one layer keeps of one token."""
    if config.has("kv_lora_rank"):  # latent attention: one vector, and the rotary part of the key
        return config.number("kv_lora_rank") + config.number("qk_rope_head_dim")
    head_dim = _head_dim(config)
    value_dim = config.number("v_head_dim", default=head_dim)
    kv_heads = config.number("num_key_value_heads")
    heads = config.number("num_attention_heads", default=kv_heads)
    if heads % kv_heads:
        raise ModelConfigError("num_key_value_heads", f"is {kv_heads}, no divisor of num_attention_heads, {heads}")
    return kv_heads * (head_dim + value_dim)


def _head_dim(config: ModelConfig) -> int:
    # In Gemma's the default is a constant of each generation, so it cannot be computed.
    if config.has("head_dim") or config.text("model_type").startswith("gemma"):
        return config.number("head_dim")
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    if hidden % heads:
        raise ModelConfigError(
            "hidden_size", f"is {hidden}, no multiple of num_attention_heads, {heads}; give head_dim"
        )
    return hidden // heads


def _window_layers(config: ModelConfig, layers: int) -> tuple[int, ...]:
    """Layers with a sliding window, by whichever key says so."""
    if config.has("layer_types"):
        return _from_layer_types(config, layers)
    if not config.has("sliding_window") or config.is_off("use_sliding_window"):
        return ()
    if config.has("sliding_window_pattern"):  # every n-th layer attends to everything
        pattern = config.number("sliding_window_pattern")
        return tuple(layer for layer in range(layers) if (layer + 1) % pattern)
    if config.has("max_window_layers"):  # every layer from that one on
        return tuple(range(config.number("max_window_layers"), layers))
    raise ModelConfigError(
        "layer_types", "is missing, and so is sliding_window_pattern; which layers have the sliding_window?"
    )


def _from_layer_types(config: ModelConfig, layers: int) -> tuple[int, ...]:
    types = config.items("layer_types")
    if len(types) != layers:
        raise ModelConfigError(
            "layer_types", f"has {len(types)} entries, which contradicts num_hidden_layers, {layers}"
        )
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelConfigError("layer_types", f"has {kind!r}; known are full_attention and sliding_attention")
    return tuple(layer for layer, kind in enumerate(types) if kind == "sliding_attention")
