"""A thin inference engine: chunked prefill, batched decode, and a hook for a store of prefix KV."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvstore_engine import moving
from kvstore_engine.handover import HandoverHook
from kvstore_engine.hook import RequestContext
from kvstore_engine.kv_pool import BLOCK_TOKENS
from kvstore_engine.model import Span
from kvstore_engine.sampling import Sampler, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from kvstore_engine.hook import PrefixCacheHook
    from kvstore_engine.kv_pool import KVPool
    from kvstore_engine.model import Llama
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
    prefill_tokens: int  # prompt tokens computed here; hit_tokens + prefill_tokens = prompt_tokens
    ttft_s: float  # from `submit` to the first token: queueing, loading and prefill, but no saving
    load_s: float  # waiting for the prefix cache to bring what it has
    prefill_s: float  # computing the prompt, up to and including the first token
    decode_s: float  # computing all further tokens
    save_s: float  # handing complete blocks to the prefix cache
    total_s: float  # from `submit` to the end, saving included
    first_logits: torch.Tensor  # (vocab_size,) float32, from which the first token was chosen


class NotAdmittingError(RuntimeError):
    """The engine takes no more requests."""


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
        self.hit_tokens = 0
        self.computed_tokens = 0  # tokens whose KV is in the pool; loaded ones count too
        self.generation: Generation | None = None  # set when finished
        self.sampler = Sampler(params)
        self.eos_ids: frozenset[int] = frozenset()
        self.ticket: Ticket | None = None  # of a request that was taken over
        self.recomputed_tokens = 0  # tokens whose KV the engine before had, and that are computed again
        self.block_ids: list[int] = []
        self.saved_blocks = 0  # leading blocks that need no saving: loaded, or handed to the hook
        self.first_logits: torch.Tensor | None = None
        self.ttft_s = self.load_s = self.prefill_s = self.decode_s = self.save_s = 0.0

    @property
    def blocks_needed(self) -> int:
        """Blocks for the KV of all tokens this request may compute: the last token sampled is never computed."""
        return -(-(len(self.prompt) + self.params.max_new_tokens - 1) // BLOCK_TOKENS)

    @property
    def known_tokens(self) -> tuple[int, ...]:
        """The tokens before the one that comes next into a decoding step: the prompt, and the output but its last token."""
        return self.prompt + tuple(self.output[:-1])

    @property
    def is_prefilled(self) -> bool:
        """Whether the KV of all `known_tokens` is in the pool."""
        return self.computed_tokens >= len(self.prompt) + max(0, len(self.output) - 1)


class Engine:
    """Serves requests from one model and one KV pool. Not thread-safe: one thread submits, steps and cancels.

    Each request owns all the blocks it may ever need from its admission on, so a running request is never pushed out;
    requests wait in order of arrival until theirs are free.
    """

    def __init__(
        self,
        model: Llama,
        pool: KVPool,
        *,
        eos_ids: Collection[int] = (),
        prefix_cache: PrefixCacheHook | None = None,
        chunk_tokens: int = BLOCK_TOKENS,
        max_running: int = 8,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Join the parts; nothing is computed before the first step.

        Args:
            eos_ids: tokens that end a request.
            chunk_tokens: prompt tokens per step. Chunks end at absolute multiples of it, so when it divides 128, a
                prefill resumed after a hit runs the very chunks a cold one runs, and on the same kind of machine with
                as many threads its results are the same bits. Larger chunks prefill faster (by a sixth for 256), but
                make a hit's results equal only up to rounding.
            max_running: requests decoded together.
            clock: seconds from any starting point, for the times in `Generation`.
        """
        if chunk_tokens < 1 or max_running < 1:
            raise ValueError(f"chunk_tokens ({chunk_tokens}) and max_running ({max_running}) must be at least 1")
        self._model = model
        self._pool = pool
        self._eos_ids = frozenset(eos_ids)
        self._prefix_cache = prefix_cache
        self._chunk_tokens = chunk_tokens
        self._max_running = max_running
        self._clock = clock
        self._waiting: deque[Request] = deque()
        self._prefilling: Request | None = None
        self._running: list[Request] = []
        self._admits = True

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._waiting or self._prefilling or self._running)

    def generate(
        self,
        prompt_tokens: Sequence[int],
        params: SamplingParams | None = None,
        *,
        salt: bytes = b"",
        adapter: bytes = b"",
        extra_keys: Mapping[int, Sequence[bytes]] | None = None,
        traffic_class: str | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
        on_token: Callable[[int], None] | None = None,
    ) -> Generation:
        """Run one request to its end; others submitted before advance along with it.

        Args:
            on_prefill: called with (tokens whose KV is there, prompt tokens) after each chunk.
            on_token: called with each new token. An exception from either callback cancels the request.
        Raises: as `submit`.
        """
        request = self.submit(
            prompt_tokens, params, salt=salt, adapter=adapter, extra_keys=extra_keys, traffic_class=traffic_class
        )
        reported = 0
        try:
            while request.generation is None:
                was_prefilled = request.is_prefilled
                self.step()
                if on_prefill and not was_prefilled and request.computed_tokens:
                    on_prefill(request.computed_tokens, len(request.prompt))
                if on_token:
                    for token in request.output[reported:]:
                        on_token(token)
                reported = len(request.output)
        finally:
            self.cancel(request)
        return request.generation

    def submit(
        self,
        prompt_tokens: Sequence[int],
        params: SamplingParams | None = None,
        *,
        salt: bytes = b"",
        adapter: bytes = b"",
        extra_keys: Mapping[int, Sequence[bytes]] | None = None,
        traffic_class: str | None = None,
    ) -> Request:
        """Queue a request; `step` advances it.

        Raises:
            ValueError: the prompt is empty, has an unknown token, or can never fit the model or the pool.
            NotAdmittingError: `stop_admitting` was called.
        """
        context = RequestContext(salt, adapter, extra_keys, traffic_class)
        request = Request(prompt_tokens, params or SamplingParams(), context, self._clock())
        request.eos_ids = self._eos_ids
        return self._queue(request)

    # Requests that come from, and go to, other engines

    @property
    def unfinished(self) -> list[Request]:
        """All requests in it: those that decode, the one being prefilled, those that wait, each in their order."""
        prefilling = [self._prefilling] if self._prefilling else []
        return [*self._running, *prefilling, *self._waiting]

    @property
    def waiting(self) -> list[Request]:
        """The requests of which nothing has been computed here, in their order."""
        return list(self._waiting)

    def stop_admitting(self) -> None:
        """Take no more requests; those that are here go on."""
        self._admits = False

    def hand_over(self, request: Request, *, patience_s: float = 0.0) -> bytes:
        """Store a request's KV, wait until that is confirmed, and let the request go.

        It may be waiting, in the middle of its prefill, or decoding. What the store does not take is computed again elsewhere.
        Args: patience_s: what each call to the store may take beyond its usual time.
        Returns: its ticket, for `take_over` of an engine with the same namespace. As secret as the request itself.
        Raises:
            ValueError: it is not in this engine: finished, cancelled, or another one's.
            RuntimeError: the engine has no prefix cache that hands over.
        """
        mover, end = self._mover(), request.computed_tokens
        if request not in self.unfinished:
            raise ValueError("the request is not in this engine, there is nothing to hand over")
        views = [self._pool.block_view(block_id) for block_id in request.block_ids[: end // BLOCK_TOKENS]]
        states = self._pool.states(request.block_ids, end) if end else {}
        ticket = mover.hand_over(moving.pause(request), views, states, patience_s=patience_s)
        self.cancel(request)
        return ticket

    def take_over(self, ticket: bytes) -> Request:
        """Queue a request that another engine handed over; its KV is loaded when there is room for it.

        It goes on at the exact token; what of its KV is no longer stored is computed. The ticket stays valid.
        Raises:
            TicketError: a ValueError: the ticket is damaged, of another namespace, or no request that this engine can serve.
            ValueError, NotAdmittingError: as `submit`.
            RuntimeError: as `hand_over`.
        """
        opened = self._mover().open_ticket(ticket)
        paused = opened.request
        request = Request(paused.prompt, moving.sampling_params(paused.sampling), paused.context, self._clock())
        moving.restore(request, paused)
        request.ticket = opened
        return self._queue(request)

    def _mover(self) -> HandoverHook:
        if not isinstance(self._prefix_cache, HandoverHook):
            raise RuntimeError("the engine has no prefix cache that hands requests over")
        return self._prefix_cache

    def _load_handed_over(self, request: Request, ticket: Ticket) -> None:
        end = ticket.request.computed_tokens
        views = [self._pool.block_view(block_id) for block_id in request.block_ids[: end // BLOCK_TOKENS]]
        started = self._clock()
        loaded = self._mover().take_over(ticket, views, self._pool.state_sizes(end))
        if loaded.replay_start_token == end:
            self._pool.load_states(request.block_ids, end, loaded.states)
        request.load_s = self._clock() - started
        request.computed_tokens = loaded.replay_start_token
        request.recomputed_tokens = end - request.computed_tokens
        request.hit_tokens = min(request.computed_tokens, len(request.prompt))
        # Others are saved at the end: the engine before had them only for the hand-over.
        request.saved_blocks = min(loaded.hit_blocks, ticket.request.saved_blocks)

    def cancel(self, request: Request) -> None:
        """Drop a request and give its blocks back. Does nothing to a finished one."""
        if request in self._waiting:
            self._waiting.remove(request)
        self._release(request)

    def step(self) -> list[Request]:
        """Advance by one prefill chunk and one token of every running request. Returns: those that finished."""
        decoding = list(self._running)
        self._save_prompts(decoding)
        finished = []
        if (request := self._prefilling or self._admit()) and self._prefill_chunk(request):
            finished.append(request)
        if decoding:
            finished += self._decode(decoding)
        return finished

    def _queue(self, request: Request) -> Request:
        if not self._admits:
            raise NotAdmittingError("the engine takes no more requests: it is being drained")
        self._check(request)
        self._waiting.append(request)
        return request

    def _check(self, request: Request) -> None:
        if not request.prompt:
            raise ValueError("the prompt is empty")
        vocab_size, tokens = self._model.config.vocab_size, [*request.prompt, *request.output]
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            raise ValueError(f"the prompt has token ids outside [0, {vocab_size})")
        total = len(request.prompt) + request.params.max_new_tokens
        if total > self._model.config.max_positions:
            raise ValueError(f"{total} prompt and new tokens exceed the model's {self._model.config.max_positions}")
        if request.blocks_needed > self._pool.num_blocks:
            raise ValueError(f"{request.blocks_needed} KV blocks needed, the pool has {self._pool.num_blocks}")

    def _admit(self) -> Request | None:
        """Start the oldest waiting request if there is room for it."""
        if not self._waiting or len(self._running) >= self._max_running:
            return None
        if self._waiting[0].blocks_needed > self._pool.free_blocks:
            return None
        request = self._prefilling = self._waiting.popleft()
        request.block_ids = self._pool.allocate(request.blocks_needed)
        self._load_prefix(request)
        if request.is_prefilled:  # taken over with all its KV
            self._prefilling = None
            self._running.append(request)
            return None
        return request

    def _load_prefix(self, request: Request) -> None:
        if self._prefix_cache is None:
            return
        if request.ticket is not None and request.ticket.request.computed_tokens:
            self._load_handed_over(request, request.ticket)
            return
        lent = request.block_ids[: len(request.prompt) // BLOCK_TOKENS]
        views = [self._pool.block_view(block_id) for block_id in lent]
        started = self._clock()
        loaded = self._prefix_cache.start_load(request.prompt, request.context, views).wait()
        request.load_s = self._clock() - started
        if not 0 <= loaded.hit_blocks * BLOCK_TOKENS < len(request.prompt) or loaded.hit_blocks > len(lent):
            raise RuntimeError(f"prefix cache claims {loaded.hit_blocks} blocks, it was lent {len(lent)}")
        # Blocks lent but not filled stay the request's own and are computed like the rest.
        request.saved_blocks = loaded.hit_blocks
        request.hit_tokens = request.computed_tokens = loaded.hit_blocks * BLOCK_TOKENS

    def _prefill_chunk(self, request: Request) -> bool:
        """Compute the next chunk of the prompt and, after the last, the first token. Returns: finished already.

        Of a request that was taken over, the tokens that it has already belong to what is computed, and none is chosen.
        """
        started = self._clock()
        start, tokens = request.computed_tokens, request.known_tokens
        end = min((start // self._chunk_tokens + 1) * self._chunk_tokens, len(tokens))
        span = Span(request.block_ids, start, end - start)
        hidden = self._model.forward(tokens[start:end], [span], self._pool)
        request.computed_tokens = end
        took_s = self._clock() - started
        if self._prefix_cache is not None:
            self._prefix_cache.note_prefill(end - start, took_s)
        if not request.is_prefilled:
            request.prefill_s += took_s
            return False
        if not request.output:
            request.first_logits = self._model.logits(hidden[-1])
            request.output.append(request.sampler.sample(request.first_logits))
            request.ttft_s = self._clock() - request.submitted_at
        request.prefill_s += self._clock() - started
        self._prefilling = None
        self._running.append(request)
        return self._finish_if_done(request)

    def _decode(self, requests: Sequence[Request]) -> list[Request]:
        """One more token for each request, computed in one batch. Returns: those that finished."""
        started = self._clock()
        spans = [Span(request.block_ids, request.computed_tokens, 1) for request in requests]
        hidden = self._model.forward([request.output[-1] for request in requests], spans, self._pool)
        for request, logits in zip(requests, self._model.logits(hidden), strict=True):
            token = request.sampler.sample(logits)
            request.computed_tokens += 1
            request.output.append(token)
        elapsed = self._clock() - started
        for request in requests:
            request.decode_s += elapsed
        return [request for request in requests if self._finish_if_done(request)]

    def _save_prompts(self, requests: Sequence[Request]) -> None:
        """Save the prompts that were completed in the step before.

        Not in that step itself, so that whoever watches the request sees its first token before the saving starts.
        """
        for request in requests:
            if len(request.output) == 1:
                self._save(request)

    def _save(self, request: Request) -> None:
        """Hand the hook the blocks completed since the last save.

        Only computed KV counts: the last token sampled has none yet, so a block it would fill is not complete.
        """
        first, complete = request.saved_blocks, request.computed_tokens // BLOCK_TOKENS
        if self._prefix_cache is None or first >= complete:
            return
        started = self._clock()
        computed = (request.prompt + tuple(request.output))[: request.computed_tokens]
        views = [self._pool.block_view(block_id) for block_id in request.block_ids[first:complete]]
        self._prefix_cache.save_blocks(computed, first, views, request.context)
        request.saved_blocks = complete
        request.save_s += self._clock() - started

    def _finish_if_done(self, request: Request) -> bool:
        reason = self._finish_reason(request)
        if reason is None:
            return False
        self._save(request)
        request.generation = self._summary(request, reason)
        self._release(request)
        return True

    def _finish_reason(self, request: Request) -> str | None:
        if request.output[-1] in request.eos_ids and not request.params.ignore_eos:
            return "eos"
        return "length" if len(request.output) == request.params.max_new_tokens else None

    def _summary(self, request: Request, finish_reason: str) -> Generation:
        return Generation(
            tokens=list(request.output),
            finish_reason=finish_reason,
            prompt_tokens=len(request.prompt),
            hit_tokens=request.hit_tokens,
            prefill_tokens=len(request.prompt) - request.hit_tokens,
            ttft_s=request.ttft_s,
            load_s=request.load_s,
            prefill_s=request.prefill_s,
            decode_s=request.decode_s,
            save_s=request.save_s,
            total_s=self._clock() - request.submitted_at,
            first_logits=torch.empty(0) if request.first_logits is None else request.first_logits,
        )

    def _release(self, request: Request) -> None:
        if request is self._prefilling:
            self._prefilling = None
        if request in self._running:
            self._running.remove(request)
        self._pool.free(request.block_ids)
        request.block_ids = []
