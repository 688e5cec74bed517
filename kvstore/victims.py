"""Which segment goes when room is needed: the part of reclaim that only looks at numbers. What they are worth is `worth.py`'s."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from kvstore.worth import PROTECTION

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Before anything live is evicted, dead space is given back down to this share of live blocks; unasked, only below the other.
COMPACT_BELOW_LIVE_SHARE: Final = 0.75
SWEEP_BELOW_LIVE_SHARE: Final = 0.5
# With no more than this part of its class's TTL left to any block, a segment is not worth compacting unasked.
EXPIRES_SOON_SHARE: Final = 0.25
RECLAIMS_PER_TICK: Final = 4
TICKS_PER_COMPACTION: Final = 10
_SLACK_BYTES: Final = 256 << 10  # for tables, and for the index while it is small


class Candidate(Protocol):
    """A segment that could be reclaimed."""

    @property
    def worth(self) -> float:
        """At least."""
        ...

    @property
    def live_share(self) -> float:
        """Of the payload bytes that its file takes."""
        ...

    @property
    def lease_until_s(self) -> float:
        """The last deadline of a lease that names it."""
        ...


C = TypeVar("C", bound=Candidate)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes of the directory up to which it may fill."""

    put: int  # by puts, which leave room for the blocks that a reclaim moves, and for what that adds to the index
    high: int  # then reclaiming begins ahead of need, so that puts need not wait for leases to pass
    low: int  # down to which it goes on then
    move_slack: int  # for tables of the segment that takes moved blocks
    index_slack: int

    @classmethod
    def of(cls, capacity_bytes: int, segment_bytes: int, high_watermark: float, low_watermark: float) -> Limits:
        """Args: capacity_bytes: the cap; high_watermark, low_watermark: shares of it."""
        slack = min(_SLACK_BYTES, capacity_bytes // 16)
        put = capacity_bytes - segment_bytes * 3 // 4 - slack
        high = min(int(high_watermark * capacity_bytes), put)
        low = high - int((high_watermark - low_watermark) * capacity_bytes)
        return cls(put, high, low, move_slack=slack // 4, index_slack=slack - slack // 4)


def at_once(candidates: Sequence[C], now_s: float) -> Sequence[C]:
    """Those whose space is there at once because no lease names them; but not if that costs what is within a share."""
    free = [c for c in candidates if c.lease_until_s < now_s]
    unprotected = [c for c in free if c.worth < PROTECTION]
    if unprotected or all(c.worth >= PROTECTION for c in candidates):
        return free or candidates
    return candidates


def least_worth(candidates: Sequence[C], renewed: Callable[[C], C]) -> C:
    """The one that is worth least now. Only those are counted again that look like it."""
    by_bound = sorted(candidates, key=lambda candidate: candidate.worth)
    best, best_worth = by_bound[0], math.inf
    for candidate in by_bound:
        if candidate.worth >= best_worth:
            break
        again = renewed(candidate)
        if again.worth < best_worth:
            best, best_worth = again, again.worth
    return best
