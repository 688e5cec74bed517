"""Shares and limits of classes and tenants: who goes first, who is told no."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.clock import ManualClock
from kvstore.config import TenantConfig, TrafficClassConfig
from kvstore.worth import PROTECTION, payload_bytes
from kvstore_api.results import PutStatus
from stores import assert_whole, chain_of, du_bytes, get, open_store, payload, put, spec

CAPACITY = 4 << 20
PAGE = 4096


def classes(**quotas):
    return {name: TrafficClassConfig(ttl_s=100_000, **quotas.get(name, {})) for name in ("agent", "chatbot", "handoff")}


@pytest.fixture
def clock():
    return ManualClock()


def blocks_of(share):
    """How many blocks of a page make up a share of the capacity."""
    return int(share * CAPACITY) // PAGE


def statuses(results):
    return [result.status for result in results]


def test_a_put_beyond_a_tenants_limit_is_rejected_and_told_block_by_block(tmp_path, clock):
    share = 10 * PAGE / CAPACITY
    store = open_store(tmp_path, clock, capacity=CAPACITY, tenants={"small": TenantConfig(limit=share)})
    small, other = (store.register_namespace(spec(PAGE, tenant=tenant)) for tenant in ("small", "big"))
    chain = chain_of(small, 1, 100)
    results = put(store, small, chain)
    assert statuses(results) == [PutStatus.STORED] * 10 + [PutStatus.REJECTED] * 90
    assert {result.reason for result in results[10:]} == {"QUOTA_EXCEEDED"}
    assert results[10].detail == (
        "tenant small holds 40960 bytes, with 4096 more it would hold more than tenants.small.limit "
        f"({share:g} of store.capacity, 40960 bytes)"
    )
    found, misses = get(store, small, chain)
    assert found == {block: payload(chain[block], PAGE) for block in range(10)}
    assert len(misses) == 90
    assert store.counters.snapshot()["blocks_rejected"] == 90
    assert set(statuses(put(store, other, chain_of(other, 2, 100)))) == {PutStatus.STORED}
    assert statuses(put(store, small, chain, range(10))) == [PutStatus.EXISTS] * 10
    store.close()


def test_the_limit_of_others_is_each_tenants_own(tmp_path, clock):
    store = open_store(tmp_path, clock, capacity=CAPACITY, tenants={"other": TenantConfig(limit=5 * PAGE / CAPACITY)})
    for tenant in ("a", "b"):
        namespaces = [store.register_namespace(spec(PAGE, tenant=tenant, model=model)) for model in ("m1", "m2")]
        results = [result for ns in namespaces for result in put(store, ns, chain_of(ns, 1, 4))]
        assert statuses(results) == [PutStatus.STORED] * 5 + [PutStatus.REJECTED] * 3
        assert "tenants.other.limit" in results[-1].detail
    store.close()


def test_a_class_has_a_limit_too(tmp_path, clock):
    store = open_store(
        tmp_path, clock, capacity=CAPACITY, traffic_classes=classes(chatbot={"limit": 7 * PAGE / CAPACITY})
    )
    namespace = store.register_namespace(spec(PAGE))
    results = put(store, namespace, chain_of(namespace, 1, 9), traffic_class="chatbot")
    assert statuses(results) == [PutStatus.STORED] * 7 + [PutStatus.REJECTED] * 2
    assert "traffic class chatbot holds" in results[-1].detail
    assert "traffic_classes.chatbot.limit" in results[-1].detail
    assert set(statuses(put(store, namespace, chain_of(namespace, 2, 9)))) == {PutStatus.STORED}
    store.close()


@pytest.mark.parametrize("how", ["delete", "expire", "drop", "restart"])
def test_what_ends_no_longer_counts(tmp_path, clock, how):
    tenants = {"t": TenantConfig(limit=10 * PAGE / CAPACITY)}
    store = open_store(tmp_path, clock, capacity=CAPACITY, tenants=tenants)
    namespace = store.register_namespace(spec(PAGE, tenant="t"))
    chain = chain_of(namespace, 1, 10)
    assert set(statuses(put(store, namespace, chain))) == {PutStatus.STORED}
    assert statuses(put(store, namespace, chain_of(namespace, 2, 1))) == [PutStatus.REJECTED]
    if how == "delete":
        store.delete(namespace, chain, 0, 10)
    elif how == "expire":
        clock.advance(3 * 86_400)
    elif how == "drop":
        store.drop_namespace(namespace, dry_run=False)
        namespace = store.register_namespace(namespace.spec)
    else:  # what is there goes on counting
        store.close()
        store = open_store(tmp_path, clock, capacity=CAPACITY, tenants=tenants)
        assert statuses(put(store, namespace, chain_of(namespace, 2, 1))) == [PutStatus.REJECTED]
        store.delete(namespace, chain, 0, 10)
    assert set(statuses(put(store, namespace, chain_of(namespace, 3, 10)))) == {PutStatus.STORED}
    store.close()


def test_who_knocks_at_a_limit_loses_its_own_coldest_blocks_but_no_fresh_ones(tmp_path, clock):
    tenants = {"t": TenantConfig(limit=32 * PAGE / CAPACITY)}
    store = open_store(tmp_path, clock, capacity=CAPACITY, tenants=tenants)
    namespace = store.register_namespace(spec(PAGE, tenant="t"))
    bystander = store.register_namespace(spec(PAGE, tenant="u"))
    others = chain_of(bystander, 1, 8)
    put(store, bystander, others)
    cold, warm = chain_of(namespace, 1, 16), chain_of(namespace, 2, 16)
    put(store, namespace, cold)
    clock.advance(100)
    put(store, namespace, warm)
    new = chain_of(namespace, 3, 2)
    assert statuses(put(store, namespace, new)) == [PutStatus.REJECTED] * 2
    store.sweep()
    assert store.match(namespace, cold, peek=True).hit_length_blocks == 14  # the deepest of the coldest chain went
    assert statuses(put(store, namespace, new)) == [PutStatus.STORED] * 2
    store.sweep()
    assert store.match(namespace, cold, peek=True).hit_length_blocks == 14  # nobody knocks any more
    assert_whole(store, namespace, warm)
    assert_whole(store, bystander, others)
    store.match(namespace, cold)
    assert statuses(put(store, namespace, chain_of(namespace, 4, 2))) == [PutStatus.REJECTED] * 2
    store.sweep()
    assert store.match(namespace, warm, peek=True).hit_length_blocks == 16  # all used within the last minute
    assert store.counters.snapshot()["blocks_evicted"] == 2
    store.close()


@pytest.mark.parametrize("limits", [{}, {"unrelated": TenantConfig(limit=0.9)}, {"other": TenantConfig(limit=0.9)}])
def test_a_limit_of_somebody_else_is_no_limit_for_who_has_none(tmp_path, clock, limits):
    """A put larger than what is free is stored by evicting what is coldest, as if nobody had a limit; shares stay whole."""
    tenants = {"vip": TenantConfig(share=0.3), "b": TenantConfig(), **limits}
    store = open_store(tmp_path, clock, capacity=CAPACITY, tenants=tenants)
    vip, b = (store.register_namespace(spec(PAGE, tenant=tenant)) for tenant in ("vip", "b"))
    old = chain_of(vip, 1, blocks_of(0.2))
    put(store, vip, old)
    clock.advance(100)
    put(store, b, chain_of(b, 1, blocks_of(0.6)))
    clock.advance(100)
    for conversation in range(2, 5):
        assert set(statuses(put(store, b, chain_of(b, conversation, blocks_of(0.3))))) == {PutStatus.STORED}
        clock.advance(100)
        store.sweep()
    assert_whole(store, vip, old)
    store.close()


def press(store, clock, namespace, traffic_class, count):
    for conversation in range(count):
        put(store, namespace, chain_of(namespace, 1000 + conversation, 12), traffic_class=traffic_class)
        clock.advance(1)


def test_a_class_within_its_share_is_evicted_after_all_others(tmp_path, clock):
    store = open_store(tmp_path, clock, capacity=CAPACITY, traffic_classes=classes(chatbot={"share": 0.25}))
    namespace = store.register_namespace(spec(PAGE))
    chats = [chain_of(namespace, conversation, 10) for conversation in range(blocks_of(0.2) // 10)]
    for chain in chats:
        put(store, namespace, chain, traffic_class="chatbot")
    press(store, clock, namespace, "agent", 300)
    assert store.counters.snapshot()["blocks_evicted"] > 1000
    for chain in chats:  # by far the coldest
        assert_whole(store, namespace, chain)
    assert du_bytes(tmp_path) <= CAPACITY
    store.close()


def test_beyond_its_share_a_class_is_like_any_other(tmp_path, clock):
    store = open_store(tmp_path, clock, capacity=CAPACITY, traffic_classes=classes(chatbot={"share": 0.05}))
    namespace = store.register_namespace(spec(PAGE))
    chats = [chain_of(namespace, conversation, 10) for conversation in range(blocks_of(0.4) // 10)]
    for chain in chats:
        put(store, namespace, chain, traffic_class="chatbot")
        clock.advance(1)
    press(store, clock, namespace, "agent", 300)
    left = sum(store.match(namespace, chain, peek=True).hit_length_blocks for chain in chats)
    assert left <= blocks_of(0.06)
    assert left >= blocks_of(0.01)  # and down there it is its own
    store.close()


def test_a_tenant_within_its_share_is_evicted_after_all_others_also_from_mixed_segments(tmp_path, clock):
    store = open_store(tmp_path, clock, capacity=CAPACITY, tenants={"vip": TenantConfig(share=0.3)})
    vip = store.register_namespace(spec(PAGE, tenant="vip"))
    crowd = store.register_namespace(spec(PAGE, tenant="crowd"))
    chains = [chain_of(vip, conversation, 4) for conversation in range(blocks_of(0.15) // 4)]
    for conversation, chain in enumerate(chains):
        put(store, vip, chain)
        put(store, crowd, chain_of(crowd, conversation, 8))
    press(store, clock, crowd, "", 300)
    for chain in chains:
        assert_whole(store, vip, chain)
    store.close()


def test_what_is_within_a_share_is_moved_out_of_a_segment_that_goes(tmp_path, clock):
    store = open_store(tmp_path, clock, capacity=CAPACITY, tenants={"vip": TenantConfig(share=0.3)})
    vip, crowd = (store.register_namespace(spec(PAGE, tenant=tenant)) for tenant in ("vip", "crowd"))
    put(store, vip, chain_of(vip, 1, 3))
    clock.advance(50)
    put(store, crowd, chain_of(crowd, 1, 5))
    store.match(crowd, chain_of(crowd, 1, 2))
    (segment,) = store._segments.all()
    live, valuation = store._live_mask(segment), store._valuation
    protected = store._quotas.protected_namespaces(segment, [vip.namespace_id, crowd.namespace_id])
    assert protected == [vip.namespace_id]
    worth = valuation.worth(segment.uses[: len(live)], clock.now_s())
    valuation.begin_threshold([worth / 100])
    taken = np.full(len(live), PAGE)
    protection = PROTECTION * np.isin(segment.namespace_ids, protected)
    verdict = valuation.judge(worth + protection, live, taken, payload_bytes(segment))
    # Three quarters of the segment: the protected first, though colder.
    assert verdict.keep.tolist() == [True] * 6 + [False] * 2
    verdict = valuation.judge(worth, live, taken, payload_bytes(segment))
    assert verdict.keep.tolist() == [True] + [False] * 2 + [True] * 5
    store.close()


def test_without_shares_the_coldest_goes_whoever_owns_it(tmp_path, clock):
    store = open_store(tmp_path, clock, capacity=CAPACITY, traffic_classes=classes())
    namespace = store.register_namespace(spec(PAGE))
    chain = chain_of(namespace, 1, 10)
    put(store, namespace, chain, traffic_class="chatbot")
    press(store, clock, namespace, "agent", 300)
    assert store.match(namespace, chain).hit_length_blocks == 0
    store.close()
