"""The store's vocabulary: small frozen types shared by its modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Buffer

    from kvstore.traffic import TrafficClass
    from kvstore_api.framing import MessageBuffer
    from kvstore_api.namespace import NamespaceDigest, NamespaceSpec
    from kvstore_api.resume import ResumePlan

NamespaceId = NewType("NamespaceId", int)  # u32, never reused, not even for the same spec registered again
SegmentId = NewType("SegmentId", int)  # monotonic, never reused
ClassId = NewType("ClassId", int)  # 1 to 15: the column of a use row


@dataclass(frozen=True, slots=True)
class BlockAddr:
    """Where a block lies: a slot of a segment's table."""

    segment_id: SegmentId
    slot: int


@dataclass(frozen=True, slots=True)
class Namespace:
    """A registered namespace."""

    namespace_id: NamespaceId
    digest: NamespaceDigest
    spec: NamespaceSpec
    create_time_s: float


@dataclass(frozen=True, slots=True)
class Match:
    """The longest stored leading part of a chain that the plan uses."""

    hit_length_blocks: int
    lease: bytes  # empty on a full miss
    lease_expiry_s: float
    plan: ResumePlan


@dataclass(frozen=True, slots=True)
class Miss:
    """A block asked for that is not there: NOT_FOUND, EXPIRED, CORRUPT or IO_ERROR."""

    block: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReadFrame:
    """Up to 1 MiB of block bytes: whole blocks, or a part of one block larger than a frame.

    Where a part of each block was asked for, these are the blocks.
    """

    blocks: Sequence[int]
    checksums: Sequence[int]
    offset_bytes: int
    parts: Sequence[Buffer]  # their bytes in order; valid until the next frame is asked for
    size_bytes: int
    misses: Sequence[Miss]
    block_checksums: Sequence[int] = ()  # of the whole blocks, where parts were asked for
    message: MessageBuffer | None = None  # holds the bytes instead of `parts`, where the reader was asked to use one


@dataclass(frozen=True, slots=True)
class PutBlock:
    """One block of a put. The store only reads `data`, until the put's future is resolved."""

    block: int
    data: Buffer
    checksum: int


@dataclass(frozen=True, slots=True)
class StateObject:
    """A state object's bytes and their checksum."""

    data: bytes
    checksum: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Live blocks (state objects included) and their bytes, without padding and tables; and what they take with padding."""

    blocks: int = 0
    bytes: int = 0
    taken_bytes: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.blocks + other.blocks, self.bytes + other.bytes, self.taken_bytes + other.taken_bytes)


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens in full blocks asked for by matches, and those in the blocks that were hit; the rest an engine has to prefill."""

    asked_tokens: int = 0
    hit_tokens: int = 0

    @property
    def missed_tokens(self) -> int:
        """What was asked for and not there."""
        return self.asked_tokens - self.hit_tokens

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(self.asked_tokens + other.asked_tokens, self.hit_tokens + other.hit_tokens)


@dataclass(frozen=True, slots=True)
class QuotaUsage:
    """What a traffic class or tenant may hold, as shares of the capacity, and what it holds."""

    traffic_class: str  # its name, or empty for a tenant's
    tenant: str  # likewise
    share: float
    limit: float
    usage: Usage


@dataclass(frozen=True, slots=True)
class EvictSelection:
    """Which blocks to evict: all conditions given must hold."""

    namespace: Namespace | None = None
    traffic_class: str = ""
    older_than_s: float | None = None
    down_to_share: float | None = None


@dataclass(frozen=True, slots=True)
class ClassUse:
    """A class's last use of a block, and when that alone would let it expire; seconds since the epoch."""

    traffic_class: str
    last_use_s: int
    expiry_s: int


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """One block and where it lies; `state` is live, expired, dead or dropped."""

    namespace: NamespaceDigest
    prefix_hash: bytes
    block: int
    size_bytes: int
    checksum: int
    addr: BlockAddr
    create_time_s: int
    uses: Sequence[ClassUse]
    state: str
    state_object: bool


@dataclass(frozen=True, slots=True)
class InvariantReport:
    """What a check of the store against itself has looked at, and what does not agree; see `invariants.py`."""

    time_s: float  # when it ended, seconds since the epoch
    segments: int
    slots: int  # of those segments' tables
    live_blocks: int  # of these, offered: each was looked up in the index
    index_entries: int  # each was looked up in the tables
    stale_entries: int  # of these, entries that name a segment that is gone: a miss, and harmless
    accounted_bytes: int  # what the store thinks that its directory takes
    allocated_bytes: int  # what it does take
    violation_count: int
    violations: Sequence[str]  # sentences, the first 100 of them

    @property
    def ok(self) -> bool:
        """Whether everything agrees."""
        return not self.violation_count


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """What a store is and holds."""

    store_id: str
    data_dir: str
    capacity_bytes: int
    used_bytes: int  # allocated, as `du` counts, retiring files included
    retiring_bytes: int  # files that only wait for leases to pass
    live: Usage
    segment_count: int
    classes: Sequence[tuple[TrafficClass, Usage]]
    class_tokens: Mapping[str, TokenCounts]  # by class name, since the start; without classes that were never asked for
    namespace_count: int
    durability: str
    clock_ahead_s: float  # store's time minus wall clock; negative while a jump of the clock is not believed yet
    invariants: InvariantReport | None  # of the last check since the start
