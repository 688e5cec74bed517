"""A request to the thin engine, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvstore_engine.kv_pool import BLOCK_TOKENS
from kvstore_engine.model import Span
from kvstore_engine.sampling import Sampler, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore_engine.hook import PrefixLoad, RequestContext, Saving
    from kvstore_engine.ticket import Ticket


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished request. Times are seconds; those of shared steps are counted in full for each request in them.

    Of a request that was taken over, tokens are counted from its beginning, and times from `Engine.take_over` on; if its first
    token was chosen elsewhere, `ttft_s` is 0 and `first_logits` is empty.
    """

    tokens: list[int]  # the new tokens; the end-of-sequence token included if that is what ended it
    finish_reason: str  # "eos" or "length"
    prompt_tokens: int
    hit_tokens: int  # prompt tokens whose KV came from the prefix cache
    replayed_tokens: int  # of these, computed again for the window layers' sake, or for the first token's logits
    prefill_tokens: int  # prompt tokens computed here; hit_tokens - replayed_tokens + prefill_tokens = prompt_tokens
    ttft_s: float  # from `submit` to the first token: queueing, loading and prefill, but no saving
    load_s: float  # waiting for the prefix cache to bring what it has
    prefill_s: float  # computing the prompt, up to and including the first token
    decode_s: float  # computing all further tokens
    save_s: float  # handing complete blocks to the prefix cache
    total_s: float  # from `submit` to the end, saving included
    first_logits: torch.Tensor  # (vocab_size,) float32, from which the first token was chosen


class Request:
    """A request's state, for its owner to watch between steps. Only the engine changes it."""

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        context: RequestContext,
        submitted_at: float,
    ) -> None:
        self.prompt = tuple(prompt)
        self.params = params
        self.context = context
        self.submitted_at = submitted_at
        self.output: list[int] = []
        self.hit_tokens = 0  # leading tokens whose full layers were loaded, and are not computed
        self.resume_token = 0  # the first token that was computed
        self.window_start = 0  # the first token with KV in window layers
        self.computed_tokens = 0  # the next token to compute; before it all is there that later tokens need
        self.generation: Generation | None = None  # set when finished
        self.sampler = Sampler(params)
        self.eos_ids: frozenset[int] = frozenset()
        self.ticket: Ticket | None = None  # of a request that was taken over
        self.recomputed_tokens = 0  # tokens whose KV the engine before had, and that are computed again
        self.block_ids: list[int] = []
        self.load: PrefixLoad | None = None  # until its outcome is known
        self.saved_blocks = 0  # leading blocks that need no saving: loaded, or handed to the hook
        self.saved_state_token = 0  # the end of the last window state that was loaded or handed to the hook
        self.savings: list[Saving] = []  # those that hold views of the blocks
        self.first_logits: torch.Tensor | None = None
        self.ttft_s = self.load_s = self.prefill_s = self.decode_s = self.save_s = 0.0

    @property
    def blocks_needed(self) -> int:
        """Blocks for the KV of all tokens this request may compute: the last token sampled is never computed."""
        return -(-(len(self.prompt) + self.params.max_new_tokens - 1) // BLOCK_TOKENS)

    @property
    def known_tokens(self) -> tuple[int, ...]:
        """The tokens before the one that goes into the next decoding step: the prompt, and the output but its last token."""
        return self.prompt + tuple(self.output[:-1])

    @property
    def is_prefilled(self) -> bool:
        """Whether the KV of all `known_tokens` is in the pool."""
        return self.computed_tokens >= len(self.prompt) + max(0, len(self.output) - 1)

    def next_span(self, length: int) -> Span:
        """The next tokens to compute."""
        return Span(self.block_ids, self.computed_tokens, length, self.window_start, self.hit_tokens)

    def finish(self, finish_reason: str, total_s: float) -> None:
        """Sum up."""
        prompt_tokens = len(self.prompt)
        # Of a request that was taken over, the answer's tokens may have been loaded too.
        hit_tokens, resume_token = min(self.hit_tokens, prompt_tokens), min(self.resume_token, prompt_tokens)
        self.generation = Generation(
            tokens=list(self.output),
            finish_reason=finish_reason,
            prompt_tokens=prompt_tokens,
            hit_tokens=hit_tokens,
            replayed_tokens=hit_tokens - resume_token,
            prefill_tokens=prompt_tokens - resume_token,
            ttft_s=self.ttft_s,
            load_s=self.load_s,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            save_s=self.save_s,
            total_s=total_s,
            first_logits=torch.empty(0) if self.first_logits is None else self.first_logits,
        )
