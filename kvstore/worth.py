"""What segments and their blocks are worth keeping: the policy of reclaim, and nothing else.

A block's worth is between 0 and 1 (see `expiry.py`), plus 1 while its class or tenant is within its share. A segment's worth is
the mean of the colder half of what lives in it, because the other half can be kept when it goes: a hot system prompt does not
save the cold blocks around it. Dead blocks do not count: a segment with many of them is given back by moving the live ones,
which loses nothing, and where worths hardly differ, because everything was used within a small part of its TTL, a few dead
blocks must not make a hot segment look colder than a cold one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.census import taken_bytes
from kvstore.log import format as fmt
from kvstore.log.segment import payload_lengths

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore.census import Summary
    from kvstore.expiry import TtlTable
    from kvstore.log.segment import Segment

_KEEP_SHARE_MAX = 0.5  # of a segment's bytes, so that reclaiming one always gains
PROTECTION = 1.0


def payload_bytes(segment: Segment) -> int:
    """Bytes of the file that payloads take, dead ones included."""
    return max(1, segment.end_bytes - segment.layout.payload_offset)


def segment_worth(summary: Summary, now_s: float, live_bytes: int, protected_bytes: int) -> float:
    """A segment's worth; less than that, when some of its blocks were used since they were counted."""
    faded = max(0.0, summary.worth - max(0.0, now_s - summary.as_of_s) * summary.fading)
    return faded + PROTECTION * protected_bytes / live_bytes if live_bytes else 0.0


def worth_keeping(
    segment: Segment, live: NDArray[np.bool_], protected_ids: list[int], ttls: TtlTable, typical: float, now_s: float
) -> NDArray[np.bool_]:
    """Which live blocks of a segment to keep although it has to go: those worth more than `typical`, up to half of its bytes.

    Most worth first, and of equals the earlier slots, which are the beginnings of chains: a system prompt that everyone shares
    lies among its first writer's cold blocks.
    """
    uses = segment.uses[: len(live)]
    _, worth, _ = ttls.prospects(uses, now_s)
    if protected_ids:
        worth[np.isin(uses[:, fmt.USE_NAMESPACE], protected_ids)] += PROTECTION
    keep: NDArray[np.bool_] = live & (worth > typical)
    order = np.flatnonzero(keep)[np.argsort(-worth[keep], kind="stable")]
    sizes = np.cumsum(taken_bytes(payload_lengths(uses)[order]))
    keep[order[sizes > _KEEP_SHARE_MAX * payload_bytes(segment)]] = False
    return keep
