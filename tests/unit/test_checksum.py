"""The checksum is plain xxh3-64, however it is computed, and bound to the block's name."""

from __future__ import annotations

import random

import pytest
import xxhash

from kvstore_api.checksum import block_checksum

PREFIX_HASH = bytes(range(7, 39))
SEED = int.from_bytes(PREFIX_HASH[:8], "little")


@pytest.mark.parametrize(
    "size", [1, 65_535, 65_536, 65_537, 102_400, 114_688, 131_072, 131_073, 1 << 20, (1 << 20) + 1, 3 << 20]
)
def test_sizes_on_both_sides_of_every_limit(size):
    data = random.Random(size).randbytes(size)
    assert block_checksum(data, PREFIX_HASH) == xxhash.xxh3_64_intdigest(data, SEED)
    assert block_checksum(memoryview(bytearray(data)), PREFIX_HASH) == xxhash.xxh3_64_intdigest(data, SEED)


@pytest.mark.parametrize("size", [100, 114_688])
def test_other_bytes_and_another_name_make_another_checksum(size):
    data = bytearray(random.Random(1).randbytes(size))
    checksum = block_checksum(data, PREFIX_HASH)
    assert block_checksum(data, bytes(32)) != checksum
    for position in (0, size // 2, size - 1):
        data[position] ^= 1
        assert block_checksum(data, PREFIX_HASH) != checksum
        data[position] ^= 1
