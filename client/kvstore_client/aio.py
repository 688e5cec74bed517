"""The asyncio client: the calls of KVStoreClient as coroutines.

Copying and checking blocks is done on the loop's thread, a frame of at most 1 MiB at a time. A client may be used from several
event loops, each of which gets a channel of its own.

A cancelled call cancels its RPC; nothing reads or writes the caller's memory after the await has ended, however it ends.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from kvstore_client.calls import NamespaceCalls, ReadStep, RegisterStep, UnaryStep, WriteStep
from kvstore_client.channel import ABANDON_S, Connections, channel_options, methods_of, way_of
from kvstore_client.config import ClientConfig
from kvstore_client.errors import CallFailedError, ClientClosedError, failure_from_rpc
from kvstore_client.hashing import prefix_hashes, prefix_seed
from kvstore_client.results import Failure
from kvstore_client.transfer import Outgoing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine, Mapping, Sequence
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

    from kvstore_api.chain import Chain, PrefixHash
    from kvstore_api.namespace import NamespaceDigest, NamespaceSpec
    from kvstore_client.breaker import Lane
    from kvstore_client.budget import Budget
    from kvstore_client.calls import Step, Steps
    from kvstore_client.results import DeleteResult, GetResult, MatchResult, PutReport, StateResult
    from kvstore_client.stats import ClientStats

T = TypeVar("T")

_CLOSED = Failure("CANCELLED", "the client was closed meanwhile")


class AsyncKVStoreClient:
    """A store's client for asyncio: KVStoreClient with coroutines. Making one connects to nothing: the first call does.

    It belongs to the process that uses it: the loop's own thread cannot wait for its calls before a fork, and gRPC's asyncio
    does not survive one. A forked child gets a RuntimeError instead of a channel, if one was open at the fork: spawn, or close
    before. (KVStoreClient works in a forked child.)
    """

    def __init__(self, config: ClientConfig | None = None) -> None:
        self.config = config if config is not None else ClientConfig()
        self._channels = LoopChannels(self.config)

    async def __aenter__(self) -> AsyncKVStoreClient:
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections of this process. Calls under way in other tasks end with a failure. Idempotent.

        Channels of other event loops are closed by those, soon after.
        """
        await self._channels.close()

    def namespace(self, spec: NamespaceSpec) -> AsyncNamespaceHandle:
        """As KVStoreClient.namespace. Sends nothing."""
        spec.validate()
        return AsyncNamespaceHandle(self._channels, self.config, spec)

    def cut_off(self, lane: Lane) -> Failure | None:
        """As KVStoreClient.cut_off."""
        return self._channels.connections.current().breaker.cut_off(lane)

    def stats(self) -> ClientStats:
        """As KVStoreClient.stats: the counts of all event loops of this process."""
        return self._channels.connections.current().stats.snapshot()


class AsyncNamespaceHandle:
    """One namespace of a store, for asyncio. Attributes, arguments, results and errors are those of NamespaceHandle."""

    def __init__(self, channels: LoopChannels, config: ClientConfig, spec: NamespaceSpec) -> None:
        self.spec = spec
        self.digest: NamespaceDigest = spec.digest()
        self.block_bytes = spec.block_bytes
        self.block_tokens = spec.block_tokens
        self._channels = channels
        self._calls = NamespaceCalls(spec, config, channels.connections.current)

    def chain(
        self,
        token_ids: Sequence[int] | NDArray[np.integer],
        *,
        salt: bytes = b"",
        adapter: bytes = b"",
        extra_keys: Mapping[int, Sequence[bytes]] | None = None,
    ) -> Chain:
        """As NamespaceHandle.chain."""
        seed = prefix_seed(self.digest, salt=salt, adapter=adapter)
        return prefix_hashes(seed, token_ids, self.block_tokens, extra_keys)

    def budget_s(self, size_bytes: int) -> float:
        """As NamespaceHandle.budget_s."""
        return self._calls.budget_s(size_bytes)

    def cut_off(self, lane: Lane) -> Failure | None:
        """As NamespaceHandle.cut_off."""
        return self._calls.cut_off(lane)

    async def register(self, *, budget_s: float | None = None) -> Failure | None:
        """As NamespaceHandle.register."""
        return await _run(self._calls.register(budget_s), self._channels)

    async def match(
        self,
        chain: Chain,
        traffic_class: str = "",
        *,
        lease_s: float | None = None,
        peek: bool = False,
        budget_s: float | None = None,
    ) -> MatchResult:
        """As NamespaceHandle.match."""
        return await _run(self._calls.match(chain, traffic_class, lease_s, peek, budget_s), self._channels)

    async def get(
        self,
        chain: Chain,
        out: object,
        *,
        first_block: int = 0,
        block_count: int | None = None,
        lease: bytes = b"",
        part: tuple[int, int] | None = None,
        budget_s: float | None = None,
    ) -> GetResult:
        """As NamespaceHandle.get. `out` belongs to the call until the await has ended, by a cancellation too."""
        steps = self._calls.get(chain, out, first_block, block_count, lease, part, budget_s)
        return await _run(steps, self._channels)

    async def put(
        self,
        chain: Chain,
        blocks: object,
        *,
        first_block: int = 0,
        traffic_class: str = "",
        budget_s: float | None = None,
    ) -> PutReport:
        """As NamespaceHandle.put. `blocks` must not change until the await has ended, by a cancellation too."""
        return await _run(self._calls.put(chain, blocks, first_block, traffic_class, budget_s), self._channels)

    async def delete(
        self,
        chain: Chain,
        *,
        first_block: int = 0,
        block_count: int | None = None,
        budget_s: float | None = None,
    ) -> DeleteResult:
        """As NamespaceHandle.delete."""
        return await _run(self._calls.delete(chain, first_block, block_count, budget_s), self._channels)

    async def get_state(
        self,
        prefix_hash: PrefixHash,
        name: str,
        *,
        max_bytes: int,
        traffic_class: str = "",
        budget_s: float | None = None,
    ) -> StateResult:
        """As NamespaceHandle.get_state."""
        steps = self._calls.get_state(prefix_hash, name, max_bytes, traffic_class, budget_s)
        return await _run(steps, self._channels)

    async def put_state(
        self,
        prefix_hash: PrefixHash,
        name: str,
        data: object,
        *,
        traffic_class: str = "",
        budget_s: float | None = None,
    ) -> PutReport:
        """As NamespaceHandle.put_state."""
        return await _run(self._calls.put_state(prefix_hash, name, data, traffic_class, budget_s), self._channels)


class LoopChannel:
    """What belongs to one event loop, and is touched by it alone: its channels, and the registrations under way on them."""

    def __init__(self, config: ClientConfig, recoveries: int) -> None:
        """`recoveries`: the breaker's, as of now."""
        self.registering: dict[bytes, asyncio.Task[bytes | Failure]] = {}
        self.pid = os.getpid()
        self._config = config
        self._recoveries = recoveries
        self._asking, self._writing = self._connect(), self._connect()
        self._ending: set[asyncio.Task[None]] = set()  # of channels that were replaced
        self.methods = methods_of(self._asking, self._writing)
        _CHANNELS[self] = None

    def renew(self, recoveries: int) -> None:
        """Replace what waits to connect though another connection has found the store to be back since.

        A new channel connects at once; on the old one all calls would fail for the rest of its pause.
        """
        if recoveries == self._recoveries:  # the common case
            return
        self._recoveries = recoveries
        self._asking, self._writing = self._renewed_if_waiting(self._asking), self._renewed_if_waiting(self._writing)
        self.methods = methods_of(self._asking, self._writing)

    async def close(self) -> None:
        """Close the channels; calls under way end as CANCELLED."""
        for pending in self.registering.values():
            pending.cancel()
        await self._asking.close()
        await self._writing.close()

    def _connect(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self._config.target, options=channel_options(self._config))

    def _renewed_if_waiting(self, channel: grpc.aio.Channel) -> grpc.aio.Channel:
        if channel.get_state() not in _WAITS:
            return channel
        end = asyncio.ensure_future(channel.close())
        self._ending.add(end)
        end.add_done_callback(self._ending.discard)
        return self._connect()


_WAITS = (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.CONNECTING)

# gRPC's asyncio cannot be used, and dies by a signal, in a child that was forked while one of these was open in the parent.
_CHANNELS: weakref.WeakKeyDictionary[LoopChannel, None] = weakref.WeakKeyDictionary()


class LoopChannels:
    """A channel per event loop of this process; counts and registered namespaces are the process's, for all of them."""

    def __init__(self, config: ClientConfig) -> None:
        self.connections = Connections(config)
        self._config = config
        self._by_loop: dict[asyncio.AbstractEventLoop, LoopChannel] = {}  # setdefault, pop and copy are atomic

    def current(self) -> LoopChannel:
        """The running loop's channel. Raises: ClientClosedError; RuntimeError: there is no loop, or it is a forked child's."""
        loop = asyncio.get_running_loop()
        recoveries = self.connections.current().breaker.recoveries
        channel = self._by_loop.get(loop)
        # A loop that was made before a fork can run in the child.
        if channel is None or channel.pid != os.getpid():
            return self._make(loop, recoveries)
        channel.renew(recoveries)
        return channel

    async def close(self) -> None:
        """Close the running loop's channel, and let the other loops close theirs. Idempotent."""
        self.connections.close()
        here = asyncio.get_running_loop()
        for loop in self._by_loop.copy():
            channel = self._by_loop.pop(loop, None)
            if channel is None:
                continue
            if loop is here:
                await channel.close()
            elif loop.is_running():
                asyncio.run_coroutine_threadsafe(channel.close(), loop)
        # The channel of a loop that does not run any more closes when it is collected.

    def _make(self, loop: asyncio.AbstractEventLoop, recoveries: int) -> LoopChannel:
        # A list of references: other loops' threads make theirs meanwhile.
        if any((channel := ref()) is not None and channel.pid != os.getpid() for ref in _CHANNELS.keyrefs()):
            raise RuntimeError(
                "an AsyncKVStoreClient had a connection when this process was forked, which gRPC's asyncio does not survive: "
                "spawn the process, close the client before the fork, or use KVStoreClient"
            )
        for other in self._by_loop.copy():
            if other.is_closed():
                self._by_loop.pop(other, None)
        return self._by_loop.setdefault(loop, LoopChannel(self._config, recoveries))


async def _run(steps: Steps[T], channels: LoopChannels) -> T:
    """Drive a call to its end: every reply, and whatever goes wrong instead, goes back into it."""
    try:
        step = next(steps)
        while True:
            try:
                reply = await _perform(step, channels.current())
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(reply)
    except StopIteration as end:
        result: T = end.value
        return result


async def _perform(step: Step, channel: LoopChannel) -> bytes | None:
    """Make one step, and give its reply if it has one. Raises: CallFailedError; ClientClosedError; what `take` raises."""
    timeout_s = step.budget.remaining_s()
    match step:
        case RegisterStep():
            await _register(step, channel, timeout_s)
        case UnaryStep():
            call = _begin(channel, way_of(step.method, step.request), step.request, timeout_s)
            return await _reply(call, call, step.budget, timeout_s)
        case ReadStep():
            call = _begin(channel, way_of(step.method, step.request), step.request, timeout_s)
            await _reply(call, _read(call, step), step.budget, timeout_s)
        case WriteStep():
            return await _write(step, channel, timeout_s)
    return None


def _begin(channel: LoopChannel, method: str, sent: object, timeout_s: float) -> Any:  # noqa: ANN401 - grpc has no types
    try:
        return getattr(channel.methods, method)(sent, timeout=timeout_s)
    except (grpc.aio.UsageError, ValueError) as error:  # what grpc says about a channel closed by another task
        raise ClientClosedError(str(error)) from None


async def _reply(call: Any, reply: Awaitable[T], budget: Budget, timeout_s: float) -> T:  # noqa: ANN401
    """What comes of `call`, whose end this is in any case."""
    cancelled_before = _cancellations()
    try:
        async with asyncio.timeout(timeout_s + ABANDON_S):
            return await reply
    except TimeoutError:  # the connection is full, see `channel.py`
        raise CallFailedError(budget.failure()) from None
    except grpc.RpcError as error:
        raise CallFailedError(failure_from_rpc(error.with_traceback(None))) from None
    except asyncio.CancelledError:
        # The same exception says that the caller's task is cancelled, and that close() has cancelled the RPC.
        if _cancellations() > cancelled_before:
            raise
        raise CallFailedError(_CLOSED) from None
    finally:
        call.cancel()  # nothing happens when it has ended


def _cancellations() -> int:
    """How often the running task was told to stop. (A frame that kept the task would keep its memory in a cycle.)"""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0


async def _read(call: Any, step: ReadStep) -> None:  # noqa: ANN401
    while (message := await call.read()) is not grpc.aio.EOF:
        step.take(message)


async def _write(step: WriteStep, channel: LoopChannel, timeout_s: float) -> bytes:
    """gRPC takes the messages in a task of its own."""
    outgoing = Outgoing(step.messages)
    try:
        call = _begin(channel, step.method, outgoing, timeout_s)
        status = _ServersStatus(call)
        reply: bytes = await _reply(call, status.reply_or_raise(), step.budget, timeout_s)
        return reply
    finally:
        outgoing.stop()


class _ServersStatus:
    """How the server has ended a stream of requests.

    When a server refuses such a call before all has been sent, grpcio 1.85 replaces the status that has come by an INTERNAL of
    its own about the write that failed. So each status is taken down when it comes.
    """

    def __init__(self, call: Any) -> None:  # noqa: ANN401
        self._call = call
        self._error: grpc.aio.AioRpcError | None = None
        self._came = asyncio.Event()
        call.add_done_callback(self._take_down)

    async def reply_or_raise(self) -> bytes:
        """The reply. Raises: grpc.RpcError: with the server's own status, if there is one."""
        try:
            reply: bytes = await self._call
        except grpc.aio.AioRpcError as error:
            if error.details() != _GRPCIOS_OWN_DETAILS:
                raise
            with suppress(TimeoutError):  # none comes at all when gRPC itself would not take the message
                await asyncio.wait_for(self._came.wait(), _STATUS_WAIT_S)
            raise (self._error or error) from None
        return reply

    def _take_down(self, call: Any) -> None:  # noqa: ANN401
        details = _result_now(call.details())
        code = _result_now(call.code())
        if details == _GRPCIOS_OWN_DETAILS or code is grpc.StatusCode.OK:
            return
        trailing = _result_now(call.trailing_metadata())
        self._error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details)
        self._came.set()


_GRPCIOS_OWN_DETAILS = "Internal error from Core"
_STATUS_WAIT_S = 0.1


def _result_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("the coroutine waits")


async def _register(step: RegisterStep, channel: LoopChannel, timeout_s: float) -> None:
    pending = channel.registering.get(step.digest)
    if pending is None or pending.done():
        pending = asyncio.ensure_future(_registration(step, channel))
        channel.registering[step.digest] = pending
    # Neither the end of this wait nor its cancellation ends the registration.
    done, _ = await asyncio.wait((pending,), timeout=timeout_s)
    if not done:
        raise CallFailedError(step.budget.failure())
    outcome = _CLOSED if pending.cancelled() else pending.result()
    if isinstance(outcome, Failure):
        raise CallFailedError(outcome)
    step.take(outcome)


async def _registration(step: RegisterStep, channel: LoopChannel) -> bytes | Failure:
    try:
        reply: bytes = await _begin(channel, "register", step.request, step.timeout_s)
    except grpc.RpcError as error:
        return failure_from_rpc(error)
    except ClientClosedError:
        return _CLOSED
    return reply
