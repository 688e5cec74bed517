"""Which bytes of a block belong to which layers, so that an engine can bring some layers alone.

A store keeps blocks as opaque bytes. An engine that begins to compute as soon as the first layers have arrived asks for one
range of layers after the other:

    offset_bytes, size_bytes = layout.range_of(8, 14)
    namespace.get(chain, out, part=(offset_bytes, size_bytes), block_count=match.hit_length_blocks, lease=match.lease)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class BlockLayoutError(ValueError):
    """The parts contradict each other or the block, or a range names no layer of the block; says which."""


@dataclass(frozen=True, slots=True)
class BlockPart:
    """Bytes [offset_bytes, offset_bytes + size_bytes) of every block: the KV of `layers`, ascending.

    Raises: BlockLayoutError: no layers, not ascending, or no bytes.
    """

    layers: tuple[int, ...]
    offset_bytes: int
    size_bytes: int

    def __post_init__(self) -> None:
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise BlockLayoutError(f"layers {self.layers} of a part: wanted are some, from 0 on, ascending, each once")
        if self.offset_bytes < 0 or self.size_bytes < 1:
            raise BlockLayoutError(
                f"layers {self.layers} have {self.size_bytes} bytes at offset {self.offset_bytes}; "
                "wanted is 1 byte or more at 0 or more"
            )

    @property
    def end_bytes(self) -> int:
        """The offset after its last byte."""
        return self.offset_bytes + self.size_bytes


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The parts of a block in order of offsets and of layers. Bytes outside all parts are the engine's padding.

    Raises: BlockLayoutError: no part, parts overlap or leave the block, or layers are not ascending from part to part.
    """

    parts: tuple[BlockPart, ...]
    block_bytes: int

    def __post_init__(self) -> None:
        if not self.parts:
            raise BlockLayoutError("a layout needs at least one part")
        for before, after in pairwise(self.parts):
            if after.offset_bytes < before.end_bytes:
                raise BlockLayoutError(
                    f"layers {after.layers} begin at byte {after.offset_bytes}, "
                    f"before layers {before.layers} end at {before.end_bytes}"
                )
            if after.layers[0] <= before.layers[-1]:
                raise BlockLayoutError(f"layers {after.layers} come after layers {before.layers}; wanted is ascending")
        if self.parts[-1].end_bytes > self.block_bytes:
            raise BlockLayoutError(
                f"layers {self.parts[-1].layers} end at byte {self.parts[-1].end_bytes} "
                f"of a block of {self.block_bytes} bytes"
            )

    @classmethod
    def packed(cls, sizes_bytes: Sequence[tuple[int, int]], *, padding_bytes: int = 0) -> BlockLayout:
        """A part per (layer, bytes), one right after the other, and `padding_bytes` at the end."""
        parts, offset_bytes = [], 0
        for layer, size_bytes in sizes_bytes:
            parts.append(BlockPart((layer,), offset_bytes, size_bytes))
            offset_bytes += size_bytes
        if padding_bytes < 0:
            raise BlockLayoutError(f"padding is {padding_bytes} bytes; wanted is 0 or more")
        return cls(tuple(parts), offset_bytes + padding_bytes)

    @classmethod
    def uniform(cls, layers: int | Iterable[int], bytes_per_layer: int, padding: int = 0) -> BlockLayout:
        """Layer after layer, each of `bytes_per_layer`, and `padding` bytes at the end.

        Args:
            layers: their number, or the indices of those that are in the block, ascending.
        """
        indices = range(layers) if isinstance(layers, int) else layers
        return cls.packed([(layer, bytes_per_layer) for layer in indices], padding_bytes=padding)

    @property
    def layers(self) -> tuple[int, ...]:
        """All layers that have bytes in the block, ascending."""
        return tuple(layer for part in self.parts for layer in part.layers)

    @property
    def padding_bytes(self) -> int:
        """Bytes of the block that belong to no layer."""
        return self.block_bytes - sum(part.size_bytes for part in self.parts)

    def range_of(self, first_layer: int, last_layer: int) -> tuple[int, int]:
        """The bytes of every part with a layer in [first_layer, last_layer], both included: (offset_bytes, size_bytes).

        Layers of the range without bytes of their own in the block add nothing.

        Raises: BlockLayoutError: no layer of the range is in the block.
        """
        wanted = [part for part in self.parts if any(first_layer <= layer <= last_layer for layer in part.layers)]
        if not wanted:
            raise BlockLayoutError(
                f"no layer from {first_layer} to {last_layer} is in the block; it has layers {self.layers}"
            )
        return wanted[0].offset_bytes, wanted[-1].end_bytes - wanted[0].offset_bytes

    def merged(self, parts_count: int) -> BlockLayout:
        """The same block in `parts_count` parts, whose numbers of old parts differ by one at most.

        Fewer, larger parts mean fewer calls; padding between parts that are merged counts as theirs.

        Raises: BlockLayoutError: `parts_count` is not 1 to the number of parts.
        """
        count = len(self.parts)
        if not 1 <= parts_count <= count:
            raise BlockLayoutError(f"{count} parts cannot be merged into {parts_count}; wanted are 1 to {count}")
        cuts = [count * i // parts_count for i in range(parts_count + 1)]
        return BlockLayout(tuple(_merge(self.parts[low:high]) for low, high in pairwise(cuts)), self.block_bytes)


def _merge(parts: Sequence[BlockPart]) -> BlockPart:
    layers = tuple(layer for part in parts for layer in part.layers)
    return BlockPart(layers, parts[0].offset_bytes, parts[-1].end_bytes - parts[0].offset_bytes)
