"""Whether a hit is worth loading, as measured."""

from __future__ import annotations

import pytest

from kvstore_engine.benefit import MeasuredBenefit, MinimumHit


class ManualClock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def measured(clock: ManualClock, *, look_up_s: float, bytes_per_s: float, tokens_per_s: float) -> MeasuredBenefit:
    rule = MeasuredBenefit(reconsider_s=10, clock=clock)
    for _ in range(60):  # a quarter of the difference each: what was measured before is forgotten
        rule.note_look_up(look_up_s)
        rule.note_load(1_000_000, 1_000_000 / bytes_per_s)
        rule.note_prefill(100, 100 / tokens_per_s)
    return rule


@pytest.mark.parametrize(("saved_tokens", "used"), [(1, False), (199, False), (201, True), (10_000, True)])
def test_break_even_lies_where_look_up_and_transfer_take_as_long_as_computing(saved_tokens: int, used: bool):
    # 0.1 s + n * 1000 B / 1 MB/s = n / 666.7 tokens/s  at n = 200
    rule = measured(ManualClock(), look_up_s=0.1, bytes_per_s=1e6, tokens_per_s=1 / 0.0015)
    assert rule.is_worth(saved_tokens, 1000 * saved_tokens) is used
    assert rule.load_s(1_000_000) == pytest.approx(1.1)
    assert rule.prefill_s(1000) == pytest.approx(1.5)


def test_what_is_not_known_yet_counts_for_the_hit():
    rule = MeasuredBenefit()
    assert rule.is_worth(1, 10**12)
    rule.note_prefill(10**9, 1.0)
    assert rule.is_worth(1, 10**12)
    rule.note_look_up(5.0)
    assert rule.is_worth(1, 10**12)
    rule.note_load(1, 1.0)
    assert not rule.is_worth(1, 10**12)


def test_store_that_was_slow_is_tried_again_and_used_once_it_is_fast():
    clock = ManualClock()
    rule = measured(clock, look_up_s=0.001, bytes_per_s=1e3, tokens_per_s=1000)
    assert not rule.is_worth(128, 100_000)
    clock.now_s += 9.9
    assert not rule.is_worth(128, 100_000)
    clock.now_s += 0.2
    assert rule.is_worth(128, 100_000)
    tried = 0
    while not rule.is_worth(128, 100_000) or not tried:
        clock.now_s += 10
        rule.note_load(100_000, 0.001)
        tried += 1
    clock.now_s += 1
    assert rule.is_worth(128, 100_000)


def test_store_that_was_slow_for_long_is_used_again_within_a_minute_and_a_half():
    clock = ManualClock()
    rule = MeasuredBenefit(reconsider_s=10, clock=clock)
    size_bytes, tokens = 1_000_000, 1000

    def request(load_s: float) -> bool:
        clock.now_s += 1
        rule.note_look_up(0.001)
        if used := rule.is_worth(tokens, size_bytes):
            rule.note_load(size_bytes, load_s)
        return used

    rule.note_prefill(tokens, 0.1)
    for load_s in [0.005] * 100 + [1.0] * 3600:
        request(load_s)
    for _ in range(90):
        request(0.005)
    assert all(request(0.005) for _ in range(20))


def test_prefill_that_becomes_fast_ends_the_loads():
    rule = measured(ManualClock(), look_up_s=0.01, bytes_per_s=1e6, tokens_per_s=100)
    assert rule.is_worth(128, 100_000)
    for _ in range(30):
        rule.note_prefill(10_000, 0.01)
    assert not rule.is_worth(128, 100_000)


def test_single_tokens_behind_hits_do_not_make_the_engine_seem_slow():
    rule = measured(ManualClock(), look_up_s=0.01, bytes_per_s=1e6, tokens_per_s=1000)
    for _ in range(50):
        rule.note_prefill(1, 0.1)  # the least that a pass costs
        rule.note_prefill(31, 3.1)
    assert rule.prefill_s(1000) == pytest.approx(1.0)


def test_small_loads_do_not_make_large_ones_seem_slow():
    rule = measured(ManualClock(), look_up_s=0.01, bytes_per_s=1e9, tokens_per_s=1000)
    for _ in range(3):
        rule.note_load(1_000_000_000, 1.0)
        rule.note_load(1000, 0.005)  # the least that a call costs
    assert rule.load_s(1_000_000_000) == pytest.approx(1.01, rel=0.05)


def test_empty_measurements_teach_nothing():
    rule = MeasuredBenefit()
    rule.note_load(0, 5.0)
    rule.note_prefill(0, 5.0)
    assert (rule.load_s(1), rule.prefill_s(1)) == (None, None)


@pytest.mark.parametrize(("saved_tokens", "used"), [(0, False), (511, False), (512, True)])
def test_fixed_rule_looks_at_nothing_else(saved_tokens: int, used: bool):
    rule = MinimumHit(512)
    rule.note_look_up(100.0)
    rule.note_load(1, 100.0)
    rule.note_prefill(10**9, 1e-9)
    assert rule.is_worth(saved_tokens, 10**15) is used


@pytest.mark.parametrize("tokens", [0, -1])
def test_rule_that_would_use_empty_hits_is_refused(tokens: int):
    with pytest.raises(ValueError, match=f"hit of {tokens} tokens"):
        MinimumHit(tokens)
