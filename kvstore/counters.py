"""What a store has done since it was opened. Counters only rise, and only when the thing happened."""

from __future__ import annotations

import threading

COUNTERS = (
    "matches",
    "asked_blocks",
    "hit_blocks",
    "asked_tokens",
    "hit_tokens",
    "blocks_stored",
    "blocks_exist",
    "blocks_rejected",
    "bytes_stored",
    "blocks_read",
    "bytes_read",
    "blocks_missed",
    "blocks_corrupt",
    "blocks_unreadable",
    "blocks_expired",
    "blocks_evicted",
    "blocks_deleted",
    "blocks_moved",
    "segments_reclaimed",
    "segments_dropped_whole",
    "bytes_reclaimed",
    "bytes_written",
)


class StoreCounters:
    """Thread-safe named sums."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = dict.fromkeys(COUNTERS, 0)

    def add(self, **deltas: int) -> None:
        """Raise counters by name. Raises: KeyError: no such counter."""
        with self._lock:
            for name, delta in deltas.items():
                self._values[name] += delta

    def snapshot(self) -> dict[str, int]:
        """All of them at one moment."""
        with self._lock:
            return dict(self._values)
