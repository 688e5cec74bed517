"""What segments and their blocks are worth keeping: the policy of reclaim, and nothing else.

A block's worth is between 0 and 1 (see `expiry.py`), plus 1 while its class or tenant is within its share. A segment's worth is
the mean of the colder half of what lives in it, because the other half can be kept when it goes: a hot system prompt does not
save the cold blocks around it. Dead blocks do not count: a segment with many of them is given back by moving the live ones,
which loses nothing, and where worths hardly differ, because everything was used within a small part of its TTL, a few dead
blocks must not make a hot segment look colder than a cold one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvstore.census import taken_bytes
from kvstore.log.segment import payload_lengths

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore.expiry import TtlTable
    from kvstore.log.segment import Segment

_KEEP_SHARE_MAX = 0.5  # of a segment's bytes, so that reclaiming one always gains
PROTECTION = 1.0


class Worth(Protocol):
    """What a segment was worth when it was counted."""

    @property
    def worth(self) -> float:
        """At that time."""
        ...

    @property
    def fading(self) -> float:
        """What that loses a second while nothing is used."""
        ...

    @property
    def as_of_s(self) -> float:
        """That time."""
        ...


def payload_bytes(segment: Segment) -> int:
    """Bytes of the file that payloads take, dead ones included."""
    return max(1, segment.end_bytes - segment.layout.payload_offset)


def segment_worth(worth: Worth, now_s: float, live_bytes: int, protected_bytes: int) -> float:
    """A segment's worth; less than that, when some of its blocks were used since they were counted."""
    faded = max(0.0, worth.worth - max(0.0, now_s - worth.as_of_s) * worth.fading)
    return faded + PROTECTION * protected_bytes / live_bytes if live_bytes else 0.0


def worth_keeping(
    uses: NDArray[np.uint32],
    live: NDArray[np.bool_],
    protected: NDArray[np.bool_],
    ttls: TtlTable,
    typical: float,
    now_s: float,
    payload_bytes: int,
) -> NDArray[np.bool_]:
    """Which live blocks of a segment to keep although it has to go: those worth more than `typical`, up to half of its bytes.

    Most worth first, and of equals the earlier slots, which are the beginnings of chains: a system prompt that everyone shares
    lies among its first writer's cold blocks.

    Args:
        uses: shape (slots, 16): the segment's use rows.
        live, protected: shape (slots,).
        payload_bytes: of the segment, dead ones included.
    """
    _, worth, _ = ttls.prospects(uses, now_s)
    worth[protected] += PROTECTION
    keep: NDArray[np.bool_] = live & (worth > typical)
    order = np.flatnonzero(keep)[np.argsort(-worth[keep], kind="stable")]
    sizes = np.cumsum(taken_bytes(payload_lengths(uses)[order]))
    keep[order[sizes > _KEEP_SHARE_MAX * payload_bytes]] = False
    return keep
