"""Where a hit may end when some layers are not in the blocks."""

from __future__ import annotations

import pytest

from kvstore_api.namespace import KvGroup, KvGroupKind, ReplayMode
from kvstore_api.resume import resume_plan
from stores import spec


def state(name):
    return KvGroup(name, KvGroupKind.STATE, (), replay_rule=ReplayMode.SNAPSHOT)


def window(tokens, layers, rule, replay_tokens=0):
    return KvGroup("swa", KvGroupKind.SLIDING_WINDOW, tuple(range(layers)), tokens, rule, replay_tokens)


def plan(groups, hit_blocks, states=()):
    result = resume_plan(spec(groups=tuple(groups)), hit_blocks, lambda blocks, name: (name, blocks) in states)
    return result.hit_tokens, result.replay_start_token, result.mode


@pytest.mark.parametrize("hit_blocks", [0, 1, 5])
def test_full_attention_resumes_at_the_end_of_the_hit(hit_blocks):
    assert plan([], hit_blocks) == (hit_blocks * 128, hit_blocks * 128, ReplayMode.NONE)


@pytest.mark.parametrize(
    ("full_blocks", "first", "second", "end"),
    [(3, {3}, {3}, 3), (3, {3}, {2}, 0), (3, {1, 3}, {1, 2}, 1), (2, {3}, {2}, 0), (9, {2, 4, 8}, {1, 2, 4}, 4)],
)
def test_the_end_is_legal_in_every_group_not_the_minimum(full_blocks, first, second, end):
    states = {("a", blocks) for blocks in first} | {("b", blocks) for blocks in second}
    assert plan([state("a"), state("b")], full_blocks, states)[0] == end * 128


@pytest.mark.parametrize(("hit_blocks", "expected"), [(0, (0, 0)), (1, (0, 0)), (2, (256, 128)), (9, (1152, 1024))])
def test_bounded_replays_one_window_and_adopts_nothing_shorter(hit_blocks, expected):
    assert plan([window(128, 4, ReplayMode.BOUNDED)], hit_blocks)[:2] == expected


def test_exact_replays_a_window_per_layer_in_whole_blocks():
    group = window(100, 4, ReplayMode.EXACT)  # 400 tokens: 4 blocks
    assert plan([group], 4) == (0, 0, ReplayMode.NONE)
    assert plan([group], 5) == (640, 128, ReplayMode.EXACT)


def test_an_engine_may_ask_for_a_longer_span():
    assert plan([window(128, 4, ReplayMode.BOUNDED, replay_tokens=131)], 3) == (384, 253, ReplayMode.BOUNDED)
    assert plan([window(128, 1, ReplayMode.EXACT, replay_tokens=131)], 3) == (384, 128, ReplayMode.EXACT)


def test_a_snapshot_spares_the_replay_and_its_absence_costs_a_window():
    group = window(128, 4, ReplayMode.SNAPSHOT)
    assert plan([group], 3, {("swa", 3)}) == (384, 384, ReplayMode.SNAPSHOT)
    assert plan([group], 3, {("swa", 2)}) == (384, 256, ReplayMode.BOUNDED)
    # A hit of one block cannot be replayed into, but with a snapshot there it can be used.
    assert plan([group], 1, {("swa", 1)}) == (128, 128, ReplayMode.SNAPSHOT)


def test_the_longest_replay_of_several_groups_counts():
    short = KvGroup("short", KvGroupKind.SLIDING_WINDOW, (0,), 128, ReplayMode.BOUNDED)
    long = KvGroup("long", KvGroupKind.SLIDING_WINDOW, (1, 2), 256, ReplayMode.EXACT)
    assert plan([short, long], 6) == (768, 256, ReplayMode.EXACT)
