"""When blocks expire, and what they are worth until then.

A block expires at the maximum over classes of last use + that class's TTL today. Its worth is the share of a TTL that it has
left, by the class that gives most: 1 when it was just used, 0 when it expires. So a class's own TTL is the measure of how soon
its blocks grow cold, and minutes-long handoffs and week-long chats can be compared.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from kvstore.log import format as fmt

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from kvstore.catalog import ClassRecord


class TtlTable:
    """TTLs by class id, applied to use rows. Immutable: a new TTL is a new table, and acts on resident blocks at once."""

    def __init__(self, classes: Iterable[ClassRecord]) -> None:
        self._ttls_s = [(int(record.class_id), record.traffic_class.ttl_s) for record in classes]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TtlTable) and self._ttls_s == other._ttls_s

    def __hash__(self) -> int:
        return hash(tuple(self._ttls_s))

    def live(self, uses: NDArray[np.uint32], now_s: float) -> NDArray[np.bool_]:
        """Shape (n, 16) -> (n,): neither flagged nor expired.

        One comparison a class instead of computing expiry times: no temporary is larger than a column.
        """
        live = np.zeros(len(uses), dtype=bool)
        for class_id, ttl_s in self._ttls_s:
            # last use + ttl > now, in whole seconds; a last use of 0 means never
            live |= uses[:, class_id] > np.uint32(max(0, math.floor(now_s - ttl_s)))
        live &= uses[:, fmt.USE_FLAGS] == 0
        return live

    def prospects(
        self, uses: NDArray[np.uint32], now_s: float
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Shape (n, 16) -> three of (n,): when each block expires (0: it was never used), its worth now, and how much of
        that it loses a second."""
        expiry_s = np.zeros(len(uses))
        worth = np.zeros(len(uses))
        fading = np.zeros(len(uses))
        for class_id, ttl_s in self._ttls_s:
            last_use = uses[:, class_id].astype(np.float64)
            if not last_use.any():
                continue
            ends_s = np.where(last_use > 0, last_use + ttl_s, 0)
            np.maximum(expiry_s, ends_s, out=expiry_s)
            left = (ends_s - now_s) / ttl_s
            better = left > worth
            worth[better], fading[better] = left[better], 1 / ttl_s
        return expiry_s, worth, fading


def last_use_s(uses: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Shape (n, 16) -> (n,): the last use by any class."""
    latest: NDArray[np.uint32] = class_uses(uses).max(axis=1)
    return latest


def class_uses(uses: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Shape (n, 16) -> (n, 13), shared: the columns of last uses."""
    return uses[:, fmt.FIRST_CLASS_COLUMN : fmt.LAST_CLASS_COLUMN + 1]
