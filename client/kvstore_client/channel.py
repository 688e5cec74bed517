"""The connection to the store: lazily made gRPC channels, of each process its own.

There are two, one for what is written and for large requests, and one for everything else. While a connection is full, because
its server is stopped or overrun in the middle of a put, gRPC holds back the end of each call that has sent something on it, at
its deadline too, until the kernel gives the connection up (KEEPALIVE_TIMEOUT_MS). So no small call shares one with a put or
with a request of a long chain (see `way_of`), and those are given up on this side, see ABANDON_S.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from kvstore_api.limits import HASH_BYTES, MAX_MESSAGE_BYTES
from kvstore_api.v1 import block_store_pb2
from kvstore_client.breaker import Breaker, is_no_answer
from kvstore_client.errors import ClientClosedError, failure_from_rpc
from kvstore_client.fork_gate import GATE
from kvstore_client.stats import StatsBook

if TYPE_CHECKING:
    from kvstore_client.config import ClientConfig
    from kvstore_client.results import Failure

# Pings go out only while a call is active and nothing has been heard for this long. A server with default settings takes a
# ping every 5 minutes and closes the connection after the third that comes sooner; no call of ours is silent that long.
KEEPALIVE_TIME_MS = 30_000
# Also how long sent bytes may stay unacknowledged (TCP_USER_TIMEOUT) before the connection counts as dead.
KEEPALIVE_TIMEOUT_MS = 10_000
RECONNECT_BACKOFF_INITIAL_MS = 100
# gRPC has so long after a call's deadline to say so itself; then the call is given up without it.
ABANDON_S = 0.02
# A request above this, a chain of more than about 2,000 blocks, goes where puts go: a few of 2 MB fill a connection.
LARGE_REQUEST_BYTES = 64 << 10

_SERVICE = block_store_pb2.DESCRIPTOR.services_by_name["BlockStore"].full_name


@dataclass(frozen=True, slots=True)
class Methods:
    """The service's methods, from bytes to bytes: payload must not pass through protobuf objects."""

    register: Any  # grpc.UnaryUnaryMultiCallable
    match: Any  # grpc.UnaryUnaryMultiCallable
    get_blocks: Any  # grpc.UnaryStreamMultiCallable
    put_blocks: Any  # grpc.StreamUnaryMultiCallable
    delete: Any  # grpc.UnaryUnaryMultiCallable
    get_state: Any  # grpc.UnaryStreamMultiCallable
    put_state: Any  # grpc.StreamUnaryMultiCallable
    large_match: Any  # grpc.UnaryUnaryMultiCallable, where puts go, as the next three
    large_get_blocks: Any  # grpc.UnaryStreamMultiCallable
    large_delete: Any  # grpc.UnaryUnaryMultiCallable
    large_get_state: Any  # grpc.UnaryStreamMultiCallable


class Connection:
    """Everything that belongs to one process and must not be shared across a fork: channel, locks, counts."""

    def __init__(self, config: ClientConfig) -> None:
        self.stats = StatsBook()
        self.breaker = Breaker(config.target, config.breaker_failures, config.breaker_probe_s, self.probe)
        self.registered: set[bytes] = set()  # namespace digests; add and discard are atomic
        self.registering: dict[bytes, Any] = {}  # digest -> grpc.Future; guarded by `lock`
        self.lock = threading.Lock()
        self._config = config
        self._channels: tuple[grpc.Channel, ...] = ()  # guarded by `lock`
        self._methods: Methods | None = None  # guarded by `lock`
        self._closed = False  # guarded by `lock`

    def methods(self) -> Methods:
        """The service's methods on the open channel. Raises: ClientClosedError."""
        methods = self._methods
        if methods is not None:
            return methods
        with self.lock:
            if self._closed:
                raise ClientClosedError("the client is closed")
            if self._methods is None:
                options = channel_options(self._config)
                asking, writing = (grpc.insecure_channel(self._config.target, options=options) for _ in range(2))
                self._channels, self._methods = (asking, writing), methods_of(asking, writing)
            return self._methods

    def probe(self, timeout_s: float) -> Failure | None:
        """Ask the service for one block that nobody has, without leaving a trace in its counts of hits.

        Returns: None when it answers, be it that it does not know the namespace.
        Raises: ClientClosedError.
        """
        namespace = next(iter(tuple(self.registered)), bytes(HASH_BYTES))  # a tuple: other threads change the set
        request = block_store_pb2.MatchPrefixRequest(namespace=namespace, chain=bytes(HASH_BYTES), peek=True)
        end_s = time.monotonic() + timeout_s
        # Both ways: a put on a connection that is not there yet would have all calls cut off again.
        for way in ("match", "large_match"):
            try:
                # Waiting for the connection: else a probe in the pause between two attempts to connect would fail at once.
                with GATE.call():
                    getattr(self.methods(), way)(
                        request.SerializeToString(), timeout=max(0.001, end_s - time.monotonic()), wait_for_ready=True
                    )
            except grpc.RpcError as error:
                failure = failure_from_rpc(error)
                if is_no_answer(failure.reason):
                    return failure
            except ValueError as error:
                raise ClientClosedError(str(error)) from None
        return None

    def close(self) -> None:
        """Close the channel; calls under way end as CANCELLED. Idempotent."""
        with self.lock:
            self._closed = True
            channels, self._channels, self._methods = self._channels, (), None
        if channels:
            with GATE.call():
                for channel in channels:
                    channel.close()
        self.breaker.close()


class Connections:
    """A connection per process: a forked child gets its own, and leaves its parent's alone.

    A child must neither use nor close the channel it inherited: its socket is the parent's too. GRPC_ENABLE_FORK_SUPPORT is
    not needed and better left unset: with it, grpcio 1.85 hangs inside fork() while other threads have calls under way. Without
    it a child works, as long as no thread is inside grpcio at the fork, for which the fork gate sees.
    """

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self._by_pid: dict[int, Connection] = {}
        self._closed = False

    def current(self) -> Connection:
        """This process's connection. Raises: ClientClosedError."""
        if self._closed:
            raise ClientClosedError("the client is closed")
        return self._of_process()

    def close(self) -> None:
        """Close this process's connection. Idempotent."""
        self._closed = True
        self._of_process().close()

    def _of_process(self) -> Connection:
        pid = os.getpid()
        connection = self._by_pid.get(pid)
        # No lock here: a lock that another thread held at the fork would stay locked in the child. setdefault is atomic.
        return connection or self._by_pid.setdefault(pid, Connection(self._config))


def channel_options(config: ClientConfig) -> list[tuple[str, int]]:
    """How a channel, blocking or asyncio, deals with the network."""
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 0),
        # gRPC's own back-off grows to 2 minutes, which is how long a restarted server would go unnoticed.
        ("grpc.initial_reconnect_backoff_ms", RECONNECT_BACKOFF_INITIAL_MS),
        ("grpc.max_reconnect_backoff_ms", round(config.reconnect_backoff_max_s * 1000)),
        ("grpc.min_reconnect_backoff_ms", round(config.connect_timeout_s * 1000)),  # in truth the connect timeout
        # A retry would cost budget and keeps copies of what was sent; a miss is the answer here.
        ("grpc.enable_retries", 0),
        # Block data never goes through a web proxy that the environment happens to name.
        ("grpc.enable_http_proxy", 0),
        # Channels of other clients in the process keep their connections, and their back-off, to themselves.
        ("grpc.use_local_subchannel_pool", 1),
        # grpc.experimental.ChannelOptions.SingleThreadedUnaryStream: a stream is read by the thread that asks for it, without
        # a hop over the channel's thread. About 10 % less CPU per block; a gRPC without the option ignores it.
        ("SingleThreadedUnaryStream", 1),
    ]


def is_large(request: bytes) -> bool:
    """Whether a request could fill a connection, together with a few of its kind."""
    return len(request) > LARGE_REQUEST_BYTES


def way_of(method: str, request: bytes) -> str:
    """The field of Methods that a request takes."""
    return f"large_{method}" if is_large(request) else method


def methods_of(channel: Any, writing: Any) -> Methods:  # noqa: ANN401 - grpc has no types
    """The service's methods on two channels, blocking or asyncio; the second is for what is written."""

    def path(name: str) -> str:
        return f"/{_SERVICE}/{name}"

    return Methods(
        register=channel.unary_unary(path("RegisterNamespace")),
        match=channel.unary_unary(path("MatchPrefix")),
        get_blocks=channel.unary_stream(path("GetBlocks")),
        put_blocks=writing.stream_unary(path("PutBlocks")),
        delete=channel.unary_unary(path("DeleteBlocks")),
        get_state=channel.unary_stream(path("GetState")),
        put_state=writing.stream_unary(path("PutState")),
        large_match=writing.unary_unary(path("MatchPrefix")),
        large_get_blocks=writing.unary_stream(path("GetBlocks")),
        large_delete=writing.unary_unary(path("DeleteBlocks")),
        large_get_state=writing.unary_stream(path("GetState")),
    )
