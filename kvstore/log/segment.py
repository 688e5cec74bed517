"""One segment file: OPEN -> SEALED -> RETIRED -> unlinked.

Only the writer thread appends. Anyone reads. Use rows (recency, flags) are written by whoever uses a block: they are hints
about value, and a lost update costs at most a little recency; flags only ever gain bits.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import CorruptDataDirError, ForeignSegmentError
from kvstore.expiry import last_use_s
from kvstore.log import format as fmt

if TYPE_CHECKING:
    import mmap
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from kvstore.log.device import Device
    from kvstore.types import SegmentId

_PADDING = memoryview(bytes(fmt.ALIGNMENT_BYTES))
_SCAN_ROWS = 4096
SUSPECTED_S = 60.0


class Segment:
    """An open file of blocks. The descriptor is closed when the last user lets go of the object."""

    def __init__(self, path: Path, device: Device, descriptor: int, header: fmt.SegmentHeader) -> None:
        self.path = path
        self.header = header
        self.segment_id = header.segment_id
        self.layout = fmt.Layout(header.row_capacity)
        self._device = device
        self._descriptor = descriptor
        self._map: mmap.mmap = device.map(descriptor, self.layout.mapped_bytes)
        self._head = np.frombuffer(self._map, dtype="<u4", count=fmt.HEADER_BYTES // 4)
        self._uses: NDArray[np.uint32] = np.frombuffer(
            self._map, dtype="<u4", offset=fmt.HEADER_BYTES, count=header.row_capacity * fmt.USE_COLUMNS
        ).reshape(header.row_capacity, fmt.USE_COLUMNS)
        # Last, so that a constructor that fails leaves closing to its caller.
        self._closer = weakref.finalize(self, device.close, descriptor)
        self._bits_lock = threading.Lock()  # so that two threads' flags or leases do not overwrite each other
        # Whether flags may be lost in a power loss; so is what an earlier process set.
        self.flags_unsynced = True
        # Its table could not be read: not to be reclaimed before then, by the steady clock; writer thread only.
        self.unreadable_until_s = 0.0
        self.unreadable_told = False
        self.moving = False  # its blocks are flagged, and the index is about to say where they are now
        # Slots the disk did not give when they were read, and until when they are not offered for it, by the monotonic clock. Only
        # in memory: a cable that is plugged in again must not have cost the cache. Replaced as a whole.
        self.suspects: dict[int, float] = {}
        self.unlink_failed = False  # so that it is told once; writer thread only
        self.slot_count = 0  # slots handed out; writer thread only, then constant
        # What `kvstore.dropped` knows each slot's block by, and the one before it in its chain; 0 for those of an earlier process.
        # With room for more slots; writer thread only.
        self._tags = np.zeros((0, 2), dtype=np.uint64)
        self.end_bytes = self.layout.payload_offset  # where the next payload goes; writer thread only
        # Rises with whatever may end a slot's life or add one, before and after it: what was counted in between is not final.
        self.changes = 0

    @classmethod
    def create(cls, path: Path, device: Device, header: fmt.SegmentHeader) -> Segment:
        """Make the file. Raises: OSError; a file half made is removed again."""
        descriptor = device.create(path)
        try:
            layout = fmt.Layout(header.row_capacity)
            device.resize(descriptor, layout.payload_offset)
            device.write(descriptor, [header.encode()], 0)
            return cls(path, device, descriptor, header)
        except OSError:
            device.close(descriptor)
            with contextlib.suppress(OSError):
                device.unlink(path)
            raise

    @classmethod
    def open(cls, path: Path, device: Device, store_id: bytes, *, trust_seal: bool) -> Segment:
        """Open an existing file.

        Args: trust_seal: take a sealed segment's word for what it holds instead of reading its rows; not after power loss.
        Raises: CorruptDataDirError, ForeignSegmentError, FormatVersionError, OSError.
        """
        descriptor = device.open(path)
        try:
            page = bytearray(fmt.HEADER_BYTES)
            size = device.read(descriptor, [memoryview(page)], 0)
            header = fmt.SegmentHeader.decode(bytes(page[:size]), path.name)
            check_identity(header, path, store_id)
            # A file cut short would make the mapping reach past its end, where touching it is a signal, not an error.
            if (
                device.read(descriptor, [memoryview(bytearray(1))], fmt.Layout(header.row_capacity).payload_offset - 1)
                != 1
            ):
                raise CorruptDataDirError(f"{path.name}: ends inside its tables")
            segment = cls(path, device, descriptor, header)
        except BaseException:
            device.close(descriptor)
            raise
        if trust_seal and segment._take_seal():
            segment._read_uses(0, segment.slot_count)
        else:
            segment._find_end()
            if segment.state != fmt.STATE_OPEN:
                segment._note_seal()  # what power loss left may be less than what was sealed
        return segment

    def _take_seal(self) -> bool:
        """Take slot count and end from the header of a sealed segment; False if they are not there."""
        if self.state == fmt.STATE_OPEN:
            return False
        seal = fmt.decode_seal(self._map[fmt.SEAL_OFFSET : fmt.SEAL_OFFSET + fmt.SEAL.size], self.segment_id)
        if seal is None or seal[0] > self.header.row_capacity:
            return False
        self.slot_count, self.end_bytes = seal
        return True

    def _find_end(self) -> None:
        """Read the rows up to the first stretch without any; a failed append ends a segment, so nothing lies behind it."""
        for first in range(0, self.header.row_capacity, _SCAN_ROWS):
            rows = self.read_rows(first, min(_SCAN_ROWS, self.header.row_capacity - first))
            used = np.flatnonzero(rows["magic"])
            if not len(used):
                return
            count = int(used[-1]) + 1
            whole = fmt.valid_rows(rows, self.segment_id, first)
            self._repeat_in_uses(first, np.where(whole, rows, np.zeros(1, dtype=rows.dtype))[:count])
            self.slot_count = first + count
            ends = (rows["offset_bytes"] + rows["length_bytes"])[whole]
            self.end_bytes = max(self.end_bytes, fmt.align(int(ends.max(initial=0))))

    def _read_uses(self, first_slot: int, count: int) -> NDArray[np.uint32]:
        """A copy of use rows, not through the map, where a sector that the disk does not give is a signal. Raises: OSError.

        Each is read so before its first use, and stays in the page cache then as long as there is room for it.
        """
        buffer = bytearray(count * fmt.USE_COLUMNS * 4)
        self._device.read(self._descriptor, [memoryview(buffer)], self.layout.use_offset(first_slot))
        return np.frombuffer(buffer, dtype="<u4").reshape(count, fmt.USE_COLUMNS)

    def _repeat_in_uses(self, first_slot: int, rows: NDArray[np.void]) -> None:
        """Note again what use rows repeat of the rows: after power loss one may be there without the other.

        Written, not mapped: a page of the table may be a hole now, and filling one on a full disk would be a signal.
        """
        before = self._read_uses(first_slot, len(rows))
        uses = before.copy()
        uses[:, fmt.USE_NAMESPACE] = rows["namespace_id"]
        uses[:, fmt.USE_LENGTH] = rows["length_bytes"] | (uses[:, fmt.USE_LENGTH] & ~np.uint32(fmt.LENGTH_MASK))
        if not np.array_equal(uses, before):
            with contextlib.suppress(OSError):  # blocks of no namespace are dead, and their space comes back
                self._device.write(self._descriptor, [uses.tobytes()], self.layout.use_offset(first_slot))

    @property
    def state(self) -> int:
        """STATE_OPEN, STATE_SEALED or STATE_RETIRED."""
        return int(self._head[fmt.STATE_OFFSET // 4])

    @state.setter
    def state(self, state: int) -> None:
        self._head[fmt.STATE_OFFSET // 4] = state

    @property
    def lease_until_s(self) -> int:
        """The last deadline of a lease that names the segment."""
        return int(self._head[fmt.LEASE_UNTIL_OFFSET // 4])

    def extend_lease(self, deadline_s: int) -> None:
        """Keep the file at least until then."""
        with self._bits_lock:  # or a shorter lease could overwrite a longer one
            if deadline_s > self._head[fmt.LEASE_UNTIL_OFFSET // 4]:
                self._head[fmt.LEASE_UNTIL_OFFSET // 4] = deadline_s

    def limit_lease(self, deadline_s: int) -> None:
        """Keep the file no longer than that for a lease."""
        with self._bits_lock:
            if deadline_s < self._head[fmt.LEASE_UNTIL_OFFSET // 4]:
                self._head[fmt.LEASE_UNTIL_OFFSET // 4] = deadline_s

    @property
    def uses(self) -> NDArray[np.uint32]:
        """Shape (row capacity, 16), shared: flags, last uses, namespace id, length. Rows of slots not yet taken are zero."""
        return self._uses

    @property
    def lengths(self) -> NDArray[np.uint32]:
        """Shape (slot_count,): payload bytes."""
        return payload_lengths(self._uses[: self.slot_count])

    @property
    def namespace_ids(self) -> NDArray[np.uint32]:
        """Shape (slot_count,)."""
        return self._uses[: self.slot_count, fmt.USE_NAMESPACE]

    @property
    def tags(self) -> NDArray[np.uint64]:
        """Shape (slot_count, 2): tags of each slot's block, and of the one before it in its chain; writer thread only."""
        if len(self._tags) < self.slot_count:
            self._resize_tags(self.slot_count)
        return self._tags[: self.slot_count]

    def _resize_tags(self, count: int) -> None:
        resized = np.zeros((count, 2), dtype=np.uint64)
        resized[: len(self._tags)] = self._tags[:count]
        self._tags = resized

    def has_room(self, size_bytes: int, segment_size_bytes: int) -> bool:
        """Whether a payload of that size fits, in rows and in bytes."""
        return (
            self.slot_count < self.header.row_capacity and self.end_bytes + fmt.align(size_bytes) <= segment_size_bytes
        )

    def append(
        self,
        entries: Sequence[tuple[fmt.Entry, Buffer]],
        uses: NDArray[np.uint32],
        tags: NDArray[np.uint64],
    ) -> int:
        """Write payloads, then use rows, then rows; returns the first slot.

        Args:
            entries: what each row says, and its payload.
            uses: shape (len(entries), 16): the use rows; namespace id and length are filled in, beside how often it was used.
            tags: shape (len(entries), 2): of the blocks, and of those before them.
        Raises: OSError: nothing of it counts, and the segment must not be appended to again.
        """
        first_slot, offset = self.slot_count, self.end_bytes
        # A row too many would be written over the first payload.
        assert first_slot + len(entries) <= self.header.row_capacity, "segment has no rows left"
        buffers: list[Buffer] = []
        rows = []
        for index, (entry, payload) in enumerate(entries):
            rows.append(fmt.encode_row(self.segment_id, first_slot + index, offset, entry))
            padding = fmt.align(entry.length_bytes) - entry.length_bytes
            buffers.append(payload)
            if padding:
                buffers.append(_PADDING[:padding])
            offset += entry.length_bytes + padding
        uses[:, fmt.USE_NAMESPACE] = [entry.namespace_id for entry, _ in entries]
        lengths = np.array([entry.length_bytes for entry, _ in entries], dtype=np.uint32)
        uses[:, fmt.USE_LENGTH] = lengths | (uses[:, fmt.USE_LENGTH] & ~np.uint32(fmt.LENGTH_MASK))
        self._device.write(self._descriptor, buffers, self.end_bytes)
        self._device.write(self._descriptor, [uses.tobytes()], self.layout.use_offset(first_slot))
        try:
            self._device.write(self._descriptor, [b"".join(rows)], self.layout.row_offset(first_slot))
        except OSError:
            # A part of the rows may be there: flagged, they are never offered, not even by a rebuilt index.
            self.flag(np.arange(first_slot, first_slot + len(entries)), fmt.FLAG_DELETED)
            raise
        self.slot_count, self.end_bytes = first_slot + len(entries), offset
        if len(self._tags) < self.slot_count:
            self._resize_tags(min(self.header.row_capacity, 2 * self.slot_count))
        self._tags[first_slot : self.slot_count] = tags
        self.changes += 1
        return first_slot

    def flag(self, slots: NDArray[np.integer] | slice, flags: int) -> None:
        """Set flag bits."""
        with self._bits_lock:
            self.changes += 1
            self._uses[slots, fmt.USE_FLAGS] |= np.uint32(flags)
            self.changes += 1
            self.flags_unsynced = True

    def suspect(self, slot: int) -> None:
        """Do not offer the slot for a while."""
        now_s = time.monotonic()
        kept = {other: until_s for other, until_s in self.suspects.items() if until_s > now_s}
        self.suspects = {**kept, slot: now_s + SUSPECTED_S}

    def suspected(self, slots: slice | NDArray[np.integer]) -> list[int]:
        """Positions among the slots of those that are not offered now."""
        numbers = np.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots
        now_s = time.monotonic()
        suspects = [slot for slot, until_s in self.suspects.items() if until_s > now_s]
        return np.flatnonzero(np.isin(numbers, suspects)).tolist()

    def flag_on_disk(self, slots: Sequence[int], flags: int) -> None:
        """Set flag bits by writing instead of through the map, of which pages may be holes after power loss: filling one on a
        full disk would be a signal. For starts, before anybody else uses the segment."""
        for slot in slots:
            row = self._uses[slot].copy()
            row[fmt.USE_FLAGS] |= np.uint32(flags)
            with contextlib.suppress(OSError):  # then the next start does it
                self._device.write(self._descriptor, [row.tobytes()], self.layout.use_offset(slot))
        if slots:
            self.changes += 1
            self.flags_unsynced = True

    def take_back(self, slots: NDArray[np.integer], flags: int) -> None:
        """Clear flag bits of slots that were flagged for a move that did not come about; writer thread only."""
        with self._bits_lock:
            self.changes += 1
            self._uses[slots, fmt.USE_FLAGS] &= ~np.uint32(flags)
            self.changes += 1
            self.flags_unsynced = True

    def touch(self, slots: NDArray[np.integer] | slice, class_id: int, now_s: int) -> NDArray[np.uint32]:
        """Note a use of the slots by a class; returns their use rows as they were, shape (n, 16)."""
        before: NDArray[np.uint32] = self._uses[slots].copy()
        column = self._uses[:, class_id]
        self._uses[slots, fmt.USE_LENGTH] = used_once_more(before, now_s)
        column[slots] = np.maximum(column[slots], np.uint32(now_s))
        return before

    def read_rows(self, first_slot: int, count: int) -> NDArray[np.void]:
        """The rows of consecutive slots; all zero where the file is short."""
        buffer = bytearray(count * fmt.ROW_BYTES)
        self._device.read(self._descriptor, [memoryview(buffer)], self.layout.row_offset(first_slot))
        return np.frombuffer(buffer, dtype=fmt.ROW_DTYPE)

    def read_payloads(self, buffers: Sequence[memoryview], offset_bytes: int) -> int:
        """Fill the buffers from `offset_bytes` on; returns the bytes read."""
        return self._device.read(self._descriptor, buffers, offset_bytes)

    def sync(self) -> None:
        """Return when everything written, use rows included, survives power loss."""
        self.flags_unsynced = False  # first, so that a flag set meanwhile counts as unsynced
        try:
            self._device.sync(self._descriptor)
        except OSError:
            self.flags_unsynced = True
            raise

    def seal(self) -> None:
        """No more appends. The header then says what the segment holds."""
        if self.state == fmt.STATE_OPEN:
            self._note_seal()
            self.state = fmt.STATE_SEALED
            if len(self._tags) > self.slot_count:
                self._resize_tags(self.slot_count)

    def _note_seal(self) -> None:
        seal = fmt.encode_seal(self.segment_id, self.slot_count, self.end_bytes)
        self._map[fmt.SEAL_OFFSET : fmt.SEAL_OFFSET + fmt.SEAL.size] = seal

    def allocated_bytes(self) -> int:
        """What `du` counts for the file."""
        return self._device.allocated_bytes(self._descriptor)


def used_once_more(uses: NDArray[np.uint32], now_s: int) -> NDArray[np.uint32]:
    """What the lengths' column says after a use. Shape (n, 16) -> (n,)."""
    marked = uses[:, fmt.USE_LENGTH]
    seen = np.uint32(fmt.REUSED) | (marked & np.uint32(fmt.REUSED)) >> np.uint32(1)
    # Within the second in which a block was stored a use is a part of storing it, whichever class it is by.
    return np.where(last_use_s(uses) < now_s, marked | seen, marked)


def uses_seen(uses: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Shape (n, 16) -> (n,): 0 for blocks that were used since they were stored never, 1 once, 2 more often."""
    marked = uses[:, fmt.USE_LENGTH]
    return (marked >> np.uint32(31)) + (marked >> np.uint32(30) & np.uint32(1))


def marks_of(seen: NDArray[np.integer]) -> NDArray[np.uint32]:
    """The other way round: what the lengths' column has beside the length."""
    marks = np.array([0, fmt.REUSED, fmt.REUSED | fmt.REUSED_OFTEN], dtype=np.uint32)
    found: NDArray[np.uint32] = marks[seen]
    return found


def payload_lengths(uses: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Shape (n, 16) -> (n,): payload bytes."""
    return uses[:, fmt.USE_LENGTH] & np.uint32(fmt.LENGTH_MASK)


def check_identity(header: fmt.SegmentHeader, path: Path, store_id: bytes) -> None:
    """Raises: ForeignSegmentError: another store's file; CorruptDataDirError: it stands under another segment's name."""
    if header.store_id != store_id:
        raise ForeignSegmentError(
            f"{path.name}: belongs to store {header.store_id.hex()}, this is {store_id.hex()}; move it away"
        )
    if path.name != segment_name(header.segment_id):
        raise CorruptDataDirError(f"{path.name}: holds segment {segment_name(header.segment_id)}")


def segment_name(segment_id: SegmentId) -> str:
    """The file's name."""
    return f"{segment_id:016x}.seg"


def row_capacity(segment_size_bytes: int) -> int:
    """Rows of a segment: enough for payloads of one page each. Never more than an index entry's 20 bits can name."""
    return max(1, segment_size_bytes // fmt.ALIGNMENT_BYTES)
