"""What blocks are worth, what of a segment is kept, and what giving one back costs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvstore import reuse
from kvstore.catalog import ClassRecord
from kvstore.dropped import UNREACHABLE
from kvstore.expiry import TtlTable
from kvstore.log import format as fmt
from kvstore.log.segment import marks_of
from kvstore.traffic import TrafficClass
from kvstore.types import ClassId
from kvstore.worth import Valuation, middle_age_s

NOW_S = 1_800_000_000
SHORT, LONG = 1, 2
TTLS = TtlTable(
    ClassRecord(ClassId(number), TrafficClass(name, ttl_s), ttl_s)
    for number, (name, ttl_s) in enumerate({"short": 100, "long": 100_000}.items(), 1)
)


@pytest.fixture
def valuation():
    return Valuation(lambda: TTLS)


def uses_of(*blocks):
    """Use rows. Args: blocks: each a dictionary of ages by class, and `seen`."""
    uses = np.zeros((len(blocks), fmt.USE_COLUMNS), dtype="<u4")
    for row, block in zip(uses, blocks, strict=True):
        for class_id in set(block) - {"seen"}:
            row[class_id] = NOW_S - block[class_id]
        row[fmt.USE_LENGTH] = marks_of(np.array([block.get("seen", 0)]))[0] | 4096
    return uses


def chain(first, count):
    """Tags of a chain's blocks, each with its parent's: shape (count, 2)."""
    own = np.arange(first, first + count, dtype=np.uint64) << np.uint64(20)
    return np.stack([own, np.concatenate([[np.uint64(0)], own[:-1]])], axis=1)


def drop(valuation, tags, seen=0, age_s=10):
    uses = uses_of(*[{LONG: age_s, "seen": seen}] * len(tags))
    valuation.drop(tags, uses, np.ones(len(tags), dtype=bool), NOW_S)


def test_worth_falls_with_age_and_is_nothing_when_the_ttl_has_passed(valuation):
    uses = uses_of({SHORT: 0}, {SHORT: 50}, {SHORT: 99}, {SHORT: 100}, {})
    worth = valuation.worth(uses, NOW_S)
    assert worth[0] > worth[1] > worth[2] > 0
    assert worth[3:].tolist() == [0, 0]


def test_the_class_that_gives_most_counts(valuation):
    both, one, other = valuation.worth(uses_of({SHORT: 5, LONG: 900}, {SHORT: 5}, {LONG: 900}), NOW_S)
    assert both == max(one, other) > min(one, other)


def test_uses_teach_what_is_used_again(valuation):
    waiting = [uses_of(*[{LONG: age, "seen": 2 * (age % 2)}] * 50) for age in range(1000, 20_001, 25)]
    pair = uses_of({LONG: 3000, "seen": 2}, {LONG: 2000})
    valuation.learn_if_due(lambda: waiting, NOW_S)
    assert np.argmax(valuation.worth(pair, NOW_S)) == 0  # who was used more often
    for age in range(1000, 20_000, 20):
        valuation.note_use(uses_of(*[{LONG: age}] * 50), NOW_S)
    valuation.learn_if_due(lambda: waiting, NOW_S + 2)
    assert np.argmax(valuation.worth(pair, NOW_S)) == 1  # who is used again


def test_a_use_within_the_second_of_storing_teaches_nothing(valuation):
    for _ in range(1000):
        valuation.note_use(uses_of(*[{LONG: 0}] * 100), NOW_S)
    valuation.count_uses()
    assert valuation._histograms.reuses_and_seconds(np.zeros((42, 56)))[0].sum() == 0


def test_what_comes_back_is_known_by_its_uses_and_counts_as_a_reuse(valuation):
    tags = chain(1, 6)[:, 0]
    for part, seen in ((tags[:2], 0), (tags[2:4], 1), (tags[4:5], 2)):
        drop(valuation, part, seen)
    seen = valuation.arrive(tags, np.ones(6, dtype=bool), NOW_S)
    assert seen.tolist() == [1, 1, 2, 2, 2, 0]
    assert valuation._histograms.reuses_and_seconds(np.zeros((42, 56)))[0].sum() == 5
    assert valuation.arrive(tags, np.ones(6, dtype=bool), NOW_S).tolist() == [0] * 6  # once


def test_what_is_behind_an_evicted_block_is_out_of_reach_until_that_comes_back(valuation):
    tags, live = chain(1, 60), np.ones(57, dtype=bool)
    behind = tags[3:]
    valuation.place(8, behind)
    assert not valuation.lost(behind, live, NOW_S).any()
    drop(valuation, tags[2:3, 0])
    assert valuation.repriced == {8}
    assert valuation.lost(behind, live, NOW_S).all()
    valuation.arrive(tags[2:3, 0], np.ones(1, dtype=bool), NOW_S)
    assert not valuation.lost(behind, live, NOW_S).any()


def test_orphans_are_found_from_segment_to_segment_and_across_gaps(valuation):
    tags, live = chain(1, 12), np.ones(4, dtype=bool)
    near, far = tags[4:8], tags[8:12]
    for number, part in enumerate((near, far)):
        valuation.place(number, part)
    drop(valuation, tags[3:4, 0])
    valuation.repriced.clear()
    other = chain(100, 4)
    mixed = np.stack([near[0], other[0], near[1], other[1]])
    assert valuation.lost(mixed, live, NOW_S).tolist() == [True, False, True, False]
    assert valuation.lost(near, live, NOW_S).all()
    assert valuation.repriced == {1}  # where the block behind them is
    assert valuation.lost(far, live, NOW_S).all()


def test_what_comes_back_brings_back_what_is_behind_it_in_all_segments(valuation):
    tags, live = chain(1, 60), np.ones(20, dtype=bool)
    parts = [tags[first : first + 20] for first in (20, 40)]
    for number, part in enumerate(parts):
        valuation.place(number, part)
    drop(valuation, tags[:20, 0])
    assert all(valuation.lost(part, live, NOW_S).all() for part in parts)
    valuation.repriced.clear()
    valuation.arrive(tags[:20, 0], np.ones(20, dtype=bool), NOW_S)
    assert valuation.repriced == {0}
    assert not valuation.lost(parts[0], live, NOW_S).any()
    assert valuation.repriced == {0, 1}
    assert not valuation.lost(parts[1], live, NOW_S).any()


def test_a_dead_block_between_does_not_hide_that_its_followers_are_lost_or_not(valuation):
    tags = chain(1, 6)
    drop(valuation, tags[0:1, 0])
    live = np.array([True, False, True, True, True])
    lost = valuation.lost(tags[1:], live, NOW_S)
    assert lost.tolist() == [True, False, False, False, False]  # the dead one is gone for a reason of its own


def test_nothing_is_an_orphan_of_which_nothing_is_known(valuation):
    unknown = np.zeros((5, 2), dtype=np.uint64)
    drop(valuation, unknown[:, 0])
    assert not valuation.lost(unknown, np.ones(5, dtype=bool), NOW_S).any()


def test_orphans_that_live_are_no_intervals(valuation):
    tags = chain(1, 6)
    drop(valuation, tags[:1, 0])
    valuation.lost(tags[1:], np.ones(5, dtype=bool), NOW_S)
    _, found = valuation._dropped.find(tags[:, 0])
    assert found.kind.tolist().count(UNREACHABLE) == 5
    assert valuation.arrive(tags[1:, 0], np.ones(5, dtype=bool), NOW_S).tolist() == [0] * 5
    assert valuation._histograms.reuses_and_seconds(np.zeros((42, 56)))[0].sum() == 0


def test_many_segments_are_sampled_fairly_though_the_blocks_of_each_are_alike(valuation):
    ages_s = 2.0 ** np.linspace(0, 16, 4000)
    ages_s[1::2] = 1000  # streams take turns
    tables = [uses_of(*[{LONG: int(age_s)}] * 60) for age_s in ages_s]
    waiting, blocks = valuation._open_intervals(tables, NOW_S)
    kinds = reuse.kinds(LONG, np.zeros(4000, dtype=int))
    true = reuse.histogram(kinds, np.floor(ages_s), 60.0)
    assert blocks == pytest.approx(240_000)
    assert np.abs(waiting - true).max() <= 0.01 * true.max()


def judged(valuation, worth, threshold, live=None, sizes=None, payload_bytes=None):
    worth = np.array(worth, dtype=float)
    valuation._threshold = threshold
    live = np.ones(len(worth), dtype=bool) if live is None else np.array(live)
    taken = np.full(len(worth), 4096) if sizes is None else np.array(sizes)
    return valuation.judge(worth, live, taken, payload_bytes or int(taken.sum()))


def test_what_is_worth_the_threshold_is_kept_and_the_rest_dropped(valuation):
    verdict = judged(valuation, [0, 1, 2, 3, 0.5, 9], 2)
    assert verdict.keep.tolist() == [False, False, True, True, False, True]
    assert verdict.cost == pytest.approx((1.5 + 0.25 * 2 * 3) / 3)


def test_no_more_than_three_quarters_are_kept_most_worth_first_and_the_excess_costs_what_it_is_worth(valuation):
    verdict = judged(valuation, [5, 5, 9, 5], 1)
    assert verdict.keep.tolist() == [True, True, True, False]
    assert verdict.cost == pytest.approx(5 + 0.25 * 3)


def test_dead_blocks_come_back_for_nothing(valuation):
    verdict = judged(valuation, [5, 7, 0, 0], 1, live=[True, True, False, False])
    assert verdict.keep.tolist() == [True, True, False, False]
    assert verdict.cost == pytest.approx(0.25)
    assert judged(valuation, [], 1).cost == 0


def test_what_is_worth_nothing_is_never_kept(valuation):
    assert not judged(valuation, [0, 0, 0], 0).keep.any()
    assert not judged(valuation, [0, 0, 0], math.nan).keep.any()


def test_sizes_count(valuation):
    verdict = judged(valuation, [5, 9, 9], 1, sizes=[4096, 4096, 65_536], payload_bytes=73_728)
    assert verdict.keep.tolist() == [True, True, False] or verdict.keep.tolist() == [False, True, False]


def test_the_threshold_is_steered_until_a_fifth_is_moved_of_what_is_dropped(valuation):
    valuation.begin_threshold([np.linspace(0, 1, 101)[1:], np.zeros(3)])
    assert valuation.threshold == pytest.approx(0.109)
    before = valuation.threshold
    valuation.steer(20.0, 100.0, 120.0)
    assert valuation.threshold == before
    valuation.steer(21.0, 99.0, 120.0)
    assert valuation.threshold > before
    valuation.steer(0.0, 120.0, 120.0)
    assert valuation.threshold < before


def test_without_anything_of_worth_there_is_no_threshold_yet(valuation):
    valuation.begin_threshold([np.zeros(5)])
    assert math.isnan(valuation.threshold)
    assert valuation.levels(np.array([1.0, 2.0])).tolist() == [0, 0]


def test_new_blocks_are_sorted_by_how_often_they_were_used(valuation):
    valuation._threshold = valuation.worth(uses_of({LONG: 0}), NOW_S)[0]
    once, twice, often = valuation.levels_of_new(LONG, np.arange(3)).tolist()
    assert once == 0 < twice <= often


def test_the_middle_age_is_that_of_the_last_use():
    assert middle_age_s(uses_of({SHORT: 90, LONG: 5}, {LONG: 7}, {LONG: 5000}), NOW_S) == 7
    assert middle_age_s(uses_of(), NOW_S) == 0
    assert middle_age_s(uses_of({LONG: -5}), NOW_S) == 0  # a clock that was ahead
