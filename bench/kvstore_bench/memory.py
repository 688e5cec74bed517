"""What a stored block costs in the server's memory: many small blocks, so that blocks and not bytes are counted."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from kvstore_bench.processes import Child, Memory, running_store
from kvstore_bench.workload import CALL_BUDGET_S, CHAIN_BLOCKS, VerificationError, namespace_spec, random_chains
from kvstore_client import ClientConfig, KVStoreClient

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore_client import NamespaceHandle

_BLOCK_BYTES = 64
# Put before the first look, so that pools, buffers and libraries that come with the first requests are not counted.
_WARM_UP_BLOCKS_MAX = 8 * CHAIN_BLOCKS
# A slot of 4 KiB per block, and as much again for the index and the segment that is being filled.
_DISK_BYTES_PER_BLOCK = 2 * 4096
_DISK_BYTES_MIN = 512 << 20
_LOOKS = 5
_LOOK_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True)
class MemoryGrowth:
    """What the server's resident memory grew by, per small block stored."""

    blocks: int
    block_bytes: int
    anon_bytes_per_block: float  # its own memory
    file_bytes_per_block: float  # pages of mapped files, which the kernel can take back


def memory_disk_bytes(blocks: int) -> int:
    """Room on disk that `measure_memory` needs."""
    return (blocks + _WARM_UP_BLOCKS_MAX) * _DISK_BYTES_PER_BLOCK + _DISK_BYTES_MIN if blocks else 0


def measure_memory(blocks: int, seed: int, scratch: Path) -> MemoryGrowth:
    """Store `blocks` small blocks on a server of its own.

    Raises: VerificationError: a block was not stored.
    """
    with (
        running_store(scratch, "memory", memory_disk_bytes(blocks)) as store,
        KVStoreClient(ClientConfig(target=store.target)) as client,
    ):
        handle = client.namespace(namespace_spec("memory", _BLOCK_BYTES))
        _store(handle, seed + 1, min(blocks, _WARM_UP_BLOCKS_MAX))
        before = _settled_memory(store)
        _store(handle, seed, blocks)
        after = _settled_memory(store)
    return MemoryGrowth(
        blocks=blocks,
        block_bytes=_BLOCK_BYTES,
        anon_bytes_per_block=(after.anon_bytes - before.anon_bytes) / blocks,
        file_bytes_per_block=(after.file_bytes - before.file_bytes) / blocks,
    )


def _settled_memory(store: Child) -> Memory:
    """The median of a few looks: the server's own walks through its tables come and go."""
    looks = []
    for _ in range(_LOOKS):
        time.sleep(_LOOK_INTERVAL_S)
        looks.append(store.memory())
    return Memory(int(median(look.anon_bytes for look in looks)), int(median(look.file_bytes for look in looks)))


def _store(handle: NamespaceHandle, seed: int, block_count: int) -> None:
    for chain in random_chains(handle, seed, block_count, CHAIN_BLOCKS):
        report = handle.put(chain, chain.data * (_BLOCK_BYTES // 32), budget_s=CALL_BUDGET_S)
        if report.stored != len(chain):
            raise VerificationError(f"put stored {report.stored} of {len(chain)} small blocks: {report.failure}")
