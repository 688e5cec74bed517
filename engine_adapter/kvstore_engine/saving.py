"""Saves behind the engine: a queue of bounded size and one thread that empties it into the store.

The store may be slow, the engine may not wait: what does not fit is dropped and counted. Of a save that fits in part, the
leading blocks are taken, since those behind a gap cannot be hit.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore_engine.hook import RequestContext


# A thread with nothing to store ends after this, and a queue that nobody closed can be collected with all that it refers to.
IDLE_S: Final = 5.0


class Pending:
    """A `Saving`: the views are the engine's again once it is done."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._pid = os.getpid()

    @property
    def done(self) -> bool:
        """Whether nothing reads the views any more. In a forked child nothing does: the save is its parent's."""
        return os.getpid() != self._pid or self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is done, at most for `timeout_s`. Returns: whether it is."""
        return os.getpid() != self._pid or self._done.wait(timeout_s)

    def finish(self) -> None:
        """It is done. Idempotent."""
        self._done.set()


def nothing_pending() -> Pending:
    """One that is done from the start."""
    pending = Pending()
    pending.finish()
    return pending


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Something to store.

    `group` is empty for blocks. A KV group's state is one piece of `pieces`, and stands at the end of `tokens`. `size_bytes` is
    what all of it takes in memory.
    """

    tokens: Sequence[int]
    first_block: int
    pieces: Sequence[memoryview | bytes]
    size_bytes: int
    context: RequestContext
    group: str = ""
    pending: Pending = field(default_factory=Pending)


class QueuedSave(Protocol):
    """What a queue has to know of a job: what all of it takes in memory, and whom to tell that it is done."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def pending(self) -> Pending: ...


Job = TypeVar("Job", bound=QueuedSave)


class SaveQueue(Generic[Job]):
    """Jobs in order, one after the other. Any thread may offer; the thread that stores is there while there are jobs."""

    def __init__(
        self,
        max_bytes: int,
        store: Callable[[Job], None],
        drop: Callable[[Job], None],
        *,
        idle_s: float = IDLE_S,
    ) -> None:
        """Args:
        max_bytes: of all jobs not yet done, the one under way included.
        store: called with each job on the thread; must not raise.
        drop: told the jobs that were not begun when the queue was stopped.
        """
        self._max_bytes = max_bytes
        self._store = store
        self._drop = drop
        self._idle_s = idle_s
        self._changed = threading.Condition()  # guards everything below
        self._jobs: deque[Job] = deque()
        self._pending_bytes = 0
        self._offered = 0
        self._ended = 0  # of the offered, in the same order
        self._thread: threading.Thread | None = None
        self._stopped = False

    @property
    def pending_bytes(self) -> int:
        """Bytes taken and not yet done."""
        with self._changed:
            return self._pending_bytes

    def reserve(self, pieces: int, piece_bytes: int, beside_bytes: int = 0) -> int:
        """Make room for as many leading pieces as there is room for, and what goes with them. Returns: how many these are.

        With one or more, a job is to be offered that takes their bytes and `beside_bytes`.
        """
        with self._changed:
            room = 0 if self._stopped else self._max_bytes - self._pending_bytes - beside_bytes
            taken = max(0, min(pieces, room // piece_bytes))
            if taken:
                self._pending_bytes += taken * piece_bytes + beside_bytes
            return taken

    def offer(self, job: Job) -> None:
        """Queue a job for which room was reserved."""
        with self._changed:
            if not self._stopped:
                self._jobs.append(job)
                self._offered += 1
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="kvstore-save", daemon=True)
                    self._thread.start()
                self._changed.notify_all()
                return
            self._pending_bytes -= job.size_bytes
        self._give_back(job)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all jobs offered so far are done, at most for `timeout_s`. Returns: whether they are."""
        with self._changed:
            so_far = self._offered
            return self._changed.wait_for(lambda: self._ended >= so_far, timeout_s)

    def stop(self, timeout_s: float) -> None:
        """Finish what can be finished in `timeout_s`; drop the rest and take nothing more. Idempotent.

        The job under way is waited for even if that takes longer, as its own budgets allow: it reads the engine's memory.
        """
        deadline = time.monotonic() + timeout_s
        self.flush(max(0.0, deadline - time.monotonic()))
        with self._changed:
            self._stopped = True
            dropped, self._jobs = list(self._jobs), deque()
            self._pending_bytes -= sum(job.size_bytes for job in dropped)
            self._ended += len(dropped)
            thread, self._thread = self._thread, None
            self._changed.notify_all()
        for job in dropped:
            self._give_back(job)
        if thread is not None:
            thread.join()

    def _give_back(self, job: Job) -> None:
        self._drop(job)
        job.pending.finish()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._store(job)
            finally:
                job.pending.finish()
                with self._changed:
                    self._pending_bytes -= job.size_bytes
                    self._ended += 1
                    self._changed.notify_all()

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._stopped, self._idle_s)
            if self._jobs:
                return self._jobs.popleft()
            self._thread = None
            return None
