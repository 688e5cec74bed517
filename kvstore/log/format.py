"""The bytes of a segment file: pure encoding and decoding, no I/O. FORMAT.md is the same in prose.

┌──────────────┬───────────────────┬───────────────────┬────────────────────────────────┐
│ header page  │ use table         │ row table         │ payloads                       │
│ 4,096 B      │ rows x 64 B       │ rows x 96 B       │ each starts on a 4 KiB boundary│
└──────────────┴───────────────────┴───────────────────┴────────────────────────────────┘
  mapped, mutable ────────────────┘  written once        written once

row, 96 bytes, little-endian
┌───────┬───────┬────────────┬──────┬──────────────┬──────┬──────────┬───────┬──────────┐
│ magic │ crc32 │ segment_id │ slot │ namespace_id │ kind │ class_id │ zero  │ position │
│ u32   │ u32   │ u64        │ u32  │ u32          │ u8   │ u8       │ u16   │ u32      │
├───────┴┬──────┴──────┬─────┴──────┴─┬────────────┴──┬───┴──────────┴──┬────┴──────────┤
│ anchor │ prefix_hash │ offset_bytes │ length_bytes  │ create_time_s   │ checksum      │
│ 7 + 1  │ 32          │ u64          │ u32           │ u32             │ u64           │
└────────┴─────────────┴──────────────┴───────────────┴─────────────────┴───────────────┘
  the byte after the anchor is a state object's seed byte
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import CorruptDataDirError, FormatVersionError
from kvstore.types import ClassId, SegmentId

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMAT_VERSION = 2
ALIGNMENT_BYTES = 4096

HEADER_BYTES = 4096
HEADER_MAGIC = 0x3153564B  # "KVS1" on disk
# magic, crc32, format version, row capacity, segment id, create time, class id, 7 zero bytes, store id
HEADER = struct.Struct("<IIIIQIB7x16s")
HEADER_CRC_FROM = 8  # crc32 covers bytes [8, end) of the struct

# The header page's second half is mutable and mapped: state, lease deadline, and what the segment holds once it is sealed.
STATE_OFFSET = 2048
STATE_OPEN, STATE_SEALED, STATE_RETIRED = 0, 1, 2
LEASE_UNTIL_OFFSET = 2052
SEAL_OFFSET = 2056
SEAL = struct.Struct("<IIQ")  # slots, crc32 of segment id, slots and end, end of the payloads

ROW_BYTES = 96
ROW_MAGIC = 0x3152564B  # "KVR1" on disk; a hole of zeros is never a row
ROW_CRC_FROM = 8  # crc32 covers bytes [8, 96)
KIND_BLOCK, KIND_STATE = 1, 2  # 0 is reserved
ROW_DTYPE = np.dtype(
    [
        ("magic", "<u4"),
        ("crc32", "<u4"),
        ("segment_id", "<u8"),
        ("slot", "<u4"),
        ("namespace_id", "<u4"),
        ("kind", "u1"),
        ("class_id", "u1"),
        ("zero", "<u2"),
        ("position", "<u4"),
        ("anchor", "V7"),
        ("seed_byte", "u1"),
        ("prefix_hash", "V32"),
        ("offset_bytes", "<u8"),
        ("length_bytes", "<u4"),
        ("create_time_s", "<u4"),
        ("checksum", "<u8"),
    ]
)
assert ROW_DTYPE.itemsize == ROW_BYTES
ROW = struct.Struct("<IIQIIBBHI7sB32sQIIQ")
assert ROW.size == ROW_BYTES

USE_BYTES = 64
USE_COLUMNS = 16
USE_FLAGS = 0
FIRST_CLASS_COLUMN, LAST_CLASS_COLUMN = 1, 13  # last use by the class of that id, seconds since the epoch, 0 = never
# As in the slot's row, so that counting and reclaiming read no rows. Never trusted for what is handed out.
USE_NAMESPACE, USE_LENGTH = 14, 15
# In the length's column: used again after it was stored, and again after that.
REUSED, REUSED_OFTEN = 1 << 31, 1 << 30
LENGTH_MASK = REUSED_OFTEN - 1
FLAG_EVICTED = 1  # no longer offered; a lease given before may still read it
FLAG_DELETED = 2  # deleted by a caller, or damaged: not readable even under a lease

GROUP_BLOCKS = 32  # blocks of a chain that share an anchor, and so lie together in the index
ANCHOR_BYTES = 7
NO_ANCHOR = bytes(ANCHOR_BYTES)


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What a segment file says about itself."""

    segment_id: SegmentId
    store_id: bytes  # 16 bytes
    class_id: ClassId
    row_capacity: int
    create_time_s: int

    def encode(self) -> bytes:
        """The header page, state OPEN, no lease."""
        body = HEADER.pack(
            HEADER_MAGIC,
            0,
            FORMAT_VERSION,
            self.row_capacity,
            self.segment_id,
            self.create_time_s,
            self.class_id,
            self.store_id,
        )
        crc = zlib.crc32(body[HEADER_CRC_FROM:])
        return (body[:4] + crc.to_bytes(4, "little") + body[8:]).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def decode(cls, page: bytes, name: str) -> SegmentHeader:
        """Read a header page. Raises: CorruptDataDirError, FormatVersionError; both name the file."""
        if len(page) < HEADER_BYTES:
            raise CorruptDataDirError(f"{name}: {len(page)} bytes, a segment header has {HEADER_BYTES}")
        magic, crc, version, rows, segment_id, created, class_id, store_id = HEADER.unpack_from(page)
        if magic != HEADER_MAGIC:
            raise CorruptDataDirError(f"{name}: magic {magic:#010x}, want {HEADER_MAGIC:#010x}")
        found = zlib.crc32(page[HEADER_CRC_FROM : HEADER.size])
        if found != crc:
            raise CorruptDataDirError(f"{name}: header crc {found:#010x}, want {crc:#010x}")
        if version != FORMAT_VERSION:
            raise FormatVersionError(wrong_version(name, version))
        return cls(SegmentId(segment_id), store_id, ClassId(class_id), rows, created)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of a segment with `row_capacity` rows begin."""

    row_capacity: int

    @property
    def mapped_bytes(self) -> int:
        """Header page and use table: the part that is memory-mapped."""
        return align(HEADER_BYTES + self.row_capacity * USE_BYTES)

    @property
    def payload_offset(self) -> int:
        """Where the first payload begins."""
        return align(self.mapped_bytes + self.row_capacity * ROW_BYTES)

    def use_offset(self, slot: int) -> int:
        """Where a slot's use row lies."""
        return HEADER_BYTES + slot * USE_BYTES

    def row_offset(self, slot: int) -> int:
        """Where a slot's row lies."""
        return self.mapped_bytes + slot * ROW_BYTES


@dataclass(frozen=True, slots=True)
class Entry:
    """What a row says about a block or state object, but for its place."""

    namespace_id: int
    kind: int
    class_id: int
    position: int
    anchor: bytes  # 7 bytes: of the prefix hash before the block's group; a state object's: of its prefix hash
    prefix_hash: bytes  # 32 bytes; for a state object the digest of prefix hash and name
    length_bytes: int
    create_time_s: int
    checksum: int
    seed_byte: int = 0  # a state object's: the 8th byte of its prefix hash, the last of its checksum's seed

    @classmethod
    def of_row(cls, row: np.void) -> Entry:
        """What a row says."""
        return cls(
            namespace_id=int(row["namespace_id"]),
            kind=int(row["kind"]),
            class_id=int(row["class_id"]),
            position=int(row["position"]),
            anchor=row["anchor"].tobytes(),
            prefix_hash=row["prefix_hash"].tobytes(),
            length_bytes=int(row["length_bytes"]),
            create_time_s=int(row["create_time_s"]),
            checksum=int(row["checksum"]),
            seed_byte=int(row["seed_byte"]),
        )


def wrong_version(name: str, version: object) -> str:
    """What to say of a file that another version of the format wrote."""
    return (
        f"{name}: format version {version}, this server reads and writes {FORMAT_VERSION}; use the server that wrote it, or "
        "start with an empty data directory (a cache fills up again)"
    )


def encode_seal(segment_id: SegmentId, slot_count: int, end_bytes: int) -> bytes:
    """What a sealed segment says of itself, so that opening it reads no rows."""
    return SEAL.pack(slot_count, _seal_crc(segment_id, slot_count, end_bytes), end_bytes)


def decode_seal(data: bytes, segment_id: SegmentId) -> tuple[int, int] | None:
    """Slots and end of the payloads, or None if that was never written, or not whole."""
    slot_count, crc, end_bytes = SEAL.unpack(data)
    return (slot_count, end_bytes) if crc == _seal_crc(segment_id, slot_count, end_bytes) else None


def _seal_crc(segment_id: SegmentId, slot_count: int, end_bytes: int) -> int:
    return zlib.crc32(struct.pack("<QIQ", segment_id, slot_count, end_bytes))


def encode_row(segment_id: SegmentId, slot: int, offset_bytes: int, entry: Entry) -> bytes:
    """The 96 bytes of a row."""
    body = ROW.pack(
        ROW_MAGIC,
        0,
        segment_id,
        slot,
        entry.namespace_id,
        entry.kind,
        entry.class_id,
        0,
        entry.position,
        entry.anchor,
        entry.seed_byte,
        entry.prefix_hash,
        offset_bytes,
        entry.length_bytes,
        entry.create_time_s,
        entry.checksum,
    )
    return body[:4] + zlib.crc32(body[ROW_CRC_FROM:]).to_bytes(4, "little") + body[8:]


def valid_rows(rows: NDArray[np.void], segment_id: SegmentId, first_slot: int = 0) -> NDArray[np.bool_]:
    """Which of the rows (consecutive slots from `first_slot`) are whole and belong where they stand."""
    valid: NDArray[np.bool_] = rows["magic"] == ROW_MAGIC
    valid &= rows["segment_id"] == segment_id
    valid &= rows["slot"] == np.arange(first_slot, first_slot + len(rows))
    whole = memoryview(rows.tobytes())
    wanted = np.flatnonzero(valid)
    starts = (wanted * ROW_BYTES).tolist()
    crcs = [zlib.crc32(whole[start + ROW_CRC_FROM : start + ROW_BYTES]) for start in starts]
    valid[wanted] = np.array(crcs, dtype=np.uint32) == rows["crc32"][wanted]
    return valid


def align(size_bytes: int) -> int:
    """Round up to a payload boundary."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
