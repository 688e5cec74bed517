"""Gets against a peer that lies: a block is OK only when all of its bytes are in the caller's memory and verified there."""

from __future__ import annotations

import random

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_api.checksum import block_checksum
from kvstore_api.v1 import block_store_pb2 as pb
from kvstore_client import ClientConfig, NamespaceSpec, prefix_hashes
from kvstore_client.buffers import blocks_to_write
from kvstore_client.errors import BadReplyError
from kvstore_client.results import Failure
from kvstore_client.transfer import IncomingBlocks
from wire_server import frame, wire_server

BLOCK_BYTES = 100
COUNT = 8
SPEC = NamespaceSpec(model="m", revision="r", engine="e", layout="l", kv_dtype="uint8", block_bytes=BLOCK_BYTES)
CHAIN = prefix_hashes(bytes(SPEC.digest()), range(10 * 128))
GOOD = {position: random.Random(position).randbytes(BLOCK_BYTES) for position in range(10)}
FIRST = 1  # the gets below ask for blocks 1 to 8


@pytest.fixture
def peer():
    with wire_server() as server:
        yield server


@pytest.fixture
def namespace(peer, door):
    with door(ClientConfig(target=peer.target, base_budget_s=30)) as client:
        yield client.namespace(SPEC)


def good(*positions: int) -> dict[int, bytes]:
    return {position: GOOD[position] for position in positions}


def part(position: int, start: int, end: int, **fields) -> pb.GetBlocksResponse:
    """Bytes [start, end) of a block."""
    return frame(
        CHAIN,
        {position: GOOD[position]},
        **{"offset_bytes": start, "data": GOOD[position][start:end], **fields},
    )


def misses(**reasons: str) -> pb.GetBlocksResponse:
    return pb.GetBlocksResponse(misses=[{"block": int(name[1:]), "reason": text} for name, text in reasons.items()])


ALL = range(FIRST, FIRST + COUNT)
FLIPPED = {**good(*ALL), 4: bytes([GOOD[4][0] ^ 1]) + GOOD[4][1:]}
LAST_FLIPPED = {**good(*ALL), 8: GOOD[8][:-1] + bytes([GOOD[8][-1] ^ 0x80])}
SWAPPED = {**good(*ALL), 4: GOOD[5], 5: GOOD[4]}
# Bytes that are whole and undamaged, with the checksum that belongs to them under their own name.
FOREIGN_SUMS = [block_checksum(SWAPPED[p], CHAIN[{4: 5, 5: 4}.get(p, p)]) for p in ALL]

# what the peer sends; the blocks that are then OK; the reason of all others; whether the call as a whole failed
LIES = {
    "nothing": ([], "", "NO_RESULT", False),
    "empty frames": ([pb.GetBlocksResponse()] * 50, "", "NO_RESULT", False),
    "first block left out": ([frame(CHAIN, good(2, 3, 4, 5, 6, 7, 8))], "2345678", "NO_RESULT", False),
    "last block left out": ([frame(CHAIN, good(1, 2, 3, 4, 5, 6, 7))], "1234567", "NO_RESULT", False),
    "block in the middle left out": ([frame(CHAIN, good(1, 2, 3, 5, 6, 7, 8))], "1235678", "NO_RESULT", False),
    "byte cut off a frame": (
        [frame(CHAIN, good(*ALL), data=b"".join(good(*ALL).values())[:-1])],
        "",
        "BAD_REPLY",
        True,
    ),
    "byte too many": ([frame(CHAIN, good(*ALL), data=b"".join(good(*ALL).values()) + b"x")], "", "BAD_REPLY", True),
    "byte too many in one block": ([frame(CHAIN, {1: GOOD[1] + b"x"})], "", "BAD_REPLY", True),
    "byte cut off one block": (
        [frame(CHAIN, good(1, 2, 3)), part(4, 0, 99), frame(CHAIN, good(5, 6, 7, 8))],
        "1235678",
        "CORRUPT",
        False,
    ),
    "byte cut off the last block": (
        [frame(CHAIN, good(1, 2, 3, 4, 5, 6, 7)), part(8, 0, 99)],
        "1234567",
        "CORRUPT",
        False,
    ),
    "flipped bit": (
        [frame(CHAIN, FLIPPED, checksums=[block_checksum(GOOD[p], CHAIN[p]) for p in ALL])],
        "1235678",
        "CORRUPT",
        False,
    ),
    "flipped last bit": (
        [frame(CHAIN, LAST_FLIPPED, checksums=[block_checksum(GOOD[p], CHAIN[p]) for p in ALL])],
        "1234567",
        "CORRUPT",
        False,
    ),
    "wrong checksums": ([frame(CHAIN, good(*ALL), checksums=[7] * 8)], "", "CORRUPT", False),
    "checksums without the name as seed": (
        [frame(CHAIN, good(*ALL), checksums=[block_checksum(GOOD[p], bytes(32)) for p in ALL])],
        "",
        "CORRUPT",
        False,
    ),
    "two blocks swapped": ([frame(CHAIN, SWAPPED, checksums=FOREIGN_SUMS)], "123678", "CORRUPT", False),
    "zeros for bytes": (
        [frame(CHAIN, good(*ALL), data=bytes(BLOCK_BYTES * COUNT))],
        "",
        "CORRUPT",
        False,
    ),
    "checksum missing": (
        [frame(CHAIN, good(1)), frame(CHAIN, good(2, 3), checksums=[block_checksum(GOOD[2], CHAIN[2])])],
        "1",
        "BAD_REPLY",
        True,
    ),
    "checksum too many": ([frame(CHAIN, good(1), checksums=[1, 2])], "", "BAD_REPLY", True),
    "bytes without a position": ([frame(CHAIN, good(1), blocks=[], checksums=[])], "", "BAD_REPLY", True),
    "positions without bytes": ([frame(CHAIN, good(1, 2), data=b"")], "", "BAD_REPLY", True),
    "position without bytes": ([frame(CHAIN, good(1), data=b"")], "", "BAD_REPLY", True),
    "whole blocks at an offset": ([frame(CHAIN, good(1, 2), offset_bytes=4)], "", "BAD_REPLY", True),
    "whole block at an offset": ([frame(CHAIN, good(1), offset_bytes=4)], "", "BAD_REPLY", True),
    "block before the range": ([frame(CHAIN, good(0))], "", "BAD_REPLY", True),
    "block behind the range": ([frame(CHAIN, good(*ALL)), frame(CHAIN, good(9))], "12345678", "", False),
    "block far behind the range": ([frame(CHAIN, good(1), blocks=[2**32 - 1])], "", "BAD_REPLY", True),
    "positions counted from the range's start": (
        [frame(CHAIN, good(*ALL), blocks=range(COUNT))],
        "",
        "BAD_REPLY",
        True,
    ),
    "frames in wrong order": (
        [frame(CHAIN, good(5, 6, 7, 8)), frame(CHAIN, good(1, 2, 3, 4))],
        "5678",
        "BAD_REPLY",
        True,
    ),
    "blocks of a frame in wrong order": ([frame(CHAIN, {2: GOOD[2], 1: GOOD[1]})], "2", "BAD_REPLY", True),
    "block twice": ([frame(CHAIN, good(1, 2)), frame(CHAIN, good(2, 3))], "12", "BAD_REPLY", True),
    "block twice, the second time with other bytes": (
        [frame(CHAIN, good(1)), frame(CHAIN, {1: GOOD[9]})],
        "1",
        "BAD_REPLY",
        True,
    ),
    "block twice in one frame": (
        [frame(CHAIN, good(1), blocks=[1, 1], checksums=[7, 7], data=GOOD[1] * 2)],
        "",
        None,
        True,
    ),
    "misses": ([misses(b1="NOT_FOUND", b2="EXPIRED"), frame(CHAIN, good(3, 4))], "34", None, False),
    "miss that says OK": ([misses(b1="OK")], "", None, False),
    "miss without a reason": ([misses(b1="")], "", None, False),
    "miss before the range": ([misses(b0="NOT_FOUND")], "", "BAD_REPLY", True),
    "miss behind the range": ([misses(b9="NOT_FOUND")], "", "BAD_REPLY", True),
    "miss of a block that came": ([frame(CHAIN, good(1, 2)), misses(b2="NOT_FOUND")], "12", "BAD_REPLY", True),
    "block that was said to be missing": ([misses(b1="NOT_FOUND"), frame(CHAIN, good(1))], "", None, True),
    "parts": ([part(1, 0, 40), part(1, 40, 100), part(2, 0, 99), part(2, 99, 100)], "12", "NO_RESULT", False),
    "last part missing": ([part(1, 0, 40), part(1, 40, 99)], "", None, False),
    "last part missing, then more": ([part(1, 0, 40), frame(CHAIN, good(2))], "2", None, False),
    "first part missing": ([part(1, 40, 100)], "", "BAD_REPLY", True),
    "gap between parts": ([part(1, 0, 40), part(1, 41, 100)], "", "BAD_REPLY", True),
    "overlapping parts": ([part(1, 0, 40), part(1, 39, 100)], "", "BAD_REPLY", True),
    "part twice": ([part(1, 0, 40), part(1, 0, 40)], "", None, True),
    "parts in wrong order": ([part(1, 40, 100), part(1, 0, 40)], "", "BAD_REPLY", True),
    "parts of two blocks mixed": ([part(1, 0, 40), part(2, 0, 40), part(1, 40, 100)], "", None, True),
    "part goes on in another block": ([part(1, 0, 40), part(2, 40, 100)], "", None, True),
    "part goes past the block's end": (
        [part(1, 0, 40), part(1, 40, 100, data=GOOD[1][40:] + b"x")],
        "",
        "BAD_REPLY",
        True,
    ),
    "wrong checksum in the last part": ([part(1, 0, 40), part(1, 40, 100, checksums=[7])], "", None, False),
    "part, then whole": ([part(1, 0, 40), frame(CHAIN, good(1))], "", None, True),
    "part, then a miss": ([part(1, 0, 40), misses(b1="IO_ERROR"), frame(CHAIN, good(2))], "2", None, False),
    "huge offset": ([part(1, 0, 40, offset_bytes=2**64 - 1)], "", "BAD_REPLY", True),
    "no protobuf": ([frame(CHAIN, good(1)), b"\xff\xff\xff"], "1", "BAD_REPLY", True),
    "cut-off protobuf": ([frame(CHAIN, good(1)).SerializeToString()[:-1]], "", "BAD_REPLY", True),
}


@pytest.mark.parametrize("scattered", [False, True], ids=["one buffer", "a buffer per block"])
@pytest.mark.parametrize("lie", LIES)
def test_no_lie_of_the_server_makes_a_block_ok(peer, namespace, lie, scattered):
    frames, ok, other, failed = LIES[lie]
    peer.answers["GetBlocks"] = lambda *_: iter(frames)
    buffers = [bytearray(BLOCK_BYTES) for _ in range(COUNT)]
    memory = bytearray(BLOCK_BYTES * COUNT)
    result = namespace.get(CHAIN, buffers if scattered else memory, first_block=FIRST, block_count=COUNT)
    blocks = buffers if scattered else [memory[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES] for i in range(COUNT)]
    found = [FIRST + index for index, status in enumerate(result.statuses) if status == "OK"]
    assert found == [int(position) for position in ok]
    for position in found:
        assert blocks[position - FIRST] == GOOD[position]
    if other is not None:
        assert {status for status in result.statuses if status != "OK"} <= {other}
    assert (result.failure is not None) == failed
    if failed:
        assert result.failure.reason == "BAD_REPLY"
    run = next((index for index in range(COUNT) if FIRST + index not in found), COUNT)
    assert (result.leading_blocks, result.ok_blocks) == (run, len(found))
    memory.append(0)  # would raise if anything still held the caller's memory
    buffers[0].append(0)


def test_miss_reasons_pass_through(peer, namespace):
    peer.answers["GetBlocks"] = lambda *_: [
        misses(b1="NOT_FOUND", b2="EXPIRED", b3="CORRUPT", b4="IO_ERROR", b5="SOMETHING_NEW", b6="OK", b7="no reason")
    ]
    result = namespace.get(CHAIN, bytearray(BLOCK_BYTES * COUNT), first_block=FIRST, block_count=COUNT)
    assert list(result.statuses) == [
        *("NOT_FOUND", "EXPIRED", "CORRUPT", "IO_ERROR", "SOMETHING_NEW", "NOT_FOUND", "NOT_FOUND", "NO_RESULT")
    ]
    assert result.failure is None


@pytest.mark.parametrize("failing", [1, 4, 8])
@pytest.mark.parametrize("how", ["miss", "corrupt", "left out"])
def test_failed_block_ends_the_leading_run_exactly_there(peer, namespace, failing, how):
    frames = [frame(CHAIN, good(*(position for position in ALL if position != failing)))]
    if how == "miss":
        frames.append(pb.GetBlocksResponse(misses=[{"block": failing, "reason": "IO_ERROR"}]))
    if how == "corrupt":
        frames = [frame(CHAIN, good(position), checksums=[1] if position == failing else None) for position in ALL]
        for sound, position in zip(frames, ALL, strict=True):
            if position != failing:
                sound.checksums[:] = [block_checksum(GOOD[position], CHAIN[position])]
    peer.answers["GetBlocks"] = lambda *_: frames
    result = namespace.get(CHAIN, bytearray(BLOCK_BYTES * COUNT), first_block=FIRST, block_count=COUNT)
    assert (result.leading_blocks, result.ok_blocks) == (failing - FIRST, COUNT - 1)


def test_request_names_the_chain_up_to_the_last_block_and_the_range(peer, namespace):
    peer.answers["GetBlocks"] = lambda *_: [frame(CHAIN, good(2, 3))]
    result = namespace.get(CHAIN, bytearray(2 * BLOCK_BYTES), first_block=2, block_count=2, lease=b"token")
    assert result.leading_blocks == 2
    request = peer.requests[-1]
    assert (request.namespace, request.chain) == (SPEC.digest(), CHAIN.first(4).data)
    assert (request.first_block, request.block_count, request.lease) == (2, 2, b"token")


@pytest.mark.parametrize("scattered", [False, True], ids=["one buffer", "a buffer per block"])
def test_part_of_each_block_comes_as_if_blocks_were_that_part_alone(peer, namespace, scattered):
    offset, size = 30, 25
    parts = {position: GOOD[position][offset : offset + size] for position in ALL}
    spoiled = {**parts, 6: bytes(size)}
    peer.answers["GetBlocks"] = lambda *_: [
        frame(CHAIN, {position: parts[position] for position in (1, 2, 3)}),
        frame(CHAIN, {4: parts[4]}, data=parts[4][:10]),
        frame(CHAIN, {4: parts[4]}, data=parts[4][10:], offset_bytes=10),
        frame(CHAIN, {6: parts[6]}, data=spoiled[6]),
        pb.GetBlocksResponse(misses=[{"block": 7, "reason": "EXPIRED"}]),
        frame(CHAIN, {8: parts[8]}),
    ]
    whole = bytearray(size * COUNT)
    out = [memoryview(whole)[i * size : (i + 1) * size] for i in range(COUNT)] if scattered else whole
    result = namespace.get(CHAIN, out, first_block=FIRST, block_count=COUNT, part=(offset, size))
    assert [sum_ > 0 for sum_ in result.block_checksums] == [status == "OK" for status in result.statuses]
    assert list(result.statuses) == ["OK"] * 4 + ["NO_RESULT", "CORRUPT", "EXPIRED", "OK"]
    assert (peer.requests[-1].part_offset_bytes, peer.requests[-1].part_bytes) == (offset, size)
    for index, status in enumerate(result.statuses):
        if status == "OK":
            assert whole[index * size : (index + 1) * size] == parts[FIRST + index]


def test_server_that_sends_whole_blocks_for_parts_is_not_believed(peer, namespace):
    peer.answers["GetBlocks"] = lambda *_: [frame(CHAIN, good(*ALL))]
    result = namespace.get(CHAIN, bytearray(10 * COUNT), first_block=FIRST, block_count=COUNT, part=(0, 10))
    assert (result.ok_blocks, result.failure.reason) == (0, "BAD_REPLY")


def test_get_without_a_part_asks_for_whole_blocks(peer, namespace):
    peer.answers["GetBlocks"] = lambda *_: [frame(CHAIN, good(1))]
    assert namespace.get(CHAIN, bytearray(BLOCK_BYTES), first_block=1, block_count=1).leading_blocks == 1
    assert (peer.requests[-1].part_offset_bytes, peer.requests[-1].part_bytes) == (0, 0)


def test_budget_that_ends_in_the_middle_keeps_what_came(peer, namespace):
    def answer(*_):
        yield frame(CHAIN, good(1, 2, 3))
        yield part(4, 0, 50)
        yield peer.stall()

    peer.answers["GetBlocks"] = answer
    assert namespace.register() is None
    out = bytearray(BLOCK_BYTES * COUNT)
    result = namespace.get(CHAIN, out, first_block=FIRST, block_count=COUNT, budget_s=1)
    assert list(result.statuses) == ["OK"] * 3 + ["DEADLINE"] * 5
    assert (result.leading_blocks, result.failure.reason) == (3, "DEADLINE")
    assert out[: 3 * BLOCK_BYTES] == GOOD[1] + GOOD[2] + GOOD[3]
    out.append(0)


def test_stream_that_ends_late_takes_nothing_away_from_blocks_that_came(peer, namespace):
    def answer(*_):
        yield frame(CHAIN, good(*ALL))
        yield peer.stall()

    peer.answers["GetBlocks"] = answer
    assert namespace.register() is None
    result = namespace.get(CHAIN, bytearray(BLOCK_BYTES * COUNT), first_block=FIRST, block_count=COUNT, budget_s=1)
    assert (result.leading_blocks, result.failure) == (COUNT, None)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS])
def test_stream_that_breaks_off_keeps_what_came(peer, namespace, code):
    def answer(_, context):
        yield frame(CHAIN, good(1, 2))
        context.abort(code, "broken off")

    peer.answers["GetBlocks"] = answer
    result = namespace.get(CHAIN, bytearray(BLOCK_BYTES * COUNT), first_block=FIRST, block_count=COUNT)
    assert result.leading_blocks == 2
    assert result.failure.reason == {"UNAVAILABLE": "UNREACHABLE"}.get(code.name, code.name)
    assert set(result.statuses[2:]) == {result.failure.reason}


PIECES = st.one_of(
    st.tuples(st.just("whole"), st.lists(st.integers(0, 9), max_size=4), st.binary(max_size=3)),
    st.tuples(
        st.just("part"), st.tuples(st.integers(0, 9), st.integers(0, 12), st.integers(0, 13)), st.binary(max_size=1)
    ),
    st.tuples(st.just("miss"), st.integers(0, 9), st.sampled_from(["OK", "NOT_FOUND", ""])),
)


@settings(deadline=None)
@given(pieces=st.lists(PIECES, max_size=12), failed=st.booleans())
def test_whatever_frames_come_an_ok_block_has_the_bytes_of_its_checksum(pieces, failed):
    """12-byte blocks; positions, lengths, offsets and bytes of the frames are at random, the checksums are the writer's."""
    size = 12
    truth = {position: GOOD[position][:size] for position in range(10)}
    sums = {position: block_checksum(truth[position], CHAIN[position]) for position in range(10)}
    out = bytearray(size * COUNT)
    incoming = IncomingBlocks(CHAIN, FIRST, blocks_to_write(out, size, COUNT), size)
    failure = Failure("DEADLINE", "") if failed else None
    for kind, what, extra in pieces:
        if kind == "whole":
            fields = {"blocks": what, "checksums": [sums[p] for p in what]}
            message = pb.GetBlocksResponse(**fields, data=b"".join(truth[p] for p in what) + extra[1:])
        elif kind == "part":
            position, start, end = what
            fields = {"blocks": [position], "checksums": [sums[position]], "offset_bytes": start}
            message = pb.GetBlocksResponse(**fields, data=truth[position][start:end] + extra)
        else:
            message = pb.GetBlocksResponse(misses=[{"block": what, "reason": extra}])
        try:
            incoming.take(message.SerializeToString())
        except BadReplyError as error:
            failure = error.failure
            break
    statuses = incoming.statuses(failure)
    assert len(statuses) == COUNT
    for index, status in enumerate(statuses):
        if status == "OK":
            assert out[index * size : (index + 1) * size] == truth[FIRST + index]
