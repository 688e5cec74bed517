"""The prefix cache: stands between an engine and a store, and keeps the store's troubles away from the engine.

A request passes through it in steps, each a method:

    look up   ask the store how many of the prompt's blocks it has              one small call
    plan      how many of those this engine can go on from
    load      bring them straight into the engine's memory, verified            one streaming call
    save      once they are computed, hand over the blocks that are complete    a call per 32 MiB

Nothing the store does or fails to do raises in `load_prefix` and `save_blocks`: it is a miss with a reason, counted, and
logged once. What only another configuration can cure raises when the cache is made (`PrefixCache.connect`, `check`).
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

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
)
from kvstore_engine.hook import LoadedPrefix
from kvstore_engine.prefix_cache_stats import PrefixCacheStats, StatsBook

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore_client import Chain, KVStoreClient, NamespaceHandle, NamespaceSpec

# Bytes of one put. Small enough that little is lost when its budget ends in the middle, and large enough that its fixed
# cost, a round trip and a group commit of a few milliseconds, does not show.
MAX_PUT_BYTES: Final = 32 << 20
# An engine starts once, and can wait longer then than for a request.
CHECK_BUDGET_S: Final = 2.0

# Reasons of this module's own; all others are the client's or the store's.
NOT_STORED: Final = "NOT_STORED"
REPLAY_NEEDED: Final = "REPLAY_NEEDED"  # the store's resume plan wants tokens recomputed that the hook cannot express
CLIENT_CLOSED: Final = "CLIENT_CLOSED"
UNEXPECTED_ERROR: Final = "UNEXPECTED_ERROR"  # a bug, in the client or here
SKIPPED: Final = "SKIPPED"  # not offered to the store, after one that failed or was refused
NO_RESULT: Final = "NO_RESULT"

_LOGGER = logging.getLogger("kvstore_engine.prefix_cache")
# The client itself says in one line when its store stops answering, and in another when it is back.
_LOGGED_BY_CLIENT = frozenset({"UNREACHABLE", "DEADLINE", "BREAKER_OPEN"})


class PrefixCache:
    """A `PrefixCacheHook` over one namespace of a store.

    All calls come from the engine's thread, but for `stats`, which any thread may call.
    """

    def __init__(
        self, namespace: NamespaceHandle, *, block_tokens: int, block_bytes: int, max_put_bytes: int = MAX_PUT_BYTES
    ) -> None:
        """Sends nothing.

        Args:
            block_tokens, block_bytes: the engine's own block size, which the views it lends have.
            max_put_bytes: bytes in one put; but a put has at least one block.
        Raises: ValueError: the engine's blocks are not the namespace's, or a KV group needs a replay after a hit.
        """
        _check_block_size(namespace, block_tokens, block_bytes)
        _check_groups(namespace.spec)
        self._namespace = namespace
        self._put_blocks = max(1, max_put_bytes // block_bytes)
        self._book = StatsBook(block_tokens)
        self._saves_paused = False  # from a call that failed until the next request's load
        self._trouble: dict[str, str] = {}  # step -> the reason that was logged, until the step succeeds again

    @classmethod
    def connect(cls, client: KVStoreClient, spec: NamespaceSpec, *, block_tokens: int, block_bytes: int) -> PrefixCache:
        """Make a cache at an engine's start, and find out whether it can work as configured.

        A store that does not answer is no obstacle: requests miss until it does.

        Raises:
            ValueError: the spec is incomplete, or the engine's blocks are not those it describes; names the field.
            KVStoreConfigError: the store refuses the namespace.
        """
        cache = cls(client.namespace(spec), block_tokens=block_tokens, block_bytes=block_bytes)
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

    def stats(self) -> PrefixCacheStats:
        """All counts at one moment."""
        return self._book.snapshot()

    def load_prefix(
        self,
        request_tokens: Sequence[int],
        max_hit_tokens: int,
        salt: bytes,
        traffic_class: str | None,
        allocate: Callable[[int], list[memoryview]],
    ) -> LoadedPrefix:
        """Fetch the KV of the longest stored prefix; see `PrefixCacheHook`. Raises: only what `allocate` raises."""
        started = time.perf_counter()
        self._saves_paused = False
        asked = max(0, min(max_hit_tokens, len(request_tokens))) // self._namespace.block_tokens
        hit, loaded, miss = 0, 0, ""
        if asked:
            hit, loaded, miss = self._fetch(request_tokens, asked, salt, traffic_class, allocate)
        self._book.load(asked, hit, loaded, miss, time.perf_counter() - started)
        return LoadedPrefix(loaded)

    def save_blocks(
        self,
        request_tokens: Sequence[int],
        first_block: int,
        views: Sequence[memoryview],
        salt: bytes,
        traffic_class: str | None,
    ) -> None:
        """Store complete blocks; see `PrefixCacheHook`. Raises: nothing.

        Does nothing when the store has failed since the last load: the request has waited for it once already.
        """
        started = time.perf_counter()
        results: list[PutResult] = []
        if not self._saves_paused:
            chain = self._chain("save", request_tokens, first_block + len(views), salt)
            if not isinstance(chain, Failure):
                results = self.save(chain, first_block, views, traffic_class)
        report = PutReport(results)
        unsaved = [result.reason for result in results if result.status is PutStatus.REJECTED]
        unsaved += [SKIPPED] * (len(views) - len(results))
        self._book.save(report.stored, report.exists, unsaved, time.perf_counter() - started)

    def look_up(self, chain: Chain, traffic_class: str | None) -> MatchResult:
        """Ask the store for the longest leading part of `chain`; a failure is a result."""
        try:
            match = self._namespace.match(chain, traffic_class or "")
        except Exception as error:
            match = MatchResult(failure=_failure(error))
        self._note("look-up", match.failure)
        return match

    def plan(self, match: MatchResult, asked_blocks: int) -> tuple[int, str]:
        """How many leading blocks to load, and what ended the hit there: "" if nothing did.

        A hit counts only if the store's plan lets the engine go on right behind it, without recomputing any of it.
        """
        if match.failure is not None:
            return 0, match.failure.reason
        plan = match.plan
        if plan.mode is not ReplayMode.NONE or plan.replay_start_token != plan.hit_tokens:
            return 0, REPLAY_NEEDED
        hit_blocks = min(plan.hit_tokens // self._namespace.block_tokens, asked_blocks)
        return hit_blocks, "" if hit_blocks == asked_blocks else NOT_STORED

    def load(self, chain: Chain, views: Sequence[memoryview], lease: bytes) -> tuple[int, str]:
        """Bring the first blocks of `chain` into `views`.

        Returns: how many blocks from the first on are valid, and the reason why the next one is not: "" if there is
            none. Blocks behind a bad one do not count even if they came: without it their KV is of no use.
        """
        try:
            result = self._namespace.get(chain, list(views), block_count=len(views), lease=lease)
        except Exception as error:
            result = GetResult((), _failure(error))
        self._note("load", result.failure)
        valid = min(result.leading_blocks, len(views))
        if valid == len(views):
            return valid, ""
        # A block without a status is not valid: there may be fewer of them than blocks were asked for.
        unsettled = result.failure.reason if result.failure is not None else NO_RESULT
        return valid, result.statuses[valid] if valid < len(result.statuses) else unsettled

    def save(
        self, chain: Chain, first_block: int, views: Sequence[memoryview], traffic_class: str | None
    ) -> list[PutResult]:
        """Put the blocks in several calls, so that a budget that ends in one of them loses only that one.

        Stops after the first call with a block that is not confirmed: what lies behind a gap cannot be hit.
        Returns: a result for each block that was offered to the store, in order.
        """
        results: list[PutResult] = []
        for offset in range(0, len(views), self._put_blocks):
            part = views[offset : offset + self._put_blocks]
            report = self._put(chain, first_block + offset, part, traffic_class)
            results += report.results
            if report.stored + report.exists < len(part):
                break
        return results

    def _fetch(
        self,
        request_tokens: Sequence[int],
        asked_blocks: int,
        salt: bytes,
        traffic_class: str | None,
        allocate: Callable[[int], list[memoryview]],
    ) -> tuple[int, int, str]:
        """The steps of a load. Returns: blocks hit, blocks loaded, and why they are fewer than asked for, or ""."""
        # Asking for no more than can be used makes the store's plan one for the very hit that is taken.
        chain = self._chain("look-up", request_tokens, asked_blocks, salt)
        if isinstance(chain, Failure):
            return 0, 0, chain.reason
        match = self.look_up(chain, traffic_class)
        hit_blocks, end = self.plan(match, asked_blocks)
        if not hit_blocks:
            return 0, 0, end
        loaded_blocks, gap = self.load(chain, allocate(hit_blocks), match.lease)
        return hit_blocks, loaded_blocks, gap or end

    def _put(self, chain: Chain, first_block: int, part: Sequence[memoryview], traffic_class: str | None) -> PutReport:
        try:
            report = self._namespace.put(chain, list(part), first_block=first_block, traffic_class=traffic_class or "")
        except Exception as error:
            failure = _failure(error)
            blocks = range(first_block, first_block + len(part))
            rejected = [PutResult(block, PutStatus.REJECTED, failure.reason, failure.detail) for block in blocks]
            report = PutReport(rejected, failure)
        self._note("save", report.failure or _first_rejection(report))
        return report

    def _chain(self, step: str, request_tokens: Sequence[int], block_count: int, salt: bytes) -> Chain | Failure:
        """The prefix hashes of the first `block_count` blocks: made once for all the calls of a load or a save.

        They are not kept from the one to the other: they take 30 ns a token (measured: 3 ms for 100,000 tokens), which is
        nothing beside computing the token.
        """
        tokens = request_tokens[: block_count * self._namespace.block_tokens]
        try:
            return self._namespace.chain(tokens, salt=salt)
        except Exception as error:
            failure = _failure(error)
        self._note(step, failure)
        return failure

    def _note(self, step: str, failure: Failure | None) -> None:
        """Log a step's trouble when it begins, changes and ends, but not with every request in between."""
        if failure is None:
            if self._trouble.pop(step, None):
                _LOGGER.info("%s works again", step)
            return
        self._saves_paused = True
        if failure.reason in _LOGGED_BY_CLIENT or self._trouble.get(step) == failure.reason:
            return
        self._trouble[step] = failure.reason
        _LOGGER.warning(
            "%s fails: %s [%s]; requests go on without the store, and this is not logged again until it changes",
            step,
            failure.detail,
            failure.reason,
        )


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


def _check_block_size(namespace: NamespaceHandle, block_tokens: int, block_bytes: int) -> None:
    if block_tokens != namespace.block_tokens:
        raise ValueError(
            f"the engine's blocks hold {block_tokens} tokens and the store's {namespace.block_tokens}: "
            "no block of one is a block of the other"
        )
    if block_bytes != namespace.block_bytes:
        raise ValueError(
            f"the engine's blocks have {block_bytes} bytes, but block_bytes of the namespace is {namespace.block_bytes}"
        )


def _check_groups(spec: NamespaceSpec) -> None:
    """Found out at the start, since every request would miss."""
    for group in spec.groups:
        if group.kind is not KvGroupKind.FULL:
            raise ValueError(
                f"groups: {group.name!r} is {group.kind.name}, whose layers are empty after a hit; "
                "this cache serves engines that persist every layer"
            )
