"""Steps over gRPC's blocking channel, on the thread that calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from kvstore_client.calls import ReadStep, RegisterStep, UnaryStep, WriteStep
from kvstore_client.channel import ABANDON_S, is_large, way_of
from kvstore_client.errors import CallFailedError, ClientClosedError, failure_from_rpc
from kvstore_client.fork_gate import GATE
from kvstore_client.transfer import Outgoing

if TYPE_CHECKING:
    from kvstore_client.budget import Budget
    from kvstore_client.calls import Step, Steps
    from kvstore_client.channel import Connection, Connections

T = TypeVar("T")


def run(steps: Steps[T], connections: Connections) -> T:
    """Drive a call to its end: every reply, and whatever goes wrong instead, goes back into it."""
    try:
        step = next(steps)
        while True:
            try:
                reply = perform(step, connections.current())
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(reply)
    except StopIteration as end:
        result: T = end.value
        return result


def perform(step: Step, connection: Connection) -> bytes | None:
    """Make one step, and give its reply if it has one. Raises: CallFailedError; ClientClosedError; what `take` raises."""
    with GATE.call(step.budget):
        match step:
            case UnaryStep():
                return _unary(step, connection)
            case ReadStep():
                _read(step, connection)
            case WriteStep():
                return _write(step, connection)
            case RegisterStep():
                _register(step, connection)
    return None


def _unary(step: UnaryStep, connection: Connection) -> bytes:
    method = getattr(connection.methods(), way_of(step.method, step.request))
    if is_large(step.request):
        return _bounded(method, step.request, step.budget)
    timeout_s = step.budget.remaining_s()
    try:
        reply: bytes = method(step.request, timeout=timeout_s)
    except grpc.RpcError as error:
        raise CallFailedError(failure_from_rpc(error)) from None
    except ValueError as error:  # what grpc says about a channel closed by another thread
        raise ClientClosedError(str(error)) from None
    return reply


def _read(step: ReadStep, connection: Connection) -> None:
    # On a full connection, too, the end of a stream comes in time: it does not wait for the end of sending.
    method = getattr(connection.methods(), way_of(step.method, step.request))
    timeout_s = step.budget.remaining_s()
    try:
        call = method(step.request, timeout=timeout_s)
    except ValueError as error:
        raise ClientClosedError(str(error)) from None
    try:
        for message in call:
            step.take(message)
    except grpc.RpcError as error:
        # The error is the call itself; with its traceback it would keep the last message until the next garbage collection.
        raise CallFailedError(failure_from_rpc(error.with_traceback(None))) from None
    finally:
        # Nothing happens when the call has ended, as it does at its deadline too. That matters: each stream that is cancelled
        # in the middle costs 20 KB that grpcio 1.85 never gives back, so only bad replies and interrupts end that way.
        call.cancel()


def _write(step: WriteStep, connection: Connection) -> bytes:
    """gRPC takes the messages on a thread of its own."""
    outgoing = Outgoing(step.messages)
    try:
        return _bounded(getattr(connection.methods(), step.method), outgoing, step.budget)
    finally:
        outgoing.stop()


def _bounded(method: Any, sent: Outgoing | bytes, budget: Budget) -> bytes:  # noqa: ANN401 - grpc has no types
    """The reply to what could fill a connection: given up when gRPC does not end the call in time."""
    timeout_s = budget.remaining_s()
    try:
        call = method.future(sent, timeout=timeout_s)
    except ValueError as error:
        raise ClientClosedError(str(error)) from None
    try:
        reply: bytes = call.result(timeout=timeout_s + ABANDON_S)
    except grpc.FutureTimeoutError:  # the connection is full, see `channel.py`
        raise CallFailedError(budget.failure()) from None
    except grpc.FutureCancelledError:
        raise CallFailedError(failure_from_rpc(call)) from None
    except grpc.RpcError as error:
        raise CallFailedError(failure_from_rpc(error.with_traceback(None))) from None
    finally:
        call.cancel()
    return reply


def _register(step: RegisterStep, connection: Connection) -> None:
    pending = _start_or_join(step, connection)
    try:
        reply = pending.result(timeout=step.budget.remaining_s())
    except grpc.FutureTimeoutError:
        raise CallFailedError(step.budget.failure()) from None
    except grpc.FutureCancelledError:
        raise CallFailedError(failure_from_rpc(pending)) from None
    except grpc.RpcError as error:
        raise CallFailedError(failure_from_rpc(error.with_traceback(None))) from None
    try:
        step.take(reply)
    finally:
        with connection.lock:
            if connection.registering.get(step.digest) is pending:
                del connection.registering[step.digest]


def _start_or_join(step: RegisterStep, connection: Connection) -> grpc.Future:
    methods = connection.methods()
    with connection.lock:
        pending = connection.registering.get(step.digest)
        failed_before = pending is not None and pending.done() and pending.code() is not grpc.StatusCode.OK
        if pending is None or failed_before:
            try:
                pending = methods.register.future(step.request, timeout=step.timeout_s)
            except ValueError as error:
                raise ClientClosedError(str(error)) from None
            connection.registering[step.digest] = pending
            ended = GATE.background_call()
            pending.add_done_callback(lambda _: ended())
        return pending
