"""What the client's calls return. Trouble with the store is a result here, never an exception."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore_api.results import PutResult, PutStatus
from kvstore_api.resume import ResumePlan

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK_OK = "OK"  # the status of a block whose bytes are in the caller's buffer and verified there

# Reasons that the client itself gives; all others are the server's and pass through unchanged.
DEADLINE = "DEADLINE"  # the call's budget was used up
UNREACHABLE = "UNREACHABLE"  # nobody answers at the target
BREAKER_OPEN = "BREAKER_OPEN"  # not sent: such calls have failed in a row, and the store has not answered since
BAD_REPLY = "BAD_REPLY"  # the answer contradicts the protocol
FORKING = "FORKING"  # the process was being forked for all of the call's budget
NO_RESULT = "NO_RESULT"  # the answer says nothing about this block
NOT_FOUND = "NOT_FOUND"
CORRUPT = "CORRUPT"  # the bytes that arrived are not those that were put
TOO_LARGE = "TOO_LARGE"  # a state object larger than the caller allows


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call as a whole did not succeed: a stable UPPER_SNAKE reason to switch on, and words for people."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class MatchResult:
    """The longest stored leading part of a chain.

    `hit_length_blocks` is 0 on a miss and on a failure. `lease` is opaque: hand it to `get`, which works without it too.
    """

    hit_length_blocks: int = 0
    lease: bytes = b""
    plan: ResumePlan = field(default_factory=ResumePlan)
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class GetResult:
    """What a get brought.

    `statuses` has one entry per block asked for: "OK", or why it is a miss. The contents of `out` are undefined for every
    block that is not OK. `failure` is set when the call ended early; blocks that came before that are OK all the same.

    `block_checksums`, where a part of each block was asked for, are those of the whole blocks, 0 for every one that is not OK.
    Parts that several gets brought make a block only if they are equal: it may have been deleted and put again in between.
    """

    statuses: Sequence[str]
    failure: Failure | None = None
    block_checksums: Sequence[int] = ()

    @property
    def leading_blocks(self) -> int:
        """Valid blocks from the first one asked for, without a gap."""
        for index, status in enumerate(self.statuses):
            if status != BLOCK_OK:
                return index
        return len(self.statuses)

    @property
    def ok_blocks(self) -> int:
        """Valid blocks, wherever they are."""
        return sum(status == BLOCK_OK for status in self.statuses)


@dataclass(frozen=True, slots=True)
class PutReport:
    """One result per block put, in their order; a state object counts as one block, number 0.

    A block that is rejected because the call failed may have been stored all the same: only the confirmation is missing.
    """

    results: Sequence[PutResult]
    failure: Failure | None = None

    def count(self, status: PutStatus) -> int:
        """Blocks with this status."""
        return sum(result.status is status for result in self.results)

    @property
    def stored(self) -> int:
        """Blocks stored now."""
        return self.count(PutStatus.STORED)

    @property
    def exists(self) -> int:
        """Blocks that were there already."""
        return self.count(PutStatus.EXISTS)

    @property
    def rejected(self) -> int:
        """Blocks not confirmed as stored."""
        return self.count(PutStatus.REJECTED)


@dataclass(frozen=True, slots=True)
class StateResult:
    """A state object: its verified bytes, or None and why there are none."""

    data: bytearray | None
    reason: str = BLOCK_OK
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class DeleteResult:
    """How many blocks were there and are no longer. After a failure the number is not known, and given as 0."""

    deleted_blocks: int = 0
    failure: Failure | None = None
