"""What durable mode promises about blocks that were moved, deleted or half written when the power went."""

from __future__ import annotations

import pytest

from faults import PowerLossDevice
from kvstore.clock import ManualClock
from kvstore.config import DEFAULT_TRAFFIC_CLASSES, TrafficClassConfig
from kvstore.errors import StoreFullError
from kvstore.log.device import FileDevice
from kvstore_api.results import PutStatus
from stores import assert_whole, chain_of, get, open_store, put, seal, spec

SEEDS = range(12)  # what is lost differs: some of these lose everything that was not synced


def open_durable(path, device, clock=None, classes=DEFAULT_TRAFFIC_CLASSES):
    return open_store(
        path,
        clock or ManualClock(),
        capacity=512 << 10,
        segment_size=32 << 10,
        device=device,
        durability="sync",
        traffic_classes=classes,
        tick_s=None,
    )


def stop(store, device, *, power: bool, clock=None, classes=DEFAULT_TRAFFIC_CLASSES):
    """The store stops here and is opened again."""
    device.stop()
    store._writer.close()
    store._index._env.close()
    store._segments.release()
    store._data_dir.close()
    device.reboot() if power else device.restart()
    return open_durable(device.root, device, clock, classes)


@pytest.mark.parametrize("leased", [False, True])
def test_a_moved_block_that_was_deleted_does_not_come_back_with_its_old_file(tmp_path, leased):
    """Unlinked, or still waiting for a lease: either way the old file must say durably that the block has moved."""
    for seed in SEEDS:
        device = PowerLossDevice(tmp_path / str(seed), seed)
        store = open_durable(device.root, device)
        namespace = store.register_namespace(spec(4000))
        kept, *dead = (chain_of(namespace, conversation, 1) for conversation in range(10, 15))
        for chain in (kept, *dead):
            put(store, namespace, chain)
        seal(store)
        put(store, namespace, chain_of(namespace, 3, 1))  # the segment that the block moves to
        for chain in dead:
            store.delete(namespace, chain, 0, 1)
        if leased:
            store.match(namespace, kept)
        moved_from = store.find_blocks(kept[0].hex())[0].addr
        store.sweep()
        assert store.find_blocks(kept[0].hex())[-1].addr != moved_from, "the block was not moved"
        assert store.delete(namespace, kept, 0, 1) == 1
        store = stop(store, device, power=True)
        assert get(store, namespace, kept)[0] == {}, f"a deleted block is back; {device}"
        store.close()


def test_what_is_said_to_exist_survives_even_if_the_process_that_wrote_it_never_synced_it(tmp_path):
    for seed in SEEDS:
        device = PowerLossDevice(tmp_path / str(seed), seed)
        store = open_durable(device.root, device)
        namespace = store.register_namespace(spec(4000))
        chain = chain_of(namespace, 1, 4)
        device.crash_after = 7  # create, resize, header, directory, payloads, use rows, rows; before the sync
        put(store, namespace, chain)
        assert device.image is not None
        store = stop(store, device, power=False)
        assert {result.status for result in put(store, namespace, chain)} == {PutStatus.EXISTS}
        store = stop(store, device, power=True)
        assert_whole(store, namespace, chain)
        store.close()


def test_a_block_stored_again_in_an_older_segment_survives_although_its_expired_copy_lost_its_flag(tmp_path):
    classes = {"long": TrafficClassConfig(ttl_s=100_000), "short": TrafficClassConfig(ttl_s=10)}
    for seed in range(20):
        device, clock = PowerLossDevice(tmp_path / str(seed), seed), ManualClock()
        store = open_durable(device.root, device, clock, classes)
        namespace = store.register_namespace(spec(4000))
        chain = chain_of(namespace, 2, 1)
        put(store, namespace, chain_of(namespace, 1, 1), traffic_class="long")
        put(store, namespace, chain, traffic_class="short")
        clock.advance(20)
        (result,) = put(store, namespace, chain, traffic_class="long")
        assert result.status is PutStatus.STORED
        store = stop(store, device, power=True, clock=clock, classes=classes)
        assert store.match(namespace, chain).hit_length_blocks == 1, f"an acknowledged block is lost; {device}"
        assert_whole(store, namespace, chain)
        store.close()


def test_a_copy_that_a_refused_put_was_to_replace_survives_although_its_flag_reached_the_disk(tmp_path):
    """The old copy was only suspected. Its flag is written back on its own before the put is refused and the flag taken back."""
    for seed in range(20):
        device = PowerLossDevice(tmp_path / str(seed), seed)
        store = open_durable(device.root, device)
        namespace = store.register_namespace(spec(4000))
        chain = chain_of(namespace, 1, 4)
        put(store, namespace, chain)
        seal(store)
        (old,) = store._segments.all()
        device.fail_read = True
        get(store, namespace, chain)
        device.fail_read = False

        def refuse(put_, remove=(), old=old):
            old.sync()
            raise StoreFullError("injected: no room for the index")

        store._index.commit = refuse
        assert {result.status for result in put(store, namespace, chain)} == {PutStatus.REJECTED}
        store = stop(store, device, power=True)
        assert store.match(namespace, chain).hit_length_blocks == 4, f"an acknowledged block is lost; {device}"
        assert_whole(store, namespace, chain)
        store.close()


def test_a_block_whose_move_the_index_refused_survives_although_its_flag_reached_the_disk(tmp_path):
    """The flag is written back on its own before the move is given up and the flag taken back."""
    for seed in range(20):
        device = PowerLossDevice(tmp_path / str(seed), seed)
        store = open_durable(device.root, device)
        namespace = store.register_namespace(spec(4000))
        kept, *dead = (chain_of(namespace, conversation, 1) for conversation in range(10, 15))
        for chain in (kept, *dead):
            put(store, namespace, chain)
        seal(store)
        put(store, namespace, chain_of(namespace, 3, 1))
        for chain in dead:
            store.delete(namespace, chain, 0, 1)
        old, refused = store._segments.all()[0], []

        def refuse(put_, remove=(), old=old, refused=refused):
            if put_:
                refused.append(put_)
                old.sync()
                raise StoreFullError("injected: no room for the index")
            return 0

        store._index.commit = refuse
        with pytest.raises(StoreFullError):
            store.sweep()
        assert refused, "it did not come to a move"
        store = stop(store, device, power=True)
        assert_whole(store, namespace, kept)
        store.close()


def test_what_a_run_without_syncs_stored_is_durable_once_a_durable_one_says_that_it_exists(tmp_path):
    for seed in SEEDS:
        device, clock = PowerLossDevice(tmp_path / str(seed), seed), ManualClock()
        store = open_store(device.root, clock, capacity=512 << 10, segment_size=32 << 10, device=device)
        namespace = store.register_namespace(spec(4000))
        chain = chain_of(namespace, 1, 4)
        put(store, namespace, chain)
        store.close()
        store = open_durable(device.root, device, clock)
        assert {result.status for result in put(store, namespace, chain)} == {PutStatus.EXISTS}
        store = stop(store, device, power=True, clock=clock)
        assert_whole(store, namespace, chain)
        store.close()


class Notebook(FileDevice):
    """The file system; notes the names that each directory held when it was last synced."""

    def __init__(self):
        self.durable_names = {}

    def sync_directory(self, path):
        super().sync_directory(path)
        self.durable_names[path] = {entry.name for entry in path.iterdir()}


def test_a_new_data_directorys_own_name_and_those_above_it_are_durable(tmp_path):
    device = Notebook()
    path = tmp_path / "srv" / "kv" / "data"
    store = open_durable(path, device)
    namespace = store.register_namespace(spec())
    (result,) = put(store, namespace, chain_of(namespace, 1, 1), [0])
    assert result.status is PutStatus.STORED
    for directory in (path / "segments", path, path.parent, path.parent.parent):
        assert directory.name in device.durable_names[directory.parent], directory
    store.close()
