"""TTLs: whole segments go when their time has come, and what has expired never comes back."""

from __future__ import annotations

import numpy as np
import pytest

from faults import FaultyDevice, flip_bit
from kvstore.clock import ManualClock
from kvstore.config import TrafficClassConfig
from kvstore.expiry import TtlTable, class_uses, last_use_s
from kvstore.log import format as fmt
from kvstore_api.results import PutStatus
from stores import assert_whole, chain_of, du_bytes, get, open_store, payload, put, spec

DAY_S = 86_400


@pytest.fixture
def clock():
    return ManualClock()


def classes(short=100, long=1000, refresh="on_access"):
    return {
        "short": TrafficClassConfig(ttl_s=short, refresh=refresh),
        "long": TrafficClassConfig(ttl_s=long, refresh=refresh),
    }


def hits(store, namespace, chain, **options):
    return store.match(namespace, chain, **{"peek": True, **options}).hit_length_blocks


@pytest.mark.parametrize("how", ["ttl set", "restart with a longer one"])
@pytest.mark.parametrize("swept", [False, True])
def test_a_longer_ttl_revives_nothing_that_has_expired(tmp_path, clock, how, swept):
    store = open_store(tmp_path, clock, traffic_classes=classes())
    namespace = store.register_namespace(spec())
    old, young = chain_of(namespace, 1, 4), chain_of(namespace, 2, 4)
    put(store, namespace, old)
    clock.advance(60)
    put(store, namespace, young)
    clock.advance(60)
    assert (hits(store, namespace, old), hits(store, namespace, young)) == (0, 4)
    if swept:
        store.sweep()
    if how == "ttl set":
        store.set_ttl("short", 5000)
    else:
        store.close()
        store = open_store(tmp_path, clock, traffic_classes=classes(short=5000))
    assert (hits(store, namespace, old), hits(store, namespace, young)) == (0, 4)
    assert get(store, namespace, old)[0] == {}
    clock.advance(4000)
    assert hits(store, namespace, young) == 4
    store.close()
    store = open_store(tmp_path, clock, traffic_classes=classes(short=5000))
    assert (hits(store, namespace, old), hits(store, namespace, young)) == (0, 4)
    assert {result.status for result in put(store, namespace, old)} == {PutStatus.STORED}
    assert hits(store, namespace, old) == 4
    store.close()


def test_a_ttl_made_shorter_and_longer_again_loses_what_it_ended_and_counts_it_once(tmp_path, clock):
    store = open_store(tmp_path, clock, traffic_classes=classes())
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 6)
    put(store, namespace, chain, traffic_class="long")
    clock.advance(50)
    store.set_ttl("long", 40)
    assert hits(store, namespace, chain) == 0
    store.set_ttl("long", 1000)
    assert hits(store, namespace, chain) == 0
    store.sweep()
    assert store.counters.snapshot()["blocks_expired"] == 6
    assert store.counters.snapshot()["blocks_evicted"] == 0
    store.close()


def test_segments_expire_whole_because_they_are_filled_by_class_and_time(tmp_path, clock):
    """Written once and never used again: no block is moved for another's sake, and nothing is written twice."""
    store = open_store(tmp_path, clock, capacity=6 << 20, traffic_classes=classes(short=240, long=400))
    namespace = store.register_namespace(spec(4096))
    for conversation in range(400):
        put(
            store,
            namespace,
            chain_of(namespace, conversation, 5),
            traffic_class="short" if conversation % 2 else "long",
        )
        clock.advance(2)
        store.sweep()
    counters = store.counters.snapshot()
    assert counters["blocks_expired"] > 1000
    assert counters["blocks_evicted"] == 0
    assert counters["segments_dropped_whole"] >= 0.9 * counters["segments_reclaimed"] > 5
    assert counters["bytes_written"] < 1.1 * counters["bytes_stored"]
    store.close()


def test_everything_younger_than_any_ttl_still_makes_room_coldest_first(tmp_path, clock):
    store = open_store(
        tmp_path,
        clock,
        capacity=2 << 20,
        traffic_classes={"agent": TrafficClassConfig(ttl_s=3650 * DAY_S)},
        high_watermark=0.7,
        low_watermark=0.6,
    )
    namespace = store.register_namespace(spec(4096))
    hot = chain_of(namespace, 0, 10)
    put(store, namespace, hot)
    for conversation in range(1, 200):
        clock.advance(1)
        assert hits(store, namespace, hot) == 10
        store.match(namespace, hot)
        assert {r.status for r in put(store, namespace, chain_of(namespace, conversation, 10))} == {PutStatus.STORED}
        store.sweep()
        assert du_bytes(tmp_path) <= 2 << 20
    assert hits(store, namespace, chain_of(namespace, 1, 10)) == 0
    assert hits(store, namespace, chain_of(namespace, 199, 10)) == 10
    store.close()


@pytest.mark.parametrize("refresh", ["on_access", "on_write"])
@pytest.mark.parametrize(
    "use",
    [
        lambda store, ns, chain: store.match(ns, chain, "short"),
        lambda store, ns, chain: put(store, ns, chain, traffic_class="short"),
        lambda store, ns, chain: list(store.read(ns, chain, 0, len(chain))),
    ],
    ids=["match", "put", "get"],
)
def test_no_use_revives_what_has_expired(tmp_path, clock, use, refresh):
    store = open_store(tmp_path, clock, traffic_classes=classes(short=100, refresh=refresh))
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 4)
    put(store, namespace, chain)
    clock.advance(101)
    before = store.counters.snapshot()["blocks_stored"]
    use(store, namespace, chain)
    stored = store.counters.snapshot()["blocks_stored"] - before
    # A put stores it anew; nothing else brings it back.
    assert hits(store, namespace, chain) == stored
    assert stored in (0, 4)
    store.close()


def test_a_block_expires_when_the_class_that_gives_most_says_so(tmp_path, clock):
    store = open_store(tmp_path, clock, traffic_classes=classes(short=100, long=1000))
    ttls, now_s = store._rules.ttls, clock.now_s()
    uses = np.zeros((5, fmt.USE_COLUMNS), dtype="<u4")
    uses[0, 1] = now_s  # just used
    uses[1, 1] = now_s - 75
    uses[2, 1], uses[2, 2] = now_s - 75, now_s - 500  # short: 0.25 left, long: 0.5
    uses[3, 2] = now_s - 1000  # expired this moment
    assert (ttls.expiry_s(uses) - now_s).tolist() == [100, 25, 500, 0, -now_s]
    assert ttls.live(uses, now_s).tolist() == [True, True, True, False, False]
    assert class_uses(uses).shape == (5, 13)
    assert last_use_s(uses).tolist() == [now_s, now_s - 75, now_s - 75, now_s - 1000, 0]
    assert ttls == TtlTable(store._catalog.classes.values())
    store.set_ttl("short", 90)
    assert ttls != store._rules.ttls
    store.close()


@pytest.mark.parametrize("use", ["puts all", "matches and puts the rest", "puts the rest"])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_prefix_that_classes_share_lives_as_long_as_the_longest_lived_needs_it(tmp_path, clock, use, restarted):
    store = open_store(tmp_path, clock)
    namespace = store.register_namespace(spec(4096))
    agent, chat = (chain_of(namespace, conversation, 24, shared_blocks=4) for conversation in (1, 2))
    put(store, namespace, agent, traffic_class="agent")
    if use.startswith("matches"):
        assert hits(store, namespace, chat, traffic_class="chatbot", peek=False) == 4
    put(store, namespace, chat, range(0 if use == "puts all" else 4, 24), traffic_class="chatbot")
    clock.advance(3 * DAY_S)
    for _ in range(2):
        store.sweep()  # the agent's segment is mostly dead: what lives in it moves
    if restarted:
        store.close()
        store = open_store(tmp_path, clock)
    assert store.counters.snapshot()["blocks_moved"] == (0 if restarted else 4)
    assert hits(store, namespace, agent) == 4
    assert hits(store, namespace, chat) == 24
    assert_whole(store, namespace, chat)
    clock.advance(4 * DAY_S - 1)
    assert hits(store, namespace, chat) == 24
    clock.advance(1)
    assert hits(store, namespace, chat) == 0
    store.close()


@pytest.mark.parametrize("hole", ["deleted", "expired before its descendants", "damaged", "never put"])
def test_a_chain_with_a_hole_is_never_a_full_hit(tmp_path, clock, hole):
    ttls = classes(refresh="on_write")
    store = open_store(tmp_path, clock, traffic_classes=ttls)
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 8)
    for blocks, traffic_class in ((range(2), "long"), (range(2, 4), "short"), (range(4, 8), "long")):
        if hole != "never put" or traffic_class != "short":
            put(store, namespace, chain, blocks, traffic_class=traffic_class)
    if hole == "deleted":
        store.delete(namespace, chain, 2, 2)
    elif hole == "damaged":
        for path in tmp_path.rglob("*.seg"):
            for block in (2, 3):
                at = path.read_bytes().find(payload(chain[block]))
                if at >= 0:
                    flip_bit(path, at, 3)
        assert get(store, namespace, chain)[1] == {2: "CORRUPT", 3: "CORRUPT"}
    elif hole.startswith("expired"):
        clock.advance(100)
    for _ in range(2):
        assert hits(store, namespace, chain) == hits(store, namespace, chain, peek=False) == 2
        found, misses = get(store, namespace, chain, lease=store.match(namespace, chain).lease)
        assert sorted(found) == [0, 1, 4, 5, 6, 7]
        assert sorted(misses) == [2, 3]
        store.sweep()
        store.close()
        store = open_store(tmp_path, clock, traffic_classes=ttls)
    put(store, namespace, chain, range(2, 4))
    assert hits(store, namespace, chain) == 8
    assert_whole(store, namespace, chain)
    store.close()


def test_what_expires_while_a_longer_ttl_is_being_written_is_not_revived_by_it(tmp_path, clock):
    class SlowDisk(FaultyDevice):
        before_replace = None

        def replace(self, path, data):
            if self.before_replace is not None:
                self.before_replace()
            super().replace(path, data)

    device = SlowDisk()
    store = open_store(tmp_path, clock, traffic_classes=classes(short=100), device=device)
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 3)
    put(store, namespace, chain)
    clock.advance(99)

    def write_slowly():
        clock.advance(2)
        assert hits(store, namespace, chain) == 0

    device.before_replace = write_slowly
    store.set_ttl("short", 1000)
    device.before_replace = None
    assert hits(store, namespace, chain) == 0
    store.close()


def test_a_slow_match_does_not_revive_what_has_expired_meanwhile(tmp_path, clock):
    store = open_store(tmp_path, clock, traffic_classes=classes(short=100))
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 3)
    put(store, namespace, chain)
    clock.advance(99)
    lease = store._lease

    def lease_slowly(places, deadline_s):
        store._lease = lease
        clock.advance(2)
        assert hits(store, namespace, chain) == 0
        assert store.status().live.blocks == 0
        return lease(places, deadline_s)

    store._lease = lease_slowly
    store.match(namespace, chain, "short")
    assert hits(store, namespace, chain) == 0
    assert store.invariants().violations == ()
    store.close()
