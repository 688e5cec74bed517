"""The process or the machine stops before each single step of a put that rolls, and of a reclaim; or the disk is full there."""

from __future__ import annotations

import resource

import pytest

from faults import FaultyDevice, PowerLossDevice
from kvstore.clock import ManualClock
from kvstore.errors import StoreFullError
from kvstore_api.results import PutStatus
from stores import assert_whole, chain_of, du_bytes, get, open_store, payload, put, seal, spec

BLOCK_BYTES = 4000  # five to a segment


def open_tiny(path, device, durability="memory"):
    """Nothing but the scenario takes steps."""
    return open_store(
        path,
        ManualClock(),
        capacity=512 << 10,
        segment_size=32 << 10,
        device=device,
        durability=durability,
        tick_s=None,
    )


def let_go(store):
    """Give up the files without closing anything in order."""
    store._writer.close()
    store._index._env.close()
    store._segments.release()
    store._data_dir.close()


SHORT = range(30, 37)  # conversations of one block


def roll(store, namespace):
    """Two blocks fit into the open segment, the others need a new one."""
    put(store, namespace, chain_of(namespace, 2, 6))


def reclaim(store, namespace):
    """The segments lost most of their blocks; what is left is moved."""
    store.sweep()
    store.sweep()


def prepare(store, namespace, what):
    put(store, namespace, chain_of(namespace, 1, 3))
    if what is reclaim:
        for conversation in SHORT:  # so that they lie together
            put(store, namespace, chain_of(namespace, conversation, 1))
        for conversation in SHORT[:6]:
            store.delete(namespace, chain_of(namespace, conversation, 1), 0, 1)
        seal(store)


@pytest.mark.parametrize("what", [roll, reclaim])
@pytest.mark.parametrize(("power", "durability"), [(False, "memory"), (False, "sync"), (True, "sync")])
def test_a_stop_at_any_step_loses_nothing_and_leaves_the_books_right(tmp_path, what, power, durability):
    step, stopped = 0, True
    while stopped:
        path = tmp_path / str(step)
        device = PowerLossDevice(path, seed=step)
        store = open_tiny(path, device, durability)
        namespace = store.register_namespace(spec(BLOCK_BYTES))
        prepare(store, namespace, what)
        device.crash_after = step
        what(store, namespace)
        stopped = device.image is not None
        device.stop()
        let_go(store)
        device.reboot() if power else device.restart()
        store = open_tiny(path, device, durability)
        namespace = store.namespace(namespace.digest)
        when = f"step {step}, {device}"
        assert store.match(namespace, chain_of(namespace, 1, 3)).hit_length_blocks == 3, when
        assert_whole(store, namespace, chain_of(namespace, 1, 3))
        new = chain_of(namespace, 2, 6)
        found, _ = get(store, namespace, new)
        assert all(data == payload(new[block], BLOCK_BYTES) for block, data in found.items()), when
        if what is reclaim:
            left = [number for number in SHORT if get(store, namespace, chain_of(namespace, number, 1))[0]]
            assert left == [SHORT[6]], when
        assert store.status().used_bytes == du_bytes(path), when
        assert {result.status for result in put(store, namespace, new)} <= {PutStatus.STORED, PutStatus.EXISTS}, when
        assert_whole(store, namespace, new)
        store.sweep()
        assert store.status().used_bytes == du_bytes(path), when
        store.close()
        step += 1
    assert step > 6, "the scenario has more steps than that"


def test_no_room_for_the_tables_of_a_new_file_rejects_and_recovers(tmp_path):
    device = FaultyDevice()
    store = open_tiny(tmp_path, device)
    namespace = store.register_namespace(spec(BLOCK_BYTES))
    device.fail_resize = True
    assert {result.reason for result in put(store, namespace, chain_of(namespace, 1, 2))} == {"STORE_FULL"}
    assert list((tmp_path / "segments").iterdir()) == []
    device.heal()
    put(store, namespace, chain_of(namespace, 1, 2))
    assert_whole(store, namespace, chain_of(namespace, 1, 2))
    store.close()


def test_no_room_for_the_catalog_refuses_the_change_and_keeps_the_old_one(tmp_path):
    device = FaultyDevice()
    store = open_tiny(tmp_path, device)
    known = store.register_namespace(spec(BLOCK_BYTES))
    put(store, known, chain_of(known, 1, 2))
    for partial in (False, True):
        device.fail_write_after, device.partial_write = 0, partial
        with pytest.raises(StoreFullError):
            store.register_namespace(spec(BLOCK_BYTES, model="another"))
        with pytest.raises(StoreFullError):
            store.set_ttl("agent", 7)
    device.heal()
    assert store.status().used_bytes == du_bytes(tmp_path), "the scratch file is gone"
    assert [namespace.digest for namespace, _ in store.namespaces()] == [known.digest]
    store.close()
    store = open_tiny(tmp_path, device)
    assert 7 not in [traffic_class.ttl_s for traffic_class in store.traffic_classes()]
    assert_whole(store, known, chain_of(known, 1, 2))
    assert store.register_namespace(spec(BLOCK_BYTES, model="another")).namespace_id == 2
    store.close()


def test_no_room_for_an_index_commit_rejects_the_put_and_recovers(tmp_path):
    """LMDB's file cannot grow; the segments, which are smaller, can."""
    store = open_store(tmp_path, ManualClock(), capacity=8 << 20, segment_size=32 << 10)
    namespace = store.register_namespace(spec(BLOCK_BYTES))
    old = chain_of(namespace, 1, 4)
    put(store, namespace, old)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "index" / "data.mdb").stat().st_size, limits[1]))
    try:
        conversation, results = 1, []
        while not any(result.status is PutStatus.REJECTED for result in results):
            conversation += 1
            results = put(store, namespace, chain_of(namespace, conversation, 4))
        rejected = chain_of(namespace, conversation, 4)
        assert store.match(namespace, rejected).hit_length_blocks == 0
        assert_whole(store, namespace, old)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {result.status for result in put(store, namespace, rejected)} == {PutStatus.STORED}
    assert_whole(store, namespace, rejected)
    assert store.status().used_bytes == du_bytes(tmp_path)
    store.close()
