"""SGLang's third cache tier in a store: pages of its host memory are loaded from there and saved to there.

SGLang names a page by a SHA-256 chained over all tokens up to the page's end and over the request's `extra_key` (in which the
LoRA adapter is) and salt. That is a prefix hash, and is used as it stands: the namespace, which every request to the store
carries, adds what SGLang's name leaves out.

A page is a chain of its own, one block long. The store takes chains from block 0 on, and SGLang does not say which pages lie
before those it asks for: `prefix_keys` is off by default, is None at the beginning of a prompt too, and leaves out the node of
the radix tree that the request has matched last. So there is a call to the store for each page, a few of them at once.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName
from sglang.srt.observability.metrics_collector import StorageMetrics

from kvstore_api.limits import HASH_BYTES
from kvstore_client import Chain, KVStoreClient, KVStoreConfigError, PutStatus
from kvstore_client.buffers import byte_view
from kvstore_engine.prefix_cache import CHECK_BUDGET_S
from kvstore_engine.sglang.host_pages import HostPages
from kvstore_engine.sglang.lanes import WIDTH, Lane
from kvstore_engine.sglang.namespace import namespace_of, weights_in_use
from kvstore_engine.sglang.settings import read_settings
from kvstore_engine.sglang.traffic import Traffic
from kvstore_engine.store_steps import StoreSteps, failure_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from kvstore_client import Failure, MatchResult, NamespaceHandle
    from kvstore_engine.sglang.host_pages import Page
    from kvstore_engine.sglang.lanes import PageCall

_OTHER_WEIGHTS = (
    "SGLang has been given other weights, and their KV is not that of the namespace; detach this backend, and attach it again "
    "with a 'revision' of their own"
)
# The longest that finding and loading may take, whatever the pages' size. SGLang counts itself as idle while a cancelled request's
# call goes on; when it then empties its cache it waits 10 s for the call's thread, and ends by an exception.
LONGEST_S = 8.0
_LOGGER = logging.getLogger("kvstore_engine.sglang")


class KVStoreHiCache(HiCacheStorage):
    """A HiCache storage backend over one namespace of a store, with the zero-copy interface `v1`.

    SGLang calls `batch_exists`, `batch_get_v1` and `batch_set_v1` from a thread each. None of them raises, and each ends within
    the time that the client's configuration gives for moving so many pages. What the store cannot do is a page less.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """As SGLang makes it. Sends nothing yet; `register_mem_pool_host` does.

        Raises: KVStoreConfigError: a setting is unknown or impossible, or SGLang runs in a way that is not supported.
        """
        self._settings = read_settings(storage_config.extra_config or {})
        self._config = storage_config
        self._client = KVStoreClient(self._settings.client)
        self._lookups, self._reads, self._writes = Lane("lookup"), Lane("read"), Lane("write")
        self._traffic = Traffic()

    # What SGLang does at its start

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool whose pages are moved, and make its namespace known to the store.

        A store that does not answer is no obstacle: pages miss until it does.

        Raises: KVStoreConfigError: the pool's pages are no blocks of the store, the weights cannot be told from others, or the
            store refuses the namespace or does not know the traffic class.
        """
        super().register_mem_pool_host(mem_pool_host)
        self._pages = HostPages(mem_pool_host)
        self._weights = weights_in_use()
        spec = namespace_of(self._settings, self._config, self._pages)
        self._namespace: NamespaceHandle = self._client.namespace(spec)
        self._steps = StoreSteps(self._namespace)
        if self._steps.register(CHECK_BUDGET_S) is None:
            self._check_class()
        _LOGGER.info(
            "kvstore at %s keeps pages of %d bytes, layout %s, of model %s, revision %s, in namespace %s",
            self._settings.client.target,
            spec.block_bytes,
            spec.layout,
            spec.model,
            spec.revision,
            self._namespace.digest.hex()[:16],
        )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Refuse pools beside that of the KV, such as those of sliding windows, recurrent states and draft models.

        Raises: KVStoreConfigError: names the pool.
        """
        if host_pool_name != PoolName.KV:
            self.close()  # SGLang leaves a backend attached that refuses as late as this, if its server was running already
            raise KVStoreConfigError(
                "INVALID_CONFIG",
                f"SGLang keeps a pool {str(host_pool_name)!r} beside that of the KV, and only the KV's is supported; "
                "run this model, or with these draft layers, without --hicache-storage-backend, and detach this backend from a "
                "server that was running already",
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def _check_class(self) -> None:
        asked = self._steps.look_up(Chain(bytes(HASH_BYTES)), self._settings.traffic_class, peek=True)
        if asked.failure is not None and asked.failure.reason == "UNKNOWN_TRAFFIC_CLASS":
            raise KVStoreConfigError("INVALID_CONFIG", f"traffic_class: {asked.failure.detail}")

    # What SGLang's threads call

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Ask for pages. Returns: how many of them are there from the first on, without a gap."""
        return self._safely("look-up", lambda: self._find(_names(keys)))

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Load pages into the pool. Nothing writes to them after the return.

        Returns: for each page whether its bytes are there and verified. Pages behind one that is not count as not loaded.
        """
        leading = self._safely("load", lambda: self._load(_names(keys), self._pages.at(host_indices)))
        return _first_true(leading, len(keys))

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Save pages of the pool. Nothing reads them after the return.

        Returns: for each page whether the store has it. Pages behind one that it has not are not offered.
        """
        leading = self._safely("save", lambda: self._save(_names(keys), self._pages.at(host_indices)))
        return _first_true(leading, len(keys))

    def get_stats(self) -> StorageMetrics | None:
        """Pages and GB/s of the loads and saves since the last call, for SGLang's own metrics. None: they are switched off."""
        if not self._config.enable_storage_metrics:
            return None
        metrics = StorageMetrics()
        for name, values in self._traffic.take().items():
            getattr(metrics, name).extend(values)
        return metrics

    def clear(self) -> None:
        """Refuse: the store is shared with other engines.

        Raises: NotImplementedError: says what to do instead. SGLang logs it; its answer over HTTP says success all the same.
        """
        raise NotImplementedError(
            "a kvstore is shared and is not cleared from an engine; use `kvstore-admin namespace drop` with namespace "
            f"{self._namespace.digest.hex()}"
        )

    def close(self) -> None:
        """End calls under way, and the threads. Calls after it find nothing. Idempotent."""
        self._client.close()
        for lane in (self._lookups, self._reads, self._writes):
            lane.close()

    # What the base class asks for beside it: one page, as flat bytes in the order of the pool's `get_data_page`

    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: object = None) -> Any:
        """Load a page into `target_location`. Returns: it. None: the page did not come, and what is in it is undefined."""

        def load() -> int:
            view = byte_view(target_location, "target_location", writable=True)
            return self._load(_names([key]), [self._pages.flat(view)])

        return target_location if self._safely("load", load) else None

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: object = None) -> list[Any]:
        """Load pages, each into a tensor of its own."""
        return [self.get(key, target) for key, target in zip(keys, target_locations, strict=True)]

    def set(self, key: str, value: object = None, target_location: object = None, target_sizes: object = None) -> bool:
        """Save a page. Returns: whether the store has it."""

        def save() -> int:
            return self._save(_names([key]), [self._pages.flat(byte_view(value, "value"))])

        return self._safely("save", save) == 1

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: object = None,
        target_sizes: object = None,
    ) -> bool:
        """Save pages. Returns: whether the store has all of them."""
        return all(self.set(key, value) for key, value in zip(keys, values, strict=True))

    # How it is done. Each of these returns a number of leading pages.

    def _find(self, names: Sequence[bytes]) -> int:
        if self._steps.refusal("read"):  # what cannot be loaded need not be found
            return 0
        end_s = self._end_s(len(names), LONGEST_S)
        troubles: list[Failure] = []

        def call(page: int, left_s: float) -> bool:
            match = self._look_up(names[page : page + 1], left_s)
            if match.failure is not None:
                troubles.append(match.failure)
            return match.hit_length_blocks == 1

        run = self._lookups.leading(len(names), call, end_s)
        if run.asked < len(names) and not troubles:
            # What lies behind the first miss has not been asked for, and has to count in the store's hit rate all the same.
            self._look_up(names[run.asked :], end_s - time.monotonic())
        return run.pages

    def _look_up(self, names: Sequence[bytes], left_s: float) -> MatchResult:
        chain = Chain(b"".join(names))
        return self._steps.look_up(
            chain, self._settings.traffic_class, patience_s=self._patience_s(len(chain.data), left_s)
        )

    def _load(self, names: Sequence[bytes], pages: Sequence[Page]) -> int:
        def call(page: int, left_s: float) -> bool:
            def fetch(view: memoryview) -> bool:
                return self._steps.load_blocks(Chain(names[page]), [view], b"", budget_s=budget_s).blocks == 1

            budget_s = min(left_s, self._namespace.budget_s(WIDTH * self._namespace.block_bytes))
            return pages[page].fill(fetch)

        return self._move(self._reads, call, self._end_s(len(names), LONGEST_S), len(names), self._traffic.loaded)

    def _save(self, names: Sequence[bytes], pages: Sequence[Page]) -> int:
        def call(page: int, left_s: float) -> bool:
            patience_s = self._patience_s(self._namespace.block_bytes, left_s, WIDTH)
            results = self._steps.put_blocks(
                Chain(names[page]), 0, [pages[page].contents()], self._settings.traffic_class, patience_s=patience_s
            )
            return [result.status for result in results] in ([PutStatus.STORED], [PutStatus.EXISTS])

        return self._move(self._writes, call, self._end_s(len(names)), len(names), self._traffic.saved)

    def _move(
        self, lane: Lane, call: PageCall, end_s: float, count: int, note: Callable[[int, int, float], None]
    ) -> int:
        began_s = time.monotonic()
        pages = lane.leading(count, call, end_s).pages
        note(pages, pages * self._pages.page_bytes, time.monotonic() - began_s)
        return pages

    def _end_s(self, pages: int, longest_s: float = math.inf) -> float:
        """When a batch has to have ended. Finding pages gets the time of moving them: it takes a small part of that."""
        return time.monotonic() + min(longest_s, self._namespace.budget_s(pages * self._namespace.block_bytes))

    def _patience_s(self, size_bytes: int, left_s: float, width: int = 1) -> float:
        """What a call gets beyond its usual time, or short of it: `width` of them share the way, and the batch has its end."""
        return min(left_s, self._namespace.budget_s(width * size_bytes)) - self._namespace.budget_s(size_bytes)

    def _safely(self, step: str, work: Callable[[], int]) -> int:
        """Whatever goes wrong, SGLang's thread goes on."""
        try:
            if weights_in_use() != self._weights:
                raise KVStoreConfigError("IDENTITY_UNKNOWN", _OTHER_WEIGHTS)
            return work()
        except Exception as error:
            self._steps.note(step, failure_of(error))
            return 0


def _names(keys: Sequence[str]) -> list[bytes]:
    """SGLang's keys as prefix hashes. Raises: ValueError: one of them is none."""
    names = [bytes.fromhex(key) for key in keys]
    if any(len(name) != HASH_BYTES for name in names):
        raise ValueError(
            f"a key is no SHA-256: {next(k for k, n in zip(keys, names, strict=True) if len(n) != HASH_BYTES)!r}"
        )
    return names


def _first_true(count: int, of: int) -> list[bool]:
    return [True] * count + [False] * (of - count)
