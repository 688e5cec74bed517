"""Choosing blocks to evict: an operator's, and those of who has reached a limit. Flagging them is the writer thread's work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.census import taken_bytes
from kvstore.expiry import last_use_s

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvstore.log.segment import Segment

    Choice = list[tuple[Segment, NDArray[np.intp]]]  # slots by segment


def choose(
    segments: Sequence[Segment],
    live: Callable[[Segment], NDArray[np.bool_]],
    *,
    class_id: int | None = None,
    namespace_ids: Sequence[int] | None = None,
    unused_since_s: float | None = None,
) -> Choice:
    """Live slots that meet all conditions given."""
    chosen = []
    for segment in segments:
        if class_id is not None and segment.header.class_id != class_id:
            continue
        wanted = live(segment)
        if namespace_ids is not None:
            wanted &= np.isin(segment.namespace_ids[: len(wanted)], namespace_ids)
        if unused_since_s is not None:
            wanted &= last_use_s(segment.uses[: len(wanted)]) <= unused_since_s
        chosen.append((segment, np.flatnonzero(wanted)))
    return chosen


def coldest(chosen: Choice, excess_bytes: float, *, padded: bool = False) -> Choice:
    """Of the chosen slots those used longest ago, deeper blocks first, until they make up `excess_bytes`.

    Args: padded: count what payloads take in their files instead of their own bytes.
    """
    chosen = [(segment, slots) for segment, slots in chosen if len(slots)]
    if excess_bytes <= 0 or not chosen:
        return []
    slots = np.concatenate([slots for _, slots in chosen])
    owner = np.concatenate([np.full(len(s), i) for i, (_, s) in enumerate(chosen)])
    sizes = np.concatenate([segment.lengths[s].astype(np.int64) for segment, s in chosen])
    if padded:
        sizes = taken_bytes(sizes)
    uses = np.concatenate([last_use_s(segment.uses[s]) for segment, s in chosen])
    depth = np.concatenate([_positions(segment)[s] for segment, s in chosen])
    order = np.lexsort((-depth.astype(np.int64), uses))
    taken = order[np.cumsum(sizes[order]) - sizes[order] < excess_bytes]
    return [(segment, slots[taken[owner[taken] == i]]) for i, (segment, _) in enumerate(chosen)]


def _positions(segment: Segment) -> NDArray[np.uint32]:
    """Of the segment's blocks in their chains; zeros if its rows cannot be read now, so that only their order is lost."""
    try:
        rows = segment.read_rows(0, segment.slot_count)
    except OSError:
        return np.zeros(segment.slot_count, dtype=np.uint32)
    positions: NDArray[np.uint32] = rows["position"]
    return positions


def count(chosen: Choice) -> tuple[int, int]:
    """Blocks, and their bytes."""
    blocks = sum(len(slots) for _, slots in chosen)
    return blocks, sum(int(segment.lengths[slots].sum()) for segment, slots in chosen)
