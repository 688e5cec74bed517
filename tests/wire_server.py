"""A gRPC peer that misbehaves on purpose: faults at the wire that a sound server does not commit.

It speaks the generated messages of `kvstore.v1`. Each method does what the test says, on top of the least a client needs to
get that far: registration is answered with the digest that the client sent. Nothing is stored.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from kvstore_api.checksum import block_checksum
from kvstore_api.v1 import block_store_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.message import Message

    from kvstore_api.chain import Chain

_REQUESTS: dict[str, type[Message]] = {
    "RegisterNamespace": pb.RegisterNamespaceRequest,
    "MatchPrefix": pb.MatchPrefixRequest,
    "GetBlocks": pb.GetBlocksRequest,
    "PutBlocks": pb.PutBlocksRequest,
    "DeleteBlocks": pb.DeleteBlocksRequest,
    "GetState": pb.GetStateRequest,
    "PutState": pb.PutStateRequest,
}


class WireServer:
    """What each method answers: a callable of (request or list of requests, context), set by the test.

    A get's callable returns an iterable of messages, all others return one message; bytes are sent as they are.
    """

    def __init__(self) -> None:
        self.target = ""
        self.released = threading.Event()  # set at the end: what stalls has to let go
        self.answers: dict[str, Any] = {
            "RegisterNamespace": lambda request, _: pb.RegisterNamespaceResponse(namespace=request.namespace)
        }
        self.calls: list[str] = []  # method names in the order of arrival; append is atomic
        self.requests: list[Any] = []

    def stall(self, *_: object) -> bytes:
        """An answer that comes when the test is over."""
        self.released.wait(60)
        return b""

    def handler(self) -> grpc.GenericRpcHandler:
        """All methods of the service."""
        methods = {
            "GetBlocks": grpc.unary_stream_rpc_method_handler(self._streams("GetBlocks")),
            "GetState": grpc.unary_stream_rpc_method_handler(self._streams("GetState")),
            "PutBlocks": grpc.stream_unary_rpc_method_handler(self._collects("PutBlocks")),
            "PutState": grpc.stream_unary_rpc_method_handler(self._collects("PutState")),
        }
        for name in ("RegisterNamespace", "MatchPrefix", "DeleteBlocks"):
            methods[name] = grpc.unary_unary_rpc_method_handler(self._unary(name))
        return grpc.method_handlers_generic_handler("kvstore.v1.BlockStore", methods)

    def _unary(self, name: str) -> Any:
        def run(request: bytes, context: grpc.ServicerContext) -> bytes:
            return _serialize(self._answer(name, _REQUESTS[name].FromString(request), context))

        return run

    def _streams(self, name: str) -> Any:
        def run(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            for message in self._answer(name, _REQUESTS[name].FromString(request), context):
                yield _serialize(message)

        return run

    def _collects(self, name: str) -> Any:
        def run(messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
            return _serialize(self._answer(name, messages, context))

        return run

    def _answer(self, name: str, request: Any, context: grpc.ServicerContext) -> Any:
        self.calls.append(name)
        self.requests.append(request)
        return self.answers[name](request, context)


@contextmanager
def wire_server(listen: str = "127.0.0.1:0") -> Iterator[WireServer]:
    """A misbehaving peer on a free port of the loopback."""
    peer = WireServer()
    server = grpc.server(ThreadPoolExecutor(8, thread_name_prefix="wire-server"), options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((peer.handler(),))
    port = server.add_insecure_port(listen)
    peer.target = f"127.0.0.1:{port}"
    server.start()
    try:
        yield peer
    finally:
        peer.released.set()
        server.stop(None).wait()


def refuse(context: grpc.ServicerContext, code: grpc.StatusCode, reason: str, domain: str = "kvstore") -> None:
    """End the call as the real server does: a status with an ErrorInfo."""
    info = any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason=reason, domain=domain))
    status = status_pb2.Status(code=code.value[0], message=f"because {reason}", details=[info])
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(code, f"because {reason}")


def frame(chain: Chain, blocks: dict[int, bytes], /, **fields: Any) -> pb.GetBlocksResponse:
    """A sound frame of whole blocks; `fields` replace what it says."""
    return pb.GetBlocksResponse(
        **{
            "blocks": list(blocks),
            "checksums": [block_checksum(data, chain[position]) for position, data in blocks.items()],
            "block_checksums": [position + 1 for position in blocks],
            "data": b"".join(blocks.values()),
            **fields,
        }
    )


def _serialize(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
