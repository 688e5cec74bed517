"""A clock that one process sets and another reads, through a file that both map."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

from kvstore_bench.hitrate.replay import BEGIN_S

if TYPE_CHECKING:
    from pathlib import Path


class SharedClock:
    """Seconds in a file; a `kvstore.clock.Clock`. One aligned 8-byte number, which is read and written as a whole."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8)
        self._elapsed_s = np.frombuffer(self._map, dtype=np.float64)

    @staticmethod
    def make(path: Path) -> SharedClock:
        """Make the file, and its clock for whoever sets it."""
        path.write_bytes(bytes(8))
        return SharedClock(path)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._elapsed_s[0] += seconds

    def now_s(self) -> float:
        """Seconds since the epoch, as if the workload began on some day in 2027."""
        return BEGIN_S + float(self._elapsed_s[0])

    def steady_s(self) -> float:
        """Seconds since the boot that never was."""
        return 1.0 + float(self._elapsed_s[0])
