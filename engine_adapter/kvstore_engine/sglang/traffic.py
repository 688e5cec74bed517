"""What SGLang's own storage metrics are fed with: pages and GB/s of each batch."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

# Batches kept until SGLang asks, which it does with every step of its scheduler. If it never did, no more than these are kept.
_KEPT: Final = 1000


class Traffic:
    """Batches since they were last taken. Any thread may call anything."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the one below
        self._batches = _empty()

    def loaded(self, pages: int, size_bytes: int, took_s: float) -> None:
        """A batch of loads ended."""
        self._note("prefetch", pages, size_bytes, took_s)

    def saved(self, pages: int, size_bytes: int, took_s: float) -> None:
        """A batch of saves ended."""
        self._note("backup", pages, size_bytes, took_s)

    def take(self) -> dict[str, list[float]]:
        """SGLang's name of the number -> its values."""
        with self._lock:
            batches, self._batches = self._batches, _empty()
        return {name: list(values) for name, values in batches.items()}

    def _note(self, kind: str, pages: int, size_bytes: int, took_s: float) -> None:
        if not pages:
            return
        with self._lock:
            self._batches[f"{kind}_pgs"].append(pages)
            self._batches[f"{kind}_bandwidth"].append(size_bytes / max(took_s, 1e-9) / 1e9)


def _empty() -> dict[str, deque[float]]:
    return {f"{kind}_{what}": deque(maxlen=_KEPT) for kind in ("prefetch", "backup") for what in ("pgs", "bandwidth")}
