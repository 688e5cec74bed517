"""What a client has done so far."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore_client.results import BLOCK_OK

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvstore_client.results import Failure, PutReport


@dataclass(frozen=True, slots=True)
class ClientStats:
    """A snapshot of one process's counts since the client was made (or since the fork). None of them ever goes down.

    Attributes:
        calls: method -> calls made, refused ones included.
        failures: reason -> calls that ended with that failure; BREAKER_OPEN for those refused without being sent.
        asked_blocks, hit_blocks: blocks in the chains matched, and those found.
        ok_blocks, ok_bytes: blocks brought by gets and verified.
        missed_blocks: reason -> blocks asked for by gets and not brought.
        stored_blocks, exists_blocks: what puts reported, state objects included.
        put_bytes: bytes of the blocks newly stored.
        rejected_blocks: reason -> blocks of puts that were not confirmed.
    """

    calls: Mapping[str, int]
    failures: Mapping[str, int]
    asked_blocks: int
    hit_blocks: int
    ok_blocks: int
    ok_bytes: int
    missed_blocks: Mapping[str, int]
    stored_blocks: int
    exists_blocks: int
    put_bytes: int
    rejected_blocks: Mapping[str, int]


class StatsBook:
    """Counts, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards everything below
        self._calls: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._missed: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()
        self._numbers: Counter[str] = Counter()

    def call(self, method: str, failure: Failure | None) -> None:
        """One call ended."""
        with self._lock:
            self._calls[method] += 1
            if failure is not None:
                self._failures[failure.reason] += 1

    def matched(self, asked_blocks: int, hit_blocks: int) -> None:
        """A match found `hit_blocks` of a chain."""
        with self._lock:
            self._numbers["asked_blocks"] += asked_blocks
            self._numbers["hit_blocks"] += hit_blocks

    def got(self, statuses: Iterable[str], block_bytes: int) -> None:
        """A get ended with these statuses."""
        counts = Counter(statuses)
        ok_blocks = counts.pop(BLOCK_OK, 0)
        with self._lock:
            self._numbers["ok_blocks"] += ok_blocks
            self._numbers["ok_bytes"] += ok_blocks * block_bytes
            self._missed.update(counts)

    def put(self, report: PutReport, block_bytes: int) -> None:
        """A put ended with this report."""
        stored, exists = report.stored, report.exists
        with self._lock:
            self._numbers["stored_blocks"] += stored
            self._numbers["put_bytes"] += stored * block_bytes
            self._numbers["exists_blocks"] += exists
            self._rejected.update(result.reason for result in report.results if result.reason)

    def snapshot(self) -> ClientStats:
        """All counts at one moment."""
        with self._lock:
            return ClientStats(
                calls=dict(self._calls),
                failures=dict(self._failures),
                asked_blocks=self._numbers["asked_blocks"],
                hit_blocks=self._numbers["hit_blocks"],
                ok_blocks=self._numbers["ok_blocks"],
                ok_bytes=self._numbers["ok_bytes"],
                missed_blocks=dict(self._missed),
                stored_blocks=self._numbers["stored_blocks"],
                exists_blocks=self._numbers["exists_blocks"],
                put_bytes=self._numbers["put_bytes"],
                rejected_blocks=dict(self._rejected),
            )
