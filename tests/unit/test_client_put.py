"""Puts: what is sent, and what is made of the replies of a peer that lies."""

from __future__ import annotations

import random

import grpc
import numpy as np
import pytest

from kvstore_api.checksum import block_checksum
from kvstore_api.limits import MAX_FRAME_BLOCKS, MAX_FRAME_DATA_BYTES
from kvstore_api.v1 import block_store_pb2 as pb
from kvstore_client import ClientConfig, NamespaceSpec, PutStatus, prefix_hashes
from kvstore_client.transfer import Outgoing
from wire_server import refuse, wire_server

STORED, EXISTS, REJECTED = 1, 2, 3


def spec(block_bytes: int) -> NamespaceSpec:
    return NamespaceSpec(
        model="m", revision="r", engine="e", layout="l", kv_dtype="uint8", block_bytes=block_bytes, labels={"x": "y"}
    )


def chain(blocks: int):
    return prefix_hashes(bytes(32), np.arange(blocks * 128, dtype=np.uint32))


@pytest.fixture
def peer():
    with wire_server() as server:
        yield server


@pytest.fixture
def client(peer, door):
    with door(ClientConfig(target=peer.target, base_budget_s=30)) as client:
        yield client


def collect(peer, sent: list[pb.PutBlocksRequest]) -> None:
    """Keep what puts send, and answer that all is stored."""

    def answer(messages, _):
        sent.extend(pb.PutBlocksRequest.FromString(message) for message in messages)
        header = sent[0].header
        positions = range(header.first_block, header.first_block + header.block_count)
        return pb.PutBlocksResponse(results=[{"block": position, "status": STORED} for position in positions])

    peer.answers["PutBlocks"] = answer


@pytest.mark.parametrize("scattered", [False, True], ids=["one buffer", "a buffer per block"])
@pytest.mark.parametrize(
    ("block_bytes", "count"),
    [
        (1, 5000),
        (100, 3),
        (114_688, 1),
        (114_688, 9),
        (114_688, 10),
        (114_688, 40),
        (1 << 20, 3),
        ((1 << 20) + 1, 2),
        (2_949_120, 2),
    ],
)
def test_frames_hold_whole_blocks_while_they_fit_and_bring_every_byte_once(peer, client, block_bytes, count, scattered):
    sent: list[pb.PutBlocksRequest] = []
    collect(peer, sent)
    first, data = 2, random.Random(count).randbytes(block_bytes * count)
    pieces = [data[i * block_bytes : (i + 1) * block_bytes] for i in range(count)]
    hashes = chain(first + count + 1)
    report = client.namespace(spec(block_bytes)).put(
        hashes, pieces if scattered else data, first_block=first, traffic_class="agent"
    )
    assert (report.stored, report.exists, report.rejected, report.failure) == (count, 0, 0, None)

    header = sent[0].header
    assert (header.namespace, header.chain) == (spec(block_bytes).digest(), hashes.first(first + count).data)
    assert (header.first_block, header.block_count, header.traffic_class) == (first, count, "agent")
    received: dict[int, bytes] = {}
    for message in sent[1:]:
        assert not message.HasField("header")
        assert 0 < len(message.data) <= MAX_FRAME_DATA_BYTES
        assert len(message.blocks) <= MAX_FRAME_BLOCKS
        assert not message.sizes
        size = len(message.data) // len(message.blocks)
        for i, (position, checksum) in enumerate(zip(message.blocks, message.checksums, strict=True)):
            assert len(received.get(position, b"")) == message.offset_bytes
            received[position] = received.get(position, b"") + message.data[i * size : (i + 1) * size]
            assert checksum == block_checksum(pieces[position - first], hashes[position])
    assert list(received) == list(range(first, first + count))
    assert list(received.values()) == pieces
    per_frame = min(MAX_FRAME_BLOCKS, MAX_FRAME_DATA_BYTES // block_bytes)
    frames = -(-count // per_frame) if per_frame else count * -(-block_bytes // MAX_FRAME_DATA_BYTES)
    assert len(sent) == 1 + frames


def result(block: int, status: int = STORED, **fields) -> dict:
    return {"block": block, "status": status, **fields}


# the results of a reply to a put of blocks 2, 3 and 4; per block: the status and the reason that are made of them
REPLIES = {
    "stored": ([result(2), result(3), result(4)], ["STORED", "STORED", "STORED"]),
    "another order": ([result(4), result(2, EXISTS), result(3)], ["EXISTS", "STORED", "STORED"]),
    "no results": ([], ["NO_RESULT"] * 3),
    "one result fewer": ([result(2), result(3)], ["STORED", "STORED", "NO_RESULT"]),
    "first result missing": ([result(3), result(4)], ["NO_RESULT", "STORED", "STORED"]),
    "other blocks": ([result(0), result(1), result(5), result(2**32 - 1)], ["NO_RESULT"] * 3),
    "one result more": ([result(2), result(3), result(4), result(5)], ["STORED"] * 3),
    "block twice": ([result(2), result(2), result(3), result(4)], ["NO_RESULT", "STORED", "STORED"]),
    "contradiction": ([result(2), result(2, REJECTED), result(3), result(4)], ["NO_RESULT", "STORED", "STORED"]),
    "no status": ([result(2, 0), result(3), result(4)], ["NO_RESULT", "STORED", "STORED"]),
    "unknown status": ([result(2, 17), result(3), result(4)], ["NO_RESULT", "STORED", "STORED"]),
    "rejected": (
        [result(2), result(3, REJECTED, reason="STORE_FULL", detail="full"), result(4)],
        ["STORED", "STORE_FULL", "STORED"],
    ),
    "rejected without a reason": ([result(2, REJECTED), result(3), result(4)], ["REJECTED", "STORED", "STORED"]),
    "rejected as OK": ([result(2, REJECTED, reason="OK"), result(3), result(4)], ["REJECTED", "STORED", "STORED"]),
    "rejected without a stable name": (
        [result(2, REJECTED, reason="it was full"), result(3), result(4)],
        ["REJECTED", "STORED", "STORED"],
    ),
    "stored with a reason": ([result(2, reason="WHY"), result(3), result(4)], ["STORED", "STORED", "STORED"]),
}


@pytest.mark.parametrize("name", REPLIES)
def test_only_a_clear_confirmation_counts_as_stored(peer, client, name):
    results, expected = REPLIES[name]
    peer.answers["PutBlocks"] = lambda messages, _: (list(messages), pb.PutBlocksResponse(results=results))[1]
    report = client.namespace(spec(10)).put(chain(5), bytes(30), first_block=2)
    assert [r.block for r in report.results] == [2, 3, 4]
    assert [r.reason or r.status.name for r in report.results] == expected
    assert (report.stored, report.exists) == (expected.count("STORED"), expected.count("EXISTS"))
    assert report.rejected == 3 - report.stored - report.exists
    assert report.failure is None


def test_garbled_reply_confirms_nothing(peer, client):
    peer.answers["PutBlocks"] = lambda messages, _: (list(messages), b"\xff\xff\xff")[1]
    report = client.namespace(spec(10)).put(chain(5), bytes(30))
    assert [r.reason for r in report.results] == ["BAD_REPLY"] * 3
    assert report.failure.reason == "BAD_REPLY"


def test_early_refusal_ends_a_large_put(peer, client):
    """The reply comes while most of the bytes have not been sent; nothing waits for them."""
    peer.answers["PutBlocks"] = lambda _, context: refuse(context, grpc.StatusCode.UNAVAILABLE, "OVERLOADED")
    data = bytearray(64 << 20)
    report = client.namespace(spec(1 << 20)).put(chain(64), data)
    assert (report.rejected, report.failure.reason) == (64, "OVERLOADED")
    data.append(0)  # would raise if the caller's memory were still held


def test_put_that_is_given_up_lets_go_of_the_callers_memory(peer, client):
    def answer(messages, _):
        next(messages)
        return peer.stall()

    peer.answers["PutBlocks"] = answer
    namespace = client.namespace(spec(1 << 20))
    assert namespace.register() is None
    data = bytearray(64 << 20)
    report = namespace.put(chain(64), data, budget_s=0.5)
    assert (report.rejected, report.failure.reason) == (64, "DEADLINE")
    assert {r.status for r in report.results} == {PutStatus.REJECTED}
    data.append(0)


def test_after_stop_no_message_is_built_any_more():
    built = []

    def messages():
        for number in range(3):
            built.append(number)
            yield b"message"

    outgoing = Outgoing(messages())
    assert next(outgoing) == b"message"
    outgoing.stop()
    assert list(outgoing) == []
    assert built == [0]


def test_namespace_that_the_server_forgot_is_registered_anew_and_the_put_sent_again(peer, client):
    sent: list[pb.PutBlocksRequest] = []

    def first_answer(_, context):
        collect(peer, sent)
        refuse(context, grpc.StatusCode.NOT_FOUND, "NAMESPACE_NOT_FOUND")

    peer.answers["PutBlocks"] = first_answer
    report = client.namespace(spec(10)).put(chain(3), bytes(range(30)))
    assert (report.stored, report.failure) == (3, None)
    assert peer.calls == ["RegisterNamespace", "PutBlocks", "RegisterNamespace", "PutBlocks"]
    assert sent[1].data == bytes(range(30))


@pytest.mark.parametrize("size", [1, 1000, 1 << 20, (1 << 20) + 1, 5_000_000])
def test_state_object_is_sent_in_frames(peer, client, size):
    sent: list[pb.PutStateRequest] = []

    def answer(messages, _):
        sent.extend(pb.PutStateRequest.FromString(message) for message in messages)
        return pb.PutStateResponse(result={"status": STORED})

    peer.answers["PutState"] = answer
    data, hashes = random.Random(size).randbytes(size), chain(2)
    report = client.namespace(spec(10)).put_state(hashes[1], "tail", data, traffic_class="handoff")
    assert (report.stored, report.failure, len(report.results)) == (1, None, 1)
    header = sent[0].header
    assert (header.prefix_hash, header.name, header.traffic_class) == (hashes[1], "tail", "handoff")
    assert (header.size_bytes, header.checksum) == (size, block_checksum(data, hashes[1]))
    received = b""
    for message in sent[1:]:
        assert message.offset_bytes == len(received)
        assert 0 < len(message.data) <= MAX_FRAME_DATA_BYTES
        received += message.data
    assert received == data


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (pb.PutStateResponse(result={"status": EXISTS}), "EXISTS"),
        (pb.PutStateResponse(result={"status": REJECTED, "reason": "STORE_FULL"}), "STORE_FULL"),
        (pb.PutStateResponse(result={"status": STORED, "block": 3}), "NO_RESULT"),
        (pb.PutStateResponse(), "NO_RESULT"),
        (b"", "NO_RESULT"),
        (b"\xff", "BAD_REPLY"),
    ],
    ids=repr,
)
def test_state_object_without_a_clear_confirmation_counts_as_rejected(peer, client, reply, expected):
    peer.answers["PutState"] = lambda messages, _: (list(messages), reply)[1]
    (only,) = client.namespace(spec(10)).put_state(chain(1)[0], "tail", b"abc").results
    assert (only.reason or only.status.name) == expected
