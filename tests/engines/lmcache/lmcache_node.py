"""LMCache's real storage manager with the plug as its second level, driven as LMCache's server drives it for an engine.

As a program it does what one engine does with one prompt: `lmcache_node.py '{"params": …, "tokens": …, "keys": …}'`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import EvictionConfig, L1ManagerConfig, L1MemoryManagerConfig, StorageManagerConfig
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.multiprocess.token_hasher import TokenHasher

from kvstore_engine.lmcache import KVStoreL2Adapter

MODEL = "tiny/llama"
CHUNK = 256
WAIT_S = 60


@dataclass(frozen=True)
class Engine:
    """What an engine says of itself to LMCache."""

    model: str = MODEL
    kv_rank: int = ObjectKey.ComputeKVRank(1, 0, 1, 0)
    salt: str = ""
    dtype: str = "bfloat16"
    chunk: int = CHUNK
    group: int = 0
    shape: tuple[int, ...] = field(default=())

    @property
    def layout(self) -> MemoryLayoutDesc:
        shape = self.shape or (2, 2, self.chunk, 16)
        return MemoryLayoutDesc([torch.Size(shape)], [getattr(torch, self.dtype)])

    def keys(self, tokens: Sequence[int]) -> list[ObjectKey]:
        """Of all full chunks, hashed by LMCache."""
        hashes = TokenHasher(self.chunk, "blake3").compute_chunk_hashes(list(tokens))
        return [ObjectKey(chunk_hash, self.model, self.kv_rank, self.group, self.salt) for chunk_hash in hashes]


def kv_bytes(key: ObjectKey, size_bytes: int) -> torch.Tensor:
    """The KV of a chunk, which its key decides: no two chunks' are equal."""
    generator = torch.Generator().manual_seed(int.from_bytes(key.chunk_hash[:7], "big") + key.kv_rank)
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)


class Node:
    """A storage manager, and the calls that an engine causes."""

    def __init__(self, params: dict[str, object], eviction: EvictionConfig | None = None) -> None:
        plug = {"module_path": "kvstore_engine.lmcache", "class_name": "KVStoreL2Adapter", "adapter_params": params}
        adapter = PluginL2AdapterConfig.from_dict(plug)
        adapter.eviction_config = eviction
        memory = L1MemoryManagerConfig(size_in_bytes=64 << 20, use_lazy=False, shm_name="")
        config = StorageManagerConfig(
            L1ManagerConfig(memory),
            EvictionConfig("noop"),
            L2AdaptersConfig([adapter]),
        )
        self.manager = StorageManager(config)
        (self.adapter,) = [adapter for _, adapter in self.manager.l2_adapters()]
        assert isinstance(self.adapter, KVStoreL2Adapter)

    def save(self, engine: Engine, keys: Sequence[ObjectKey], content=kv_bytes) -> int:
        """Write chunks to LMCache's memory, and wait until it has offered them to the plug. Returns: how many were kept."""
        before = self.adapter.report_status()["store"]
        objects = self.manager.reserve_write(list(keys), engine.layout)
        assert len(objects) == len(keys)
        for key, memory_object in objects.items():
            memory_object.raw_data[: memory_object.get_size()] = content(key, memory_object.get_size())
        self.manager.finish_write(list(keys))
        return self.wait(lambda: self.adapter.report_status()["store"], before, len(keys))

    def wait(self, counts, before, keys: int) -> int:
        deadline_s = time.monotonic() + WAIT_S
        while counts()["keys"] < before["keys"] + keys:
            assert time.monotonic() < deadline_s, "LMCache did not hear what became of its objects"
            time.sleep(0.005)
        return counts()["good_keys"] - before["good_keys"]

    def prefetch(self, engine: Engine, keys: Sequence[ObjectKey]) -> list[bool]:
        """What LMCache brings into its memory of a request's chunks: each checked byte by byte."""
        row = GroupedObjectKeys(list(keys), engine.group, engine.layout)
        handle = self.manager.submit_prefetch_task(PrefetchTaskSpec([row]))
        assert self.manager.wait_prefetch_status(handle, WAIT_S), "LMCache waits for its second level"
        result = self.manager.query_prefetch_status(handle)
        hits = result.hit_cells[0].get_indices_list()
        loaded = [keys[place] for place in hits]
        if loaded:
            self._check(loaded, result.l1_owners)
        return [place in hits for place in range(len(keys))]

    def _check(self, keys: list[ObjectKey], owners) -> None:
        with self.manager.read_prefetched_results(keys, owners) as objects:
            for key, memory_object in zip(keys, objects, strict=True):
                size_bytes = memory_object.get_size()
                assert torch.equal(memory_object.raw_data[:size_bytes], kv_bytes(key, size_bytes)), "wrong bytes"
        self.manager.finish_read_prefetched(keys, l1_owners=owners)

    def forget(self) -> None:
        """Empty LMCache's own memory, so that what comes next comes from the store."""
        deadline_s = time.monotonic() + WAIT_S
        self.manager.clear()
        while self.manager.get_l1_usage()[0]:  # its store controller lets go of the objects a little later
            assert time.monotonic() < deadline_s, "LMCache keeps objects locked"
            time.sleep(0.005)
            self.manager.clear()


@contextmanager
def running_node(params: dict[str, object]) -> Iterator[Node]:
    """A node that is closed at the end."""
    node = Node(params)
    try:
        yield node
    finally:
        node.manager.close()


def main(request: dict) -> None:
    engine = Engine(**request.get("engine", {}))
    keys = engine.keys(request["tokens"])
    with running_node(request["params"]) as node:
        hits = node.prefetch(engine, keys)
        kept = node.save(engine, keys[hits.count(True) :]) if not all(hits) else 0
    print(json.dumps({"hits": hits.count(True), "kept": kept}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
