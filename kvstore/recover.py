"""Bringing index and segments together at start: roll forward after a crash, or rebuild the index from the segments.

Nothing here writes a payload or truncates a file. Rows that are whole and not flagged become entries; a block found twice keeps
its latest place, if its bytes are whole there. A segment that was being retired is finished off.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import StorageError, StoreFullError
from kvstore.expiry import last_use_s
from kvstore.index import ADDR_DTYPE, IndexState, key_array, row_keys, split_keys
from kvstore.log import format as fmt
from kvstore.log.check import payload_is_right, whole_rows
from kvstore.types import BlockAddr

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvstore.index import BlockIndex
    from kvstore.log.segment import Segment
    from kvstore.log.segments import SegmentSet

_log = logging.getLogger(__name__)

# Rows filed in one commit. Chains lie in the index in no order of time, so a commit of a segment's rows alone writes a page for
# every 32 of them; larger ones share pages. This one needs some 100 MB of memory, and a larger one would gain little.
_BATCH_ROWS = 1 << 18


def recover(segments: SegmentSet, index: BlockIndex, progress: Callable[[int, int], None]) -> None:
    """Make the index say what the segments hold, and seal what an earlier process left open.

    An index that cannot be written, on a full disk say, leaves blocks that are missed until a later start.
    """
    for segment in segments.all():
        if segment.state == fmt.STATE_RETIRED:
            segments.retire(segment)  # its space comes back whatever becomes of the index
    try:
        _recover(segments, index, index.found, progress)
    except StoreFullError as error:
        index.distrust(f"no room to bring it up to date ({error})")
    except StorageError as error:
        # It opened and looked whole, but it is not.
        _start_over(segments, index, str(error), progress)
    index.complete()
    if index.distrusted:
        return  # what is left open is filed by the next start in any case, also when the index cannot be marked
    for segment in segments.all():
        segment.seal()


def _start_over(segments: SegmentSet, index: BlockIndex, why: str, progress: Callable[[int, int], None]) -> None:
    try:
        index.start_over()
        _recover(segments, index, IndexState(False, False, why), progress)
    except StorageError as error:
        index.distrust(f"it cannot be rebuilt now ({error})")
    except StoreFullError as error:
        index.distrust(f"no room to rebuild it ({error})")


def _recover(segments: SegmentSet, index: BlockIndex, found: IndexState, progress: Callable[[int, int], None]) -> None:
    everything = segments.all()
    in_use = [segment for segment in everything if segment.state != fmt.STATE_RETIRED]
    if not found.usable:
        if everything:
            _log.warning("index: %s; rebuilding it from %d segments", found.why, len(in_use))
        suspects = in_use
    else:
        # Only segments that were open can hold rows whose index commit did not happen.
        suspects = [] if found.clean else [segment for segment in in_use if segment.state == fmt.STATE_OPEN]
    if segments.durable:
        # What is answered "exists" from now on has to survive power loss; a dead process may not have synced its last rows, and
        # one that ran with another durability none.
        for segment in in_use:
            _sync(segment)
        segments.sync_names()
    indexed = 0
    batch: list[_Rows] = []
    for done, segment in enumerate(suspects):
        progress(done, len(suspects))
        try:
            batch.append(_usable_rows(segment))
        except OSError as error:
            segments.give_up(segment, error)
        if sum(len(part.slots) for part in batch) >= _BATCH_ROWS:
            indexed += _index_rows(batch, segments, index)
            batch = []
    indexed += _index_rows(batch, segments, index)
    progress(len(suspects), len(suspects))
    if suspects:
        _log.info("index: %s; %d blocks of %d segments indexed", found.why, indexed, len(suspects))
    for segment in everything:
        if segment.state == fmt.STATE_RETIRED:
            _drop_entries(segment, index)


def _sync(segment: Segment) -> None:
    try:
        segment.sync()
    except OSError as error:
        _log.warning(
            "segment %d cannot be synced: a power loss may take its last blocks: %s", segment.segment_id, error
        )


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a segment that belong into the index: shape (n, key bytes), and (n,)."""

    segment: Segment
    keys: NDArray[np.uint8]
    slots: NDArray[np.intp]


def _usable_rows(segment: Segment) -> _Rows:
    rows = segment.read_rows(0, segment.slot_count)
    whole, unflagged = fmt.valid_rows(rows, segment.segment_id), segment.uses[: segment.slot_count, 0] == 0
    # A row torn by a crash names no block: nobody must count it as one.
    segment.flag_on_disk(np.flatnonzero(unflagged & ~whole).tolist(), fmt.FLAG_DELETED)
    slots = np.flatnonzero(whole & unflagged)
    return _Rows(segment, key_array(rows[slots]), slots)


def _index_rows(batch: Sequence[_Rows], segments: SegmentSet, index: BlockIndex) -> int:
    """File rows; the later of two places of a block stays, the other is flagged."""
    if not batch:
        return 0
    keys = np.concatenate([part.keys for part in batch])
    addrs = np.empty(len(keys), dtype=ADDR_DTYPE)
    addrs["segment_id"] = np.repeat([part.segment.segment_id for part in batch], [len(part.slots) for part in batch])
    addrs["slot"] = np.concatenate([part.slots for part in batch])
    added = index.add(keys, addrs)
    if added < len(keys):
        for part in batch:
            added += _settle_duplicates(part, segments, index)
    return added


def _settle_duplicates(part: _Rows, segments: SegmentSet, index: BlockIndex) -> int:
    """Some of the blocks were in the index before, or are twice among the rows; returns how many get a new place."""
    segment = part.segment
    slots = dict(zip(split_keys(part.keys), part.slots.tolist(), strict=True))
    segment.flag_on_disk(np.setdiff1d(part.slots, list(slots.values())).tolist(), fmt.FLAG_EVICTED)
    wanted: dict[bytes, BlockAddr] = {}
    for key, known in index.lookup(sorted(slots)).items():
        here = BlockAddr(segment.segment_id, slots[key])
        other = segments.get(known.segment_id)
        if known == here:
            continue
        if other is not None and _is_offered(other, known.slot):
            if not _is_better(segment, here.slot, other, known.slot):
                segment.flag_on_disk([here.slot], fmt.FLAG_EVICTED)
                continue
            other.flag_on_disk([known.slot], fmt.FLAG_EVICTED)
        wanted[key] = here
    index.commit(wanted)
    return len(wanted)


def _is_offered(segment: Segment, slot: int) -> bool:
    """Whether a place can be read at all; one that a reclaim had flagged before its process died cannot."""
    return segment.state != fmt.STATE_RETIRED and slot < segment.slot_count and not segment.uses[slot, fmt.USE_FLAGS]


def _is_better(segment: Segment, slot: int, other: Segment, other_slot: int) -> bool:
    """Whether that place of a block is better than the other, which is no worse in being offered.

    The one used later: an older copy may have expired, and been stored again in a segment that was made before. Of copies of one
    use the later, unless a power loss in the middle of a move has left its row and not its bytes.
    """
    mine = (int(last_use_s(segment.uses[slot : slot + 1])[0]), segment.segment_id, slot)
    its = (int(last_use_s(other.uses[other_slot : other_slot + 1])[0]), other.segment_id, other_slot)
    if mine > its:
        return _payload_is_whole(segment, slot) or not _payload_is_whole(other, other_slot)
    return not _payload_is_whole(other, other_slot) and _payload_is_whole(segment, slot)


def _payload_is_whole(segment: Segment, slot: int) -> bool:
    """Whether a block's bytes are those its row promises; looked at only when there is another copy to choose."""
    try:
        rows = segment.read_rows(slot, 1)
        if not whole_rows(segment, rows, slot)[0]:
            return False
        row = rows[0]
        payload = memoryview(bytearray(int(row["length_bytes"])))
        size = segment.read_payloads([payload], int(row["offset_bytes"]))
    except OSError:
        return False
    return size == len(payload) and payload_is_right(row, payload)


def _drop_entries(segment: Segment, index: BlockIndex) -> None:
    try:
        rows = segment.read_rows(0, segment.slot_count)
    except OSError:
        return  # they lead to a file that is gone, and go when somebody meets them
    slots = np.flatnonzero(fmt.valid_rows(rows, segment.segment_id)).tolist()
    keys = row_keys(rows[slots])
    index.commit({}, [(key, BlockAddr(segment.segment_id, slot)) for key, slot in zip(keys, slots, strict=True)])
