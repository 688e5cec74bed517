"""What the connector counts, through vLLM's own statistics: log lines, and Prometheus metrics beside vLLM's."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT

# Counter -> what it counts. A token is counted once a request, and in blocks of all workers.
COUNTERS: Final = {
    "asked_tokens": "Prompt tokens in full blocks that requests might have loaded.",
    "hit_tokens": "Those of them that the store had, from the start without a gap.",
    "not_worth_it_tokens": "Those of them that were computed all the same, which was expected to be faster.",
    "loaded_blocks": "Blocks of 128 tokens brought and verified.",
    "loaded_bytes": "Their bytes.",
    "load_seconds": "Time that loads took, beside the engine's work.",
    "stored_blocks": "Blocks saved that were new to the store.",
    "exists_blocks": "Blocks saved that the store had already.",
    "saved_bytes": "Bytes of both.",
    "save_seconds": "Time that saves took, beside the engine's work.",
    "copy_seconds": "Time that the engine waited for its KV to be copied out, to be saved.",
}
# Counter with a reason -> what it counts.
REASONED: Final = {
    "misses": "Requests that went without the store, or with less of it than promised, by reason.",
    "unsaved_blocks": "Blocks that the store did not confirm, by reason.",
}


class KVStoreStats(KVConnectorStats):
    """Counts since they were last taken; a reason's count is under "name:reason". Any thread may count."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.data: dict[str, Any] = dict(data) if data else {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"data": self.data}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["data"])  # type: ignore[misc]

    def add(self, name: str, amount: float) -> None:
        """Count."""
        with self._lock:
            self.data[name] = self.data.get(name, 0) + amount

    def count_miss(self, reason: str) -> None:
        """A request goes without the store."""
        self.add(f"misses:{reason}", 1)

    def count_unsaved(self, reason: str, blocks: int) -> None:
        """Blocks are not confirmed."""
        self.add(f"unsaved_blocks:{reason}", blocks)

    def taken(self) -> KVStoreStats | None:
        """The counts, which begin anew; None when there are none."""
        with self._lock:
            data, self.data = self.data, {}
        return KVStoreStats(data) if data else None

    def reset(self) -> None:
        """Begin anew."""
        self.taken()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Both as one."""
        for name, amount in other.data.items():
            self.add(name, amount)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line."""
        return {f"kvstore_{name}": round(amount, 3) for name, amount in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class KVStorePromMetrics(KVConnectorPromMetrics):
    """The counts as Prometheus counters, `vllm:kvstore_…_total`, with vLLM's labels."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(name=f"vllm:kvstore_{name}", documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        self._reasoned = {
            name: self._counter_cls(name=f"vllm:kvstore_{name}", documentation=text, labelnames=[*labelnames, "reason"])
            for name, text in REASONED.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's counts."""
        labels = self.per_engine_labelvalues[engine_idx]
        for key, amount in transfer_stats_data.items():
            name, _, reason = key.partition(":")
            if name in self._counters:
                self._counters[name].labels(*labels).inc(amount)
            elif name in self._reasoned:
                self._reasoned[name].labels(*labels, reason).inc(amount)
