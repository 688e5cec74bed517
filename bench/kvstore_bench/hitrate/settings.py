"""What a replay assumes of the store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvstore.config import StoreConfig, TrafficClassConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

# No leases: a replay's store is a small sample of a real one, in which what leases of 10 s hold back is less than a thousandth of
# the capacity, and what puts need is reclaimed ahead; here leases of a second, the shortest, could keep a good part of it.
LEASE_S: Final = 0.0


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """Sizes and times.

    Attributes:
        ttls_s: by the workload's classes.
        class_shares: of the capacity that is a class's own; 0 for those that are not named.
        tick_s: of the workload's time, between two times of housekeeping.
    """

    capacity_bytes: int
    block_bytes: int
    segment_bytes: int
    ttls_s: Mapping[str, int]
    class_shares: Mapping[str, float] = field(default_factory=dict)
    tick_s: float = 1.0

    def store_config(self) -> StoreConfig:
        """The store's configuration. Raises: ValueError: it allows no such sizes."""
        return StoreConfig.model_validate(
            {
                "capacity": self.capacity_bytes,
                "segment_size": self.segment_bytes,
                "lease_s": LEASE_S,
                "lease_max_s": 1.0,
                "put_queue": 1 << 50,
            }
        )

    def traffic_classes(self) -> dict[str, TrafficClassConfig]:
        """The store's traffic classes."""
        return {
            name: TrafficClassConfig(ttl_s=ttl_s, share=self.class_shares.get(name, 0.0))
            for name, ttl_s in self.ttls_s.items()
        }
