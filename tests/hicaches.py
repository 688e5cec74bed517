"""SGLang's real cache controller and host pools on a CPU, for tests of the plug.

Importing SGLang takes some seconds. It needs torchvision for images alone, whose builds do not import beside a CPU build of torch:
an empty module of that name is enough.
"""

from __future__ import annotations

import importlib.machinery
import json
import sys
import threading
import time
import types
import warnings
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import import_utils

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


class _Empty(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - a module's, not a class's

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _stand_in_for_torchvision() -> None:
    import_utils.is_torchvision_available()  # transformers remembers that it is not there
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional", "torchvision.io"):
        module = _Empty(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules.setdefault(name, module)


_stand_in_for_torchvision()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
    from sglang.srt.mem_cache.hicache_storage import PoolName as PoolName
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry
    from sglang.srt.mem_cache.pool_host import base as host_pools
    from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost as AsymmetricMHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLAHostAllocation as MLAHostAllocation
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost as MLATokenToKVPoolHost
    from sglang.srt.mem_cache.radix_cache import RadixKey as RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str
    from sglang.srt.runtime_context import get_context as get_context
    from sglang.srt.runtime_context import get_parallel

# SGLang makes no pool, however small, where less than 10 GB are free.
host_pools.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0

PAGE = 128
LAYERS = 3
HOST_PAGES = 64


def device_pool(
    kind: str = "mha",
    *,
    dtype: torch.dtype = torch.bfloat16,
    page_size: int = PAGE,
    pages: int = 2,
    heads: int = 2,
    head_dim: int = 16,
    **more: Any,
) -> Any:
    """A small model's KV on the device, which is the CPU. A page's KV has 49,152 bytes; of `kind` "mla" 24,576."""
    common: dict[str, Any] = {"layer_num": LAYERS, "device": "cpu", "enable_memory_saver": False, **more}
    size = page_size * pages
    if kind == "mla":
        return MLATokenToKVPool(size, page_size, dtype, kv_lora_rank=24, qk_rope_head_dim=8, **common)
    return MHATokenToKVPool(size, page_size, dtype, head_num=heads, head_dim=head_dim, **common)


def host_pool(
    device: Any,
    layout: str = "page_first",
    *,
    page_size: int = PAGE,
    pages: int = HOST_PAGES,
    host_class: Any = MHATokenToKVPoolHost,
) -> Any:
    """SGLang's host memory for a device pool, filled with other bytes than any page of a test has."""
    arguments: dict[str, Any] = {
        "device_capacity_tokens": device.size,
        "start_layer": device.start_layer,
        "end_layer": device.end_layer,
        "host_token_capacity": pages * page_size,
    }
    if isinstance(device, MLATokenToKVPool):
        host_class, arguments["target_layer_num"] = MLATokenToKVPoolHost, device.layer_num
    info = device.get_device_pool_infos()[0].buffer_info
    pool = host_class(info, 2.0, 0, page_size, layout, pin_memory=False, **arguments)
    for buffer in [pool.kv_buffer] if isinstance(pool.kv_buffer, torch.Tensor) else pool.kv_buffer:
        buffer.view(torch.uint8).fill_(0xA5)
    return pool


def extra_config(target: str, /, **settings: object) -> dict[str, object]:
    """What an operator writes into --hicache-storage-backend-extra-config. A setting that is None is left out."""
    given = {
        "backend_name": "kvstore",
        "module_path": "kvstore_engine.sglang",
        "class_name": "KVStoreHiCache",
        "interface_v1": 1,
        "target": target,
        "revision": "r1",
        # A machine that also runs the other tests answers late now and then.
        "base_budget_s": 5.0,
        **settings,
    }
    return {key: value for key, value in given.items() if value is not None}


def parse(given: str | dict[str, object]) -> dict[str, object]:
    """What SGLang leaves of an extra configuration for the plug."""
    text = given if isinstance(given, str) else json.dumps(given)
    config, *_ = HybridCacheController.parse_storage_backend_extra_config(text)
    return dict(config)


@contextmanager
def server_arguments(arguments: dict[str, object] | None) -> Iterator[None]:
    """Let SGLang run as its server with these arguments does. None: without a server."""
    if arguments is None:
        yield
        return
    arguments = {"hicache_storage_backend": "dynamic", **arguments}
    with warnings.catch_warnings(), get_context().override_server_args(**arguments):
        warnings.simplefilter("ignore")
        yield


@contextmanager
def controller(
    target: str,
    pool: Any,
    device: Any,
    /,
    *,
    hybrid: bool = False,
    metrics: bool = False,
    tp: tuple[int, int] = (0, 1),
    pp: tuple[int, int] = (0, 1),
    more_pools: Sequence[Any] = (),
    file: Path | None = None,
    **settings: object,
) -> Iterator[Any]:
    """SGLang's cache controller with the plug attached, its threads running; `hybrid` is the one that its server uses.

    The extra configuration is what is in `file`, or made of `settings`; it is read as SGLang reads it.
    """
    given = f"@{file}" if file is not None else json.dumps(extra_config(target, **settings))
    config = parse(given)
    page_size = pool.page_size
    allocator = PagedTokenToKVPoolAllocator(device.size, page_size, device.dtype, "cpu", device, need_sort=False)
    with ExitStack() as stack:
        stack.enter_context(
            get_parallel().override(
                tp_rank=tp[0], tp_size=tp[1], pp_rank=pp[0], pp_size=pp[1], attn_dcp_size=1, attn_dcp_rank=0
            )
        )
        host: Any = pool
        if hybrid:
            entries = [_entry(PoolName.KV, pool, device, anchor=True)]
            host = HostPoolGroup(entries + [_entry(name, pool, device) for name in more_pools])
        made = (HybridCacheController if hybrid else HiCacheController)(
            allocator,
            host,
            page_size,
            None,
            load_cache_event=threading.Event(),
            io_backend="direct",
            storage_backend="dynamic",
            prefetch_threshold=page_size,
            model_name="tiny",
            storage_backend_extra_config=config,
            enable_storage_metrics=metrics,
        )
        try:
            yield made
        finally:
            made.detach_storage_backend()


def _entry(name: Any, pool: Any, device: Any, *, anchor: bool = False) -> Any:
    return PoolEntry(name, pool, device, layer_mapper=lambda layer: layer, is_primary_index_anchor=anchor)


def fill(pool: Any, indices: torch.Tensor, seed: int) -> list[bytes]:
    """Write random bytes into pages of a pool. Returns: the bytes of each."""
    generator = torch.Generator().manual_seed(seed)
    for start in indices[:: pool.page_size].tolist():
        size = pool.get_dummy_flat_data_page().view(torch.uint8).numel()
        page = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        pool.set_from_flat_data_page(start, page.view(pool.dtype))
    return contents(pool, indices)


def contents(pool: Any, indices: torch.Tensor) -> list[bytes]:
    """The bytes of pages as SGLang itself reads them."""
    return [
        pool.get_data_page(start).contiguous().view(torch.uint8).numpy().tobytes()
        for start in indices[:: pool.page_size].tolist()
    ]


def back_up(made: Any, tokens: Any, seed: int) -> tuple[list[str], list[bytes], int]:
    """Let the controller save a prompt's pages. Returns: their names, their bytes, and how many tokens it says are saved."""
    indices = made.mem_pool_host.alloc(len(tokens))
    names, pages = (
        get_storage_hash_str(tokens, None, page_size=made.page_size),
        fill(made.storage_host_pool, indices, seed),
    )
    made.write_storage(indices, tokens, names)
    operation = made.ack_backup_queue.get(timeout=60)
    made.mem_pool_host.free(indices)
    return names, pages, operation.completed_tokens


def prefetch(made: Any, tokens: Any, last_hash: str | None = None) -> tuple[int, list[bytes], float]:
    """Let the controller bring a prompt's pages. Returns: tokens found, bytes of the pages that came, seconds it took."""
    began_s = time.monotonic()
    operation = start_prefetch(made, tokens, last_hash)
    assert made.prefetch_hit_queue.get(timeout=60) is operation
    operation.host_indices = made.mem_pool_host.alloc(len(operation.hash_value) * made.page_size)
    made.prefetch_buffer.put(operation)
    completed = 0
    while not (ack := made.ack_prefetch_queue.get(timeout=60)).completed_req:
        completed = ack.completed_tokens
    took_s = time.monotonic() - began_s
    came = contents(made.storage_host_pool, operation.host_indices[:completed])
    made.mem_pool_host.free(operation.host_indices)
    return operation.storage_hit_count, came, took_s


def start_prefetch(made: Any, tokens: Any, last_hash: str | None = None) -> Any:
    """Let the controller look for a prompt's pages; it puts the operation into `prefetch_hit_queue` when it knows."""
    name: Any = CacheRequestHandle("request", 0) if isinstance(made, HybridCacheController) else "request"
    return made.prefetch(name, tokens, last_hash)
