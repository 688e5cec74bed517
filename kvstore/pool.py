"""The bridge from the event loop to blocking code. Bounded: overload is an error, not a queue."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Self, TypeVar

from kvstore.errors import KvStoreError, OverloadedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from types import TracebackType

T = TypeVar("T")


class DeadlinePassedError(KvStoreError):
    """The caller's deadline has passed: nobody waits for the answer any more."""

    reason = "DEADLINE_EXCEEDED"


class StorePool:
    """Threads for one kind of work, and the number of calls that may hold a place at once.

    `pending` and `refused` belong to the loop's thread; others may read them.
    """

    def __init__(self, name: str, threads: int, pending_max: int) -> None:
        self.name = name
        self.pending_max = pending_max
        self.pending = 0  # calls that hold a place
        self.refused = 0  # calls turned away since the start
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"kvstore-{name}")

    def admit(self, deadline_s: float | None = None) -> Slot:
        """Take a place for one call; it is given back when the slot is left and its last job has ended.

        Args:
            deadline_s: in `time.monotonic()`'s seconds; jobs that have not begun by then are dropped.
        Raises: OverloadedError: all places are taken.
        """
        if self.pending >= self.pending_max:
            self.refused += 1
            raise OverloadedError(
                f"{self.pending} {self.name} calls are running or waiting, the limit is {self.pending_max}"
            )
        self.pending += 1
        return Slot(self, deadline_s)

    async def run(self, call: Callable[[], T], deadline_s: float | None = None) -> T:
        """Run one blocking call on a thread and await its result.

        Raises:
            OverloadedError: all places are taken.
            DeadlinePassedError: the deadline passed before a thread was free.
        """
        with self.admit(deadline_s) as slot:
            return await slot.run(call)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Hand a job to the threads; for slots, which hold a place."""
        return self._threads.submit(call)

    def close(self) -> None:
        """Wait for the threads. Blocks; the pool takes no more work."""
        self._threads.shutdown()


class Slot:
    """One call's place in a pool: it may run jobs one after the other, at most one at a time."""

    def __init__(self, pool: StorePool, deadline_s: float | None) -> None:
        self._pool = pool
        self._deadline_s = deadline_s
        self._loop = asyncio.get_running_loop()
        self._job: Future[Any] | None = None  # the newest job

    async def run(self, call: Callable[[], T]) -> T:
        """Run one job on a thread. Raises: DeadlinePassedError: the deadline passed before a thread was free."""
        return await self.start(call)

    def start(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Begin one job on a thread without waiting for it. The one before it must have ended."""
        assert self._job is None or self._job.done(), "two jobs at once in one slot"
        job = self._pool.submit(lambda: self._in_time(call))
        self._job = job
        return asyncio.wrap_future(job)

    def last(self, call: Callable[[], object]) -> None:
        """Run `call` on a thread once the job that may still be running has ended: closing what that job reads from."""
        before = self._job

        def wait_and_call() -> None:
            # The pool's queue is first in, first out: `before` has a thread by now, or was cancelled.
            if before is not None:
                wait([before])
            call()

        self._job = self._pool.submit(wait_and_call)

    def _in_time(self, call: Callable[[], T]) -> T:
        if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
            raise DeadlinePassedError("the call's deadline passed while it waited for a thread")
        return call()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A cancelled call keeps its place until its thread is free: counting calls alone would let cancelled reads
        # pile up on the disk.
        if self._job is None or self._job.done():
            self._release()
        else:
            self._job.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._release))

    def _release(self) -> None:
        self._pool.pending -= 1


async def settled(future: Future[T]) -> T:
    """Await what another thread is going to set, the writer's answer to a put.

    A cancelled call does not cancel the future: its thread would fail to set it.
    """
    return await asyncio.shield(asyncio.wrap_future(future))
