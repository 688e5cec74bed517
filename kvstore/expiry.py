"""When blocks expire: the maximum over classes of last use + that class's TTL today."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.log.format import USE_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from kvstore.catalog import ClassRecord


class TtlTable:
    """TTLs by class id, applied to use rows. Immutable: a new TTL is a new table, and acts on resident blocks at once."""

    def __init__(self, classes: Iterable[ClassRecord]) -> None:
        self._ttl_s: NDArray[np.int64] = np.zeros(USE_COLUMNS, dtype=np.int64)
        for record in classes:
            self._ttl_s[record.class_id] = record.traffic_class.ttl_s

    def expiry_s(self, uses: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Shape (n, 16) -> (n,): seconds since the epoch at which each block expires; 0 if it was never used."""
        last = uses.astype(np.int64)
        last[:, 0] = 0  # the flags
        expiry: NDArray[np.int64] = np.where(last > 0, last + self._ttl_s, 0).max(axis=1)
        return expiry

    def live(self, uses: NDArray[np.uint32], now_s: float) -> NDArray[np.bool_]:
        """Shape (n, 16) -> (n,): neither flagged nor expired."""
        live: NDArray[np.bool_] = (uses[:, 0] == 0) & (self.expiry_s(uses) > now_s)
        return live


def last_use_s(uses: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Shape (n, 16) -> (n,): the last use by any class."""
    latest: NDArray[np.uint32] = uses[:, 1:].max(axis=1)
    return latest
