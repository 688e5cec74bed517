"""The edge every RPC passes: bytes to messages, errors to status, calls to metrics.

Handlers get and give serialized messages, because payload frames are not parsed as protobuf objects and because a request
that is no protobuf at all deserves a clear answer, too.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError, Message

from kvstore import status
from kvstore.errors import InvalidArgumentError, KvStoreError
from kvstore_api.limits import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvstore.metrics import Metrics

M = TypeVar("M", bound=Message)
T = TypeVar("T")
Context = Any  # grpc.aio.ServicerContext; grpcio brings no types
Handler = Any  # grpc.RpcMethodHandler

_log = structlog.get_logger("kvstore.rpc")


class RpcEdge:
    """Wraps a service's handlers; the one place where an unexpected exception becomes a status."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def unary(self, method: str, request: type[M], answer: Callable[[M, Context], Awaitable[Message]]) -> Handler:
        """A method with one request and one response."""

        async def run(data: bytes, context: Context) -> bytes:
            return _serialize(await answer(parse(request, data), context))

        return grpc.unary_unary_rpc_method_handler(self._guard(method, run))

    def streams_out(self, method: str, request: type[M], answer: Callable[[M, Context], Awaitable[None]]) -> Handler:
        """A method that writes serialized responses to the context."""

        async def run(data: bytes, context: Context) -> None:
            await answer(parse(request, data), context)

        return grpc.unary_stream_rpc_method_handler(self._guard(method, run))

    def streams_in(self, method: str, answer: Callable[[Context], Awaitable[Message]]) -> Handler:
        """A method that reads serialized requests from the context."""

        async def run(_: object, context: Context) -> bytes:
            return _serialize(await answer(context))

        return grpc.stream_unary_rpc_method_handler(self._guard(method, run))

    def _guard(
        self, method: str, run: Callable[[Any, Context], Awaitable[T]]
    ) -> Callable[[Any, Context], Awaitable[T]]:
        # A coroutine function, not any callable that returns an awaitable: grpc looks at what it is given.
        async def guarded(request: Any, context: Context) -> T:  # noqa: ANN401
            try:
                with self._metrics.call(method):
                    return await run(request, context)
            except KvStoreError as error:
                _log.debug("call refused", method=method, reason=error.reason, detail=str(error))
                await status.abort(context, error)
            except grpc.aio.BaseError:
                raise  # grpc's own: the connection is gone
            except Exception as error:
                _log.exception("call failed", method=method)
                await status.abort(context, KvStoreError(f"unexpected {type(error).__name__}: {error}"))

        return guarded


def parse(kind: type[M], data: bytes) -> M:
    """The message in `data`. Raises: InvalidArgumentError: it is none of this kind."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise InvalidArgumentError(f"the request is no {kind.DESCRIPTOR.full_name}: {error}") from None


def deadline_s(context: Context) -> float | None:
    """When the caller stops waiting, in `time.monotonic()`'s seconds; None: never."""
    remaining_s = context.time_remaining()
    return None if remaining_s is None else time.monotonic() + remaining_s


def _serialize(message: Message) -> bytes:
    data = message.SerializeToString()
    if len(data) > MAX_MESSAGE_BYTES:
        # A client with default options could not read it, and would say no more than RESOURCE_EXHAUSTED.
        raise KvStoreError(f"the answer has {len(data)} bytes, a message holds at most {MAX_MESSAGE_BYTES}")
    return data
