"""Engines with a tiny model, each with memory and a prefix cache of its own, as in processes of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvstore_client import ClientConfig, KVStoreClient
from kvstore_engine.benefit import MinimumHit
from kvstore_engine.engine import Engine
from kvstore_engine.kv_pool import BLOCK_TOKENS, KVPool
from kvstore_engine.model import Llama, LlamaConfig, random_weights
from kvstore_engine.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore_engine.engine import Generation, Request
    from kvstore_engine.model import Span
    from kvstore_engine.sampling import SamplingParams

CONFIG = LlamaConfig(
    vocab_size=211,
    hidden_size=32,
    intermediate_size=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    rope_theta=10_000.0,
    rms_norm_eps=1e-5,
    max_positions=2048,
)
# Untied: with tied embeddings a random model mostly repeats its last token, which hides mistakes.
WEIGHTS = random_weights(CONFIG, seed=5, tied=False)
PATIENCE_S = 60


class CountingLlama(Llama):
    """The model, with a count of the tokens it computed."""

    computed_tokens = 0

    def forward(self, token_ids: Sequence[int], spans: Sequence[Span], pool: KVPool, **options: Any) -> torch.Tensor:
        self.computed_tokens += len(token_ids)
        return super().forward(token_ids, spans, pool, **options)


def make_pool(config: LlamaConfig = CONFIG, num_blocks: int = 16) -> KVPool:
    """Memory that starts as NaN: reading KV that nobody computed or loaded spoils everything after."""
    pool = KVPool.for_model(config, num_blocks=num_blocks)
    pool.kv.fill_(float("nan"))
    pool.window_kv.fill_(float("nan"))
    return pool


class Node:
    """An engine that uses every hit: this model computes faster than any store brings."""

    def __init__(self, handle: Any, *, config: LlamaConfig = CONFIG, num_blocks: int = 16, **options: Any) -> None:
        self.model = CountingLlama(config, WEIGHTS)
        self.pool = make_pool(config, num_blocks)
        self.cache = PrefixCache(
            handle, block_tokens=BLOCK_TOKENS, block_bytes=handle.block_bytes, benefit=MinimumHit(1)
        )
        self.engine = Engine(self.model, self.pool, prefix_cache=self.cache, **options)

    def until(self, request: Request, output_tokens: int) -> Request:
        """Let it go on until it has so many new tokens."""
        while len(request.output) < output_tokens:
            self.engine.step()
        return request

    def finish(self, request: Request) -> Generation:
        """Let it go on to its end, and wait for what is saved of it."""
        while request.generation is None:
            self.engine.step()
        assert self.cache.flush(PATIENCE_S)
        return request.generation


class Without:
    """A namespace handle that lacks some of its calls' effects; all other calls are the real one's."""

    def __init__(self, real: Any, **replaced: Callable[..., Any]) -> None:
        self._real = real
        self._replaced = replaced

    def __getattr__(self, name: str) -> Any:
        return self._replaced.get(name) or getattr(self._real, name)


def patient_client(target: str) -> KVStoreClient:
    """A busy machine must not turn a hit into a miss in a test; what is down is refused at once all the same."""
    return KVStoreClient(ClientConfig(target=target, base_budget_s=PATIENCE_S, connect_timeout_s=PATIENCE_S))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random tokens."""
    return torch.randint(0, 211, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def undisturbed(prompt: Sequence[int], params: SamplingParams, config: LlamaConfig = CONFIG) -> list[int]:
    """What an engine says that nothing is stored for and nothing taken from."""
    return Engine(Llama(config, WEIGHTS), make_pool(config)).generate(prompt, params).tokens
