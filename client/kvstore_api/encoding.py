"""Unambiguous bytes for things that are hashed: every variable field is tagged and length-prefixed."""

import struct

_FIELD = struct.Struct("<HQ")  # tag, length


def field(tag: int, value: bytes) -> bytes:
    """One field: u16 tag, u64 length, the bytes. No two lists of fields encode to the same bytes."""
    return _FIELD.pack(tag, len(value)) + value


def text_field(tag: int, value: str) -> bytes:
    """A field of UTF-8 text."""
    return field(tag, value.encode())


def number_field(tag: int, value: int) -> bytes:
    """A field of one u64, little-endian."""
    return field(tag, value.to_bytes(8, "little"))
