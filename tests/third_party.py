"""A third party's client for tests: what `protoc` generates with default channel options, and nothing of ours but the checksum."""

from __future__ import annotations

import contextlib
import hashlib
import random
import time
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from kvstore_api.checksum import block_checksum
from kvstore_api.limits import MAX_FRAME_DATA_BYTES, MAX_MESSAGE_BYTES
from kvstore_api.namespace import NamespaceSpec
from kvstore_api.v1 import admin_pb2_grpc, block_store_pb2_grpc, types_pb2
from kvstore_api.v1 import block_store_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from serving import RunningServer

REFERENCE_BLOCK_BYTES = 114_688
STORED, EXISTS, REJECTED = types_pb2.PUT_STATUS_STORED, types_pb2.PUT_STATUS_EXISTS, types_pb2.PUT_STATUS_REJECTED
UNKNOWN = bytes(32)  # a namespace that nobody registers
WAIT_S = 60


def make_spec(block_bytes: int, model: str = "model", **fields: object) -> NamespaceSpec:
    return NamespaceSpec(
        model=model, revision="r1", engine="e", layout="l1", kv_dtype="bf16", block_bytes=block_bytes, **fields
    )


def make_chain(name: str, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{name} {block}".encode()).digest() for block in range(count)]


def block_of(prefix_hash: bytes, size: int) -> bytes:
    return random.Random(prefix_hash).randbytes(size)


@dataclass
class Client:
    """A third party's client: what `protoc` generates, and nothing of ours but the checksum."""

    channel: grpc.Channel

    def __post_init__(self) -> None:
        self.blocks = block_store_pb2_grpc.BlockStoreStub(self.channel)
        self.admin = admin_pb2_grpc.AdminStub(self.channel)

    def register(self, spec: NamespaceSpec) -> bytes:
        return self.blocks.RegisterNamespace(pb.RegisterNamespaceRequest(spec=spec.to_proto())).namespace

    def put(self, *messages: pb.PutBlocksRequest) -> list[types_pb2.PutResult]:
        return list(self.blocks.PutBlocks(iter(messages)).results)

    def put_blocks(
        self, namespace: bytes, chain: Sequence[bytes], size: int, first: int = 0
    ) -> list[types_pb2.PutResult]:
        return self.put(*put_messages(namespace, chain, size, first))

    def match(self, namespace: bytes, chain: Sequence[bytes], **fields: object) -> pb.MatchPrefixResponse:
        return self.blocks.MatchPrefix(pb.MatchPrefixRequest(namespace=namespace, chain=b"".join(chain), **fields))

    def get(
        self, namespace: bytes, chain: Sequence[bytes], first: int = 0, lease: bytes = b"", **fields: int
    ) -> tuple[dict[int, bytes], dict[int, str]]:
        """The blocks that came, their checksums verified, and the misses with their reasons."""
        request = get_request(namespace, chain, first, lease, **fields)
        parts: dict[int, bytearray] = {}
        checksums: dict[int, int] = {}
        misses: dict[int, str] = {}
        for frame in self.blocks.GetBlocks(request):
            assert frame.ByteSize() <= MAX_MESSAGE_BYTES
            assert len(frame.data) <= MAX_FRAME_DATA_BYTES
            assert len(frame.blocks) == len(frame.checksums)
            misses.update((miss.block, miss.reason) for miss in frame.misses)
            if not frame.blocks:
                continue
            size = len(frame.data) // len(frame.blocks)
            for place, block in enumerate(frame.blocks):
                part = parts.setdefault(block, bytearray())
                assert len(part) == frame.offset_bytes
                part += frame.data[place * size : (place + 1) * size]
                assert checksums.setdefault(block, frame.checksums[place]) == frame.checksums[place]
        for block, data in parts.items():
            assert block_checksum(data, chain[block]) == checksums[block]
        return {block: bytes(data) for block, data in parts.items()}, misses


def get_request(
    namespace: bytes, chain: Sequence[bytes], first: int = 0, lease: bytes = b"", **fields: int
) -> pb.GetBlocksRequest:
    return pb.GetBlocksRequest(
        namespace=namespace,
        chain=b"".join(chain),
        first_block=first,
        block_count=len(chain) - first,
        lease=lease,
        **fields,
    )


def header(namespace: bytes, chain: Sequence[bytes], first: int = 0, **fields: object) -> pb.PutBlocksRequest:
    fields = {"block_count": len(chain) - first, "first_block": first, **fields}
    return pb.PutBlocksRequest(header=pb.PutBlocksHeader(namespace=namespace, chain=b"".join(chain), **fields))


def frame_of(chain: Sequence[bytes], blocks: Iterable[int], size: int, **fields: object) -> pb.PutBlocksRequest:
    data = [block_of(chain[block], size) for block in blocks]
    checksums = [block_checksum(bytes_, chain[block]) for block, bytes_ in zip(blocks, data, strict=True)]
    return pb.PutBlocksRequest(**{"blocks": blocks, "checksums": checksums, "data": b"".join(data), **fields})


def put_messages(namespace: bytes, chain: Sequence[bytes], size: int, first: int = 0) -> Iterator[pb.PutBlocksRequest]:
    yield header(namespace, chain, first)
    if size <= MAX_FRAME_DATA_BYTES:
        step = MAX_FRAME_DATA_BYTES // size
        for start in range(first, len(chain), step):
            yield frame_of(chain, range(start, min(start + step, len(chain))), size)
        return
    for block in range(first, len(chain)):
        data = block_of(chain[block], size)
        checksum = block_checksum(data, chain[block])
        for offset in range(0, size, MAX_FRAME_DATA_BYTES):
            part = data[offset : offset + MAX_FRAME_DATA_BYTES]
            yield pb.PutBlocksRequest(blocks=[block], checksums=[checksum], offset_bytes=offset, data=part)


@contextlib.contextmanager
def connected(server: RunningServer) -> Iterator[Client]:
    with grpc.insecure_channel(server.target) as channel:
        yield Client(channel)


@contextlib.contextmanager
def refused(code: grpc.StatusCode, reason: str, *parts: str) -> Iterator[None]:
    """The call in the body fails with this status, reason and all these words in its message."""
    with pytest.raises(grpc.RpcError) as caught:
        yield
    error = caught.value
    assert error.code() is code, error.details()
    assert reason_of(error) == reason
    for part in parts:
        assert part in error.details()


def reason_of(error: grpc.RpcError) -> str:
    details = dict(error.trailing_metadata())["grpc-status-details-bin"]
    status = status_pb2.Status.FromString(details)
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == "kvstore"
    assert (status.code, status.message) == (error.code().value[0], error.details())
    return info.reason


def scrape(server: RunningServer) -> dict[str, float]:
    """All samples by name and labels, as they are written."""
    with urllib.request.urlopen(server.metrics_url, timeout=WAIT_S) as response:
        text = response.read().decode()
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that is on its way; fails only when it never comes."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it never came"
        time.sleep(0.01)
