"""A replay through a model of the store: arrays instead of files, and the store's own code for what goes and what stays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore_bench.hitrate.replay import BEGIN_S, Counts, Storage, run_replay
from kvstore_bench.hitrate.simulated_log import SimulatedLog

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from kvstore_bench.hitrate.settings import ReplaySettings
    from kvstore_bench.hitrate.workload import Workload


def replay_in_simulator(
    workload: Workload, settings: ReplaySettings, advance: Callable[[int], None] = lambda requests: None
) -> tuple[NDArray[np.int64], Storage]:
    """Replay; returns hits, shape (requests,), and what the store would have done.

    Args: advance: told the requests done.
    """
    return run_replay(workload, _Simulated(workload, settings), settings, advance)


class _Simulated:
    def __init__(self, workload: Workload, settings: ReplaySettings) -> None:
        self._workload = workload
        self._log = SimulatedLog(workload.unique_blocks, settings)
        self._now_s = BEGIN_S

    def advance(self, seconds: float) -> None:
        self._now_s += seconds

    def tick(self) -> None:
        self._log.tick(self._now_s)

    def ask(self, request: int) -> int:
        workload = self._workload
        class_id = int(workload.class_id[request]) + 1
        hit = self._log.match(workload.asked(request), class_id, self._now_s)
        self._log.put(workload.chain(request), hit, class_id, self._now_s)
        return hit

    def counts(self) -> Counts:
        return self._log.counts()

    def live_bytes(self) -> int:
        return self._log.live_bytes(self._now_s)
