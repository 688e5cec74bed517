"""What `kvstore-bench sliding-window` needs beside an engine: a hook that writes for several namespaces, and teacher forcing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvstore_engine.hook import Ownership, RequestContext
from kvstore_engine.kv_pool import BLOCK_TOKENS
from kvstore_engine.request import Request
from kvstore_engine.resuming import lent_views, resume
from kvstore_engine.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstore_engine.hook import PrefixLoad, Saving
    from kvstore_engine.prefix_cache import PrefixCache
    from kvstore_engine.smollm2 import SmolLM2


class ColdWriter:
    """Loads nothing, and saves a prompt's KV to several caches: one cold run serves them all.

    KV of answers is not saved, so that what is stored is what a prefill computes.
    """

    def __init__(self, caches: Mapping[str, PrefixCache], *, states_for: str, prompt_tokens: int) -> None:
        """Args:
        states_for: the only cache that is given states.
        """
        self._caches = caches
        self._states_for = caches[states_for]
        self._prompt_blocks = prompt_tokens // BLOCK_TOKENS

    def start_load(self, prompt: Sequence[int], context: RequestContext, views: Sequence[memoryview]) -> PrefixLoad:
        """A miss."""
        del views
        return self._states_for.start_load(prompt, context, [])

    def save_blocks(
        self,
        tokens: Sequence[int],
        first_block: int,
        views: Sequence[memoryview],
        context: RequestContext,
        ownership: Ownership = Ownership.COPIED,
    ) -> Saving:
        """To all caches, without blocks of the answer."""
        del ownership  # there is no one saving that stands for all
        of_prompt = views[: max(0, self._prompt_blocks - first_block)]
        savings = [cache.save_blocks(tokens, first_block, of_prompt, context) for cache in self._caches.values()]
        return savings[-1]

    def save_state(self, tokens: Sequence[int], group: str, state: memoryview, context: RequestContext) -> Saving:
        """To the one cache, but for states behind the prompt."""
        if len(tokens) > self._prompt_blocks * BLOCK_TOKENS:
            return self._states_for.save_blocks(tokens, 0, [], context)
        return self._states_for.save_state(tokens, group, state, context)

    def note_prefill(self, tokens: int, took_s: float) -> None:
        """Nothing to learn."""


def score(model: SmolLM2, cache: PrefixCache | None, prompt: list[int], following: list[int]) -> torch.Tensor:
    """Predict each token of `following` from the prompt and those before it.

    Args:
        cache: what the prompt's KV is loaded from; None to compute all of it.
    Returns: logarithms of the probabilities, (following tokens, vocabulary), float64.
    """
    pool = model.pool
    request = Request(prompt, SamplingParams(), RequestContext(), 0.0)
    tokens = prompt + following[:-1]
    request.block_ids = pool.allocate(-(-len(tokens) // BLOCK_TOKENS))
    try:
        if cache is not None:
            resume(request, pool, cache.start_load(prompt, request.context, lent_views(request, pool)).wait())
        logits = []
        while request.computed_tokens < len(tokens):
            start = request.computed_tokens
            end = min((start // BLOCK_TOKENS + 1) * BLOCK_TOKENS, len(tokens))
            hidden = model.model.forward(tokens[start:end], [request.next_span(end - start)], pool)
            logits.append(model.model.logits(hidden[max(0, len(prompt) - 1 - start) :]))
            request.computed_tokens = end
        return torch.cat(logits).double().log_softmax(-1)
    finally:
        pool.free(request.block_ids)
