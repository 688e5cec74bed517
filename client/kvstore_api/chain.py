"""A chain: a request's prefix hashes in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, NewType

from kvstore_api.limits import HASH_BYTES, MAX_CHAIN_BLOCKS

if TYPE_CHECKING:
    from collections.abc import Iterator

PrefixHash = NewType("PrefixHash", bytes)  # 32 bytes, chained: names block i *and* everything before it


class Chain:
    """Prefix hashes from block 0 on, kept as one run of bytes (32 a block), as they travel.

    Raises: ValueError: the length is no multiple of 32, or there are more than 65,536 hashes.
    """

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        if len(data) % HASH_BYTES:
            raise ValueError(
                f"chain has {len(data)} bytes, which is no multiple of {HASH_BYTES}, the size of a prefix hash"
            )
        if len(data) > MAX_CHAIN_BLOCKS * HASH_BYTES:
            raise ValueError(f"chain has {len(data) // HASH_BYTES} blocks, the limit is {MAX_CHAIN_BLOCKS}")
        self.data = data

    def __len__(self) -> int:
        return len(self.data) // HASH_BYTES

    def __getitem__(self, block: int) -> PrefixHash:
        if not 0 <= block < len(self):
            raise IndexError(f"block {block} of a chain of {len(self)}")
        return PrefixHash(self.data[block * HASH_BYTES : (block + 1) * HASH_BYTES])

    def __iter__(self) -> Iterator[PrefixHash]:
        return (self[block] for block in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chain) and self.data == other.data

    def __hash__(self) -> int:
        return hash(self.data)

    def __repr__(self) -> str:
        last = self[len(self) - 1].hex()[:16] if len(self) else "-"
        return f"Chain({len(self)} blocks, last {last})"

    def first(self, block_count: int) -> Chain:
        """The chain of the first `block_count` blocks."""
        return Chain(self.data[: block_count * HASH_BYTES])
