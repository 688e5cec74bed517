"""A replay through the store itself: its index, tables, writer and reclaim, under a clock that the workload sets.

Only payloads are left out: they are holes in the segment files, and count as if they were written.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvstore.clock import ManualClock
from kvstore.log import format as fmt
from kvstore.log.segment import row_capacity
from kvstore.store import LocalStore, segment_size_bytes
from kvstore.types import PutBlock
from kvstore_api.checksum import block_checksum
from kvstore_bench.hitrate.prefix_hashes import PrefixHashes
from kvstore_bench.hitrate.replay import BEGIN_S, COUNTERS, Counts, Storage, run_replay
from kvstore_bench.sparse_store import SparseDevice
from kvstore_bench.workload import namespace_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy as np
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
        """Fill the buffers; of payloads only say that they are there: nobody looks at them."""
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
    clock = ManualClock(BEGIN_S)
    store = LocalStore.open(scratch / "data", config, settings.traffic_classes(), clock, device=device, tick_s=None)
    try:
        return run_replay(workload, _Engine(store, clock, workload, settings.block_bytes), settings, advance)
    finally:
        store.close()


class _Engine:
    def __init__(self, store: LocalStore, clock: ManualClock, workload: Workload, block_bytes: int) -> None:
        self._store, self._clock, self._workload = store, clock, workload
        self._namespace = store.register_namespace(namespace_spec("hitrate", block_bytes))
        self._hashes = PrefixHashes(workload.unique_blocks)
        self._payload = bytes(block_bytes)

    def advance(self, seconds: float) -> None:
        self._clock.advance(seconds)

    def tick(self) -> None:
        self._store.tick()

    def ask(self, request: int) -> int:
        chain, asked = self._hashes.chains(self._workload, request)
        traffic_class = self._workload.class_of(request)
        hit = self._store.match(self._namespace, asked, traffic_class).hit_length_blocks
        missing = [PutBlock(i, self._payload, block_checksum(self._payload, chain[i])) for i in range(hit, len(chain))]
        if missing:
            self._store.submit_put(self._namespace, chain, missing, traffic_class).result()
        return hit

    def counts(self) -> Counts:
        counters = self._store.counters.snapshot()
        return Counts(*(counters[name] for name in COUNTERS))

    def live_bytes(self) -> int:
        return self._store.status().live.bytes
