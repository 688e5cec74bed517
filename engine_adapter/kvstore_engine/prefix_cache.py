"""The prefix cache: stands between an engine and a store, and keeps the store's troubles away from the engine.

    start_load     look up, plan, load: on a thread of the cache, into memory that the engine lends      see `fetching.py`
    save_blocks    put what was computed: from a queue of bounded size, behind the engine                see `saving.py`
    save_state     the same for a KV group's state
    hand_over      everything about a request, for another engine to go on from                          see `handover.py`

Nothing the store does or fails to do raises there: it is a miss with a reason, counted, and logged once. What only another
configuration can cure raises when the cache is made (`PrefixCache.connect`, `check`).
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstore_api.limits import MAX_STATE_BYTES
from kvstore_client import Failure, KvGroupKind, PutReport, PutResult, PutStatus
from kvstore_engine.benefit import MeasuredBenefit
from kvstore_engine.fetching import PrefixFetcher
from kvstore_engine.handover import Handover
from kvstore_engine.hook import LoadedPrefix, Ownership
from kvstore_engine.loading import MISS, Load
from kvstore_engine.prefix_cache_stats import PrefixCacheStats, StatsBook
from kvstore_engine.saving import SaveJob, SaveQueue, nothing_pending
from kvstore_engine.store_steps import CLIENT_CLOSED, MAX_PUT_BYTES, StoreSteps, failure_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvstore_client import BlockLayout, KVStoreClient, NamespaceHandle, NamespaceSpec
    from kvstore_engine.benefit import BenefitRule
    from kvstore_engine.hook import RequestContext
    from kvstore_engine.saving import Pending
    from kvstore_engine.ticket import PausedRequest, Ticket

# Bytes of all saves under way. What an engine computes while its store is away for a moment; more memory saves more of it.
MAX_PENDING_SAVE_BYTES: Final = 512 << 20
_TOKEN_BYTES: Final = 8  # of a save's own list of them; the integers themselves are the request's
# Loads at once. More of them share the same network; the next request's can be under way while one is computed.
LOAD_THREADS: Final = 4
# An engine starts once, and can wait longer then than for a request.
CHECK_BUDGET_S: Final = 2.0

# Reasons of this module's own; see `fetching.py` and `store_steps.py` for others.
SKIPPED: Final = "SKIPPED"  # not offered to the store, after one that failed or was refused
QUEUE_FULL: Final = "QUEUE_FULL"  # the store does not keep up with what the engine computes


class PrefixCache:
    """A `PrefixCacheHook` and `HandoverHook` over one namespace of a store.

    Any thread may call anything. A forked process goes on with threads and counts of its own; what its parent has under way is
    the parent's.
    """

    def __init__(
        self,
        namespace: NamespaceHandle,
        *,
        block_tokens: int,
        block_bytes: int,
        state_bytes: int = MAX_STATE_BYTES,
        state_size: Callable[[str, int], int] | None = None,
        layout: BlockLayout | None = None,
        benefit: BenefitRule | None = None,
        max_put_bytes: int = MAX_PUT_BYTES,
        max_pending_save_bytes: int = MAX_PENDING_SAVE_BYTES,
    ) -> None:
        """Sends nothing and starts nothing.

        Args:
            block_tokens, block_bytes: the engine's own block size, which the views it lends have.
            state_bytes: the largest state that a KV group has; the time to fetch one is made for this size.
            state_size: (KV group, tokens before it) -> the bytes of its state there; a state of another size is taken for
                missing. None: any size is the engine's.
            layout: in which parts blocks are loaded, so that the engine can begin with the layers of the first before the last
                is there. None, or a layout of one part: as a whole, which is the least work for the store.
            benefit: when a hit is used; by default, when loading is expected to be faster than computing, as measured.
            max_put_bytes: bytes in one put; but a put has at least one block.
            max_pending_save_bytes: bytes of saves under way; what does not fit is dropped and counted.
        Raises: ValueError: the engine's blocks are not the namespace's.
        """
        _check_block_size(namespace, block_tokens, block_bytes, layout)
        self._namespace = namespace
        self._benefit = benefit if benefit is not None else MeasuredBenefit()
        self._steps = StoreSteps(namespace, max_put_bytes)
        self._fetcher = PrefixFetcher(
            namespace, self._steps, self._benefit, layout=layout, state_bytes=state_bytes, state_size=state_size
        )
        self._handover = Handover(namespace, self._steps)
        self._max_pending_save_bytes = max_pending_save_bytes
        self._crews: dict[int, _Crew] = {}  # by process; no lock, which a fork could leave locked: setdefault is atomic
        self._closed = False

    @classmethod
    def connect(
        cls,
        client: KVStoreClient,
        spec: NamespaceSpec,
        *,
        block_tokens: int,
        block_bytes: int,
        state_bytes: int = MAX_STATE_BYTES,
        state_size: Callable[[str, int], int] | None = None,
        layout: BlockLayout | None = None,
        benefit: BenefitRule | None = None,
        max_put_bytes: int = MAX_PUT_BYTES,
        max_pending_save_bytes: int = MAX_PENDING_SAVE_BYTES,
    ) -> PrefixCache:
        """Make a cache at an engine's start, and find out whether it can work as configured.

        A store that does not answer is no obstacle: requests miss until it does.

        Args: as for `PrefixCache`; `spec` is the namespace's.
        Raises:
            ValueError: the spec is incomplete, or the engine's blocks are not those it describes; names the field.
            KVStoreConfigError: the store refuses the namespace.
        """
        cache = cls(
            client.namespace(spec),
            block_tokens=block_tokens,
            block_bytes=block_bytes,
            state_bytes=state_bytes,
            state_size=state_size,
            layout=layout,
            benefit=benefit,
            max_put_bytes=max_put_bytes,
            max_pending_save_bytes=max_pending_save_bytes,
        )
        cache.check()
        return cache

    def check(self, *, budget_s: float = CHECK_BUDGET_S) -> Failure | None:
        """Make the namespace known to the store.

        Returns: None when it is; else why it is not yet. Requests try again by themselves.
        Raises: KVStoreConfigError: the store refuses it and always will.
        """
        return self._steps.register(budget_s)

    def close(self, *, flush_s: float = 2.0) -> None:
        """End the threads. Saves under way get `flush_s` seconds, the rest is dropped and counted. Idempotent.

        Calls after it are misses and dropped saves.
        """
        self._closed = True
        self._crew().stop(flush_s)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all saves so far are done, at most for `timeout_s`. Returns: whether they are."""
        return self._crew().saves.flush(timeout_s)

    def stats(self) -> PrefixCacheStats:
        """All counts of this process at one moment."""
        return self._crew().book.snapshot()

    def usable_blocks(self, prompt_tokens: int) -> int:
        """The longest hit that a prompt of so many tokens can use.

        One token at least must be computed, for its logits. Where windows are replayed, it is among the replayed ones: then a
        prompt of exactly n blocks can hit all n. A recurrent state at the very end has seen the last token already.
        """
        kinds = {group.kind for group in self._namespace.spec.groups}
        replays = KvGroupKind.SLIDING_WINDOW in kinds and KvGroupKind.STATE not in kinds
        return max(0, prompt_tokens - (not replays)) // self._namespace.block_tokens

    # Loads

    def start_load(self, prompt: Sequence[int], context: RequestContext, views: Sequence[memoryview]) -> Load:
        """Begin to fetch the KV of the longest stored prefix; see `PrefixCacheHook`. Raises: nothing."""
        crew = self._crew()
        asked_blocks = min(self.usable_blocks(len(prompt)), len(views))
        load = Load(
            views[:asked_blocks],
            part_of_layer=self._fetcher.part_of,
            start_budget_s=self._namespace.budget_s(0),
            on_wait=crew.book.waited,
        )
        if not asked_blocks:
            self._end_load(load, MISS, 0, "")
        elif refusal := self._steps.refusal("read") or self._steps.refusal("lookup"):
            # Nothing could be found, or not be fetched: neither a thread nor the hashing is worth it.
            self._end_load(load, MISS, 0, refusal)
        elif not crew.start(self._run_load, load, prompt, context):
            self._end_load(load, MISS, 0, CLIENT_CLOSED)
        return load

    def note_prefill(self, tokens: int, took_s: float) -> None:
        """Tell how long it took to compute `tokens` of a prompt: what a load is compared with."""
        self._benefit.note_prefill(tokens, took_s)

    def _run_load(self, load: Load, prompt: Sequence[int], context: RequestContext) -> None:
        """On a loading thread."""
        prefix, hit_blocks, miss = MISS, 0, ""
        try:
            if load.begin():
                prefix, hit_blocks, miss = self._fetcher.fetch(load, prompt, context)
            else:
                miss = load.end_reason
        except Exception as error:  # a bug; neither the engine nor the thread may end by it
            failure = failure_of(error)
            self._steps.note("load", failure)
            miss = failure.reason
        finally:
            self._end_load(load, prefix, hit_blocks, miss)

    def _end_load(self, load: Load, prefix: LoadedPrefix, hit_blocks: int, miss: str) -> None:
        took_s = time.monotonic() - load.started_at
        self._crew().book.load(len(load.views), hit_blocks, prefix.hit_blocks, miss, took_s)
        load.settle(prefix)

    # Saves

    def save_blocks(
        self,
        tokens: Sequence[int],
        first_block: int,
        views: Sequence[memoryview],
        context: RequestContext,
        ownership: Ownership = Ownership.COPIED,
    ) -> Pending:
        """Store complete blocks; see `PrefixCacheHook`. Raises: nothing."""
        size = self._namespace.block_bytes
        token_bytes = (first_block + len(views)) * self._namespace.block_tokens * _TOKEN_BYTES
        taken = self._reserve(len(views), size, token_bytes)
        if not taken:
            return nothing_pending()
        end = (first_block + taken) * self._namespace.block_tokens
        pieces = list(views[:taken])
        job = SaveJob(
            tokens=tuple(tokens[:end]),
            first_block=first_block,
            pieces=pieces if ownership is Ownership.HELD else [bytes(view) for view in pieces],
            size_bytes=taken * size + token_bytes,
            context=context,
        )
        return self._offer(job)

    def save_state(self, tokens: Sequence[int], group: str, state: memoryview, context: RequestContext) -> Pending:
        """Store a KV group's state at the end of `tokens`; see `PrefixCacheHook`.

        Raises: ValueError: `tokens` are no whole blocks, or the state is empty.
        """
        if not len(tokens) or len(tokens) % self._namespace.block_tokens or not len(state):
            raise ValueError(
                f"a state stands at the end of whole blocks and has bytes; {len(tokens)} tokens are no positive multiple of "
                f"{self._namespace.block_tokens}, or {len(state)} bytes are none"
            )
        token_bytes = len(tokens) * _TOKEN_BYTES
        if not self._reserve(1, state.nbytes, token_bytes):
            return nothing_pending()
        return self._offer(SaveJob(tuple(tokens), 0, [bytes(state)], state.nbytes + token_bytes, context, group))

    def _reserve(self, pieces: int, piece_bytes: int, beside_bytes: int) -> int:
        """Room for saves. Returns: how many leading pieces there is room for; the others are counted as not saved."""
        refusal = self._steps.refusal("write")
        taken = 0 if refusal else self._crew().saves.reserve(pieces, piece_bytes, beside_bytes)
        if taken < pieces:
            reason = refusal or (CLIENT_CLOSED if self._closed else QUEUE_FULL)
            self._crew().book.unsaved([reason] * (pieces - taken))
        return taken

    def _offer(self, job: SaveJob) -> Pending:
        self._crew().saves.offer(job)
        return job.pending

    def _run_save(self, job: SaveJob) -> None:
        """On the saving thread."""
        began = time.monotonic()
        results: list[PutResult] = []
        try:
            results = self._store(job)
        except Exception as error:  # a bug; the thread goes on
            self._steps.note("save", failure_of(error))
        report, book = PutReport(results), self._crew().book
        unsaved = [result.reason for result in results if result.status is PutStatus.REJECTED]
        book.unsaved(unsaved + [SKIPPED] * (len(job.pieces) - len(results)))
        book.saved(report.stored, report.exists, time.monotonic() - began, state=bool(job.group))

    def _store(self, job: SaveJob) -> list[PutResult]:
        chain = self._steps.chain("save", job.tokens, len(job.tokens) // self._namespace.block_tokens, job.context)
        if isinstance(chain, Failure):
            return []
        if job.group:
            return list(self._steps.put_state(chain[len(chain) - 1], job.group, job.pieces[0]).results)
        return self._steps.put_blocks(chain, job.first_block, job.pieces, job.context.traffic_class)

    def _drop(self, job: SaveJob) -> None:
        self._crew().book.unsaved([CLIENT_CLOSED] * len(job.pieces))

    # Hand-over

    def hand_over(
        self,
        request: PausedRequest,
        views: Sequence[memoryview],
        states: Mapping[str, bytearray],
        *,
        patience_s: float = 0.0,
    ) -> bytes:
        """Store a request's KV and write the ticket that another engine goes on from; see `HandoverHook`.

        Waits until the store has confirmed what it takes; what it does not take is computed again by whoever takes the request
        over. The ticket holds the prompt and the salt: it is as secret as the request itself.
        """
        return self._handover.hand_over(request, views, states, patience_s)

    def open_ticket(self, ticket: bytes) -> Ticket:
        """Read a ticket. It stays valid: opened twice, it works twice.

        Raises: TicketError: it is damaged, of an unknown version, or of another namespace.
        """
        return self._handover.open_ticket(ticket)

    def take_over(self, ticket: Ticket, views: Sequence[memoryview], state_sizes: Mapping[str, int]) -> LoadedPrefix:
        """Bring the KV of a request that another engine handed over; see `HandoverHook`. Waits for it. Raises: nothing."""
        return self._handover.take_over(ticket, views, state_sizes)

    def _crew(self) -> _Crew:
        pid = os.getpid()
        return self._crews.get(pid) or self._crews.setdefault(pid, self._new_crew())

    def _new_crew(self) -> _Crew:
        return _Crew(
            ThreadPoolExecutor(LOAD_THREADS, thread_name_prefix="kvstore-load"),
            SaveQueue(self._max_pending_save_bytes, self._run_save, self._drop),
            StatsBook(self._namespace.block_tokens),
        )


@dataclass(frozen=True, slots=True)
class _Crew:
    """What belongs to one process: its counts, and its threads, which are started when there is work for them."""

    loaders: ThreadPoolExecutor
    saves: SaveQueue[SaveJob]
    book: StatsBook

    def start(self, run: Callable[..., None], *args: object) -> bool:
        """Run it on a loading thread. Returns: False: the crew has been stopped."""
        try:
            self.loaders.submit(run, *args)
        except RuntimeError:
            return False
        return True

    def stop(self, flush_s: float) -> None:
        """Finish what is under way; saves get `flush_s` seconds."""
        self.loaders.shutdown(wait=True)
        self.saves.stop(flush_s)


def _check_block_size(
    namespace: NamespaceHandle, block_tokens: int, block_bytes: int, layout: BlockLayout | None
) -> None:
    if block_tokens != namespace.block_tokens:
        raise ValueError(
            f"the engine's blocks hold {block_tokens} tokens and the store's {namespace.block_tokens}: "
            "no block of one is a block of the other"
        )
    if block_bytes != namespace.block_bytes:
        raise ValueError(
            f"the engine's blocks have {block_bytes} bytes, but block_bytes of the namespace is {namespace.block_bytes}"
        )
    if layout is not None and layout.block_bytes != block_bytes:
        raise ValueError(f"the layout is one of blocks of {layout.block_bytes} bytes, the engine's have {block_bytes}")
