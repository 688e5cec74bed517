"""Errors to gRPC status: one table, one place."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from kvstore import errors
from kvstore.pool import DeadlinePassedError

if TYPE_CHECKING:
    from kvstore.errors import KvStoreError

ERROR_DOMAIN = "kvstore"
_DETAILS_KEY = "grpc-status-details-bin"
# Status travels in HTTP/2 trailers, twice: peers refuse trailers beyond 8 KiB.
_MESSAGE_MAX_CHARS = 1000

STATUS_CODES: dict[type[KvStoreError], grpc.StatusCode] = {
    errors.KvStoreError: grpc.StatusCode.INTERNAL,
    errors.InvalidArgumentError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnknownTrafficClassError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NamespaceNotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.NamespaceAmbiguousError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NamespaceMismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StoreFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.OverloadedError: grpc.StatusCode.UNAVAILABLE,
    errors.NotServingError: grpc.StatusCode.UNAVAILABLE,
    errors.StorageError: grpc.StatusCode.INTERNAL,
    errors.DataDirLockedError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.FormatVersionError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.CorruptDataDirError: grpc.StatusCode.DATA_LOSS,
    errors.ForeignSegmentError: grpc.StatusCode.DATA_LOSS,
    errors.ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    DeadlinePassedError: grpc.StatusCode.DEADLINE_EXCEEDED,
}


def status_code(error: KvStoreError) -> grpc.StatusCode:
    """The gRPC status of an error; that of the nearest base class for a class that is not in the table."""
    return next(STATUS_CODES[kind] for kind in type(error).__mro__ if kind in STATUS_CODES)


def rich_status(error: KvStoreError) -> status_pb2.Status:
    """The error as `google.rpc.Status` with an `ErrorInfo` that holds the stable reason."""
    info = any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN))
    return status_pb2.Status(code=status_code(error).value[0], message=_message(error), details=[info])


async def abort(context: grpc.aio.ServicerContext, error: KvStoreError) -> NoReturn:
    """End the call with the error. Raises: grpc.aio.AbortError: always."""
    details = ((_DETAILS_KEY, rich_status(error).SerializeToString()),)
    await context.abort(status_code(error), _message(error), details)
    raise AssertionError("abort returned")


def _message(error: KvStoreError) -> str:
    text = str(error)
    return text if len(text) <= _MESSAGE_MAX_CHARS else text[: _MESSAGE_MAX_CHARS - 1] + "…"
