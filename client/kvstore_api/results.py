"""What becomes of the blocks of a put."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class PutStatus(IntEnum):
    """What became of a block; values as in `types.proto`."""

    STORED = 1
    EXISTS = 2
    REJECTED = 3


@dataclass(frozen=True, slots=True)
class PutResult:
    """What became of one block; `reason` and `detail` only when rejected."""

    block: int
    status: PutStatus
    reason: str = ""
    detail: str = ""
