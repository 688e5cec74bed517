"""Reclaiming while others use the store: what is moved stays what it was, and nothing stops the puts."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import resource
import subprocess
import threading
from pathlib import Path

import pytest

from faults import FaultyDevice
from kvstore.clock import ManualClock
from kvstore.errors import InvalidArgumentError, StorageError
from kvstore.index import KEY_BYTES, block_keys
from kvstore.log import format as fmt
from kvstore.log.device import FileDevice
from kvstore.types import BlockAddr, EvictSelection, SegmentId
from kvstore_api.chain import Chain
from kvstore_api.checksum import block_checksum
from kvstore_api.results import PutStatus
from stores import (
    assert_whole,
    chain_of,
    du_bytes,
    get,
    open_store,
    payload,
    put,
    put_block,
    put_in_segments,
    seal,
    spec,
    tree_bytes,
)


@pytest.fixture
def clock():
    return ManualClock()


def stored(results):
    return [result.block for result in results if result.status is PutStatus.STORED]


def test_a_delete_during_a_reclaim_is_not_undone(tmp_path, clock):
    """Deletes race moves of the same blocks for a while; what was acknowledged as deleted must not be readable."""
    store = open_store(tmp_path, clock, capacity=2 << 20)
    namespace = store.register_namespace(spec(4096))
    stop = threading.Event()

    def press():
        conversation = 1000
        while not stop.is_set():
            chain = chain_of(namespace, conversation, 12)
            put(store, namespace, chain)
            store.delete(namespace, chain, 4, 8)
            conversation += 1

    presser = threading.Thread(target=press)
    presser.start()
    try:
        for conversation in range(150):
            chain = chain_of(namespace, conversation, 6)
            put(store, namespace, chain)
            clock.advance(1)
            store.match(namespace, chain)
            store.delete(namespace, chain, 0, 6)
            assert get(store, namespace, chain)[0] == {}
            assert store.match(namespace, chain).hit_length_blocks == 0
    finally:
        stop.set()
        presser.join()
    counters = store.counters.snapshot()
    assert counters["segments_reclaimed"] > 0
    assert counters["blocks_deleted"] <= counters["blocks_stored"]
    store.close()


def test_a_put_larger_than_what_is_free_keeps_what_it_acknowledges(tmp_path, clock):
    """A group that fills segments and makes room in turn must not reclaim what it has just written."""
    store = open_store(tmp_path, clock, capacity=4 << 20)
    namespace = store.register_namespace(spec(4096))
    for conversation in range(40):
        put(store, namespace, chain_of(namespace, conversation, 20))
        clock.advance(1)
        if conversation % 3:
            store.match(namespace, chain_of(namespace, conversation, 20), lease_s=60)
    big = chain_of(namespace, 99, 300)
    results = put(store, namespace, big)
    found, _ = get(store, namespace, big)
    assert sorted(found) == stored(results)
    assert all(data == payload(big[block], 4096) for block, data in found.items())
    assert du_bytes(tmp_path) <= 4 << 20
    store.close()


def test_leases_on_everything_do_not_stop_the_puts(tmp_path, clock):
    store = open_store(tmp_path, clock, capacity=4 << 20)
    namespace = store.register_namespace(spec(4096))
    rejected = 0
    for conversation in range(150):
        chain = chain_of(namespace, conversation, 10)
        rejected += 10 - len(stored(put(store, namespace, chain)))
        store.match(namespace, chain, lease_s=5)
        clock.advance(1)
        store.sweep()
        assert du_bytes(tmp_path) <= 4 << 20
    assert rejected == 0
    store.close()


def test_one_unreadable_segment_does_not_stop_the_puts(tmp_path, clock, caplog):
    class OneBadFile(FaultyDevice):
        bad: Path | None = None

        def read(self, descriptor, buffers, offset_bytes):
            if self.bad is not None and os.path.samestat(os.fstat(descriptor), self.bad.stat()):
                raise OSError(errno.EIO, "injected")
            return super().read(descriptor, buffers, offset_bytes)

    device = OneBadFile()
    store = open_store(tmp_path, clock, capacity=2 << 20, device=device)
    namespace = store.register_namespace(spec(4096))
    put(store, namespace, chain_of(namespace, 0, 8))
    device.bad = next((tmp_path / "segments").iterdir())
    for conversation in range(1, 120):
        clock.advance(2)
        assert len(stored(put(store, namespace, chain_of(namespace, conversation, 8)))) == 8
    assert sum("cannot be read" in record.message for record in caplog.records) == 1
    device.bad = None
    store.close()


@pytest.mark.parametrize("lose_index", [False, True])
def test_blocks_that_cannot_be_moved_stay_where_they_are_and_once(tmp_path, clock, lose_index):
    device = FaultyDevice()
    store = open_store(tmp_path, clock, device=device)
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 40)
    put(store, namespace, chain)
    seal(store)
    store.delete(namespace, chain, 10, 30)
    device.fail_write_after = 12  # a header, then a few moved blocks, then no more
    store.sweep()
    device.heal()
    assert set(get(store, namespace, chain)[0]) == set(range(10)), "a full disk costs nothing that is alive"
    assert store.match(namespace, chain).hit_length_blocks == 10
    assert store.status().live.blocks == 10, "the copies that were made do not count"
    assert store.delete(namespace, chain, 0, 40) == 10
    store.close()
    if lose_index:
        for path in (tmp_path / "index").iterdir():
            path.unlink()
    store = open_store(tmp_path, clock)
    assert get(store, namespace, chain)[0] == {}
    assert store.status().live.blocks == 0
    store.close()


def test_housekeeping_that_fails_does_not_end_the_writer(tmp_path, clock, caplog):
    device = FaultyDevice()
    store = open_store(tmp_path, clock, device=device)

    def fail():
        raise ValueError("injected")

    store._writer._housekeeping = fail
    while not any("housekeeping failed" in record.message for record in caplog.records):
        store._on_writer(lambda: None)
    namespace = store.register_namespace(spec())
    assert len(stored(put(store, namespace, chain_of(namespace, 1, 4)))) == 4
    store.close()


def test_blocks_that_no_longer_fit_a_segment_are_refused_and_others_go_on(tmp_path, clock):
    store = open_store(tmp_path, clock, capacity=32 << 20)
    large, small = store.register_namespace(spec(512 << 10)), store.register_namespace(spec())
    put(store, large, chain_of(large, 1, 4))
    store.close()
    store = open_store(tmp_path, clock, capacity=4 << 20)
    with pytest.raises(InvalidArgumentError, match=r"store\.segment_size"):
        put(store, large, chain_of(large, 2, 4))
    assert len(stored(put(store, small, chain_of(small, 1, 4)))) == 4
    assert store.match(large, chain_of(large, 1, 4)).hit_length_blocks in (0, 4)
    store.close()


def test_too_few_descriptors_refuse_the_start_and_harm_nothing(tmp_path, clock):
    store = open_store(tmp_path, clock)
    namespace = store.register_namespace(spec())
    chains = [chain_of(namespace, conversation, 1) for conversation in range(40)]
    put_in_segments(store, namespace, chains)
    store.close()
    before = sorted(path.name for path in (tmp_path / "segments").iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 30, hard))
    try:
        with pytest.raises(StorageError, match="Too many open files"):
            open_store(tmp_path, clock)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert sorted(path.name for path in (tmp_path / "segments").iterdir()) == before
    store = open_store(tmp_path, clock)
    assert all(store.match(namespace, chain).hit_length_blocks == 1 for chain in chains)
    store.close()


def test_counting_blocks_while_they_are_put(tmp_path, clock):
    store = open_store(tmp_path, clock)
    namespace = store.register_namespace(spec())
    done = threading.Event()

    def write():
        for conversation in range(60):
            put(store, namespace, chain_of(namespace, conversation, 8))
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        store.namespaces()
        store.status()
    writer.join()
    assert store.status().live.blocks == store.namespaces()[0][1].blocks
    store.close()


def test_dead_space_goes_before_anything_live(tmp_path, clock):
    store = open_store(tmp_path, clock, capacity=2 << 20)
    namespace = store.register_namespace(spec(4096))
    chains = [chain_of(namespace, conversation, 10) for conversation in range(30)]
    for chain in chains:
        put(store, namespace, chain)
        store.delete(namespace, chain, 6, 4)  # two fifths of every segment
    put(store, namespace, chain_of(namespace, 100, 100))
    assert store.counters.snapshot()["blocks_evicted"] == 0
    store.close()


def test_a_lease_that_no_longer_serves_a_block_means_a_look_up(tmp_path, clock):
    store = open_store(tmp_path, clock)
    namespace = store.register_namespace(spec())
    chain, other = chain_of(namespace, 1, 4), chain_of(namespace, 2, 4)
    put(store, namespace, chain)
    put(store, namespace, other)
    token = store.match(namespace, chain).lease
    store.delete(namespace, chain, 0, 4)
    put(store, namespace, chain)
    assert get(store, namespace, chain, lease=token)[1] == {}
    assert get(store, namespace, other, lease=token)[1] == {}
    store.close()


def test_a_full_file_system_is_emptied_by_deleting(tmp_path, clock):
    """The cap lies above what the disk holds; deletes must give room even though the index needs pages to shrink."""
    mount = tmp_path / "small"
    mount.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", mount], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        store = open_store(mount / "data", clock, capacity=64 << 20, segment_size=1 << 20, tick_s=None)
        namespace = store.register_namespace(spec(4096))
        chains = []
        reasons = set()
        for conversation in range(400):
            chains.append(chain_of(namespace, conversation, 8))
            reasons |= {result.reason for result in put(store, namespace, chains[-1])}
        assert reasons == {"", "STORE_FULL"}
        assert_whole(store, namespace, chains[0])
        store.close()
        store = open_store(mount / "data", clock, capacity=64 << 20, segment_size=1 << 20, tick_s=None)
        assert_whole(store, namespace, chains[0])
        for chain in chains:
            store.delete(namespace, chain, 0, 8)
        store.sweep()
        store.sweep()
        assert len(stored(put(store, namespace, chains[0]))) == 8
        assert_whole(store, namespace, chains[0])
        store.close()
    finally:
        subprocess.run(["umount", "--lazy", mount], check=True)


def test_an_admins_eviction_frees_space_at_once(tmp_path, clock):
    store = open_store(tmp_path, clock)
    namespace = store.register_namespace(spec(4096))
    for conversation in range(20):
        put(store, namespace, chain_of(namespace, conversation, 10))
    before = du_bytes(tmp_path)
    store.evict(EvictSelection(namespace=namespace), dry_run=False)
    assert du_bytes(tmp_path) < before / 2
    store.close()


@pytest.mark.parametrize("part", [(0, 4096), (1000, 2500)])
def test_a_stream_that_outlasts_its_lease_goes_on_from_the_files_it_holds(tmp_path, clock, part):
    """A very long get: its blocks are evicted, its lease passes, the files are unlinked, and it still comes back whole."""
    store = open_store(tmp_path, clock, capacity=64 << 20)
    namespace = store.register_namespace(spec(4096))
    chain = chain_of(namespace, 1, 2000)
    put(store, namespace, chain)
    match = store.match(namespace, chain, lease_s=1)
    offset, size = part
    frames = store.read(namespace, chain, 0, 2000, match.lease, part_offset_bytes=offset, part_bytes=size)
    first = next(frames)
    store.evict(EvictSelection(namespace=namespace), dry_run=False)
    clock.advance(5)
    store.sweep()
    assert store.match(namespace, chain).hit_length_blocks == 0
    assert not [p for p in (tmp_path / "segments").iterdir() if p.stat().st_blocks * 512 > 4 << 20]
    blocks = list(first.blocks)
    for frame in frames:
        assert frame.misses == []
        data = b"".join(bytes(part) for part in frame.parts)
        for index, block in enumerate(frame.blocks):
            wanted = payload(chain[block], 4096)[offset : offset + size]
            assert data[index * size : (index + 1) * size] == wanted
        blocks += frame.blocks
    assert blocks == list(range(2000))
    store.close()


def test_a_late_get_after_the_lease_and_the_reclaim_is_a_miss(tmp_path, clock):
    """For every call that reads."""
    store = open_store(tmp_path, clock)
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 4)
    put(store, namespace, chain)
    data = b"state"
    store.submit_put_state(namespace, chain[3], "w", data, block_checksum(data, chain[3])).result()
    match = store.match(namespace, chain, lease_s=2)
    store.evict(EvictSelection(namespace=namespace), dry_run=False)
    clock.advance(3)
    store.sweep()
    assert get(store, namespace, chain, lease=match.lease) == ({}, dict.fromkeys(range(4), "NOT_FOUND"))
    in_messages = list(store.read(namespace, chain, 0, 4, match.lease, in_messages=True))
    assert [miss.block for frame in in_messages for miss in frame.misses] == [0, 1, 2, 3]
    assert store.read_state(namespace, chain[3], "w") is None
    assert store.match(namespace, chain).hit_length_blocks == 0
    store.close()


def test_an_index_entry_that_names_another_blocks_slot_is_found_out_once(tmp_path, clock):
    """Lookup says hit, the read finds something else: a miss, and the next match no longer claims it."""
    store = open_store(tmp_path, clock)
    namespace = store.register_namespace(spec())
    right, wrong = chain_of(namespace, 1, 3), chain_of(namespace, 2, 3)
    put(store, namespace, right)
    keys = [block_keys(namespace.namespace_id, chain.data, 1, 1)[0] for chain in (right, wrong)]
    store._on_writer(lambda: store._index.commit({keys[1]: store._index.lookup(keys)[keys[0]]}))
    put(store, namespace, wrong, [0, 2])
    assert store.match(namespace, wrong).hit_length_blocks == 3
    found, misses = get(store, namespace, wrong)
    assert (sorted(found), misses) == ([0, 2], {1: "NOT_FOUND"})
    store.sweep()
    assert store.match(namespace, wrong).hit_length_blocks == 1
    assert_whole(store, namespace, right)
    put(store, namespace, wrong)
    assert_whole(store, namespace, wrong)
    store.close()


def test_an_entry_of_a_segment_that_is_gone_goes_when_a_match_meets_it(tmp_path, clock):
    """As a process leaves it that dies between unlinking the file and dropping its entries."""
    store = open_store(tmp_path, clock)
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 3)
    put(store, namespace, chain, [0])
    key = block_keys(namespace.namespace_id, chain.data, 1, 1)[0]
    store._on_writer(lambda: store._index.commit({key: BlockAddr(SegmentId(0), 5)}))
    assert store.invariants().stale_entries == 1
    assert store.match(namespace, chain).hit_length_blocks == 1
    store._on_writer(lambda: None)
    assert store.invariants().stale_entries == 0
    put(store, namespace, chain)
    assert_whole(store, namespace, chain)
    store.close()


@pytest.mark.parametrize("field", ["magic", "crc32", "prefix_hash", "offset_bytes", "length_bytes"])
def test_a_damaged_row_is_a_miss_is_counted_and_not_offered_again(tmp_path, clock, field):
    store = open_store(tmp_path, clock)
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 3)
    put(store, namespace, chain)
    segment = store._segments.all()[0]
    with segment.path.open("r+b") as file:
        at = segment.layout.row_offset(1) + fmt.ROW_DTYPE.fields[field][1]
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x20]))
    found, misses = get(store, namespace, chain)
    assert (sorted(found), misses) == ([0, 2], {1: "CORRUPT"})
    assert store.counters.snapshot()["blocks_corrupt"] == 1
    assert store.match(namespace, chain).hit_length_blocks == 1
    assert {block: data == payload(chain[block]) for block, data in found.items()} == dict.fromkeys(found, True)
    store.close()


def test_files_set_aside_as_damaged_go_before_anything_live(tmp_path, clock, caplog):
    store = open_store(tmp_path, clock, capacity=2 << 20)
    namespace = store.register_namespace(spec(4096))
    for conversation in range(20):
        put(store, namespace, chain_of(namespace, conversation, 10))
    store.close()
    victim = min((tmp_path / "segments").iterdir())
    with victim.open("r+b") as file:
        file.write(b"\xff" * 64)
    store = open_store(tmp_path, clock, capacity=2 << 20)
    aside = victim.with_suffix(".seg.damaged")
    assert aside.exists()
    assert store.status().used_bytes == du_bytes(tmp_path)
    conversation = 100
    while aside.exists():
        assert store.counters.snapshot()["blocks_evicted"] == 0
        clock.advance(1)
        put(store, namespace, chain_of(namespace, conversation, 10))
        conversation += 1
    assert store.status().used_bytes == du_bytes(tmp_path) <= 2 << 20
    assert "removed to make room" in caplog.text
    store.close()


def test_moved_blocks_do_not_mix_with_new_ones(tmp_path, clock):
    """Their times differ: a segment whose blocks expire together goes as a whole."""
    store = open_store(tmp_path, clock)
    namespace = store.register_namespace(spec(4096))
    mixed = chain_of(namespace, 1, 20)
    put(store, namespace, mixed)
    seal(store)
    fresh = chain_of(namespace, 2, 3)
    put(store, namespace, fresh)
    store.delete(namespace, mixed, 4, 16)
    store.sweep()
    assert_whole(store, namespace, mixed.first(4))
    places = {
        name: {
            info.addr.segment_id for block in chain for info in store.find_blocks(block.hex()) if info.state == "live"
        }
        for name, chain in (("moved", mixed.first(4)), ("fresh", fresh))
    }
    assert not places["moved"] & places["fresh"]
    assert store.counters.snapshot()["blocks_moved"] == 4
    store.close()


def test_space_is_reclaimed_ahead_of_need_between_the_watermarks(tmp_path, clock):
    store = open_store(tmp_path, clock, capacity=8 << 20, high_watermark=0.7, low_watermark=0.5)
    namespace = store.register_namespace(spec(4096))
    conversation = 0
    while store.status().used_bytes < 0.72 * (8 << 20):
        put(store, namespace, chain_of(namespace, conversation, 10))
        conversation += 1
    for _ in range(4):
        store.sweep()
    assert 0.4 * (8 << 20) < store.status().used_bytes <= 0.5 * (8 << 20)
    before = store.counters.snapshot()["segments_reclaimed"]
    while store.status().used_bytes < 0.69 * (8 << 20):
        put(store, namespace, chain_of(namespace, conversation, 10))
        conversation += 1
        store.sweep()
    assert store.counters.snapshot()["segments_reclaimed"] == before  # between the marks it waits
    store.close()


def test_a_put_takes_the_room_that_is_there_at_once_before_that_of_leased_files(tmp_path, clock):
    """The coldest segments are leased: reclaiming one would free nothing until the lease passes."""
    store = open_store(tmp_path, clock, capacity=4 << 20)
    namespace = store.register_namespace(spec(4096))
    conversation = 0
    while store.counters.snapshot()["blocks_evicted"] == 0:
        put(store, namespace, chain_of(namespace, conversation, 10))
        conversation += 1
        clock.advance(1)
    there = [
        chain
        for chain in (chain_of(namespace, number, 10) for number in range(conversation))
        if store.match(namespace, chain, peek=True, lease_s=0.1).hit_length_blocks == 10
    ]
    clock.advance(2)
    leased = there[: len(there) // 2]
    for chain in leased:
        store.match(namespace, chain, peek=True, lease_s=60)
    for number in range(20):
        results = put(store, namespace, chain_of(namespace, 1000 + number, 10))
        assert {result.status for result in results} == {PutStatus.STORED}
    for chain in leased[5:]:  # the last segment with a lease on it may hold others, too
        assert_whole(store, namespace, chain)
    store.close()


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("touched", [0, 4_000_000_000])  # seconds since the epoch
def test_what_is_used_again_outlives_what_was_written_after_it(tmp_path, clock, restarted, used, touched):
    """A, A, A, B, C, D with room for three: it is known who was used again, which neither a restart nor file times can change."""
    capacity = 4 << 20
    store = open_store(tmp_path, clock, capacity=capacity)
    namespace = store.register_namespace(spec(4096))
    a, b, c, d = (chain_of(namespace, conversation, 250) for conversation in range(4))

    def store_whole(chain):
        clock.advance(61)  # leases of what was just read do not decide here
        assert len(stored(put(store, namespace, chain))) == 250
        seal(store)
        clock.advance(1)

    store_whole(a)
    for _ in range(2 if used else 0):
        clock.advance(1)
        assert store.match(namespace, a).hit_length_blocks == 250
    store_whole(b)
    store_whole(c)
    if restarted:
        store.close()
        store = open_store(tmp_path, clock, capacity=capacity)
    for number, path in enumerate(sorted(tmp_path.rglob("*.seg"))):
        os.utime(path, (touched + number, touched - number))
    assert store.counters.snapshot()["blocks_evicted"] == 0, "there is room for three"
    store_whole(d)
    hits = [store.match(namespace, chain, peek=True).hit_length_blocks for chain in (a, b, c, d)]
    assert hits[2:] == [250, 250]
    assert hits[0] == (250 if used else 0)
    assert hits[1] < 250 if used else hits[1] == 250
    store.close()


class MeasuredDevice(FileDevice):
    """The file system, and the most that a directory has taken on it after any step."""

    def __init__(self, root):
        self.root, self.peak_bytes = root, 0

    def measure(self):
        self.peak_bytes = max(self.peak_bytes, tree_bytes(self.root))

    def create(self, path, mode=0o640):
        descriptor = super().create(path, mode)
        self.measure()
        return descriptor

    def resize(self, descriptor, size_bytes):
        super().resize(descriptor, size_bytes)
        self.measure()

    def write(self, descriptor, buffers, offset_bytes):
        super().write(descriptor, buffers, offset_bytes)
        self.measure()


@pytest.mark.parametrize("kept", ["the first of each ten", "the first tenth of each segment"])
def test_a_nearly_full_store_of_nine_tenths_dead_segments_makes_room_and_loses_nothing(tmp_path, clock, kept):
    capacity = 4 << 20
    device = MeasuredDevice(tmp_path)
    store = open_store(tmp_path, clock, capacity=capacity, device=device)
    namespace = store.register_namespace(spec(4096))
    length = 10 if kept.startswith("the first of") else 60
    chains = []
    while store.status().used_bytes < 0.84 * capacity:
        chains.append(chain_of(namespace, len(chains), length))
        assert len(stored(put(store, namespace, chains[-1]))) == length
    left = length // 10
    for chain in chains:
        store.delete(namespace, chain, left, length - left)
    assert tree_bytes(tmp_path) > 0.8 * capacity, "nothing was given back yet"
    clock.advance(61)
    new = [chain_of(namespace, 1000 + number, length) for number in range(len(chains) * 8 // 10)]
    for chain in new:
        assert len(stored(put(store, namespace, chain))) == length
        assert tree_bytes(tmp_path) <= capacity
    counters = store.counters.snapshot()
    assert counters["blocks_evicted"] == 0
    assert counters["segments_reclaimed"] > 0
    for chain in [*(chain.first(left) for chain in chains), *new]:
        assert_whole(store, namespace, chain)
    assert 0.8 * capacity < device.peak_bytes <= capacity
    store.close()


def put_in_one_group(store, namespace, chains):
    """As clients do that put at the same time."""
    go_on = threading.Event()
    held = store._writer.call(go_on.wait)
    futures = [
        store.submit_put(namespace, chain, [put_block(chain, block, payload(chain[block], namespace.spec.block_bytes))])
        for chain in chains
        for block in range(len(chain))
    ]
    go_on.set()
    held.result()
    return [future.result()[0] for future in futures]


@pytest.mark.parametrize("leased", [False, True])
def test_an_index_that_grows_by_many_small_blocks_keeps_the_cap(tmp_path, clock, leased):
    """A store full of large blocks hardly has an index; then come small ones, in large groups and in no order of keys."""
    capacity, blocks = 32 << 20, 3000
    store = open_store(tmp_path, clock, capacity=capacity, segment_size=128 << 10)
    large, small = (store.register_namespace(spec(size)) for size in (32 << 10, 512))
    conversation = 0
    while store._reclaimer.room_bytes() > 150_000:
        put(store, large, chain_of(large, conversation, 2))
        conversation += 1
    clock.advance(100)
    peak_bytes = 0
    for group in range(3):
        chains = [Chain(hashlib.sha256(b"%d %d" % (group, number)).digest()) for number in range(blocks)]
        results = put_in_one_group(store, small, chains)
        assert len(stored(results)) == blocks or (leased and group)
        peak_bytes = max(peak_bytes, store._on_writer(lambda: tree_bytes(tmp_path)))
        for chain in chains[::2]:
            if leased:
                store.match(small, chain)
        clock.advance(5)
        store._on_writer(store._tick)
        peak_bytes = max(peak_bytes, store._on_writer(lambda: tree_bytes(tmp_path)))
    assert 0.95 * capacity < peak_bytes <= capacity
    assert store.invariants().violations == ()
    store.close()


def test_a_commit_grows_the_index_by_no_more_than_is_reserved_for_it(tmp_path, clock):
    """Keys in no order, commits larger and smaller than the index, of new entries, of changed and of dropped ones."""
    store = open_store(tmp_path, clock)
    index = store._index
    places = {}
    rng = random.Random(1)

    def commit(put, remove, reserved_bytes):
        before = index.used_bytes()
        index.commit(put, remove)
        assert index.used_bytes() - before <= reserved_bytes

    for count in (1, 10, 3000, 30, 300, 3000, 1000, 1, 6000):
        new = {rng.randbytes(KEY_BYTES): BlockAddr(SegmentId(1), slot) for slot in range(count)}
        commit(new, [], index.growth_bytes(0, count))
        places |= new
        moved = {key: BlockAddr(SegmentId(2), slot) for slot, key in enumerate(rng.sample(sorted(places), count))}
        commit(moved, [], index.growth_bytes(count))
        places |= moved
        gone = rng.sample(sorted(places), count // 2)
        commit({}, [(key, places.pop(key)) for key in gone], index.growth_bytes(len(gone)))
    store.close()
