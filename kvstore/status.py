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
# The message travels in HTTP/2 trailers twice, percent-encoded and, inside the details, in base64: 1 and 4/3 of these bytes at
# most, and peers refuse trailers beyond 8 KiB.
_MESSAGE_MAX_BYTES = 2048  # percent-encoded
_ELLIPSIS = "…"

STATUS_CODES: dict[type[KvStoreError], grpc.StatusCode] = {
    errors.KvStoreError: grpc.StatusCode.INTERNAL,
    errors.InvalidArgumentError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnknownTrafficClassError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NamespaceNotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.NamespaceAmbiguousError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NamespaceMismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StoreFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.QuotaExceededError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.OverloadedError: grpc.StatusCode.UNAVAILABLE,
    errors.NotServingError: grpc.StatusCode.UNAVAILABLE,
    errors.StorageError: grpc.StatusCode.INTERNAL,
    errors.DataDirLockedError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.FormatVersionError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.CorruptDataDirError: grpc.StatusCode.DATA_LOSS,
    errors.ForeignSegmentError: grpc.StatusCode.DATA_LOSS,
    errors.ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotADataDirError: grpc.StatusCode.FAILED_PRECONDITION,
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
    text = str(error).encode(errors="replace").decode()  # a path from the disk may hold what is no Unicode
    cut_at, used_bytes = 0, 0
    for place, character in enumerate(text):
        used_bytes += _encoded_bytes(character)
        if used_bytes > _MESSAGE_MAX_BYTES:
            return text[:cut_at] + _ELLIPSIS
        if used_bytes <= _MESSAGE_MAX_BYTES - _encoded_bytes(_ELLIPSIS):
            cut_at = place + 1
    return text


def _encoded_bytes(character: str) -> int:
    """Length in `grpc-message`: each byte that is no printable ASCII, and the percent sign, takes three."""
    return 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode())
