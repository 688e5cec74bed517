"""Ending an engine without losing a request: it goes on for a while, then hands over what is not finished.

drain = Drain(engine)
with drain.on_signal():
    while serving and not drain.begun:
        …submit, engine.step()…
    drain.run(give=send_to_another_worker, on_step=report_tokens)
"""

from __future__ import annotations

import signal
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore_engine.engine import Engine, Request

GRACE_S: Final = 60.0
# A process that ends can wait longer for its store than one that serves: what it does not get rid of is computed again.
PATIENCE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class DrainReport:
    """What became of the requests that an engine had when its drain began."""

    finished: int
    handed_over: int
    grace_used_s: float
    hand_over_s: float


class Drain:
    """Told once, the grace period begins; told again, it is over. Telling is safe in a signal handler."""

    def __init__(
        self,
        engine: Engine,
        *,
        grace_s: float = GRACE_S,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        grace_s: how long requests may go on to their own end.
        patience_s: what each call to the store may take beyond its usual time when requests are handed over.
        clock: seconds from any starting point.
        """
        if grace_s < 0 or patience_s < 0:
            raise ValueError(f"grace_s ({grace_s}) and patience_s ({patience_s}) must not be negative")
        self._engine = engine
        self._grace_s = grace_s
        self._patience_s = patience_s
        self._clock = clock
        self._began_at: float | None = None
        self._at_once = False

    @property
    def begun(self) -> bool:
        """Whether it has been told to drain."""
        return self._began_at is not None

    def tell(self) -> None:
        """Drain: from now on the engine takes no request; told again, it hands over without waiting any longer."""
        if self._began_at is not None:
            self._at_once = True
            return
        self._began_at = self._clock()
        self._engine.stop_admitting()

    @contextmanager
    def on_signal(self, *numbers: signal.Signals) -> Iterator[None]:
        """Be told by these signals, SIGTERM if none is named, while the block runs. For the main thread only."""
        before = {
            number: signal.signal(number, lambda _number, _frame: self.tell())
            for number in numbers or (signal.SIGTERM,)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(
        self,
        give: Callable[[Request, bytes], None],
        *,
        on_step: Callable[[Sequence[Request]], None] = lambda _finished: None,
    ) -> DrainReport:
        """Let the grace period pass and hand over what is left. Tells itself to drain if nobody has.

        Requests that only wait leave at once: they would wait in vain. It returns before the grace period is over when
        nothing is left.
        Args:
            give: gets each request that leaves, and its ticket. When it raises, that ticket is lost; the others are given all
                the same.
            on_step: called after each step with the requests that finished in it.
        Raises: the first exception of `give`, or of a request that cannot be handed over, after all the others have left.
        """
        if self._began_at is None:
            self.tell()
        began_at = self._began_at or 0.0
        errors: list[Exception] = []
        handed_over = self._hand_over(self._engine.waiting, give, errors)
        finished = 0
        while self._engine.has_work and not self._is_over(began_at):
            done = self._engine.step()
            finished += len(done)
            on_step(done)
        ended_at = self._clock()
        handed_over += self._hand_over(self._engine.unfinished, give, errors)
        if errors:
            raise errors[0]
        return DrainReport(finished, handed_over, ended_at - began_at, self._clock() - ended_at)

    def _is_over(self, began_at: float) -> bool:
        return self._at_once or self._clock() - began_at >= self._grace_s

    def _hand_over(
        self, requests: Sequence[Request], give: Callable[[Request, bytes], None], errors: list[Exception]
    ) -> int:
        given = 0
        for request in requests:
            try:
                give(request, self._engine.hand_over(request, patience_s=self._patience_s))
                given += 1
            except Exception as error:  # the others have to leave too
                errors.append(error)
        return given
