"""A call's time: one amount for all of it, connecting and registering included."""

from __future__ import annotations

import math
import time

from kvstore_client.errors import CallFailedError
from kvstore_client.results import DEADLINE, Failure


class Budget:
    """Counts down from its creation, on the monotonic clock.

    Attributes:
        total_s: all of it.
        enough: whether a store that does not answer within it is at fault; False for a caller's own that is much shorter than
            what the configuration gives.
        drawn_on: whether some of it was left when it was first asked for. Before that, nothing has been sent.
    """

    __slots__ = ("_end_s", "drawn_on", "enough", "total_s")

    def __init__(self, total_s: float, *, enough: bool = True) -> None:
        self.total_s = total_s
        self.enough = enough
        self.drawn_on = False
        self._end_s = time.monotonic() + total_s

    def remaining_s(self) -> float:
        """Seconds left, more than 0. Raises: CallFailedError: DEADLINE, nothing is left."""
        remaining = self._end_s - time.monotonic()
        if remaining <= 0:
            raise CallFailedError(self.failure())
        self.drawn_on = True
        return remaining

    def is_conclusive(self, failure: Failure | None) -> bool:
        """Whether a call that has ended so within this budget says anything about the store."""
        if failure is None:
            return self.drawn_on
        return self.enough or failure.reason != DEADLINE

    def failure(self) -> Failure:
        """What a call that has used up its budget reports."""
        return Failure(DEADLINE, f"the budget of {self.total_s:.3f} s is used up")


def check_budget_s(budget_s: float) -> float:
    """A caller's own budget; nothing or less than nothing is a deadline that has passed, not a mistake.

    Raises:
        TypeError: it is no number.
        ValueError: it is not finite.
    """
    if not isinstance(budget_s, int | float) or isinstance(budget_s, bool):
        raise TypeError(f"budget_s is {budget_s!r}, wanted is a number of seconds")
    if not math.isfinite(budget_s):
        raise ValueError(f"budget_s is {budget_s!r}, wanted is a finite number of seconds")
    return float(budget_s)
