"""What is counted without walking all tables is what a walk would count."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvstore.census import live_mask
from kvstore.clock import ManualClock
from kvstore.config import TrafficClassConfig
from kvstore.log import format as fmt
from kvstore.log.segment import Segment
from kvstore.types import EvictSelection, Usage
from stores import chain_of, open_store, put, spec

CLASSES = {"short": TrafficClassConfig(ttl_s=50), "long": TrafficClassConfig(ttl_s=500)}


@pytest.fixture
def clock():
    return ManualClock()


def walked(store):
    """Blocks and bytes by namespace id, counted from the tables themselves."""
    total: dict[int, list[int]] = {}
    for segment in store._segments.all():
        live = live_mask(segment, store._rules, store._clock.now_s())
        for namespace_id, length in zip(segment.namespace_ids[live], segment.lengths[live], strict=True):
            usage = total.setdefault(int(namespace_id), [0, 0])
            usage[0] += 1
            usage[1] += int(length)
    return {namespace_id: tuple(usage) for namespace_id, usage in total.items()}


def counted(store):
    return {
        namespace.namespace_id: (usage.blocks, usage.bytes) for namespace, usage in store.namespaces() if usage.blocks
    }


def test_the_counts_are_a_walks_after_everything_that_can_happen(tmp_path, clock):
    rng = random.Random(5)
    store = open_store(tmp_path, clock, capacity=2 << 20, traffic_classes=CLASSES)
    namespaces = [store.register_namespace(spec(size, tenant=f"t{size}")) for size in (100, 4096, 5000)]
    for step in range(300):
        namespace = rng.choice(namespaces)
        chain = chain_of(namespace, rng.randrange(12), 8, shared_blocks=2)
        action = rng.randrange(8)
        if action < 3:
            put(store, namespace, chain, traffic_class=rng.choice(["short", "long"]))
        elif action == 3:
            store.match(namespace, chain, rng.choice(["short", "long"]))
        elif action == 4:
            store.delete(namespace, chain, rng.randrange(4), 4)
        elif action == 5:
            store.evict(EvictSelection(older_than_s=rng.choice([10, 60, 200])), dry_run=False)
        elif action == 6:
            store.set_ttl("short", rng.choice([20, 50, 90]))
        else:
            clock.advance(rng.choice([1, 7, 30, 60]))
        if step == 200:
            store.drop_namespace(namespaces.pop(), dry_run=False)
        assert counted(store) == walked(store), step
        assert store.status().live.blocks == sum(blocks for blocks, _ in walked(store).values())
    store.close()


def test_counting_again_reads_no_table_until_something_ends(tmp_path, clock, monkeypatch):
    store = open_store(tmp_path, clock, traffic_classes=CLASSES)
    namespace = store.register_namespace(spec())
    put(store, namespace, chain_of(namespace, 1, 30), traffic_class="long")
    store.status()
    looks = []
    uses = Segment.uses.fget
    monkeypatch.setattr(Segment, "uses", property(lambda segment: looks.append(segment.segment_id) or uses(segment)))
    clock.advance(400)
    assert store.status().live == Usage(30, 30 * 512)
    store.namespaces()
    assert looks == []
    clock.advance(101)
    assert store.status().live.blocks == 0
    assert looks
    store.close()


def test_padding_is_told_apart_from_bytes(tmp_path, clock):
    store = open_store(tmp_path, clock)
    namespace = store.register_namespace(spec(5000))
    put(store, namespace, chain_of(namespace, 1, 3))
    ((_, usage),) = store.namespaces()
    assert usage == Usage(3, 15_000, 3 * 8192)
    store.close()


def test_a_clean_start_reads_no_rows(tmp_path, clock, monkeypatch):
    store = open_store(tmp_path, clock)
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 20)
    put(store, namespace, chain)
    store.close()
    reads = []
    monkeypatch.setattr(Segment, "read_rows", lambda *_: reads.append(1))
    store = open_store(tmp_path, clock)
    assert reads == []
    monkeypatch.undo()
    assert store.status().live == Usage(20, 20 * 512)
    segment = store._segments.all()[0]
    assert segment.slot_count == 20
    assert segment.end_bytes == segment.layout.payload_offset + 20 * 4096
    assert store.match(namespace, chain).hit_length_blocks == 20
    store.close()


def test_what_use_rows_repeat_is_mended_when_rows_have_to_be_read(tmp_path, clock):
    """After power loss a row may be there and its use row's page not: it is counted as what the row says, and is dead."""
    store = open_store(tmp_path, clock)
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 6)
    put(store, namespace, chain)
    path = store._segments.all()[0].path
    store.close()
    with path.open("r+b") as file:
        file.seek(fmt.HEADER_BYTES + 2 * fmt.USE_BYTES)
        file.write(bytes(2 * fmt.USE_BYTES))
    (tmp_path / "index" / "data.mdb").unlink()
    store = open_store(tmp_path, clock)
    segment = store._segments.all()[0]
    assert np.array_equal(segment.namespace_ids, [namespace.namespace_id] * 6)
    assert np.array_equal(segment.lengths, [512] * 6)
    assert store.status().live.blocks == 4
    assert store.match(namespace, chain).hit_length_blocks == 2
    store.close()


def test_a_seal_is_made_anew_when_rows_have_to_be_read(tmp_path, clock):
    """Power loss took the last row and left its use row and the seal: the next start but one trusts the seal again."""
    store = open_store(tmp_path, clock)
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 5)
    put(store, namespace, chain)
    segment = store._segments.all()[0]
    store.close()
    with segment.path.open("r+b") as file:
        file.seek(segment.layout.row_offset(4))
        file.write(bytes(16))
    (tmp_path / "index" / "data.mdb").unlink()
    for _ in range(2):
        store = open_store(tmp_path, clock)
        assert store._segments.all()[0].slot_count == 4
        assert store.status().live.blocks == 4
        assert store.invariants().violations == ()
        store.close()
