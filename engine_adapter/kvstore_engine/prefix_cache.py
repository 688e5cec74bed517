"""The prefix cache: stands between an engine and a store, and keeps the store's troubles away from the engine.

A request passes through it in steps, each a method:

    look up   ask the store how many of the prompt's blocks it has              one small call
    plan      how many of those this engine can go on from, and from where
    load      bring them straight into the engine's memory, verified            a streaming call
    save      once they are computed, hand over the blocks that are complete    a call per 32 MiB

`start_load`, `save_blocks` and `save_state` take these steps on threads of the cache, behind the engine. Nothing the store does or
fails to do raises there: it is a miss with a reason, counted, and logged once. What only another configuration can cure raises
when the cache is made (`PrefixCache.connect`, `check`).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from kvstore_api.limits import MAX_STATE_BYTES
from kvstore_api.resume import ResumePlan, is_safe, resume_plan
from kvstore_client import (
    ClientClosedError,
    Failure,
    GetResult,
    KvGroupKind,
    KVStoreConfigError,
    MatchResult,
    PutReport,
    PutResult,
    PutStatus,
    ReplayMode,
    StateResult,
)
from kvstore_engine.benefit import MeasuredBenefit
from kvstore_engine.handover import HANDOFF_CLASS, Handover
from kvstore_engine.hook import LoadedPrefix, Ownership
from kvstore_engine.loading import CANCELLED, MISS, Load
from kvstore_engine.prefix_cache_stats import PrefixCacheStats, StatsBook
from kvstore_engine.saving import SaveJob, SaveQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvstore_client import BlockLayout, Chain, KVStoreClient, NamespaceHandle, NamespaceSpec, PrefixHash
    from kvstore_client.breaker import Lane
    from kvstore_engine.benefit import BenefitRule
    from kvstore_engine.hook import RequestContext
    from kvstore_engine.saving import Pending
    from kvstore_engine.ticket import PausedRequest, Ticket

# Bytes of one put. Small enough that little is lost when its budget ends in the middle, and large enough that its fixed
# cost, a round trip and a group commit of a few milliseconds, does not show.
MAX_PUT_BYTES: Final = 32 << 20
# Bytes of all saves under way. What an engine computes while its store is away for a moment; more memory saves more of it.
MAX_PENDING_SAVE_BYTES: Final = 512 << 20
# Loads at once. More of them share the same network; the next request's can be under way while one is computed.
LOAD_THREADS: Final = 4
# An engine starts once, and can wait longer then than for a request.
CHECK_BUDGET_S: Final = 2.0
# A KV group's state is worth little as soon as its conversation has gone on: the class of short-lived things.
STATE_CLASS: Final = HANDOFF_CLASS

# Reasons of this module's own; all others are the client's or the store's.
NOT_STORED: Final = "NOT_STORED"
NOT_WORTH_IT: Final = "NOT_WORTH_IT"  # computing is expected to be faster
BAD_PLAN: Final = "BAD_PLAN"  # the store's resume plan would leave a KV group without what it needs
CLIENT_CLOSED: Final = "CLIENT_CLOSED"
UNEXPECTED_ERROR: Final = "UNEXPECTED_ERROR"  # a bug, in the client or here
SKIPPED: Final = "SKIPPED"  # not offered to the store, after one that failed or was refused
QUEUE_FULL: Final = "QUEUE_FULL"  # the store does not keep up with what the engine computes
NO_RESULT: Final = "NO_RESULT"

_LOGGER = logging.getLogger("kvstore_engine.prefix_cache")
# The client itself says in one line when its store stops answering, and in another when it is back.
_LOGGED_BY_CLIENT = frozenset({"UNREACHABLE", "DEADLINE", "BREAKER_OPEN"})


class PrefixCache:
    """A `PrefixCacheHook` over one namespace of a store.

    Any thread may call anything. A forked process goes on with threads of its own; what its parent has under way is the parent's.
    """

    def __init__(
        self,
        namespace: NamespaceHandle,
        *,
        block_tokens: int,
        block_bytes: int,
        state_bytes: int = MAX_STATE_BYTES,
        layout: BlockLayout | None = None,
        benefit: BenefitRule | None = None,
        max_put_bytes: int = MAX_PUT_BYTES,
        max_pending_save_bytes: int = MAX_PENDING_SAVE_BYTES,
    ) -> None:
        """Sends nothing and starts nothing.

        Args:
            block_tokens, block_bytes: the engine's own block size, which the views it lends have.
            state_bytes: the largest state that a KV group has; the time to fetch one is made for this size.
            layout: in which parts blocks are loaded, so that the engine can begin with the layers of the first before the last
                is there. None, or a layout of one part: as a whole, which is the least work for the store.
            benefit: when a hit is used; by default, when loading is expected to be faster than computing, as measured.
            max_put_bytes: bytes in one put; but a put has at least one block.
            max_pending_save_bytes: bytes of saves under way; what does not fit is dropped and counted.
        Raises: ValueError: the engine's blocks are not the namespace's.
        """
        _check_block_size(namespace, block_tokens, block_bytes, layout)
        self._namespace = namespace
        self._state_bytes = state_bytes
        self._parts = _ranges(layout, block_bytes)
        self._part_of_layer = _parts_of_layers(layout)
        self._benefit = benefit if benefit is not None else MeasuredBenefit()
        self._put_blocks = max(1, max_put_bytes // block_bytes)
        self._max_pending_save_bytes = max_pending_save_bytes
        self._book = StatsBook(block_tokens)
        self._handover = Handover(namespace, self)
        self._trouble: dict[str, str] = {}  # step -> the reason that was logged, until the step succeeds again
        self._trouble_lock = threading.Lock()
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
        layout: BlockLayout | None = None,
        benefit: BenefitRule | None = None,
    ) -> PrefixCache:
        """Make a cache at an engine's start, and find out whether it can work as configured.

        A store that does not answer is no obstacle: requests miss until it does.

        Raises:
            ValueError: the spec is incomplete, or the engine's blocks are not those it describes; names the field.
            KVStoreConfigError: the store refuses the namespace.
        """
        cache = cls(
            client.namespace(spec),
            block_tokens=block_tokens,
            block_bytes=block_bytes,
            state_bytes=state_bytes,
            layout=layout,
            benefit=benefit,
        )
        cache.check()
        return cache

    def check(self, *, budget_s: float = CHECK_BUDGET_S) -> Failure | None:
        """Make the namespace known to the store.

        Returns: None when it is; else why it is not yet. Requests try again by themselves.
        Raises: KVStoreConfigError: the store refuses it and always will.
        """
        failure = self._namespace.register(budget_s=budget_s)
        self._note("register", failure)
        return failure

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
        """All counts at one moment."""
        return self._book.snapshot()

    # What an engine calls

    def start_load(self, prompt: Sequence[int], context: RequestContext, views: Sequence[memoryview]) -> Load:
        """Begin to fetch the KV of the longest stored prefix; see `PrefixCacheHook`. Raises: nothing."""
        asked_blocks = min(self.usable_blocks(len(prompt)), len(views))
        load = Load(
            views[:asked_blocks],
            part_of_layer=lambda layer: self._part_of_layer.get(layer, -1) if self._part_of_layer else 0,
            start_budget_s=self._namespace.budget_s(0),
            on_wait=self._book.waited,
        )
        if not asked_blocks:
            self._end_load(load, MISS, 0, "")
        elif refusal := self._refusal("read"):
            # Blocks found could not be fetched: neither a thread nor a look-up is worth it.
            self._end_load(load, MISS, 0, refusal)
        elif not self._crew().start(self._run_load, load, prompt, context):
            self._end_load(load, MISS, 0, CLIENT_CLOSED)
        return load

    def save_blocks(
        self,
        tokens: Sequence[int],
        first_block: int,
        views: Sequence[memoryview],
        context: RequestContext,
        ownership: Ownership = Ownership.COPIED,
    ) -> Pending:
        """Store complete blocks; see `PrefixCacheHook`. Raises: nothing."""
        saves, size, refusal = self._crew().saves, self._namespace.block_bytes, self._refusal("write")
        taken = 0 if refusal else saves.reserve(len(views) * size, size) // size
        self._book.unsaved([refusal or self._no_room] * (len(views) - taken))
        end = (first_block + taken) * self._namespace.block_tokens
        pieces = list(views[:taken])
        job = SaveJob(
            tokens=tuple(tokens[:end]),
            first_block=first_block,
            pieces=pieces if ownership is Ownership.HELD else [bytes(view) for view in pieces],
            size_bytes=taken * size,
            context=context,
        )
        return self._offer(job)

    def save_state(self, tokens: Sequence[int], group: str, state: memoryview, context: RequestContext) -> Pending:
        """Store a KV group's state at the end of `tokens`; see `PrefixCacheHook`.

        Raises: ValueError: `tokens` are no whole blocks.
        """
        if not len(tokens) or len(tokens) % self._namespace.block_tokens:
            raise ValueError(
                f"a state stands at the end of whole blocks, {len(tokens)} tokens are no positive multiple of "
                f"{self._namespace.block_tokens}"
            )
        refusal = self._refusal("write")
        taken = 0 if refusal else self._crew().saves.reserve(len(state), max(1, len(state)))
        if taken < len(state):
            self._book.unsaved([refusal or self._no_room])
        pieces = [bytes(state)] if taken else []
        return self._offer(SaveJob(tuple(tokens), 0, pieces, taken, context, group))

    def note_prefill(self, tokens: int, took_s: float) -> None:
        """Tell how long it took to compute `tokens` of a prompt: what a load is compared with."""
        self._benefit.note_prefill(tokens, took_s)

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

    def _refusal(self, lane: Lane) -> str:
        """Why calls of that kind would be refused before they are sent: costs no I/O. Empty: they would not."""
        try:
            failure = self._namespace.cut_off(lane)
        except Exception as error:
            failure = _failure(error)
        return failure.reason if failure is not None else ""

    # The steps, for engines that take them one by one

    def usable_blocks(self, prompt_tokens: int) -> int:
        """The longest hit that a prompt of so many tokens can use.

        One token at least must be computed, for its logits. Where windows are replayed, it is among the replayed ones: then a
        prompt of exactly n blocks can hit all n. A recurrent state at the very end has seen the last token already.
        """
        kinds = {group.kind for group in self._namespace.spec.groups}
        replays = KvGroupKind.SLIDING_WINDOW in kinds and KvGroupKind.STATE not in kinds
        return max(0, prompt_tokens - (not replays)) // self._namespace.block_tokens

    def look_up(
        self, chain: Chain, traffic_class: str | None, *, peek: bool = False, patience_s: float = 0.0
    ) -> MatchResult:
        """Ask the store for the longest leading part of `chain`; a failure is a result.

        Args:
            peek: this is no use of the blocks, and does not count in the hit rate.
            patience_s: what the call may take beyond its usual time.
        """
        began = time.monotonic()
        try:
            match = self._namespace.match(
                chain, traffic_class or "", peek=peek, budget_s=self._budget_s(len(chain.data), patience_s)
            )
        except Exception as error:
            match = MatchResult(failure=_failure(error))
        self._note("look-up", match.failure)
        if match.failure is None:
            self._benefit.note_look_up(time.monotonic() - began)
        return match

    def load_blocks(
        self,
        chain: Chain,
        views: Sequence[memoryview],
        lease: bytes,
        part: tuple[int, int] | None = None,
        budget_s: float | None = None,
    ) -> tuple[int, str]:
        """Bring the first blocks of `chain`, or a part of each, into `views`.

        Returns: how many blocks from the first on are valid, and the reason why the next one is not: "" if there is
            none. Blocks behind a bad one do not count even if they came: without it their KV is of no use.
        """
        try:
            result = self._namespace.get(
                chain, list(views), block_count=len(views), lease=lease, part=part, budget_s=budget_s
            )
        except Exception as error:
            result = GetResult((), _failure(error))
        self._note("load", result.failure)
        valid = min(result.leading_blocks, len(views))
        if valid == len(views):
            return valid, ""
        # A block without a status is not valid: there may be fewer of them than blocks were asked for.
        unsettled = result.failure.reason if result.failure is not None else NO_RESULT
        return valid, result.statuses[valid] if valid < len(result.statuses) else unsettled

    def put_blocks(
        self,
        chain: Chain,
        first_block: int,
        views: Sequence[memoryview | bytes],
        traffic_class: str | None,
        *,
        patience_s: float = 0.0,
    ) -> list[PutResult]:
        """Put the blocks in several calls, so that a budget that ends in one of them loses only that one.

        Stops after the first call with a block that is not confirmed: what lies behind a gap cannot be hit.
        Args: patience_s: what each call may take beyond its usual time.
        Returns: a result for each block that was offered to the store, in order.
        """
        results: list[PutResult] = []
        for offset in range(0, len(views), self._put_blocks):
            part = views[offset : offset + self._put_blocks]
            report = self._put(chain, first_block + offset, part, traffic_class, patience_s)
            results += report.results
            if report.stored + report.exists < len(part):
                break
        return results

    def put_state(
        self, prefix_hash: PrefixHash, name: str, state: memoryview | bytes, *, patience_s: float = 0.0
    ) -> PutReport:
        """Put a short-lived state object beside a prefix hash; a failure is a result."""
        try:
            report = self._namespace.put_state(
                prefix_hash,
                name,
                state,
                traffic_class=STATE_CLASS,
                budget_s=self._budget_s(memoryview(state).nbytes, patience_s),
            )
        except Exception as error:
            report = _rejected(range(1), _failure(error))
        self._note("save", report.failure or _first_rejection(report))
        return report

    def fetch_state(self, prefix_hash: PrefixHash, name: str, max_bytes: int) -> bytearray | None:
        """Bring a state object of at most `max_bytes`. Returns: None: it is not there, or did not come."""
        try:
            result = self._namespace.get_state(prefix_hash, name, max_bytes=max_bytes, traffic_class=STATE_CLASS)
        except Exception as error:
            failure = _failure(error)
            result = StateResult(None, failure.reason, failure)
        self._note("state", result.failure)
        return result.data

    def shortened(self, blocks: int) -> LoadedPrefix:
        """What can be gone on from when only so many blocks came: planned anew, and not rewound into a window."""
        plan = resume_plan(self._namespace.spec, blocks, _no_state)
        return LoadedPrefix(plan.hit_tokens // self._namespace.block_tokens, plan.replay_start_token, plan.mode)

    # Loads, on a loading thread

    def _run_load(self, load: Load, prompt: Sequence[int], context: RequestContext) -> None:
        prefix, hit_blocks, miss = MISS, 0, load.end_reason
        try:
            if load.begin():
                prefix, hit_blocks, miss = self._fetch(load, prompt, context)
            else:
                miss = load.end_reason
        except Exception as error:
            failure = _failure(error)
            self._note("load", failure)
            miss = failure.reason
        finally:
            self._end_load(load, prefix, hit_blocks, miss)

    def _end_load(self, load: Load, prefix: LoadedPrefix, hit_blocks: int, miss: str) -> None:
        self._book.load(len(load.views), hit_blocks, prefix.hit_blocks, miss, time.monotonic() - load.started_at)
        load.settle(prefix)

    def _fetch(self, load: Load, prompt: Sequence[int], context: RequestContext) -> tuple[LoadedPrefix, int, str]:
        """The steps of a load. Returns: what is there, blocks hit, and why they are fewer than asked for, or ""."""
        asked_blocks = len(load.views)
        if not self._is_worth(asked_blocks * self._namespace.block_tokens, asked_blocks):
            return MISS, 0, NOT_WORTH_IT
        # Asking for no more than can be used makes the store's plan one for the very hit that is taken.
        chain = self._chain("look-up", prompt, asked_blocks, context)
        if isinstance(chain, Failure):
            return MISS, 0, chain.reason
        match = self.look_up(chain, context.traffic_class)
        promised, end = self._promise(chain, match, asked_blocks)
        if not promised.hit_blocks:
            return MISS, 0, end
        if not self._is_worth(promised.replay_start_token, promised.hit_blocks):
            return MISS, promised.hit_blocks, NOT_WORTH_IT
        load.promise(promised)
        if load.given_up:
            return MISS, promised.hit_blocks, CANCELLED
        loaded_blocks, gap = self._load_timed(load, chain.first(promised.hit_blocks), match.lease)
        loaded = promised if not gap else self.shortened(loaded_blocks)
        return loaded, promised.hit_blocks, gap or end

    def _is_worth(self, saved_tokens: int, blocks: int) -> bool:
        return self._benefit.is_worth(saved_tokens, blocks * self._namespace.block_bytes)

    def _promise(self, chain: Chain, match: MatchResult, asked_blocks: int) -> tuple[LoadedPrefix, str]:
        """What a match lets the engine go on from, with the states for it; and what ended the hit there, "" if nothing did."""
        if match.failure is not None:
            return MISS, match.failure.reason
        plan, spec = match.plan, self._namespace.spec
        states = self._fetch_states(chain, plan)
        if not is_safe(spec, plan, states.keys()):
            if plan.mode is not ReplayMode.SNAPSHOT:
                return MISS, BAD_PLAN
            plan, states = resume_plan(spec, plan.hit_tokens // spec.block_tokens, _no_state), {}
        hit_blocks = plan.hit_tokens // spec.block_tokens
        prefix = LoadedPrefix(hit_blocks, plan.replay_start_token, plan.mode, states)
        return prefix, "" if hit_blocks == asked_blocks else NOT_STORED

    def _fetch_states(self, chain: Chain, plan: ResumePlan) -> dict[str, bytearray]:
        """The states that a plan goes on from; fewer, if some do not come."""
        if plan.mode is not ReplayMode.SNAPSHOT:
            return {}
        states = {}
        for group in self._namespace.spec.groups:
            if group.replay_rule is ReplayMode.SNAPSHOT:
                state = self.fetch_state(
                    chain[plan.hit_tokens // self._namespace.block_tokens - 1], group.name, self._state_bytes
                )
                if state is None:
                    break
                states[group.name] = state
        return states

    def _load_timed(self, load: Load, chain: Chain, lease: bytes) -> tuple[int, str]:
        began = time.monotonic()
        if len(self._parts) == 1:
            loaded_blocks, gap = self.load_blocks(chain, load.views[: len(chain)], lease)
            if not gap:
                load.part_there()
        else:
            loaded_blocks, gap = self._load_parts(load, chain, lease)
        self._benefit.note_load(loaded_blocks * self._namespace.block_bytes, time.monotonic() - began)
        return loaded_blocks, gap

    def _load_parts(self, load: Load, chain: Chain, lease: bytes) -> tuple[int, str]:
        """One part of all blocks after the other, in one budget. A block of which a part is missing does not count."""
        end_s = time.monotonic() + self._namespace.budget_s(len(chain) * self._namespace.block_bytes)
        valid, gap = len(chain), ""
        for offset, size in self._parts:
            if load.given_up:
                return 0, CANCELLED
            views = [view[offset : offset + size] for view in load.views[:valid]]
            valid, end = self.load_blocks(chain.first(valid), views, lease, (offset, size), end_s - time.monotonic())
            gap = end or gap
            if not valid:
                break
            if not gap:
                load.part_there()
        return valid, gap

    # Saves, on the saving thread

    @property
    def _no_room(self) -> str:
        return CLIENT_CLOSED if self._closed else QUEUE_FULL

    def _offer(self, job: SaveJob) -> Pending:
        if job.pieces:
            self._crew().saves.offer(job)
        else:
            job.pending.finish()
        return job.pending

    def _run_save(self, job: SaveJob) -> None:
        began = time.monotonic()
        results: list[PutResult] = []
        try:
            results = self._store(job)
        except Exception as error:  # a bug; the thread goes on
            self._note("save", _failure(error))
        report = PutReport(results)
        unsaved = [result.reason for result in results if result.status is PutStatus.REJECTED]
        self._book.unsaved(unsaved + [SKIPPED] * (len(job.pieces) - len(results)))
        self._book.saved(report.stored, report.exists, time.monotonic() - began, state=bool(job.group))

    def _store(self, job: SaveJob) -> list[PutResult]:
        chain = self._chain("save", job.tokens, len(job.tokens) // self._namespace.block_tokens, job.context)
        if isinstance(chain, Failure):
            return []
        if job.group:
            return list(self.put_state(chain[len(chain) - 1], job.group, job.pieces[0]).results)
        return self.put_blocks(chain, job.first_block, job.pieces, job.context.traffic_class)

    def _drop(self, job: SaveJob) -> None:
        self._book.unsaved([CLIENT_CLOSED] * len(job.pieces))

    def _put(
        self,
        chain: Chain,
        first_block: int,
        part: Sequence[memoryview | bytes],
        traffic_class: str | None,
        patience_s: float,
    ) -> PutReport:
        try:
            report = self._namespace.put(
                chain,
                list(part),
                first_block=first_block,
                traffic_class=traffic_class or "",
                budget_s=self._budget_s(len(part) * self._namespace.block_bytes, patience_s),
            )
        except Exception as error:
            report = _rejected(range(first_block, first_block + len(part)), _failure(error))
        self._note("save", report.failure or _first_rejection(report))
        return report

    # Both

    def _budget_s(self, size_bytes: int, patience_s: float) -> float | None:
        return self._namespace.budget_s(size_bytes) + patience_s if patience_s else None

    def _chain(
        self, step: str, request_tokens: Sequence[int], block_count: int, context: RequestContext
    ) -> Chain | Failure:
        """The prefix hashes of the first `block_count` blocks: made once for all the calls of a load or a save.

        They are not kept from the one to the other: they take 30 ns a token (measured: 3 ms for 100,000 tokens), which is
        nothing beside computing the token.
        """
        tokens = request_tokens[: block_count * self._namespace.block_tokens]
        try:
            return self._namespace.chain(
                tokens, salt=context.salt, adapter=context.adapter, extra_keys=context.extra_keys
            )
        except Exception as error:
            failure = _failure(error)
        self._note(step, failure)
        return failure

    def _crew(self) -> _Crew:
        pid = os.getpid()
        crew = self._crews.get(pid)
        if crew is None:
            saves = SaveQueue(self._max_pending_save_bytes, self._run_save, self._drop)
            crew = self._crews.setdefault(
                pid, _Crew(ThreadPoolExecutor(LOAD_THREADS, thread_name_prefix="kvstore-load"), saves)
            )
        return crew

    def _note(self, step: str, failure: Failure | None) -> None:
        """Log a step's trouble when it begins, changes and ends, but not with every request in between."""
        if failure is None:
            with self._trouble_lock:
                was_in_trouble = self._trouble.pop(step, None)
            if was_in_trouble:
                _LOGGER.info("%s works again", step)
            return
        if failure.reason in _LOGGED_BY_CLIENT:
            return
        with self._trouble_lock:
            if self._trouble.get(step) == failure.reason:
                return
            self._trouble[step] = failure.reason
        _LOGGER.warning(
            "%s fails: %s [%s]; requests go on without the store, and this is not logged again until it changes",
            step,
            failure.detail,
            failure.reason,
        )


@dataclass(frozen=True, slots=True)
class _Crew:
    """The threads of one process, started when there is work for them."""

    loaders: ThreadPoolExecutor
    saves: SaveQueue

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


def _no_state(_blocks: int, _group: str) -> bool:
    return False


def _rejected(blocks: range, failure: Failure) -> PutReport:
    results = [PutResult(block, PutStatus.REJECTED, failure.reason, failure.detail) for block in blocks]
    return PutReport(results, failure)


def _failure(error: Exception) -> Failure:
    """An exception of the client as a failure of the store: neither may reach the engine."""
    if isinstance(error, KVStoreConfigError):
        return Failure(error.reason, error.detail)
    if isinstance(error, ClientClosedError):
        return Failure(CLIENT_CLOSED, str(error))
    return Failure(UNEXPECTED_ERROR, f"{type(error).__name__}: {error}")


def _first_rejection(report: PutReport) -> Failure | None:
    for result in report.results:
        if result.status is PutStatus.REJECTED:
            return Failure(result.reason, f"block {result.block} was refused: {result.detail}")
    return None


def _ranges(layout: BlockLayout | None, block_bytes: int) -> list[tuple[int, int]]:
    """Where the parts of a block begin and their bytes; padding belongs to the part before it, so that all bytes come."""
    cuts = [0, *(part.offset_bytes for part in layout.parts[1:])] if layout is not None else [0]
    return [(start, end - start) for start, end in pairwise([*cuts, block_bytes])]


def _parts_of_layers(layout: BlockLayout | None) -> dict[int, int]:
    if layout is None:
        return {}
    return {layer: number for number, part in enumerate(layout.parts) for layer in part.layers}


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
