"""A tiny store under constant pressure for a long time: its books have to stay right when the cache is always full."""

from __future__ import annotations

import random

import pytest

from kvstore.census import expired_mask
from kvstore.clock import ManualClock
from kvstore.config import TrafficClassConfig
from kvstore_api.results import PutStatus
from stores import chain_of, du_bytes, get, open_store, payload, put, spec

CAPACITY = 640 << 10  # room for about 64 blocks
CLASSES = {"short": TrafficClassConfig(ttl_s=30), "long": TrafficClassConfig(ttl_s=3_000)}
CHAIN_BLOCKS = 12


def run(tmp_path, operations: int, check_every: int) -> None:
    """Puts with duplicates in a batch, matches, gets and deletes, on 602 blocks where about 64 fit: each put evicts."""
    seed = 17
    rng = random.Random(seed)
    clock = ManualClock()
    store = open_store(tmp_path, clock, capacity=CAPACITY, segment_size=32 << 10, traffic_classes=CLASSES)
    namespace = store.register_namespace(spec(4096))
    chains = [chain_of(namespace, conversation, CHAIN_BLOCKS, shared_blocks=2) for conversation in range(60)]
    stored = 0
    for operation in range(operations):
        chain = rng.choice(chains)
        clock.advance(rng.choice([0, 0, 1, 5]))
        doing = rng.random()
        if doing < 0.5:
            blocks = rng.sample(range(CHAIN_BLOCKS), rng.randrange(1, CHAIN_BLOCKS))
            results = put(store, namespace, chain, blocks + blocks[:1], rng.choice([*CLASSES]))
            assert all(result.status is not PutStatus.REJECTED or result.reason == "STORE_FULL" for result in results)
            assert results[0].status is not PutStatus.STORED or results[-1].status is PutStatus.EXISTS
            stored += sum(result.status is PutStatus.STORED for result in results)
        elif doing < 0.55:
            store.delete(namespace, chain, rng.randrange(1, CHAIN_BLOCKS), 1)
        else:
            match = store.match(namespace, chain, lease_s=0.5)
            found, misses = get(store, namespace, chain, lease=match.lease)
            assert not [block for block in misses if block < match.hit_length_blocks]
            assert all(data == payload(chain[block], 4096) for block, data in found.items())
        if operation % check_every == 0:
            check_books(store, tmp_path, stored, f"operation {operation} of seed {seed}")
    assert store.counters.snapshot()["blocks_evicted"] > operations / 4
    store.close()


def check_books(store, path, stored: int, when: str) -> None:
    # What an engine that checks itself says belongs here, too.
    if hasattr(store, "invariants"):
        store.invariants()
    status, counters = store.status(), store.counters.snapshot()
    assert status.used_bytes == du_bytes(path) <= CAPACITY, when
    assert counters["blocks_stored"] == stored, when
    # A block that has expired is neither alive nor counted as expired until its segment is reclaimed or it is put again.
    waiting = sum(
        int(expired_mask(segment, store._rules, store._clock.now_s()).sum()) for segment in store._segments.all()
    )
    gone = counters["blocks_evicted"] + counters["blocks_expired"] + counters["blocks_deleted"] + waiting
    assert stored - gone == status.live.blocks, when


def test_the_books_stay_right_under_pressure(tmp_path):
    run(tmp_path, 3_000, 100)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_the_books_stay_right_under_pressure_for_long(tmp_path):
    run(tmp_path, 1_000_000, 1_000)
