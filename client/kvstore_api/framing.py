"""Payload frames: protobuf messages whose one large field never passes through a protobuf object.

A frame is an ordinary message of `block_store.proto` with block bytes in field 15. Building one as a protobuf object copies
those bytes twice and parsing it once more, which halves the throughput; so the small fields are left to protobuf and the
large one is appended or sliced off by hand. The wire format is protobuf's own
(https://protobuf.dev/programming-guides/encoding/), and any other client may use the generated classes.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from google.protobuf.message import Message
    from typing_extensions import Buffer

DATA_FIELD = 15
_FIELDS_ROOM_BYTES = 512  # positions and checksums of a frame of ordinary blocks
_DATA_TAG = bytes([DATA_FIELD << 3 | 2])  # 2 is "length-delimited"
_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5


class FrameError(ValueError):
    """The bytes are no valid protobuf message."""


def join_frame(fields: Message, parts: Sequence[Buffer], size_bytes: int) -> bytes:
    """The message `fields` with `data` set to the parts' bytes, `size_bytes` in all."""
    if not size_bytes:
        return fields.SerializeToString()
    return b"".join((fields.SerializeToString(), _DATA_TAG, _varint(size_bytes), *parts))


class MessageBuffer:
    """A message under construction whose `data` is read straight into it, so that it is never copied in Python.

    The data comes first and the small fields after it, in an order that any protobuf reader takes. Built on BytesIO, which hands
    out its own memory: for writing as a buffer, and in the end as the bytes that gRPC wants.
    """

    def __init__(self, size_bytes: int) -> None:
        self._message = io.BytesIO()
        self._message.write(_DATA_TAG + _varint(size_bytes))
        self._data_at = self._message.tell()
        end = self._data_at + size_bytes
        # Allocate once, with room for the fields behind: growing later would move everything.
        self._message.seek(end + _FIELDS_ROOM_BYTES)
        self._message.write(b"\0")
        self._message.truncate(end)
        self._message.seek(end)

    def view(self) -> memoryview:
        """The data, writable. Let go of it, and of every slice of it, before `finish`."""
        return self._message.getbuffer()[self._data_at :]

    def finish(self, fields: Message) -> bytes:
        """The message with these other fields. Raises: BufferError: a view is still held."""
        self._message.write(fields.SerializeToString())
        return self._message.getvalue()


def split_frame(message: bytes) -> tuple[bytes, memoryview]:
    """The message without its field 15, and that field's bytes (empty if absent) as a view into `message`.

    Raises: FrameError: `message` is not a protobuf message.
    """
    view = memoryview(message)
    position, end = 0, len(message)
    data = view[:0]
    kept: list[memoryview] = []
    while position < end:
        start = position
        tag, position = _read_varint(message, position)
        wire_type = tag & 7
        if wire_type == _LENGTH_DELIMITED:
            length, position = _read_varint(message, position)
            body = position
            position += length
            if tag >> 3 == DATA_FIELD and position <= end:
                data = view[body:position]  # the last one counts, as protobuf says
                continue
        elif wire_type == _VARINT:
            _, position = _read_varint(message, position)
        elif wire_type == _FIXED64:
            position += 8
        elif wire_type == _FIXED32:
            position += 4
        else:
            raise FrameError(f"wire type {wire_type} at byte {start}")
        if position > end:
            raise FrameError(f"field at byte {start} ends at {position}, the message at {end}")
        kept.append(view[start:position])
    return b"".join(kept), data


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        if position >= len(message):
            raise FrameError(f"varint cut off at byte {position}")
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise FrameError(f"varint longer than 64 bits before byte {position}")
