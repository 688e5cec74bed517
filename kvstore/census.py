"""Counting live blocks. Each segment has a summary that holds until something ends a block's life in it, so that status,
quotas and the choice of what to reclaim do not walk all use tables.

A summary is thrown away when the segment changes (appends, flags), when a TTL does, and at the moment its next block may expire.
Uses only put that moment off, so they need not be noticed: the counts of a summary that stands are exact. Dropped namespaces are
left out when summaries are added up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.expiry import class_uses
from kvstore.log import format as fmt
from kvstore.log.segment import payload_lengths
from kvstore.types import Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from numpy.typing import NDArray

    from kvstore.clock import Clock
    from kvstore.expiry import TtlTable
    from kvstore.log.segment import Segment


@dataclass(frozen=True, slots=True)
class Rules:
    """What decides whether a block is alive, but for its own row. Immutable; a change makes new ones."""

    ttls: TtlTable
    tenants: Mapping[int, str]  # of the namespaces that are not dropped, by their ids
    live_ids: NDArray[np.uint32]  # those ids


@dataclass(frozen=True, slots=True)
class Summary:
    """What a segment held when it was counted."""

    shares: Mapping[int, Usage]  # by namespace id
    next_expiry_s: float
    changes: int
    ttls: TtlTable


class Census:
    """Summaries of all segments. For any thread."""

    def __init__(self, rules: Callable[[], Rules], clock: Clock) -> None:
        self._rules, self._clock = rules, clock
        self._summaries: dict[int, Summary] = {}  # only ever replaced entry by entry

    def of(self, segment: Segment) -> Summary:
        """The segment's summary, as it is now."""
        return self._of(segment, self._rules().ttls, self._clock.now_s())

    def _of(self, segment: Segment, ttls: TtlTable, now_s: float) -> Summary:
        known = self._summaries.get(segment.segment_id)
        if (
            known is not None
            and known.changes == segment.changes
            and known.ttls is ttls
            and now_s < known.next_expiry_s
        ):
            return known
        summary = _summarize(segment, ttls, now_s)
        self._summaries[segment.segment_id] = summary
        return summary

    def lifeless(self, segments: Iterable[Segment]) -> list[Segment]:
        """Those in which nothing lives. Made for thousands of segments every second."""
        rules, now_s = self._rules(), self._clock.now_s()
        tenants = rules.tenants
        return [
            segment
            for segment in segments
            if not any(namespace_id in tenants for namespace_id in self._of(segment, rules.ttls, now_s).shares)
        ]

    def forget_others(self, segments: Iterable[Segment]) -> None:
        """Keep summaries of these segments only."""
        kept = {segment.segment_id for segment in segments}
        for segment_id in [known for known in list(self._summaries) if known not in kept]:
            self._summaries.pop(segment_id, None)

    def live_shares(self, segment: Segment) -> dict[int, Usage]:
        """The segment's live blocks by namespace."""
        tenants = self._rules().tenants
        return {ns: share for ns, share in self.of(segment).shares.items() if ns in tenants}

    def by_class(self, segments: Iterable[Segment]) -> dict[int, Usage]:
        """Live blocks and their bytes by the class whose segments they are in."""
        total: dict[int, Usage] = {}
        for segment in segments:
            for share in self.live_shares(segment).values():
                class_id = segment.header.class_id
                total[class_id] = total.get(class_id, Usage()) + share
        return total

    def by_namespace(self, segments: Iterable[Segment]) -> dict[int, Usage]:
        """The same by namespace id."""
        total: dict[int, Usage] = {}
        for segment in segments:
            for namespace_id, share in self.live_shares(segment).items():
                total[namespace_id] = total.get(namespace_id, Usage()) + share
        return total

    def total(self, segments: Iterable[Segment]) -> Usage:
        """All of them."""
        return sum(self.by_class(segments).values(), Usage())


def live_mask(segment: Segment, rules: Rules, now_s: float) -> NDArray[np.bool_]:
    """Which slots are neither flagged, nor expired, nor of a dropped namespace."""
    namespace_ids = segment.namespace_ids
    live = rules.ttls.live(segment.uses[: len(namespace_ids)], now_s)
    live &= np.isin(namespace_ids, rules.live_ids)
    return live


def expired_mask(segment: Segment, rules: Rules, now_s: float) -> NDArray[np.bool_]:
    """Which slots no flag and no drop has ended, but time."""
    live = live_mask(segment, rules, now_s)
    kept: NDArray[np.bool_] = segment.uses[: len(live), fmt.USE_FLAGS] == 0
    kept &= np.isin(segment.namespace_ids[: len(live)], rules.live_ids)
    kept &= ~live
    return kept


def _summarize(segment: Segment, ttls: TtlTable, now_s: float) -> Summary:
    changes = segment.changes  # before anything is looked at
    uses = segment.uses[: segment.slot_count]
    _clamp(uses, now_s)
    uses = uses[ttls.live(uses, now_s)]
    lengths = payload_lengths(uses).astype(np.int64)
    taken = taken_bytes(lengths)
    ids, owner = np.unique(uses[:, fmt.USE_NAMESPACE], return_inverse=True)
    blocks = np.bincount(owner, minlength=len(ids))
    sums = [np.bincount(owner, weights=column, minlength=len(ids)) for column in (lengths, taken)]
    shares = {
        int(namespace_id): Usage(int(blocks[i]), int(sums[0][i]), int(sums[1][i])) for i, namespace_id in enumerate(ids)
    }
    return Summary(
        shares=shares,
        next_expiry_s=float(ttls.expiry_s(uses).min(initial=math.inf)),
        changes=changes,
        ttls=ttls,
    )


def _clamp(uses: NDArray[np.uint32], now_s: float) -> None:
    """Uses in the future, noted by a clock that was ahead, count as of now: or their blocks would live as much longer."""
    latest = np.uint32(min(math.ceil(now_s), 0xFFFFFFFF))
    columns = class_uses(uses)
    if columns.size and columns.max() > latest:
        np.minimum(columns, latest, out=columns)


def taken_bytes(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """What payloads of these lengths take in the file: whole pages."""
    pages: NDArray[np.int64] = -(-lengths.astype(np.int64) // fmt.ALIGNMENT_BYTES)
    return pages * fmt.ALIGNMENT_BYTES
