"""What all replays have in common: time that the workload sets, requests in their order, and what is counted meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvstore_bench.hitrate.settings import ReplaySettings
    from kvstore_bench.hitrate.workload import Workload

# The first request's time by the store's clock: equal in all replays, because lives end on whole seconds.
BEGIN_S: Final = 1_800_000_000.0


@dataclass(frozen=True, slots=True)
class Counts:
    """Sums since a store was opened."""

    bytes_put: int = 0  # payloads of new blocks
    bytes_written: int = 0  # to segment files: moved blocks and tables included
    blocks_evicted: int = 0
    blocks_expired: int = 0


# The store's counters that say so, in this order.
COUNTERS: Final = ("bytes_stored", "bytes_written", "blocks_evicted", "blocks_expired")


@dataclass(frozen=True, slots=True)
class Storage:
    """What the replayed store did in the measured part, and what it held."""

    done: Counts
    resident_bytes_mean: float | None  # of live blocks, over time; None: not known
    resident_bytes_max: int | None
    seconds: float

    @property
    def write_amplification(self) -> float:
        """Bytes written for each byte put."""
        return self.done.bytes_written / max(1, self.done.bytes_put)


class ReplayedStore(Protocol):
    """A store, or a model of one, whose time stands still until it is told otherwise."""

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        ...

    def tick(self) -> None:
        """Do the housekeeping of a second."""
        ...

    def ask(self, request: int) -> int:
        """Match a request's prompt, then put what is missing of it and of its answer; returns the blocks that it hit."""
        ...

    def counts(self) -> Counts:
        """What was done until now."""
        ...

    def live_bytes(self) -> int | None:
        """Payload bytes of live blocks; None: it cannot tell."""
        ...


def run_replay(
    workload: Workload, store: ReplayedStore, settings: ReplaySettings, advance: Callable[[int], None]
) -> tuple[NDArray[np.int64], Storage]:
    """Send every request at its time.

    Housekeeping is done every so many seconds, and after each segment's worth of puts: a store of thousands of segments puts
    about one a second, so that what it reclaims it reclaims ahead of need, and leases of a second do not matter.

    Args: advance: told the requests done.
    Returns: hits, shape (requests,), and what the store did from the first measured request on.
    """
    hits = np.zeros(workload.requests, dtype=np.int64)
    first = int(np.searchsorted(workload.time_s, workload.measured_from_s))
    before, resident = Counts(), _Resident()
    now_s, next_tick_s, put_bytes = float(workload.time_s[0]), -np.inf, 0
    for request, time_s in enumerate(workload.time_s.tolist()):
        store.advance(time_s - now_s)
        now_s = time_s
        if now_s >= next_tick_s or put_bytes >= settings.segment_bytes:
            store.tick()
            resident.note(now_s, store.live_bytes())
            next_tick_s, put_bytes = now_s + settings.tick_s, 0
        if request == first:
            before = store.counts()
            resident.begin(now_s)
        hits[request] = store.ask(request)
        put_bytes += (len(workload.chain(request)) - int(hits[request])) * settings.block_bytes
        advance(request + 1)
    resident.note(now_s, store.live_bytes())
    mean, most = resident.mean_and_most()
    measured_s = now_s - float(workload.time_s[first]) if first < workload.requests else 0.0
    return hits, Storage(_difference(store.counts(), before), mean, most, measured_s)


def _difference(after: Counts, before: Counts) -> Counts:
    return Counts(
        after.bytes_put - before.bytes_put,
        after.bytes_written - before.bytes_written,
        after.blocks_evicted - before.blocks_evicted,
        after.blocks_expired - before.blocks_expired,
    )


class _Resident:
    """Sizes by time; each holds until the next."""

    def __init__(self) -> None:
        self._notes: list[tuple[float, int | None]] = []

    def note(self, now_s: float, size_bytes: int | None) -> None:
        self._notes.append((now_s, size_bytes))

    def begin(self, now_s: float) -> None:
        """What was before does not count; the last size holds from now on."""
        self._notes = [(now_s, self._notes[-1][1])]

    def mean_and_most(self) -> tuple[float | None, int | None]:
        """Over time; None: there was nobody to tell."""
        sizes = [size for _, size in self._notes if size is not None]
        if len(sizes) < len(self._notes):
            return None, None
        lasted_s = np.diff([time_s for time_s, _ in self._notes])
        return _mean(sizes, lasted_s), max(sizes)


def _mean(sizes: Sequence[int], lasted_s: NDArray[np.float64]) -> float:
    total_s = float(lasted_s.sum())
    return float(np.array(sizes[:-1]) @ lasted_s) / total_s if total_s else float(sizes[-1])
