"""The checksum that guards a block's bytes from the writer to whoever consumes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer


# python-xxhash lets go of the interpreter's lock for inputs over 100 KiB. For blocks of ordinary size that costs far more than
# the hash itself (3 µs): with another busy thread, getting the lock back takes up to its switch interval, measured at 0.7 ms a
# block on average. So those are hashed in pieces that keep the lock; the result is the same.
_PIECE_BYTES = 64 << 10
_PIECES_UP_TO_BYTES = 1 << 20


def block_checksum(data: Buffer, prefix_hash: bytes) -> int:
    """xxh3-64 of the bytes, seeded with the first 8 bytes of the prefix hash (little-endian).

    The seed binds bytes to their name: another block's bytes, whole and undamaged, fail the check too.
    """
    seed = int.from_bytes(prefix_hash[:8], "little")
    view = memoryview(data)
    if not _PIECE_BYTES < view.nbytes <= _PIECES_UP_TO_BYTES:
        return xxhash.xxh3_64_intdigest(view, seed)
    view = view.cast("B")
    state = xxhash.xxh3_64(seed=seed)
    for start in range(0, len(view), _PIECE_BYTES):
        state.update(view[start : start + _PIECE_BYTES])
    return state.intdigest()
