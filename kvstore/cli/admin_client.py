"""One call to the Admin service, and every way in which it can fail, as a command's error."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from kvstore.cli.admin_errors import CommandError, ExitCode
from kvstore.cli.admin_values import format_duration
from kvstore_api.v1 import admin_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator

    import typer
    from google.protobuf.message import Message

    from kvstore.cli.output import OutputFormat

_DOMAIN = "kvstore"
_STATUS_DETAILS_KEY = "grpc-status-details-bin"

# Looking things up is quick. Dropping and evicting walk the store's tables, which may take minutes on a large one.
QUERY_TIMEOUT_S = 10
CHANGE_TIMEOUT_S = 600

# A proxy that was set up for the web has no business between an operator and the store.
_CHANNEL_OPTIONS = (("grpc.enable_http_proxy", 0),)

# A call that goes on for hours has no deadline: pings tell that the server has vanished.
_STREAM_OPTIONS = (*_CHANNEL_OPTIONS, ("grpc.keepalive_time_ms", 30_000), ("grpc.keepalive_timeout_ms", 20_000))

_EXIT_CODES = {
    "NAMESPACE_NOT_FOUND": ExitCode.NOT_FOUND,
    "UNKNOWN_TRAFFIC_CLASS": ExitCode.NOT_FOUND,
    "INVALID_ARGUMENT": ExitCode.USAGE,
    "NAMESPACE_AMBIGUOUS": ExitCode.USAGE,
    "OVERLOADED": ExitCode.UNAVAILABLE,
    "NOT_SERVING": ExitCode.UNAVAILABLE,
    "UNAVAILABLE": ExitCode.UNAVAILABLE,
    "DEADLINE_EXCEEDED": ExitCode.UNAVAILABLE,
    "DATA_DIR_CORRUPT": ExitCode.CORRUPTION,
    "DATA_LOSS": ExitCode.CORRUPTION,
    "INTERRUPTED": ExitCode.INTERRUPTED,
}
_FIXES = {
    "NAMESPACE_NOT_FOUND": "`kvstore-admin namespace list` shows the namespaces there are",
    "NAMESPACE_AMBIGUOUS": "give more digits of the digest; `kvstore-admin -o json namespace list` shows all 64",
    "UNKNOWN_TRAFFIC_CLASS": "`kvstore-admin ttl list` shows the classes there are",
    "INVALID_ARGUMENT": "correct the value named; --help of the command says what is allowed",
    "OVERLOADED": "try again in a moment",
    "NOT_SERVING": "the server is starting or shutting down; try again in a moment",
    "UNAVAILABLE": "check that kvstore-server runs there, or name another address with --server HOST:PORT",
    "DEADLINE_EXCEEDED": "check whether the server is stuck, or give it more time with --timeout",
    "UNIMPLEMENTED": "check that --server names a kvstore-server of this version",
    "PERMISSION_DENIED": "ask who runs the server for the right to do this",
    "UNAUTHENTICATED": "ask who runs the server for credentials",
}
_OTHER_FIX = "see the server's log"


@dataclass(frozen=True, slots=True)
class Session:
    """What the global options say."""

    server: str
    timeout_s: int | None
    output_format: OutputFormat


def session_of(ctx: typer.Context) -> Session:
    """The session that the global options made."""
    session = ctx.find_object(Session)
    assert session is not None, "a command ran without the global options"
    return session


def call(session: Session, method: str, request: Message, default_timeout_s: int = QUERY_TIMEOUT_S) -> Any:  # noqa: ANN401
    """Ask the server; the answer is the method's response message.

    Raises: CommandError: no server, no answer in time, or the server refused.
    """
    timeout_s = session.timeout_s or default_timeout_s
    with grpc.insecure_channel(session.server, options=_CHANNEL_OPTIONS) as channel:
        try:
            stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]
            return getattr(stub, method)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise command_error(error, session.server, timeout_s) from None


@contextmanager
def stream(session: Session, method: str, request: Message) -> Iterator[Any]:
    """Ask the server for a stream of answers; gives the call, which is iterated and may be cancelled.

    It has no deadline unless --timeout gives one. Raises: CommandError: as `call`, but not for a call that was cancelled here.
    """
    with grpc.insecure_channel(session.server, options=_STREAM_OPTIONS) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]
        answers = getattr(stub, method)(request, timeout=session.timeout_s)
        try:
            yield answers
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                raise command_error(error, session.server, session.timeout_s or 0) from None
        finally:
            answers.cancel()


def command_error(error: grpc.RpcError, server: str, timeout_s: int) -> CommandError:
    """What a failed call means for the command: by the server's reason, else by the gRPC status."""
    code = error.code()
    reason = _reason(error) or code.name
    message = error.details() or "no details given"
    if reason == "UNAVAILABLE":
        message = f"no server answers at {server}: {message}"
    elif reason == "DEADLINE_EXCEEDED":
        message = f"no answer from {server} within {format_duration(timeout_s)}; a change may still be carried out"
    elif reason == "UNIMPLEMENTED":
        message = f"{server} does not know this request: {message}"
    return CommandError(
        message,
        reason=reason,
        exit_code=exit_code(reason),
        fix=_FIXES.get(reason, _OTHER_FIX),
    )


def exit_code(reason: str) -> ExitCode:
    """What a command ends with for a reason."""
    return _EXIT_CODES.get(reason, ExitCode.ERROR)


def _reason(error: grpc.RpcError) -> str:
    """The reason of the kvstore ErrorInfo in the call's status, or "" if it has none."""
    for key, value in error.trailing_metadata() or ():
        if key == _STATUS_DETAILS_KEY:
            for detail in status_pb2.Status.FromString(value).details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info) and info.domain == _DOMAIN:
                    return str(info.reason)
    return ""
