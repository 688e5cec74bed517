"""Batches under way: worked off by threads, and kept with their outcome until LMCache asks for it."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from lmcache.v1.platform import create_event_notifier

from kvstore_client import ClientClosedError
from kvstore_engine.lmcache.objects import Batch
from kvstore_engine.store_steps import CLIENT_CLOSED, UNEXPECTED_ERROR

if TYPE_CHECKING:
    from collections.abc import Callable

_LOGGER: Final = logging.getLogger("kvstore_engine.lmcache")


class Tasks:
    """Batches of one direction: look-ups, loads or stores. Any thread may call anything."""

    def __init__(self, direction: str, threads: int) -> None:
        self.notifier = create_event_notifier()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"kvstore-{direction}")
        self._lock = threading.Lock()  # guards everything below
        self._done: dict[int, Batch] = {}
        self._next = 0
        self._open = True
        self._batches = self._keys = self._good_keys = self._moved_bytes = 0
        self._failures: dict[str, int] = {}

    def submit(self, keys: int, work: Callable[[], Batch]) -> int:
        """Have `work` done, about so many keys. Returns: the task. It ends in any case, and the notifier says when."""
        with self._lock:
            task = self._next
            self._next += 1
        try:
            self._threads.submit(self._run, task, keys, work)
        except RuntimeError:  # closed meanwhile
            self._finish(task, Batch([False] * keys, failure=CLIENT_CLOSED))
        return task

    def refuse(self, keys: int, reason: str) -> int:
        """A task that has failed already."""
        with self._lock:
            task = self._next
            self._next += 1
        self._finish(task, Batch([False] * keys, failure=reason))
        return task

    def take(self, task: int) -> Batch | None:
        """What became of a task, once; None before it has ended."""
        with self._lock:
            return self._done.pop(task, None)

    def take_all(self) -> dict[int, Batch]:
        """What became of all tasks that have ended and were not taken yet."""
        with self._lock:
            done, self._done = self._done, {}
            return done

    def status(self) -> dict[str, Any]:
        """Counts of all batches that have ended."""
        with self._lock:
            return {
                "batches": self._batches,
                "keys": self._keys,
                "good_keys": self._good_keys,
                "moved_bytes": self._moved_bytes,
                "failures": dict(self._failures),
            }

    def close(self) -> None:
        """Wait for the work under way and drop the rest. Idempotent."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            if self._open:
                self._open = False
                self.notifier.close()

    def _run(self, task: int, keys: int, work: Callable[[], Batch]) -> None:
        try:
            batch = work()
        except ClientClosedError:
            batch = Batch([False] * keys, failure=CLIENT_CLOSED)
        except Exception:  # a bug must not reach LMCache's threads, nor leave it waiting
            _LOGGER.exception("a batch of %d objects failed", keys)
            batch = Batch([False] * keys, failure=UNEXPECTED_ERROR)
        self._finish(task, batch)

    def _finish(self, task: int, batch: Batch) -> None:
        with self._lock:
            self._done[task] = batch
            self._batches += 1
            self._keys += len(batch.done)
            self._good_keys += sum(batch.done)
            self._moved_bytes += batch.moved_bytes
            if batch.failure:
                self._failures[batch.failure] = self._failures.get(batch.failure, 0) + 1
            if self._open:
                self.notifier.notify()
