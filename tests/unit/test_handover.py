"""Requests that go from one engine to another through a real store: at the exact token, or computed again, never wrong."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from administering import ok_json
from kvstore_client import KVStoreClient, NamespaceSpec, PutReport, PutResult, PutStatus, StateResult
from kvstore_engine.engine import Engine
from kvstore_engine.identity import namespace_spec
from kvstore_engine.kv_pool import BLOCK_TOKENS
from kvstore_engine.sampling import SamplingParams
from kvstore_engine.ticket import TicketError, read_ticket, state_name, write_ticket
from nodes import PATIENCE_S, Node, Without, make_pool, patient_client, prompt_of, undisturbed
from serving import running_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvstore_client import Chain
    from serving import RunningServer

GREEDY = SamplingParams(max_new_tokens=12)
SAMPLED = SamplingParams(max_new_tokens=12, temperature=0.8, top_k=50, top_p=0.9, seed=7)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server for all tests that leave it as it is; each works in a namespace of its own."""
    with running_server(tmp_path_factory.mktemp("shared")) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[KVStoreClient]:
    with patient_client(server.target) as patient:
        yield patient


@pytest.fixture
def spec(request: pytest.FixtureRequest) -> NamespaceSpec:
    """A namespace of the test's own."""
    return namespace_spec(request.node.name, "weights-1", make_pool())


@pytest.fixture
def node(client: KVStoreClient, spec: NamespaceSpec) -> Callable[[], Node]:
    return lambda: Node(client.namespace(spec))


# Prompt tokens + output tokens - 1 are computed: tails of 0, 1 and 127 tokens, behind a block or without one.
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("output", [1, 2, 9])
@pytest.mark.parametrize("computed", [9, 127, 128, 129, 255, 256, 384])
def test_a_request_goes_on_at_the_exact_token(
    node: Callable[[], Node], computed: int, output: int, params: SamplingParams
):
    prompt = prompt_of(computed + 1 - output)
    first, second = node(), node()
    request = first.until(first.engine.submit(prompt, params), output)
    assert request.computed_tokens == computed
    block_ids = list(request.block_ids)
    before = [torch.stack(first.pool.gather(layer, block_ids, computed)) for layer in range(2)]
    ticket = first.engine.hand_over(request)
    assert first.pool.free_blocks == first.pool.num_blocks
    assert not first.engine.has_work
    assert request.generation is None

    moved = second.engine.take_over(ticket)
    second.engine.step()
    assert moved.computed_tokens == computed
    for layer in range(2):
        after = torch.stack(second.pool.gather(layer, moved.block_ids, computed))
        assert torch.equal(after, before[layer])
    generation = second.finish(moved)
    assert generation.tokens == undisturbed(prompt, params)
    # The last token sampled is never computed.
    assert second.model.computed_tokens == params.max_new_tokens - output
    assert (moved.recomputed_tokens, generation.hit_tokens) == (0, len(prompt))
    assert first.model.computed_tokens == computed


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("steps", "computed"), [(0, 0), (1, 100), (2, 200), (3, 300)], ids=["waiting", "tail", "block", "blocks"]
)
def test_a_request_that_is_not_yet_prefilled_goes_on_where_it_stood(
    node: Callable[[], Node], steps: int, computed: int, params: SamplingParams
):
    prompt = prompt_of(390)
    first, second = node(), node()
    first.engine = Engine(first.model, first.pool, prefix_cache=first.cache, chunk_tokens=100)
    request = first.engine.submit(prompt, params)
    for _ in range(steps):
        first.engine.step()
    assert (request.computed_tokens, request.output) == (computed, [])
    ticket = first.engine.hand_over(request)
    assert not first.engine.has_work
    moved = second.engine.take_over(ticket)
    assert second.finish(moved).tokens == undisturbed(prompt, params)
    assert second.model.computed_tokens == len(prompt) - computed + params.max_new_tokens - 1
    assert second.cache.stats().saved_blocks == 3 - min(computed // BLOCK_TOKENS, 3)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_request_can_be_handed_on_and_a_ticket_be_used_twice(node: Callable[[], Node], params: SamplingParams):
    prompt = prompt_of(250)
    nodes = [node() for _ in range(4)]
    ticket = nodes[0].engine.hand_over(nodes[0].until(nodes[0].engine.submit(prompt, params), 3))
    again = ticket
    for output, each in ((4, nodes[1]), (8, nodes[2])):
        ticket = each.engine.hand_over(each.until(each.engine.take_over(ticket), output))
    for number, used in ((3, ticket), (1, again), (2, again)):
        moved = nodes[number].engine.take_over(used)
        assert nodes[number].finish(moved).tokens == undisturbed(prompt, params)
        assert moved.recomputed_tokens == 0
    assert [each.model.computed_tokens for each in nodes] == [252, 1 + 9, 4 + 9, 4]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prompt_tokens", [60, 250])
def test_a_request_that_waits_where_it_was_handed_to_is_handed_on_with_its_kv(
    node: Callable[[], Node], prompt_tokens: int, params: SamplingParams
):
    prompt, (first, second, third) = prompt_of(prompt_tokens), (node(), node(), node())
    ticket = first.engine.hand_over(first.until(first.engine.submit(prompt, params), 9))
    on = second.engine.hand_over(second.engine.take_over(ticket))
    assert not second.engine.has_work
    assert on == ticket
    moved = third.engine.take_over(on)
    assert third.finish(moved).tokens == undisturbed(prompt, params)
    assert (moved.recomputed_tokens, third.model.computed_tokens) == (0, params.max_new_tokens - 9)


def test_requests_in_one_batch_with_the_same_blocks_and_other_tails_do_not_mix(node: Callable[[], Node]):
    shared, first, second = prompt_of(256), node(), node()
    # Same length, same blocks, other tails; and one whose last block has the same tokens but other images.
    prompts = [shared + prompt_of(20, seed) for seed in (1, 2)] + [shared + prompt_of(20, 1)]
    requests = [
        first.engine.submit(prompt, GREEDY, extra_keys=keys)
        for prompt, keys in zip(prompts, (None, None, {2: [b"image"]}), strict=True)
    ]
    for request in requests:
        first.until(request, 2)
    opened = [read_ticket(first.engine.hand_over(request)) for request in requests]
    # As equal as two requests can be and still differ, down to the token.
    names = {state_name(replace(ticket.request, computed_tokens=276), "tail") for ticket in opened}
    assert len(names) == 3
    moved = [second.engine.take_over(write_ticket(ticket)) for ticket in opened]
    for request, prompt in zip(moved, prompts, strict=True):
        while request.generation is None:
            second.engine.step()
        assert request.generation.tokens == undisturbed(prompt, GREEDY)
        assert request.recomputed_tokens == 0


@pytest.mark.parametrize("tokens", [60, 300], ids=["less than a block", "blocks"])
@pytest.mark.parametrize("change", [{"salt": b"b"}, {"salt": b""}, {"adapter": b"lora"}, {"extra_keys": {0: [b"i"]}}])
def test_kv_of_another_salt_adapter_or_image_is_never_taken_over(
    node: Callable[[], Node], tokens: int, change: dict[str, Any]
):
    prompt, first = prompt_of(tokens), node()
    ticket = first.engine.hand_over(first.until(first.engine.submit(prompt, GREEDY, salt=b"a"), 3))
    opened = read_ticket(ticket)
    other = replace(opened.request, context=replace(opened.request.context, **change))
    for request, recomputed in ((opened.request, 0), (other, tokens + 2)):
        second = node()
        moved = second.engine.take_over(write_ticket(replace(opened, request=request)))
        assert second.finish(moved).tokens == undisturbed(prompt, GREEDY)
        assert moved.recomputed_tokens == recomputed


def no_state(*_: object, **__: object) -> StateResult:
    return StateResult(None, "NOT_FOUND")


def short_state(*_: object, **__: object) -> StateResult:
    return StateResult(bytearray(10))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("output", [1, 5])
@pytest.mark.parametrize(
    ("missing", "there"),
    [("tail", 256), ("tail of another size", 256), (0, 0), (1, 128)],
    ids=["tail", "wrong tail", "first block", "last block"],
)
def test_what_is_missing_is_computed_again(
    client: KVStoreClient, spec: NamespaceSpec, missing: str | int, there: int, output: int, params: SamplingParams
):
    prompt, handle = prompt_of(300), client.namespace(spec)
    first = Node(handle)
    ticket = first.engine.hand_over(first.until(first.engine.submit(prompt, params), output))
    if isinstance(missing, int):
        deleted = handle.delete(handle.chain(prompt), first_block=missing, block_count=1)
        assert deleted.deleted_blocks == 1
    states = {"tail": no_state, "tail of another size": short_state}
    second = Node(Without(handle, get_state=states[missing]) if isinstance(missing, str) else handle)
    moved = second.engine.take_over(ticket)
    assert second.finish(moved).tokens == undisturbed(prompt, params)
    computed = len(prompt) + output - 1
    assert (moved.hit_tokens, moved.recomputed_tokens) == (there, computed - there)
    assert second.model.computed_tokens == computed - there + params.max_new_tokens - output


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("down_at", ["hand over", "take over"])
def test_without_a_store_the_ticket_is_valid_and_all_is_computed_again(
    tmp_path: Path, spec: NamespaceSpec, down_at: str, params: SamplingParams
):
    prompt = prompt_of(300)
    with running_server(tmp_path / "data") as server, patient_client(server.target) as client:
        first, second = Node(client.namespace(spec)), Node(client.namespace(spec))
        request = first.until(first.engine.submit(prompt, params), 4)
        if down_at == "hand over":
            server.kill()
        ticket = first.engine.hand_over(request)
        assert read_ticket(ticket).kv_bytes == (0 if down_at == "hand over" else 303 * second.pool.block_bytes // 128)
        server.kill()
        moved = second.engine.take_over(ticket)
        assert second.finish(moved).tokens == undisturbed(prompt, params)
        assert moved.recomputed_tokens == 303
        assert first.pool.free_blocks == first.pool.num_blocks


@pytest.mark.parametrize("already", [None, "chatbot"], ids=["new", "there for another class"])
@pytest.mark.parametrize("traffic_class", [None, "agent", "handoff"])
def test_blocks_are_kept_for_the_hand_over_and_for_their_own_class(
    server: RunningServer,
    node: Callable[[], Node],
    traffic_class: str | None,
    already: str | None,
    spec: NamespaceSpec,
    client: KVStoreClient,
):
    prompt, (first, other) = prompt_of(400), (node(), node())
    request = first.until(first.engine.submit(prompt, GREEDY, traffic_class=traffic_class), 1)
    if already is not None:
        other.finish(other.engine.submit(prompt, GREEDY, traffic_class=already))
    first.engine.hand_over(request)
    chain = client.namespace(spec).chain(prompt)
    for block in range(3):
        found = ok_json(server, "block", "show", chain[block].hex())["blocks"]
        (shown,) = (each for each in found if not each["state_object"])
        assert shown["namespace"] == spec.digest().hex()
        used_by = {use["traffic_class"] for use in shown["uses"]}
        assert used_by == {traffic_class or "agent", "handoff", already} - {None}


def refusing(handle: Any) -> Without:
    """The namespace as it is when every class but `handoff` has reached its limit."""

    def put(chain: Chain, blocks: list, *, first_block: int = 0, traffic_class: str = "", **options: Any) -> PutReport:
        if traffic_class == "handoff":
            return handle.put(chain, blocks, first_block=first_block, traffic_class=traffic_class, **options)
        return PutReport(
            [PutResult(first_block + block, PutStatus.REJECTED, "CLASS_FULL", "") for block in range(len(blocks))]
        )

    return Without(handle, put=put)


@pytest.mark.parametrize(("full", "saved_again"), [(False, 1), (True, 2)])
def test_blocks_that_the_next_turn_would_hit_are_saved_once_by_whoever_can(
    client: KVStoreClient, spec: NamespaceSpec, full: bool, saved_again: int
):
    prompt, handle = prompt_of(250), client.namespace(spec)
    first, second, third = Node(refusing(handle) if full else handle), Node(handle), Node(handle)
    ticket = first.engine.hand_over(first.until(first.engine.submit(prompt, GREEDY), 1))
    opened = read_ticket(ticket)
    assert (opened.stored_blocks, opened.request.saved_blocks) == (1, not full)
    moved = second.engine.take_over(ticket)
    answer = second.finish(moved).tokens
    assert moved.recomputed_tokens == 0
    # The second block became complete here.
    assert second.cache.stats().saved_blocks == saved_again
    assert third.finish(third.engine.submit([*prompt, *answer, 1], GREEDY)).hit_tokens == 256


@pytest.mark.parametrize("spoil", [{"model": "other"}, {"revision": "weights-2"}, {"tenant": "other"}])
def test_a_ticket_of_another_namespace_is_refused(
    client: KVStoreClient, node: Callable[[], Node], spec: NamespaceSpec, spoil: dict[str, str]
):
    first, foreign = node(), Node(client.namespace(replace(spec, **spoil)))
    ticket = first.engine.hand_over(first.until(first.engine.submit(prompt_of(30), GREEDY), 1))
    with pytest.raises(TicketError, match="another model, KV layout or tenant") as refused:
        foreign.engine.take_over(ticket)
    assert refused.value.reason == "FOREIGN_TICKET"
    assert not foreign.engine.has_work


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sampling": {}}, "sampling parameter"),
        ({"sampling": {"max_new_tokens": "12"}}, "max_new_tokens is no int"),
        ({"sampling": {"max_new_tokens": True}}, "max_new_tokens is no int"),
        ({"sampling": {"temperature": -1.0}}, "temperature must not be negative"),
        ({"sampling": {"beams": 2}}, "'beams' is unknown"),
        ({"output": tuple(range(12))}, "no more are wanted"),
        ({"sampler_state": b"x"}, "sampler_state"),
        ({"prompt": (211,)}, "token ids outside"),
        ({"output": (1, 211)}, "token ids outside"),
    ],
)
def test_a_ticket_that_this_engine_cannot_serve_is_refused(node: Callable[[], Node], change: dict, words: str):
    first = node()
    opened = read_ticket(first.engine.hand_over(first.until(first.engine.submit(prompt_of(5), SAMPLED), 3)))
    if change.get("sampling"):
        change["sampling"] = {**opened.request.sampling, **change["sampling"]}
    forged = write_ticket(replace(opened, states={}, request=replace(opened.request, computed_tokens=0, **change)))
    with pytest.raises(ValueError, match=words):
        first.engine.take_over(forged)
    assert not first.engine.has_work


def test_what_is_not_in_the_engine_cannot_be_handed_over(node: Callable[[], Node]):
    first, other = node(), node()
    done = first.engine.submit(prompt_of(5), GREEDY)
    first.finish(done)
    elsewhere = other.engine.submit(prompt_of(5), GREEDY)
    for request in (done, elsewhere):
        with pytest.raises(ValueError, match="not in this engine"):
            first.engine.hand_over(request)
    bare = Engine(first.model, first.pool)
    with pytest.raises(RuntimeError, match="no prefix cache that hands requests over"):
        bare.hand_over(bare.submit(prompt_of(5), GREEDY))


def test_blocks_that_a_save_still_reads_are_not_given_back_before_it_ends(client: KVStoreClient, spec: NamespaceSpec):
    real, go_on = client.namespace(spec), threading.Event()

    def put(chain: Chain, blocks: list, **options: Any) -> PutReport:
        if threading.current_thread() is not threading.main_thread():
            assert go_on.wait(PATIENCE_S)  # a save behind the engine; the hand-over's own puts are not
        return real.put(chain, blocks, **options)

    prompt, first = prompt_of(300), Node(Without(real, put=put), hold_saves=True)
    ticket = first.engine.hand_over(first.until(first.engine.submit(prompt, GREEDY), 3))
    assert first.pool.free_blocks < first.pool.num_blocks
    go_on.set()
    assert first.cache.flush(PATIENCE_S)
    first.engine.step()
    assert first.pool.free_blocks == first.pool.num_blocks
    second = Node(real)
    assert second.finish(second.engine.take_over(ticket)).tokens == undisturbed(prompt, GREEDY)


def test_end_of_sequence_tokens_travel_with_the_request(node: Callable[[], Node]):
    prompt, (first, second) = prompt_of(30), (node(), node())
    tokens = undisturbed(prompt, GREEDY)
    stop = next(token for index, token in enumerate(tokens) if index > 3 and token not in tokens[:index])
    first.engine = Engine(first.model, first.pool, prefix_cache=first.cache, eos_ids=[stop])
    ticket = first.engine.hand_over(first.until(first.engine.submit(prompt, GREEDY), 2))
    generation = second.finish(second.engine.take_over(ticket))
    assert (generation.finish_reason, generation.tokens) == ("eos", tokens[: tokens.index(stop) + 1])


def test_requests_taken_over_wait_for_room_like_all_others(client: KVStoreClient, spec: NamespaceSpec):
    first, second = Node(client.namespace(spec)), Node(client.namespace(spec), num_blocks=3)
    prompts = [prompt_of(200, seed) for seed in range(3)]
    requests = [first.engine.submit(prompt, GREEDY) for prompt in prompts]
    for request in requests:
        first.until(request, 2)
    moved = [second.engine.take_over(first.engine.hand_over(request)) for request in requests]
    second.engine.step()
    second.engine.step()
    assert [bool(request.block_ids) for request in moved] == [True, False, False]
    second.engine.cancel(moved[1])
    for request, prompt in ((moved[0], prompts[0]), (moved[2], prompts[2])):
        while request.generation is None:
            second.engine.step()
        assert request.generation.tokens == undisturbed(prompt, GREEDY)
    assert second.pool.free_blocks == 3
