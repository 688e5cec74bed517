"""What the two halves of the connector tell each other, through vLLM's own channels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvstore_client.results import BREAKER_OPEN, DEADLINE, UNREACHABLE
from kvstore_engine.prefix_cache import QUEUE_FULL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Gap = tuple[int, int, str]
T = TypeVar("T", int, Gap)

# Workers are told apart by their place: (rank in the pipeline, rank in the tensor-parallel group).
WorkerPlace = tuple[int, int]


@dataclass
class WorkerIdentity(KVConnectorHandshakeMetadata):
    """A worker tells the scheduler at the start whose namespace its KV belongs to: a `NamespaceSpec`, as on the wire."""

    namespace: bytes


@dataclass(frozen=True, slots=True)
class Transfer:
    """Blocks of one request to move between the store and the workers' memory.

    Attributes:
        request_id: vLLM's.
        chains: worker -> its prefix hashes up to the end of the last block; a namespace is part of its hashes.
        leases: worker -> its lease; empty for a save.
        first_block: the first block concerned; the last is the last of the chain.
        engine_blocks: KV group -> for each block concerned, the ids of the engine's blocks that make it up; NOT_HERE for one that
            is not to be touched: it is outside of a window, or another request's.
        traffic_class: empty for the server's default.
    """

    request_id: str
    chains: dict[WorkerPlace, bytes]
    leases: dict[WorkerPlace, bytes]
    first_block: int
    engine_blocks: Sequence[Sequence[Sequence[int]]]
    traffic_class: str


# How long a look-up or a load may wait for a thread, in seconds, before its request goes without. A burst of requests is served one
# after the other, each within a budget of its own; but no request waits much longer than this for the others.
QUEUE_S: Final = 1.0

# The engine has let go of a window before its blocks could be copied.
WINDOW_GONE: Final = "WINDOW_GONE"

# A look-up has found no thread in time.
LOOK_UP_BUSY: Final = "LOOK_UP_BUSY"

# Why a block is not saved, or nobody knows what is stored, that may be otherwise soon: the last three are what a server says. After
# anything else a request is not saved any further.
PASSING: Final = frozenset(
    {QUEUE_FULL, LOOK_UP_BUSY, BREAKER_OPEN, UNREACHABLE, DEADLINE, "DEADLINE_EXCEEDED", "NOT_SERVING", "OVERLOADED"}
)

# The id of a block that holds nothing; vLLM's own null block has id 0.
NOT_HERE = 0


@dataclass
class StepMetadata(KVConnectorMetadata):
    """The scheduler tells the workers what to begin in one step. `is_idle`: it computes nothing."""

    loads: list[Transfer] = field(default_factory=list)
    saves: list[Transfer] = field(default_factory=list)
    is_idle: bool = False


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """The workers tell the scheduler what came of loads and saves.

    Attributes:
        loaded_blocks: request -> blocks of its load that are valid from the first asked for on, in the worker with the fewest.
        failed: requests whose load brought fewer blocks than it was asked for, in any worker.
        absent: those of them whose next block the store does not have any more.
        gaps: request -> blocks [from, to) that are not saved and not counted yet, and why, in the worker where they begin first.
        given_up: requests of which the store has refused a block.
        load_bytes, load_s: how much came, and how long it took: how fast the store is.
    """

    loaded_blocks: dict[str, int] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    absent: set[str] = field(default_factory=set)
    gaps: dict[str, Gap] = field(default_factory=dict)
    given_up: set[str] = field(default_factory=set)
    load_bytes: int = 0
    load_s: float = 0.0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Both as one."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(
            _least(self.loaded_blocks, other.loaded_blocks),
            self.failed | other.failed,
            self.absent | other.absent,
            _least(self.gaps, other.gaps),
            self.given_up | other.given_up,
            self.load_bytes + other.load_bytes,
            self.load_s + other.load_s,
        )


def _least(one: Mapping[str, T], other: Mapping[str, T]) -> dict[str, T]:
    """What either says of a request; the lesser if both do."""
    return {key: min(found[key] for found in (one, other) if key in found) for key in one.keys() | other.keys()}
