"""A gate between fork() and gRPC: a process is forked while none of its blocking calls is under way.

gRPC does not promise that a process may fork while other threads are inside it; without the gate about one child in several
hundred died by a signal. A fork closes the gate, waits for the calls under way, and opens it again: calls that come meanwhile
wait, each within its budget. All of it is bounded, because a fork that comes late is better than one that hangs.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvstore_client.errors import CallFailedError
from kvstore_client.results import FORKING, Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore_client.budget import Budget

# Calls end by their budgets, most in a fraction of a second; a registration in the background may take longer.
FORK_WAIT_S = 5.0

_LOGGER = logging.getLogger("kvstore_client")


class _Process:
    """The calls under way in one process."""

    def __init__(self) -> None:
        # Its lock can be taken again by a thread that holds it: a signal handler may call or fork in the middle of the lines below.
        self.changed = threading.Condition()
        self.calls: dict[int, int] = {}  # thread -> blocking calls; guarded by `changed`, as is the rest
        self.background = 0  # calls that no thread waits for
        self.forking: dict[int, int] = {}  # threads that are about to fork


class ForkGate:
    """Counts the blocking calls of a process, and lets a fork wait for them."""

    def __init__(self, fork_wait_s: float = FORK_WAIT_S) -> None:
        self._fork_wait_s = fork_wait_s
        self._installed = False
        self._process = _Process()

    @contextmanager
    def call(self, budget: Budget | None = None) -> Iterator[None]:
        """A blocking call. While another thread forks, it waits to begin, at most for the budget.

        Raises: CallFailedError: the budget ended before the fork did.
        """
        self._install()
        process, me = self._process, threading.get_ident()
        with process.changed:
            if process.forking and not self._may_pass(process, me):
                self._wait_for_forks(process, budget)
            process.calls[me] = process.calls.get(me, 0) + 1
        try:
            yield
        finally:
            # In a child that was forked inside this call, the calls of the parent are not counted any more.
            if process is self._process:
                with process.changed:
                    _take_off(process.calls, me)
                    if process.forking:
                        process.changed.notify_all()

    def background_call(self) -> Callable[[], None]:
        """A call that goes on by itself: to be made inside of `call`. The answer is to be called once when it has ended."""
        process = self._process
        with process.changed:
            process.background += 1

        def ended() -> None:
            if process is self._process:
                with process.changed:
                    process.background -= 1
                    process.changed.notify_all()

        return ended

    def _install(self) -> None:
        if not self._installed:  # two threads may both see that; being told twice of each fork does no harm
            self._installed = True
            os.register_at_fork(before=self.close, after_in_parent=self.open, after_in_child=self.renew)

    def close(self) -> None:
        """Before a fork, on the thread that forks: wait for the calls of all others."""
        process, me = self._process, threading.get_ident()
        with process.changed:
            process.forking[me] = process.forking.get(me, 0) + 1
            if not process.changed.wait_for(lambda: not _others(process, me), self._fork_wait_s):
                _LOGGER.warning(
                    "forking although %d calls have not ended in %g s: the child may die by a signal inside gRPC",
                    _others(process, me),
                    self._fork_wait_s,
                )

    def open(self) -> None:
        """After a fork, in the parent, whether it has succeeded or not."""
        process = self._process
        with process.changed:
            _take_off(process.forking, threading.get_ident())
            process.changed.notify_all()

    def renew(self) -> None:
        """After a fork, in the child: the parent's threads are gone, and one of them may have held the lock."""
        self._process = _Process()

    @staticmethod
    def _may_pass(process: _Process, me: int) -> bool:
        """A thread that forks, or whose call a fork waits for, would wait for itself."""
        return me in process.forking or me in process.calls

    @staticmethod
    def _wait_for_forks(process: _Process, budget: Budget | None) -> None:
        timeout_s = None if budget is None else budget.remaining_s()
        if not process.changed.wait_for(lambda: not process.forking, timeout_s) and budget is not None:
            raise CallFailedError(Failure(FORKING, f"{budget.failure().detail}; a fork waits for calls under way"))


def _others(process: _Process, me: int) -> int:
    """Calls that `me` has to wait for: not its own, and not those of a thread that waits in its own fork."""
    under_way = sum(count for thread, count in process.calls.items() if thread != me and thread not in process.forking)
    return under_way + process.background


def _take_off(counts: dict[int, int], thread: int) -> None:
    left = counts.pop(thread, 0) - 1
    if left > 0:
        counts[thread] = left


GATE = ForkGate()
