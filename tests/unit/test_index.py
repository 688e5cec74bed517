"""The index alone: keys, growth, readers."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.clock import ManualClock
from kvstore.errors import StorageError
from kvstore.index import BlockIndex, anchor_of, block_keys
from kvstore.index_file import open_environment
from kvstore.index_room import Tree, reserved_bytes
from kvstore.log.device import FileDevice
from kvstore.types import BlockAddr, SegmentId
from kvstore_api.results import PutStatus
from stores import assert_whole, chain_of, du_bytes, open_store, put, spec

TESTS = Path(__file__).parent.parent


@pytest.fixture
def index(tmp_path):
    index = BlockIndex(tmp_path / "index", "0" * 32, 1 << 20, FileDevice())
    index.complete()
    yield index
    index.close()


def entries(start, count):
    return {
        number.to_bytes(44, "big"): BlockAddr(SegmentId(7), number % 1000) for number in range(start, start + count)
    }


def test_a_key_is_namespace_anchor_position_and_hash():
    hashes = os.urandom(32 * 150)
    for first in (0, 1, 31, 32, 33, 64, 95, 96, 149):
        for count in {1, 2, 31, 32, 33, 150 - first}:
            wanted = [
                (7).to_bytes(4, "big")
                + anchor_of(hashes, block)
                + bytes([block % 32])
                + hashes[block * 32 : block * 32 + 32]
                for block in range(first, min(first + count, 150))
            ]
            assert block_keys(7, hashes, first, min(count, 150 - first)) == wanted, (first, count)


def test_a_full_map_grows(index):
    index._map_size_bytes = 1 << 20
    index._env.set_mapsize(1 << 20)
    for start in range(0, 40_000, 4000):
        index.commit(entries(start, 4000))
    assert index._map_size_bytes > 2 << 20
    wanted = entries(0, 40_000)
    assert index.lookup(sorted(wanted)) == wanted


def test_what_is_set_aside_by_entries_is_more_than_the_index_takes_while_chains_come_and_go(index):
    """Else what goes when hangs on single pages, and no model of the store can say what it does."""
    capacity = 64 << 20
    rng = random.Random(1)
    chains = []
    for number in range(400):
        hashes = rng.randbytes(32 * rng.randint(1, 60))
        keys = block_keys(1, hashes, 0, len(hashes) // 32)
        addrs = {key: BlockAddr(SegmentId(number + 1), slot) for slot, key in enumerate(keys)}
        index.commit(addrs)
        chains.append(addrs)
        if len(chains) > 100:
            index.commit({}, chains.pop(0).items())
        assert index.used_bytes() <= reserved_bytes(index.entry_count_max, capacity)
        if index.entry_count > 1000:
            assert index._tree.leaves <= Tree.assumed(index.entry_count).leaves
    assert index.entry_count == sum(map(len, chains))
    assert index.entry_count_max > index.entry_count


READER = """
import os, sys
from pathlib import Path
from kvstore.index_file import open_environment
readers = [open_environment(Path(sys.argv[1]), 1 << 28)]
transactions = [readers[0].begin() for _ in range(int(sys.argv[2]))]
print("reading", flush=True)
os.read(0, 1)
"""


def held_readers(path, count):
    """A process that reads, `count` times at once, and goes on reading what was there when it began."""
    command = [sys.executable, "-c", READER, str(path), str(count)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=TESTS)
    assert process.stdout.readline() == b"reading\n"
    return process


def end(process, number):
    process.send_signal(number)
    process.wait(20)
    process.stdin.close()
    process.stdout.close()


def test_readers_that_were_killed_are_cleared(index, tmp_path):
    """200 of them would keep every page freed since, and take places among the 1,022 there are."""
    index.commit(entries(0, 1000))
    process = held_readers(tmp_path / "index", 200)
    end(process, signal.SIGKILL)
    assert index._env.info()["num_readers"] >= 200
    index.clear_dead_readers()
    size = index.used_bytes()
    for _ in range(200):
        index.commit(entries(0, 1000))
    assert index.used_bytes() < size + (1 << 20)


def test_a_store_clears_them_while_it_runs(tmp_path):
    store = open_store(tmp_path)
    process = held_readers(tmp_path / "index", 3)
    end(process, signal.SIGKILL)
    assert str(process.pid) in store._index._env.readers()
    for _ in range(10):
        store.sweep()
    assert str(process.pid) not in store._index._env.readers()
    store.close()


def test_a_reader_held_for_long_stops_no_work_and_its_pages_come_back(index, tmp_path):
    index.commit(entries(0, 1000))
    process = held_readers(tmp_path / "index", 1)
    for _ in range(200):
        index.clear_dead_readers()  # it is alive: nothing of it is touched
        index.commit(entries(0, 1000))
    held = index.used_bytes()
    assert index.lookup(sorted(entries(0, 1000))) == entries(0, 1000)
    end(process, signal.SIGTERM)
    index.clear_dead_readers()
    for _ in range(400):
        index.commit(entries(0, 1000))
    assert index.used_bytes() <= held + (1 << 18)


def test_files_that_are_gone_count_nothing(index, tmp_path, monkeypatch):
    directory = tmp_path / "index"
    whole = index.used_bytes()
    assert whole == sum(path.stat().st_blocks * 512 for path in directory.iterdir()) > 0
    scratch = directory / "damaged.new"
    scratch.write_bytes(bytes(4096))
    listed, iterdir = [], Path.iterdir

    def list_and_finish(path):
        listed.extend(iterdir(path))
        scratch.unlink()  # by the thread that has made it into `damaged`
        return iter(listed)

    monkeypatch.setattr(Path, "iterdir", list_and_finish)
    assert index.used_bytes() == whole
    assert scratch in listed
    monkeypatch.undo()
    shutil.rmtree(directory)
    assert index.used_bytes() == 0


@pytest.mark.parametrize("ends", ["in order", "killed"])
def test_a_server_whose_index_is_deleted_under_it_goes_on_and_the_next_start_rebuilds_it(tmp_path, ends):
    path, clock = tmp_path / "data", ManualClock()
    store = open_store(path, clock)
    namespace = store.register_namespace(spec())
    chains = [chain_of(namespace, number, 20) for number in range(4)]
    put(store, namespace, chains[0])
    shutil.rmtree(path / "index")
    for chain in chains[1:]:
        assert {result.status for result in put(store, namespace, chain)} == {PutStatus.STORED}
    assert store.delete(namespace, chains[3], 0, 20) == 20
    store.sweep()
    store._on_writer(store._tick)
    assert store.status().used_bytes == du_bytes(path)
    assert store.invariants().violations == ()
    for chain in chains[:3]:
        assert_whole(store, namespace, chain)
    if ends == "in order":
        store.close()
    else:
        store._writer.close()
        store._index._env.close()
        store._segments.release()
        store._data_dir.close()
    store = open_store(path, clock)
    assert store._index.found.why == "it is not there"
    for chain in chains[:3]:
        assert store.match(namespace, chain).hit_length_blocks == 20
        assert_whole(store, namespace, chain)
    assert store.match(namespace, chains[3]).hit_length_blocks == 0
    store.close()


def test_opened_twice_is_an_error_and_not_a_signal(index, tmp_path):
    with pytest.raises(StorageError, match="already open"):
        BlockIndex(tmp_path / "index", "0" * 32, 1 << 20, FileDevice())
    index.commit(entries(0, 10))
    assert index.lookup(sorted(entries(0, 10))) == entries(0, 10)


@pytest.mark.parametrize("value", [b"", b"1234567", b"123456789"])
def test_an_entry_of_a_wrong_size_is_damage_and_no_address(index, tmp_path, value):
    """As a page that went bad while it was in use may hold."""
    hashes = os.urandom(32 * 40)
    keys = block_keys(1, hashes, 0, 40)
    index.commit({key: BlockAddr(SegmentId(7), slot) for slot, key in enumerate(keys)})
    assert len(index.leading_run(1, hashes)) == 40
    with index._env.begin(write=True, db=index._blocks) as txn:
        txn.put(keys[20], value)
    for look in (lambda: index.leading_run(1, hashes), lambda: index.lookup(keys)):
        with pytest.raises(StorageError, match="entr"):
            look()
    assert (tmp_path / "index" / "damaged").exists()


def test_no_room_for_the_lock_file_is_an_error_and_no_signal(tmp_path):
    """LMDB maps it and writes to it: a hole in it on a full disk would end the process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # files that cannot grow, as on a full disk
    try:
        with pytest.raises(StorageError, match=r"lock\.mdb needs 16384 bytes"):
            open_environment(tmp_path / "index", 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_lock_file_has_its_first_pages_on_the_disk(tmp_path):
    open_environment(tmp_path / "index", 1 << 20).close()
    assert (tmp_path / "index" / "lock.mdb").stat().st_blocks * 512 >= 16_384
