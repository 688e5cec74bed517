"""Worth it or not: is loading a prefix faster than computing it?

A load of n bytes is expected to take  a + b * n  seconds (a: a look-up, b: of the loads so far), computing t tokens  c * t
seconds. All three are exponentially weighted means of what was measured, the newest counting a quarter.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

_NEWEST_WEIGHT: Final = 0.25
# A store found too slow is measured again this often, so that one that has become fast is noticed.
RECONSIDER_S: Final = 10.0


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
        self._lock = threading.Lock()  # guards everything below
        self._look_up_s: float | None = None
        self._s_per_byte: float | None = None
        self._s_per_token: float | None = None
        self._last_load_at = 0.0

    def is_worth(self, saved_tokens: int, size_bytes: int) -> bool:
        """As the class says; once in `reconsider_s` a hit is used although it seems too slow."""
        load_s, prefill_s = self.load_s(size_bytes), self.prefill_s(saved_tokens)
        if load_s is None or prefill_s is None or load_s < prefill_s:
            return True
        with self._lock:
            return self._clock() - self._last_load_at >= self._reconsider_s

    def load_s(self, size_bytes: int) -> float | None:
        """How long looking up and loading so much is expected to take; None before anything was measured."""
        with self._lock:
            if self._look_up_s is None or self._s_per_byte is None:
                return None
            return self._look_up_s + self._s_per_byte * size_bytes

    def prefill_s(self, tokens: int) -> float | None:
        """How long computing them is expected to take; None before anything was measured."""
        with self._lock:
            return None if self._s_per_token is None else self._s_per_token * tokens

    def note_look_up(self, took_s: float) -> None:
        """A look-up was answered."""
        with self._lock:
            self._look_up_s = _mean(self._look_up_s, took_s)

    def note_load(self, size_bytes: int, took_s: float) -> None:
        """Blocks were brought; the look-up not counted."""
        if size_bytes < 1:
            return
        with self._lock:
            self._s_per_byte = _mean(self._s_per_byte, took_s / size_bytes)
            self._last_load_at = self._clock()

    def note_prefill(self, tokens: int, took_s: float) -> None:
        """Tokens of a prompt were computed."""
        if tokens < 1:
            return
        with self._lock:
            self._s_per_token = _mean(self._s_per_token, took_s / tokens)


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + _NEWEST_WEIGHT * (new - old)
