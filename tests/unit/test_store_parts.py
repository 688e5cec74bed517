"""A part of each block: the part and nothing else of blocks that are whole and right, and misses as for whole blocks."""

from __future__ import annotations

import errno
from itertools import pairwise

import pytest

from faults import FaultyDevice, flip_bit
from kvstore.clock import ManualClock
from kvstore.errors import InvalidArgumentError
from kvstore.messages import read_frame_message
from kvstore_api.checksum import block_checksum
from kvstore_api.limits import MAX_FRAME_DATA_BYTES
from kvstore_api.v1 import block_store_pb2 as pb
from stores import BLOCK_BYTES, chain_of, open_store, put_block, spec
from third_party import block_of

BLOCKS, DELETED, NEVER_PUT = 9, 3, 6
MISSES = {DELETED: "NOT_FOUND", NEVER_PUT: "NOT_FOUND"}
SIZES = [1, 511, 4096, 5000, 114_688, 1 << 20, (1 << 20) + 1, 3 << 20]


def put(store, namespace, chain, blocks=None):
    """Bytes that repeat nowhere, so that no part looks like another."""
    items = [
        put_block(chain, block, block_of(chain[block], namespace.spec.block_bytes))
        for block in blocks or range(len(chain))
    ]
    store.submit_put(namespace, chain, items).result(60)


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A store with a chain per block size, two blocks of which are missing."""
    store = open_store(tmp_path_factory.mktemp("parts"), capacity=256 << 20)
    chains = {}
    for size in SIZES:
        namespace = store.register_namespace(spec(size))
        chain = chain_of(namespace, 1, BLOCKS)
        put(store, namespace, chain, [block for block in range(BLOCKS) if block != NEVER_PUT])
        store.delete(namespace, chain, DELETED, 1)
        chains[size] = namespace, chain
    yield store, chains
    store.close()


def answer(store, namespace, chain, first=0, lease=b"", *, in_messages=True, **part):
    """The get's messages, as a client has them."""
    frames = store.read(namespace, chain, first, len(chain) - first, lease, in_messages=in_messages, **part)
    return [pb.GetBlocksResponse.FromString(read_frame_message(frame)) for frame in frames]


def unpacked(messages, chain, size):
    """Blocks of that size by position, their checksums verified, and the misses; the messages keep to the protocol."""
    found, sums, misses = {}, {}, {}
    for message in messages:
        assert len(message.data) <= MAX_FRAME_DATA_BYTES
        assert len(message.blocks) == len(message.checksums)
        each = len(message.data) // max(1, len(message.blocks))
        assert not message.blocks or each == size or (size > MAX_FRAME_DATA_BYTES and len(message.blocks) == 1)
        for place, block in enumerate(message.blocks):
            got = found.setdefault(block, bytearray())
            assert len(got) == message.offset_bytes
            got += message.data[place * each : (place + 1) * each]
            assert sums.setdefault(block, message.checksums[place]) == message.checksums[place]
        misses.update((miss.block, miss.reason) for miss in message.misses)
    assert all(low < high for low, high in pairwise(found))
    assert all(block_checksum(data, chain[block]) == sums[block] for block, data in found.items())
    return {block: bytes(data) for block, data in found.items()}, misses


def parts_of(size):
    """Offset and size: at the beginning, in the middle, at the end, to the end, all of it."""
    middle = size // 2
    cases = {
        (0, 0),
        (0, 1),
        (0, size),
        (middle, 1),
        (middle // 2, max(1, middle)),
        (middle, 0),
        (size - 1, 1),
        (size - 1, 0),
    }
    return sorted(cases)


@pytest.mark.parametrize(("size", "offset", "part"), [(size, *part) for size in SIZES for part in parts_of(size)])
def test_a_part_of_each_block_comes_back_and_misses_stay_misses(filled, size, offset, part):
    store, chains = filled
    namespace, chain = chains[size]
    end = offset + part if part else size
    expected = {block: block_of(chain[block], size)[offset:end] for block in range(1, BLOCKS) if block not in MISSES}
    token = store.match(namespace, chain).lease
    for in_messages, lease in [(True, b""), (False, b""), (True, token)]:
        messages = answer(
            store, namespace, chain, 1, lease, in_messages=in_messages, part_offset_bytes=offset, part_bytes=part
        )
        assert unpacked(messages, chain, end - offset) == (expected, MISSES)


@pytest.mark.parametrize(
    ("block_bytes", "offset", "part"), [(114_688, 45_568, 22_784), (5000, 999, 1), (3 << 20, 1, 1_500_000)]
)
def test_frames_are_those_of_blocks_that_consist_of_the_part(tmp_path, block_bytes, offset, part):
    store = open_store(tmp_path, capacity=128 << 20)
    shapes = []
    for size, asked in [(block_bytes, {"part_offset_bytes": offset, "part_bytes": part}), (part, {})]:
        namespace = store.register_namespace(spec(size))
        chain = chain_of(namespace, 1, 12 if size > 1 << 20 else 200)
        put(store, namespace, chain)
        messages = answer(store, namespace, chain, **asked)
        assert len(unpacked(messages, chain, part)[0]) == len(chain)
        shapes.append([(list(m.blocks), m.offset_bytes, len(m.data)) for m in messages])
    assert shapes[0] == shapes[1]
    store.close()


def test_small_parts_of_large_blocks_share_frames_but_no_frame_reads_gigabytes(tmp_path):
    store = open_store(tmp_path, capacity=256 << 20)
    namespace = store.register_namespace(spec(3 << 20))
    chain = chain_of(namespace, 1, 10)
    put(store, namespace, chain)
    messages = answer(store, namespace, chain, part_offset_bytes=7, part_bytes=100)
    assert {len(message.blocks) for message in messages[1:-1]} == {2}, "6 MiB are read for one, 9 MiB would be too many"
    store.close()


@pytest.fixture
def device():
    return FaultyDevice()


@pytest.fixture
def store(tmp_path, device):
    store = open_store(tmp_path, ManualClock(), capacity=64 << 20, device=device)
    yield store
    store.close()


@pytest.mark.parametrize("leased", [False, True])
@pytest.mark.parametrize("damaged_byte", [0, 99, 100, 149, 150, -1])
@pytest.mark.parametrize("block_bytes", [BLOCK_BYTES, 4096, 2 << 20])
def test_a_block_that_is_damaged_anywhere_yields_no_part(store, block_bytes, damaged_byte, leased):
    namespace = store.register_namespace(spec(block_bytes))
    chain = chain_of(namespace, 1, 4)
    put(store, namespace, chain)
    lease = store.match(namespace, chain).lease if leased else b""
    addr = store.find_blocks(chain[2].hex())[0].addr
    segment = store._segments.get(addr.segment_id)
    payload_at = int(segment.read_rows(addr.slot, 1)[0]["offset_bytes"])
    flip_bit(segment.path, payload_at + damaged_byte % block_bytes, 4)
    part = {"part_offset_bytes": 100, "part_bytes": 50}
    found, misses = unpacked(answer(store, namespace, chain, lease=lease, **part), chain, 50)
    assert misses == {2: "CORRUPT"}
    assert found == {block: block_of(chain[block], block_bytes)[100:150] for block in (0, 1, 3)}
    assert store.counters.snapshot()["blocks_corrupt"] == 1
    assert unpacked(answer(store, namespace, chain, lease=lease, **part), chain, 50)[1] == {2: "NOT_FOUND"}
    assert store.match(namespace, chain).hit_length_blocks == 2


def test_a_block_that_the_disk_gives_only_in_part_yields_no_part(store, device):
    """Though the part that is wanted could be read."""
    namespace = store.register_namespace(spec(4096))
    chain = chain_of(namespace, 1, 6)
    put(store, namespace, chain)
    last_sector = store._segments.all()[0].layout.payload_offset + 3 * 4096 + 4000
    device.fail_read_of = lambda path, begin, end: errno.EIO if begin <= last_sector < end else 0
    found, misses = unpacked(answer(store, namespace, chain, part_bytes=10), chain, 10)
    assert (sorted(found), misses) == ([0, 1, 2, 4, 5], {3: "IO_ERROR"})
    device.heal()
    device.short_read_bytes = 1
    found, misses = unpacked(answer(store, namespace, chain, part_bytes=10), chain, 10)
    assert all(data == block_of(chain[block], 4096)[:10] for block, data in found.items())
    assert misses[5] == "CORRUPT"


def test_what_is_read_for_a_part_is_counted_as_read(store):
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 5)
    put(store, namespace, chain, range(4))
    answer(store, namespace, chain, part_offset_bytes=10, part_bytes=20)
    counters = store.counters.snapshot()
    assert [counters[name] for name in ("blocks_read", "bytes_read", "blocks_missed")] == [4, 4 * BLOCK_BYTES, 1]


@pytest.mark.parametrize(
    ("offset", "part"),
    [(BLOCK_BYTES, 0), (BLOCK_BYTES, 1), (BLOCK_BYTES + 1, 0), (0, BLOCK_BYTES + 1), (500, 13), (2**64 - 1, 2**64 - 1)],
)
def test_a_part_outside_the_block_is_refused_with_the_numbers_and_nothing_is_read(store, device, offset, part):
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 2)
    put(store, namespace, chain)
    device.fail_read = True
    with pytest.raises(
        InvalidArgumentError, match=rf"{part or 'the rest'}.* from byte {offset} .*have {BLOCK_BYTES} bytes"
    ):
        store.read(namespace, chain, 0, 2, part_offset_bytes=offset, part_bytes=part)
    device.heal()
    assert store.counters.snapshot()["blocks_unreadable"] == 0
    assert store.match(namespace, chain).hit_length_blocks == 2
