"""State objects in a match: a plan loads what is alive now, at an end that is legal in every group, and nothing else."""

from __future__ import annotations

import errno
from collections import Counter

import pytest

from faults import FaultyDevice, flip_bit
from kvstore.clock import ManualClock
from kvstore.types import EvictSelection
from kvstore_api.checksum import block_checksum
from kvstore_api.namespace import KvGroup, KvGroupKind, ReplayMode
from kvstore_api.results import PutStatus
from stores import chain_of, open_store, put, put_block, seal, spec

FULL = KvGroup("full", KvGroupKind.FULL, (0,))
SWA = KvGroup("swa", KvGroupKind.SLIDING_WINDOW, (1,), window_tokens=128, replay_rule=ReplayMode.SNAPSHOT)
STATE_BYTES = 3000


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def device():
    return FaultyDevice()


@pytest.fixture
def store(tmp_path, clock, device):
    store = open_store(tmp_path / "data", clock, capacity=16 << 20, device=device, tick_s=None)
    yield store
    store.close()


def state_group(name, layer=1):
    return KvGroup(name, KvGroupKind.STATE, (layer,), replay_rule=ReplayMode.SNAPSHOT)


def save(store, namespace, chain, blocks, name, traffic_class=""):
    """A state object at the end of so many blocks."""
    data, prefix_hash = bytes([blocks % 256]) * STATE_BYTES, chain[blocks - 1]
    checksum = block_checksum(data, prefix_hash)
    result = store.submit_put_state(namespace, prefix_hash, name, data, checksum, traffic_class).result(60)
    assert result.status is PutStatus.STORED


def stored(store, groups, blocks, conversation=1):
    namespace = store.register_namespace(spec(groups=groups))
    chain = chain_of(namespace, conversation, blocks)
    put(store, namespace, chain)
    return namespace, chain


@pytest.mark.parametrize("end", [1, 15, 16, 17, 79, 80, 81, 82, 83, 84, 96, 97, 100])
def test_a_state_is_found_at_whatever_end_of_a_long_hit_it_stands(store, end):
    namespace, chain = stored(store, (FULL, state_group("ssm")), 100)
    assert store.match(namespace, chain).hit_length_blocks == 0
    save(store, namespace, chain, end, "ssm")
    save(store, namespace, chain, end, "another name")
    match = store.match(namespace, chain)
    assert (match.hit_length_blocks, match.plan.hit_tokens, match.plan.mode) == (end, end * 128, ReplayMode.SNAPSHOT)
    assert store.match(namespace, chain.first(end - 1)).hit_length_blocks == 0


def test_all_ends_of_a_long_hit_are_asked_for_in_a_few_look_ups(store, monkeypatch):
    namespace, chain = stored(store, (FULL, state_group("a"), state_group("b", 2)), 1000)
    save(store, namespace, chain, 1, "a")
    asked = []
    lookup = store._index.lookup
    monkeypatch.setattr(store._index, "lookup", lambda keys: asked.append(len(keys)) or lookup(keys))
    assert store.match(namespace, chain).hit_length_blocks == 0
    assert len(asked) <= 8
    assert max(Counter(asked)) >= 900, "nothing was looked up at once"


def end_by_expiry(store, namespace, chain, clock, device):
    clock.advance(601)


def end_by_eviction(store, namespace, chain, clock, device):
    store.evict(EvictSelection(traffic_class="handoff"), dry_run=False)


def end_by_damage(store, namespace, chain, clock, device):
    segment = store._segments.all()[-1]  # the state object began one of its class
    flip_bit(segment.path, segment.layout.payload_offset + 5, 3)
    assert store.read_state(namespace, chain[3], "swa") is None


def end_by_a_bad_sector(store, namespace, chain, clock, device):
    device.fail_read_of = lambda path, begin, end: errno.EIO
    assert store.read_state(namespace, chain[3], "swa") is None


ENDS = [end_by_expiry, end_by_eviction, end_by_damage, end_by_a_bad_sector]


@pytest.mark.parametrize("end", ENDS)
def test_a_state_that_is_no_longer_alive_is_in_no_plan(store, clock, device, end):
    namespace, chain = stored(store, (FULL, SWA), 4)
    save(store, namespace, chain, 4, "swa", "handoff")
    match = store.match(namespace, chain)
    assert (match.plan.replay_start_token, match.plan.mode) == (512, ReplayMode.SNAPSHOT)
    end(store, namespace, chain, clock, device)
    assert store.read_state(namespace, chain[3], "swa") is None, "between match and get it is a miss"
    again = store.match(namespace, chain)
    assert (again.hit_length_blocks, again.plan.replay_start_token, again.plan.mode) == (4, 384, ReplayMode.EXACT)


def test_a_deleted_block_takes_the_ends_behind_it_out_of_the_plans(store):
    namespace, chain = stored(store, (FULL, state_group("ssm")), 6)
    for blocks in (2, 6):
        save(store, namespace, chain, blocks, "ssm")
    assert store.match(namespace, chain).hit_length_blocks == 6
    store.delete(namespace, chain, 4, 1)
    assert store.match(namespace, chain).hit_length_blocks == 2
    store.delete(namespace, chain, 1, 1)
    assert store.match(namespace, chain).hit_length_blocks == 0


def test_a_state_that_is_moved_by_a_reclaim_stays_in_the_plan(store, clock):
    namespace, chain = stored(store, (FULL, SWA), 4)
    seal(store)
    save(store, namespace, chain, 4, "swa")
    other = chain_of(namespace, 2, 12)
    put(store, namespace, other)
    seal(store)
    store.delete(namespace, other, 0, 12)
    before = {segment.segment_id for segment in store._segments.all()}
    store.sweep()
    assert store.counters.snapshot()["blocks_moved"] == 1
    assert {segment.segment_id for segment in store._segments.all()} != before
    assert store.match(namespace, chain).plan.mode is ReplayMode.SNAPSHOT
    assert store.read_state(namespace, chain[3], "swa").data == bytes([4]) * STATE_BYTES


def test_a_group_with_a_name_that_no_state_object_can_have_is_a_miss_and_no_error(store):
    namespace, chain = stored(store, (FULL, state_group("n" * 257)), 4)
    match = store.match(namespace, chain)
    assert (match.hit_length_blocks, match.lease) == (0, b"")


def test_hits_count_as_far_as_the_plan_uses_them(store):
    namespace, chain = stored(store, (FULL, state_group("ssm")), 4)
    store.match(namespace, chain)
    save(store, namespace, chain, 1, "ssm")
    store.match(namespace, chain)
    counters = store.counters.snapshot()
    assert (counters["asked_blocks"], counters["hit_blocks"]) == (8, 1)
    assert (counters["asked_tokens"], counters["hit_tokens"]) == (1024, 128)


def test_a_short_leading_part_is_offered_only_as_far_as_a_state_reaches(store):
    namespace = store.register_namespace(spec(groups=(FULL, state_group("ssm"))))
    chain = chain_of(namespace, 1, 3)
    store.submit_put(namespace, chain, [put_block(chain, block) for block in (0, 1)]).result(60)
    save(store, namespace, chain, 3, "ssm")  # the state is there before its last block
    assert store.match(namespace, chain).hit_length_blocks == 0
    put(store, namespace, chain, [2])
    assert store.match(namespace, chain).hit_length_blocks == 3
