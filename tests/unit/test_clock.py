"""The store's time under clocks that jump: nothing immortal, nothing expired before its time."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.clock import CONFIRM_S, ClockNote, GuardedClock, ManualClock
from kvstore.config import TrafficClassConfig
from kvstore.log import format as fmt
from stores import assert_whole, chain_of, open_store, put, spec

DAY_S = 86_400
CLASSES = {"agent": TrafficClassConfig(ttl_s=3 * DAY_S)}


@pytest.fixture
def clock():
    return ManualClock()


def guarded(clock, note=None, boot_id=b"this boot"):
    return GuardedClock(clock, boot_id, note)


def test_time_passes_as_the_clocks_say(clock):
    store_clock = guarded(clock)
    start_s = store_clock.now_s()
    for step_s in (0.1, 1, 3600, 30 * DAY_S):
        clock.advance(step_s)
    assert store_clock.now_s() - start_s == pytest.approx(3601.1 + 30 * DAY_S)
    assert store_clock.ahead_s() == 0


class SlowClock(ManualClock):
    """Time passes while it is read, as it does on any machine."""

    def now_s(self):
        self.advance(1e-6)
        return super().now_s()


def test_the_store_is_not_ahead_of_a_clock_that_it_follows_not_even_by_what_reading_it_takes():
    store_clock = guarded(SlowClock())
    assert {store_clock.ahead_s() for _ in range(100)} == {0.0}


def test_small_steps_are_followed_but_never_back(clock):
    store_clock = guarded(clock)
    start_s = store_clock.now_s()
    clock.jump(4)
    assert store_clock.now_s() == start_s + 4
    clock.jump(-3)
    assert store_clock.now_s() == start_s + 4
    clock.advance(2)
    assert store_clock.now_s() == start_s + 4
    clock.advance(2)
    assert store_clock.now_s() == start_s + 5


@pytest.mark.parametrize("jump_s", [-10, -DAY_S, -3650 * DAY_S])
def test_a_clock_set_back_does_not_turn_the_store_back(clock, caplog, jump_s):
    store_clock = guarded(clock)
    start_s = store_clock.now_s()
    clock.jump(jump_s)
    for _ in range(20):
        clock.advance(100)
        store_clock.now_s()
    assert store_clock.now_s() == start_s + 2000
    assert store_clock.ahead_s() == -jump_s
    assert sum("behind the store's time" in record.message for record in caplog.records) == 1
    clock.jump(-jump_s)
    assert store_clock.now_s() == start_s + 2000


@pytest.mark.parametrize("jump_s", [10, 10 * DAY_S, 3650 * DAY_S])
def test_a_jump_ahead_is_believed_once_it_has_lasted(clock, caplog, jump_s):
    store_clock = guarded(clock)
    start_s = store_clock.now_s()
    clock.jump(jump_s)
    assert store_clock.now_s() == start_s
    clock.advance(CONFIRM_S - 1)
    assert store_clock.now_s() == start_s + CONFIRM_S - 1
    assert store_clock.confirm() is None
    clock.advance(1)
    assert store_clock.now_s() == start_s + CONFIRM_S
    assert store_clock.confirm() == start_s
    assert store_clock.now_s() == start_s + jump_s + CONFIRM_S
    assert store_clock.confirm() is None
    assert sum("jumped" in record.message for record in caplog.records) == 1


def test_a_jump_that_is_taken_back_leaves_no_trace(clock):
    store_clock = guarded(clock)
    start_s = store_clock.now_s()
    for _ in range(5):
        clock.jump(10 * DAY_S)
        clock.advance(CONFIRM_S - 1)
        assert store_clock.now_s() < start_s + DAY_S
        assert store_clock.confirm() is None
        clock.jump(-10 * DAY_S)
        clock.advance(1)
        store_clock.now_s()
    assert store_clock.now_s() == start_s + 5 * CONFIRM_S


def test_a_clock_that_keeps_jumping_is_not_confirmed(clock):
    store_clock = guarded(clock)
    start_s = store_clock.now_s()
    for _ in range(20):
        clock.jump(DAY_S)
        clock.advance(CONFIRM_S / 2)
        assert store_clock.confirm() is None
    assert store_clock.now_s() == start_s + 10 * CONFIRM_S


def test_downtime_in_one_boot_is_measured_by_the_steady_clock(clock):
    note = guarded(clock).note()
    clock.advance(8 * DAY_S)
    assert guarded(clock, note).now_s() == clock.now_s()
    clock.jump(-DAY_S)
    assert guarded(clock, note).now_s() == clock.now_s() + DAY_S
    clock.jump(11 * DAY_S)
    assert guarded(clock, note).now_s() == clock.now_s() - 10 * DAY_S


@pytest.mark.parametrize(
    ("gap_s", "believed"), [(0, True), (3600, True), (DAY_S, True), (2 * DAY_S, False), (-DAY_S, False), (-10, False)]
)
def test_after_a_reboot_only_a_plausible_gap_is_believed_at_once(clock, gap_s, believed):
    note = ClockNote(clock.now_s() - gap_s, clock.steady_s() + 5, b"another boot")
    store_clock = guarded(clock, note)
    assert store_clock.now_s() == (clock.now_s() if believed else note.store_s)
    clock.advance(CONFIRM_S)
    store_clock.confirm()
    clock.advance(CONFIRM_S)
    store_clock.confirm()
    later_s = clock.now_s() if gap_s >= 0 else note.store_s + 2 * CONFIRM_S
    assert store_clock.now_s() == later_s


@pytest.fixture
def filled(tmp_path, clock):
    """A store with one chain of a 3-day class."""
    store = open_store(tmp_path, clock, traffic_classes=CLASSES)
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 4)
    put(store, namespace, chain)
    return store, namespace, chain


def hits(store, namespace, chain):
    return store.match(namespace, chain, peek=True).hit_length_blocks


def test_a_jump_ahead_and_back_expires_nothing_and_makes_nothing_immortal(filled, clock):
    store, namespace, chain = filled
    clock.jump(10 * DAY_S)
    other = chain_of(namespace, 2, 4)
    put(store, namespace, other)
    store.sweep()
    clock.advance(60)
    assert hits(store, namespace, chain) == 4
    clock.jump(-10 * DAY_S)
    store.sweep()
    assert_whole(store, namespace, chain)
    clock.advance(3 * DAY_S)
    assert hits(store, namespace, chain) == 0
    assert hits(store, namespace, other) == 0
    assert store.status().clock_ahead_s == 0
    store.close()


@pytest.mark.parametrize("days", [2, 10])
def test_what_was_used_while_a_jump_was_doubted_lives_its_time_when_it_is_believed(filled, clock, days):
    store, namespace, chain = filled
    clock.jump(days * DAY_S)
    clock.advance(10)
    store.sweep()
    new = chain_of(namespace, 2, 4)
    put(store, namespace, new)
    clock.advance(CONFIRM_S)
    assert hits(store, namespace, new) == 4
    store.sweep()
    assert hits(store, namespace, new) == 4
    assert hits(store, namespace, chain) == (4 if days < 3 else 0)
    clock.advance(3 * DAY_S - 1)
    assert hits(store, namespace, new) == 4
    clock.advance(2)
    assert hits(store, namespace, new) == 0
    store.close()


def test_a_clock_set_back_makes_nothing_immortal(filled, clock):
    store, namespace, chain = filled
    clock.jump(-DAY_S)
    other = chain_of(namespace, 2, 4)
    put(store, namespace, other)
    assert hits(store, namespace, other) == 4
    assert store.status().clock_ahead_s == DAY_S
    clock.advance(3 * DAY_S + 1)
    assert hits(store, namespace, chain) == 0
    assert hits(store, namespace, other) == 0
    store.close()


def test_a_restart_a_day_behind_goes_on_where_it_was(filled, clock, tmp_path):
    store, namespace, chain = filled
    store.close()
    clock.jump(-DAY_S)
    store = open_store(tmp_path, clock, traffic_classes=CLASSES)
    assert hits(store, namespace, chain) == 4
    clock.advance(3 * DAY_S + 1)
    assert hits(store, namespace, chain) == 0
    store.close()


@pytest.mark.parametrize("spoil", [lambda path: path.unlink(), lambda path: path.write_bytes(b"\xff" * 40)])
def test_uses_in_the_future_count_as_of_now(filled, clock, tmp_path, spoil):
    """The note is lost, and the uses were noted by a clock a year ahead: they must not live a year longer."""
    store, namespace, chain = filled
    store.close()
    spoil(tmp_path / "clock")
    clock.jump(-365 * DAY_S)
    store = open_store(tmp_path, clock, traffic_classes=CLASSES)
    assert store.status().live.blocks == 4
    segment = store._segments.all()[0]
    assert segment.uses[:4, 1].max() <= np.uint32(clock.now_s() + 1)
    clock.advance(3 * DAY_S + 1)
    assert hits(store, namespace, chain) == 0
    assert store.status().live.blocks == 0
    store.close()


def test_what_has_expired_stays_so_whatever_the_clock_does(filled, clock, tmp_path):
    store, namespace, chain = filled
    clock.advance(3 * DAY_S)
    assert hits(store, namespace, chain) == 0
    clock.jump(-5 * DAY_S)
    assert hits(store, namespace, chain) == 0
    store.close()
    store = open_store(tmp_path, clock, traffic_classes=CLASSES)
    assert hits(store, namespace, chain) == 0
    store.close()


def test_a_lease_is_told_by_the_wall_clock_and_kept_by_the_stores(filled, clock):
    store, namespace, chain = filled
    clock.jump(-DAY_S)
    match = store.match(namespace, chain, lease_s=7)
    assert match.lease_expiry_s == clock.now_s() + 7
    assert store._segments.all()[0].lease_until_s == clock.now_s() + DAY_S + 7
    store.close()


def test_a_clock_file_that_cannot_be_made_is_told_and_does_without(tmp_path, clock, caplog):
    (tmp_path / "clock").mkdir(parents=True)
    (tmp_path / "catalog.json.new").touch()
    store = open_store(tmp_path, clock)
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 2)
    put(store, namespace, chain)
    assert hits(store, namespace, chain) == 2
    store.close()
    assert "jumps of the clock during a restart will not be noticed" in caplog.text


def test_the_time_is_noted_while_the_store_is_open(tmp_path, clock):
    store = open_store(tmp_path, clock)
    first = (tmp_path / "clock").read_bytes()
    clock.advance(3)
    store.sweep()
    assert (tmp_path / "clock").read_bytes() == first
    clock.advance(20)
    store.sweep()
    assert (tmp_path / "clock").read_bytes() != first
    assert fmt.ALIGNMENT_BYTES >= (tmp_path / "clock").stat().st_size > 0
    store.close()
