"""The L2 adapter: LMCache submits batches and polls for what became of them; the work is done on threads of the plug.

    {"type": "plugin", "module_path": "kvstore_engine.lmcache", "class_name": "KVStoreL2Adapter", "adapter_params": {…}}

No call waits for the store, and none raises for it: an object that cannot be had is a bit that is not set. Nothing is ever
locked in the store: what a look-up found can be gone when it is loaded, and is a miss then.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, Final

from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.eviction import L2EvictionPolicy
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from kvstore_client import KVStoreConfigError
from kvstore_engine.lmcache.identity import Layout
from kvstore_engine.lmcache.objects import ObjectStore
from kvstore_engine.lmcache.settings import LMCacheSettings
from kvstore_engine.lmcache.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstore_engine.lmcache.objects import Batch

# At once. Requests that look up or load share one connection; stores wait for each other, as their disk does.
_LOOKUPS: Final = 4
_LOADS: Final = 4
_STORES: Final = 2
_QUEUE_FULL: Final = "QUEUE_FULL"

# In LMCache's log and format: what the plug says, and that the client's store stopped answering or is back.
for _name in ("kvstore_engine", "kvstore_client"):
    init_logger(_name)
_LOGGER = logging.getLogger("kvstore_engine.lmcache")


class KVStoreL2Adapter(L2AdapterInterface):
    """LMCache's second level in a kvstore. Made by LMCache, which closes it."""

    def __init__(self, adapter_params: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        """Sends nothing. Raises: KVStoreConfigError: what only another configuration can cure."""
        super().__init__()
        self._store = ObjectStore(LMCacheSettings.read(adapter_params))
        self._lookups, self._loads, self._stores = (
            Tasks("lookup", _LOOKUPS),
            Tasks("load", _LOADS),
            Tasks("store", _STORES),
        )
        self._pending_lock = threading.Lock()
        self._pending_bytes = 0
        settings = self._store.settings
        _LOGGER.info(
            "objects of %s, revision %s, are kept in the kvstore at %s: %d tokens each, %d blocks",
            settings.plug.model,
            settings.revision,
            settings.plug.client.target,
            settings.chunk_size,
            settings.pieces,
        )

    def get_store_event_fd(self) -> int:
        """Readable when stores have ended."""
        return int(self._stores.notifier.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Readable when look-ups have ended."""
        return int(self._lookups.notifier.fileno())

    def get_load_event_fd(self) -> int:
        """Readable when loads have ended."""
        return int(self._loads.notifier.fileno())

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> int:
        """Look up which objects are there. Returns: the task."""
        return self._lookups.submit(len(keys), lambda: self._look_up(keys, group_layout_descs))

    def query_lookup_and_lock_result(self, task_id: int) -> Any:  # noqa: ANN401 - LMCache's Bitmap
        """A bit per key, once, when the task has ended; None before."""
        return _bitmap(self._lookups.take(task_id))

    def submit_unlock(self, keys: list[Any]) -> None:
        """Nothing to do: a look-up holds nothing."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Bring objects into LMCache's memory. Returns: the task."""
        return self._loads.submit(len(keys), lambda: self._load(keys, objects))

    def query_load_result(self, task_id: int) -> Any:  # noqa: ANN401 - LMCache's Bitmap
        """A bit per key whose bytes are verified, once, when the task has ended; None before."""
        return _bitmap(self._loads.take(task_id))

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Store objects, or refuse at once if too many bytes wait for the store. Returns: the task."""
        size_bytes = sum(memory_object.get_size() for memory_object in objects)
        with self._pending_lock:
            if self._pending_bytes + size_bytes > self._store.settings.plug.max_pending_save_bytes:
                return self._stores.refuse(len(keys), _QUEUE_FULL)
            self._pending_bytes += size_bytes
        return self._stores.submit(len(keys), lambda: self._save(keys, objects, size_bytes))

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """The tasks that have ended since the last call: a success if the store has confirmed all objects."""
        done = self._stores.take_all()
        return {task: L2StoreResult(all(batch.done), batch.moved_bytes) for task, batch in done.items()}

    def register_listener(self, listener: Any) -> None:  # noqa: ANN401 - LMCache's L2AdapterListener
        """As LMCache's. Raises: KVStoreConfigError: it is LMCache's eviction, which would delete nothing, again and again."""
        if isinstance(listener, L2EvictionPolicy):
            raise KVStoreConfigError(
                "INVALID_CONFIG",
                "eviction is set for this adapter, and a kvstore has its own for all its users; leave it out",
            )
        super().register_listener(listener)

    def delete(self, keys: list[Any]) -> None:
        """Refused, as LMCache would report objects as deleted that are not. Raises: NotImplementedError."""
        raise NotImplementedError(
            f"{len(keys)} objects stay in the kvstore; remove them there, as with `kvstore-admin evict`"
        )

    def report_status(self) -> dict[str, Any]:
        """Counts since the start, and what calls would be refused now.

        `is_healthy` is about the adapter: LMCache calls its whole server unhealthy if it is False, and a store that is away
        is no reason to restart LMCache.
        """
        client = self._store.client
        refused = {lane: failure.reason for lane in ("lookup", "read", "write") if (failure := client.cut_off(lane))}
        return {
            "is_healthy": True,
            "type": type(self).__name__,
            "target": client.config.target,
            "refused_now": refused,
            "not_kept": dict(self._store.refusals),
            "lookup": self._lookups.status(),
            "load": self._loads.status(),
            "store": self._stores.status(),
        }

    def close(self) -> None:
        """End the threads: calls under way end as failures. Idempotent."""
        self._store.client.close()
        for tasks in (self._lookups, self._loads, self._stores):
            tasks.close()

    def _look_up(self, keys: Sequence[Any], descriptions: Mapping[int, Any]) -> Batch:
        layouts = {group: Layout.of(layout.shapes, layout.dtypes) for group, layout in descriptions.items()}
        return self._store.look_up(keys, layouts)

    def _load(self, keys: Sequence[Any], objects: Sequence[Any]) -> Batch:
        batch = self._store.load(keys, objects)
        loaded = [key for key, done in zip(keys, batch.done, strict=True) if done]
        if loaded:
            self._notify_keys_accessed(loaded)
        return batch

    def _save(self, keys: Sequence[Any], objects: Sequence[Any], size_bytes: int) -> Batch:
        try:
            batch = self._store.store(keys, objects)
        finally:
            with self._pending_lock:
                self._pending_bytes -= size_bytes
        stored = [place for place, done in enumerate(batch.done) if done]
        if stored:
            self._notify_keys_stored([keys[place] for place in stored], [objects[place].get_size() for place in stored])
        return batch


def _bitmap(batch: Batch | None) -> Any:  # noqa: ANN401 - LMCache's Bitmap
    if batch is None:
        return None
    bitmap = Bitmap(len(batch.done))
    bitmap.batched_set([place for place, done in enumerate(batch.done) if done])
    return bitmap
