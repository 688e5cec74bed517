"""Where the time comes from: the system, or a test's hand; and a guard against clocks that jump.

TTLs have to survive restarts, so they need the wall clock, which people and NTP set as they like. The store's time follows it,
but never runs back, and believes a jump forward only when the clock has stood by it for a while. In between it goes on at the
pace of a clock that nobody sets. So a jump makes nothing immortal and lets nothing expire that should not.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Protocol

_log = logging.getLogger(__name__)

# Steps up to this size are what NTP does every day; they are followed at once, but not backwards.
STEP_TOLERANCE_S = 5.0
# A clock that jumped ahead is believed once it has kept its new time for so long.
CONFIRM_S = 300.0
# After the machine was restarted nobody knows how long it was off; up to this the wall clock is believed at once.
DOWNTIME_BELIEVED_S = 86_400.0


class Clock(Protocol):
    """Two clocks of a machine."""

    def now_s(self) -> float:
        """Wall-clock seconds since the epoch."""
        ...

    def steady_s(self) -> float:
        """Seconds since some moment of this boot, suspended times included; nobody sets it."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def steady_s(self) -> float:
        """Seconds since the machine was booted."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)


class ManualClock:
    """Stands still until told to move."""

    def __init__(self, now_s: float = 1_800_000_000.0) -> None:
        self._now_s = now_s
        self._steady_s = 1_000.0

    def now_s(self) -> float:
        """Seconds since the epoch."""
        return self._now_s

    def steady_s(self) -> float:
        """Seconds since the boot that never was."""
        return self._steady_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now_s += seconds
        self._steady_s += seconds

    def jump(self, seconds: float) -> None:
        """Set the wall clock `seconds` further, or back when negative; no time passes."""
        self._now_s += seconds


@dataclass(frozen=True, slots=True)
class ClockNote:
    """What the store's time was when, kept in the data directory so that a restart can go on from there."""

    store_s: float
    steady_s: float
    boot_id: bytes  # of the boot whose steady time that was


class GuardedClock:
    """The store's time: the wall clock, as far as it can be believed. For any thread."""

    def __init__(self, clock: Clock, boot_id: bytes, note: ClockNote | None) -> None:
        self._clock, self._boot_id = clock, boot_id
        self._lock = threading.Lock()
        # Guarded by _lock: the store's time was _base_s when the steady clock stood at _since_s.
        self._base_s, self._since_s = clock.now_s(), clock.steady_s()
        self._doubted_offset_s: float | None = None  # how far ahead a clock is that jumped
        self._doubted_since_s = 0.0
        self._told_offset_s = 0.0
        if note is not None:
            self._resume(note)

    def _resume(self, note: ClockNote) -> None:
        gap_s = self._base_s - note.store_s
        if note.boot_id == self._boot_id and note.steady_s <= self._since_s:
            self._base_s = note.store_s + self._since_s - note.steady_s
        elif not 0 <= gap_s <= DOWNTIME_BELIEVED_S:
            self._base_s = note.store_s

    def now_s(self) -> float:
        """Seconds since the epoch; never less than the time before."""
        return self._look()[0]

    def _look(self) -> tuple[float, float]:
        """The store's time and the wall clock's, of the same moment."""
        with self._lock:
            steady_s, wall_s = self._clock.steady_s(), self._clock.now_s()
            expected_s = self._base_s + max(0.0, steady_s - self._since_s)
            if self._believes(wall_s - expected_s, steady_s):
                # Small steps back are slept through: the store stands still until the clock has caught up.
                expected_s = max(self._base_s, wall_s)
            self._base_s, self._since_s = expected_s, steady_s
            return expected_s, wall_s

    def _believes(self, offset_s: float, steady_s: float) -> bool:
        if abs(offset_s) <= STEP_TOLERANCE_S:
            self._doubted_offset_s, self._told_offset_s = None, 0.0
            return True
        self._tell(offset_s)
        if offset_s < 0:
            self._doubted_offset_s = None
            return False
        if self._doubted_offset_s is None or abs(offset_s - self._doubted_offset_s) > STEP_TOLERANCE_S:
            self._doubted_offset_s, self._doubted_since_s = offset_s, steady_s
        return False

    def confirm(self) -> float | None:
        """Believe a clock that jumped ahead, if it has stood by its time for long enough; for who looks after the store.

        Returns: the store's time when the jump was noticed; what was noted since has to be moved to the time there is now.
        """
        self.now_s()
        with self._lock:
            steady_s = self._clock.steady_s()
            if self._doubted_offset_s is None or steady_s - self._doubted_since_s < CONFIRM_S:
                return None
            doubted_s = self._base_s - (self._since_s - self._doubted_since_s)
            _log.warning(
                "the wall clock has stood %.0f s ahead for %.0f s: its time is taken now",
                self._doubted_offset_s,
                CONFIRM_S,
            )
            self._base_s, self._since_s = max(self._base_s, self._clock.now_s()), steady_s
            self._doubted_offset_s = None
            return doubted_s

    def _tell(self, offset_s: float) -> None:
        if abs(offset_s - self._told_offset_s) <= STEP_TOLERANCE_S:
            return
        self._told_offset_s = offset_s
        if offset_s < 0:
            _log.warning(
                "the wall clock is %.0f s behind the store's time, which goes on and does not turn back", -offset_s
            )
        else:
            _log.warning(
                "the wall clock jumped %.0f s ahead; that is believed once it has lasted for %.0f s",
                offset_s,
                CONFIRM_S,
            )

    def steady_s(self) -> float:
        """Seconds that nobody sets."""
        return self._clock.steady_s()

    def ahead_s(self) -> float:
        """How far the store's time is ahead of the wall clock: 0 while it follows, negative while a jump is not believed."""
        store_s, wall_s = self._look()
        return store_s - wall_s

    def note(self) -> ClockNote:
        """What a restart needs to know."""
        return ClockNote(self.now_s(), self._clock.steady_s(), self._boot_id)
