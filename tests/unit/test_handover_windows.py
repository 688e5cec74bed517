"""Requests of models with sliding windows that go from one engine to another: with the window at the exact token, or replayed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvstore_client import ReplayMode, StateResult
from kvstore_engine.identity import namespace_spec
from kvstore_engine.sampling import SamplingParams
from kvstore_engine.ticket import read_ticket
from nodes import CONFIG, Node, Without, make_pool, patient_client, prompt_of, undisturbed
from serving import running_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore_client import NamespaceHandle, PrefixHash
    from serving import RunningServer

WINDOW = 100
# In the first layer: what is wrong there spoils the KV of all tokens behind it in the other.
HYBRID = replace(CONFIG, window_tokens=WINDOW, window_layers=(0,))
PARAMS = SamplingParams(max_new_tokens=90, temperature=0.8, seed=7)
MODES = [ReplayMode.BOUNDED, ReplayMode.EXACT, ReplayMode.SNAPSHOT]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("shared")) as running:
        yield running


@pytest.fixture(params=MODES, ids=lambda mode: mode.name.lower())
def mode(request: pytest.FixtureRequest) -> ReplayMode:
    return request.param


@pytest.fixture
def node(server: RunningServer, request: pytest.FixtureRequest, mode: ReplayMode) -> Iterator[Callable[..., Node]]:
    """Makes nodes in a namespace of the test's own."""
    spec = namespace_spec(request.node.name, "weights-1", make_pool(HYBRID), replay=mode)
    with patient_client(server.target) as client:

        def make(lost: str = "", **options: Any) -> Node:
            real = client.namespace(spec)
            handle = Without(real, get_state=partial(loses(lost), real)) if lost else real
            return Node(handle, config=HYBRID, save_states=mode is ReplayMode.SNAPSHOT, **options)

        yield make


# Before, at and behind the window's length and a block's; with a window that lies in one block and in two.
@pytest.mark.parametrize("computed", [60, 100, 127, 128, 129, 227, 228, 256, 300])
def test_the_window_travels_with_the_request(node: Callable[..., Node], computed: int):
    prompt, (first, second) = prompt_of(computed - 4), (node(), node())
    request = first.until(first.engine.submit(prompt, PARAMS), 5)
    assert request.computed_tokens == computed
    window = first.pool.window_state(request.block_ids, computed)
    moved = second.engine.take_over(first.engine.hand_over(request))
    second.engine.step()
    assert moved.computed_tokens == computed
    assert second.pool.window_state(moved.block_ids, computed) == window
    assert second.finish(moved).tokens == undisturbed(prompt, PARAMS, HYBRID)
    assert (moved.recomputed_tokens, second.model.computed_tokens) == (0, PARAMS.max_new_tokens - 5)


def loses(kind: str) -> Callable[..., StateResult]:
    """What a store answers that has lost the states of a kind, those of hand-overs and others."""

    def get_state(real: NamespaceHandle, beside: PrefixHash, name: str, **options: Any) -> StateResult:
        return StateResult(None, "NOT_FOUND") if kind in name else real.get_state(beside, name, **options)

    return get_state


@pytest.mark.parametrize("lost", ["tail", "window"])
@pytest.mark.parametrize("computed", [60, 256, 300, 500])
def test_without_a_state_the_window_is_replayed_or_all_is_computed(
    node: Callable[..., Node], mode: ReplayMode, computed: int, lost: str
):
    prompt, first, second = prompt_of(computed - 4), node(), node(lost)
    moved = second.engine.take_over(first.engine.hand_over(first.until(first.engine.submit(prompt, PARAMS), 5)))
    generation = second.finish(moved)
    if lost == "tail" and computed % 128 == 0:
        assert moved.recomputed_tokens == 0  # there was none
    else:
        span = WINDOW if mode is ReplayMode.BOUNDED else 128
        start = computed // 128 * 128 - span
        assert moved.recomputed_tokens == computed - max(start, 0)
    # A bounded replay is an approximation by its nature, but a whole answer all the same.
    assert len(generation.tokens) == PARAMS.max_new_tokens
    if mode is not ReplayMode.BOUNDED:
        assert generation.tokens == undisturbed(prompt, PARAMS, HYBRID)


def test_in_the_middle_of_a_replay_a_request_leaves_without_kv(node: Callable[..., Node], mode: ReplayMode):
    prompt, (first, second, third) = prompt_of(300), (node(), node("window", chunk_tokens=30), node())
    first.finish(first.engine.submit(prompt, PARAMS))
    request = second.engine.submit(prompt, PARAMS)
    second.engine.step()
    assert 0 < request.computed_tokens < request.hit_tokens == 256
    ticket = second.engine.hand_over(request)
    assert read_ticket(ticket).request.computed_tokens == 0
    generation = third.finish(third.engine.take_over(ticket))
    assert generation.hit_tokens == 256
    if mode is not ReplayMode.BOUNDED:
        assert generation.tokens == undisturbed(prompt, PARAMS, HYBRID)


def test_in_the_middle_of_a_replay_a_request_that_came_with_kv_leaves_with_it(
    node: Callable[..., Node], mode: ReplayMode
):
    prompt, (first, second, third) = prompt_of(300), (node(), node("window", chunk_tokens=30), node())
    ticket = first.engine.hand_over(first.until(first.engine.submit(prompt, PARAMS), 5))
    request = second.engine.take_over(ticket)
    second.engine.step()
    assert 0 < request.computed_tokens < request.hit_tokens == 256
    assert second.engine.hand_over(request) == ticket
    moved = third.engine.take_over(ticket)
    assert third.finish(moved).tokens == undisturbed(prompt, PARAMS, HYBRID)
    assert (moved.recomputed_tokens, third.model.computed_tokens) == (0, PARAMS.max_new_tokens - 5)


@pytest.mark.parametrize("computed", [255, 256, 257, 300])
@pytest.mark.parametrize("goes_on", [True, False], ids=["behind the answer", "behind the prompt"])
def test_what_is_stored_after_a_hand_over_is_what_a_cold_run_would_store(
    node: Callable[..., Node], mode: ReplayMode, computed: int, goes_on: bool
):
    prompt, (first, second, third) = prompt_of(computed), (node(), node(), node())
    moved = second.engine.take_over(first.engine.hand_over(first.until(first.engine.submit(prompt, PARAMS), 1)))
    answer = second.finish(moved).tokens
    later = [*prompt, *(answer if goes_on else []), *prompt_of(140, seed=1)]
    request = third.engine.submit(later, SamplingParams(max_new_tokens=5))
    generation = third.finish(request)
    assert generation.hit_tokens >= 256 or later[:256] != [*prompt, *answer][:256]
    assert not torch.isnan(generation.first_logits).any()
    if mode is not ReplayMode.BOUNDED:
        assert generation.tokens == undisturbed(later, request.params, HYBRID)
