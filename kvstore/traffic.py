"""Traffic classes: why a block is kept, and for how long."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

# A slot's use row holds one last-use time per class: see FORMAT.md. Class ids are 1 to 13 and never reused.
MAX_TRAFFIC_CLASSES = 13
MAX_TTL_S = 10 * 366 * 24 * 3600


class RefreshRule(IntEnum):
    """What counts as a use; values as in `types.proto`."""

    ON_ACCESS = 1
    ON_WRITE = 2


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """A class: `ttl_s` seconds after its last use of a block it no longer keeps the block."""

    name: str
    ttl_s: int
    refresh: RefreshRule = RefreshRule.ON_ACCESS
