"""What blocks are worth keeping, and what it costs to give back the segments they are in: the policy of reclaim, and nothing else.

A block is worth its index: reuses a second, as learned from what is used again (see `reuse.py`), by its class, how often it was
used, and its age; nothing if a block before it in its chain was evicted, because no match gets that far. While its class or tenant
is within its share, 1 is added, which is more than any index.

When a segment goes, blocks worth more than the threshold are moved, the others dropped. That costs what is dropped, and a part of
the threshold for what is moved; for each byte that comes back. The threshold is steered so that a fifth as much is moved as is
dropped.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore import reuse
from kvstore.dropped import NO_TAG, UNREACHABLE, Children, DroppedBlocks, Remembered
from kvstore.expiry import last_class, last_use_s
from kvstore.log import format as fmt
from kvstore.log.segment import uses_seen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from kvstore.dropped import Tags
    from kvstore.expiry import TtlTable
    from kvstore.log.segment import Segment

PROTECTION: Final = 1.0
_WORTH_MAX: Final = 0.5  # reuses a second; so that protection is always more
_THRESHOLD_MIN: Final = 1e-12
_KEEP_SHARE_MAX: Final = 0.75  # of a segment's bytes, so that reclaiming one always gains
_MOVED_PER_DROPPED: Final = 0.2
_SPREADS_MAX: Final = 8  # of what is lost within a segment; what is left over waits until it is looked at again
_STEERING: Final = 0.02  # of the threshold's logarithm, for a whole segment too much or too little
_PRICE_OF_MOVING: Final = 0.25  # of the threshold: moved blocks are written again
_FIRST_THRESHOLD_QUANTILE: Final = 0.1
_REMEMBERED_PER_LIVE: Final = 16  # blocks that were evicted, whose reuses are counted
_REMEMBERED_MAX: Final = 1 << 23  # of those: 109 MB
_NOTED_ROWS_MAX: Final = 1 << 16  # of uses that are not counted yet: 4 MB
_PARENTS_MAX: Final = 1 << 20
_SAMPLED_ROWS: Final = 1 << 17  # of which ages are counted, about
_SAMPLED_EVICTED: Final = 1 << 17  # places of evicted blocks, the same


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to keep of a segment when it goes (shape (slots,)), and what that costs for each byte given back."""

    keep: NDArray[np.bool_]
    cost: float


class Valuation:
    """Learns what blocks are worth. Uses may be noted by any thread; the rest is for the writer thread, but `worth`."""

    def __init__(self, ttls: Callable[[], TtlTable]) -> None:
        self._ttls = ttls
        self._histograms = reuse.ReuseHistograms()
        self._index = reuse.index_without_history(_ttls_s(ttls()))
        self._dropped = DroppedBlocks(_REMEMBERED_MAX)  # those evicted, and those behind them that no match can reach
        self._children = Children(_PARENTS_MAX)
        self.repriced: set[int] = set()  # segments that cost no longer what they did; emptied by who counts again
        self._noted_lock = threading.Lock()
        self._noted: list[tuple[NDArray[np.uint32], int]] = []  # guarded by _noted_lock
        self._noted_rows = 0  # the same
        self._began_s = self._halved_s = self._learned_s = -math.inf
        self._threshold = math.nan

    # Uses

    def note_use(self, uses: NDArray[np.uint32], now_s: int) -> None:
        """Blocks are used; counted later, for a match waits for this. Args: uses: shape (n, 16), as they were before."""
        with self._noted_lock:
            self._noted.append((uses, now_s))
            self._noted_rows += len(uses)
            many = self._noted_rows >= _NOTED_ROWS_MAX
        if many:
            self.count_uses()

    def count_uses(self) -> None:
        """Count what was noted since the last time."""
        with self._noted_lock:
            noted, self._noted, self._noted_rows = self._noted, [], 0
        if noted:
            uses = np.concatenate([uses for uses, _ in noted])
            now_s = np.repeat([now_s for _, now_s in noted], [len(uses) for uses, _ in noted])
            age_s = now_s - last_use_s(uses).astype(np.float64)
            again = age_s > 0  # within the second in which a block was stored a use is a part of storing it
            self._histograms.note_reused(_kinds(uses[again]), age_s[again])

    def arrive(self, tags: Tags, is_new: NDArray[np.bool_], now_s: float) -> NDArray[np.uint32]:
        """Blocks are put, new ones and others. Returns for the new ones how often they were used before, as `uses_seen` counts."""
        new = tags[is_new]
        there, known = self._dropped.find(new)
        seen = np.zeros(len(new), dtype=np.uint32)
        if there.any():
            evicted = known.evicted()
            self._histograms.note_reused(evicted.kind, now_s - evicted.last_use_s.astype(np.float64))
            came_back = np.minimum(known.kind % reuse.USES_SEEN + 1, reuse.USES_SEEN - 1)
            seen[there] = np.where(known.kind == UNREACHABLE, 0, came_back)
            self.repriced |= self._children.segments_of(new[there])
        self._dropped.forget(tags)
        return seen

    def drop(self, tags: Tags, uses: NDArray[np.uint32], live: NDArray[np.bool_], now_s: float) -> None:
        """Blocks go: evicted, if they live, or expired or deleted before. Shapes (n,), (n, 16), (n,)."""
        kinds, latest_s = _kinds(uses), last_use_s(uses)
        self._cut_off(Remembered(kinds[~live], latest_s[~live]), now_s)
        self._cut_off(self._dropped.add(tags[live], kinds[live], latest_s[live]), now_s)
        self.repriced |= self._children.segments_of(tags[live])

    def withdraw(self, tags: Tags, now_s: float) -> None:
        """Blocks are no longer offered, but stay in their segments for now: what is behind them is out of reach. Shape (n,)."""
        self._mark(tags[~self._dropped.holds(tags)], now_s)

    def place(self, segment: int, tags: Tags) -> None:
        """Blocks are written to a segment. Args: tags: as for `lost`, of consecutive slots."""
        heads = tags[1:, 1] != tags[:-1, 0]
        self._children.add(np.concatenate([tags[:1, 1], tags[1:, 1][heads]]), segment)

    def _cut_off(self, forgotten: Remembered, now_s: float) -> None:
        gone = forgotten.evicted()
        self._histograms.note_cut_off(gone.kind, self._ages_s(gone.kind, gone.last_use_s, now_s))

    def _ages_s(self, kinds: NDArray[np.uint8], latest_s: NDArray[np.uint32], now_s: float) -> NDArray[np.float64]:
        """Until they expired."""
        ages_s: NDArray[np.float64] = np.minimum(now_s - latest_s, _ttls_s(self._ttls())[kinds // reuse.USES_SEEN])
        return ages_s

    # Learning

    def learn_if_due(self, segments: Callable[[], Sequence[NDArray[np.uint32]]], now_s: float) -> None:
        """Make the index anew, from time to time; asked every second. Args: segments: asked for the use rows of each."""
        self.count_uses()
        if now_s - self._learned_s >= reuse.interval_s(now_s - self._began_s):
            self._learn(segments(), now_s)

    def _learn(self, segments: Sequence[NDArray[np.uint32]], now_s: float) -> None:
        open_now, blocks = self._open_intervals(segments, now_s)
        if self._began_s == -math.inf:
            self._histograms.begin(open_now)
            self._began_s = self._halved_s = now_s
        elif now_s - self._halved_s > reuse.HALF_LIFE_S:
            self._histograms.halve(open_now)
            self._halved_s = now_s
        self._learned_s = now_s
        reuses, seconds = self._histograms.reuses_and_seconds(open_now)
        self._index = reuse.Index(reuses, seconds, _ttls_s(self._ttls()), open_now.sum(axis=0), blocks)
        self._dropped.make_room_for(int(blocks) * _REMEMBERED_PER_LIVE)

    def _open_intervals(self, segments: Sequence[NDArray[np.uint32]], now_s: float) -> tuple[reuse.Floats, float]:
        """A histogram of the ages of all blocks, and of those that are remembered; and how many blocks there are."""
        rows = sum(len(segment) for segment in segments)
        # Of every segment some: the blocks of one are alike in age.
        step = max(1, -(-rows // _SAMPLED_ROWS))
        chosen = [segment[number % step :: step] for number, segment in enumerate(segments)]
        weight = rows / max(1, sum(len(segment) for segment in chosen))
        uses = np.concatenate([np.zeros((0, fmt.USE_COLUMNS), dtype=np.uint32), *chosen])
        uses = uses[last_use_s(uses) > 0]  # deleted ones too: they are cut off when their segment goes
        kinds, (remembered, of_each) = _kinds(uses), self._dropped.sample(_SAMPLED_EVICTED)
        gone = remembered.evicted()
        found = reuse.histogram(kinds, self._ages_s(kinds, last_use_s(uses), now_s), weight)
        found += reuse.histogram(gone.kind, self._ages_s(gone.kind, gone.last_use_s, now_s), of_each)
        return found, len(uses) * weight

    # Worth

    def worth(self, uses: NDArray[np.uint32], now_s: float) -> NDArray[np.float64]:
        """Shape (n, 16) -> (n,): by the class that gives most; 0 for what has expired."""
        index, seen = self._index, uses_seen(uses)
        worth = np.zeros(len(uses))
        for class_id, ttl_s in self._ttls().items():
            last_use = uses[:, class_id].astype(np.float64)
            used = np.flatnonzero(last_use)
            if len(used):
                age_s = now_s - last_use[used]
                by_class = np.where(age_s < ttl_s, index.of(reuse.kinds(class_id, seen[used]), age_s), 0.0)
                worth[used] = np.maximum(worth[used], by_class)
        return np.minimum(worth, _WORTH_MAX)

    def lost(self, tags: Tags, live: NDArray[np.bool_], now_s: float) -> NDArray[np.bool_]:
        """Which live blocks of a segment no match can reach, because some block before them was evicted.

        They are remembered as if they were evicted too, so that what is behind them in other segments is found.

        Args:
            tags: shape (slots, 2): of each block, and of the one before it.
            live: shape (slots,).
        """
        own, parent = tags[:, 0], tags[:, 1]
        follows = np.zeros(len(tags), dtype=bool)
        follows[1:] = (parent[1:] == own[:-1]) & (parent[1:] != NO_TAG) & live[1:] & live[:-1]
        heads = np.flatnonzero(live & ~follows)
        asked = np.concatenate([own, parent[heads]])
        begins, lost = np.zeros(len(tags), dtype=bool), np.zeros(len(tags), dtype=bool)
        for _ in range(_SPREADS_MAX):  # chains in a segment need not be slot behind slot
            held = self._dropped.holds(asked)
            marked = held[: len(own)]
            begins[heads] = held[len(own) :]
            lost = _along(begins, follows)
            to_mark, to_unmark = own[lost & ~marked], own[live & ~lost & marked]
            if not len(to_mark) and not len(to_unmark):
                break
            self._mark(to_mark, now_s)
            self._unmark(to_unmark)
        return lost

    def _mark(self, tags: Tags, now_s: float) -> None:
        """Args: tags: shape (n,), of none that is remembered."""
        self.repriced |= self._children.segments_of(tags)
        kinds = np.full(len(tags), UNREACHABLE, dtype=np.uint8)
        self._cut_off(self._dropped.add(tags, kinds, np.full(len(tags), now_s, dtype=np.uint32)), now_s)

    def _unmark(self, tags: Tags) -> None:
        self.repriced |= self._children.segments_of(tags)
        self._dropped.forget(tags)

    # What goes

    @property
    def threshold(self) -> float:
        """What is worth moving; NaN: not known yet."""
        return self._threshold

    def begin_threshold(self, worths: Iterable[NDArray[np.float64]]) -> None:
        """Choose the first threshold. Args: worths: of all blocks."""
        together = np.concatenate([np.zeros(0), *worths])
        together = together[together > 0]
        self._threshold = float(np.quantile(together, _FIRST_THRESHOLD_QUANTILE)) if len(together) else math.nan

    def steer(self, kept_bytes: float, dropped_bytes: float, segment_bytes: float) -> None:
        """A segment went: move less or more of the next. Args: kept_bytes: without what is kept because it is protected."""
        excess = (kept_bytes - _MOVED_PER_DROPPED * dropped_bytes) / segment_bytes
        self._threshold = min(_WORTH_MAX, max(_THRESHOLD_MIN, self._threshold * math.exp(_STEERING * excess)))

    def judge(
        self, worth: NDArray[np.float64], live: NDArray[np.bool_], taken: NDArray[np.int64], payload_bytes: int
    ) -> Verdict:
        """What to keep of a segment: blocks worth more than the threshold, up to three quarters of its bytes.

        Most worth first, and of equals the earlier slots, which are the beginnings of chains.

        Args:
            worth, live: shape (slots,).
            taken: shape (slots,): bytes in the file.
            payload_bytes: of the segment, dead ones included.
        """
        threshold = self._threshold if self._threshold == self._threshold else 0.0
        keep: NDArray[np.bool_] = live & (worth >= threshold) & (worth > 0)
        kept_bytes = float(taken @ keep)
        if kept_bytes > _KEEP_SHARE_MAX * payload_bytes:
            order = np.flatnonzero(keep)
            order = order[np.argsort(-worth[order], kind="stable")]
            keep[order[np.cumsum(taken[order]) > _KEEP_SHARE_MAX * payload_bytes]] = False
            kept_bytes = float(taken @ keep)
        loss = float((worth * taken) @ (live & ~keep)) + _PRICE_OF_MOVING * threshold * kept_bytes
        return Verdict(keep, loss / max(1.0, payload_bytes - kept_bytes))

    def levels(self, worth: NDArray[np.float64]) -> NDArray[np.intp]:
        """Which blocks are kept about equally long: those of one level. Shape (n,)."""
        if self._threshold != self._threshold:
            return np.zeros(len(worth), dtype=np.intp)
        return reuse.levels(worth, self._threshold)

    def levels_of_new(self, class_id: int, seen: NDArray[np.integer]) -> NDArray[np.intp]:
        """The same for new blocks. Shape (n,)."""
        return self.levels(self._index.of(reuse.kinds(class_id, seen), np.zeros(len(seen))))


def middle_age_s(uses: NDArray[np.uint32], now_s: float) -> float:
    """Of some blocks (shape (n, 16)), since their last use."""
    ages_s = now_s - last_use_s(uses).astype(np.float64)
    return max(0.0, float(np.partition(ages_s, len(ages_s) // 2)[len(ages_s) // 2])) if len(ages_s) else 0.0


def payload_bytes(segment: Segment) -> int:
    """Bytes of the file that payloads take, dead ones included."""
    return max(1, segment.end_bytes - segment.layout.payload_offset)


def _kinds(uses: NDArray[np.uint32]) -> NDArray[np.uint8]:
    return reuse.kinds(last_class(uses), uses_seen(uses))


def _ttls_s(ttls: TtlTable) -> reuse.Floats:
    table = np.full(reuse.CLASSES, np.inf)
    for class_id, ttl_s in ttls.items():
        table[class_id] = ttl_s
    return table


def _along(found: NDArray[np.bool_], follows: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Those found, and those that follow them slot by slot. Shape (n,)."""
    slots = np.arange(len(found))
    last_found = np.maximum.accumulate(np.where(found, slots, -1)) if len(found) else slots
    run_start = np.maximum.accumulate(np.where(follows, 0, slots)) if len(found) else slots
    spread: NDArray[np.bool_] = last_found >= run_start
    return spread
