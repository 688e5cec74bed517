"""A replay through a model of the store: arrays instead of files, and the store's own code for what goes and what stays."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore_bench.hitrate.settings import Storage
from kvstore_bench.hitrate.simulated_log import SimulatedLog

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvstore_bench.hitrate.settings import ReplaySettings
    from kvstore_bench.hitrate.simulated_log import Counts
    from kvstore_bench.hitrate.workload import Workload

_BEGIN_S: Final = 1_800_000_000  # a last use of 0 means never, so time begins later


def replay_in_simulator(
    workload: Workload, settings: ReplaySettings, advance: Callable[[int], None] = lambda requests: None
) -> tuple[NDArray[np.int64], Storage]:
    """Replay; returns hits, shape (requests,), and what the store would have done.

    Args: advance: told the requests done.
    """
    log = SimulatedLog(workload.unique_blocks, settings)
    hits = np.zeros(workload.requests, dtype=np.int64)
    times_s = workload.time_s - workload.time_s[0] + _BEGIN_S
    first = int(np.searchsorted(workload.time_s, workload.measured_from_s))
    before, resident, next_tick_s = log.counts, [(float(times_s[0]), 0)], -math.inf
    for request, (time_s, now_s) in enumerate(zip(workload.time_s.tolist(), times_s.tolist(), strict=True)):
        if time_s >= next_tick_s:
            log.tick(now_s)
            resident.append((now_s, log.live_bytes(now_s)))
            next_tick_s = time_s + settings.tick_s
        if request == first:
            before, resident = log.counts, resident[-1:]
        hits[request] = _ask(log, workload, request, now_s)
        advance(request + 1)
    resident.append((float(times_s[-1]), log.live_bytes(float(times_s[-1]))))
    return hits, _storage(before, log.counts, resident)


def _ask(log: SimulatedLog, workload: Workload, request: int, now_s: float) -> int:
    """Match, and put what is missing, as an engine does."""
    class_id = int(workload.class_id[request]) + 1
    hit = log.match(workload.asked(request), class_id, now_s)
    log.put(workload.chain(request)[hit:], class_id, now_s)
    return hit


def _storage(before: Counts, after: Counts, resident: Sequence[tuple[float, int]]) -> Storage:
    times, sizes = np.array(resident).T
    lasted_s = np.diff(times)
    return Storage(
        bytes_put=after.bytes_put - before.bytes_put,
        bytes_written=after.bytes_written - before.bytes_written,
        blocks_evicted=after.evicted - before.evicted,
        blocks_expired=after.expired - before.expired,
        resident_bytes_mean=float(sizes[:-1] @ lasted_s / lasted_s.sum()) if lasted_s.sum() else float(sizes[-1]),
        resident_bytes_max=int(sizes.max()),
        seconds=float(times[-1] - times[0]),
    )
