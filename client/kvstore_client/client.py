"""The client: synchronous, for engines that call from their worker threads.

Every call has a budget, connecting and registering included, and ends by it. Trouble with the store is part of the result;
exceptions are for mistakes: a wrong buffer (ValueError, TypeError; before anything is sent), a configuration that cannot work
(KVStoreConfigError), a closed client (ClientClosedError).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from kvstore_api.checksum import block_checksum
from kvstore_api.limits import MAX_STATE_BYTES
from kvstore_api.v1 import block_store_pb2, types_pb2
from kvstore_client import answers, requests
from kvstore_client.breaker import LANE_OF, Lane
from kvstore_client.budget import Budget, check_budget_s
from kvstore_client.buffers import blocks_to_read, blocks_to_write, byte_view
from kvstore_client.channel import Connections, read_stream, unary_call, write_stream
from kvstore_client.config import ClientConfig
from kvstore_client.errors import NAMESPACE_NOT_FOUND, CallFailedError, raise_if_config_error
from kvstore_client.hashing import prefix_hashes, prefix_seed
from kvstore_client.registration import ensure_registered
from kvstore_client.results import (
    TOO_LARGE,
    DeleteResult,
    Failure,
    GetResult,
    MatchResult,
    PutReport,
    StateResult,
)
from kvstore_client.transfer import (
    IncomingBlocks,
    IncomingState,
    Outgoing,
    StateTooLargeError,
    put_messages,
    put_state_messages,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

    from kvstore_api.chain import Chain, PrefixHash
    from kvstore_api.namespace import NamespaceDigest, NamespaceSpec
    from kvstore_client.channel import Connection, Methods
    from kvstore_client.stats import ClientStats

T = TypeVar("T")


class KVStoreClient:
    """A store's client. Threads may share it; a forked or spawned process gets its own connection by itself.

    Making one connects to nothing: the first call does.
    """

    def __init__(self, config: ClientConfig | None = None) -> None:
        self.config = config if config is not None else ClientConfig()
        self._connections = Connections(self.config)

    def __enter__(self) -> KVStoreClient:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection of this process. Calls under way in other threads end with a failure. Idempotent."""
        self._connections.close()

    def namespace(self, spec: NamespaceSpec) -> NamespaceHandle:
        """A namespace to work in. Sends nothing; the server gets to know the spec before the first call that needs it.

        Raises: NamespaceSpecError: the spec is incomplete or contradicts itself; names the field.
        """
        spec.validate()
        return NamespaceHandle(self._connections, self.config, spec)

    def cut_off(self, lane: Lane) -> Failure | None:
        """Why calls of this kind would be refused now, without asking the store: BREAKER_OPEN. See `NamespaceHandle.cut_off`."""
        return self._connections.current().breaker.cut_off(lane)

    def stats(self) -> ClientStats:
        """Counts of this process so far. Raises: ClientClosedError."""
        return self._connections.current().stats.snapshot()


class NamespaceHandle:
    """One namespace of a store. Threads may share it.

    Attributes:
        spec: what was asked for; not to be changed.
        digest: the namespace's 32-byte name.
        block_bytes: bytes of a block.
        block_tokens: tokens of a block.

    All calls take `budget_s`, the time in seconds after which they give up; by default it is computed from the client's
    configuration and the bytes to move. 0 or less is a budget that is used up.
    All calls but `chain` raise ClientClosedError after `close`, and KVStoreConfigError for a reply that only another
    configuration can cure.
    """

    def __init__(self, connections: Connections, config: ClientConfig, spec: NamespaceSpec) -> None:
        self.spec = spec
        self.digest: NamespaceDigest = spec.digest()
        self.block_bytes = spec.block_bytes
        self.block_tokens = spec.block_tokens
        self._connections = connections
        self._config = config
        self._registration = block_store_pb2.RegisterNamespaceRequest(
            spec=spec.to_proto(), namespace=self.digest
        ).SerializeToString()

    def chain(
        self,
        token_ids: Sequence[int] | NDArray[np.integer],
        *,
        salt: bytes = b"",
        adapter: bytes = b"",
        extra_keys: Mapping[int, Sequence[bytes]] | None = None,
    ) -> Chain:
        """The prefix hashes of all full blocks of `token_ids` in this namespace; see `prefix_seed` and `prefix_hashes`.

        Raises:
            TokenIdError: `token_ids` is no flat list of integers in [0, 2**32).
            TypeError: `salt` or `adapter` is not bytes.
            ValueError: there are more than 65,536 blocks.
        """
        seed = prefix_seed(self.digest, salt=salt, adapter=adapter)
        return prefix_hashes(seed, token_ids, self.block_tokens, extra_keys)

    def budget_s(self, size_bytes: int) -> float:
        """The time in seconds that a call gets which moves so many bytes and is given no budget of its own."""
        return self._config.budget_s(size_bytes)

    def register(self, *, budget_s: float | None = None) -> Failure | None:
        """Make the namespace known now instead of before the first call, to find wrong configuration at an engine's start.

        Returns: None when the server knows the namespace.
        """
        connection, budget = self._connections.current(), self._budget(budget_s, 0)
        outcome = self._call(connection, "register", budget, lambda _methods, _budget: None)
        return outcome if isinstance(outcome, Failure) else None

    def cut_off(self, lane: Lane) -> Failure | None:
        """Why calls of this kind would be refused now, without asking the store: BREAKER_OPEN. None when they would be sent.

        Takes microseconds: an engine can spare itself the hashing, and a match when gets are cut off.

        Args:
            lane: "lookup" (register, match, delete), "read" (get, get_state) or "write" (put, put_state).
        """
        return self._connections.current().breaker.cut_off(lane)

    def match(
        self,
        chain: Chain,
        traffic_class: str = "",
        *,
        lease_s: float | None = None,
        peek: bool = False,
        budget_s: float | None = None,
    ) -> MatchResult:
        """Find the longest stored leading part of `chain`.

        Args:
            traffic_class: whose use this is; empty for the server's default.
            lease_s: how long the blocks found must stay readable in any case; the server's default when None.
            peek: look without counting a use.
        """
        request = requests.match(self.digest, chain, traffic_class, lease_s, peek)
        connection, budget = self._connections.current(), self._budget(budget_s, len(request))
        if not len(chain):
            return MatchResult()

        def attempt(methods: Methods, budget: Budget) -> MatchResult:
            return answers.match(unary_call(methods.match, request, budget), len(chain), self.block_tokens)

        outcome = self._call(connection, "match", budget, attempt)
        result = MatchResult(failure=outcome) if isinstance(outcome, Failure) else outcome
        connection.stats.matched(len(chain), result.hit_length_blocks)
        return result

    def get(
        self,
        chain: Chain,
        out: object,
        *,
        first_block: int = 0,
        block_count: int | None = None,
        lease: bytes = b"",
        budget_s: float | None = None,
    ) -> GetResult:
        """Bring blocks [first_block, first_block + block_count) of `chain` into `out`.

        Args:
            out: writable memory: one buffer of block_count * block_bytes, or a list of block_count buffers of block_bytes
                each. A buffer is a contiguous numpy array, torch tensor on the CPU, or anything with the buffer protocol.
                Nothing writes to it after the return.
            block_count: the rest of the chain when None.
            lease: of a match; spares the server the look-up.
        Returns: a status per block. "OK" means that the bytes now in `out` have been verified; the contents of `out` are
            undefined for all other blocks. When the budget ends in the middle, the blocks that came before are OK.
        Raises: ValueError, TypeError: the range is not in the chain, or `out` does not fit.
        """
        count = requests.block_range(chain, first_block, block_count)
        buffers = blocks_to_write(out, self.block_bytes, count)
        request = requests.get(self.digest, chain, first_block, count, lease)
        incoming = IncomingBlocks(chain, first_block, buffers, self.block_bytes)
        size_bytes = len(request) + count * self.block_bytes
        connection, budget = self._connections.current(), self._budget(budget_s, size_bytes)

        def attempt(methods: Methods, budget: Budget) -> None:
            incoming.restart()
            read_stream(methods.get_blocks, request, budget, incoming.take)

        failure = self._call(connection, "get", budget, attempt, lambda: incoming.useful)
        if incoming.complete:
            failure = None  # all that was wanted came; a deadline while waiting for the stream's end takes nothing away
        statuses = incoming.statuses(failure)
        connection.stats.got(statuses, self.block_bytes)
        return GetResult(statuses, failure)

    def put(
        self,
        chain: Chain,
        blocks: object,
        *,
        first_block: int = 0,
        traffic_class: str = "",
        budget_s: float | None = None,
    ) -> PutReport:
        """Store blocks of `chain`, beginning with `first_block`.

        Args:
            blocks: one buffer of n * block_bytes, or a list of n buffers of block_bytes each; buffers as in `get`. They must
                not change during the call, and nothing reads them after the return.
            traffic_class: what they are kept for; empty for the server's default.
        Returns: a result per block. Blocks without confirmation count as rejected, whether they were stored or not.
        Raises: ValueError, TypeError: the blocks do not fit the chain or the namespace. One block of the wrong size in a list
            is the caller's mistake: it is raised for the whole call, before anything is sent, and no other block is stored.
        """
        buffers = blocks_to_read(blocks, self.block_bytes)
        header = requests.put_header(self.digest, chain, first_block, buffers.count, traffic_class)
        size_bytes = len(header.chain) + buffers.count * self.block_bytes
        connection, budget = self._connections.current(), self._budget(budget_s, size_bytes)

        def attempt(methods: Methods, budget: Budget) -> list[types_pb2.PutResult]:
            messages = put_messages(header, chain, buffers, self.block_bytes)
            return answers.put_results(_send(methods.put_blocks, messages, budget))

        report = answers.put_report(self._call(connection, "put", budget, attempt), first_block, buffers.count)
        connection.stats.put(report, self.block_bytes)
        return report

    def delete(
        self,
        chain: Chain,
        *,
        first_block: int = 0,
        block_count: int | None = None,
        budget_s: float | None = None,
    ) -> DeleteResult:
        """Delete blocks [first_block, first_block + block_count) of `chain`; the rest of the chain when None."""
        count = requests.block_range(chain, first_block, block_count)
        request = requests.delete(self.digest, chain, first_block, count)
        connection, budget = self._connections.current(), self._budget(budget_s, len(request))

        def attempt(methods: Methods, budget: Budget) -> int:
            return answers.delete(unary_call(methods.delete, request, budget), count)

        outcome = self._call(connection, "delete", budget, attempt)
        return DeleteResult(failure=outcome) if isinstance(outcome, Failure) else DeleteResult(outcome)

    def get_state(
        self,
        prefix_hash: PrefixHash,
        name: str,
        *,
        max_bytes: int,
        traffic_class: str = "",
        budget_s: float | None = None,
    ) -> StateResult:
        """Bring the state object `name` that stands beside `prefix_hash`.

        Args:
            max_bytes: the largest object that is wanted, at most 64 MiB. The default budget is made for this size, so give
                the real one. A larger object is a miss, TOO_LARGE.
        """
        request = requests.get_state(self.digest, prefix_hash, name, traffic_class)
        if not 1 <= max_bytes <= MAX_STATE_BYTES:
            raise ValueError(f"max_bytes is {max_bytes}, wanted is 1 to {MAX_STATE_BYTES}")
        incoming = IncomingState(prefix_hash, max_bytes)
        connection, budget = self._connections.current(), self._budget(budget_s, max_bytes)

        def attempt(methods: Methods, budget: Budget) -> tuple[bytearray | None, str]:
            incoming.restart()
            try:
                read_stream(methods.get_state, request, budget, incoming.take)
            except StateTooLargeError:
                return None, TOO_LARGE  # a miss, and no trouble with the store
            return incoming.result()

        outcome = self._call(connection, "get_state", budget, attempt)
        if isinstance(outcome, Failure):
            return StateResult(None, outcome.reason, outcome)
        return StateResult(*outcome)

    def put_state(
        self,
        prefix_hash: PrefixHash,
        name: str,
        data: object,
        *,
        traffic_class: str = "",
        budget_s: float | None = None,
    ) -> PutReport:
        """Store `data`, one buffer of 1 byte to 64 MiB, beside `prefix_hash`. What is there already is kept: EXISTS."""
        view = byte_view(data, "data")
        header = requests.put_state_header(self.digest, prefix_hash, name, len(view), traffic_class)
        connection, budget = self._connections.current(), self._budget(budget_s, len(view))

        def attempt(methods: Methods, budget: Budget) -> list[types_pb2.PutResult]:
            header.checksum = block_checksum(view, prefix_hash)
            return answers.put_state_results(_send(methods.put_state, put_state_messages(header, view), budget))

        outcome = self._call(connection, "put_state", budget, attempt)
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
        attempt: Callable[[Methods, Budget], T],
        brought_something: Callable[[], bool] = lambda: False,
    ) -> T | Failure:
        """Make one call of the API: registered before, retried once if the server has forgotten the namespace."""
        outcome: T | Failure
        lane = LANE_OF[name]
        try:
            outcome = connection.breaker.admit(lane) or self._attempt_registered(connection, budget, attempt)
        except CallFailedError as error:
            outcome = error.failure
        failure = outcome if isinstance(outcome, Failure) else None
        connection.stats.call(name, failure)
        conclusive = budget.is_conclusive(failure)
        connection.breaker.note(lane, failure, brought_something=brought_something(), conclusive=conclusive)
        if failure is not None:
            raise_if_config_error(failure)
        return outcome

    def _attempt_registered(self, connection: Connection, budget: Budget, attempt: Callable[[Methods, Budget], T]) -> T:
        ensure_registered(connection, self.digest, self._registration, self._config.register_timeout_s, budget)
        try:
            return attempt(connection.methods(), budget)
        except CallFailedError as error:
            if error.failure.reason != NAMESPACE_NOT_FOUND:
                raise
        # The server was wiped, or the namespace was dropped.
        connection.registered.discard(self.digest)
        ensure_registered(connection, self.digest, self._registration, self._config.register_timeout_s, budget)
        return attempt(connection.methods(), budget)


def _send(method: object, messages: Iterator[bytes], budget: Budget) -> bytes:
    outgoing = Outgoing(messages)
    try:
        return write_stream(method, outgoing, budget)
    finally:
        outgoing.stop()
