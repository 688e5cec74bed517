"""A tiny store under constant pressure for a long time: its books have to stay right when the cache is always full."""

from __future__ import annotations

import random

import pytest

from kvstore.clock import ManualClock
from kvstore.types import PutStatus
from stores import chain_of, du_bytes, get, open_store, payload, put, spec


def run(tmp_path, operations: int, check_every: int) -> None:
    rng = random.Random(17)
    clock = ManualClock()
    store = open_store(tmp_path, clock, capacity=1 << 20)
    namespace = store.register_namespace(spec(4096))
    chains = [chain_of(namespace, conversation, 12, shared_blocks=2) for conversation in range(60)]
    for operation in range(operations):
        chain = rng.choice(chains)
        clock.advance(rng.choice([0, 0, 1, 5]))
        if rng.random() < 0.5:
            blocks = rng.sample(range(12), rng.randrange(1, 12))
            results = put(store, namespace, chain, blocks + blocks[:1], rng.choice(["agent", "chatbot"]))
            assert all(result.status is not PutStatus.REJECTED or result.reason == "STORE_FULL" for result in results)
        else:
            match = store.match(namespace, chain, lease_s=0.5)
            found, misses = get(store, namespace, chain, lease=match.lease)
            assert not [block for block in misses if block < match.hit_length_blocks]
            assert all(data == payload(chain[block], 4096) for block, data in found.items())
        if operation % check_every == 0:
            status, counters = store.status(), store.counters.snapshot()
            assert status.used_bytes == du_bytes(tmp_path) <= 1 << 20
            gone = counters["blocks_evicted"] + counters["blocks_expired"] + counters["blocks_deleted"]
            assert counters["blocks_stored"] - gone == status.live.blocks
    store.close()


def test_the_books_stay_right_under_pressure(tmp_path):
    run(tmp_path, 1_500, 100)


@pytest.mark.soak
def test_the_books_stay_right_under_pressure_for_long(tmp_path):
    run(tmp_path, 300_000, 1_000)
