"""Arriving frames become blocks only if every number in them agrees."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.assembly import BlockAssembler
from kvstore.errors import InvalidArgumentError
from kvstore.types import PutBlock
from kvstore_api.limits import MAX_BLOCK_BYTES, MAX_FRAME_DATA_BYTES
from kvstore_api.results import PutResult, PutStatus
from kvstore_api.v1.block_store_pb2 import PutBlocksRequest

SIZE = 10


def assembler(first: int = 5, count: int = 10, block_bytes: int = SIZE) -> BlockAssembler:
    return BlockAssembler(first, count, block_bytes)


def frame(blocks: list[int], checksums: list[int] | None = None, **fields: object) -> PutBlocksRequest:
    return PutBlocksRequest(blocks=blocks, checksums=checksums or [block + 100 for block in blocks], **fields)


def add(put: BlockAssembler, message: PutBlocksRequest, data: bytes) -> list[tuple[int, bytes, int] | PutResult]:
    arrived = put.add(message, memoryview(data))
    return [(it.block, bytes(it.data), it.checksum) if isinstance(it, PutBlock) else it for it in arrived]


def wrong_size(block: int, size: int, block_bytes: int = SIZE) -> PutResult:
    detail = f"block {block} has {size} bytes, the namespace's blocks have {block_bytes}"
    return PutResult(block, PutStatus.REJECTED, "WRONG_SIZE", detail)


def test_whole_blocks_are_views_into_their_frame():
    data = bytes(range(20))
    blocks = list(assembler().add(frame([5, 7]), memoryview(data)))
    assert [(block.block, bytes(block.data), block.checksum) for block in blocks] == [
        (5, data[:10], 105),
        (7, data[10:], 107),
    ]
    assert all(isinstance(block.data, memoryview) and block.data.obj is data for block in blocks)


def test_a_block_in_parts_comes_when_it_is_whole():
    put = assembler()
    assert add(put, frame([5]), b"abc") == []
    assert add(put, frame([5], offset_bytes=3), b"defg") == []
    with pytest.raises(InvalidArgumentError, match="ended inside block 5, of which 7 of 10 bytes have come"):
        put.finish()
    assert add(put, frame([5], offset_bytes=7), b"hij") == [(5, b"abcdefghij", 105)]
    assert add(put, frame([6]), b"0123456789") == [(6, b"0123456789", 106)]
    put.finish()


def test_blocks_of_a_wrong_size_come_as_rejections():
    put = assembler()
    assert add(put, frame([5, 6, 7], sizes=[3, 0, 10]), b"abc0123456789") == [
        wrong_size(5, 3),
        wrong_size(6, 0),
        (7, b"0123456789", 107),
    ]
    assert add(put, frame([8], sizes=[4]), b"ab") == []
    assert add(put, frame([8], sizes=[4], offset_bytes=2), b"cd") == [wrong_size(8, 4)]
    assert add(put, frame([9]), b"0123456789") == [(9, b"0123456789", 109)]
    put.finish()


@pytest.mark.parametrize(
    ("offset", "data", "complaint"),
    [
        (3, b"c", "begins at byte 3 of block 5, of which 2 of 4 bytes"),
        (2, b"cde", "ends at byte 5 of block 5, of which 2 of 4 bytes"),
        (2, b"", "without bytes inside block 5"),
    ],
)
def test_parts_of_a_block_of_a_wrong_size_are_checked_all_the_same(offset, data, complaint):
    put = assembler()
    add(put, frame([5], sizes=[4]), b"ab")
    with pytest.raises(InvalidArgumentError, match=complaint):
        add(put, frame([5], sizes=[4], offset_bytes=offset), data)
    with pytest.raises(InvalidArgumentError, match="ended inside block 5, of which 2 of 4 bytes have come"):
        put.finish()


@pytest.mark.parametrize(
    ("block_bytes", "part_bytes", "kept_bytes_max"),
    [
        (MAX_BLOCK_BYTES, 1, 1 << 16),  # what has arrived is kept, not what was announced
        (MAX_BLOCK_BYTES, MAX_FRAME_DATA_BYTES, 11 * MAX_FRAME_DATA_BYTES),
        (SIZE, MAX_FRAME_DATA_BYTES, 1 << 16),  # nothing of a block that will be rejected
    ],
)
def test_a_large_size_costs_no_more_memory_than_bytes_that_arrive(block_bytes, part_bytes, kept_bytes_max):
    put = assembler(block_bytes=block_bytes)
    part = bytes(part_bytes)
    tracemalloc.start()
    try:
        for number in range(9):
            add(put, frame([5], sizes=[MAX_BLOCK_BYTES], offset_bytes=number * part_bytes), part)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes <= kept_bytes_max


@pytest.mark.parametrize(
    ("message", "size", "complaint"),
    [
        (frame([]), 3, "frame with 3 bytes names no blocks"),
        (frame([]), 0, "frame with 0 bytes names no blocks"),
        (frame([4]), 10, "block 4, the header announced 5 to 14"),
        (frame([14, 15]), 20, "block 15, the header announced 5 to 14"),
        (frame([6, 6]), 20, "block 6 where 7 or a later one must follow"),
        (frame([7, 6]), 20, "block 6 where 8 or a later one must follow"),
        (frame([5, 6]), 19, "has 19 bytes, its 2 blocks add up to 20"),
        (frame([5, 6]), 21, "has 21 bytes, its 2 blocks add up to 20"),
        (frame([5]), 11, "has 11 bytes, its 1 blocks add up to 10"),
        (frame([5, 6], [1]), 20, "names 2 blocks, but 1 checksums"),
        (frame([5, 6], sizes=[10]), 10, "names 2 blocks, but 1 sizes"),
        (frame([5], sizes=[MAX_BLOCK_BYTES + 1]), 10, f"a block of {MAX_BLOCK_BYTES + 1} bytes"),
        (frame([5]), MAX_FRAME_DATA_BYTES + 1, f"has {MAX_FRAME_DATA_BYTES + 1} bytes of block data"),
        (frame([5], offset_bytes=1), 9, "begins at byte 1 of block 5, of which 0 of 10 bytes have come"),
        (frame([5, 6], offset_bytes=1), 20, "with a part of a block names 2 blocks"),
        (frame([5]), 0, "frame without bytes inside block 5"),
    ],
)
def test_a_broken_frame_is_refused_with_its_numbers(message, size, complaint):
    with pytest.raises(InvalidArgumentError, match=complaint):
        add(assembler(), message, bytes(size))


@pytest.mark.parametrize(
    ("message", "size", "complaint"),
    [
        (frame([5], offset_bytes=5), 5, "begins at byte 5 of block 5, of which 4 of 10"),
        (frame([5], offset_bytes=3), 6, "begins at byte 3 of block 5, of which 4 of 10"),
        (frame([5], offset_bytes=4), 7, "ends at byte 11 of block 5, of which 4 of 10"),
        (frame([5], offset_bytes=4), 0, "without bytes inside block 5"),
        (frame([6]), 10, "block 6 .* comes inside block 5, of which 4 of 10"),
        (frame([5], [1], offset_bytes=4), 6, "checksum 0x0000000000000001.* comes inside block 5"),
        (frame([5], offset_bytes=4, sizes=[9]), 5, r"block 5 \(9 bytes.* comes inside block 5"),
        (frame([5, 6], offset_bytes=4), 6, "with a part of a block names 2 blocks"),
    ],
)
def test_a_frame_that_does_not_continue_its_block_is_refused(message, size, complaint):
    put = assembler()
    add(put, frame([5]), b"abcd")
    with pytest.raises(InvalidArgumentError, match=complaint):
        add(put, message, bytes(size))


def test_an_earlier_block_may_not_follow_a_later_one():
    put = assembler()
    add(put, frame([9]), bytes(10))
    for block in (8, 9):
        with pytest.raises(InvalidArgumentError, match=f"block {block} where 10 or a later one must follow"):
            add(put, frame([block]), bytes(10))


def test_nothing_of_a_broken_frame_gets_through():
    put = assembler()
    with pytest.raises(InvalidArgumentError):
        add(put, frame([5, 6]), bytes(15))
    assert add(put, frame([5]), b"0123456789") == [(5, b"0123456789", 105)]


BLOCKS = st.one_of(st.binary(min_size=1, max_size=40), st.binary(min_size=20, max_size=20))


@given(st.lists(BLOCKS, min_size=1, max_size=8), st.integers(1, 12), st.data())
def test_any_split_into_frames_gives_the_same_blocks(blocks, part_bytes, data):
    put = assembler(0, len(blocks), 20)
    arrived = []
    for number, block in enumerate(blocks):
        whole = data.draw(st.booleans())
        step = len(block) if whole else part_bytes
        for offset in range(0, len(block), step):
            part = block[offset : offset + step]
            arrived += add(put, frame([number], sizes=[len(block)], offset_bytes=offset), part)
    put.finish()
    assert arrived == [
        (number, block, number + 100) if len(block) == 20 else wrong_size(number, len(block), 20)
        for number, block in enumerate(blocks)
    ]
