"""What each call of the API does, without doing any I/O.

A call is a generator of steps: what to ask the store next, within which budget. Whoever drives it performs a step, over gRPC's
blocking channel or over its asyncio one, and hands the reply back, or throws what went wrong into it. So arguments, budget,
registration, replies, results and counts are written once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from kvstore_api.checksum import block_checksum
from kvstore_api.limits import MAX_STATE_BYTES
from kvstore_api.v1 import block_store_pb2
from kvstore_client import answers, requests
from kvstore_client.breaker import LANE_OF
from kvstore_client.budget import Budget, check_budget_s
from kvstore_client.buffers import blocks_to_read, blocks_to_write, byte_view
from kvstore_client.errors import NAMESPACE_NOT_FOUND, CallFailedError, raise_if_config_error
from kvstore_client.results import TOO_LARGE, DeleteResult, Failure, GetResult, MatchResult, PutReport, StateResult
from kvstore_client.transfer import (
    IncomingBlocks,
    IncomingState,
    StateTooLargeError,
    put_messages,
    put_state_messages,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore_api.chain import Chain, PrefixHash
    from kvstore_api.namespace import NamespaceDigest, NamespaceSpec
    from kvstore_client.breaker import Lane
    from kvstore_client.channel import Connection
    from kvstore_client.config import ClientConfig

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class UnaryStep:
    """One request, one reply: its bytes are sent back."""

    method: str  # the name of a field of Methods, here and below
    request: bytes
    budget: Budget


@dataclass(frozen=True, slots=True)
class ReadStep:
    """One request, many replies: `take` is called with each; what it raises ends the stream."""

    method: str
    request: bytes
    take: Callable[[bytes], None]
    budget: Budget


@dataclass(frozen=True, slots=True)
class WriteStep:
    """Many requests, one reply: its bytes are sent back. No message is built once the step has ended, however it ends."""

    method: str
    messages: Iterator[bytes]
    budget: Budget


@dataclass(frozen=True, slots=True)
class RegisterStep:
    """A registration with a time of its own, shared by all calls that wait for it, each within its budget.

    With a call's budget on it, a server that needs longer than that would never get to know the namespace.
    """

    digest: bytes
    request: bytes
    timeout_s: float
    take: Callable[[bytes], None]  # called with the reply
    budget: Budget


Step: TypeAlias = UnaryStep | ReadStep | WriteStep | RegisterStep
Steps: TypeAlias = Generator[Step, Any, T]


class NamespaceCalls:
    """All calls of one namespace. Their arguments and results are those of NamespaceHandle's methods."""

    def __init__(self, spec: NamespaceSpec, config: ClientConfig, current: Callable[[], Connection]) -> None:
        """`current` gives this process's connection, and raises ClientClosedError when there is none any more."""
        self.digest: NamespaceDigest = spec.digest()
        self._block_bytes = spec.block_bytes
        self._block_tokens = spec.block_tokens
        self._config = config
        self._current = current
        self._registration = block_store_pb2.RegisterNamespaceRequest(
            spec=spec.to_proto(), namespace=self.digest
        ).SerializeToString()

    def budget_s(self, size_bytes: int) -> float:
        """As NamespaceHandle.budget_s; sends nothing, as `cut_off`."""
        return self._config.budget_s(size_bytes)

    def cut_off(self, lane: Lane) -> Failure | None:
        """As NamespaceHandle.cut_off."""
        return self._current().breaker.cut_off(lane)

    def register(self, budget_s: float | None) -> Steps[Failure | None]:
        """Nothing but what comes before every call."""
        connection, budget = self._current(), self._budget(budget_s, 0)

        def attempt() -> Steps[None]:
            yield from ()

        outcome = yield from self._call(connection, "register", budget, attempt)
        return outcome if isinstance(outcome, Failure) else None

    def match(
        self, chain: Chain, traffic_class: str, lease_s: float | None, peek: bool, budget_s: float | None
    ) -> Steps[MatchResult]:
        """An empty chain asks nobody."""
        request = requests.match(self.digest, chain, traffic_class, lease_s, peek)
        connection, budget = self._current(), self._budget(budget_s, len(request))
        if not len(chain):
            return MatchResult()

        def attempt() -> Steps[MatchResult]:
            reply = yield UnaryStep("match", request, budget)
            return answers.match(reply, len(chain), self._block_tokens)

        outcome = yield from self._call(connection, "match", budget, attempt)
        result = MatchResult(failure=outcome) if isinstance(outcome, Failure) else outcome
        connection.stats.matched(len(chain), result.hit_length_blocks)
        return result

    def get(
        self,
        chain: Chain,
        out: object,
        first_block: int,
        block_count: int | None,
        lease: bytes,
        part: tuple[int, int] | None,
        budget_s: float | None,
    ) -> Steps[GetResult]:
        """With `part`, everything is as if blocks consisted of that part alone."""
        count = requests.block_range(chain, first_block, block_count)
        size = self._block_bytes if part is None else requests.part_bytes(part, self._block_bytes)
        part = None if size == self._block_bytes else part  # all of a block is no part of it
        buffers = blocks_to_write(out, size, count)
        request = requests.get(self.digest, chain, first_block, count, lease, part)
        incoming = IncomingBlocks(chain, first_block, buffers, size, of_parts=part is not None)
        connection, budget = self._current(), self._budget(budget_s, len(request) + count * size)

        def attempt() -> Steps[None]:
            incoming.restart()
            yield ReadStep("get_blocks", request, incoming.take, budget)

        failure = yield from self._call(connection, "get", budget, attempt, lambda: incoming.useful)
        if incoming.complete:
            failure = None  # all that was wanted came; a deadline while waiting for the stream's end takes nothing away
        statuses = incoming.statuses(failure)
        connection.stats.got(statuses, size)
        return GetResult(statuses, failure, incoming.block_checksums())

    def put(
        self, chain: Chain, blocks: object, first_block: int, traffic_class: str, budget_s: float | None
    ) -> Steps[PutReport]:
        """One frame after the other is built as the channel takes them."""
        buffers = blocks_to_read(blocks, self._block_bytes)
        header = requests.put_header(self.digest, chain, first_block, buffers.count, traffic_class)
        size_bytes = len(header.chain) + buffers.count * self._block_bytes
        connection, budget = self._current(), self._budget(budget_s, size_bytes)

        def attempt() -> Steps[answers.PutReplies]:
            messages = put_messages(header, chain, buffers, self._block_bytes)
            reply = yield WriteStep("put_blocks", messages, budget)
            return answers.put_results(reply)

        outcome = yield from self._call(connection, "put", budget, attempt)
        report = answers.put_report(outcome, first_block, buffers.count)
        connection.stats.put(report, self._block_bytes)
        return report

    def delete(
        self, chain: Chain, first_block: int, block_count: int | None, budget_s: float | None
    ) -> Steps[DeleteResult]:
        """A count that cannot be right is a failure."""
        count = requests.block_range(chain, first_block, block_count)
        request = requests.delete(self.digest, chain, first_block, count)
        connection, budget = self._current(), self._budget(budget_s, len(request))

        def attempt() -> Steps[int]:
            reply = yield UnaryStep("delete", request, budget)
            return answers.delete(reply, count)

        outcome = yield from self._call(connection, "delete", budget, attempt)
        return DeleteResult(failure=outcome) if isinstance(outcome, Failure) else DeleteResult(outcome)

    def get_state(
        self, prefix_hash: PrefixHash, name: str, max_bytes: int, traffic_class: str, budget_s: float | None
    ) -> Steps[StateResult]:
        """An object larger than `max_bytes` ends the stream before its bytes come."""
        request = requests.get_state(self.digest, prefix_hash, name, traffic_class)
        if not 1 <= max_bytes <= MAX_STATE_BYTES:
            raise ValueError(f"max_bytes is {max_bytes}, wanted is 1 to {MAX_STATE_BYTES}")
        incoming = IncomingState(prefix_hash, max_bytes)
        connection, budget = self._current(), self._budget(budget_s, max_bytes)

        def attempt() -> Steps[tuple[bytearray | None, str]]:
            incoming.restart()
            try:
                yield ReadStep("get_state", request, incoming.take, budget)
            except StateTooLargeError:
                return None, TOO_LARGE  # a miss, and no trouble with the store
            return incoming.result()

        outcome = yield from self._call(connection, "get_state", budget, attempt)
        if isinstance(outcome, Failure):
            return StateResult(None, outcome.reason, outcome)
        return StateResult(*outcome)

    def put_state(
        self, prefix_hash: PrefixHash, name: str, data: object, traffic_class: str, budget_s: float | None
    ) -> Steps[PutReport]:
        """The object counts as one block, number 0."""
        view = byte_view(data, "data")
        header = requests.put_state_header(self.digest, prefix_hash, name, len(view), traffic_class)
        connection, budget = self._current(), self._budget(budget_s, len(view))

        def attempt() -> Steps[answers.PutReplies]:
            header.checksum = block_checksum(view, prefix_hash)
            reply = yield WriteStep("put_state", put_state_messages(header, view), budget)
            return answers.put_state_results(reply)

        outcome = yield from self._call(connection, "put_state", budget, attempt)
        report = answers.put_report(outcome, 0, 1)
        connection.stats.put(report, len(view))
        return report

    def _budget(self, budget_s: float | None, size_bytes: int) -> Budget:
        if budget_s is None:
            return Budget(self._config.budget_s(size_bytes))
        own_s = check_budget_s(budget_s)
        return Budget(own_s, enough=own_s >= self._config.budget_s(size_bytes) / 2)

    def _call(
        self,
        connection: Connection,
        name: str,
        budget: Budget,
        attempt: Callable[[], Steps[T]],
        brought_something: Callable[[], bool] = lambda: False,
    ) -> Steps[T | Failure]:
        """Make one call of the API: registered before, retried once if the server has forgotten the namespace.

        A call that ends by an exception, such as a cancelled one, says nothing about the store and is not counted.
        """
        outcome: T | Failure
        lane = LANE_OF[name]
        try:
            outcome = connection.breaker.admit(lane) or (
                yield from self._attempt_registered(connection, budget, attempt)
            )
        except CallFailedError as error:
            outcome = error.failure
        except BaseException:
            connection.breaker.note(lane, None, conclusive=False)
            raise
        failure = outcome if isinstance(outcome, Failure) else None
        connection.stats.call(name, failure)
        conclusive = budget.is_conclusive(failure)
        connection.breaker.note(lane, failure, brought_something=brought_something(), conclusive=conclusive)
        if failure is not None:
            raise_if_config_error(failure)
        return outcome

    def _attempt_registered(self, connection: Connection, budget: Budget, attempt: Callable[[], Steps[T]]) -> Steps[T]:
        yield from self._ensure_registered(connection, budget)
        try:
            return (yield from attempt())
        except CallFailedError as error:
            if error.failure.reason != NAMESPACE_NOT_FOUND:
                raise
        # The server was wiped, or the namespace was dropped.
        connection.registered.discard(self.digest)
        yield from self._ensure_registered(connection, budget)
        return (yield from attempt())

    def _ensure_registered(self, connection: Connection, budget: Budget) -> Steps[None]:
        if self.digest in connection.registered:
            return
        budget.remaining_s()  # a call without any time left starts nothing

        def take(reply: bytes) -> None:
            answers.check_registration(reply, self.digest)
            connection.registered.add(self.digest)

        yield RegisterStep(self.digest, self._registration, self._config.register_timeout_s, take, budget)
