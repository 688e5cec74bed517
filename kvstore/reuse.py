"""How soon blocks are used again: counted while the store runs, by traffic class, how often a block was used, and its age.

Each use of a block begins an interval, which ends with its next use, or is cut off when the block is forgotten. A histogram of
the ages at which intervals ended, and of the ages of those that are still open, tells for each age how many were at risk, for how
long; so the hazard of a reuse (reuses per block-second) needs no bookkeeping but at a use. Intervals of evicted blocks count on as
long as they are remembered: else nobody would learn that it would have paid to keep them.

What a block is worth is the best ratio, over all ends of the time that it could be kept, of the chance that it is used until then
to the time it is expected to be held: the index of Gittins for a bandit that pays once (J. C. Gittins, Bandit Processes and
Dynamic Allocation Indices, 1979). It is in reuses a second, so that blocks of all classes can be compared; a TTL limits those ends.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore.log import format as fmt

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

USES_SEEN: Final = 3  # once, twice, more often
CLASSES: Final = fmt.LAST_CLASS_COLUMN + 1
KINDS: Final = CLASSES * USES_SEEN  # a block's class, of those that used it last, and how often it was used
_BINS_PER_OCTAVE: Final = 2
_BINS: Final = 56  # of ages up to 2**28 s, eight years
_STEPS_PER_BIN: Final = 64  # of the index
_EDGES_S: Final = 2.0 ** (np.arange(_BINS + 1) / _BINS_PER_OCTAVE) - 1
_WIDTHS_S: Final = np.diff(_EDGES_S)
# A bin's age, in the middle of its logarithm.
_AGES_S: Final = np.sqrt((1 + _EDGES_S[:-1]) * (1 + _EDGES_S[1:])) - 1
# Before anything is counted: as in LRU, what was used last is used next. Hazards of 1 / age are what all traces show on the whole.
_PRIOR: Final = 0.3 / (1 + _AGES_S)
# What was used twice, or more often, is used again that much sooner: two to five times on public traces. Until that is counted.
_PRIOR_FACTORS: Final = np.array([1.0, 2.0, 3.0])
# What is counted of fewer kinds together stands for what is not counted yet: as so many reuses. One chain is some hundred blocks.
_BIN_WEIGHT: Final = 20.0
_SHAPE_WEIGHT: Final = 400.0
_FACTOR_WEIGHT: Final = 100.0
# Where this part of all reuses, or less, is older than what LRU would keep, there is less and less to win over LRU.
_LATE_SHARE: Final = 0.1
HALF_LIFE_S: Final = 86_400.0


class ReuseHistograms:
    """Intervals between uses by kind and age. Any thread may note reuses."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reused = np.zeros((KINDS, _BINS))  # guarded by _lock
        self._cut_off = np.zeros((KINDS, _BINS))
        self._before = np.zeros((KINDS, _BINS))  # ages at which open intervals had been when the counting began

    def note_reused(self, kind: NDArray[np.integer], age_s: NDArray[np.floating]) -> None:
        """Intervals that ended with a use. Shape (n,)."""
        places = _places(kind, age_s)
        with self._lock:
            np.add.at(self._reused.ravel(), places, 1.0)

    def note_cut_off(self, kind: NDArray[np.integer], age_s: NDArray[np.floating]) -> None:
        """Intervals whose end nobody will know. One thread at a time."""
        self._cut_off += histogram(kind, age_s)

    def begin(self, still_open: Floats) -> None:
        """Count from now on: of intervals that are open now, only what follows. Args: still_open: as `histogram` makes it."""
        self._before = still_open

    def halve(self, still_open: Floats) -> None:
        """Let all that was counted until now count half as much as what follows."""
        with self._lock:
            self._reused /= 2
        self._cut_off /= 2
        self._before = (self._before + still_open) / 2

    def reuses_and_seconds(self, still_open: Floats) -> tuple[Floats, Floats]:
        """Reuses, and block-seconds at risk, each by kind and age: shape (KINDS, bins)."""
        with self._lock:
            reused = self._reused.copy()
        ended = reused + self._cut_off + still_open - self._before
        older = ended[:, ::-1].cumsum(axis=1)[:, ::-1] - ended
        return reused, np.maximum(0.0, older * _WIDTHS_S + ended * _WIDTHS_S / 2)


def histogram(kind: NDArray[np.integer], age_s: NDArray[np.floating], weight: float = 1.0) -> Floats:
    """How many there are of each kind and age. Shape (n,) -> (KINDS, bins)."""
    counts: Floats = np.bincount(_places(kind, age_s), minlength=KINDS * _BINS).astype(np.float64)
    return weight * counts.reshape(KINDS, _BINS)


def _places(kind: NDArray[np.integer], age_s: NDArray[np.floating]) -> NDArray[np.intp]:
    places: NDArray[np.intp] = kind.astype(np.intp) * _BINS
    places += np.minimum(_position(age_s).astype(np.intp), _BINS - 1)
    return places


def _position(age_s: NDArray[np.floating]) -> Floats:
    """Ages in bins."""
    position: Floats = _BINS_PER_OCTAVE * np.log2(1 + np.maximum(0.0, age_s))
    return position


def kinds(class_id: NDArray[np.integer] | int, uses_seen: NDArray[np.integer]) -> NDArray[np.uint8]:
    """Kinds of blocks that were used by the class last, and once, twice (1) or more often (2) in all."""
    return np.asarray(class_id * USES_SEEN + uses_seen, dtype=np.uint8)


def hazards(reuses: Floats, seconds: Floats) -> Floats:
    """Reuses a second by kind and age, shape (KINDS, bins): those counted, drawn towards what fewer kinds together show."""
    overall = (reuses.sum(axis=0) + _BIN_WEIGHT) / (seconds.sum(axis=0) + _BIN_WEIGHT / _PRIOR)
    by_class, at_risk = (table.reshape(CLASSES, USES_SEEN, _BINS) for table in (reuses, seconds))
    shape = _drawn_towards(by_class.sum(axis=1), at_risk.sum(axis=1), np.broadcast_to(overall, (CLASSES, _BINS)))
    # How often a block was used counts as a factor, of all classes together and then of each.
    expected = at_risk * shape[:, None]
    common = _factor(by_class.sum(axis=(0, 2)), expected.sum(axis=(0, 2)))
    own = _factor(by_class.sum(axis=2), expected.sum(axis=2) * common)
    found: Floats = shape[:, None] * (common * own)[:, :, None]
    return found.reshape(KINDS, _BINS)


def _drawn_towards(reuses: Floats, seconds: Floats, model: Floats) -> Floats:
    """Hazards of each class: first the model times a factor, then, with enough reuses, a shape of their own."""
    scaled = model * _factor(reuses.sum(axis=1), (seconds * model).sum(axis=1))[:, None]
    drawn: Floats = (reuses + _SHAPE_WEIGHT) / (seconds + _SHAPE_WEIGHT / scaled)
    return drawn


def _factor(reuses: Floats, expected: Floats) -> Floats:
    factor: Floats = (reuses + _FACTOR_WEIGHT) / (expected + _FACTOR_WEIGHT)
    return factor


def best_ratios(hazard: Floats, ends_s: Floats) -> Floats:
    """The index by kind and age: shape (n, bins), reuses a second.

    Args:
        hazard: shape (n, bins).
        ends_s: shape (n,): at which age each is given up in any case.
    """
    widths_s = np.clip(ends_s[:, None] - _EDGES_S[:-1], 1e-6, _WIDTHS_S)
    used = -np.expm1(-hazard * widths_s)
    best = np.zeros_like(hazard)
    survives, gain, held_s = np.ones_like(hazard), np.zeros_like(hazard), np.zeros_like(hazard)
    for ahead in range(_BINS):  # all ages at once: column i looks at bin i + ahead
        count = _BINS - ahead
        chance = survives[:, :count] * used[:, ahead:]
        gain[:, :count] += chance
        held_s[:, :count] += chance / hazard[:, ahead:]
        survives[:, :count] *= 1 - used[:, ahead:]
        np.maximum(best[:, :count], gain[:, :count] / held_s[:, :count], out=best[:, :count])
    return best


class Index:
    """What blocks are worth by kind and age. Immutable."""

    def __init__(self, reuses: Floats, seconds: Floats, ttls_s: Floats, ages: Floats, live_blocks: float) -> None:
        """Args:
        reuses, seconds: as `ReuseHistograms` gives them.
        ttls_s: shape (CLASSES,).
        ages: shape (bins,): of blocks that live, and of those that are remembered.
        live_blocks: how many live.
        """
        ratios = best_ratios(hazards(reuses, seconds), np.repeat(ttls_s, USES_SEEN))
        # Of all ages, that of the oldest block that LRU would keep.
        oldest = int(np.searchsorted(np.cumsum(ages), live_blocks))
        late = reuses[:, min(oldest + 1, _BINS - 1) :].sum() / max(1.0, reuses.sum())
        self.lru_part = max(0.0, 1 - late / _LATE_SHARE)
        # Never less than when it is older: what dips by chance, or for some seconds, would have new chains evicted first.
        ratios = np.maximum.accumulate(ratios[:, ::-1], axis=1)[:, ::-1]
        # Between the middles of two bins it has to be interpolated, or order within a bin were lost.
        unknown = _FACTOR_WEIGHT / (_FACTOR_WEIGHT + reuses.sum())
        prior = np.outer(np.tile(_PRIOR_FACTORS**unknown, CLASSES), _PRIOR)
        logarithms = (1 - self.lru_part) * np.log(ratios) + self.lru_part * np.log(prior)
        position = np.clip((np.arange(_BINS * _STEPS_PER_BIN) + 0.5) / _STEPS_PER_BIN - 0.5, 0, _BINS - 1.001)
        below = position.astype(np.intp)
        part = position - below
        self._table = np.exp((1 - part) * logarithms[:, below] + part * logarithms[:, below + 1])

    def of(self, kind: NDArray[np.integer], age_s: NDArray[np.floating]) -> Floats:
        """What blocks are worth. Shape (n,)."""
        position = np.minimum(_position(age_s) * _STEPS_PER_BIN, _BINS * _STEPS_PER_BIN - 1).astype(np.intp)
        worth: Floats = self._table[kind, position]
        return worth


def index_without_history(ttls_s: Floats) -> Index:
    """As long as nothing was counted."""
    nothing = np.zeros((KINDS, _BINS))
    return Index(nothing, nothing, ttls_s, np.zeros(_BINS), 0.0)


def levels(worth: Floats, threshold: float) -> NDArray[np.intp]:
    """Octaves above or below a threshold: what is kept about equally long. Shape (n,)."""
    found: NDArray[np.intp] = np.floor(np.log2(np.clip(worth / threshold, 2.0**-8, 2.0**7))).astype(np.intp)
    return found


def interval_s(since_s: float) -> float:
    """Seconds until the index is to be made anew, when the counting began so long ago."""
    return min(60.0, max(1.0, since_s / 64))
