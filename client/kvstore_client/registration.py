"""Namespaces are registered before their first use, and again when the server has forgotten them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
from google.protobuf.message import DecodeError

from kvstore_api.limits import HASH_BYTES
from kvstore_api.v1 import block_store_pb2
from kvstore_client.errors import (
    BadReplyError,
    CallFailedError,
    ClientClosedError,
    KVStoreConfigError,
    failure_from_rpc,
)

if TYPE_CHECKING:
    from kvstore_client.budget import Budget
    from kvstore_client.channel import Connection


def ensure_registered(connection: Connection, digest: bytes, request: bytes, timeout_s: float, budget: Budget) -> None:
    """Wait until the server knows the namespace, at most for the budget.

    The registration itself has a longer time of its own and is shared by all threads that wait for it. With a call's budget
    on it, a server that needs longer than that would never get to know the namespace.

    Raises:
        CallFailedError: not registered, or not yet.
        KVStoreConfigError: NAMESPACE_MISMATCH: client and server compute different digests.
        ClientClosedError.
    """
    if digest in connection.registered:
        return
    budget.remaining_s()  # a call without any time left starts nothing
    pending = _start_or_join(connection, digest, request, timeout_s)
    try:
        reply = pending.result(timeout=budget.remaining_s())
    except grpc.FutureTimeoutError:
        raise CallFailedError(budget.failure()) from None
    except grpc.FutureCancelledError:
        raise CallFailedError(failure_from_rpc(pending)) from None
    except grpc.RpcError as error:
        raise CallFailedError(failure_from_rpc(error.with_traceback(None))) from None
    _check_reply(reply, digest)
    connection.registered.add(digest)
    with connection.lock:
        connection.registering.pop(digest, None)


def _start_or_join(connection: Connection, digest: bytes, request: bytes, timeout_s: float) -> grpc.Future:
    methods = connection.methods()
    with connection.lock:
        pending = connection.registering.get(digest)
        failed_before = pending is not None and pending.done() and pending.code() is not grpc.StatusCode.OK
        if pending is None or failed_before:
            try:
                pending = methods.register.future(request, timeout=timeout_s)
            except ValueError as error:
                raise ClientClosedError(str(error)) from None
            connection.registering[digest] = pending
        return pending


def _check_reply(reply_bytes: bytes, digest: bytes) -> None:
    try:
        reply = block_store_pb2.RegisterNamespaceResponse.FromString(reply_bytes)
    except DecodeError as error:
        raise BadReplyError(f"registration: {error}") from None
    if len(reply.namespace) != HASH_BYTES:
        raise BadReplyError(f"registration: the namespace's digest has {len(reply.namespace)} bytes")
    if reply.namespace != digest:
        raise KVStoreConfigError(
            "NAMESPACE_MISMATCH",
            f"the server computes the digest {reply.namespace.hex()} of the spec, the client {digest.hex()}: "
            "their versions do not fit",
        )
