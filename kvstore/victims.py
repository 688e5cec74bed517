"""Which segment goes when room is needed: the part of reclaim that only looks at numbers. What it costs is `worth.py`'s."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from kvstore.worth import PROTECTION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

# Before anything live is evicted, dead space is given back down to this share of live blocks; unasked, only below the other.
COMPACT_BELOW_LIVE_SHARE: Final = 0.75
SWEEP_BELOW_LIVE_SHARE: Final = 0.5
# With no more than this part of its class's TTL left to any block, a segment is not worth compacting unasked.
EXPIRES_SOON_SHARE: Final = 0.25
RECLAIMS_PER_TICK: Final = 4
TICKS_PER_COMPACTION: Final = 10
# A price is counted again when its blocks are so many times older,
_STALE_AGES: Final = 10
# and before the segment goes, as those that look at least so much cheaper than what was found.
_CLEARLY_LESS: Final = 0.85
_SAMPLED_SEGMENTS: Final = 256
# Prices that are counted for one choice: some milliseconds each.
_COUNTED_AT_ONCE: Final = 300
_UNKNOWN_COST: Final = 0.9 * PROTECTION
_SLACK_BYTES: Final = 256 << 10  # for tables, and for the index while it is small


class Candidate(Protocol):
    """A segment that could be reclaimed."""

    @property
    def cost(self) -> float:
        """Of giving it back, as it was counted."""
        ...

    @property
    def lease_until_s(self) -> float:
        """The last deadline of a lease that names it."""
        ...


C = TypeVar("C", bound=Candidate)


class Reclaimable(Protocol):
    """A segment."""

    @property
    def segment_id(self) -> int:
        """Its number."""
        ...


S = TypeVar("S", bound=Reclaimable)


@dataclass(frozen=True, slots=True)
class Price:
    """What it costs to give a segment back, for each byte that comes back, as it was counted."""

    cost: float
    age_s: float  # of its blocks, in the middle, since their last use
    as_of_s: float

    def about(self, now_s: float) -> float:
        """Now, if nothing was used since: hazards fall about as 1 / age."""
        since_s = now_s - self.as_of_s
        return self.cost * (1 + self.age_s) / (1 + self.age_s + since_s) if since_s > 0 else self.cost

    def is_stale(self, now_s: float) -> bool:
        """Whether its blocks are so much older now that it has to be counted again."""
        return now_s - self.as_of_s > _STALE_AGES * (1 + self.age_s)


class Prices(Generic[S]):
    """Of all segments. They are counted again when they have aged, and when `repriced` names them; and those that look cheapest."""

    def __init__(self, count: Callable[[S], Price], repriced: set[int]) -> None:
        """Args: repriced: ids of segments whose price is no longer what it was, by whoever changes it; emptied here."""
        self._count, self._repriced = count, repriced
        self._known: dict[int, Price] = {}
        self._left = 0

    def begin(self) -> None:
        """A choice begins: count some of those that have to be, the others next time."""
        self._left = _COUNTED_AT_ONCE

    def about(self, segment: S, now_s: float) -> float:
        """What the segment costs, about; one that could not be counted yet is dear."""
        segment_id = segment.segment_id
        known = self._known.get(segment_id)
        if known is not None and not known.is_stale(now_s) and segment_id not in self._repriced:
            return known.about(now_s)
        if self._left > 0:
            self._left -= 1
            return self.renew(segment).cost
        return _UNKNOWN_COST if known is None else known.about(now_s)

    def renew(self, segment: S) -> Price:
        """Count what it costs now."""
        price = self._known[segment.segment_id] = self._count(segment)
        self._repriced.discard(segment.segment_id)
        return price

    def forget_others(self, segments: Iterable[S]) -> None:
        """Keep prices of these segments only."""
        kept = {segment.segment_id for segment in segments}
        self._known = {known: price for known, price in self._known.items() if known in kept}
        self._repriced &= kept


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


def some_of(candidates: Sequence[C]) -> Sequence[C]:
    """Enough of them to tell what blocks are worth."""
    return candidates[:: max(1, -(-len(candidates) // _SAMPLED_SEGMENTS))]


def at_once(candidates: Sequence[C], now_s: float) -> Sequence[C]:
    """Those whose space is there at once because no lease names them; but not if that costs what is within a share."""
    free = [c for c in candidates if c.lease_until_s < now_s]
    unprotected = [c for c in free if c.cost < PROTECTION]
    if unprotected or all(c.cost >= PROTECTION for c in candidates):
        return free or candidates
    return candidates


def cheapest(candidates: Sequence[C], renewed: Callable[[C], C]) -> C:
    """The one that costs least now. Only those are counted again that look like it."""
    best, best_cost = candidates[0], math.inf
    for candidate in sorted(candidates, key=lambda candidate: candidate.cost):
        if candidate.cost >= best_cost * _CLEARLY_LESS:
            break
        again = renewed(candidate)
        if again.cost < best_cost:
            best, best_cost = again, again.cost
    return best
