"""What can go wrong with a call: exceptions for mistakes of the caller, failures for trouble with the store."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from kvstore_client.results import BAD_REPLY, BLOCK_OK, DEADLINE, UNREACHABLE, Failure

if TYPE_CHECKING:
    from collections.abc import Iterable

ERROR_DOMAIN = "kvstore"
NAMESPACE_NOT_FOUND = "NAMESPACE_NOT_FOUND"

# The caller's or the deployment's mistake: trying again cannot help, and hiding it as misses would hide it for ever.
CONFIG_REASONS = frozenset({"INVALID_ARGUMENT", "UNKNOWN_TRAFFIC_CLASS", "NAMESPACE_MISMATCH", "UNIMPLEMENTED"})

_STATUS_DETAILS_KEY = "grpc-status-details-bin"
_REASON = re.compile(r"[A-Z][A-Z0-9_]{0,62}\Z")


class KVStoreConfigError(Exception):
    """Client and server cannot work together as configured, or the client's configuration is wrong.

    `reason` is the stable name: INVALID_CONFIG (this client's own settings), INVALID_ARGUMENT, UNKNOWN_TRAFFIC_CLASS,
    NAMESPACE_MISMATCH or UNIMPLEMENTED.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{detail} [{reason}]")
        self.reason = reason
        self.detail = detail


class ClientClosedError(RuntimeError):
    """The client was used after close()."""


class CallFailedError(Exception):
    """Carries a failure from where it is noticed to where it becomes a result; callers of the client never see it."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason, failure.detail)
        self.failure = failure


class BadReplyError(CallFailedError):
    """The server's answer contradicts the protocol."""

    def __init__(self, detail: str) -> None:
        super().__init__(Failure(BAD_REPLY, detail))


def clean_reason(reason: str, otherwise: str) -> str:
    """A reason from the wire if it looks like one, else `otherwise`: nothing a server says can turn a miss into "OK"."""
    return reason if _REASON.match(reason) and reason != BLOCK_OK else otherwise


def failure_from_rpc(error: grpc.RpcError) -> Failure:
    """The failure that an ended RPC stands for: the reason in its ErrorInfo, else one made from its status code."""
    code, detail = error.code(), error.details() or ""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:  # one name for it, whether this side or the server has noticed first
        return Failure(DEADLINE, detail)
    info = _error_info(error.trailing_metadata() or ())
    if info is not None:
        return Failure(clean_reason(info.reason, code.name), detail)
    if code is grpc.StatusCode.UNAVAILABLE:
        return Failure(UNREACHABLE, detail)
    return Failure(code.name, detail)


def raise_if_config_error(failure: Failure) -> None:
    """Raises: KVStoreConfigError: the failure is of a kind that only another configuration can cure."""
    if failure.reason in CONFIG_REASONS:
        raise KVStoreConfigError(failure.reason, failure.detail)


def _error_info(metadata: Iterable[tuple[str, str | bytes]]) -> error_details_pb2.ErrorInfo | None:
    for key, value in metadata:
        if key == _STATUS_DETAILS_KEY and isinstance(value, bytes):
            return _parse_error_info(value)
    return None


def _parse_error_info(status_bytes: bytes) -> error_details_pb2.ErrorInfo | None:
    try:
        status = status_pb2.Status.FromString(status_bytes)
        for detail in status.details:
            info = error_details_pb2.ErrorInfo()
            if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
                return info
    except DecodeError:
        pass  # a damaged detail: the status code has to do
    return None
