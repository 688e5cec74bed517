"""A thin inference engine: chunked prefill, batched decode, and a hook for a store of prefix KV."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final, TypeVar

from kvstore_engine import moving
from kvstore_engine.handover import HandoverHook
from kvstore_engine.hook import Ownership, RequestContext
from kvstore_engine.identity import WINDOW_GROUP
from kvstore_engine.kv_pool import BLOCK_TOKENS
from kvstore_engine.request import Generation, Request
from kvstore_engine.resuming import lent_views, resume
from kvstore_engine.sampling import SamplingParams
from kvstore_engine.ticket import write_ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import torch

    from kvstore_engine.hook import PrefixCacheHook, PrefixLoad, Saving
    from kvstore_engine.kv_pool import KVPool
    from kvstore_engine.model import Llama
    from kvstore_engine.ticket import Ticket

__all__ = ["Engine", "Generation", "NotAdmittingError", "Request"]

T = TypeVar("T")

# How long a step waits for blocks that saves hold, when there is nothing else to do.
HELD_WAIT_S: Final = 0.1


class NotAdmittingError(RuntimeError):
    """The engine takes no more requests."""


class _LayerMissingError(Exception):
    """A layer of a hit did not come."""


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
        hold_saves: bool = False,
        save_states: bool = False,
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
            hold_saves: let the hook store blocks from the pool itself instead of a copy. A request's blocks are then not used
                again before that is done.
            save_states: hand the hook a snapshot of the window layers at the end of a prompt's last complete block, and at
                that of the answer's: for namespaces with the replay rule snapshot.
            clock: seconds from any starting point, for the times in `Generation`.
        Raises: ValueError: an option is out of range, or the pool is made for other layers than the model's.
        """
        if chunk_tokens < 1 or max_running < 1:
            raise ValueError(f"chunk_tokens ({chunk_tokens}) and max_running ({max_running}) must be at least 1")
        if (pool.window_layers, pool.window_tokens) != (model.config.window_layers, model.config.window_tokens):
            raise ValueError(
                f"the model has windows of {model.config.window_tokens} tokens in layers {model.config.window_layers}, the "
                f"pool is made for {pool.window_tokens} in {pool.window_layers}"
            )
        self._model = model
        self._pool = pool
        self._eos_ids = frozenset(eos_ids)
        self._prefix_cache = prefix_cache
        self._chunk_tokens = chunk_tokens
        self._max_running = max_running
        self._ownership = Ownership.HELD if hold_saves else Ownership.COPIED
        self._save_states = save_states and bool(pool.window_layers)
        self._clock = clock
        self._held: list[tuple[list[Saving], list[int]]] = []  # blocks of ended requests that saves still read
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
        mover = self._mover()
        if request not in self.unfinished:
            raise ValueError("the request is not in this engine, there is nothing to hand over")
        # In the middle of a replay the window layers are not yet what they will be.
        end = request.computed_tokens if request.computed_tokens >= request.hit_tokens else 0
        views = [self._pool.block_view(block_id) for block_id in request.block_ids[: end // BLOCK_TOKENS]]
        states = self._pool.states(request.block_ids, end) if end else {}
        if request.ticket is not None and not end:
            # Nothing to add to what the engine before has stored: it waits here, or is being replayed.
            ticket = write_ticket(request.ticket)
        else:
            ticket = mover.hand_over(moving.pause(request, end), views, states, patience_s=patience_s)
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

    def _take_kv_over(self, request: Request, ticket: Ticket) -> None:
        """Load a request's KV; with all of it there is nothing to prefill."""
        end, mover = ticket.request.computed_tokens, self._mover()
        views = [self._pool.block_view(block_id) for block_id in request.block_ids[: end // BLOCK_TOKENS]]
        sizes = self._pool.state_sizes(end)
        prefix = self._load_timed(request, lambda: mover.take_over(ticket, views, sizes))
        moving.resume_handed_over(request, self._pool, prefix, ticket.request)
        if request.is_prefilled:
            self._prefilling = None
            self._running.append(request)

    def cancel(self, request: Request) -> None:
        """Drop a request and give its blocks back. Does nothing to a finished one."""
        if request in self._waiting:
            self._waiting.remove(request)
        self._release(request)

    def step(self) -> list[Request]:
        """Advance by one prefill chunk and one token of every running request. Returns: those that finished."""
        self._reap()
        decoding = list(self._running)
        self._save_prompts(decoding)
        # A load that begins here is under way while the others decode.
        prefilling = self._prefilling or self._admit()
        finished = self._decode(decoding) if decoding else []
        if prefilling and self._prefill_chunk(prefilling):
            finished.append(prefilling)
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
            if not self._running:
                self._reap(HELD_WAIT_S)
            return None
        request = self._prefilling = self._waiting.popleft()
        request.block_ids = self._pool.allocate(request.blocks_needed)
        if request.ticket is not None and request.ticket.request.computed_tokens:
            self._take_kv_over(request, request.ticket)
            return self._prefilling
        if (cache := self._prefix_cache) is not None:
            views = lent_views(request, self._pool)
            request.load = self._load_timed(request, lambda: cache.start_load(request.prompt, request.context, views))
        return request

    def _prefill_chunk(self, request: Request) -> bool:
        """Compute the next chunk of the prompt and, after the last, the first token. Returns: finished already.

        Of a request that was taken over, the tokens that it has already belong to what is computed, and none is chosen.
        """
        hidden = self._compute_chunk(request) if request.load is None else self._resume(request, request.load)
        if not request.is_prefilled:
            return False
        if not request.output:
            started = self._clock()
            request.first_logits = self._model.logits(hidden[-1])
            request.output.append(request.sampler.sample(request.first_logits))
            now = self._clock()
            request.prefill_s += now - started
            request.ttft_s = now - request.submitted_at
        self._prefilling = None
        self._running.append(request)
        return self._finish_if_done(request)

    def _resume(self, request: Request, load: PrefixLoad) -> torch.Tensor:
        """The first chunk behind a hit, layer by layer as the hit arrives; anew if it turns out to be shorter."""
        promised = self._load_timed(request, load.expect)
        resume(request, self._pool, promised)
        hidden = self._compute_layer_by_layer(request, load) if promised.hit_blocks else None
        outcome = self._load_timed(request, load.wait)
        request.load = None
        if hidden is None or outcome != promised:
            resume(request, self._pool, outcome)
            hidden = self._compute_chunk(request)
        return hidden

    def _compute_layer_by_layer(self, request: Request, load: PrefixLoad) -> torch.Tensor | None:
        """As `_compute_chunk`, each layer as soon as its part of the hit is there. Returns: None: one did not come."""
        try:
            return self._compute_chunk(request, lambda layer: self._wait_layer(request, load, layer))
        except _LayerMissingError:
            return None

    def _wait_layer(self, request: Request, load: PrefixLoad, layer: int) -> None:
        if layer not in self._pool.window_layers and not self._load_timed(request, lambda: load.wait_layer(layer)):
            raise _LayerMissingError

    def _load_timed(self, request: Request, call: Callable[[], T]) -> T:
        started = self._clock()
        try:
            return call()
        finally:
            request.load_s += self._clock() - started

    def _compute_chunk(self, request: Request, before_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """Compute known tokens up to the end of a chunk. Returns: the model's output, (tokens, hidden_size)."""
        started, waited_s = self._clock(), request.load_s
        start = request.computed_tokens
        tokens = request.known_tokens
        end = min((start // self._chunk_tokens + 1) * self._chunk_tokens, len(tokens))
        span = request.next_span(end - start)
        hidden = self._model.forward(tokens[start:end], [span], self._pool, before_layer=before_layer)
        request.computed_tokens = end
        took_s = self._clock() - started - (request.load_s - waited_s)
        request.prefill_s += took_s
        if self._prefix_cache is not None:
            self._prefix_cache.note_prefill(end - start, took_s)
        return hidden

    def _decode(self, requests: Sequence[Request]) -> list[Request]:
        """One more token for each request, computed in one batch. Returns: those that finished."""
        started = self._clock()
        spans = [request.next_span(1) for request in requests]
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
        """Hand the hook the blocks completed since the last save, and the window layers' state at their end.

        Only computed KV counts: the last token sampled has none yet, so a block it would fill is not complete.
        """
        if (cache := self._prefix_cache) is None:
            return
        started = self._clock()
        first, complete = request.saved_blocks, request.computed_tokens // BLOCK_TOKENS
        computed = (request.prompt + tuple(request.output))[: complete * BLOCK_TOKENS]
        if first < complete:
            views = [self._pool.block_view(block_id) for block_id in request.block_ids[first:complete]]
            saving = cache.save_blocks(computed, first, views, request.context, self._ownership)
            request.saved_blocks = complete
            if self._ownership is Ownership.HELD:
                request.savings.append(saving)
        if self._save_states and request.saved_state_token < len(computed):
            state = memoryview(self._pool.window_state(request.block_ids, len(computed)))
            cache.save_state(computed, WINDOW_GROUP, state, request.context)
            request.saved_state_token = len(computed)
        request.save_s += self._clock() - started

    def _finish_if_done(self, request: Request) -> bool:
        reason = self._finish_reason(request)
        if reason is None:
            return False
        self._save(request)
        request.finish(reason, self._clock() - request.submitted_at)
        self._release(request)
        return True

    def _finish_reason(self, request: Request) -> str | None:
        if request.output[-1] in request.eos_ids and not request.params.ignore_eos:
            return "eos"
        return "length" if len(request.output) == request.params.max_new_tokens else None

    def _release(self, request: Request) -> None:
        if request is self._prefilling:
            self._prefilling = None
        if request in self._running:
            self._running.remove(request)
        if request.load is not None:
            request.load.cancel()  # nothing writes to the blocks after it
            request.load = None
        self._held.append((request.savings, request.block_ids))
        request.savings, request.block_ids = [], []
        self._reap()

    def _reap(self, wait_s: float = 0.0) -> None:
        """Give back the blocks that no save reads any more. With `wait_s`, wait so long for the first of them."""
        if wait_s and self._held:
            self._held[0][0][0].wait(wait_s)
        held, self._held = self._held, []
        for savings, block_ids in held:
            if unfinished := [saving for saving in savings if not saving.done]:
                self._held.append((unfinished, block_ids))
            else:
                self._pool.free(block_ids)
