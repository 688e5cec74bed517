"""What a run of `kvstore-bench hitrate` has found; the fields are the keys of the JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstore_bench.machine import Machine

DEFINITION: Final = (
    "hit rate = hit tokens ÷ input tokens. A request hits the leading blocks of its prompt that are stored, counted when it asks; "
    "what it asks for is stored afterwards, and its answer if the workload has that. The warm-up is not counted."
)
DEFINITION_FULL_BLOCKS: Final = (
    "of full blocks = hit tokens ÷ tokens in full blocks asked for, as the server's metrics count"
)


@dataclass(frozen=True, slots=True)
class WorkloadFacts:
    """What was replayed; counts are of the measured part but for `unique_blocks` and `warm_up_days`."""

    name: str
    requests: int
    input_tokens: int
    block_tokens: int
    unique_blocks: int
    days: float
    warm_up_days: float
    input_share_by_class: Mapping[str, float]
    origin: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class StorageFacts:
    """Bytes as a store holds and writes them. A store of the workload's size: multiply for yours."""

    resident_bytes_mean: float | None  # live blocks, over time; None: not known
    resident_bytes_max: int | None
    bytes_put_per_day: float | None  # None: the measured part takes no time
    bytes_written_per_day: float | None  # moved blocks and tables included
    write_amplification: float
    capacity_writes_per_day: float | None  # bytes written a day ÷ capacity: drive writes per day


@dataclass(frozen=True, slots=True)
class Result:
    """One configuration."""

    trace: str
    sweep: str  # which sweep the row belongs to: "", "capacity", "ttl" or "class-share"
    policy: str
    replay: str  # "simulator", "engine" or "server"
    capacity_share: float  # of the workload's unique blocks; 0: no limit
    capacity_blocks: int
    capacity_bytes: int
    ttl: Mapping[str, int]  # seconds by class
    class_share: Mapping[str, float]  # of the capacity that is a class's own
    hit_rate: float
    hit_rate_of_full_blocks: float
    hit_rate_by_class: Mapping[str, float | None]  # None: the class asked for nothing
    ceiling: float  # no limit, nothing expires
    ceiling_with_ttl: float  # no limit
    lru: float | None  # block by block, without TTLs, with the same capacity; None: no limit
    fifo: float | None
    belady: float | None
    missed: Mapping[str, float]  # shares of input tokens by cause
    missed_by_class: Mapping[str, Mapping[str, float]]  # shares of the class's input tokens
    storage: StorageFacts
    seconds: float  # that the replay took


@dataclass(frozen=True, slots=True)
class HitRateReport:
    """Everything there is to say about a run."""

    benchmark: str
    definition: str
    kvstore_version: str
    commit: str
    time: str
    seed: int | None
    config: Mapping[str, object]
    machine: Machine
    workload: WorkloadFacts
    results: Sequence[Result]

    def to_json(self) -> dict[str, object]:
        """The report as plain dicts, lists and numbers."""
        return asdict(self)
