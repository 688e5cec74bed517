"""A replay through the store itself: its index, tables, writer and reclaim, under a clock that the workload sets.

Only payloads are left out: they are holes in the segment files, and count as if they were written.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from kvstore.clock import ManualClock
from kvstore.log import format as fmt
from kvstore.log.segment import row_capacity
from kvstore.store import LocalStore, segment_size_bytes
from kvstore.types import PutBlock
from kvstore_api.checksum import block_checksum
from kvstore_bench.hitrate.prefix_hashes import PrefixHashes
from kvstore_bench.hitrate.settings import Storage
from kvstore_bench.sparse_store import SparseDevice
from kvstore_bench.workload import namespace_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from kvstore_bench.hitrate.settings import ReplaySettings
    from kvstore_bench.hitrate.workload import Workload


class HollowDevice(SparseDevice):
    """A file system on which payloads are holes that count as if they were written."""

    def allocated_bytes(self, descriptor: int) -> int:
        """What `du` would count."""
        state = os.fstat(descriptor)
        return state.st_blocks * 512 + max(0, state.st_size - self.payload_offset)

    def read(self, descriptor: int, buffers: Sequence[memoryview], offset_bytes: int) -> int:
        """Fill the buffers; payloads are as long as they should be, and all zeros."""
        if offset_bytes < self.payload_offset:
            return super().read(descriptor, buffers, offset_bytes)
        return sum(len(buffer) for buffer in buffers)


def replay_in_engine(
    workload: Workload, settings: ReplaySettings, scratch: Path, advance: Callable[[int], None] = lambda requests: None
) -> tuple[NDArray[np.int64], Storage]:
    """Replay; returns hits, shape (requests,), and what the store did.

    Args:
        scratch: a directory for index and tables, about 300 bytes a block.
        advance: told the requests done.
    """
    config = settings.store_config()
    device = HollowDevice(fmt.Layout(row_capacity(segment_size_bytes(config))).payload_offset)
    clock = ManualClock()
    store = LocalStore.open(scratch / "data", config, settings.traffic_classes(), clock, device=device, tick_s=None)
    try:
        return _Replay(store, clock, workload, settings).run(advance)
    finally:
        store.close()


class _Replay:
    def __init__(self, store: LocalStore, clock: ManualClock, workload: Workload, settings: ReplaySettings) -> None:
        self._store, self._clock, self._workload, self._settings = store, clock, workload, settings
        self._namespace = store.register_namespace(namespace_spec("hitrate", settings.block_bytes))
        self._hashes = PrefixHashes(workload.unique_blocks)
        self._payload = bytes(settings.block_bytes)
        self._resident: list[tuple[float, int]] = []

    def run(self, advance: Callable[[int], None]) -> tuple[NDArray[np.int64], Storage]:
        hits = np.zeros(self._workload.requests, dtype=np.int64)
        now_s = next_tick_s = float(self._workload.time_s[0])
        before: dict[str, int] | None = None
        for request, time_s in enumerate(self._workload.time_s.tolist()):
            self._clock.advance(time_s - now_s)
            now_s = time_s
            if now_s >= next_tick_s:
                self._tick(now_s)
                next_tick_s = now_s + self._settings.tick_s
            if before is None and now_s >= self._workload.measured_from_s:
                before, self._resident = self._store.counters.snapshot(), self._resident[-1:]
            hits[request] = self._ask(request)
            advance(request + 1)
        return hits, self._storage(before or self._store.counters.snapshot(), now_s)

    def _tick(self, now_s: float) -> None:
        self._store.tick()
        self._resident.append((now_s, self._store.status().live.bytes))

    def _ask(self, request: int) -> int:
        """Match the prompt, and put what is missing of it and of the answer, as an engine does."""
        chain = self._hashes.chain(self._workload.chain(request))
        asked = chain.first(int(self._workload.asked_blocks[request]))
        traffic_class = self._workload.classes[self._workload.class_id[request]]
        hit = self._store.match(self._namespace, asked, traffic_class).hit_length_blocks
        missing = [PutBlock(i, self._payload, block_checksum(self._payload, chain[i])) for i in range(hit, len(chain))]
        if missing:
            self._store.submit_put(self._namespace, chain, missing, traffic_class).result()
        return hit

    def _storage(self, before: dict[str, int], end_s: float) -> Storage:
        self._resident.append((end_s, self._store.status().live.bytes))
        times, sizes = np.array(self._resident).T
        lasted_s = np.diff(times)
        done = {name: value - before[name] for name, value in self._store.counters.snapshot().items()}
        return Storage(
            bytes_put=done["bytes_stored"],
            bytes_written=done["bytes_written"],
            blocks_evicted=done["blocks_evicted"],
            blocks_expired=done["blocks_expired"],
            resident_bytes_mean=float(sizes[:-1] @ lasted_s / lasted_s.sum()) if lasted_s.sum() else float(sizes[-1]),
            resident_bytes_max=int(sizes.max()),
            seconds=float(end_s - times[0]),
        )
