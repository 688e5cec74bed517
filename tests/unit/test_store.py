"""The store by itself: right or miss, TTL, leases, deletes, capacity, faults of the disk."""

from __future__ import annotations

import errno
import math
import mmap
import os
import struct
import threading
import time
from pathlib import Path

import pytest

from faults import FaultyDevice, flip_bit
from kvstore.clock import ManualClock
from kvstore.config import DEFAULT_TRAFFIC_CLASSES, TrafficClassConfig
from kvstore.errors import (
    InvalidArgumentError,
    NamespaceNotFoundError,
    StorageError,
    UnknownTrafficClassError,
)
from kvstore.index import block_keys, state_key
from kvstore.log import format as fmt
from kvstore.states import state_hash
from kvstore.types import EvictSelection, PutBlock
from kvstore_api.checksum import block_checksum
from kvstore_api.namespace import KvGroup, KvGroupKind, ReplayMode
from kvstore_api.results import PutStatus
from stores import (
    BLOCK_BYTES,
    assert_whole,
    chain_of,
    du_bytes,
    get,
    open_store,
    payload,
    put,
    put_block,
    put_in_segments,
    spec,
)
from third_party import until

DAY_S = 86_400


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def device():
    return FaultyDevice()


@pytest.fixture
def store(tmp_path, clock, device):
    store = open_store(tmp_path / "data", clock, device=device)
    yield store
    store.close()


@pytest.fixture
def namespace(store):
    return store.register_namespace(spec())


def statuses(results):
    return [result.status for result in results]


def test_what_was_put_is_matched_and_read_back(store, namespace):
    chain = chain_of(namespace, 1, 100)
    assert statuses(put(store, namespace, chain)) == [PutStatus.STORED] * 100
    match = store.match(namespace, chain)
    assert match.hit_length_blocks == 100
    assert match.plan.hit_tokens == match.plan.replay_start_token == 12_800
    found, misses = get(store, namespace, chain, lease=match.lease)
    assert misses == {}
    assert found == {block: payload(chain[block]) for block in range(100)}
    assert_whole(store, namespace, chain)


def test_match_ends_at_the_first_gap(store, namespace):
    chain = chain_of(namespace, 1, 80)
    put(store, namespace, chain, [*range(70), *range(71, 80)])
    assert store.match(namespace, chain).hit_length_blocks == 70
    found, misses = get(store, namespace, chain)
    assert misses == {70: "NOT_FOUND"}
    assert len(found) == 79


@pytest.mark.parametrize("hit", [0, 1, 31, 32, 33, 63, 64, 65, 127, 128])
def test_every_hit_length_around_groups_and_batches(store, namespace, hit):
    chain = chain_of(namespace, 1, 128)
    if hit:
        put(store, namespace, chain, range(hit))
    assert store.match(namespace, chain).hit_length_blocks == hit


def test_a_chain_scattered_over_slots_is_matched_and_touched_block_by_block(tmp_path):
    """Two conversations that grow in turn, a block at a time: no two neighbours of a chain have neighbouring slots."""
    clock = ManualClock()
    store = open_store(tmp_path, clock, capacity=64 << 20)
    namespace = store.register_namespace(spec())
    chains = [chain_of(namespace, conversation, 150) for conversation in range(2)]
    for block in range(150):
        for chain in chains:
            put(store, namespace, chain, [block])
    clock.advance(1000)
    match = store.match(namespace, chains[0])
    assert match.hit_length_blocks == 150
    (segment,) = store._segments.all()
    assert (segment.uses[:300:2, 1] == clock.now_s()).all()
    assert (segment.uses[1:300:2, 1] == clock.now_s() - 1000).all()
    assert segment.lease_until_s >= match.lease_expiry_s
    assert get(store, namespace, chains[0], lease=match.lease)[1] == {}
    store.delete(namespace, chains[0], 100, 1)
    assert store.match(namespace, chains[0]).hit_length_blocks == 100
    assert store.match(namespace, chains[1]).hit_length_blocks == 150
    store.close()


def test_a_match_of_8192_blocks_is_one_call_whatever_else_is_stored(tmp_path):
    store = open_store(tmp_path, capacity=128 << 20)
    namespace = store.register_namespace(spec(1))
    chain = chain_of(namespace, 1, 8192)
    put(store, namespace, chain)
    for conversation in range(2, 40):
        put(store, namespace, chain_of(namespace, conversation, 100, shared_blocks=50))
    opened = open_files()
    match = store.match(namespace, chain)
    assert match.hit_length_blocks == 8192
    assert len(match.lease) < 1000, "neighbours are told as runs"
    until(lambda: open_files() == opened)  # a look-up opens nothing; housekeeping does, for a moment
    store.close()


def test_a_shared_prefix_is_stored_once_and_branches_do_not_mix(store, namespace):
    first, second = chain_of(namespace, 1, 60, shared_blocks=40), chain_of(namespace, 2, 60, shared_blocks=40)
    put(store, namespace, first)
    assert store.match(namespace, second).hit_length_blocks == 40
    assert statuses(put(store, namespace, second)) == [PutStatus.EXISTS] * 40 + [PutStatus.STORED] * 20
    assert_whole(store, namespace, first)
    assert_whole(store, namespace, second)


@pytest.mark.parametrize("block_bytes", [1, 511, 4096, 4097, 114_688, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_blocks_of_every_size_come_back_whole(tmp_path, block_bytes):
    store = open_store(tmp_path, capacity=128 << 20)
    namespace = store.register_namespace(spec(block_bytes))
    chain = chain_of(namespace, 1, 7)
    assert statuses(put(store, namespace, chain)) == [PutStatus.STORED] * 7
    assert_whole(store, namespace, chain)
    store.close()


def test_frames_stay_under_their_limit(store, namespace):
    chain = chain_of(namespace, 1, 128)
    put(store, namespace, chain)
    for frame in store.read(namespace, chain, 0, 128):
        assert frame.size_bytes <= 1 << 20
        assert frame.size_bytes == len(frame.blocks) * BLOCK_BYTES


@pytest.mark.parametrize(
    "change",
    [
        {"tenant": "other"},
        {"model": "n"},
        {"revision": "r2"},
        {"engine": "other"},
        {"layout": "flat-2"},
        {"kv_dtype": "fp8_e4m3"},
        {"block_bytes": 1024},
        {"labels": {"rope": "scaled"}},
    ],
)
def test_a_namespace_that_differs_in_one_field_never_hits(store, namespace, change):
    chain = chain_of(namespace, 1, 4)
    put(store, namespace, chain)
    other = store.register_namespace(spec(**change))
    assert other.namespace_id != namespace.namespace_id
    # Even a caller who mixes up the hashes, which depend on the namespace, gets nothing.
    assert store.match(other, chain).hit_length_blocks == 0
    assert get(store, other, chain)[0] == {}


def test_many_identical_puts_store_one_copy(store, namespace):
    chain = chain_of(namespace, 1, 8)
    barrier = threading.Barrier(16)
    results = []

    def work():
        barrier.wait()
        for _ in range(4):
            results.append(put(store, namespace, chain))

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    flat = [status for result in results for status in statuses(result)]
    assert len(flat) == 64 * 8
    assert flat.count(PutStatus.STORED) == 8
    assert flat.count(PutStatus.EXISTS) == 63 * 8
    assert store.counters.snapshot()["bytes_stored"] == 8 * BLOCK_BYTES
    assert store.status().live.blocks == 8


def test_duplicates_within_one_put_share_their_fate(store, namespace, device):
    chain = chain_of(namespace, 1, 2)
    twice = [put_block(chain, 0), put_block(chain, 0)]
    device.fail_write_after = 0
    results = store.submit_put(namespace, chain, twice).result()
    assert statuses(results) == [PutStatus.REJECTED] * 2
    device.heal()
    results = store.submit_put(namespace, chain, twice).result()
    assert statuses(results) == [PutStatus.STORED, PutStatus.EXISTS]


def test_one_bad_block_is_rejected_alone(store, namespace):
    chain = chain_of(namespace, 1, 4)
    blocks = [put_block(chain, block) for block in range(4)]
    blocks[1] = put_block(chain, 1, b"x" * (BLOCK_BYTES - 1))
    blocks[2] = PutBlock(2, blocks[2].data, blocks[2].checksum ^ 1)
    results = store.submit_put(namespace, chain, blocks).result()
    assert statuses(results) == [PutStatus.STORED, PutStatus.REJECTED, PutStatus.REJECTED, PutStatus.STORED]
    assert [results[1].reason, results[2].reason] == ["WRONG_SIZE", "BAD_CHECKSUM"]
    assert str(BLOCK_BYTES) in results[1].detail
    assert store.match(namespace, chain).hit_length_blocks == 1


def test_another_blocks_bytes_do_not_pass_the_checksum(store, namespace):
    """The checksum is seeded with the name, so whole and undamaged bytes of another block are refused as well."""
    chain = chain_of(namespace, 1, 2)
    stolen = payload(chain[1])
    block = PutBlock(0, stolen, block_checksum(stolen, chain[1]))
    (result,) = store.submit_put(namespace, chain, [block]).result()
    assert result.reason == "BAD_CHECKSUM"


def test_unknown_things_are_refused_and_change_nothing(store, namespace):
    chain = chain_of(namespace, 1, 2)
    with pytest.raises(UnknownTrafficClassError, match="'agnet' is unknown; known are agent"):
        store.match(namespace, chain, "agnet")
    with pytest.raises(UnknownTrafficClassError):
        store.submit_put(namespace, chain, [put_block(chain, 0)], "agnet")
    with pytest.raises(NamespaceNotFoundError):
        store.namespace(bytes(32))
    with pytest.raises(InvalidArgumentError, match="31 bytes"):
        store.namespace(bytes(31))
    with pytest.raises(InvalidArgumentError):
        store.submit_put(namespace, chain, [PutBlock(2, b"", 0)])
    for first, count in [(0, 3), (2, 1), (0, 0), (-1, 1)]:
        with pytest.raises(InvalidArgumentError):
            store.read(namespace, chain, first, count)
    for lease_s in (0, -1, float("nan"), float("inf")):
        with pytest.raises(InvalidArgumentError):
            store.match(namespace, chain, lease_s=lease_s)
    assert store.status().live.blocks == 0


def test_a_block_larger_than_a_segment_is_refused_at_registration(store):
    with pytest.raises(InvalidArgumentError, match=r"store\.segment_size"):
        store.register_namespace(spec(1 << 20))


# Time


def test_expired_is_a_miss_and_stays_one(store, namespace, clock):
    chain = chain_of(namespace, 1, 4)
    put(store, namespace, chain, traffic_class="agent")
    clock.advance(3 * DAY_S - 1)
    assert store.match(namespace, chain, "agent", peek=True).hit_length_blocks == 4
    clock.advance(2)
    assert store.match(namespace, chain, "agent").hit_length_blocks == 0
    assert get(store, namespace, chain)[0] == {}
    assert store.match(namespace, chain, "chatbot").hit_length_blocks == 0
    assert statuses(put(store, namespace, chain, traffic_class="agent")) == [PutStatus.STORED] * 4
    assert_whole(store, namespace, chain)


def test_use_refreshes_and_a_peek_does_not(store, namespace, clock):
    chain = chain_of(namespace, 1, 4)
    put(store, namespace, chain, traffic_class="agent")
    for _ in range(3):
        clock.advance(2 * DAY_S)
        assert store.match(namespace, chain, "agent").hit_length_blocks == 4
    clock.advance(2 * DAY_S)
    assert store.match(namespace, chain, "agent", peek=True).hit_length_blocks == 4
    clock.advance(2 * DAY_S)
    assert store.match(namespace, chain, "agent").hit_length_blocks == 0


def test_on_write_classes_are_not_refreshed_by_use(tmp_path, clock):
    classes = {"batch": TrafficClassConfig(ttl_s=100, refresh="on_write")}
    store = open_store(tmp_path, clock, traffic_classes=classes)
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 2)
    put(store, namespace, chain)
    clock.advance(60)
    assert store.match(namespace, chain).hit_length_blocks == 2
    assert statuses(put(store, namespace, chain)) == [PutStatus.EXISTS] * 2
    clock.advance(60)
    assert store.match(namespace, chain).hit_length_blocks == 0
    store.close()


def test_a_prefix_lives_as_long_as_its_longest_lived_user(store, namespace, clock):
    chain = chain_of(namespace, 1, 4)
    put(store, namespace, chain, traffic_class="agent")
    store.match(namespace, chain, "chatbot")
    clock.advance(5 * DAY_S)
    assert store.match(namespace, chain, "agent", peek=True).hit_length_blocks == 4


def test_a_put_of_a_suffix_refreshes_what_it_continues(store, namespace, clock):
    chain = chain_of(namespace, 1, 8)
    put(store, namespace, chain, range(4), traffic_class="agent")
    clock.advance(2 * DAY_S)
    put(store, namespace, chain, range(4, 8), traffic_class="agent")
    clock.advance(2 * DAY_S)
    assert store.match(namespace, chain, "agent").hit_length_blocks == 8


def test_a_changed_ttl_acts_on_resident_blocks_and_survives_a_restart(tmp_path, clock):
    store = open_store(tmp_path, clock)
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 2)
    put(store, namespace, chain, traffic_class="agent")
    clock.advance(DAY_S)
    before, after = store.set_ttl("agent", 3600)
    assert (before.ttl_s, after.ttl_s) == (3 * DAY_S, 3600)
    assert store.match(namespace, chain, "agent").hit_length_blocks == 0
    store.close()
    store = open_store(tmp_path, clock)
    assert {c.name: c.ttl_s for c in store.traffic_classes()}["agent"] == 3600
    for bad in (0, -5, 10**12):
        with pytest.raises(InvalidArgumentError):
            store.set_ttl("agent", bad)
    with pytest.raises(UnknownTrafficClassError):
        store.set_ttl("", 60)
    store.close()
    # What the configuration newly says wins over what an operator said before.
    changed = {**DEFAULT_TRAFFIC_CLASSES, "agent": TrafficClassConfig(ttl_s=7200)}
    store = open_store(tmp_path, clock, traffic_classes=changed)
    assert {c.name: c.ttl_s for c in store.traffic_classes()}["agent"] == 7200
    store.close()


def test_a_longer_ttl_does_not_bring_back_what_was_deleted_after_its_time(store, namespace, clock):
    chain = chain_of(namespace, 1, 4)
    put(store, namespace, chain, traffic_class="agent")
    clock.advance(3 * 86_400 + 1)
    assert store.delete(namespace, chain, 0, 2) == 0, "expired blocks are not there"
    store.set_ttl("agent", 30 * 86_400)
    assert get(store, namespace, chain)[0] == {}
    assert store.counters.snapshot()["blocks_expired"] == 4


def test_recency_survives_a_restart(tmp_path, clock):
    store = open_store(tmp_path, clock)
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 2)
    put(store, namespace, chain, traffic_class="agent")
    clock.advance(2 * DAY_S)
    store.match(namespace, chain, "agent")
    store.close()
    clock.advance(2 * DAY_S)
    store = open_store(tmp_path, clock)
    assert store.match(namespace, chain, "agent").hit_length_blocks == 2
    store.close()


# Leases


def test_a_lease_outlives_expiry_and_eviction_but_not_its_deadline(store, namespace, clock):
    chain = chain_of(namespace, 1, 4)
    put(store, namespace, chain, traffic_class="handoff")
    clock.advance(598)
    match = store.match(namespace, chain, "handoff", lease_s=20, peek=True)
    clock.advance(10)
    assert store.match(namespace, chain, peek=True).hit_length_blocks == 0
    store.sweep()
    assert get(store, namespace, chain, lease=match.lease)[1] == {}
    clock.advance(11)
    assert get(store, namespace, chain, lease=match.lease)[0] == {}


def test_files_go_only_after_the_last_lease(store, namespace, clock, tmp_path):
    chain = chain_of(namespace, 1, 4)
    put(store, namespace, chain)
    match = store.match(namespace, chain, lease_s=30)
    store.evict(EvictSelection(namespace=namespace), dry_run=False)
    store.sweep()
    clock.advance(1)
    store.sweep()
    assert get(store, namespace, chain, lease=match.lease)[1] == {}
    clock.advance(30)
    store.sweep()
    store.sweep()
    assert list((tmp_path / "data" / "segments").iterdir()) == []
    assert set(get(store, namespace, chain, lease=match.lease)[1].values()) == {"NOT_FOUND"}


def test_a_retired_file_waits_for_the_last_lease_to_the_second(store, namespace, clock):
    chain = chain_of(namespace, 1, 4)
    put(store, namespace, chain)
    match = store.match(namespace, chain, lease_s=30)
    (segment,) = store._segments.all()
    store._segments.retire(segment)  # as after a crash in the middle of a reclaim
    clock.advance(30)
    store.sweep()
    assert segment.path.exists()
    assert get(store, namespace, chain, lease=match.lease)[1] == {}
    clock.advance(1)
    store.sweep()
    assert not segment.path.exists()


def test_a_deleted_block_does_not_end_the_lease_of_its_neighbours(store, namespace):
    chain = chain_of(namespace, 1, 6)
    put(store, namespace, chain)
    match = store.match(namespace, chain)
    store.delete(namespace, chain, 2, 1)
    store.delete(namespace, chain, 4, 1)
    put(store, namespace, chain, [4])
    store.evict(EvictSelection(older_than_s=0), dry_run=False)
    put(store, namespace, chain, [4])
    found, misses = get(store, namespace, chain, lease=match.lease)
    assert misses == {2: "NOT_FOUND"}
    assert found == {block: payload(chain[block]) for block in (0, 1, 3, 4, 5)}


def test_deleted_blocks_are_gone_even_under_a_lease(store, namespace):
    chain = chain_of(namespace, 1, 4)
    put(store, namespace, chain)
    match = store.match(namespace, chain)
    assert store.delete(namespace, chain, 1, 2) == 2
    assert store.delete(namespace, chain, 1, 2) == 0
    assert set(get(store, namespace, chain, lease=match.lease)[0]) == {0, 3}
    assert store.match(namespace, chain).hit_length_blocks == 1


@pytest.mark.parametrize(
    "spoil", [lambda t: t[:-1], lambda t: t[:-1] + bytes([t[-1] ^ 1]), lambda t: b"", lambda t: b"x" * 99]
)
def test_a_forged_or_broken_token_means_a_look_up(store, namespace, spoil):
    chain = chain_of(namespace, 1, 4)
    put(store, namespace, chain)
    token = spoil(store.match(namespace, chain).lease)
    assert get(store, namespace, chain, lease=token)[1] == {}


def test_a_token_for_one_chain_never_yields_its_blocks_under_another(store, namespace):
    mine, theirs = chain_of(namespace, 1, 4), chain_of(namespace, 2, 4)
    put(store, namespace, mine)
    put(store, namespace, theirs)
    token = store.match(namespace, mine).lease
    found, _ = get(store, namespace, theirs, lease=token)
    assert all(data == payload(theirs[block]) for block, data in found.items())


def test_matches_that_nobody_reads_hold_nothing(tmp_path, clock):
    store = open_store(tmp_path, clock)
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 1)
    put(store, namespace, chain)
    (path,) = tmp_path.rglob("*.seg")
    store.match(namespace, chain)
    opened, threads, held_bytes = open_files(), threading.active_count(), resident_bytes()
    for _ in range(100_000):
        assert store.match(namespace, chain, lease_s=60).lease
    until(lambda: open_files() <= opened)
    assert threading.active_count() == threads
    assert resident_bytes() - held_bytes < 8 << 20, "80 bytes a match would be more"
    store.evict(EvictSelection(older_than_s=0), dry_run=False)
    clock.advance(59)
    store.sweep()
    assert path.exists(), "a lease still names it"
    clock.advance(2)
    store.sweep()
    store.sweep()
    assert store.status().segment_count == store.status().retiring_bytes == 0
    assert not path.exists()
    store.close()


def open_files():
    return len(os.listdir("/proc/self/fd"))


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


# Deleting, evicting, dropping


def test_deleted_then_put_again_is_there_and_stays_after_reclaim_and_restart(tmp_path, clock):
    store = open_store(tmp_path, clock)
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 4)
    put(store, namespace, chain)
    store.delete(namespace, chain, 0, 4)
    put(store, namespace, chain)
    store.sweep()
    assert_whole(store, namespace, chain)
    store.close()
    store = open_store(tmp_path, clock)
    assert_whole(store, namespace, chain)
    store.close()


def test_evict_by_each_condition_says_first_what_it_does(store, clock):
    one = store.register_namespace(spec())
    two = store.register_namespace(spec(revision="r2"))
    chain_one, chain_two = chain_of(one, 1, 10), chain_of(two, 1, 20)
    put(store, one, chain_one, traffic_class="agent")
    clock.advance(100)
    put(store, two, chain_two, traffic_class="chatbot")
    cases = [
        (EvictSelection(namespace=one), 10),
        (EvictSelection(traffic_class="chatbot"), 20),
        (EvictSelection(older_than_s=100), 10),
        (EvictSelection(older_than_s=101), 0),
        (EvictSelection(namespace=one, traffic_class="chatbot"), 0),
        (EvictSelection(down_to_share=0.0), 30),
        (EvictSelection(down_to_share=25 * BLOCK_BYTES / (4 << 20)), 5),
        (EvictSelection(down_to_share=1.0), 0),
    ]
    for selection, blocks in cases:
        usage = store.evict(selection, dry_run=True)
        assert (usage.blocks, usage.bytes) == (blocks, blocks * BLOCK_BYTES)
    assert store.status().live.blocks == 30
    # The coldest go first, and of equals those deepest in their chains, so that what stays can still be used.
    store.evict(EvictSelection(down_to_share=25 * BLOCK_BYTES / (4 << 20)), dry_run=False)
    assert store.match(one, chain_one, peek=True).hit_length_blocks == 5
    assert store.match(two, chain_two, peek=True).hit_length_blocks == 20
    for bad in (EvictSelection(), EvictSelection(down_to_share=1.1), EvictSelection(older_than_s=-1.0)):
        with pytest.raises(InvalidArgumentError):
            store.evict(bad, dry_run=True)


@pytest.mark.parametrize("lose_index", [False, True])
def test_deleted_evicted_and_dropped_stay_so_after_a_restart(tmp_path, clock, lose_index):
    store = open_store(tmp_path, clock)
    one = store.register_namespace(spec())
    two = store.register_namespace(spec(revision="r2"))
    chain, other = chain_of(one, 1, 6), chain_of(two, 1, 6)
    put(store, one, chain)
    put(store, two, other)
    store.delete(one, chain, 4, 2)
    addr = store.find_blocks(chain[3].hex())[0].addr
    assert addr.slot == 3
    store._segments.get(addr.segment_id).flag([addr.slot], 1)  # evicted
    assert store.drop_namespace(two, dry_run=True).blocks == 6
    assert store.match(two, other).hit_length_blocks == 6
    assert store.drop_namespace(two, dry_run=False).blocks == 6
    with pytest.raises(NamespaceNotFoundError):
        store.namespace(two.digest)
    store.close()
    if lose_index:
        for path in (tmp_path / "index").iterdir():
            path.unlink()
    store = open_store(tmp_path, clock)
    assert store.match(one, chain).hit_length_blocks == 3
    again = store.register_namespace(spec(revision="r2"))
    assert again.namespace_id > two.namespace_id
    assert store.match(again, other).hit_length_blocks == 0
    store.close()


# State objects


def test_state_objects_stand_beside_a_chain_and_do_not_change(store, namespace, clock):
    chain = chain_of(namespace, 1, 2)
    data = os.urandom(3000)
    args = (namespace, chain[0], "swa", data, block_checksum(data, chain[0]), "handoff")
    assert store.submit_put_state(*args).result().status is PutStatus.STORED
    assert store.submit_put_state(*args).result().status is PutStatus.EXISTS
    assert store.read_state(namespace, chain[0], "swa", "handoff").data == data
    assert store.read_state(namespace, chain[1], "swa") is None
    assert store.read_state(namespace, chain[0], "tail") is None
    bad = store.submit_put_state(namespace, chain[0], "tail", data, 1).result()
    assert (bad.status, bad.reason) == (PutStatus.REJECTED, "BAD_CHECKSUM")
    for name in ("", "x" * 257):
        with pytest.raises(InvalidArgumentError):
            store.read_state(namespace, chain[0], name)
    clock.advance(601)
    assert store.read_state(namespace, chain[0], "swa", "handoff") is None


def test_reading_a_state_object_is_counted_and_a_failed_read_is_a_miss(store, namespace, device):
    chain = chain_of(namespace, 1, 1)
    data = b"tail"
    store.submit_put_state(namespace, chain[0], "tail", data, block_checksum(data, chain[0])).result()
    assert store.read_state(namespace, chain[0], "tail").data == data
    device.fail_read = True
    assert store.read_state(namespace, chain[0], "tail") is None
    counters = store.counters.snapshot()
    assert (counters["blocks_read"], counters["bytes_read"], counters["blocks_missed"]) == (1, 4, 1)


STATE_NAMES = ("window", "tail", "x" * 256, "tail/0123abcd")  # of windows, and of requests that move


def put_states(store, namespace, chain):
    """Store a state object of each name beside each block; returns what became of them."""
    puts = [
        store.submit_put_state(namespace, prefix_hash, name, prefix_hash, block_checksum(prefix_hash, prefix_hash))
        for prefix_hash in chain
        for name in STATE_NAMES
    ]
    return {put.result(60).status for put in puts}


def blocks_with_states(store, namespace, chain):
    """Numbers of blocks that have a state object of each name. None may have but some."""
    there = [
        [store.read_state(namespace, prefix_hash, name) is not None for name in STATE_NAMES] for prefix_hash in chain
    ]
    assert all(len(set(names)) == 1 for names in there)
    return [block for block, names in enumerate(there) if names[0]]


@pytest.mark.parametrize("trouble", ["none", "not offered", "moved", "index distrusted"])
@pytest.mark.parametrize("lose_index", [False, True])
def test_a_delete_takes_all_state_objects_of_its_range_and_no_others(tmp_path, clock, trouble, lose_index):
    store = open_store(tmp_path, clock)
    namespace, other = store.register_namespace(spec()), store.register_namespace(spec(revision="r2"))
    chain = chain_of(namespace, 1, 40)
    for each in (namespace, other):
        assert put_states(store, each, chain) == {PutStatus.STORED}
    put(store, namespace, chain)
    if trouble == "not offered":
        for segment in store._segments.all():
            for slot in range(segment.slot_count):
                segment.suspect(slot)
    elif trouble == "moved":
        for segment in store._segments.all():
            keep = store._live_mask(segment)
            assert store._on_writer(lambda s=segment, k=keep: store._reclaimer._reclaim(s, k, store._writer))
    elif trouble == "index distrusted":
        keys = store._index.states_beside(namespace.namespace_id, chain.data)
        store._on_writer(lambda: store._index.commit({}, store._index.lookup(keys).items()))
        store._index.distrust("for a test")
    assert store.delete(namespace, chain, 3, 35) == 35
    assert store.counters.snapshot()["blocks_deleted"] == 35
    for segment in store._segments.all():
        segment.suspects = {}  # as after a minute
    for _ in range(2):
        assert set(blocks_with_states(store, namespace, chain)) <= {0, 1, 2, 38, 39}
        store.close()
        if lose_index:
            for path in (tmp_path / "index").iterdir():
                path.unlink()
        store = open_store(tmp_path, clock)
        assert blocks_with_states(store, namespace, chain) == [0, 1, 2, 38, 39]
        assert blocks_with_states(store, other, chain) == list(range(40))
    assert store.invariants().violations == ()
    store.close()


def test_a_state_object_beside_a_prefix_whose_block_is_not_there_is_deleted_and_can_be_put_again(tmp_path, clock):
    store = open_store(tmp_path, clock)
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 3)
    put_states(store, namespace, chain)
    assert store.delete(namespace, chain, 0, 3) == 0
    assert blocks_with_states(store, namespace, chain) == []
    assert put_states(store, namespace, chain) == {PutStatus.STORED}
    for _ in range(2):
        assert blocks_with_states(store, namespace, chain) == [0, 1, 2]
        store.close()
        store = open_store(tmp_path, clock)
    store.close()


def test_a_snapshot_spares_the_replay_while_it_is_alive(store, clock):
    groups = (
        KvGroup("full", KvGroupKind.FULL, (0,)),
        KvGroup("swa", KvGroupKind.SLIDING_WINDOW, (1,), window_tokens=128, replay_rule=ReplayMode.SNAPSHOT),
    )
    namespace = store.register_namespace(spec(groups=groups))
    chain = chain_of(namespace, 1, 4)
    put(store, namespace, chain)
    plan = store.match(namespace, chain).plan
    assert (plan.replay_start_token, plan.mode) == (384, ReplayMode.EXACT)
    data = b"window"
    store.submit_put_state(namespace, chain[3], "swa", data, block_checksum(data, chain[3]), "handoff").result()
    plan = store.match(namespace, chain).plan
    assert (plan.replay_start_token, plan.mode) == (512, ReplayMode.SNAPSHOT)
    clock.advance(601)
    assert store.match(namespace, chain).plan.mode is ReplayMode.EXACT


# Capacity


def test_the_directory_never_grows_over_its_cap(tmp_path, clock):
    capacity = 2 << 20
    store = open_store(tmp_path / "data", clock, capacity=capacity)
    namespace = store.register_namespace(spec(4096))
    hot = chain_of(namespace, 0, 8)
    put(store, namespace, hot)
    for conversation in range(1, 120):
        clock.advance(2)
        put(store, namespace, chain_of(namespace, conversation, 8))
        assert store.match(namespace, hot).hit_length_blocks == 8, "what is used all the time was evicted"
        clock.advance(61)
        assert du_bytes(tmp_path / "data") <= capacity
        assert store.status().used_bytes == du_bytes(tmp_path / "data")
    counters = store.counters.snapshot()
    assert counters["segments_reclaimed"] > 0
    assert counters["blocks_evicted"] > 0
    assert counters["blocks_stored"] - counters["blocks_evicted"] == store.status().live.blocks
    assert_whole(store, namespace, hot)
    store.close()


def test_a_smaller_cap_is_kept_from_the_start(tmp_path, clock):
    store = open_store(tmp_path, clock, capacity=8 << 20)
    namespace = store.register_namespace(spec(4096))
    for conversation in range(15):
        put(store, namespace, chain_of(namespace, conversation, 100))
        clock.advance(1)
    store.close()
    assert du_bytes(tmp_path) > 4 << 20
    store = open_store(tmp_path, clock, capacity=4 << 20)
    assert du_bytes(tmp_path) <= 4 << 20
    assert store.match(namespace, chain_of(namespace, 14, 100), peek=True).hit_length_blocks == 100
    store.close()


def test_each_lost_block_is_counted_once_under_its_cause(store, clock):
    one, two = store.register_namespace(spec()), store.register_namespace(spec(revision="r2"))
    put(store, one, chain_of(one, 1, 10), traffic_class="handoff")
    put(store, one, chain_of(one, 2, 20), traffic_class="agent")
    put(store, two, chain_of(two, 3, 40), traffic_class="agent")
    store.delete(one, chain_of(one, 2, 20), 0, 3)
    store.evict(EvictSelection(namespace=one, traffic_class="agent"), dry_run=False)
    store.drop_namespace(two, dry_run=False)
    clock.advance(601)
    store.sweep()
    store.sweep()
    counters = store.counters.snapshot()
    assert (counters["blocks_expired"], counters["blocks_evicted"], counters["blocks_deleted"]) == (10, 17, 43)
    assert store.status().segment_count == 0


def test_a_full_store_rejects_and_says_so_and_keeps_serving(tmp_path, clock):
    store = open_store(tmp_path, clock, capacity=2 << 20)
    namespace = store.register_namespace(spec(4096))
    chains, results, leases = [], [], []
    for conversation in range(100):
        chain = chain_of(namespace, conversation, 8)
        results.append(put(store, namespace, chain))
        chains.append(chain)
        leases.append(store.match(namespace, chain, lease_s=60).lease)  # so no file may go
    for chain, result, lease in zip(chains, results, leases, strict=True):
        stored = [block for block, outcome in enumerate(result) if outcome.status is PutStatus.STORED]
        found, _ = get(store, namespace, chain, lease=lease)
        assert sorted(found) == stored
    last = results[-1][-1]
    assert (last.status, last.reason) == (PutStatus.REJECTED, "STORE_FULL")
    assert "store.capacity" in last.detail
    clock.advance(61)
    assert statuses(put(store, namespace, chains[-1])) == [PutStatus.STORED] * 8
    store.close()


def test_dead_space_is_given_back_before_live_blocks_are_lost(tmp_path, clock):
    store = open_store(tmp_path, clock, capacity=2 << 20)
    namespace = store.register_namespace(spec(4096))
    chains = [chain_of(namespace, conversation, 10) for conversation in range(30)]
    for chain in chains:
        put(store, namespace, chain)
        store.delete(namespace, chain, 1, 9)
    clock.advance(61)
    for conversation in range(100, 115):
        put(store, namespace, chain_of(namespace, conversation, 10))
    assert store.counters.snapshot()["blocks_evicted"] == 0
    assert all(store.match(namespace, chain).hit_length_blocks == 1 for chain in chains)
    store.close()


def test_full_segments_of_small_blocks_are_left_in_peace(store, namespace):
    """Blocks smaller than a page fill a segment with padding, which is no dead space that moving them would give back."""
    put(store, namespace, chain_of(namespace, 1, 100))
    before = store.counters.snapshot()["bytes_written"]
    for _ in range(3):
        store.sweep()
    assert store.counters.snapshot()["bytes_written"] == before
    assert store.counters.snapshot()["segments_reclaimed"] == 0


def test_one_file_that_cannot_be_removed_does_not_stop_the_others(tmp_path, clock, caplog):
    device = FaultyDevice()
    store = open_store(tmp_path, clock, capacity=2 << 20, device=device)
    namespace = store.register_namespace(spec(4096))
    put(store, namespace, chain_of(namespace, 0, 8))
    stuck = next((tmp_path / "segments").iterdir()).name
    device.fail_unlink = lambda path: path.name == stuck
    for conversation in range(1, 150):
        clock.advance(2)
        results = put(store, namespace, chain_of(namespace, conversation, 8))
        assert statuses(results) == [PutStatus.STORED] * 8
        store._on_writer(store._tick)
    assert (tmp_path / "segments" / stuck).exists()
    assert sum("cannot be removed" in record.message for record in caplog.records) == 1
    assert store.status().used_bytes == du_bytes(tmp_path)
    store.close()


# Faults


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("after", range(6))
def test_a_full_disk_at_any_write_rejects_the_put_and_nothing_else(store, namespace, device, after, partial):
    old, new = chain_of(namespace, 1, 4), chain_of(namespace, 2, 4)
    put(store, namespace, old, traffic_class="agent")
    device.fail_write_after, device.partial_write = after, partial
    results = put(store, namespace, new, traffic_class="chatbot")
    if after < 4:  # header, payloads, use rows, rows
        assert statuses(results) == [PutStatus.REJECTED] * 4
        assert {result.reason for result in results} == {"STORE_FULL"}
        assert store.match(namespace, new).hit_length_blocks == 0
    assert_whole(store, namespace, old)
    device.heal()
    put(store, namespace, new, traffic_class="chatbot")
    assert_whole(store, namespace, new)
    assert_whole(store, namespace, old)


def test_a_rejected_put_does_not_come_back_when_the_index_is_rebuilt(tmp_path, clock):
    device = FaultyDevice()
    store = open_store(tmp_path, clock, device=device)
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 4)
    device.fail_write_after, device.partial_write = 3, True  # half of the rows reach the disk
    assert statuses(put(store, namespace, chain)) == [PutStatus.REJECTED] * 4
    device.heal()
    store.close()
    for path in (tmp_path / "index").iterdir():
        path.unlink()
    store = open_store(tmp_path, clock)
    assert store.match(namespace, chain).hit_length_blocks == 0
    store.close()


def test_no_room_for_a_new_file_rejects_and_recovers(store, namespace, device):
    chain = chain_of(namespace, 1, 2)
    device.fail_create = True
    assert {result.reason for result in put(store, namespace, chain)} == {"STORE_FULL"}
    device.heal()
    assert statuses(put(store, namespace, chain)) == [PutStatus.STORED] * 2


def test_a_failing_sync_rejects_and_the_blocks_are_not_offered(tmp_path, clock):
    device = FaultyDevice()
    store = open_store(tmp_path, clock, device=device, durability="sync")
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 2)
    device.fail_sync = True
    results = put(store, namespace, chain)
    assert {result.reason for result in results} == {"STORAGE_ERROR"}
    assert store.match(namespace, chain).hit_length_blocks == 0
    device.heal()
    assert statuses(put(store, namespace, chain)) == [PutStatus.STORED] * 2
    assert device.sync_count == 1
    store.close()


def test_a_failed_read_is_a_miss_and_no_exception(store, namespace, device):
    chain = chain_of(namespace, 1, 4)
    put(store, namespace, chain)
    device.fail_read = True
    assert set(get(store, namespace, chain)[1].values()) == {"IO_ERROR"}
    assert store.match(namespace, chain).hit_length_blocks == 0, "what the disk does not give is not claimed again"
    assert store.counters.snapshot()["blocks_unreadable"] == 4
    device.heal()
    store._segments.all()[0].suspects = {}  # as after a minute
    assert_whole(store, namespace, chain)


def test_what_is_not_offered_just_now_can_be_deleted_and_does_not_come_back(store, namespace, device):
    chain = chain_of(namespace, 1, 4)
    put(store, namespace, chain)
    device.fail_read = True
    assert set(get(store, namespace, chain)[1].values()) == {"IO_ERROR"}
    assert store.delete(namespace, chain, 1, 2) == 2
    device.heal()
    store._segments.all()[0].suspects = {}  # as after a minute
    assert set(get(store, namespace, chain)[0]) == {0, 3}
    assert store.counters.snapshot()["blocks_deleted"] == 2


@pytest.mark.parametrize("asked", [3, 300])
def test_what_a_distrusted_index_does_not_know_can_be_deleted_and_does_not_come_back(tmp_path, clock, asked):
    """It is on the disk, and the next start would find it."""
    store = open_store(tmp_path, clock, capacity=16 << 20)
    namespace = store.register_namespace(spec())
    chain, other = chain_of(namespace, 1, 400, shared_blocks=2), chain_of(namespace, 2, 5, shared_blocks=2)
    put(store, namespace, chain)
    put(store, namespace, other)
    keys = block_keys(namespace.namespace_id, chain.data, 1, 399)
    store._index.commit({}, store._index.lookup(keys).items())
    store._index.distrust("as after a start without room for it")
    assert store.match(namespace, chain).hit_length_blocks == 1
    assert store.delete(namespace, chain, 1, asked) == asked
    assert store.delete(namespace, chain, 1, asked) == 0
    store.close()
    store = open_store(tmp_path, clock, capacity=16 << 20)
    assert set(get(store, namespace, chain)[0]) == {0, *range(asked + 1, 400)}
    assert set(get(store, namespace, other)[0]) == {0, 2, 3, 4}
    assert store.invariants().violations == ()
    store.close()


def test_a_delete_that_is_the_first_to_meet_a_damaged_index_deletes_all_the_same(tmp_path, clock):
    store = open_store(tmp_path, clock)
    namespace = store.register_namespace(spec())
    chains = [chain_of(namespace, conversation, 32) for conversation in range(8)]
    for chain in chains:
        put(store, namespace, chain)
    store._index._env.sync(True)
    with (tmp_path / "index" / "data.mdb").open("r+b") as file:
        data = file.read()
        for page in range(2 * 4096, len(data), 4096):
            flags, lower = struct.unpack_from("<HH", data, page + 10)
            if flags & 2 and (lower - 16) // 2 > 4:  # a leaf page with entries of blocks
                file.seek(page + 10)
                file.write(b"\0\0")
    assert store.delete(namespace, chains[3], 0, 32) == 32
    store.close()
    store = open_store(tmp_path, clock)
    assert get(store, namespace, chains[3])[0] == {}
    assert_whole(store, namespace, chains[4])
    store.close()


def test_a_delete_without_index_or_a_segments_rows_deletes_what_it_can_and_says_so(tmp_path, clock):
    device = FaultyDevice()
    store = open_store(tmp_path, clock, device=device)
    namespace = store.register_namespace(spec())
    chains = [chain_of(namespace, conversation, 8) for conversation in range(2)]
    put_in_segments(store, namespace, chains)
    store._index.distrust("for a test")
    bad = store._segments.all()[0]
    device.fail_read_of = lambda path, begin, end: errno.EIO if path == bad.path else 0
    with pytest.raises(StorageError, match="Input/output error"):
        store.delete(namespace, chains[1], 0, 8)
    device.heal()
    assert get(store, namespace, chains[1])[0] == {}
    assert_whole(store, namespace, chains[0])
    store.close()


def test_one_bad_sector_costs_one_block_for_a_minute(store, namespace, device):
    chain = chain_of(namespace, 1, 6)
    put(store, namespace, chain)
    bad = store._segments.all()[0].layout.payload_offset + 3 * 4096
    device.fail_read_of = lambda path, begin, end: errno.EIO if begin <= bad < end else 0
    match = store.match(namespace, chain)
    found, misses = get(store, namespace, chain, lease=match.lease)
    assert (sorted(found), misses) == ([0, 1, 2, 4, 5], {3: "IO_ERROR"})
    assert store.match(namespace, chain).hit_length_blocks == 3
    assert {result.status for result in put(store, namespace, chain, [3])} == {PutStatus.STORED}
    assert_whole(store, namespace, chain)  # it lies elsewhere now
    device.heal()
    assert store.invariants().violations == ()


@pytest.mark.parametrize("block_bytes", [4096, 5000])
@pytest.mark.parametrize("missing", [1, 4095, 4096, 4097])
def test_a_short_read_never_yields_a_padded_buffer(store, device, block_bytes, missing):
    namespace = store.register_namespace(spec(block_bytes))
    chain = chain_of(namespace, 1, 4)
    put(store, namespace, chain)
    device.short_read_bytes = missing
    found, misses = get(store, namespace, chain)
    assert all(data == payload(chain[block], block_bytes) for block, data in found.items())
    assert 3 in misses


@pytest.mark.parametrize("victim", [0, 3, 7])
@pytest.mark.parametrize("offset", [0, 100, BLOCK_BYTES - 1])
def test_a_flipped_bit_is_a_miss_is_counted_and_not_offered_again(store, namespace, tmp_path, victim, offset):
    chain = chain_of(namespace, 1, 8)
    put(store, namespace, chain)
    (path,) = (tmp_path / "data" / "segments").iterdir()
    position = path.read_bytes().index(payload(chain[victim])) + offset
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0x10]))
    found, misses = get(store, namespace, chain)
    assert misses == {victim: "CORRUPT"}
    assert len(found) == 7
    assert store.counters.snapshot()["blocks_corrupt"] == 1
    assert store.match(namespace, chain).hit_length_blocks == victim
    assert get(store, namespace, chain)[1] == {victim: "NOT_FOUND"}
    assert statuses(put(store, namespace, chain)).count(PutStatus.STORED) == 1
    assert_whole(store, namespace, chain)


@pytest.mark.parametrize("offset_bytes", [0, 1 << 40, 1 << 63, (1 << 64) - 1])
def test_a_row_that_is_whole_but_leads_nowhere_costs_its_block_and_no_other(store, namespace, offset_bytes):
    chain = chain_of(namespace, 1, 3)
    put(store, namespace, chain)
    (segment,) = store._segments.all()
    entry = fmt.Entry.of_row(segment.read_rows(1, 1)[0])
    with segment.path.open("r+b") as file:
        file.seek(segment.layout.row_offset(1))
        file.write(fmt.encode_row(segment.segment_id, 1, offset_bytes, entry))
    assert get(store, namespace, chain)[1] == {1: "CORRUPT"}
    assert store.counters.snapshot()["blocks_corrupt"] == 1
    assert store.match(namespace, chain).hit_length_blocks == 1


ROW_BITS = 8 * fmt.ROW_BYTES


@pytest.mark.parametrize("leased", [False, True])
def test_a_flipped_bit_anywhere_in_a_row_costs_its_block_and_no_other(tmp_path, clock, leased):
    store = open_store(tmp_path, clock, capacity=64 << 20)
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 3)
    put(store, namespace, chain)
    key = block_keys(namespace.namespace_id, chain.data, 1, 1)[0]
    for bit in range(ROW_BITS):
        addr = store._index.lookup([key])[key]
        segment = store._segments.get(addr.segment_id)
        lease = store.match(namespace, chain).lease if leased else b""
        flip_bit(segment.path, segment.layout.row_offset(addr.slot) + bit // 8, bit % 8)
        found, misses = get(store, namespace, chain, lease=lease)
        assert (found, misses) == ({block: payload(chain[block]) for block in (0, 2)}, {1: "CORRUPT"}), bit
        assert store.counters.snapshot()["blocks_corrupt"] == bit + 1
        assert store.match(namespace, chain).hit_length_blocks == 1
        assert statuses(put(store, namespace, chain)) == [PutStatus.EXISTS, PutStatus.STORED, PutStatus.EXISTS]
    assert_whole(store, namespace, chain)
    store.close()


def put_state(store, namespace, chain, data):
    """Store a state object beside the first block, where none may be; returns its index key."""
    result = store.submit_put_state(namespace, chain[0], "window", data, block_checksum(data, chain[0])).result(60)
    assert result.status is PutStatus.STORED
    return state_key(namespace.namespace_id, chain[0], state_hash(chain[0], "window"))


def test_a_flipped_bit_anywhere_in_a_state_objects_row_is_a_miss_and_it_can_be_stored_again(tmp_path, clock, device):
    store = open_store(tmp_path, clock, capacity=64 << 20, device=device)
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 1)
    read, sizes = device.read, []

    def note_size(descriptor, buffers, offset_bytes):
        sizes.append(sum(len(buffer) for buffer in buffers))
        return read(descriptor, buffers, offset_bytes)

    device.read = note_size
    key = put_state(store, namespace, chain, b"window bytes")
    for bit in range(ROW_BITS):
        addr = store._index.lookup([key])[key]
        segment = store._segments.get(addr.segment_id)
        flip_bit(segment.path, segment.layout.row_offset(addr.slot) + bit // 8, bit % 8)
        sizes.clear()
        assert store.read_state(namespace, chain[0], "window") is None, bit
        assert max(sizes) <= fmt.ROW_BYTES, "no more memory is taken than a whole row may ask for"
        assert store.counters.snapshot()["blocks_corrupt"] == bit + 1
        assert store.read_state(namespace, chain[0], "window") is None
        assert store.counters.snapshot()["blocks_corrupt"] == bit + 1, "it was offered again"
        put_state(store, namespace, chain, b"window bytes")
        assert store.read_state(namespace, chain[0], "window").data == b"window bytes"
    store.close()


def test_an_entry_that_leads_a_state_object_to_another_row_goes_and_it_can_be_stored_again(store, namespace):
    chain = chain_of(namespace, 1, 1)
    put(store, namespace, chain)
    key = put_state(store, namespace, chain, b"window bytes")
    elsewhere = store.find_blocks(chain[0].hex())[0].addr
    store._on_writer(lambda: store._index.commit({key: elsewhere}))
    assert store.read_state(namespace, chain[0], "window") is None
    assert put_state(store, namespace, chain, b"window bytes") == key
    assert store.read_state(namespace, chain[0], "window").data == b"window bytes"
    assert store.counters.snapshot()["blocks_corrupt"] == 0
    assert_whole(store, namespace, chain)


def test_swapped_rows_give_misses_not_each_others_blocks(store, namespace, tmp_path):
    chain = chain_of(namespace, 1, 2)
    put(store, namespace, chain)
    addr = store.find_blocks(chain[0].hex())[0].addr
    segment = store._segments.get(addr.segment_id)
    offset = segment.layout.row_offset(0)
    with segment.path.open("r+b") as file:
        file.seek(offset)
        first, second = file.read(96), file.read(96)
        file.seek(offset)
        file.write(second + first)
    found, misses = get(store, namespace, chain)
    assert found == {}
    assert misses == {0: "CORRUPT", 1: "CORRUPT"}
    assert store.match(namespace, chain).hit_length_blocks == 0, "what is damaged is not offered again"
    assert store.counters.snapshot()["blocks_corrupt"] == 2


READERS = 16


def read_at_once(look, rounds=math.inf, until=lambda: False):
    """`look` again and again in as many threads as there are readers; returns what it found wrong, and how often it looked."""
    wrong, looks = [], []

    def read():
        done = 0
        while done < rounds and not until():
            wrong.extend(look(done))
            done += 1
        looks.append(done)

    readers = [threading.Thread(target=read) for _ in range(READERS)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert len(looks) == READERS, "a reader died"
    return wrong, sum(looks)


def test_readers_see_a_block_whole_or_not_at_all(store, namespace):
    """Readers race a writer: each get is a miss or byte-equal, and what a match has promised is there."""
    chains = [chain_of(namespace, conversation, 6) for conversation in range(50)]
    looks = 0

    def look(turn):
        nonlocal looks
        looks += 1  # roughly is enough: it paces the writer
        chain = chains[turn % len(chains)]
        match = store.match(namespace, chain)
        found, misses = get(store, namespace, chain, lease=match.lease)
        yield from ((block, "bytes") for block, data in found.items() if data != payload(chain[block]))
        yield from ((block, reason) for block, reason in misses.items() if block < match.hit_length_blocks)
        yield from ((block, reason) for block, reason in misses.items() if reason != "NOT_FOUND")

    written = threading.Event()

    def write():
        for number, chain in enumerate(chains):
            while looks < 25 * number:
                time.sleep(0.001)
            put(store, namespace, chain)
        written.set()

    writer = threading.Thread(target=write)
    writer.start()
    wrong, rounds = read_at_once(look, until=written.is_set)
    writer.join()
    assert wrong == []
    assert rounds >= 1000
    for chain in chains:
        assert_whole(store, namespace, chain)


@pytest.mark.parametrize("stalled_write", range(4))  # header, payloads, use rows, rows
def test_a_block_whose_write_is_stalled_half_way_is_a_miss_until_it_is_committed(
    store, namespace, device, stalled_write
):
    chain = chain_of(namespace, 1, 4)
    device.stall_write_after = stalled_write
    future = store.submit_put(namespace, chain, [put_block(chain, block) for block in range(4)])
    assert device.stalled.wait(30)

    def look(_):
        if store.match(namespace, chain).hit_length_blocks:
            yield "match"
        if get(store, namespace, chain)[0]:
            yield "get"

    wrong, rounds = read_at_once(look, rounds=64)
    device.go_on.set()
    assert wrong == []
    assert rounds >= 1000
    assert statuses(future.result()) == [PutStatus.STORED] * 4
    assert_whole(store, namespace, chain)


def test_hit_rate_counts_what_was_asked_at_match(store, namespace):
    chain = chain_of(namespace, 1, 100)
    put(store, namespace, chain, range(25))
    store.match(namespace, chain)
    store.match(namespace, chain, peek=True)
    counters = store.counters.snapshot()
    assert (counters["asked_blocks"], counters["hit_blocks"]) == (100, 25)
    assert (counters["asked_tokens"], counters["hit_tokens"]) == (12_800, 3_200)


def test_too_many_bytes_waiting_is_an_overload_not_a_queue(tmp_path, clock):
    store = open_store(tmp_path, clock, capacity=64 << 20, put_queue=1 << 20)
    namespace = store.register_namespace(spec(512 << 10))
    gate = threading.Event()
    store._writer.call(gate.wait)
    chain = chain_of(namespace, 1, 6)
    futures = [
        store.submit_put(namespace, chain, [put_block(chain, block, payload(chain[block], 512 << 10))])
        for block in range(6)
    ]
    gate.set()
    results = [future.result()[0] for future in futures]
    assert [result.reason for result in results] == ["", ""] + ["OVERLOADED"] * 4
    store.close()


def test_tiny_blocks_count_in_the_queue_as_what_they_take_and_not_as_their_bytes(tmp_path, clock):
    """Waiting and being committed, a block costs about a page of memory however small it is."""
    store = open_store(tmp_path, clock, capacity=64 << 20, put_queue=1 << 20)
    namespace = store.register_namespace(spec(1))
    gate = threading.Event()
    store._writer.call(gate.wait)
    chains = [chain_of(namespace, conversation, 100) for conversation in range(4)]
    futures = [
        store.submit_put(namespace, chain, [put_block(chain, block, payload(chain[block], 1)) for block in range(100)])
        for chain in chains
    ]
    gate.set()
    reasons = [{result.reason for result in future.result()} for future in futures]
    assert reasons == [{""}, {""}, {"OVERLOADED"}, {"OVERLOADED"}]
    store.close()


def test_a_closed_store_refuses_puts(tmp_path):
    store = open_store(tmp_path)
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 1)
    store.close()
    store.close()
    with pytest.raises(StorageError):
        store.submit_put(namespace, chain, [put_block(chain, 0)])
