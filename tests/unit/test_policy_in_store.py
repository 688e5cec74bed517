"""What a running store tells the policy of its blocks, and that it goes by it: over thousands of segments too."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.clock import ManualClock
from kvstore.config import DEFAULT_TRAFFIC_CLASSES, TenantConfig, TrafficClassConfig
from kvstore.dropped import tags_of
from kvstore.log.segment import uses_seen
from kvstore.types import EvictSelection
from kvstore.victims import TICKS_PER_COMPACTION
from kvstore_api.results import PutStatus
from stores import chain_of, open_store, put, spec

PAGE = 4096


@pytest.fixture
def clock():
    return ManualClock()


def out_of_reach(store, chain):
    """Blocks of the chain that the policy holds for orphans."""
    found, own = set(), {prefix_hash: block for block, prefix_hash in enumerate(chain)}

    def look():
        for segment in store._segments.all():
            live = store._live_mask(segment)
            lost = store._valuation.lost(segment.tags[: len(live)], live, store._clock.now_s())
            rows = segment.read_rows(0, segment.slot_count)
            found.update(own[row["prefix_hash"].tobytes()] for row in rows[lost])

    store._on_writer(look)
    return found


def intervals(store):
    """Of all blocks so far: reuses, those cut off, those that wait."""
    counted = []

    def count():
        store._reclaimer.tick(store._writer)
        valuation = store._valuation
        valuation.count_uses()
        waiting, _ = valuation._open_intervals(store._reclaimer._use_tables(), store._clock.now_s())
        histograms = valuation._histograms
        counted.extend(table.sum() for table in (histograms._reused, histograms._cut_off, waiting))

    store._on_writer(count)
    return counted


@pytest.mark.parametrize("how", ["delete", "evict", "limit"])
def test_what_somebody_takes_out_of_a_chain_leaves_orphans_until_it_is_back(tmp_path, clock, how):
    classes = {"agent": TrafficClassConfig(ttl_s=100_000, limit=4 * PAGE / (4 << 20))}
    store = open_store(tmp_path, clock, traffic_classes={**DEFAULT_TRAFFIC_CLASSES, **classes}, tick_s=None)
    namespace = store.register_namespace(spec(PAGE))
    chain = chain_of(namespace, 1, 10)
    put(store, namespace, chain, [0], "agent")
    put(store, namespace, chain, range(1, 10), "chatbot")
    assert out_of_reach(store, chain) == set()
    if how == "delete":
        store.delete(namespace, chain, 0, 1)
    elif how == "evict":
        assert store.evict(EvictSelection(traffic_class="agent"), dry_run=False).blocks == 1
    else:
        clock.advance(100)
        assert put(store, namespace, chain_of(namespace, 2, 4), traffic_class="agent")[3].status is PutStatus.REJECTED
        store.tick()
        assert store.counters.snapshot()["blocks_evicted"] == 1
    assert out_of_reach(store, chain) == set(range(1, 10))
    put(store, namespace, chain, [0], "chatbot")
    assert out_of_reach(store, chain) == set()
    store.close()


def test_uses_within_the_second_of_storing_are_a_part_of_it_whichever_class_they_are_by(tmp_path, clock):
    store = open_store(tmp_path, clock)
    namespace = store.register_namespace(spec(PAGE))
    chain = chain_of(namespace, 1, 3)
    put(store, namespace, chain, traffic_class="agent")
    (segment,) = store._segments.all()
    for traffic_class in ("agent", "chatbot"):
        store.match(namespace, chain, traffic_class)
    assert uses_seen(segment.uses[:3]).tolist() == [0, 0, 0]
    assert intervals(store)[0] == 0
    for seen in (1, 2, 2):
        clock.advance(1)
        store.match(namespace, chain, "chatbot")
        store.match(namespace, chain, "agent")
        assert uses_seen(segment.uses[:3]).tolist() == [seen] * 3
    assert intervals(store)[0] == 9
    store.close()


def test_what_a_quota_refuses_is_remembered_on(tmp_path, clock):
    store = open_store(tmp_path, clock, tenants={"none": TenantConfig(limit=1e-9)})
    namespace = store.register_namespace(spec(PAGE, tenant="none"))
    tags = tags_of(chain_of(namespace, 1, 3).data)
    store._on_writer(lambda: store._valuation.withdraw(tags, clock.now_s()))
    results = put(store, namespace, chain_of(namespace, 1, 3))
    assert {result.status for result in results} == {PutStatus.REJECTED}
    assert store._valuation._dropped.holds(tags).all()
    store.close()


@pytest.mark.parametrize("lease_s", [0, 10])
def test_every_interval_that_began_waits_or_has_ended(tmp_path, clock, lease_s):
    """However blocks go: else time at risk turns negative, and the policy believes that everything is used at once."""
    classes = {"long": TrafficClassConfig(ttl_s=10_000), "short": TrafficClassConfig(ttl_s=30)}
    store = open_store(
        tmp_path, clock, capacity=2 << 20, segment_size=96 << 10, traffic_classes=classes, tick_s=None, lease_s=lease_s
    )
    kept, dropped = (store.register_namespace(spec(PAGE, model=model)) for model in ("kept", "dropped"))
    rng = np.random.default_rng(1)
    store.tick()
    for conversation in range(300):
        namespace = dropped if conversation < 40 and conversation % 4 else kept
        chain = chain_of(namespace, conversation, int(rng.integers(2, 30)))
        traffic_class = str(rng.choice(["long", "short"]))
        clock.advance(3)
        put(store, namespace, chain, traffic_class=traffic_class)
        if conversation % 3 == 0:
            clock.advance(2)
            store.match(namespace, chain, traffic_class)
        if conversation % 7 == 0:
            store.delete(namespace, chain, 0, 2)
        if conversation == 40:
            store.drop_namespace(dropped, dry_run=False)
        if conversation == 150:
            store.evict(EvictSelection(older_than_s=60), dry_run=False)
        reused, cut_off, waiting = intervals(store)
        # A use ends one and begins one; putting a block begins one; no block that was evicted came back.
        assert cut_off + waiting == store.counters.snapshot()["blocks_stored"]
    counters = store.counters.snapshot()
    assert min(counters[name] for name in ("blocks_evicted", "blocks_expired", "blocks_moved", "blocks_deleted")) > 50
    assert reused > 500
    store.close()


def test_a_share_holds_over_thousands_of_mixed_segments(tmp_path, clock):
    capacity = 1 << 20
    store = open_store(
        tmp_path, clock, capacity=capacity, segment_size=64 << 10, tick_s=None, tenants={"vip": TenantConfig(share=0.6)}
    )
    vip = store.register_namespace(spec(PAGE, tenant="vip"))
    crowd = store.register_namespace(spec(PAGE, tenant="crowd"))
    conversation, kept = 0, int(0.4 * capacity) // PAGE // 4
    while store.counters.snapshot()["segments_reclaimed"] < 1200:
        put(store, vip, chain_of(vip, conversation, 4))
        if conversation >= kept:
            assert store.delete(vip, chain_of(vip, conversation - kept, 4), 0, 4) == 4, "it was still there"
        put(store, crowd, chain_of(crowd, conversation, 3))
        conversation += 1
        clock.advance(1)
        store.tick()
    assert store.counters.snapshot()["blocks_moved"] > 500, "they lie among others"
    assert store._valuation.threshold < 0.05, "what a share protects is no sign that too much is moved of others"
    for _ in range(TICKS_PER_COMPACTION):
        clock.advance(20)
        store.tick()
    assert len(store._reclaimer._prices._known) <= len(store._segments.all())
    assert store.invariants().violations == ()
    store.close()
