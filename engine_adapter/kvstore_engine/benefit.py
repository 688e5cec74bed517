"""Worth it or not: is loading a prefix faster than computing it?

A load of n bytes is expected to take  a + b * n  seconds, computing t tokens  c * t  seconds. a is a mean of the look-ups so far,
the newest counting a quarter. b and c are seconds so far ÷ bytes or tokens so far, where what is old fades.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

_NEWEST_WEIGHT: Final = 0.25
# So many bytes, or tokens, make a quarter of what was measured before them fade.
_FADE_BYTES: Final = 16 << 20
_FADE_TOKENS: Final = 128
# A pass over the few tokens behind a hit costs what one over dozens does: it says nothing about what computing the hit would cost.
_LEAST_TOKENS: Final = 32
# But a load fades at least a fortieth of it, or a store of small blocks would be judged by what it was long ago.
_FADE_LEAST_BYTES: Final = _FADE_BYTES // 10
# A store found too slow is measured again this often, so that one that has become fast is noticed.
RECONSIDER_S: Final = 10.0
# What the loads before a pause of that length count for beside the first after it.
_KEPT_AFTER_PAUSE: Final = 1.0


class BenefitRule(Protocol):
    """Decides whether a hit is used. Called from any thread."""

    def is_worth(self, saved_tokens: int, size_bytes: int) -> bool:
        """Whether to load `size_bytes` in order not to compute `saved_tokens`."""
        ...

    def note_look_up(self, took_s: float) -> None:
        """A look-up was answered."""
        ...

    def note_load(self, size_bytes: int, took_s: float) -> None:
        """Blocks were brought; the look-up not counted."""
        ...

    def note_prefill(self, tokens: int, took_s: float) -> None:
        """Tokens of a prompt were computed."""
        ...


class MinimumHit:
    """A fixed rule: a hit is used if it saves at least so many tokens; with 1, always."""

    def __init__(self, saved_tokens: int) -> None:
        """Raises: ValueError: fewer than 1 token."""
        if saved_tokens < 1:
            raise ValueError(f"a hit of {saved_tokens} tokens saves nothing; give at least 1")
        self._saved_tokens = saved_tokens

    def is_worth(self, saved_tokens: int, size_bytes: int) -> bool:
        """Whether it saves enough."""
        del size_bytes
        return saved_tokens >= self._saved_tokens

    def note_look_up(self, took_s: float) -> None:
        """Nothing to learn."""

    def note_load(self, size_bytes: int, took_s: float) -> None:
        """Nothing to learn."""

    def note_prefill(self, tokens: int, took_s: float) -> None:
        """Nothing to learn."""


class MeasuredBenefit:
    """A hit is used if loading it is expected to take less time than computing it. What is not known yet counts for the hit."""

    def __init__(self, *, reconsider_s: float = RECONSIDER_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._reconsider_s = reconsider_s
        self._clock = clock
        # No lock, which a fork could leave locked: a race loses a measurement, and no more.
        self._look_up_s: float | None = None
        self._loads = _Rate(_FADE_BYTES, _FADE_LEAST_BYTES)
        self._prefills = _Rate(_FADE_TOKENS)
        self._last_load_at = 0.0

    def is_worth(self, saved_tokens: int, size_bytes: int) -> bool:
        """As the class says; once in `reconsider_s` a hit is used although it seems too slow."""
        load_s, prefill_s = self.load_s(size_bytes), self.prefill_s(saved_tokens)
        if load_s is None or prefill_s is None or load_s < prefill_s:
            return True
        return self._clock() - self._last_load_at >= self._reconsider_s

    def load_s(self, size_bytes: int) -> float | None:
        """How long looking up and loading so much is expected to take; None before anything was measured."""
        s_per_byte = self._loads.seconds_per_unit
        if self._look_up_s is None or s_per_byte is None:
            return None
        return self._look_up_s + s_per_byte * size_bytes

    def prefill_s(self, tokens: int) -> float | None:
        """How long computing them is expected to take; None before anything was measured."""
        s_per_token = self._prefills.seconds_per_unit
        return None if s_per_token is None else s_per_token * tokens

    def note_look_up(self, took_s: float) -> None:
        """A look-up was answered."""
        old = took_s if self._look_up_s is None else self._look_up_s
        self._look_up_s = old + _NEWEST_WEIGHT * (took_s - old)

    def note_load(self, size_bytes: int, took_s: float) -> None:
        """Blocks were brought; the look-up not counted."""
        if size_bytes < 1:
            return
        now, before = self._clock(), self._last_load_at
        # After a pause, such as that of a store found too slow, the newest load counts for more than all that came before.
        self._loads.note(size_bytes, took_s, _KEPT_AFTER_PAUSE if now - before >= self._reconsider_s else math.inf)
        self._last_load_at = now

    def note_prefill(self, tokens: int, took_s: float) -> None:
        """Tokens of a prompt were computed."""
        if tokens < _LEAST_TOKENS:
            return
        self._prefills.note(tokens, took_s)


class _Rate:
    """Seconds per unit, of late."""

    def __init__(self, fade_units: float, fade_least_units: float = 0.0) -> None:
        self._fade_units = fade_units
        self._fade_least_units = fade_least_units
        self._units_and_seconds = 0.0, 0.0  # one attribute: threads see both of one moment

    @property
    def seconds_per_unit(self) -> float | None:
        """None before anything was measured."""
        units, seconds = self._units_and_seconds
        return seconds / units if units else None

    def note(self, units: float, took_s: float, kept_units: float = math.inf) -> None:
        """So many units took so long. What came before counts on as no more than `kept_units` times as many."""
        kept = (1 - _NEWEST_WEIGHT) ** (max(units, self._fade_least_units) / self._fade_units)
        units_so_far, seconds_so_far = self._units_and_seconds
        if kept * units_so_far > kept_units * units:
            kept = kept_units * units / units_so_far
        self._units_and_seconds = kept * units_so_far + units, kept * seconds_so_far + took_s
