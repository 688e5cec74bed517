"""What the scheduler's half knows of one request: what a look-up has found, how far it is saved, when the rest is tried again."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvstore_engine.prefix_cache import SKIPPED
from kvstore_engine.vllm.messages import PASSING

if TYPE_CHECKING:
    from concurrent.futures import Future

    from vllm.v1.request import Request

    from kvstore_engine.vllm.messages import WorkerPlace
    from kvstore_engine.vllm.requests import Chains

# How long a request that could not be saved, or of which nobody knows what is stored, is left alone before it is tried again.
AGAIN_S: Final = 0.5
# A save that is in vain each time is tried less and less often: to offer blocks costs the engine's time.
AGAIN_MAX_S: Final = 8.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a look-up has found, and how many blocks of the prompt could have been loaded: its last token is always computed.

    `trouble`: why nobody knows what is stored.
    """

    hit_blocks: int = 0
    leases: dict[WorkerPlace, bytes] = field(default_factory=dict)
    trouble: str = ""
    usable_blocks: int = 0
    at_s: float = 0.0


class Tracked:
    """One request. All times are of one clock, in seconds."""

    def __init__(self, request: Request, *, may_load: bool) -> None:
        self.request = request
        self.may_load = may_load  # else the store is only asked from where on to save
        self.chains: Chains | None = None  # written by the look-up, read after it
        self.look_up: Future[Answer] | None = None
        self.begun_s = 0.0
        self.counted = not may_load
        self.saved_blocks: int | None = None  # leading blocks that the store has, or was offered; None: nobody knows
        self.full_blocks = 0  # leading blocks that are computed, and might be saved
        self.gap = ""  # why those behind `saved_blocks` were not taken
        self.local_tokens = 0  # that vLLM had itself when it asked
        self.load_failed = False
        self.load_first = 0
        self._gap_at = -1  # where the last began
        self._pause_s = AGAIN_S
        self._again_s = 0.0

    @property
    def unsaved_blocks(self) -> int:
        """Blocks that are computed and behind a gap."""
        return max(0, self.full_blocks - (self.saved_blocks or 0)) if self.gap else 0

    def is_due(self, now_s: float) -> bool:
        """Whether what lies behind a gap is to be offered again."""
        return now_s >= self._again_s

    def note_gap(self, first: int, reason: str, now_s: float) -> None:
        """Block `first` was not taken. For a passing reason it is offered again: later each time, unless some before it were."""
        self._pause_s = AGAIN_S if first > self._gap_at else min(2 * self._pause_s, AGAIN_MAX_S)
        self._gap_at = first
        self.saved_blocks = min(first, self.saved_blocks or 0)
        if self._again_s < math.inf:  # what was refused stays so
            self.gap = reason
            self._again_s = now_s + self._pause_s if reason in PASSING else math.inf

    def give_up(self) -> None:
        """The store has refused a block: nothing behind it could be hit."""
        self.gap, self._again_s = SKIPPED, math.inf
