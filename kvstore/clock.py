"""Where the time comes from: the system, or a test's hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall-clock seconds since the epoch; TTLs have to survive restarts, so a monotonic clock would not do."""

    def now_s(self) -> float:
        """Seconds since the epoch."""
        ...


class SystemClock:
    """The machine's clock."""

    def now_s(self) -> float:
        """Seconds since the epoch."""
        return time.time()


class ManualClock:
    """Stands still until told to move."""

    def __init__(self, now_s: float = 1_800_000_000.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        """Seconds since the epoch."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move by `seconds`, which may be negative."""
        self._now_s += seconds
