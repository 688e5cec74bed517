"""A load under way: the engine waits on one side, a thread of the prefix cache fetches on the other."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from kvstore_engine.hook import LoadedPrefix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MISS = LoadedPrefix()

LOADER_BUSY = "LOADER_BUSY"  # other loads took all the time that this one had for its start
CANCELLED = "CANCELLED"  # the engine gave the load up


class Load:
    """A `PrefixLoad`. The fetching thread calls `begin` first; if that says yes it calls `settle` last, come what may."""

    def __init__(
        self,
        views: Sequence[memoryview],
        *,
        part_of_layer: Callable[[int], int],
        start_budget_s: float,
        on_wait: Callable[[float], None],
    ) -> None:
        """Args:
        part_of_layer: which of the parts that blocks come in holds a layer's KV; -1 for a layer that is in none.
        start_budget_s: how long the engine waits for the fetching to begin.
        on_wait: told the seconds that each wait of the engine took.
        """
        self.views = views
        self.started_at = time.monotonic()
        self._part_of_layer = part_of_layer
        self._start_budget_s = start_budget_s
        self._start_deadline: float | None = None  # from the first wait on: a load that nobody waits for yet has time
        self._pid = os.getpid()
        self._on_wait = on_wait
        self._changed = threading.Condition()  # guards everything below
        self._begun = False
        self._given_up = False
        self._promise: LoadedPrefix | None = None
        self._parts_there = 0
        self._outcome: LoadedPrefix | None = None
        self._end_reason = ""

    # The engine's side

    def expect(self) -> LoadedPrefix:
        """What the store promises. Waits for the look-up, and not for the bytes."""
        if self._is_elsewhere:
            return MISS
        self._wait_for(lambda: self._promise is not None)
        with self._changed:
            if self._promise is not None:
                return self._promise
            assert self._outcome is not None
            return self._outcome

    def wait_layer(self, layer: int) -> bool:
        """Wait until one layer's KV of all promised blocks is there. Returns: False: it did not come; see `wait`."""
        if self._is_elsewhere:
            return False
        part = self._part_of_layer(layer)
        self._wait_for(lambda: self._parts_there > part)
        with self._changed:
            return self._parts_there > part and (self._outcome is None or self._outcome == self._promise)

    def wait(self) -> LoadedPrefix:
        """Wait for all of it. Returns: what there is now."""
        if self._is_elsewhere:
            return MISS
        self._wait_for(lambda: False)
        with self._changed:
            assert self._outcome is not None
            return self._outcome

    def cancel(self) -> None:
        """Give it up. Waits for the call under way, at most for the rest of its budget: it writes to the views."""
        if self._is_elsewhere:
            return
        with self._changed:
            self._given_up = True
            if not self._begun:
                self._settle(MISS, CANCELLED)
        self._wait_for(lambda: False)

    @property
    def _is_elsewhere(self) -> bool:
        """Whether this is a forked child: the load is its parent's, and no thread here will end it."""
        return os.getpid() != self._pid

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        """Until the condition holds or all is over. A load that does not begin in time is over."""
        began = time.monotonic()
        with self._changed:
            if self._start_deadline is None:
                self._start_deadline = began + self._start_budget_s
            self._changed.wait_for(
                lambda: self._begun or self._outcome is not None, timeout=max(0.0, self._start_deadline - began)
            )
            if not self._begun:
                self._settle(MISS, LOADER_BUSY)
            self._changed.wait_for(lambda: self._outcome is not None or condition())
        self._on_wait(time.monotonic() - began)

    # The fetching thread's side

    def begin(self) -> bool:
        """Whether to fetch at all; from a yes on, the views may be written until `settle`."""
        with self._changed:
            late = self._start_deadline is not None and time.monotonic() > self._start_deadline
            if self._outcome is None and late:
                self._settle(MISS, LOADER_BUSY)
            self._begun = True
            return self._outcome is None

    @property
    def given_up(self) -> bool:
        """Whether the engine does not want it any more."""
        with self._changed:
            return self._given_up

    @property
    def end_reason(self) -> str:
        """Why it was over before it began; empty otherwise."""
        with self._changed:
            return self._end_reason

    def promise(self, prefix: LoadedPrefix) -> None:
        """The look-up is done: this will be there if all goes well."""
        with self._changed:
            self._promise = prefix
            self._changed.notify_all()

    def part_there(self) -> None:
        """The next part of all promised blocks is there and verified."""
        with self._changed:
            self._parts_there += 1
            self._changed.notify_all()

    def settle(self, prefix: LoadedPrefix) -> None:
        """The end; nothing writes to the views from now on."""
        with self._changed:
            self._settle(prefix, "")

    def _settle(self, prefix: LoadedPrefix, reason: str) -> None:
        if self._outcome is None:
            self._outcome, self._end_reason = prefix, reason
            self._changed.notify_all()
