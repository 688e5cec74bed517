"""The checksum that guards a block's bytes from the writer to whoever consumes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer


def block_checksum(data: Buffer, prefix_hash: bytes) -> int:
    """xxh3-64 of the bytes, seeded with the first 8 bytes of the prefix hash (little-endian).

    The seed binds bytes to their name: another block's bytes, whole and undamaged, fail the check too.
    """
    return xxhash.xxh3_64_intdigest(data, int.from_bytes(prefix_hash[:8], "little"))
