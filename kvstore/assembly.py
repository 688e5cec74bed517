"""Arriving payload frames to whole blocks, with exact checks. Pure: no grpc, no I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.errors import InvalidArgumentError
from kvstore.types import PutBlock
from kvstore_api.limits import MAX_BLOCK_BYTES, MAX_FRAME_DATA_BYTES
from kvstore_api.results import PutResult, PutStatus

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore_api.v1 import block_store_pb2


class BlockAssembler:
    """The frames of one put, in the order they arrive.

    Args:
        first_block, block_count: the range the put's header announced.
        block_bytes: the namespace's block size. A block that declares another size is checked like any other, but none of
            its bytes are kept: it comes out as its rejection.
    """

    def __init__(self, first_block: int, block_count: int, block_bytes: int) -> None:
        self._first_block = first_block
        self._end_block = first_block + block_count
        self._block_bytes = block_bytes
        self._next_block = first_block  # the lowest that may still come
        self._partial: _PartialBlock | None = None

    def add(self, frame: block_store_pb2.PutBlocksRequest, data: memoryview) -> Iterator[PutBlock | PutResult]:
        """The blocks that are complete with this frame, or their rejections; whole blocks are views into it.

        Raises: InvalidArgumentError: the frame is broken; blocks of earlier frames stand. Nothing is yielded before the
            whole frame was checked.
        """
        sizes = self._checked_sizes(frame, data)
        if self._partial is not None or frame.offset_bytes or (len(sizes) == 1 and sizes[0] > len(data)):
            return self._add_part(frame, sizes[0], data)
        if sum(sizes) != len(data):
            raise InvalidArgumentError(
                f"frame with blocks {_span(frame.blocks)} has {len(data)} bytes, its {len(sizes)} blocks add up to {sum(sizes)}"
            )
        self._next_block = frame.blocks[-1] + 1
        return self._whole_blocks(frame.blocks, frame.checksums, sizes, data)

    def finish(self) -> None:
        """Raises: InvalidArgumentError: the last block came in part only."""
        if self._partial is not None:
            raise InvalidArgumentError(f"the put ended inside {self._partial}")

    def _checked_sizes(self, frame: block_store_pb2.PutBlocksRequest, data: memoryview) -> Sequence[int]:
        blocks = frame.blocks
        if not blocks:
            raise InvalidArgumentError(f"frame with {len(data)} bytes names no blocks")
        if len(data) > MAX_FRAME_DATA_BYTES:
            raise InvalidArgumentError(
                f"frame has {len(data)} bytes of block data, the limit is {MAX_FRAME_DATA_BYTES}"
            )
        if len(frame.checksums) != len(blocks):
            raise InvalidArgumentError(f"frame names {len(blocks)} blocks, but {len(frame.checksums)} checksums")
        if len(frame.sizes) not in (0, len(blocks)):
            raise InvalidArgumentError(f"frame names {len(blocks)} blocks, but {len(frame.sizes)} sizes")
        self._check_positions(blocks)
        if not frame.sizes:
            return [self._block_bytes] * len(blocks)
        if max(frame.sizes) > MAX_BLOCK_BYTES:
            raise InvalidArgumentError(
                f"frame names a block of {max(frame.sizes)} bytes, the limit is {MAX_BLOCK_BYTES}"
            )
        return frame.sizes

    def _check_positions(self, blocks: Sequence[int]) -> None:
        lowest = self._partial.block if self._partial else self._next_block
        for block in blocks:
            if not self._first_block <= block < self._end_block:
                raise InvalidArgumentError(
                    f"frame names block {block}, the header announced {self._first_block} to {self._end_block - 1}"
                )
            if block < lowest:
                raise InvalidArgumentError(f"frame names block {block} where {lowest} or a later one must follow")
            lowest = block + 1

    def _add_part(
        self, frame: block_store_pb2.PutBlocksRequest, size_bytes: int, data: memoryview
    ) -> Iterator[PutBlock | PutResult]:
        if len(frame.blocks) != 1:
            raise InvalidArgumentError(f"frame with a part of a block names {len(frame.blocks)} blocks")
        block, checksum = frame.blocks[0], frame.checksums[0]
        partial = self._partial or _PartialBlock(block, checksum, size_bytes, keep=size_bytes == self._block_bytes)
        partial.add(block, checksum, size_bytes, frame.offset_bytes, data)
        if partial.arrived_bytes < size_bytes:
            self._partial = partial
            return iter(())
        self._partial, self._next_block = None, block + 1
        return iter((self._arrived(block, partial.buffer, checksum, size_bytes),))

    def _whole_blocks(
        self, blocks: Sequence[int], checksums: Sequence[int], sizes: Sequence[int], data: memoryview
    ) -> Iterator[PutBlock | PutResult]:
        start = 0
        for block, checksum, size in zip(blocks, checksums, sizes, strict=True):
            yield self._arrived(block, data[start : start + size], checksum, size)
            start += size

    def _arrived(
        self, block: int, data: memoryview | bytearray, checksum: int, size_bytes: int
    ) -> PutBlock | PutResult:
        if size_bytes == self._block_bytes:
            return PutBlock(block, data, checksum)
        detail = f"block {block} has {size_bytes} bytes, the namespace's blocks have {self._block_bytes}"
        return PutResult(block, PutStatus.REJECTED, "WRONG_SIZE", detail)


class _PartialBlock:
    """A block larger than a frame, as far as it has arrived.

    Args:
        keep: whether its bytes are wanted; else they are only counted. The buffer grows with what arrives: a size that was
            only announced costs nothing.
    """

    def __init__(self, block: int, checksum: int, size_bytes: int, *, keep: bool) -> None:
        self.block = block
        self.buffer = bytearray()
        self.arrived_bytes = 0
        self._checksum = checksum
        self._size_bytes = size_bytes
        self._keep = keep

    def __str__(self) -> str:
        return f"block {self.block}, of which {self.arrived_bytes} of {self._size_bytes} bytes have come"

    def add(self, block: int, checksum: int, size_bytes: int, offset_bytes: int, data: memoryview) -> None:
        if (block, checksum, size_bytes) != (self.block, self._checksum, self._size_bytes):
            raise InvalidArgumentError(
                f"frame with block {block} ({size_bytes} bytes, checksum {checksum:#018x}) comes inside {self} "
                f"(checksum {self._checksum:#018x})"
            )
        check_part(self.arrived_bytes, size_bytes, offset_bytes, data, str(self))
        self.arrived_bytes += len(data)
        if self._keep:
            self.buffer += data


def check_part(arrived_bytes: int, size_bytes: int, offset_bytes: int, data: memoryview, what: str) -> None:
    """Make sure that a frame's bytes belong right behind the `arrived_bytes` that came before.

    Raises: InvalidArgumentError: they leave a gap, overlap, are none or are too many; names `what` and the numbers.
    """
    if not data:
        raise InvalidArgumentError(f"frame without bytes inside {what}")
    if len(data) > MAX_FRAME_DATA_BYTES:
        raise InvalidArgumentError(f"frame has {len(data)} bytes of data, the limit is {MAX_FRAME_DATA_BYTES}")
    if offset_bytes != arrived_bytes:
        raise InvalidArgumentError(f"frame begins at byte {offset_bytes} of {what}")
    end = offset_bytes + len(data)
    if end > size_bytes:
        raise InvalidArgumentError(f"frame ends at byte {end} of {what}")


def _span(blocks: Sequence[int]) -> str:
    return str(blocks[0]) if len(blocks) == 1 else f"{blocks[0]} to {blocks[-1]}"
