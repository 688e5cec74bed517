"""A directory that gives no space back, a disk smaller than the cap, leases on everything: what cap and shares still mean."""

from __future__ import annotations

import errno
import itertools
import os

import pytest

from faults import FaultyDevice
from kvstore.clock import ManualClock
from kvstore.config import TenantConfig, TrafficClassConfig
from kvstore.errors import StoreFullError
from kvstore.index import BlockIndex
from kvstore.log import format as fmt
from kvstore.types import EvictSelection
from kvstore_api.results import PutStatus
from stores import chain_of, fill_up, get, open_store, put, spec, tree_bytes


@pytest.fixture
def clock():
    return ManualClock()


class SmallDisk(FaultyDevice):
    """A disk of so many bytes for segment files, whatever the cap says."""

    def __init__(self, root, size_bytes):
        super().__init__()
        self.root, self.size_bytes = root, size_bytes

    def write(self, descriptor, buffers, offset_bytes):
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        if size > 2 * fmt.ALIGNMENT_BYTES and tree_bytes(self.root / "segments") + size > self.size_bytes:
            raise OSError(errno.ENOSPC, "injected: no space left on device")
        super().write(descriptor, buffers, offset_bytes)


def test_a_disk_that_is_full_below_the_cap_gets_its_dead_space_back(tmp_path, clock):
    """Nothing can be moved any more, because a move needs room first."""
    device = SmallDisk(tmp_path, 4 << 20)
    store = open_store(tmp_path, clock, capacity=64 << 20, segment_size=512 << 10, device=device, tick_s=None)
    namespace = store.register_namespace(spec(16_384))
    conversation = 0
    while {result.status for result in put(store, namespace, chain_of(namespace, conversation, 8))} == {
        PutStatus.STORED
    }:
        conversation += 1
    for number in range(conversation):
        store.delete(namespace, chain_of(namespace, number, 8), 1, 7)
    for _ in range(60):
        clock.advance(1)
        store._on_writer(store._tick)
        put(store, namespace, chain_of(namespace, 3000, 1))
    stored = [put(store, namespace, chain_of(namespace, 1000 + number, 8)) for number in range(10)]
    assert {result.status for results in stored for result in results} == {PutStatus.STORED}
    left = sum(bool(get(store, namespace, chain_of(namespace, number, 1))[0]) for number in range(conversation))
    assert left >= conversation // 2, "most of what lives was moved, once there was room"
    assert store.invariants().violations == ()
    store.close()


def test_a_directory_that_unlinks_nothing_costs_a_few_segments_and_not_the_cache(tmp_path, clock):
    device = FaultyDevice()
    capacity = 8 << 20
    store = open_store(tmp_path, clock, capacity=capacity, segment_size=256 << 10, device=device, tick_s=None)
    namespace = store.register_namespace(spec(4096))
    chains = []
    while store._reclaimer.room_bytes() > 100_000:
        chains.append(chain_of(namespace, len(chains), 8))
        put(store, namespace, chains[-1])
    for chain in chains:
        store.delete(namespace, chain, 0, 3)
    clock.advance(100)
    before = store.status().live.blocks
    device.fail_unlink = lambda path: path.parent.name == "segments"
    for number in range(20):
        put(store, namespace, chain_of(namespace, 3000 + number, 8))
        store._on_writer(store._tick)
        assert tree_bytes(tmp_path) <= capacity
    assert store.status().live.blocks >= 0.8 * before
    device.heal()
    store._on_writer(store._tick)
    for number in range(20):
        results = put(store, namespace, chain_of(namespace, 4000 + number, 8))
        assert {result.status for result in results} == {PutStatus.STORED}
    store.close()


def all_stored(results):
    return {result.status for result in results} == {PutStatus.STORED}


class UnsyncedFiles(FaultyDevice):
    """Some files cannot be synced."""

    def __init__(self):
        super().__init__()
        self.not_synced = set()

    def sync(self, descriptor):
        if os.fstat(descriptor).st_ino in self.not_synced:
            raise OSError(errno.EIO, "injected: sync failed")
        super().sync(descriptor)


@pytest.mark.parametrize("odd_files", [1, 3, 7])
@pytest.mark.parametrize("how", ["not permitted", "not synced", "gone"])
def test_files_that_cannot_be_given_back_cost_their_space_and_nothing_else(tmp_path, clock, how, odd_files):
    """They are the coldest, so that they are all met before any other, and tried again at every tick."""
    device = UnsyncedFiles()
    durability = "sync" if how == "not synced" else "memory"
    store = open_store(
        tmp_path, clock, capacity=8 << 20, segment_size=256 << 10, device=device, durability=durability, tick_s=None
    )
    namespace = store.register_namespace(spec(4096))
    fill_up(store, namespace, clock)
    odd = [segment.path for segment in store._segments.all()[:odd_files]]
    if how == "not permitted":
        device.fail_unlink = lambda path: path in odd
    elif how == "not synced":
        device.not_synced = {path.stat().st_ino for path in odd}
    else:
        for path in odd:
            path.unlink()
    for conversation in range(500, 800):
        clock.advance(60)
        assert all_stored(put(store, namespace, chain_of(namespace, conversation, 8)))
        store._on_writer(store._tick)
        assert tree_bytes(tmp_path) <= 8 << 20
    assert {path.exists() for path in odd} == {how != "gone"}
    assert store.status().used_bytes == tree_bytes(tmp_path)
    assert store.invariants().violations == ()
    device.heal()
    device.not_synced = set()
    store._on_writer(store._tick)
    assert not any(path.exists() for path in odd)
    store.close()


def test_more_files_that_cannot_be_given_back_than_is_an_accident_cost_time_as_well(tmp_path, clock):
    """Puts are refused then but for a segment a minute that is tried, until one of them goes."""
    device = UnsyncedFiles()
    store = open_store(tmp_path, clock, capacity=8 << 20, segment_size=256 << 10, device=device, tick_s=None)
    namespace = store.register_namespace(spec(4096))
    fill_up(store, namespace, clock)
    odd = {".seg"}
    device.fail_unlink = lambda path: path.suffix in odd  # those made meanwhile too, but nothing else
    numbers = itertools.count(500)

    def some_puts(count, apart_s):
        stored = 0
        for conversation in itertools.islice(numbers, count):
            clock.advance(apart_s)
            stored += all_stored(put(store, namespace, chain_of(namespace, conversation, 8)))
            store._on_writer(store._tick)
        return stored

    some_puts(30, 0)
    live = store.status().live.blocks
    assert some_puts(30, 0) == 0
    assert store.status().live.blocks == live > 0
    some_puts(10, 61)
    assert some_puts(30, 1) < 30
    odd.clear()
    some_puts(10, 61)
    assert some_puts(30, 1) == 30
    store.close()


def test_a_full_disk_whose_blocks_are_all_leased_costs_no_more_than_is_missing(tmp_path, clock):
    """What was retired for it gives its space when its leases pass; the puts that are rejected until then cost nothing more."""
    device = SmallDisk(tmp_path, 4 << 20)
    store = open_store(tmp_path, clock, capacity=64 << 20, segment_size=512 << 10, device=device, tick_s=None)
    namespace = store.register_namespace(spec(16_384))
    chains = []
    while all_stored(put(store, namespace, chain := chain_of(namespace, len(chains), 8))):
        chains.append(chain)
        assert store.match(namespace, chain, lease_s=30).hit_length_blocks == 8
    rejected = 0
    for second in range(60):
        rejected += not all_stored(put(store, namespace, chain_of(namespace, 1000 + second, 1)))
        clock.advance(1)
        store._on_writer(store._tick)
    assert 20 < rejected < 35
    left = sum(store.match(namespace, chain, peek=True).hit_length_blocks for chain in chains)
    assert left >= 8 * len(chains) - 2 * 32, "one segment for the first put, one for those after it"
    store.close()


@pytest.mark.parametrize("how", ["a flipped bit", "a clock that was ahead"])
def test_a_lease_longer_than_any_that_is_given_keeps_no_file(tmp_path, clock, how):
    if how == "a clock that was ahead":
        clock.jump(5 * 365 * 86_400)
    store = open_store(tmp_path, clock, tick_s=None)
    namespace = store.register_namespace(spec(4096))
    chains = fill_up(store, namespace, clock)
    for chain in chains:
        store.match(namespace, chain)
    store.close()
    if how == "a clock that was ahead":
        clock.jump(-5 * 365 * 86_400)
        (tmp_path / "clock").unlink()
    for path in (tmp_path / "segments").iterdir() if how == "a flipped bit" else ():
        with path.open("r+b") as file:
            file.seek(fmt.LEASE_UNTIL_OFFSET + 3)
            file.write(b"\xff")
    store = open_store(tmp_path, clock, tick_s=None)
    late = chains[-1]
    lease = store.match(namespace, late, lease_s=50).lease
    store.evict(EvictSelection(namespace=namespace), dry_run=False)
    assert store.status().retiring_bytes > 2 << 20
    clock.advance(49)
    store._on_writer(store._tick)
    assert len(get(store, namespace, late, lease=lease)[0]) == 8, "those that are given now still count"
    clock.advance(13)
    store._on_writer(store._tick)
    assert store.status().retiring_bytes == 0
    assert all(all_stored(put(store, namespace, chain)) for chain in chains)
    store.close()


class BadPayloads(FaultyDevice):
    """Reads behind the tables fail in these parts of a file; the tables are in the page cache."""

    def __init__(self):
        super().__init__()
        self.bad = range(0)

    def read(self, descriptor, buffers, offset_bytes):
        end = offset_bytes + sum(len(buffer) for buffer in buffers)
        if max(offset_bytes, self.bad.start) < min(end, self.bad.stop):
            raise OSError(errno.EIO, "injected: the disk does not give it")
        return super().read(descriptor, buffers, offset_bytes)


@pytest.mark.parametrize("bad_blocks", [range(1), range(13, 14), range(40)])
def test_payloads_that_cannot_be_read_now_are_not_lost_for_the_dead_ones_around_them(
    tmp_path, clock, bad_blocks, caplog
):
    device = BadPayloads()
    store = open_store(tmp_path, clock, device=device, tick_s=None)
    namespace = store.register_namespace(spec(4096))
    chain = chain_of(namespace, 1, 40)
    put(store, namespace, chain)
    (segment,) = store._segments.all()
    store.delete(namespace, chain, 0, 5)
    store.delete(namespace, chain, 14, 26)
    first = segment.layout.payload_offset
    device.bad = range(first + 4096 * bad_blocks.start, first + 4096 * bad_blocks.stop)
    for _ in range(30):
        clock.advance(1)
        store.sweep()
    if 13 in bad_blocks:
        assert sum("cannot be read" in record.message for record in caplog.records) == 1
    device.bad = range(0)
    clock.advance(61)
    store.sweep()
    assert set(get(store, namespace, chain)[0]) == set(range(5, 14))
    counters = store.counters.snapshot()
    assert (counters["blocks_evicted"], counters["segments_reclaimed"]) == (0, 1), "and then the dead ones go"
    assert store.invariants().violations == ()
    store.close()


def test_payloads_that_cannot_be_read_do_not_keep_their_space_when_it_is_needed(tmp_path, clock):
    device = BadPayloads()
    store = open_store(tmp_path, clock, capacity=2 << 20, device=device, tick_s=None)
    namespace = store.register_namespace(spec(4096))
    fill_up(store, namespace, clock)
    device.bad = range(store._segments.all()[0].layout.payload_offset, 1 << 40)
    for conversation in range(1000, 1200):
        clock.advance(1)
        assert all_stored(put(store, namespace, chain_of(namespace, conversation, 8)))
        store._on_writer(store._tick)
    store.close()


@pytest.mark.parametrize("segments", [64, 160])
def test_moves_keep_the_cap_while_leases_hold_every_file(tmp_path, clock, segments):
    capacity = segments << 18
    store = open_store(tmp_path, clock, capacity=capacity, segment_size=1 << 18, tick_s=None)
    namespace = store.register_namespace(spec(16_384))
    for conversation in range(int(segments * 1.3 * 16 / 10)):
        chain = chain_of(namespace, conversation, 10)
        put(store, namespace, chain)
        store.match(namespace, chain, lease_s=60)
        store.delete(namespace, chain, 0, 3)
        if conversation % 2:
            store._on_writer(store._tick)
        assert tree_bytes(tmp_path) <= capacity
    store.close()


def test_retired_files_of_a_dead_process_go_even_if_the_index_cannot_be_written_at_start(tmp_path, clock, monkeypatch):
    store = open_store(tmp_path, clock, capacity=12 << 20, segment_size=512 << 10, tick_s=None)
    namespace = store.register_namespace(spec(16_384))
    for conversation in range(40):
        chain = chain_of(namespace, conversation, 8)
        put(store, namespace, chain)
        store.match(namespace, chain, lease_s=30)
    store.evict(EvictSelection(namespace=namespace), dry_run=False)
    assert store.status().retiring_bytes > 4 << 20
    store._writer.close()
    store._index._env.close()
    store._segments.release()
    store._data_dir.close()
    clock.advance(120)

    def full(*_args, **_kwargs):
        raise StoreFullError("index: no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(BlockIndex, "commit", full)
        store = open_store(tmp_path, clock, capacity=12 << 20, segment_size=512 << 10, tick_s=None)
    store.sweep()
    assert store.status().used_bytes < 2 << 20
    store.close()


@pytest.mark.parametrize("leased", [False, True])
def test_leases_of_others_do_not_cost_a_tenant_its_share(tmp_path, clock, leased):
    store = open_store(
        tmp_path,
        clock,
        capacity=8 << 20,
        segment_size=256 << 10,
        tenants={"small": TenantConfig(share=0.4)},
        tick_s=None,
    )
    small, crowd = (store.register_namespace(spec(4096, tenant=tenant)) for tenant in ("small", "crowd"))
    chains = [chain_of(small, conversation, 8) for conversation in range(60)]
    for chain in chains:
        put(store, small, chain)
    clock.advance(5)
    for conversation in range(400):
        chain = chain_of(crowd, conversation, 8)
        put(store, crowd, chain)
        if leased:
            store.match(crowd, chain, lease_s=60)
    assert sum(store.match(small, chain, peek=True).hit_length_blocks for chain in chains) == 480
    store.close()


def test_one_unreadable_segment_stops_neither_expiry_nor_limits_and_is_tried_again(tmp_path, clock):
    class OneBadFile(FaultyDevice):
        bad = None

        def read(self, descriptor, buffers, offset_bytes):
            if descriptor == self.bad:
                raise OSError(errno.EIO, "injected")
            return super().read(descriptor, buffers, offset_bytes)

    device = OneBadFile()
    classes = {"a": TrafficClassConfig(ttl_s=100_000, limit=0.2), "b": TrafficClassConfig(ttl_s=50)}
    store = open_store(tmp_path, clock, capacity=4 << 20, device=device, traffic_classes=classes, tick_s=None)
    namespace = store.register_namespace(spec(4096))
    results = [put(store, namespace, chain_of(namespace, number, 8), traffic_class="a") for number in range(30)]
    assert results[-1][0].reason == "QUOTA_EXCEEDED"
    for number in range(30, 50):
        put(store, namespace, chain_of(namespace, number, 8), traffic_class="b")
    first = next(segment for segment in store._segments.all() if segment.header.class_id == 1)
    device.bad = first._descriptor
    clock.advance(120)
    store._on_writer(store._tick)
    assert store._quotas.refused == set()
    assert {segment.header.class_id for segment in store._segments.all()} == {1}
    (stored,) = put(store, namespace, chain_of(namespace, 1000, 1), traffic_class="a")
    assert stored.status is PutStatus.STORED
    store.evict(EvictSelection(down_to_share=0.05), dry_run=False)
    device.bad = None
    clock.advance(100_000)
    store.sweep()
    assert store.status().segment_count == 0
    store.close()


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_gives_no_segment_back_does_not_cost_them_all(tmp_path, clock, error):
    """It syncs an empty file and no other: every segment that is given up refuses."""

    class Refuses(FaultyDevice):
        bad = False

        def sync(self, descriptor):
            if self.bad and os.readlink(f"/proc/self/fd/{descriptor}").endswith(".seg"):
                raise OSError(error, "injected")
            super().sync(descriptor)

    device = Refuses()
    store = open_store(
        tmp_path, clock, capacity=8 << 20, segment_size=256 << 10, device=device, durability="sync", tick_s=None
    )
    namespace = store.register_namespace(spec())
    fill_up(store, namespace, clock)
    before = store.status().live.blocks
    device.bad = True
    for number in range(6):
        put(store, namespace, chain_of(namespace, 1_000 + number, 8))
        store._on_writer(store._tick)
    assert store.status().live.blocks > before * 0.6
    device.bad = False
    store._on_writer(store._tick)
    for number in range(6):
        results = put(store, namespace, chain_of(namespace, 1_000 + number, 8))
        assert {result.status for result in results} == {PutStatus.STORED}
    store.close()
