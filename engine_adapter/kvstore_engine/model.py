"""The Llama architecture in plain torch, reading and writing paged KV.

Any layers may be given a sliding window. A window layer's token at position p sees [p - W + 1, p] and nothing before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore_engine.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """What distinguishes one Llama-architecture model from another, besides its weights.

    Attributes:
        window_tokens: W of the sliding window in `window_layers`, the token itself included; 0 without such layers.
        window_layers: layers, ascending, that see a window only; at least one layer sees everything.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_positions: int
    window_tokens: int = 0
    window_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads cannot share {self.kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ValueError(f"rotary embedding pairs dimensions, so head_dim {self.head_dim} must be even")
        check_windows(self.layers, self.window_layers, self.window_tokens)


def check_windows(layers: int, window_layers: Sequence[int], window_tokens: int) -> None:
    """Raises: ValueError: these cannot be the window layers of a model with `layers` layers."""
    if list(window_layers) != sorted(set(window_layers)) or not all(0 <= layer < layers for layer in window_layers):
        raise ValueError(f"window_layers {tuple(window_layers)} must be ascending, without repetition, below {layers}")
    if window_tokens < 0 or (window_tokens > 0) != bool(window_layers):
        raise ValueError(f"window_tokens {window_tokens} does not fit {len(window_layers)} window layers")
    if len(window_layers) == layers:
        raise ValueError(f"all {layers} layers have a window: nothing of such a model's KV is worth storing")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Matrices are (out, in); rows of `qkv` are all queries, then all keys, then all values."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    attention_out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """All weights of a model. With tied embeddings `lm_head` is the very tensor `embedding`."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    lm_head: torch.Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive new tokens of one sequence within a forward pass.

    Attributes:
        block_ids: the sequence's KV blocks, enough for start + length tokens.
        start: absolute position of the first new token. The KV of all before it is in the blocks, but for window layers
            before `window_start`.
        window_start: position from which on window layers have KV; nothing before it is read.
        kept_until: the full layers' KV of tokens before it is there already. New tokens below it read that, and do not
            write their own: they are computed for the window layers' sake only.
    """

    block_ids: Sequence[int]
    start: int
    length: int
    window_start: int = 0
    kept_until: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.window_start <= self.start:
            raise ValueError(f"window KV from token {self.window_start} on leaves a gap before token {self.start}")

    @property
    def end(self) -> int:
        """Absolute position behind the last new token."""
        return self.start + self.length


def random_weights(config: LlamaConfig, seed: int, *, tied: bool = True) -> LlamaWeights:
    """Float32 weights drawn from `seed`: a model that computes everything a real one does, and says nothing."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        # Scaled by fan-in, so that activations keep their size and attention is neither flat nor saturated.
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    def norm() -> torch.Tensor:
        return 1 + 0.1 * torch.randn(config.hidden_size, generator=generator)

    query_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
    embedding = matrix(config.vocab_size, config.hidden_size)
    layers = tuple(
        LayerWeights(
            attention_norm=norm(),
            qkv=matrix(query_size + 2 * kv_size, config.hidden_size),
            attention_out=matrix(config.hidden_size, query_size),
            mlp_norm=norm(),
            gate_up=matrix(2 * config.intermediate_size, config.hidden_size),
            down=matrix(config.hidden_size, config.intermediate_size),
        )
        for _ in range(config.layers)
    )
    lm_head = embedding if tied else matrix(config.vocab_size, config.hidden_size)
    return LlamaWeights(embedding, layers, norm(), lm_head)


class Llama:
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    def __init__(self, config: LlamaConfig, weights: LlamaWeights) -> None:
        if len(weights.layers) != config.layers:
            raise ValueError(f"config says {config.layers} layers, weights have {len(weights.layers)}")
        self.config = config
        self.weights = weights
        self._cos, self._sin = _rotary_tables(config)
        self._window_layers = frozenset(config.window_layers)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Sequence[int],
        spans: Sequence[Span],
        pool: KVPool,
        *,
        before_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Run new tokens through all layers and put their KV into the pool.

        Args:
            token_ids: the new tokens of all spans, one span after the other.
            spans: one long span for a prefill chunk, several of length 1 for a batched decode, or a mixture.
            before_layer: called with each layer's number before its KV is read. What it raises ends the pass; the KV of
                the new tokens is then undefined from that layer on.
        Returns: shape (len(token_ids), hidden_size), normalised and ready for `logits`.
        """
        positions = torch.cat([torch.arange(span.start, span.end) for span in spans])
        cos, sin = self._cos[positions, None], self._sin[positions, None]
        everything = [_view(span, pool.dtype, 0) for span in spans]
        windows = [_view(span, pool.dtype, self.config.window_tokens) for span in spans] if self._window_layers else []
        hidden = F.embedding(torch.tensor(token_ids), self.weights.embedding)
        for layer, weights in enumerate(self.weights.layers):
            if before_layer is not None:
                before_layer(layer)
            views = windows if layer in self._window_layers else everything
            normed = self._norm(hidden, weights.attention_norm)
            query, key, value = self._project(normed, weights.qkv)
            query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
            attended = _paged_attention(layer, query, key, value, views, pool)
            hidden = hidden + F.linear(attended, weights.attention_out)
            normed = self._norm(hidden, weights.mlp_norm)
            gate, up = F.linear(normed, weights.gate_up).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate) * up, weights.down)
        return self._norm(hidden, self.weights.final_norm)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of the next token in float32: (..., hidden_size) -> (..., vocab_size)."""
        return F.linear(hidden, self.weights.lm_head).float()

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * _unit_rms(hidden.float(), self.config.rms_norm_eps).to(hidden.dtype)

    def _project(self, hidden: torch.Tensor, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries (T, heads, head_dim); keys and values (T, kv_heads, head_dim)."""
        config = self.config
        heads = F.linear(hidden, qkv).view(-1, config.heads + 2 * config.kv_heads, config.head_dim)
        query, key, value = torch.split(heads, [config.heads, config.kv_heads, config.kv_heads], dim=1)
        return query, key, value


def _rotary_tables(config: LlamaConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of every position's angles, each (max_positions, head_dim / 2), float32."""
    exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    angles = torch.outer(torch.arange(config.max_positions).float(), 1.0 / config.rope_theta**exponents)
    return angles.cos(), angles.sin()


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions to (T, heads, head_dim), pairing dimension i with i + head_dim / 2; in float32."""
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)


def _unit_rms(hidden: torch.Tensor, eps: float) -> torch.Tensor:
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + eps)


@dataclass(frozen=True, slots=True)
class _View:
    """What a span's tokens see in one kind of layer, and what they leave there."""

    span: Span
    first: int  # the first position whose KV is read; the last is the span's last
    written_from: int  # the first position whose KV is written
    mask: torch.Tensor | None  # (length, end - first), -inf where nothing is seen; None when all is


def _view(span: Span, dtype: torch.dtype, window_tokens: int) -> _View:
    """A span in a full layer, or in a window layer if `window_tokens` is not 0.

    What is before the window of all the span's tokens is not read at all, rather than masked: after a load it is garbage,
    and zero times NaN is NaN.
    """
    if not window_tokens:
        return _View(span, 0, max(span.start, min(span.kept_until, span.end)), _mask(span, 0, dtype))
    first = max(span.window_start, span.start - window_tokens + 1)
    return _View(span, first, span.start, _mask(span, first, dtype, window_tokens))


def _mask(span: Span, first: int, dtype: torch.dtype, window_tokens: int = 0) -> torch.Tensor | None:
    if span.length == 1:
        return None
    shape = (span.length, span.end - first)
    blocked = torch.full(shape, float("-inf"), dtype=dtype).triu(diagonal=span.start - first + 1)
    if window_tokens:
        too_old = torch.ones(shape, dtype=torch.bool).tril(diagonal=span.start - first - window_tokens)
        blocked.masked_fill_(too_old, float("-inf"))
    return blocked


def _paged_attention(
    layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, views: Sequence[_View], pool: KVPool
) -> torch.Tensor:
    """Store the new keys and values, then let each span attend to its own sequence: (T, heads * head_dim).

    Queries are converted to the pool's dtype, so keys and values are read exactly as a store would return them: a
    prefix computed here and one loaded cannot differ.
    """
    outputs, row = [], 0
    for view in views:
        span = view.span
        rows = slice(row, row + span.length)
        new = slice(row + view.written_from - span.start, row + span.length)
        pool.write(layer, span.block_ids, view.written_from, key[new], value[new])
        keys, values = pool.gather(layer, span.block_ids, span.end, first=view.first)
        attended = F.scaled_dot_product_attention(
            query[rows].transpose(0, 1).to(pool.dtype)[None],
            keys[None],
            values[None],
            attn_mask=view.mask,
            enable_gqa=True,
        )
        outputs.append(attended[0].transpose(0, 1).flatten(1))
        row += span.length
    return torch.cat(outputs).to(query.dtype)
