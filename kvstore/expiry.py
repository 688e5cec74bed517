"""When blocks expire: at the maximum over classes of last use + that class's TTL today."""

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

    def expiry_s(self, uses: NDArray[np.uint32]) -> NDArray[np.float64]:
        """Shape (n, 16) -> (n,): when each block expires; 0: it was never used."""
        expiry_s = np.zeros(len(uses))
        for class_id, ttl_s in self._ttls_s:
            last_use = uses[:, class_id].astype(np.float64)
            np.maximum(expiry_s, np.where(last_use > 0, last_use + ttl_s, 0), out=expiry_s)
        return expiry_s

    def items(self) -> list[tuple[int, int]]:
        """(class id, TTL) of each class."""
        return self._ttls_s

    def ttl_s(self, class_id: int) -> int:
        """A class's TTL."""
        return dict(self._ttls_s)[class_id]


def last_use_s(uses: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Shape (n, 16) -> (n,): the last use by any class."""
    # Turned first: the maximum along rows as short as these takes twice as long.
    latest: NDArray[np.uint32] = np.ascontiguousarray(class_uses(uses).T).max(axis=0)
    return latest


def last_class(uses: NDArray[np.uint32]) -> NDArray[np.intp]:
    """Shape (n, 16) -> (n,): the class of the last use; of several the first."""
    latest: NDArray[np.intp] = class_uses(uses).argmax(axis=1) + fmt.FIRST_CLASS_COLUMN
    return latest


def class_uses(uses: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Shape (n, 16) -> (n, 13), shared: the columns of last uses."""
    return uses[:, fmt.FIRST_CLASS_COLUMN : fmt.LAST_CLASS_COLUMN + 1]
