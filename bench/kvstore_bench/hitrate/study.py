"""The runs that a report is made of: one configuration, or a sweep over capacities, TTLs or shares of a class."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore.log.format import align
from kvstore_bench.errors import InputError
from kvstore_bench.hitrate.baselines import belady, fifo, hit_share, lru, unlimited
from kvstore_bench.hitrate.engine_replay import replay_in_engine
from kvstore_bench.hitrate.misses import changed_prefixes, explain_misses
from kvstore_bench.hitrate.result import Result, StorageFacts, WorkloadFacts
from kvstore_bench.hitrate.server_replay import replay_over_grpc
from kvstore_bench.hitrate.settings import ReplaySettings
from kvstore_bench.hitrate.simulator import replay_in_simulator
from kvstore_bench.units import DAY_S

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from kvstore_bench.hitrate.misses import Misses
    from kvstore_bench.hitrate.replay import Storage
    from kvstore_bench.hitrate.workload import Workload

SIMULATOR, ENGINE, SERVER = REPLAYS = ("simulator", "engine", "server")
SWEEPS: Final = ("capacity", "ttl", "class-share")
CAPACITY_SWEEP: Final = (0.01, 0.02, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0)
TTL_SWEEP_S: Final = (300, 3600, 6 * 3600, DAY_S, 3 * DAY_S, 7 * DAY_S, 14 * DAY_S)
CLASS_SHARE_SWEEP: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)
# Sealed, reclaimed and expired as a whole. In a store of some TB a segment of 256 MiB is a 10,000th of it; here at least 8 blocks.
SEGMENTS: Final = 256
_SEGMENT_BLOCKS_MIN: Final = 8
_SEGMENT_BYTES_MAX: Final = 256 << 20  # the server's default
_BLOCKS_MIN: Final = 64  # or a segment, a sixteenth of the capacity at most, would hold too few
_CAPACITY_BYTES_MIN: Final = 1 << 20
_REPORT_EVERY: Final = 256  # requests
_TICKS: Final = 50_000  # in weeks of traffic housekeeping every second changes nothing but the time it takes


@dataclass(frozen=True, slots=True)
class Configuration:
    """What one row of the results assumes."""

    capacity_share: float
    ttls_s: Mapping[str, int]
    class_shares: Mapping[str, float] = field(default_factory=dict)
    sweep: str = ""


# What decides what goes when room is needed; see kvstore/worth.py.
POLICY: Final = "local"


class Study:
    """Runs on one workload. What does not depend on the configuration is computed once."""

    def __init__(self, workload: Workload, replay: str, scratch: Path, block_bytes: int) -> None:
        self._workload, self._replay, self._scratch = workload, replay, scratch
        self._block_bytes = block_bytes
        self._report: Callable[[str, float], None] = lambda what, share: None
        self._runs = 0
        self._unlimited = cache(self._compute_unlimited)
        self._baseline = cache(self._compute_baseline)
        self._changed = cache(lambda: changed_prefixes(workload))

    def run(self, configuration: Configuration, report: Callable[[str, float], None]) -> Result:
        """Replay one configuration.

        Args: report: told what is being done, and the share of it that is.
        """
        self._report = report
        workload = self._workload
        settings = self.settings(configuration)
        capacity_blocks = int(configuration.capacity_share * workload.unique_blocks)
        begin_s = time.perf_counter()
        hits, storage = self._replayed(settings)
        seconds = time.perf_counter() - begin_s
        ttls_s = [configuration.ttls_s[name] for name in workload.classes]
        self._report("causes of misses", 0.0)
        misses = explain_misses(workload, hits, ttls_s, self._changed())
        return Result(
            trace=workload.name,
            sweep=configuration.sweep,
            policy=POLICY,
            replay=self._replay,
            capacity_share=configuration.capacity_share,
            capacity_blocks=capacity_blocks,
            capacity_bytes=settings.capacity_bytes,
            ttl=dict(configuration.ttls_s),
            class_share=dict(configuration.class_shares),
            hit_rate=hit_share(workload, hits),
            hit_rate_of_full_blocks=_of_full_blocks(workload, hits),
            hit_rate_by_class=_by_class(workload, hits),
            ceiling=self._unlimited(None),
            ceiling_with_ttl=self._unlimited(tuple(ttls_s)),
            lru=self._baseline(lru, capacity_blocks),
            fifo=self._baseline(fifo, capacity_blocks),
            belady=self._baseline(belady, capacity_blocks),
            missed=_missed(workload, misses, None),
            missed_by_class={name: _missed(workload, misses, i) for i, name in enumerate(workload.classes)},
            storage=_storage_facts(storage, settings),
            seconds=seconds,
        )

    def facts(self) -> WorkloadFacts:
        """What is replayed."""
        workload, counted = self._workload, self._workload.measured
        tokens = workload.input_tokens[counted]
        begin_s, end_s = float(workload.time_s[0]), float(workload.time_s[-1])
        measured_s = min(max(workload.measured_from_s, begin_s), end_s)
        return WorkloadFacts(
            name=workload.name,
            requests=int(counted.sum()),
            input_tokens=int(tokens.sum()),
            block_tokens=workload.block_tokens,
            unique_blocks=workload.unique_blocks,
            days=(end_s - measured_s) / DAY_S,
            warm_up_days=(measured_s - begin_s) / DAY_S,
            input_share_by_class={
                name: float(tokens[workload.class_id[counted] == i].sum() / max(1, tokens.sum()))
                for i, name in enumerate(workload.classes)
            },
            origin=workload.origin,
        )

    def fits(self, configuration: Configuration) -> bool:
        """Whether the capacity is large enough for a replay to mean something."""
        blocks = int(configuration.capacity_share * self._workload.unique_blocks)
        return blocks >= _BLOCKS_MIN and blocks * align(self._block_bytes) >= _CAPACITY_BYTES_MIN

    def settings(self, configuration: Configuration) -> ReplaySettings:
        """Sizes in bytes."""
        blocks = int(configuration.capacity_share * self._workload.unique_blocks)
        capacity = blocks * align(self._block_bytes)
        if not self.fits(configuration):
            raise InputError(
                f"--capacity-share {configuration.capacity_share:g} makes {blocks} of {self._workload.unique_blocks:,} blocks",
                f"give a share that makes {_BLOCKS_MIN} blocks and {_CAPACITY_BYTES_MIN >> 20} MiB at least",
            )
        return ReplaySettings(
            capacity_bytes=capacity,
            block_bytes=self._block_bytes,
            segment_bytes=self._segment_bytes(capacity),
            ttls_s=configuration.ttls_s,
            class_shares=configuration.class_shares,
            tick_s=max(1.0, math.ceil((self._workload.time_s[-1] - self._workload.time_s[0]) / _TICKS)),
        )

    def _segment_bytes(self, capacity_bytes: int) -> int:
        payload_bytes = max(capacity_bytes // SEGMENTS, _SEGMENT_BLOCKS_MIN * align(self._block_bytes))
        return min(_SEGMENT_BYTES_MAX, payload_bytes * 20 // 19)  # tables take up to a twentieth of a file

    def _replayed(self, settings: ReplaySettings) -> tuple[NDArray[np.int64], Storage]:
        requests = max(1, self._workload.requests)

        def advance(done: int) -> None:
            if done % _REPORT_EVERY == 0:
                self._report(f"replay ({self._replay})", done / requests)

        if self._replay == SIMULATOR:
            return replay_in_simulator(self._workload, settings, advance)
        self._runs += 1
        scratch = self._scratch / f"run-{self._runs}"
        scratch.mkdir()
        replay = replay_in_engine if self._replay == ENGINE else replay_over_grpc
        return replay(self._workload, settings, scratch, advance)

    def _compute_unlimited(self, ttls_s: tuple[int, ...] | None) -> float:
        self._report("ceiling", 0.0)
        return hit_share(self._workload, unlimited(self._workload, ttls_s))

    def _compute_baseline(self, policy: Callable[[Workload, int], NDArray[np.int64]], capacity_blocks: int) -> float:
        self._report(policy.__name__.upper() if policy is not belady else "Belady", 0.0)
        return hit_share(self._workload, policy(self._workload, capacity_blocks))


def sweep_configurations(sweep: str, base: Configuration, classes: Sequence[str]) -> list[Configuration]:
    """The configurations of a sweep: the base with one thing changed at a time. Raises: InputError: there is nothing to change."""
    if sweep == "capacity":
        return [replace(base, capacity_share=share, sweep=sweep) for share in CAPACITY_SWEEP]
    if sweep == "ttl":
        return [
            replace(base, ttls_s={**base.ttls_s, name: ttl_s}, sweep=sweep) for name in classes for ttl_s in TTL_SWEEP_S
        ]
    if len(classes) < 2:
        raise InputError("--sweep class-share needs two classes", f"the workload has {classes[0]} alone")
    swept = [{**base.class_shares, name: share} for name in classes for share in CLASS_SHARE_SWEEP]
    return [replace(base, class_shares=shares, sweep=sweep) for shares in swept if sum(shares.values()) <= 1]


def _of_full_blocks(workload: Workload, hits: NDArray[np.int64]) -> float:
    counted = workload.measured
    asked = workload.asked_blocks[counted].sum()
    return float(hits[counted].sum() / max(1, asked))


def _by_class(workload: Workload, hits: NDArray[np.int64]) -> dict[str, float | None]:
    tokens = np.minimum(hits * workload.block_tokens, workload.input_tokens)
    rates: dict[str, float | None] = {}
    for class_id, name in enumerate(workload.classes):
        counted = workload.measured & (workload.class_id == class_id)
        rates[name] = float(tokens[counted].sum() / workload.input_tokens[counted].sum()) if counted.any() else None
    return rates


def _missed(workload: Workload, misses: Misses, class_id: int | None) -> dict[str, float]:
    counted = workload.measured if class_id is None else workload.measured & (workload.class_id == class_id)
    tokens = max(1, int(workload.input_tokens[counted].sum()))
    return {cause: missed / tokens for cause, missed in misses.by_cause(class_id).items()}


def _storage_facts(storage: Storage, settings: ReplaySettings) -> StorageFacts:
    days = storage.seconds / DAY_S
    return StorageFacts(
        resident_bytes_mean=storage.resident_bytes_mean,
        resident_bytes_max=storage.resident_bytes_max,
        bytes_put_per_day=storage.done.bytes_put / days if days else None,
        bytes_written_per_day=storage.done.bytes_written / days if days else None,
        write_amplification=storage.write_amplification,
        capacity_writes_per_day=storage.done.bytes_written / days / settings.capacity_bytes if days else None,
    )
