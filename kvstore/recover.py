"""Bringing index and segments together at start: roll forward after a crash, or rebuild the index from the segments.

Nothing here writes a payload or truncates a file. Rows that are whole and not flagged become entries; a block found twice keeps
its latest place, if its bytes are whole there. A segment that was being retired is finished off.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import StorageError, StoreFullError
from kvstore.index import IndexState, row_key
from kvstore.log import format as fmt
from kvstore.types import BlockAddr
from kvstore_api.checksum import block_checksum

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.index import BlockIndex
    from kvstore.log.segment import Segment
    from kvstore.log.segments import SegmentSet

_log = logging.getLogger(__name__)


def recover(segments: SegmentSet, index: BlockIndex, progress: Callable[[int, int], None]) -> None:
    """Make the index say what the segments hold, and seal what an earlier process left open.

    An index that cannot be written, on a full disk say, leaves blocks that are missed until a later start.
    """
    try:
        _recover(segments, index, index.found, progress)
    except StoreFullError as error:
        index.distrust(f"no room to bring it up to date ({error})")
    except StorageError as error:
        # It opened and looked whole, but it is not.
        _start_over(segments, index, str(error), progress)
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
    retired = [segment for segment in everything if segment.state == fmt.STATE_RETIRED]
    in_use = [segment for segment in everything if segment.state != fmt.STATE_RETIRED]
    if not found.usable:
        if everything:
            _log.warning("index: %s; rebuilding it from %d segments", found.why, len(in_use))
        suspects = in_use
    else:
        # Only segments that were open can hold rows whose index commit did not happen.
        suspects = [] if found.clean else [segment for segment in in_use if segment.state == fmt.STATE_OPEN]
    if segments.durable:
        # What is answered "exists" from now on has to survive power loss, and a dead process may not have synced its last rows.
        for segment in in_use if not found.clean else ():
            _sync(segment)
    indexed = 0
    for done, segment in enumerate(suspects):
        progress(done, len(suspects))
        indexed += _index_rows(segment, segments, index)
    progress(len(suspects), len(suspects))
    if suspects:
        _log.info("index: %s; %d blocks of %d segments indexed", found.why, indexed, len(suspects))
    for segment in retired:
        _finish_retiring(segment, segments, index)


def _sync(segment: Segment) -> None:
    try:
        segment.sync()
    except OSError as error:
        _log.warning(
            "segment %d cannot be synced: a power loss may take its last blocks: %s", segment.segment_id, error
        )


def _index_rows(segment: Segment, segments: SegmentSet, index: BlockIndex) -> int:
    """File the segment's unflagged rows; the later of two places of a block stays, the other is flagged."""
    rows = segment.read_rows(0, segment.slot_count)
    usable = fmt.valid_rows(rows, segment.segment_id) & (segment.uses[: segment.slot_count, 0] == 0)
    wanted = {row_key(rows[slot]): BlockAddr(segment.segment_id, int(slot)) for slot in np.flatnonzero(usable)}
    for key, known in index.lookup(list(wanted)).items():
        here = wanted[key]
        other = segments.get(known.segment_id)
        if known == here:
            del wanted[key]
        elif other is not None and (known.segment_id, known.slot) > (here.segment_id, here.slot):
            segment.flag(np.array([here.slot]), fmt.FLAG_EVICTED)
            del wanted[key]
        elif other is not None and not _payload_is_whole(segment, rows[here.slot]):
            # A power loss in the middle of a move leaves the row and not the bytes; the place it was moved from is still good.
            segment.flag(np.array([here.slot]), fmt.FLAG_DELETED)
            del wanted[key]
        elif other is not None:
            other.flag(np.array([known.slot]), fmt.FLAG_EVICTED)
    index.commit(wanted)
    return len(wanted)


def _payload_is_whole(segment: Segment, row: np.void) -> bool:
    """Whether a block's bytes are those its row promises; looked at only when there is another copy to choose."""
    if row["kind"] != fmt.KIND_BLOCK:
        return True  # the row of a state object does not say what its checksum is seeded with
    payload = memoryview(bytearray(int(row["length_bytes"])))
    try:
        size = segment.read_payloads([payload], int(row["offset_bytes"]))
    except OSError:
        return False
    return size == len(payload) and block_checksum(payload, row["prefix_hash"].tobytes()) == int(row["checksum"])


def _finish_retiring(segment: Segment, segments: SegmentSet, index: BlockIndex) -> None:
    rows = segment.read_rows(0, segment.slot_count)
    whole = np.flatnonzero(fmt.valid_rows(rows, segment.segment_id))
    index.commit({}, [(row_key(rows[slot]), BlockAddr(segment.segment_id, int(slot))) for slot in whole])
    segments.retire(segment)
