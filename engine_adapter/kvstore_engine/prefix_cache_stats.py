"""What a prefix cache has done so far."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, slots=True)
class PrefixCacheStats:
    """A snapshot of one cache's counts since it was made. None of them ever goes down.

    The hit rate is `hit_tokens / asked_tokens`, counted when the store answers; what then arrived is `loaded_tokens`.

    Attributes:
        block_tokens: tokens of a block.
        requests: prefixes that the engine wanted loaded.
        asked_blocks: full blocks of their prompts that might have been loaded.
        hit_blocks: those that the store had, from the start without a gap.
        loaded_blocks: those that then lay verified in the engine's memory.
        misses: reason -> requests that got fewer blocks than they asked for; each counts once, by what ended its hit.
        stored_blocks: blocks that were saved and new to the store.
        exists_blocks: blocks that were saved and there already.
        saved_states: KV groups' states that were saved and are in the store.
        unsaved_blocks: reason -> blocks and states handed over for saving without a confirmation from the store.
        load_s: from the start to the end of loads, added up; much of it beside the engine's own work.
        wait_s: time that the engine waited for loads.
        save_s: time that storing took, beside the engine's own work.
    """

    block_tokens: int
    requests: int
    asked_blocks: int
    hit_blocks: int
    loaded_blocks: int
    misses: Mapping[str, int]
    stored_blocks: int
    exists_blocks: int
    saved_states: int
    unsaved_blocks: Mapping[str, int]
    load_s: float
    wait_s: float
    save_s: float

    @property
    def saved_blocks(self) -> int:
        """Blocks that were saved and are in the store now."""
        return self.stored_blocks + self.exists_blocks

    @property
    def asked_tokens(self) -> int:
        """Tokens in `asked_blocks`."""
        return self.asked_blocks * self.block_tokens

    @property
    def hit_tokens(self) -> int:
        """Tokens in `hit_blocks`."""
        return self.hit_blocks * self.block_tokens

    @property
    def loaded_tokens(self) -> int:
        """Tokens in `loaded_blocks`."""
        return self.loaded_blocks * self.block_tokens

    @property
    def saved_tokens(self) -> int:
        """Tokens in `saved_blocks`."""
        return self.saved_blocks * self.block_tokens


class StatsBook:
    """Counts, from any thread."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._lock = threading.Lock()  # guards everything below
        self._numbers: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        self._unsaved: Counter[str] = Counter()
        self._load_s = 0.0
        self._wait_s = 0.0
        self._save_s = 0.0

    def load(self, asked_blocks: int, hit_blocks: int, loaded_blocks: int, miss: str, took_s: float) -> None:
        """A prefix was wanted; `miss` says what ended the hit, if fewer blocks than asked for were loaded."""
        with self._lock:
            self._numbers["requests"] += 1
            self._numbers["asked"] += asked_blocks
            self._numbers["hit"] += hit_blocks
            self._numbers["loaded"] += loaded_blocks
            self._load_s += took_s
            if loaded_blocks < asked_blocks:
                self._misses[miss] += 1

    def waited(self, took_s: float) -> None:
        """The engine waited for a load."""
        with self._lock:
            self._wait_s += took_s

    def saved(self, stored_blocks: int, exists_blocks: int, took_s: float, *, state: bool) -> None:
        """Blocks, or a state, were stored or found stored."""
        with self._lock:
            if state:
                self._numbers["states"] += stored_blocks + exists_blocks
            else:
                self._numbers["stored"] += stored_blocks
                self._numbers["exists"] += exists_blocks
            self._save_s += took_s

    def unsaved(self, reasons: Iterable[str]) -> None:
        """Blocks or states handed over for saving are not confirmed; a reason for each."""
        with self._lock:
            self._unsaved.update(reasons)

    def snapshot(self) -> PrefixCacheStats:
        """All counts at one moment."""
        with self._lock:
            return PrefixCacheStats(
                block_tokens=self._block_tokens,
                requests=self._numbers["requests"],
                asked_blocks=self._numbers["asked"],
                hit_blocks=self._numbers["hit"],
                loaded_blocks=self._numbers["loaded"],
                misses=dict(self._misses),
                stored_blocks=self._numbers["stored"],
                exists_blocks=self._numbers["exists"],
                saved_states=self._numbers["states"],
                unsaved_blocks=dict(self._unsaved),
                load_s=self._load_s,
                wait_s=self._wait_s,
                save_s=self._save_s,
            )
