"""Which open segment a block goes to: what will go together lies together, because space comes back by whole segments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from kvstore.dropped import NO_TAG

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvstore.dropped import Tags

LANE_SHARE: Final = 0.5  # of a segment, from which on a chain has one of its own
LANES_MAX: Final = 32  # open at once
_FILES_PER_SEGMENT: Final = 2  # of the capacity, beyond which files are too small on average

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Stream:
    """What an open segment takes: new blocks of a class, or old ones of it that reclaims have moved; of one level of worth.

    Apart, because their times differ. A lane takes one long chain as it grows: with many sessions in each segment the
    end of one leaves holes everywhere, and evicting what is left would take the beginnings of others.
    """

    class_id: int
    level: int = 0  # see `Valuation.levels`
    moved: bool = False
    lane: int = 0


def crowded(files: int, capacity_bytes: int, segment_bytes: int) -> bool:
    """Whether a store has more files than it is to have."""
    return files * segment_bytes > _FILES_PER_SEGMENT * capacity_bytes


class Lanes(Generic[S]):
    """Chains that have open segments of their own."""

    def __init__(
        self,
        opened: Mapping[Stream, S],
        tags: Callable[[S], Tags],
        crowded: Callable[[], bool],
        segment_bytes: int,
    ) -> None:
        """Args:
        opened: the open segments, by whoever opens and seals them.
        tags: of the blocks in one.
        crowded: whether there are so many files that no more small ones may come.
        segment_bytes: of a full one.
        """
        self._opened, self._tags, self._crowded, self._segment_bytes = opened, tags, crowded, segment_bytes
        self._used: dict[int, None] = {}  # the one used last is last
        self._last_lane = 0

    def of(self, class_id: int, parent_tag: int, chain_bytes: int) -> int:
        """The lane of a chain, begun if need be; 0: it is too short for one, or there are as many as there may be.

        Args:
            parent_tag: of the block before the first that is to be stored.
            chain_bytes: of the whole chain.
        """
        if chain_bytes < LANE_SHARE * self._segment_bytes:
            return 0
        lane = self._holding(class_id, parent_tag)
        if not lane and not self._may_begin():
            return 0
        if not lane:
            self._last_lane = lane = self._last_lane + 1
        self._used.pop(lane, None)
        self._used[lane] = None
        return lane

    def _holding(self, class_id: int, tag: int) -> int:
        for stream, segment in self._opened.items() if tag != NO_TAG else ():
            if stream.lane and stream.class_id == class_id and (self._tags(segment) == tag).any():
                return stream.lane
        return 0

    def _may_begin(self) -> bool:
        """Whether there is room for one more lane, or another may be sealed for it before its segment is full."""
        return len({stream.lane for stream in self._opened if stream.lane}) < LANES_MAX or not self._crowded()

    def surplus(self) -> list[Stream]:
        """What is to be sealed, because there are too many lanes: those used longest ago."""
        opened = {stream.lane for stream in self._opened}
        self._used = {lane: None for lane in self._used if lane in opened}
        ended = set(list(self._used)[: max(0, len(self._used) - LANES_MAX)])
        return [stream for stream in self._opened if stream.lane in ended]
