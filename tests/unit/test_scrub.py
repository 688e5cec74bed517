"""Scrubbing: every kind of damage is found, told, counted and taken out of the offer; nothing else is touched."""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from faults import FaultyDevice
from kvstore.clock import ManualClock
from kvstore.config import TrafficClassConfig
from kvstore.errors import InvalidArgumentError
from kvstore.log import format as fmt
from kvstore.scrub import Pace, parse_cursor
from kvstore_api.checksum import block_checksum
from stores import BLOCK_BYTES, assert_whole, chain_of, get, open_store, put, spec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.scrub import ScrubStep
    from kvstore.store import LocalStore

BLOCKS = 40


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def device() -> FaultyDevice:
    return FaultyDevice()


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock, device: FaultyDevice) -> Iterator[LocalStore]:
    """Segments of 64 KiB: 13 blocks of a page each."""
    store = open_store(tmp_path, clock, capacity=1 << 20, device=device)
    yield store
    store.close()


@pytest.fixture
def namespace(store: LocalStore):
    return store.register_namespace(spec())


@pytest.fixture
def chain(store: LocalStore, namespace):
    chain = chain_of(namespace, 1, BLOCKS)
    put(store, namespace, chain)
    return chain


def walk(store: LocalStore, cursor: str = "", max_bytes: int = 0) -> list[ScrubStep]:
    return list(store.scrub(cursor, max_bytes))


def found(steps: list[ScrubStep]) -> list[tuple[int, int, str]]:
    return [(block.segment_id, block.slot, block.reason) for step in steps for block in step.damaged]


def place(store: LocalStore, chain, block: int) -> tuple[int, int]:
    (info,) = store.find_blocks(chain[block].hex())
    return info.addr.segment_id, info.addr.slot


def damage(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x10]))


def row_of(store: LocalStore, chain, block: int):
    segment_id, slot = place(store, chain, block)
    segment = store._segments.get(segment_id)
    return segment, slot, segment.read_rows(slot, 1)[0]


def test_a_whole_store_is_read_once_and_found_whole(store, namespace, chain):
    steps = walk(store)
    last = steps[-1]
    assert last.finished
    assert (last.blocks_checked, last.bytes_done, last.bytes_total) == (
        BLOCKS,
        BLOCKS * BLOCK_BYTES,
        BLOCKS * BLOCK_BYTES,
    )
    assert last.segments_done == last.segments_total == len(store._segments.all()) > 2
    assert found(steps) == []
    assert store.counters.snapshot()["blocks_corrupt"] == 0
    assert store.counters.snapshot()["blocks_read"] == 0
    assert_whole(store, namespace, chain)


@pytest.mark.parametrize("block", [0, 5, BLOCKS - 1])
def test_a_flipped_bit_in_a_payload_is_found_told_counted_and_not_offered_again(store, namespace, chain, block):
    segment, slot, row = row_of(store, chain, block)
    damage(segment.path, int(row["offset_bytes"]) + BLOCK_BYTES - 1)
    (step,) = [step for step in walk(store) if step.damaged]
    (told,) = step.damaged
    assert (told.segment_id, told.slot, told.reason) == (segment.segment_id, slot, "BAD_CHECKSUM")
    assert (told.namespace, told.prefix_hash) == (namespace.digest, chain[block])
    assert store.counters.snapshot()["blocks_corrupt"] == 1
    assert store.match(namespace, chain).hit_length_blocks == block
    assert get(store, namespace, chain)[1] == {block: "NOT_FOUND"}
    assert found(walk(store)) == []
    assert put(store, namespace, chain, [block])[0].status.name == "STORED"
    assert_whole(store, namespace, chain)


def test_a_damaged_row_is_found(store, namespace, chain):
    segment, slot, _ = row_of(store, chain, 7)
    damage(segment.path, segment.layout.row_offset(slot) + 60)
    steps = walk(store)
    assert found(steps) == [(segment.segment_id, slot, "ROW_DAMAGED")]
    (told,) = [block for step in steps for block in step.damaged]
    assert (told.namespace, told.prefix_hash) == (b"", b"")
    assert store.match(namespace, chain).hit_length_blocks == 7
    assert found(walk(store)) == []


def test_a_row_of_another_segment_is_no_row_of_this_one(store, chain):
    _, _, row = row_of(store, chain, 0)
    other, slot, _ = row_of(store, chain, BLOCKS - 1)
    with other.path.open("r+b") as file:
        file.seek(other.layout.row_offset(slot))
        file.write(row.tobytes())
    assert found(walk(store)) == [(other.segment_id, slot, "ROW_DAMAGED")]


def test_a_file_that_ends_too_early_costs_the_blocks_behind_its_end(store, chain):
    segment, slot, row = row_of(store, chain, BLOCKS - 1)
    end = int(row["offset_bytes"]) + BLOCK_BYTES
    with segment.path.open("r+b") as file:
        file.truncate(end - 1)
    assert found(walk(store)) == [(segment.segment_id, slot, "TRUNCATED")]


def test_a_block_larger_than_a_step_is_checked_whole(tmp_path, clock):
    size = (2 << 20) + 5
    store = open_store(tmp_path, clock, capacity=64 << 20)
    namespace = store.register_namespace(spec(size))
    chain = chain_of(namespace, 1, 3)
    put(store, namespace, chain)
    segment, slot, row = row_of(store, chain, 1)
    damage(segment.path, int(row["offset_bytes"]) + size - 1)
    steps = walk(store)
    assert found(steps) == [(segment.segment_id, slot, "BAD_CHECKSUM")]
    assert steps[-1].bytes_done == 3 * size
    store.close()


def test_state_objects_are_checked_too(store, namespace, chain):
    data = bytes(range(256)) * 20
    for block in (3, 4):
        result = store.submit_put_state(namespace, chain[block], "window", data, block_checksum(data, chain[block]))
        assert result.result(60).status.name == "STORED"
    assert found(walk(store)) == []
    segment = store._segments.all()[-1]
    rows = segment.read_rows(0, segment.slot_count)
    slot = int(np.flatnonzero(rows["kind"] == fmt.KIND_STATE)[-1])
    damage(segment.path, int(rows[slot]["offset_bytes"]) + 4000)
    assert found(walk(store)) == [(segment.segment_id, slot, "BAD_CHECKSUM")]
    assert store.read_state(namespace, chain[3], "window") is not None
    assert store.read_state(namespace, chain[4], "window") is None


def test_what_nobody_will_get_is_not_read(tmp_path, clock):
    classes = {"long": TrafficClassConfig(ttl_s=1000), "short": TrafficClassConfig(ttl_s=10)}
    store = open_store(tmp_path, clock, capacity=1 << 20, traffic_classes=classes)
    kept, gone = store.register_namespace(spec()), store.register_namespace(spec(model="gone"))
    chain, dropped, expired = chain_of(kept, 1, 10), chain_of(gone, 1, 10), chain_of(kept, 2, 10)
    put(store, kept, chain)
    put(store, kept, expired, traffic_class="short")
    put(store, gone, dropped)
    for victim, block in ((dropped, 2), (expired, 3), (chain, 9)):
        segment, _, row = row_of(store, victim, block)
        damage(segment.path, int(row["offset_bytes"]))
    store._change_catalog(lambda catalog: catalog.without_namespace(gone))  # without the sweep of a drop
    store.delete(kept, chain, 9, 1)
    clock.advance(11)
    steps = walk(store)
    assert found(steps) == []
    assert steps[-1].blocks_checked == 9
    store.close()


def test_a_segment_that_cannot_be_read_is_told_and_the_walk_goes_on(store, namespace, chain, device):
    bad = store._segments.all()[1]
    read, bad_descriptor = device.read, bad._descriptor

    def fail(descriptor, buffers, offset_bytes):
        if descriptor == bad_descriptor:
            raise OSError(errno.EIO, "injected: read failed")
        return read(descriptor, buffers, offset_bytes)

    device.read = fail
    steps = walk(store)
    (told,) = [segment for step in steps for segment in step.unreadable]
    assert told.segment_id == bad.segment_id
    assert "read failed" in told.why
    assert steps[-1].finished
    assert steps[-1].blocks_checked == BLOCKS - bad.slot_count
    assert found(steps) == []
    device.read = read
    assert_whole(store, namespace, chain)  # it was not condemned for a disk that comes back


def test_one_bad_sector_is_told_and_costs_its_block_for_a_minute_and_its_neighbours_nothing(
    store, namespace, chain, device
):
    segment, slot, row = row_of(store, chain, 5)
    bad, read = int(row["offset_bytes"]), device.read

    def fail(descriptor, buffers, offset_bytes):
        size = sum(len(buffer) for buffer in buffers)
        if descriptor == segment._descriptor and offset_bytes <= bad < offset_bytes + size:
            raise OSError(errno.EIO, "injected: bad sector")
        return read(descriptor, buffers, offset_bytes)

    device.read = fail
    for _ in range(2):  # it is found again, until it can be read
        steps = walk(store)
        assert found(steps) == [(segment.segment_id, slot, "IO_ERROR")]
        (told,) = [block for step in steps for block in step.damaged]
        assert (told.namespace, told.prefix_hash) == (namespace.digest, chain[5])
        assert steps[-1].blocks_checked == BLOCKS
        assert store.match(namespace, chain).hit_length_blocks == 5
    counters = store.counters.snapshot()
    assert (counters["blocks_unreadable"], counters["blocks_corrupt"]) == (2, 0)
    device.read = read
    assert found(walk(store)) == []
    segment.suspects = {}  # as after a minute
    assert_whole(store, namespace, chain)


@pytest.mark.parametrize("block_bytes", [BLOCK_BYTES, 200_000, 1 << 20, (2 << 20) + 5])
def test_an_outage_of_the_disk_condemns_nothing(tmp_path, clock, device, block_bytes):
    """However few blocks share a read: what was not read is not known to be damaged."""
    store = open_store(tmp_path, clock, capacity=512 << 20, device=device)
    namespace = store.register_namespace(spec(block_bytes))
    chain = chain_of(namespace, 1, 40)
    put(store, namespace, chain)
    read, payload_offset = device.read, store._segments.all()[0].layout.payload_offset

    def fail(descriptor, buffers, offset_bytes):
        if offset_bytes >= payload_offset:
            raise OSError(errno.EIO, "injected: the disk is away")
        return read(descriptor, buffers, offset_bytes)

    device.read = fail
    steps = walk(store)
    assert [segment.segment_id for step in steps for segment in step.unreadable] == [
        segment.segment_id for segment in store._segments.all()
    ]
    assert steps[-1].finished
    told = found(steps)
    assert told
    assert {reason for _, _, reason in told} == {"IO_ERROR"}
    counters = store.counters.snapshot()
    assert (counters["blocks_unreadable"], counters["blocks_corrupt"]) == (len(told), 0)
    device.read = read
    assert found(walk(store)) == []
    for segment in store._segments.all():
        segment.suspects = {}  # as after a minute
    assert store.match(namespace, chain).hit_length_blocks == 40
    assert_whole(store, namespace, chain)
    store.close()


def test_a_segment_whose_payloads_all_fail_is_left_alone_after_a_few(store, chain, device):
    segment = store._segments.all()[1]
    read, reads = device.read, []

    def fail(descriptor, buffers, offset_bytes):
        if descriptor == segment._descriptor and offset_bytes >= segment.layout.payload_offset:
            reads.append(offset_bytes)
            raise OSError(errno.EIO, "injected: read failed")
        return read(descriptor, buffers, offset_bytes)

    device.read = fail
    steps = walk(store)
    assert [told.segment_id for step in steps for told in step.unreadable] == [segment.segment_id]
    assert steps[-1].finished
    assert len(found(steps)) < len(reads) <= 9 < segment.slot_count, "a disk that is away is not asked for every block"


def test_a_walk_continues_where_it_was_stopped(store, chain):
    whole = walk(store)[-1].blocks_checked
    blocks, cursor, rounds = 0, "", 0
    while True:
        last = walk(store, cursor, max_bytes=1)[-1]
        blocks, cursor, rounds = blocks + last.blocks_checked, str(last.cursor), rounds + 1
        if last.finished:
            break
        assert last.blocks_checked > 0
    assert blocks == whole
    assert rounds > 3
    assert walk(store, cursor)[-1].blocks_checked == 0


def test_a_cursor_in_the_middle_of_a_segment_reads_only_what_is_left(store, chain):
    first = store._segments.all()[0]
    last = walk(store, f"{first.segment_id}:5")[-1]
    assert last.blocks_checked == BLOCKS - 5
    assert last.segments_done == last.segments_total


def test_a_cursor_of_a_reclaimed_segment_goes_on_with_the_next(store, namespace, chain):
    first, second, *_ = store._segments.all()
    stopped = walk(store, max_bytes=1)[-1]
    assert stopped.cursor.segment_id == first.segment_id
    store.delete(namespace, chain, 0, first.slot_count)
    store.sweep()
    assert store._segments.get(first.segment_id) is None
    last = walk(store, str(stopped.cursor))[-1]
    assert last.finished
    assert last.blocks_checked == BLOCKS - first.slot_count
    assert second.segment_id in {step.cursor.segment_id for step in walk(store, str(stopped.cursor))}


def test_a_segment_reclaimed_under_the_walk_is_no_trouble(store, namespace, chain):
    steps = store.scrub()
    next(steps)
    store.delete(namespace, chain, 0, BLOCKS)
    store.sweep()
    rest = list(steps)
    assert rest[-1].finished
    assert found(rest) == []
    assert store.counters.snapshot()["blocks_corrupt"] == 0


def test_damage_in_a_block_that_was_dropped_while_it_was_read_is_no_news(store, namespace, chain):
    segment, _, row = row_of(store, chain, 4)
    damage(segment.path, int(row["offset_bytes"]))
    read = segment.read_payloads

    def read_and_delete(buffers, offset_bytes):
        size = read(buffers, offset_bytes)
        store.delete(namespace, chain, 4, 1)
        return size

    segment.read_payloads = read_and_delete
    assert found(walk(store)) == []
    assert store.counters.snapshot()["blocks_corrupt"] == 0


def test_puts_matches_and_gets_go_on_while_a_walk_reads(store, namespace, chain, device):
    """A read of the walk hangs in the disk: nothing else waits for it."""
    stuck, go_on, read = threading.Event(), threading.Event(), device.read
    walker = threading.Thread(target=lambda: walk(store), name="walker")

    def stall(descriptor, buffers, offset_bytes):
        if threading.current_thread() is walker:
            stuck.set()
            assert go_on.wait(60)
        return read(descriptor, buffers, offset_bytes)

    device.read = stall
    walker.start()
    try:
        assert stuck.wait(60)
        other = chain_of(namespace, 2, 4)
        assert [result.status.name for result in put(store, namespace, other)] == ["STORED"] * 4
        assert store.match(namespace, chain).hit_length_blocks == BLOCKS
        assert_whole(store, namespace, other)
        assert store.invariants().ok
    finally:
        go_on.set()
        walker.join(60)


@pytest.mark.parametrize("text", ["x", "1", "1:", ":1", "-1:0", "1:2:3", "1: 2", "9" * 30 + ":0", "١:٢"])  # noqa: RUF001
def test_a_cursor_that_no_step_gave_is_refused_at_once(store, text):
    with pytest.raises(InvalidArgumentError, match="cursor"):
        store.scrub(text)
    with pytest.raises(InvalidArgumentError, match="17:2048"):
        parse_cursor(text)


def test_a_cursor_behind_the_last_segment_there_ever_was_is_refused_at_once(store, chain):
    last = store._segments.all()[-1]
    for text in (f"{last.segment_id + 1}:1", f"{last.segment_id + 2}:0", "99:99", "9" * 14 + ":0"):
        with pytest.raises(InvalidArgumentError, match=f"{text}.*never a segment {last.segment_id + 1}"):
            store.scrub(text)


def test_a_cursor_whose_segments_are_all_reclaimed_ends_in_order_with_nothing_checked(store, namespace, chain):
    cursor = str(
        next(step for step in walk(store) if step.cursor.segment_id == store._segments.all()[-1].segment_id).cursor
    )
    end = str(walk(store)[-1].cursor)
    store.delete(namespace, chain, 0, BLOCKS)
    store.sweep()
    assert store._segments.all() == []
    for text in (cursor, end):
        last = walk(store, text)[-1]
        assert (last.finished, last.blocks_checked) == (True, 0)


def test_a_cursor_from_before_a_restart_goes_on(tmp_path, clock):
    store = open_store(tmp_path, clock)
    namespace = store.register_namespace(spec())
    put(store, namespace, chain_of(namespace, 1, 3))
    end = str(walk(store)[-1].cursor)
    store.close()
    store = open_store(tmp_path, clock)
    assert walk(store, end)[-1].blocks_checked == 0
    put(store, namespace, chain_of(namespace, 2, 3))
    assert walk(store, end)[-1].blocks_checked == 3
    store.close()


class TestPace:
    def test_reads_are_spread_over_time(self):
        pace = Pace(1000, 0.0)
        assert pace.pause_s(500, 0.1) == pytest.approx(0.4)
        assert pace.pause_s(500, 0.6) == pytest.approx(0.4)

    def test_a_slow_disk_is_not_made_up_for(self):
        pace = Pace(1000, 0.0)
        assert pace.pause_s(100, 50.0) == pytest.approx(0.0)
        assert pace.pause_s(1000, 50.0) == pytest.approx(1.0)

    def test_without_a_limit_nothing_waits(self):
        pace = Pace(0, 0.0)
        assert pace.pause_s(1 << 40, 0.0) == 0.0
