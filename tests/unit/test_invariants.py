"""The store checked against itself: in order after whatever it did, and each kind of disagreement is told."""

from __future__ import annotations

import shutil
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.clock import ManualClock
from kvstore.config import TrafficClassConfig
from kvstore.errors import StorageError
from kvstore.index import row_key, row_keys
from kvstore.log import format as fmt
from kvstore.types import EvictSelection
from kvstore_api.checksum import block_checksum
from stores import BLOCK_BYTES, chain_of, get, open_store, payload, put, spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvstore.log.segment import Segment
    from kvstore.store import LocalStore

BLOCKS = 40


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[LocalStore]:
    """Segments of 64 KiB: 13 blocks of a page each."""
    store = open_store(tmp_path, clock, capacity=1 << 20)
    yield store
    store.close()


@pytest.fixture
def namespace(store: LocalStore):
    return store.register_namespace(spec())


@pytest.fixture
def chain(store: LocalStore, namespace):
    chain = chain_of(namespace, 1, BLOCKS)
    put(store, namespace, chain)
    assert store.invariants().ok
    return chain


def violations(store: LocalStore) -> str:
    """All sentences of a check that must have found something."""
    report = store.invariants()
    assert not report.ok
    assert report.violation_count == len(report.violations)
    assert store.status().invariants == report
    return "\n".join(report.violations)


def sealed(store: LocalStore) -> Segment:
    """A segment that is full."""
    return store._segments.all()[1]


def rewrite_row(segment: Segment, slot: int, change: Callable[[np.void], None]) -> None:
    """Change a row on disk, with a crc that fits."""
    row = segment.read_rows(slot, 1).copy()[0]
    change(row)
    data = fmt.encode_row(segment.segment_id, slot, int(row["offset_bytes"]), fmt.Entry.of_row(row))
    with segment.path.open("r+b") as file:
        file.seek(segment.layout.row_offset(slot))
        file.write(data)


def set_field(name: str, value: object) -> Callable[[np.void], None]:
    def change(row: np.void) -> None:
        row[name] = value

    return change


def set_entry(store: LocalStore, key: bytes, segment_id: int | None, slot: int = 0) -> None:
    """Change the real index behind the store's back; None removes the entry."""
    with store._index._env.begin(write=True, db=store._index._blocks) as txn:
        if segment_id is None:
            assert txn.delete(key)
        else:
            assert txn.put(key, (segment_id << 20 | slot).to_bytes(8, "little"))


def key_of(segment: Segment, slot: int) -> bytes:
    return row_key(segment.read_rows(slot, 1)[0])


class TestInOrder:
    def test_the_report_says_what_was_looked_at(self, store, chain, clock):
        report = store.invariants()
        assert report.violations == ()
        assert (report.slots, report.live_blocks, report.index_entries) == (BLOCKS, BLOCKS, BLOCKS)
        assert report.segments == len(store._segments.all())
        assert report.stale_entries == 0
        assert report.accounted_bytes == report.allocated_bytes == store.status().used_bytes
        assert report.time_s == clock.now_s()

    def test_an_empty_store(self, store):
        assert store.status().invariants is None
        assert store.invariants().ok
        assert store.status().invariants.slots == 0

    def test_after_everything_that_ends_a_block(self, tmp_path, clock):
        classes = {"long": TrafficClassConfig(ttl_s=1000), "short": TrafficClassConfig(ttl_s=10)}
        store = open_store(tmp_path / "data", clock, capacity=1 << 20, traffic_classes=classes)
        namespace, gone = store.register_namespace(spec()), store.register_namespace(spec(model="gone"))
        chains = [chain_of(namespace, c, 30) for c in range(12)]
        for number, chain in enumerate(chains):  # far more than fits
            put(store, namespace, chain, traffic_class="short" if number % 2 else "long")
            assert store.invariants().violations == ()
        put(store, gone, chain_of(gone, 1, 5))
        store.delete(namespace, chains[-2], 3, 9)
        put(store, namespace, chains[-2], range(5))
        store.drop_namespace(gone, dry_run=False)
        assert store.invariants().violations == ()
        clock.advance(11)
        put(store, namespace, chains[-1])  # over blocks that have expired
        store.evict(EvictSelection(older_than_s=5), dry_run=False)
        assert store.invariants().violations == ()
        store.set_ttl("short", 900)
        assert store.invariants().violations == ()
        for _ in range(3):
            store.sweep()
            assert store.invariants().violations == ()
        store.close()

    def test_after_a_restart_and_after_a_rebuild(self, tmp_path, clock):
        for lose_index in (False, True):
            store = open_store(tmp_path, clock, capacity=1 << 20)
            namespace = store.register_namespace(spec())
            put(store, namespace, chain_of(namespace, lose_index, 30))
            store.delete(namespace, chain_of(namespace, lose_index, 30), 0, 5)
            assert store.invariants().ok
            store.close()
            if lose_index:
                shutil.rmtree(tmp_path / "index")
            store = open_store(tmp_path, clock, capacity=1 << 20)
            assert store.invariants().violations == ()
            store.close()

    def test_a_damaged_block_that_was_met_is_in_order_again(self, store, namespace, chain):
        segment = sealed(store)
        row = segment.read_rows(3, 1)[0]
        with segment.path.open("r+b") as file:
            file.seek(int(row["offset_bytes"]))
            file.write(b"\xff" * 100)
            file.seek(segment.layout.row_offset(4) + 50)
            file.write(b"\xff\xff")
        assert "slot 4: live, but its row is damaged" in violations(store)
        assert list(get(store, namespace, chain)[1].values()) == ["CORRUPT"] * 2
        assert store.invariants().violations == ()

    def test_a_damaged_block_that_a_scrub_met_is_in_order_again(self, store, chain):
        segment = sealed(store)
        with segment.path.open("r+b") as file:
            file.seek(segment.layout.row_offset(4) + 50)
            file.write(b"\xff\xff")
        assert not store.invariants().ok
        list(store.scrub())
        assert store.invariants().violations == ()

    def test_a_row_torn_by_a_crash_is_no_block_after_the_start(self, tmp_path, clock):
        store = open_store(tmp_path, clock, capacity=1 << 20)
        namespace = store.register_namespace(spec())
        put(store, namespace, chain_of(namespace, 1, 5))
        (segment,) = store._segments.all()
        path, offset = segment.path, segment.layout.row_offset(4) + 48
        del segment
        store.close()
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(bytes(48))
        shutil.rmtree(tmp_path / "index")
        store = open_store(tmp_path, clock, capacity=1 << 20)
        assert store.status().live.blocks == 4
        assert store.invariants().violations == ()
        store.close()

    def test_entries_of_a_segment_that_was_set_aside_are_counted_as_stale(self, tmp_path, clock):
        store = open_store(tmp_path, clock, capacity=1 << 20)
        namespace = store.register_namespace(spec())
        put(store, namespace, chain_of(namespace, 1, BLOCKS))
        segment = sealed(store)
        path, slots = segment.path, segment.slot_count
        del segment
        store.close()
        path.write_bytes(path.read_bytes()[:5000])
        store = open_store(tmp_path, clock, capacity=1 << 20)
        report = store.invariants()
        assert report.violations == ()
        assert report.stale_entries == slots
        store.close()

    def test_puts_go_on_between_the_steps(self, tmp_path, clock, monkeypatch):
        """Many small steps: none keeps the writer for long, and what is put meanwhile is no violation."""
        monkeypatch.setattr("kvstore.invariants._SLOTS_PER_STEP", 8)
        monkeypatch.setattr("kvstore.invariants._ENTRIES_PER_STEP", 8)
        store = open_store(tmp_path, clock, capacity=16 << 20)
        namespace = store.register_namespace(spec())
        put(store, namespace, chain_of(namespace, 0, 100))
        stop = threading.Event()
        stored = [0]

        def keep_putting() -> None:
            conversation = 1
            while not stop.is_set():
                chain = chain_of(namespace, conversation, 10)
                stored[0] += sum(result.status.name == "STORED" for result in put(store, namespace, chain))
                store.delete(namespace, chain, 5, 5)
                conversation += 1

        putter = threading.Thread(target=keep_putting)
        putter.start()
        try:
            time.sleep(0.05)
            for _ in range(5):
                before, steps = stored[0], 0
                for _ in store.invariant_steps():
                    steps += 1
                assert steps > 20
                assert store.last_invariants.violations == ()
                assert stored[0] > before
        finally:
            stop.set()
            putter.join(60)
        store.close()

    def test_it_is_cheap_at_the_scale_of_a_model_test(self, store, chain):
        started = time.perf_counter()
        for _ in range(20):
            store.invariants()
        assert (time.perf_counter() - started) / 20 < 0.05  # some 4 ms on an idle machine

    def test_a_closed_store_says_so(self, tmp_path, clock):
        store = open_store(tmp_path, clock)
        namespace = store.register_namespace(spec())
        put(store, namespace, chain_of(namespace, 1, 3))
        store.close()
        with pytest.raises(StorageError, match="closed"):
            store.invariants()


class TestTables:
    def test_a_damaged_row(self, store, chain):
        segment = sealed(store)
        with segment.path.open("r+b") as file:
            file.seek(segment.layout.row_offset(3) + 40)
            file.write(b"\xff")
        assert violations(store) == f"segment {segment.segment_id} slot 3: live, but its row is damaged"

    @pytest.mark.parametrize(
        ("name", "value", "words"),
        [
            ("length_bytes", BLOCK_BYTES - 1, "another length"),
            ("namespace_id", 77, "another namespace"),
            ("offset_bytes", 1 << 30, "a payload behind byte"),
        ],
    )
    def test_a_row_that_says_something_else_than_is_kept_beside_it(self, store, chain, name, value, words):
        segment = sealed(store)
        rewrite_row(segment, 3, set_field(name, value))
        assert f"segment {segment.segment_id} slot 3: its row says {words}" in violations(store)

    def test_a_row_behind_the_last_slot(self, store, chain):
        segment = store._segments.all()[-1]
        slot = segment.slot_count
        data = segment.read_rows(0, 1)[0].tobytes()
        with segment.path.open("r+b") as file:
            file.seek(segment.layout.row_offset(slot))
            file.write(data)
        assert f"slot {slot}: there is a row, but the segment has {slot} slots" in violations(store)

    def test_two_live_slots_with_one_block(self, store, namespace, chain):
        old, new = sealed(store), store._segments.all()[-1]
        block = int(old.read_rows(3, 1)["position"][0])
        store.delete(namespace, chain, block, 1)
        put(store, namespace, chain, [block])
        assert store.invariants().ok
        with old.path.open("r+b") as file:  # the flag is lost
            file.seek(old.layout.use_offset(3))
            file.write(bytes(4))
        new = store._segments.all()[-1]
        assert (
            f"segment {old.segment_id} slot 3: live, but the index points to segment {new.segment_id} slot {new.slot_count - 1}"
        ) in violations(store)

    def test_a_row_table_that_cannot_be_read(self, store, chain):
        segment = sealed(store)

        def fail(first_slot: int, count: int):
            raise OSError(5, "injected")

        segment.read_rows = fail
        assert f"segment {segment.segment_id}: its row table cannot be read" in violations(store)

    def test_a_census_that_counts_wrong(self, store, chain):
        segment = sealed(store)
        assert store.status().live.blocks == BLOCKS
        with segment.path.open("r+b") as file:  # a flag that nobody set
            file.seek(segment.layout.use_offset(3))
            file.write(fmt.FLAG_EVICTED.to_bytes(4, "little"))
        count, size = segment.slot_count, segment.slot_count * BLOCK_BYTES
        sentence = violations(store)
        assert f"segment {segment.segment_id}: the census counts {count} live blocks of {size} bytes" in sentence
        assert f"its tables hold {count - 1} live blocks of {size - BLOCK_BYTES} bytes" in sentence


class TestIndex:
    def test_a_live_block_without_an_entry(self, store, chain):
        segment = sealed(store)
        set_entry(store, key_of(segment, 3), None)
        assert violations(store) == f"segment {segment.segment_id} slot 3: live, but the index does not have it"

    def test_an_entry_that_points_to_another_block(self, store, chain):
        segment = sealed(store)
        set_entry(store, key_of(segment, 3), segment.segment_id, 4)
        sentences = violations(store)
        assert f"slot 3: live, but the index points to segment {segment.segment_id} slot 4" in sentences
        wanted, held = (segment.read_rows(slot, 1)["prefix_hash"][0].tobytes().hex()[:16] for slot in (3, 4))
        assert (
            f"index: block {wanted}… of namespace 1 is said to lie in segment {segment.segment_id} slot 4" in sentences
        )
        assert f"which holds block {held}…" in sentences

    def test_an_entry_of_a_block_that_is_nowhere(self, store, chain):
        segment = sealed(store)
        set_entry(store, b"\0\0\0\1" + bytes(40), segment.segment_id, 3)
        assert "index: block 0000000000000000… of namespace 1 is said to lie in" in violations(store)

    def test_an_entry_of_a_slot_that_was_never_taken(self, store, chain):
        segment = store._segments.all()[-1]
        set_entry(store, b"\0\0\0\1" + bytes(40), segment.segment_id, segment.slot_count)
        assert f"slot {segment.slot_count}, which has {segment.slot_count} slots" in violations(store)

    def test_an_entry_of_a_segment_that_never_was(self, store, chain):
        set_entry(store, b"\0\0\0\1" + bytes(40), 1 << 30)
        assert f"in segment {1 << 30}, which never was" in violations(store)

    def test_an_entry_of_a_segment_that_is_gone_is_only_counted(self, store, chain):
        set_entry(store, b"\0\0\0\1" + bytes(40), 900)  # reserved, so it may have been
        report = store.invariants()
        assert report.violations == ()
        assert report.stale_entries == 1

    def test_every_entry_is_looked_at(self, store, namespace, monkeypatch):
        monkeypatch.setattr("kvstore.invariants._ENTRIES_PER_STEP", 7)
        put(store, namespace, chain_of(namespace, 1, 70))
        assert store.invariants().index_entries == 70
        set_entry(store, b"\0\0\0\2" + b"\xff" * 40, 1 << 30)  # the last key
        assert "never was" in violations(store)

    @pytest.mark.parametrize(("key", "value"), [(b"\0" * 44, b"abc"), (b"\0" * 43, bytes(8))])
    def test_an_entry_that_is_none(self, store, chain, tmp_path, key, value):
        with store._index._env.begin(write=True, db=store._index._blocks) as txn:
            txn.put(key, value)
        assert "index: cannot be walked behind key (none)" in violations(store)
        assert (tmp_path / "index" / "damaged").exists()  # the next start rebuilds it

    def test_an_entry_of_a_live_block_that_is_none(self, store, chain):
        segment = sealed(store)
        with store._index._env.begin(write=True, db=store._index._blocks) as txn:
            txn.put(key_of(segment, 3), b"abc")
        assert f"segment {segment.segment_id}: its blocks cannot be looked up" in violations(store)

    def test_a_great_many_violations_are_counted_and_the_first_told(self, store, namespace, chain):
        put(store, namespace, chain_of(namespace, 2, 80))
        with store._index._env.begin(write=True, db=store._index._blocks) as txn:
            keys = [key for key, _ in txn.cursor()]
            for key in keys:
                txn.delete(key)
        report = store.invariants()
        assert report.violation_count == 120
        assert len(report.violations) == 100


class TestAccounting:
    def test_a_file_that_takes_more_than_is_counted(self, store, chain):
        segment = sealed(store)
        with segment.path.open("ab") as file:
            file.write(b"x" * (1 << 20))
        assert f"{segment.path.name}: takes" in violations(store)

    def test_a_counted_file_that_is_not_there(self, store, chain):
        segment = sealed(store)
        segment.path.unlink()
        assert f"{segment.path.name}: " in violations(store)

    def test_a_segment_file_that_nothing_knows(self, store, chain, tmp_path):
        (tmp_path / "segments" / "00000000000000ff.seg").write_bytes(b"x")
        assert "00000000000000ff.seg: is in the directory, but nothing knows it" in violations(store)

    def test_other_files_in_the_directory(self, store, chain, tmp_path):
        (tmp_path / "segments" / "core").write_bytes(b"x" * (1 << 20))
        assert "beside its segments" in violations(store)

    def test_a_sum_that_does_not_add_up(self, store, chain):
        store._segments._used_bytes += 4096
        assert "bytes are counted for all segment files" in violations(store)

    def test_files_set_aside_are_counted(self, tmp_path, clock):
        store = open_store(tmp_path, clock, capacity=1 << 20)
        put(store, store.register_namespace(spec()), chain_of(store.namespaces()[0][0], 1, BLOCKS))
        path = sealed(store).path
        store.close()
        path.write_bytes(path.read_bytes()[:5000])
        store = open_store(tmp_path, clock, capacity=1 << 20)
        report = store.invariants()
        assert report.violations == ()
        assert report.allocated_bytes == store.status().used_bytes
        store.close()

    def test_a_file_that_took_more_for_a_while_is_counted_anew(self, store, chain):
        """Some file systems allocate ahead of a file that grows, and take it back later."""
        segment = sealed(store)
        size = segment.path.stat().st_size
        with segment.path.open("ab") as file:
            file.write(b"x" * (1 << 20))
        store._segments.note_growth(segment)
        with segment.path.open("ab") as file:
            file.truncate(size)
        assert store.status().used_bytes > 1 << 20
        assert store.invariants().ok
        report = store.invariants()
        assert report.accounted_bytes == report.allocated_bytes == store.status().used_bytes


def test_keys_of_many_rows_are_those_of_each(store, namespace, chain):
    put(store, namespace, chain_of(namespace, 2, 70))  # positions beyond a group, so anchors that are not zero
    data = payload(chain[3])
    store.submit_put_state(namespace, chain[3], "window", data, block_checksum(data, chain[3])).result(60)
    kinds = set()
    for segment in store._segments.all():
        rows = segment.read_rows(0, segment.slot_count)
        assert row_keys(rows) == [row_key(row) for row in rows]
        kinds |= set(rows["kind"].tolist())
    assert kinds == {fmt.KIND_BLOCK, fmt.KIND_STATE}
