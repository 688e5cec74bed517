"""Where a hit may end when some layers are not in the blocks, and from where on is computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvstore_api.namespace import KvGroup, KvGroupKind, ReplayMode
from kvstore_api.resume import ResumePlan, resume_plan
from stores import spec

FULL, WINDOW, STATE = KvGroupKind.FULL, KvGroupKind.SLIDING_WINDOW, KvGroupKind.STATE
NONE, BOUNDED, EXACT, SNAPSHOT = ReplayMode.NONE, ReplayMode.BOUNDED, ReplayMode.EXACT, ReplayMode.SNAPSHOT


def state(name, rule=SNAPSHOT):
    return KvGroup(name, STATE, (), replay_rule=rule)


def window(tokens, layers, rule, replay_tokens=0, name="swa"):
    return KvGroup(name, WINDOW, tuple(range(layers)), tokens, rule, replay_tokens)


def plan(groups, hit_blocks, states=()):
    result = resume_plan(spec(groups=tuple(groups)), hit_blocks, lambda blocks, name: (name, blocks) in states)
    return result.hit_tokens, result.replay_start_token, result.mode


MISS = (0, 0, NONE)


@pytest.mark.parametrize("hit_blocks", [0, 1, 5])
def test_full_attention_resumes_at_the_end_of_the_hit(hit_blocks):
    assert plan([], hit_blocks) == (hit_blocks * 128, hit_blocks * 128, NONE)


@pytest.mark.parametrize(
    ("full_blocks", "first", "second", "end"),
    [(3, {3}, {3}, 3), (3, {3}, {2}, 0), (3, {1, 3}, {1, 2}, 1), (2, {3}, {2}, 0), (9, {2, 4, 8}, {1, 2, 4}, 4)],
)
def test_the_end_is_legal_in_every_group_not_the_minimum(full_blocks, first, second, end):
    states = {("a", blocks) for blocks in first} | {("b", blocks) for blocks in second}
    expected = (end * 128, end * 128, SNAPSHOT) if end else MISS
    assert plan([state("a"), state("b")], full_blocks, states) == expected


@pytest.mark.parametrize(("hit_blocks", "expected"), [(0, (0, 0)), (1, (0, 0)), (2, (256, 128)), (9, (1152, 1024))])
def test_bounded_replays_one_window_and_adopts_nothing_shorter(hit_blocks, expected):
    assert plan([window(128, 4, BOUNDED)], hit_blocks)[:2] == expected


def test_exact_replays_a_window_per_layer_in_whole_blocks():
    group = window(100, 4, EXACT)  # 400 tokens: 4 blocks
    assert plan([group], 4) == MISS
    assert plan([group], 5) == (640, 128, EXACT)


def test_exact_counts_the_window_layers_of_every_group():
    short, long = window(128, 1, EXACT, name="short"), window(256, 2, EXACT, name="long")
    assert plan([short, long], 6) == (768, 128, EXACT)


def test_an_engine_may_ask_for_a_longer_span():
    assert plan([window(128, 4, BOUNDED, replay_tokens=131)], 3) == (384, 253, BOUNDED)
    assert plan([window(128, 1, EXACT, replay_tokens=131)], 3) == (384, 128, EXACT)
    assert plan([window(128, 1, SNAPSHOT, replay_tokens=131)], 3) == (384, 128, EXACT)


def test_a_missing_snapshot_costs_the_exact_span_and_never_the_approximate_one():
    group = window(128, 2, SNAPSHOT)
    assert plan([group], 5) == (640, 384, EXACT)
    assert plan([group], 2) == MISS


@pytest.mark.parametrize(
    ("alive", "expected"),
    [
        ({5}, (640, 640, SNAPSHOT)),
        ({4}, (512, 512, SNAPSHOT)),  # shorter than the hit that is replayed, but less is computed
        ({3}, (640, 384, EXACT)),  # the same token is the first to compute: the longer hit
        ({1}, (640, 384, EXACT)),
        ({1, 4}, (512, 512, SNAPSHOT)),
        ({6}, (640, 384, EXACT)),  # beyond the hit
    ],
)
def test_of_a_snapshot_and_a_replay_the_one_that_leaves_less_to_compute_is_taken(alive, expected):
    assert plan([window(128, 2, SNAPSHOT)], 5, {("swa", blocks) for blocks in alive}) == expected


def test_a_snapshot_makes_a_hit_usable_that_is_too_short_for_a_replay():
    assert plan([window(128, 4, SNAPSHOT)], 1, {("swa", 1)}) == (128, 128, SNAPSHOT)


def test_when_one_group_is_replayed_a_snapshot_of_another_spares_nothing():
    loaded, replayed = window(128, 1, SNAPSHOT, name="a"), window(128, 2, BOUNDED, name="b")
    assert plan([loaded, replayed], 5, {("a", 5)}) == (640, 640 - 3 * 128, EXACT)


@pytest.mark.parametrize("rule", [NONE, BOUNDED, EXACT])
def test_a_recurrent_state_is_loaded_or_nothing_is_resumed(rule):
    everywhere = {("a", blocks) for blocks in range(1, 10)}
    assert plan([state("a", rule)], 9, everywhere) == MISS
    if rule is not NONE:
        assert plan([state("a"), window(1, 1, rule)], 9, everywhere) == MISS


def test_states_are_asked_for_from_the_end_down_and_only_where_one_would_help():
    asked = []

    def has_state(blocks, name):
        asked.append((blocks, name))
        return name == "a" and blocks == 998

    groups = (window(128, 2, SNAPSHOT, name="a"), window(128, 1, SNAPSHOT, name="b"))
    resume_plan(spec(groups=groups), 1000, has_state)
    assert asked == [(1000, "a"), (999, "a"), (998, "a"), (998, "b")]


# Against definitions

LAYERS = 6


@st.composite
def models(draw, rules=(BOUNDED, EXACT, SNAPSHOT), kinds=(FULL, WINDOW, STATE), block_tokens=2):
    """A spec of tiny blocks whose layers belong to three groups, each of them to one or to none."""
    owner = draw(st.lists(st.integers(0, 3), min_size=LAYERS, max_size=LAYERS))
    groups = []
    for number in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(kinds))
        layers = tuple(layer for layer in range(LAYERS) if owner[layer] == number)
        rule = NONE if kind is FULL else draw(st.sampled_from(rules))
        tokens = draw(st.integers(1, 5)) if kind is WINDOW else 0
        replay_tokens = draw(st.sampled_from([0, 0, 3, 9])) if kind is WINDOW else 0
        groups.append(KvGroup(f"group {number}", kind, layers, tokens, rule, replay_tokens))
    return spec(groups=tuple(groups), block_tokens=block_tokens)


ALIVE = st.sets(st.tuples(st.sampled_from([f"group {number}" for number in range(3)]), st.integers(1, 12)), max_size=40)


def all_plans(model, hit_blocks, alive):
    """Every legal plan, as the words of `resume.py` have it."""
    groups = [group for group in model.groups if group.kind is not FULL]
    window_layers_tokens = sum(group.window_tokens for group in groups for _ in group.layers)

    def asks(group):
        span = max(group.window_tokens, group.replay_tokens)
        if group.replay_rule is not BOUNDED:
            span = max(span, window_layers_tokens)
            span += -span % model.block_tokens
        return span, min(group.replay_rule, EXACT)

    for blocks in range(1, hit_blocks + 1):
        end = blocks * model.block_tokens
        if all(group.replay_rule is SNAPSHOT and (group.name, blocks) in alive for group in groups):
            yield ResumePlan(end, end, SNAPSHOT if groups else NONE)
        if groups and all(group.kind is WINDOW for group in groups):
            longest, mode = max(asks(group) for group in groups)
            yield from (ResumePlan(end, start, ReplayMode(mode)) for start in range(1, end) if end - start >= longest)


@settings(deadline=None, max_examples=300)
@given(models(), st.integers(0, 12), ALIVE)
def test_the_plan_is_the_one_of_all_legal_plans_that_leaves_least_to_compute(model, hit_blocks, alive):
    best = max(
        all_plans(model, hit_blocks, alive),
        key=lambda each: (each.replay_start_token, each.hit_tokens),
        default=ResumePlan(),
    )
    assert resume_plan(model, hit_blocks, lambda blocks, name: (name, blocks) in alive) == best


def comes_out_as_cold(model, plan):
    """Follow right and wrong through all layers: is each token behind the hit computed from what a cold run would have there?"""
    owner = {layer: group for group in model.groups for layer in group.layers}
    end = plan.hit_tokens + 2 + sum(group.window_tokens * len(group.layers) for group in model.groups)
    right = dict.fromkeys(range(plan.replay_start_token, end), True)  # what goes into the layer, by token
    for layer in range(LAYERS):
        right = {token: goes_on_right(owner.get(layer), plan, right, token) for token in right}
    return all(right[token] for token in range(plan.hit_tokens, end))


def goes_on_right(group, plan, right, token):
    """Whether a layer of this group makes of its input (right or wrong, by token) at this token what a cold run makes."""
    hit, loaded = plan.hit_tokens, plan.mode is SNAPSHOT
    if group is None or group.kind is FULL:  # reads blocks before the hit, what it computed itself behind it
        there = all(right[other] for other in range(hit, token))
    elif group.kind is WINDOW:
        saved = range(hit - group.window_tokens, hit) if loaded else ()
        reads = range(max(0, token - group.window_tokens), token)
        there = all(other in saved or right.get(other, False) for other in reads)
    else:  # carries on from what was saved at the hit
        there = loaded and all(right[other] for other in range(plan.replay_start_token, token))
    return right[token] and there


@settings(deadline=None, max_examples=200)
@given(models(), st.integers(0, 12), ALIVE)
def test_what_is_not_called_bounded_comes_out_as_a_cold_run(model, hit_blocks, alive):
    plan = resume_plan(model, hit_blocks, lambda blocks, name: (name, blocks) in alive)
    if plan.mode is BOUNDED:
        assert any(group.replay_rule is BOUNDED for group in model.groups)
    elif plan.hit_tokens:
        assert comes_out_as_cold(model, plan)


@settings(deadline=None, max_examples=100)
@given(models(rules=(EXACT,), kinds=(FULL, WINDOW), block_tokens=1))
def test_the_exact_span_is_not_a_token_too_long(model):
    groups = tuple(replace(group, replay_tokens=0) for group in model.groups if group.layers)
    assume(any(group.kind is WINDOW for group in groups))
    model = replace(model, groups=groups)
    plan = resume_plan(model, 31, lambda blocks, name: False)
    assert comes_out_as_cold(model, plan)
    assert not comes_out_as_cold(model, replace(plan, replay_start_token=plan.replay_start_token + 1))
