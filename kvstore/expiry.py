"""When blocks expire: the maximum over classes of last use + that class's TTL today."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from kvstore.catalog import ClassRecord


class TtlTable:
    """TTLs by class id, applied to use rows. Immutable: a new TTL is a new table, and acts on resident blocks at once."""

    def __init__(self, classes: Iterable[ClassRecord]) -> None:
        self._ttls_s = [(int(record.class_id), record.traffic_class.ttl_s) for record in classes]

    def live(self, uses: NDArray[np.uint32], now_s: float) -> NDArray[np.bool_]:
        """Shape (n, 16) -> (n,): neither flagged nor expired.

        One comparison a class instead of computing expiry times: no temporary is larger than a column.
        """
        live = np.zeros(len(uses), dtype=bool)
        for class_id, ttl_s in self._ttls_s:
            # last use + ttl > now, in whole seconds; a last use of 0 means never
            live |= uses[:, class_id] > np.uint32(max(0, math.floor(now_s - ttl_s)))
        live &= uses[:, 0] == 0
        return live


def last_use_s(uses: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Shape (n, 16) -> (n,): the last use by any class."""
    latest: NDArray[np.uint32] = uses[:, 1:].max(axis=1)
    return latest
