"""What a prefix cache asks of its store, step by step. No step raises: trouble is a result with a reason, and logged once."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from kvstore_api.resume import resume_plan
from kvstore_client import (
    ClientClosedError,
    Failure,
    GetResult,
    KVStoreConfigError,
    MatchResult,
    PutReport,
    PutResult,
    PutStatus,
    StateResult,
)
from kvstore_engine.hook import LoadedPrefix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore_client import Chain, NamespaceHandle, PrefixHash
    from kvstore_client.breaker import Lane
    from kvstore_engine.hook import RequestContext

T = TypeVar("T")
U = TypeVar("U")

# Bytes of one put. Small enough that little is lost when its budget ends in the middle, and large enough that its fixed
# cost, a round trip and a group commit of a few milliseconds, does not show.
MAX_PUT_BYTES: Final = 32 << 20
# What is kept for minutes. A KV group's state is worth little as soon as its conversation has gone on.
HANDOFF_CLASS: Final = "handoff"

# Reasons given here; all others are the client's or the store's.
CLIENT_CLOSED: Final = "CLIENT_CLOSED"
UNEXPECTED_ERROR: Final = "UNEXPECTED_ERROR"  # a bug, in the client or here
NO_RESULT: Final = "NO_RESULT"

_LOGGER = logging.getLogger("kvstore_engine.prefix_cache")
# The client itself says in one line when its store stops answering, and in another when it is back.
_LOGGED_BY_CLIENT = frozenset({"UNREACHABLE", "DEADLINE", "BREAKER_OPEN"})


class BlocksLoaded(NamedTuple):
    """How many blocks from the first asked for on are valid, and the reason why the next one is not: "" if there is none.

    Blocks behind a bad one do not count even if they came: without it their KV is of no use.
    """

    blocks: int
    gap: str
    whole_checksums: Sequence[int]  # of the blocks, where a part of each was loaded


class StoreSteps:
    """One namespace of a store, as a prefix cache uses it. Any thread may call anything."""

    def __init__(self, namespace: NamespaceHandle, max_put_bytes: int = MAX_PUT_BYTES) -> None:
        """Args: max_put_bytes: bytes in one put; but a put has at least one block."""
        self._namespace = namespace
        self._put_blocks = max(1, max_put_bytes // namespace.block_bytes)
        # Step -> the reason that was logged, until the step succeeds again. No lock, which a fork could leave locked: at worst
        # two threads log one trouble at once.
        self._trouble: dict[str, str] = {}

    def register(self, budget_s: float) -> Failure | None:
        """Make the namespace known. Raises: KVStoreConfigError: the store refuses it and always will."""
        failure = self._namespace.register(budget_s=budget_s)
        self.note("register", failure)
        return failure

    def refusal(self, lane: Lane) -> str:
        """Why calls of that kind would be refused before they are sent: costs no I/O. Empty: they would not."""
        failure = _guarded(lambda: self._namespace.cut_off(lane), lambda failure: failure)
        return failure.reason if failure is not None else ""

    def chain(
        self, step: str, request_tokens: Sequence[int], block_count: int, context: RequestContext
    ) -> Chain | Failure:
        """The prefix hashes of the first `block_count` blocks: made once for all the calls of a load or a save.

        They are not kept from the one to the other: they take 30 ns a token (measured: 3 ms for 100,000 tokens), which is
        nothing beside computing the token.
        """
        tokens = request_tokens[: block_count * self._namespace.block_tokens]
        chain: Chain | Failure = _guarded(
            lambda: self._namespace.chain(
                tokens, salt=context.salt, adapter=context.adapter, extra_keys=context.extra_keys
            ),
            lambda failure: failure,
        )
        if isinstance(chain, Failure):
            self.note(step, chain)
        return chain

    def look_up(
        self,
        chain: Chain,
        traffic_class: str | None,
        *,
        peek: bool = False,
        patience_s: float = 0.0,
        budget_s: float | None = None,
    ) -> MatchResult:
        """Ask the store for the longest leading part of `chain`; a failure is a result.

        Args:
            peek: this is no use of the blocks, and does not count in the hit rate.
            patience_s: what the call may take beyond its usual time.
            budget_s: what it may take, instead of its usual time.
        """
        if budget_s is None:
            budget_s = self._budget_s(len(chain.data), patience_s)
        match = _guarded(
            lambda: self._namespace.match(chain, traffic_class or "", peek=peek, budget_s=budget_s),
            lambda failure: MatchResult(failure=failure),
        )
        self.note("look-up", match.failure)
        return match

    def load_blocks(
        self,
        chain: Chain,
        views: Sequence[memoryview],
        lease: bytes,
        part: tuple[int, int] | None = None,
        budget_s: float | None = None,
        *,
        first_block: int = 0,
    ) -> BlocksLoaded:
        """Bring blocks of `chain` from `first_block` on, or a part of each, into `views`."""
        result = self.fetch_blocks(chain, views, first_block=first_block, lease=lease, part=part, budget_s=budget_s)
        valid = min(result.leading_blocks, len(views))
        if valid == len(views):
            return BlocksLoaded(valid, "", result.block_checksums)
        # A block without a status is not valid: there may be fewer of them than blocks were asked for.
        unsettled = result.failure.reason if result.failure is not None else NO_RESULT
        gap = result.statuses[valid] if valid < len(result.statuses) else unsettled
        return BlocksLoaded(valid, gap, result.block_checksums)

    def fetch_blocks(
        self,
        chain: Chain,
        views: Sequence[memoryview],
        *,
        first_block: int = 0,
        lease: bytes = b"",
        part: tuple[int, int] | None = None,
        budget_s: float | None = None,
    ) -> GetResult:
        """Bring blocks of `chain`, or a part of each, into `views`: each counts by itself. A failure is a result."""
        result = _guarded(
            lambda: self._namespace.get(
                chain,
                list(views),
                first_block=first_block,
                block_count=len(views),
                lease=lease,
                part=part,
                budget_s=budget_s,
            ),
            lambda failure: GetResult((), failure),
        )
        self.note("load", result.failure)
        return result

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
        budget_s = self._budget_s(memoryview(state).nbytes, patience_s)
        report = _guarded(
            lambda: self._namespace.put_state(prefix_hash, name, state, traffic_class=HANDOFF_CLASS, budget_s=budget_s),
            lambda failure: _rejected(range(1), failure),
        )
        self.note("save", report.failure or _first_rejection(report))
        return report

    def fetch_state(self, prefix_hash: PrefixHash, name: str, max_bytes: int) -> bytearray | None:
        """Bring a state object of at most `max_bytes`. Returns: None: it is not there, or did not come."""
        result = _guarded(
            lambda: self._namespace.get_state(prefix_hash, name, max_bytes=max_bytes, traffic_class=HANDOFF_CLASS),
            lambda failure: StateResult(None, failure.reason, failure),
        )
        self.note("state", result.failure)
        return result.data

    def shortened(self, blocks: int) -> LoadedPrefix:
        """What can be gone on from when only so many blocks came: planned anew, and not rewound into a window."""
        plan = resume_plan(self._namespace.spec, blocks, no_state)
        return LoadedPrefix(plan.hit_tokens // self._namespace.block_tokens, plan.replay_start_token, plan.mode)

    def note(self, step: str, failure: Failure | None) -> None:
        """Log a step's trouble when it begins, changes and ends, but not with every request in between."""
        if failure is None:
            if self._trouble.pop(step, None):
                _LOGGER.info("%s works again", step)
            return
        if failure.reason in _LOGGED_BY_CLIENT or self._trouble.get(step) == failure.reason:
            return
        self._trouble[step] = failure.reason
        _LOGGER.warning(
            "%s fails: %s [%s]; requests go on without the store, and this is not logged again until it changes",
            step,
            failure.detail,
            failure.reason,
        )

    def _put(
        self,
        chain: Chain,
        first_block: int,
        part: Sequence[memoryview | bytes],
        traffic_class: str | None,
        patience_s: float,
    ) -> PutReport:
        budget_s = self._budget_s(len(part) * self._namespace.block_bytes, patience_s)
        report = _guarded(
            lambda: self._namespace.put(
                chain, list(part), first_block=first_block, traffic_class=traffic_class or "", budget_s=budget_s
            ),
            lambda failure: _rejected(range(first_block, first_block + len(part)), failure),
        )
        self.note("save", report.failure or _first_rejection(report))
        return report

    def _budget_s(self, size_bytes: int, patience_s: float) -> float | None:
        return self._namespace.budget_s(size_bytes) + patience_s if patience_s else None


def no_state(_blocks: int, _group: str) -> bool:
    """That no state object is at hand."""
    return False


def _rejected(blocks: range, failure: Failure) -> PutReport:
    results = [PutResult(block, PutStatus.REJECTED, failure.reason, failure.detail) for block in blocks]
    return PutReport(results, failure)


def _guarded(call: Callable[[], T], failed: Callable[[Failure], U]) -> T | U:
    """What `call` returns, or what `failed` makes of it when it raises: neither trouble nor a bug may reach the engine."""
    try:
        return call()
    except Exception as error:
        return failed(failure_of(error))


def failure_of(error: Exception) -> Failure:
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
