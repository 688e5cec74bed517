"""Which segment goes, and when what it costs is counted again."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvstore.victims import Price, Prices, cheapest


@dataclass
class Numbered:
    segment_id: int
    cost: float = 1.0
    age_s: float = 100.0


class Counted:
    """Prices that say how often each was counted."""

    def __init__(self):
        self.now_s = 1000.0
        self.counts: dict[int, int] = {}
        self.repriced: set[int] = set()
        self.prices = Prices(self.count, self.repriced)
        self.prices.begin()

    def count(self, segment):
        self.counts[segment.segment_id] = self.counts.get(segment.segment_id, 0) + 1
        return Price(segment.cost, segment.age_s, self.now_s)

    def about(self, segment):
        return self.prices.about(segment, self.now_s)


def test_a_price_falls_as_its_blocks_age_and_is_counted_again_when_they_are_much_older():
    counted, segment = Counted(), Numbered(1)
    assert counted.about(segment) == 1
    counted.now_s += 101
    assert counted.about(segment) == pytest.approx(0.5)
    counted.now_s += 808
    assert counted.about(segment) == pytest.approx(0.1)
    assert counted.counts == {1: 1}
    counted.now_s += 102
    assert counted.about(segment) == 1
    assert counted.counts == {1: 2}


def test_a_segment_whose_price_changed_is_counted_again_once():
    counted, segment = Counted(), Numbered(1)
    counted.about(segment)
    counted.repriced.add(1)
    counted.about(segment)
    counted.about(segment)
    assert counted.counts == {1: 2}
    assert counted.repriced == set()


def test_no_more_are_counted_at_once_than_the_writer_can_wait_for():
    counted = Counted()
    segments = [Numbered(number, cost=0.001) for number in range(700)]
    for known in (300, 600, 700):
        counted.prices.begin()
        costs = [counted.about(segment) for segment in segments]
        assert sum(cost == 0.001 for cost in costs) == known
        assert max(costs) < 1  # still before what is protected
    assert set(counted.counts.values()) == {1}


def test_of_segments_that_are_gone_nothing_is_left():
    counted = Counted()
    for number in range(4):
        counted.about(Numbered(number))
    counted.repriced |= {1, 3, 99}
    counted.prices.forget_others([Numbered(0), Numbered(1)])
    assert counted.repriced == {1}
    assert set(counted.prices._known) == {0, 1}


def test_the_cheapest_is_found_without_counting_those_that_are_clearly_dearer():
    costs = {1: 10.0, 2: 1.0, 3: 1.1, 4: 1.5, 5: 50.0}
    asked = []

    def renewed(candidate):
        asked.append(candidate.segment_id)
        return Numbered(candidate.segment_id, {2: 4.0, 3: 1.2}.get(candidate.segment_id, candidate.cost))

    found = cheapest([Numbered(number, cost) for number, cost in costs.items()], renewed)
    assert (found.segment_id, found.cost) == (3, 1.2)
    assert asked == [2, 3]
