"""Small real stores for tests: tiny capacities, so that what is rare in production is common here."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import numpy as np

from kvstore.clock import ManualClock
from kvstore.config import DEFAULT_TRAFFIC_CLASSES, StoreConfig
from kvstore.log.streams import Stream
from kvstore.store import LocalStore
from kvstore.types import PutBlock
from kvstore_api.chain import Chain
from kvstore_api.checksum import block_checksum
from kvstore_api.namespace import NamespaceSpec
from kvstore_api.results import PutResult, PutStatus
from kvstore_client.hashing import prefix_hashes, prefix_seed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from kvstore.config import TenantConfig, TrafficClassConfig
    from kvstore.log.device import Device
    from kvstore.types import Namespace

BLOCK_BYTES = 512


def open_store(
    path: Path,
    clock: ManualClock | None = None,
    *,
    capacity: int = 4 << 20,
    device: Device | None = None,
    traffic_classes: Mapping[str, TrafficClassConfig] = DEFAULT_TRAFFIC_CLASSES,
    tenants: Mapping[str, TenantConfig] | None = None,
    tick_s: float | None = 1.0,
    **config: object,
) -> LocalStore:
    return LocalStore.open(
        path,
        StoreConfig(capacity=capacity, **config),
        traffic_classes,
        clock or ManualClock(),
        tenants=tenants,
        device=device,
        tick_s=tick_s,
    )


def spec(block_bytes: int = BLOCK_BYTES, **changes: object) -> NamespaceSpec:
    fields: dict[str, object] = {
        "model": "m",
        "revision": "r1",
        "engine": "test",
        "layout": "flat-1",
        "kv_dtype": "bfloat16",
        "block_bytes": block_bytes,
    }
    return NamespaceSpec(**{**fields, **changes})


def chain_of(namespace: Namespace, conversation: int, block_count: int, shared_blocks: int = 0) -> Chain:
    """A conversation's chain; conversations share their first `shared_blocks` blocks."""
    tokens = np.arange(block_count * 128)
    tokens[shared_blocks * 128 :] += 1_000_000 * (conversation + 1)
    return prefix_hashes(prefix_seed(namespace.digest), tokens)


def payload(prefix_hash: bytes, size: int = BLOCK_BYTES) -> bytes:
    """Bytes that belong to this hash and no other."""
    return (prefix_hash * (size // 32 + 1))[:size]


def put_block(chain: Chain, block: int, data: bytes | None = None) -> PutBlock:
    data = payload(chain[block]) if data is None else data
    return PutBlock(block, data, block_checksum(data, chain[block]))


def put(
    store: LocalStore, namespace: Namespace, chain: Chain, blocks: Sequence[int] | None = None, traffic_class: str = ""
) -> list[PutResult]:
    size = namespace.spec.block_bytes
    wanted = range(len(chain)) if blocks is None else blocks
    items = [put_block(chain, block, payload(chain[block], size)) for block in wanted]
    return store.submit_put(namespace, chain, items, traffic_class).result(timeout=60)


def get(
    store: LocalStore, namespace: Namespace, chain: Chain, first: int = 0, count: int | None = None, lease: bytes = b""
) -> tuple[dict[int, bytes], dict[int, str]]:
    """Blocks found and misses, by position."""
    size = namespace.spec.block_bytes
    found: dict[int, bytearray] = {}
    misses: dict[int, str] = {}
    for frame in store.read(namespace, chain, first, len(chain) - first if count is None else count, lease):
        data = b"".join(bytes(part) for part in frame.parts)
        assert len(data) == frame.size_bytes
        for index, block in enumerate(frame.blocks):
            found.setdefault(block, bytearray())
            found[block] += data if size > 1 << 20 else data[index * size : (index + 1) * size]
        misses.update({miss.block: miss.reason for miss in frame.misses})
    return {block: bytes(data) for block, data in found.items()}, misses


def assert_whole(store: LocalStore, namespace: Namespace, chain: Chain) -> None:
    """Every block of the chain is there and byte-equal."""
    found, misses = get(store, namespace, chain)
    assert misses == {}
    assert found == {block: payload(chain[block], namespace.spec.block_bytes) for block in range(len(chain))}


def du_bytes(path: Path) -> int:
    return int(subprocess.run(["du", "-s", "-B1", path], capture_output=True, check=True).stdout.split()[0])


def tree_bytes(path: Path) -> int:
    """The same without starting a process, for tests that look after each step."""
    return sum(entry.lstat().st_blocks * 512 for entry in (path, *path.rglob("*")))


def seal(store: LocalStore, class_id: int = 1) -> None:
    """What is put from now on goes to another segment."""
    store._on_writer(lambda: store._writer.seal(Stream(class_id)))


def put_in_segments(store: LocalStore, namespace: Namespace, chains: Iterable[Chain]) -> None:
    """Each chain in a segment of its own."""
    for chain in chains:
        put(store, namespace, chain)
        seal(store)


def fill_up(store: LocalStore, namespace: Namespace, clock: ManualClock, spare_bytes: int = 100_000) -> list[Chain]:
    """Chains of eight blocks, a second apart, until the next ones need room."""
    chains: list[Chain] = []
    while store._reclaimer.room_bytes() > spare_bytes:
        chains.append(chain_of(namespace, len(chains), 8))
        assert {result.status for result in put(store, namespace, chains[-1])} == {PutStatus.STORED}
        clock.advance(1)
    return chains


def assert_stays_deleted(store: LocalStore, path: Path, clock: ManualClock, namespace: Namespace, chain: Chain) -> None:
    """All of the chain can be deleted, and none of it is back after the index was rebuilt. The store is closed by it."""
    assert store.delete(namespace, chain, 0, len(chain)) == len(chain)
    store.close()
    shutil.rmtree(path / "index")
    store = open_store(path, clock, capacity=store.capacity_bytes)
    assert store.match(namespace, chain).hit_length_blocks == 0, "a deleted block is back"
    assert get(store, namespace, chain)[0] == {}
    store.close()
