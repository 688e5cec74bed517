"""The client's two shapes behind one face, so that one test tries both: its calls block, whichever shape it is."""

from __future__ import annotations

import asyncio
import inspect
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvstore_client import AsyncKVStoreClient, AsyncNamespaceHandle, KVStoreClient

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from kvstore_client import ClientConfig

DOORS = ("sync", "asyncio")


class LoopThread:
    """An event loop on a thread of its own; any thread may wait for a coroutine on it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="loop of the asyncio door")
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """What the coroutine returns or raises; an interrupt of the caller cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def stop(self) -> None:
        """End the loop and what still runs on it."""
        self.run(self._cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Blocking:
    """An asyncio client or handle whose coroutines are waited for."""

    def __init__(self, inner: AsyncKVStoreClient | AsyncNamespaceHandle, loop: LoopThread) -> None:
        self._inner = inner
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        if inspect.iscoroutinefunction(attribute):
            return lambda *args, **more: self._loop.run(attribute(*args, **more))
        if name == "namespace":
            return lambda spec: Blocking(attribute(spec), self._loop)
        return attribute

    def __enter__(self) -> Blocking:
        self._loop.run(self._inner.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.run(self._inner.__aexit__(*error))


@contextmanager
def opened(shape: str) -> Iterator[Callable[..., Any]]:
    """How to make a client of this shape: called with a ClientConfig, or nothing, it gives a client."""
    if shape == "sync":
        yield KVStoreClient
        return
    loop = LoopThread()

    def make(config: ClientConfig | None = None) -> Blocking:
        return Blocking(AsyncKVStoreClient(config), loop)

    try:
        yield make
    finally:
        loop.stop()
