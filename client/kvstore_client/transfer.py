"""Payload on its way: puts built from the caller's memory, gets written into it and checked there.

A put's bytes are copied once, into the message. A get's are copied once, out of it, and the checksum is taken of the copy:
what is checked is what the caller will use. No reply is trusted: whatever a server sends, a block counts as brought only
when all of its bytes lie in the caller's memory and agree with the block's name.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from kvstore_api.checksum import block_checksum
from kvstore_api.framing import FrameError, join_frame, split_frame
from kvstore_api.limits import MAX_FRAME_BLOCKS, MAX_FRAME_DATA_BYTES
from kvstore_api.v1 import block_store_pb2
from kvstore_client.errors import BadReplyError, clean_reason
from kvstore_client.results import BLOCK_OK, CORRUPT, NO_RESULT, NOT_FOUND

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore_api.chain import Chain
    from kvstore_client.buffers import BlockBuffers
    from kvstore_client.results import Failure


class Outgoing:
    """The messages of one put, for gRPC to take on its own thread.

    After `stop` the caller's memory is not read any more: an engine reuses it as soon as the put has returned, whether the
    put has succeeded or not.
    """

    def __init__(self, messages: Iterator[bytes]) -> None:
        self._lock = threading.Lock()  # held while a message is built
        self._messages: Iterator[bytes] | None = messages  # guarded by `_lock`

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        with self._lock:
            if self._messages is None:
                raise StopIteration
            return next(self._messages)

    def stop(self) -> None:
        """Wait for the message that is being built, if any; then let go of the caller's memory."""
        with self._lock:
            self._messages = None


def put_messages(
    header: block_store_pb2.PutBlocksHeader, chain: Chain, blocks: BlockBuffers, block_bytes: int
) -> Iterator[bytes]:
    """The messages of a PutBlocks call: the header, then frames."""
    yield block_store_pb2.PutBlocksRequest(header=header).SerializeToString()
    if block_bytes > MAX_FRAME_DATA_BYTES:
        for index in range(blocks.count):
            yield from _split_block(chain, header.first_block + index, blocks.block(index))
        return
    frame_blocks = min(MAX_FRAME_BLOCKS, MAX_FRAME_DATA_BYTES // block_bytes)
    for index in range(0, blocks.count, frame_blocks):
        count = min(frame_blocks, blocks.count - index)
        first = header.first_block + index
        fields = block_store_pb2.PutBlocksRequest(
            blocks=range(first, first + count),
            checksums=[block_checksum(blocks.block(index + i), chain[first + i]) for i in range(count)],
        )
        yield join_frame(fields, blocks.run(index, count), count * block_bytes)


def _split_block(chain: Chain, position: int, block: memoryview) -> Iterator[bytes]:
    checksum = block_checksum(block, chain[position])
    for offset in range(0, len(block), MAX_FRAME_DATA_BYTES):
        part = block[offset : offset + MAX_FRAME_DATA_BYTES]
        fields = block_store_pb2.PutBlocksRequest(blocks=[position], checksums=[checksum], offset_bytes=offset)
        yield join_frame(fields, (part,), len(part))


def put_state_messages(header: block_store_pb2.PutStateHeader, data: memoryview) -> Iterator[bytes]:
    """The messages of a PutState call: the header, then frames."""
    yield block_store_pb2.PutStateRequest(header=header).SerializeToString()
    for offset in range(0, len(data), MAX_FRAME_DATA_BYTES):
        part = data[offset : offset + MAX_FRAME_DATA_BYTES]
        yield join_frame(block_store_pb2.PutStateRequest(offset_bytes=offset), (part,), len(part))


class IncomingBlocks:
    """Takes the frames of one get into the caller's memory and keeps the verdict on each block.

    Blocks are settled in ascending order, each once: as OK, as CORRUPT, or as the miss that the server says. A frame
    that contradicts the protocol ends the get; what was verified before stays valid, since each block stands for itself.
    """

    def __init__(
        self, chain: Chain, first_block: int, out: BlockBuffers, block_bytes: int, *, of_parts: bool = False
    ) -> None:
        """`of_parts`: what counts as a block here is a part of one."""
        self._of_parts = of_parts
        self._chain = chain
        self._first_block = first_block
        self._out = out
        self._block_bytes = block_bytes
        self.restart()

    def restart(self) -> None:
        """Forget everything: the blocks are asked for anew."""
        self._verdicts: list[str | None] = [None] * self._out.count
        self._wholes = [0] * self._out.count  # checksums of the whole blocks, where parts are asked for
        self._next_index = 0  # data of blocks before this one may not come any more
        self._part_bytes = 0  # bytes that have come of block `_next_index`, when it comes in parts

    def take(self, message: bytes) -> None:
        """One message of the stream. Raises: BadReplyError: it contradicts the protocol."""
        try:
            rest, data = split_frame(message)
            frame = block_store_pb2.GetBlocksResponse.FromString(rest)
        except (FrameError, DecodeError) as error:
            raise BadReplyError(f"no message: {error}") from None
        positions: Sequence[int] = frame.blocks
        if len(frame.checksums) != len(positions):
            raise BadReplyError(f"{len(frame.checksums)} checksums for {len(positions)} blocks")
        if self._of_parts and len(frame.block_checksums) != len(positions):
            raise BadReplyError(f"{len(frame.block_checksums)} checksums of whole blocks for parts of {len(positions)}")
        if len(data) == len(positions) * self._block_bytes and not frame.offset_bytes:
            self._take_blocks(positions, frame.checksums, data)
        elif len(positions) == 1 and len(data):
            self._take_part(positions[0], frame.checksums[0], frame.offset_bytes, data)
        else:
            raise BadReplyError(
                f"{len(data)} bytes at offset {frame.offset_bytes} for {len(positions)} blocks of {self._block_bytes}"
            )
        for position, whole in zip(positions, frame.block_checksums, strict=False):
            self._wholes[position - self._first_block] = whole
        for miss in frame.misses:
            self._take_miss(miss.block, miss.reason)

    def block_checksums(self) -> list[int]:
        """Those of the whole blocks, where parts were asked for; 0 for blocks that are not OK."""
        if not self._of_parts:
            return []
        return [
            whole if verdict == BLOCK_OK else 0 for whole, verdict in zip(self._wholes, self._verdicts, strict=True)
        ]

    def statuses(self, failure: Failure | None) -> list[str]:
        """One status per block, after the call has ended; blocks that were not settled get the failure's reason."""
        if failure is None and self._part_bytes:
            self._settle(self._next_index, CORRUPT)  # a short read must not pass as anything else
        unsettled = NO_RESULT if failure is None else failure.reason
        return [verdict or unsettled for verdict in self._verdicts]

    @property
    def complete(self) -> bool:
        """Whether every block has been verified."""
        return all(verdict == BLOCK_OK for verdict in self._verdicts)

    @property
    def useful(self) -> bool:
        """Whether the first block has been verified, so that a leading part can be used."""
        return bool(self._verdicts) and self._verdicts[0] == BLOCK_OK

    def _take_blocks(self, positions: Sequence[int], checksums: Sequence[int], data: memoryview) -> None:
        size, start = self._block_bytes, 0
        for position, checksum in zip(positions, checksums, strict=True):
            index = self._index(position)
            block = self._out.block(index)
            block[:] = data[start : start + size]
            start += size
            self._verify(index, block, checksum)

    def _take_part(self, position: int, checksum: int, offset: int, data: memoryview) -> None:
        index = self._index(position, goes_on=offset > 0)
        end = offset + len(data)
        if offset != self._part_bytes or end > self._block_bytes:
            raise BadReplyError(
                f"bytes {offset} to {end} of block {position} after {self._part_bytes} of {self._block_bytes}"
            )
        block = self._out.block(index)
        block[offset:end] = data
        if end == self._block_bytes:
            self._verify(index, block, checksum)
        else:
            self._next_index, self._part_bytes = index, end

    def _index(self, position: int, *, goes_on: bool = False) -> int:
        """Where in this get the block is, once it is clear that it may come now."""
        index = position - self._first_block
        if not self._next_index <= index < len(self._verdicts):
            raise BadReplyError(
                f"block {position}, wanted are {self._first_block + self._next_index} to "
                f"{self._first_block + len(self._verdicts) - 1}"
            )
        if self._part_bytes and not (goes_on and index == self._next_index):
            self._settle(self._next_index, CORRUPT)  # the rest of the block before never came
        if self._verdicts[index] is not None:
            raise BadReplyError(f"block {position} is {self._verdicts[index]} already")
        return index

    def _verify(self, index: int, block: memoryview, checksum: int) -> None:
        good = block_checksum(block, self._chain[self._first_block + index]) == checksum
        self._settle(index, BLOCK_OK if good else CORRUPT)

    def _settle(self, index: int, verdict: str) -> None:
        self._verdicts[index] = verdict
        self._next_index, self._part_bytes = index + 1, 0

    def _take_miss(self, position: int, reason: str) -> None:
        index = position - self._first_block
        if not 0 <= index < len(self._verdicts):
            raise BadReplyError(f"a miss of block {position}, which was not asked for")
        if self._verdicts[index] is not None:
            raise BadReplyError(f"a miss of block {position}, which is {self._verdicts[index]} already")
        if self._part_bytes and index == self._next_index:
            self._part_bytes, self._next_index = 0, index + 1
        self._verdicts[index] = clean_reason(reason, NOT_FOUND)


class StateTooLargeError(Exception):
    """The object is larger than the caller allows."""


class IncomingState:
    """Takes the frames of one state object."""

    def __init__(self, prefix_hash: bytes, max_bytes: int) -> None:
        self._prefix_hash = prefix_hash
        self._max_bytes = max_bytes
        self.restart()

    def restart(self) -> None:
        """Forget everything: the object is asked for anew."""
        self._data: bytearray | None = None
        self._received_bytes = 0
        self._checksum = 0
        self._found = True

    def take(self, message: bytes) -> None:
        """One message of the stream.

        Raises:
            BadReplyError: it contradicts the protocol.
            StateTooLargeError: the rest is not wanted.
        """
        try:
            rest, data = split_frame(message)
            frame = block_store_pb2.GetStateResponse.FromString(rest)
        except (FrameError, DecodeError) as error:
            raise BadReplyError(f"no message: {error}") from None
        if self._data is None and not self._begin(frame):
            return
        assert self._data is not None
        end = self._received_bytes + len(data)
        if (len(data) and frame.offset_bytes != self._received_bytes) or end > len(self._data):
            raise BadReplyError(
                f"bytes {frame.offset_bytes} to {frame.offset_bytes + len(data)} of a state object after "
                f"{self._received_bytes} of {len(self._data)}"
            )
        self._data[self._received_bytes : end] = data
        self._received_bytes = end

    def result(self) -> tuple[bytearray | None, str]:
        """The object and "OK", or None and the reason; after the stream has ended well."""
        if not self._found:
            return None, NOT_FOUND
        if self._data is None:
            return None, NO_RESULT
        if self._received_bytes < len(self._data) or block_checksum(self._data, self._prefix_hash) != self._checksum:
            return None, CORRUPT
        return self._data, BLOCK_OK

    def _begin(self, frame: block_store_pb2.GetStateResponse) -> bool:
        """The first message says whether there is an object, and its size."""
        self._found = self._found and frame.found
        if not self._found:
            return False
        if frame.size_bytes > self._max_bytes:
            raise StateTooLargeError(f"{frame.size_bytes} bytes, allowed are {self._max_bytes}")
        if not frame.size_bytes:
            raise BadReplyError("a state object of 0 bytes")
        self._data = bytearray(frame.size_bytes)
        self._checksum = frame.checksum
        return True
