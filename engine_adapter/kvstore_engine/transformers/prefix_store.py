"""`generate()` that begins from a stored prefix and stores what it has computed."""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import torch

from kvstore_api.limits import BLOCK_TOKENS
from kvstore_client import KVStoreClient
from kvstore_engine.hook import Ownership, RequestContext
from kvstore_engine.plug_settings import PlugSettings
from kvstore_engine.prefix_cache import PrefixCache
from kvstore_engine.transformers.calls import why_not_served
from kvstore_engine.transformers.identity import Unchanged, namespace_spec
from kvstore_engine.transformers.kv_cache import ReadableCache, cache_argument
from kvstore_engine.transformers.modules import forget_positions, why_changed_modules
from kvstore_engine.transformers.probe import probe

if TYPE_CHECKING:
    from types import TracebackType

    from transformers import GenerationConfig, PreTrainedModel

    from kvstore_engine.prefix_cache_stats import PrefixCacheStats

# How long the end of a program waits for what it has computed to be stored.
FLUSH_S: Final = 10.0
# Ten times what an engine gives: nobody else waits for this call, and its computing keeps the cores that a store beside it needs.
BASE_BUDGET_S: Final = 0.5
_PART_BYTES: Final = 64 << 20  # of a save

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LastCall:
    """What the store was to one call.

    Attributes:
        prompt_tokens: of the call.
        hit_tokens: the leading ones whose KV was loaded instead of computed.
        offered_tokens: tokens in the blocks that were handed over to be stored.
        bypassed: why the store had no part in it; empty if it had.
    """

    prompt_tokens: int = 0
    hit_tokens: int = 0
    offered_tokens: int = 0
    bypassed: str = ""


class PrefixStore:
    """A causal language model of `transformers` with a store of prefix KV.

    A call that a stored prefix cannot serve is the model's alone (`last.bypassed` says why). So is a call whose store is away:
    it takes no longer than the client's budgets allow. One call at a time.
    """

    def __init__(self, model: PreTrainedModel, /, **settings: object) -> None:
        """Run the model on a few tokens to see what its KV is, fingerprint its weights, and tell the store.

        A store that does not answer is no obstacle: calls compute everything until it does.

        Args:
            model: as it is going to be used. After changing its weights, make another store.
            settings: those of `ClientConfig`, such as `target="127.0.0.1:7420"`, and of `PlugSettings`: `model`, `revision`,
                `tenant`, `traffic_class`, `min_hit_tokens`, `max_pending_save_bytes`. `base_budget_s` is 0.5 here if not given.
        Raises:
            KVStoreConfigError: INVALID_CONFIG: a setting is unknown or impossible. UNSUPPORTED_MODEL: its KV is not that of its
                tokens alone. IDENTITY_UNKNOWN: its weights cannot be read, and no revision is given. Others: the store refuses.
            NamespaceSpecError: the KV of 128 tokens is too large for a block.
        """
        self._settings = PlugSettings.read({"base_budget_s": BASE_BUDGET_S, **settings})
        self._layout = probe(model)
        self._model = model
        self._unchanged = Unchanged(model)
        self._client = KVStoreClient(self._settings.client)
        try:
            self._cache = self._connect()
        except BaseException:
            self._client.close()
            raise
        self._bypassed: Counter[str] = Counter()
        self._last = LastCall()
        self._close = weakref.finalize(self, _close, self._cache, self._client)

    def _connect(self) -> PrefixCache:
        return PrefixCache.connect(
            self._client,
            namespace_spec(self._model, self._layout, self._settings),
            block_tokens=BLOCK_TOKENS,
            block_bytes=self._layout.block_bytes,
            benefit=self._settings.benefit(),
            max_pending_save_bytes=self._settings.max_pending_save_bytes,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Store what is still to be stored, for at most 10 s, and end. Happens by itself at the end of the program. Idempotent.

        Calls of `generate` afterwards are the model's alone.
        """
        self._close()

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Wait until all that was offered is stored, or is given up. Returns: whether that is so after `timeout_s`."""
        return self._cache.flush(timeout_s)

    @property
    def last(self) -> LastCall:
        """About the last call of `generate`."""
        return self._last

    @property
    def bypassed(self) -> dict[str, int]:
        """Reason -> calls of `generate` that the store had no part in."""
        return dict(self._bypassed)

    def stats(self) -> PrefixCacheStats:
        """Counts since this was made: blocks hit, loaded and saved, and why others were not."""
        return self._cache.stats()

    def generate(
        self,
        input_ids: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        salt: bytes = b"",
        **given: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """`model.generate`, begun from the longest stored prefix; new full blocks are stored behind the caller.

        Args:
            input_ids, generation_config: as `model.generate` takes them. Input other than (1, tokens) is the model's alone.
            salt: separates calls that must not share KV.
            given: all else that it takes.
        Returns: what `model.generate` returns.
        Raises: what `model.generate` raises; nothing for trouble with the store.
        """
        if not isinstance(salt, bytes):
            raise TypeError(f"salt is of type {type(salt).__name__}, wanted are bytes")
        if generation_config is not None:
            given["generation_config"] = generation_config
        if input_ids is None or (reason := self._why_not(input_ids, given)):
            reason = reason if input_ids is not None else "no input_ids of two dimensions"
            self._note_bypass(reason)
            prompt = {} if input_ids is None else {"input_ids": input_ids}
            self._last = LastCall(bypassed=reason)
            return self._model.generate(**prompt, **given)
        return self._generate(
            input_ids, RequestContext(salt, traffic_class=self._settings.traffic_class or None), given
        )

    def _why_not(self, input_ids: torch.Tensor, given: dict[str, Any]) -> str:
        if not self._close.alive:
            return "the store is closed"
        if reason := why_not_served(self._model, input_ids, given) or why_changed_modules(self._model):
            return reason
        return (
            ""
            if self._unchanged.is_still(self._model)
            else "the model is not what it was when its PrefixStore was made"
        )

    def _note_bypass(self, reason: str) -> None:
        if reason not in self._bypassed:
            _LOGGER.warning("a call of generate() goes past the store: %s; this is not logged again", reason)
        self._bypassed[reason] += 1

    def _generate(self, input_ids: torch.Tensor, context: RequestContext, given: dict[str, Any]) -> Any:  # noqa: ANN401
        prompt = input_ids[0].tolist()
        cache, hit_blocks = self._load(prompt, context)
        hit_tokens = hit_blocks * BLOCK_TOKENS
        self._last = LastCall(len(prompt), hit_tokens)
        self._time_prefill(cache, len(prompt) - hit_tokens)
        forget_positions(self._model)
        output = self._model.generate(input_ids=input_ids, **given, **{cache_argument(self._model): cache})
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        saved_blocks = self._save(sequences[0].tolist(), hit_blocks, context, cache)
        self._last = LastCall(len(prompt), hit_tokens, saved_blocks * BLOCK_TOKENS)
        return output

    def _load(self, prompt: list[int], context: RequestContext) -> tuple[ReadableCache, int]:
        """Returns: a cache for the prompt, and how many blocks of what is stored are in it."""
        cache = ReadableCache(self._model)
        try:
            return cache, self._fill(cache, prompt, context)
        except RuntimeError as error:  # no room, in host memory or on the device
            _LOGGER.warning("a stored prefix cannot be loaded, and is computed: %s", error)
            return ReadableCache(self._model), 0

    def _fill(self, cache: ReadableCache, prompt: list[int], context: RequestContext) -> int:
        blocks = self._cache.usable_blocks(len(prompt))
        # Takes no memory before something is written there.
        memory = torch.empty((blocks, self._layout.block_bytes), dtype=torch.uint8)
        load = self._cache.start_load(prompt, context, [memoryview(block.numpy()) for block in memory])
        hit_blocks = load.wait().hit_blocks
        if hit_blocks:
            with torch.no_grad():
                self._layout.fill(cache, memory[:hit_blocks])
        return hit_blocks

    def _time_prefill(self, cache: ReadableCache, tokens: int) -> None:
        began = time.monotonic()

        def note() -> None:
            if self._layout.device_types != "cpu":
                torch.accelerator.synchronize()  # else only the giving of orders would be measured
            self._cache.note_prefill(tokens, time.monotonic() - began)

        cache.on_next_pass(note)

    def _save(self, tokens: list[int], first_block: int, context: RequestContext, cache: ReadableCache) -> int:
        """Offer the full blocks that were computed. Returns: how many these are."""
        # The last token's KV is not computed by the call that chose it.
        computed = min(cache.computed_tokens(), len(tokens) - 1)
        end_block = computed // BLOCK_TOKENS
        try:
            # In parts, each a copy: a long prompt's KV is not in host memory twice when the queue has no room for it.
            step = max(1, _PART_BYTES // self._layout.block_bytes)
            for first in range(first_block, end_block, step):
                views = self._layout.pack(cache, first, min(first + step, end_block))
                self._cache.save_blocks(tokens, first, views, context, Ownership.HELD)
        except RuntimeError as error:
            _LOGGER.warning("what was computed cannot be stored: %s", error)
            return 0
        finally:
            cache.forget_given()
        return max(0, end_block - first_block)


def _close(cache: PrefixCache, client: KVStoreClient) -> None:
    cache.close(flush_s=FLUSH_S)
    client.close()
