"""What is learned of reuse, against processes whose hazards are known."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore import reuse
from kvstore.log import format as fmt
from kvstore.reuse import Index, ReuseHistograms, best_ratios, hazards, histogram, index_without_history, kinds

ENDLESS = np.full(reuse.CLASSES, np.inf)
ONCE, TWICE, OFTEN = range(3)


def of_class(class_id, seen, size=1):
    return np.full(size, class_id * reuse.USES_SEEN + seen, dtype=np.uint8)


def learned(*processes, class_id=1):
    """Histograms of blocks of some kinds with constant hazards. Args: processes: (uses seen, reuses a second, blocks)."""
    rng, counted = np.random.default_rng(1), ReuseHistograms()
    waiting = np.zeros((reuse.KINDS, 56))
    for seen, hazard, blocks in processes:
        ages = rng.exponential(1 / hazard, blocks)
        kind = of_class(class_id, seen, blocks)
        observed = ages < 4000
        counted.note_reused(kind[observed], ages[observed])
        waiting += histogram(kind[~observed], np.full((~observed).sum(), 4000.0))
    return counted.reuses_and_seconds(waiting)


def test_reuses_and_block_seconds_are_those_of_the_intervals():
    counted = ReuseHistograms()
    kind = of_class(2, ONCE)
    counted.note_reused(kind, np.array([10.0]))
    counted.note_cut_off(kind, np.array([100.0]))
    reuses, seconds = counted.reuses_and_seconds(histogram(kind, np.array([1000.0])))
    assert reuses.sum() == reuses[kind[0]].sum() == 1
    assert seconds[kind[0]].sum() == pytest.approx(1110, rel=0.15)  # bins are half an octave wide
    assert seconds.sum() == seconds[kind[0]].sum()


def test_what_had_waited_before_the_counting_began_is_no_time_at_risk():
    counted = ReuseHistograms()
    kind = of_class(1, ONCE, 50)
    counted.begin(histogram(kind, np.full(50, 500.0)))
    _, seconds = counted.reuses_and_seconds(histogram(kind, np.full(50, 500.0)))
    assert seconds.sum() == 0
    _, seconds = counted.reuses_and_seconds(histogram(kind, np.full(50, 1500.0)))
    assert seconds.sum() == pytest.approx(50 * 1000, rel=0.35)  # bins are half an octave wide


def test_halving_leaves_half_of_what_was_counted_and_all_that_follows():
    counted = ReuseHistograms()
    kind = of_class(1, ONCE, 64)
    counted.note_reused(kind, np.full(64, 30.0))
    waiting = histogram(kind, np.full(64, 200.0))
    before = counted.reuses_and_seconds(waiting)
    counted.halve(waiting)
    for was, now in zip(before, counted.reuses_and_seconds(waiting), strict=True):
        assert now == pytest.approx(was / 2)
    counted.note_reused(kind, np.full(64, 30.0))
    assert counted.reuses_and_seconds(waiting)[0].sum() == 32 + 64


def test_with_much_counted_the_hazard_is_the_one_that_made_it():
    for hazard in (1e-3, 8e-3):
        reuses, seconds = learned((TWICE, hazard, 100_000))
        at = reuses[of_class(1, TWICE)[0]] > 4000
        assert at.sum() >= 4
        found = hazards(reuses, seconds)[of_class(1, TWICE)[0], at]
        assert found == pytest.approx(np.full(at.sum(), hazard), rel=0.15)


def test_what_is_used_again_sooner_the_more_it_was_used_is_learned():
    reuses, seconds = learned((ONCE, 1e-3, 40_000), (OFTEN, 16e-3, 40_000))
    found = hazards(reuses, seconds)
    at = reuses[of_class(1, OFTEN)[0]] > 2000
    ratios = found[of_class(1, OFTEN)[0], at] / found[of_class(1, ONCE)[0], at]
    assert ((ratios > 4) & (ratios < 16)).all()
    reuses, seconds = learned((ONCE, 16e-3, 40_000), (OFTEN, 1e-3, 40_000))
    found = hazards(reuses, seconds)
    assert (found[of_class(1, OFTEN)[0]] < found[of_class(1, ONCE)[0]]).all()


def test_with_nothing_counted_what_was_used_last_is_worth_most_and_what_was_used_again_more():
    index = index_without_history(ENDLESS)
    assert index.lru_part == 1
    ages = np.array([0.0, 1, 10, 100, 1e4, 1e6])
    for seen in (ONCE, TWICE, OFTEN):
        assert (np.diff(index.of(np.repeat(of_class(1, seen), 6), ages)) < 0).all()
    by_uses = [index.of(of_class(3, seen), np.array([50.0]))[0] for seen in (ONCE, TWICE, OFTEN)]
    assert by_uses == sorted(by_uses)
    assert by_uses[2] == pytest.approx(3 * by_uses[0])


def test_order_within_a_bin_is_kept():
    index = index_without_history(ENDLESS)
    ages = np.array([1000.0, 1020, 1050, 1100, 1200])
    assert (np.diff(index.of(np.repeat(of_class(1, ONCE), 5), ages)) < 0).all()


def test_a_constant_hazard_is_its_own_index():
    hazard = np.full((1, 56), 0.01)
    assert best_ratios(hazard, np.array([np.inf]))[0] == pytest.approx(np.full(56, 0.01))


def test_the_index_looks_over_a_gap_to_what_comes():
    hazard = np.full((1, 56), 1e-9)
    hazard[0, 20] = 0.01  # 1,023 to 1,447 s
    index = best_ratios(hazard, np.array([np.inf]))[0]
    assert index[20] == pytest.approx(0.01, rel=0.01)
    assert (np.diff(index[:21]) > 0).all()  # the nearer the more
    assert index[18] > 1e-3
    assert index[25] < 1e-8
    cut_off = best_ratios(hazard, np.array([600.0]))[0]  # its life ends before it comes
    assert (cut_off[:18] < 1e-8).all()


def test_worth_never_rises_with_age():
    reuses, seconds = learned((ONCE, 1e-3, 5000), (TWICE, 5e-3, 5000))
    reuses[:, 12] *= 40
    index = Index(reuses, seconds, ENDLESS, np.ones(56), 1.0)
    ages = np.geomspace(1, 1e6, 300) - 1
    for kind in range(reuse.KINDS):
        worth = index.of(np.full(300, kind, dtype=np.uint8), ages)
        assert (worth[1:] <= worth[:-1] * (1 + 1e-9)).all()


def test_where_hardly_any_reuse_is_older_than_what_lru_keeps_it_is_lru():
    reuses, seconds = learned((ONCE, 1e-2, 20_000))
    ages = np.zeros(56)
    ages[:30] = 100  # the oldest of 3,000 blocks is 2**15 s old
    assert Index(reuses, seconds, ENDLESS, ages, 3000.0).lru_part == pytest.approx(1, abs=0.01)
    assert Index(reuses, seconds, ENDLESS, ages, 300.0).lru_part == 0  # 3 s


def test_classes_learn_of_each_other_what_they_have_not_seen():
    reuses, seconds = learned((ONCE, 5e-2, 30_000), class_id=1)
    found = hazards(reuses, seconds)
    at = reuses[of_class(1, ONCE)[0]] > 1000
    unseen = found[of_class(9, ONCE)[0], at]
    assert unseen == pytest.approx(found[of_class(1, ONCE)[0], at], rel=0.5)


def test_kinds_are_apart():
    assert len({int(kinds(class_id, np.array([seen]))[0]) for class_id in range(14) for seen in range(3)}) == 42
    assert reuse.KINDS == 42 == 3 * (fmt.LAST_CLASS_COLUMN + 1)


def test_levels_are_octaves_of_the_threshold():
    assert reuse.levels(np.array([1.0, 1.9, 2.0, 0.9, 1e-9, 1e9, 0]), 1.0).tolist() == [0, 0, 1, -1, -8, 7, -8]


@pytest.mark.parametrize(("since_s", "interval_s"), [(0, 1), (64, 1), (640, 10), (1e6, 60)])
def test_the_index_is_made_anew_often_at_first(since_s, interval_s):
    assert reuse.interval_s(since_s) == interval_s
