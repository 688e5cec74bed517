"""The thin engine with a store of KV blocks: what it loads, what it saves, and that neither changes a token."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from hooks import Loaded, Saved
from kvstore_engine.engine import Engine, Request
from kvstore_engine.hook import LoadedPrefix, RequestContext
from kvstore_engine.model import Llama
from kvstore_engine.sampling import SamplingParams
from nodes import CONFIG, WEIGHTS, make_pool, prompt_of

MODEL = Llama(CONFIG, WEIGHTS)


class ManualClock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class DictStore:
    """A prefix cache in a dict, keyed by salt and all tokens up to a block's end; keeps a record of the calls."""

    clock: ManualClock = field(default_factory=ManualClock)
    load_takes_s: float = 0.0
    save_takes_s: float = 0.0
    fill_only: int | None = None  # of the blocks it has, fill this many and spoil the others
    blocks: dict[tuple[bytes, tuple[int, ...]], bytes] = field(default_factory=dict)
    loads: list[tuple[int, str | None]] = field(default_factory=list)  # (blocks lent, traffic_class)
    saves: list[tuple[int, int]] = field(default_factory=list)  # (first_block, blocks)

    def start_load(self, prompt: Sequence[int], context: RequestContext, views: Sequence[memoryview]) -> Loaded:
        self.loads.append((len(views), context.traffic_class))
        self.clock.now_s += self.load_takes_s
        found = []
        for end in range(128, len(prompt), 128):
            if (block := self.blocks.get((context.salt, tuple(prompt[:end])))) is None:
                break
            found.append(block)
        hit_blocks = len(found) if self.fill_only is None else min(self.fill_only, len(found))
        for index, view in enumerate(views[: len(found)]):
            view[:] = found[index] if index < hit_blocks else b"\x77" * len(view)
        return Loaded(LoadedPrefix(hit_blocks, hit_blocks * 128))

    def save_blocks(
        self, tokens: Sequence[int], first_block: int, views: Sequence[memoryview], context: RequestContext, *_: object
    ) -> Saved:
        self.saves.append((first_block, len(views)))
        self.clock.now_s += self.save_takes_s
        for index, view in enumerate(views, first_block):
            end = (index + 1) * 128
            assert len(tokens) >= end
            self.blocks[context.salt, tuple(tokens[:end])] = bytes(view)
        return Saved()

    def save_state(self, *_: object) -> Saved:
        return Saved()

    def note_prefill(self, tokens: int, took_s: float) -> None:
        pass


def make_engine(store: DictStore | None = None, *, num_blocks: int = 16, **options) -> Engine:
    """An engine whose memory starts as NaN: reading KV that nobody computed or loaded spoils everything after."""
    return Engine(MODEL, make_pool(num_blocks=num_blocks), prefix_cache=store, **options)


def finish(engine: Engine) -> list[Request]:
    finished = []
    while engine.has_work:
        finished += engine.step()
    return finished


@pytest.mark.parametrize("output", [1, 2, 100])
@pytest.mark.parametrize(
    ("total", "complete_blocks"), [(127, 0), (128, 0), (129, 1), (255, 1), (256, 1), (257, 2), (385, 3)]
)
def test_only_blocks_whose_every_token_was_computed_are_saved(total: int, output: int, complete_blocks: int):
    store = DictStore()
    prompt = prompt_of(total - output)
    generation = make_engine(store).generate(prompt, SamplingParams(max_new_tokens=output))
    assert len(prompt) + len(generation.tokens) == total
    expected = [(0, len(prompt) // 128), (len(prompt) // 128, complete_blocks - len(prompt) // 128)]
    assert store.saves == [save for save in expected if save[1]]

    # The saved bytes are the KV of those tokens: a cold prefill of them computes the same up to rounding.
    reference = DictStore()
    make_engine(reference).generate(prompt + generation.tokens, SamplingParams(max_new_tokens=1))
    assert len(store.blocks) == complete_blocks
    for key, block in store.blocks.items():
        saved, computed = (torch.frombuffer(bytearray(b), dtype=torch.float32) for b in (block, reference.blocks[key]))
        torch.testing.assert_close(saved, computed, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("length", "hit_tokens"), [(127, 0), (128, 0), (129, 128), (255, 128), (256, 128), (257, 256), (384, 256)]
)
def test_last_prompt_token_is_always_computed(length: int, hit_tokens: int):
    store, prompt = DictStore(), prompt_of(600)
    make_engine(store).generate(prompt, SamplingParams(max_new_tokens=1))
    store.saves.clear()
    generation = make_engine(store).generate(prompt[:length], SamplingParams(max_new_tokens=1), traffic_class="agent")
    assert store.loads[-1] == (length // 128, "agent")
    assert (generation.hit_tokens, generation.prefill_tokens) == (hit_tokens, length - hit_tokens)
    # A prompt of whole blocks computes its last block again, and so offers it again.
    assert store.saves == ([(hit_tokens // 128, 1)] if length % 128 == 0 else [])


@pytest.mark.parametrize("chunk_tokens", [32, 64, 128])
@pytest.mark.parametrize("kept_blocks", [1, 2, 4])
def test_resumed_run_is_bit_identical_to_a_cold_one(chunk_tokens: int, kept_blocks: int):
    store, prompt, params = DictStore(), prompt_of(600), SamplingParams(max_new_tokens=60)
    cold = make_engine(store, chunk_tokens=chunk_tokens).generate(prompt, params)
    cold_blocks = dict(store.blocks)
    store.blocks = {key: block for key, block in cold_blocks.items() if len(key[1]) <= kept_blocks * 128}
    resumed = make_engine(store, chunk_tokens=chunk_tokens).generate(prompt, params)
    assert resumed.hit_tokens == kept_blocks * 128
    assert torch.equal(resumed.first_logits, cold.first_logits)
    assert resumed.tokens == cold.tokens
    assert store.blocks == cold_blocks


@pytest.mark.parametrize("chunk_tokens", [1, 100, 256])
def test_chunks_that_do_not_divide_a_block_change_results_only_by_rounding(chunk_tokens: int):
    store, prompt = DictStore(), prompt_of(300)
    params = SamplingParams(max_new_tokens=1)
    reference = make_engine(store).generate(prompt, params)
    other = make_engine(store, chunk_tokens=chunk_tokens).generate(prompt, params)
    assert other.hit_tokens == 256
    torch.testing.assert_close(other.first_logits, reference.first_logits, atol=1e-4, rtol=0)


def test_blocks_lent_but_not_filled_are_computed():
    store, prompt = DictStore(), prompt_of(600)
    cold = make_engine(store).generate(prompt, SamplingParams(max_new_tokens=20))
    store.fill_only = 2
    store.saves.clear()
    partial = make_engine(store).generate(prompt, SamplingParams(max_new_tokens=20))
    assert partial.hit_tokens == 256
    assert torch.equal(partial.first_logits, cold.first_logits)
    assert partial.tokens == cold.tokens
    assert store.saves == [(2, 2)]


def test_prefix_of_another_salt_is_not_used():
    store, prompt = DictStore(), prompt_of(300)
    make_engine(store).generate(prompt, SamplingParams(max_new_tokens=1), salt=b"a")
    assert make_engine(store).generate(prompt, SamplingParams(max_new_tokens=1), salt=b"b").hit_tokens == 0
    assert make_engine(store).generate(prompt, SamplingParams(max_new_tokens=1), salt=b"a").hit_tokens == 256


def test_conversation_continues_from_blocks_completed_while_decoding():
    store, prompt = DictStore(), prompt_of(100)
    first = make_engine(store).generate(prompt, SamplingParams(max_new_tokens=200))
    assert store.saves == [(0, 2)], "not in one go at the end"
    history = prompt + first.tokens + prompt_of(20, seed=1)
    hot = make_engine(store).generate(history, SamplingParams(max_new_tokens=20))
    cold = make_engine().generate(history, SamplingParams(max_new_tokens=20))
    assert hot.hit_tokens == 256
    assert hot.tokens == cold.tokens


class Overclaiming(DictStore):
    """A broken hook: claims a block it was never lent."""

    def start_load(self, *_: object) -> Loaded:
        return Loaded(LoadedPrefix(3, 256))


class Greedy(DictStore):
    """A broken hook: leaves nothing to compute of a prompt of two whole blocks."""

    def start_load(self, *_: object) -> Loaded:
        return Loaded(LoadedPrefix(2, 256))


@pytest.mark.parametrize("hook", [Overclaiming(), Greedy()])
def test_hook_that_breaks_its_contract_is_refused_and_leaves_the_engine_usable(hook: DictStore):
    engine = make_engine(hook, num_blocks=3)
    with pytest.raises(RuntimeError, match="blocks"):
        engine.generate(prompt_of(256))
    assert not engine.has_work
    hook.__class__ = DictStore
    assert len(engine.generate(prompt_of(256), SamplingParams(max_new_tokens=3)).tokens) == 3


def test_time_to_first_token_counts_loading_but_not_saving():
    clock = ManualClock()
    store = DictStore(clock, load_takes_s=5.0, save_takes_s=7.0)
    params = SamplingParams(max_new_tokens=130)
    generation = make_engine(store, clock=clock).generate(prompt_of(200), params)
    assert len(store.saves) == 2
    assert (generation.ttft_s, generation.load_s, generation.save_s) == (5.0, 5.0, 14.0)
    assert (generation.prefill_s, generation.decode_s, generation.total_s) == (0.0, 0.0, 19.0)


def test_first_token_can_be_read_before_the_prompt_is_saved():
    store = DictStore()
    engine = make_engine(store)
    request = engine.submit(prompt_of(200), SamplingParams(max_new_tokens=3))
    while not request.output:
        engine.step()
    assert store.saves == []
    engine.step()
    assert store.saves == [(0, 1)]


def test_callbacks_report_every_chunk_and_every_token():
    progress: list[tuple[int, int]] = []
    tokens: list[int] = []
    generation = make_engine().generate(
        prompt_of(300),
        SamplingParams(max_new_tokens=5),
        on_prefill=lambda done, total: progress.append((done, total)),
        on_token=tokens.append,
    )
    assert progress == [(128, 300), (256, 300), (300, 300)]
    assert tokens == generation.tokens


def test_exception_from_a_callback_cancels_the_request_only():
    engine = make_engine(num_blocks=4)
    other = engine.submit(prompt_of(100), SamplingParams(max_new_tokens=4))
    with pytest.raises(ZeroDivisionError):
        engine.generate(prompt_of(300), on_prefill=lambda done, total: 1 // (done - 256))
    finish(engine)
    assert other.generation is not None
    assert len(engine.generate(prompt_of(400), SamplingParams(max_new_tokens=2)).tokens) == 2


def test_batched_requests_get_the_tokens_they_would_get_alone():
    lengths = [5, 300, 129, 128, 40, 260]
    settings = [SamplingParams(max_new_tokens=12 + n, temperature=n % 2, seed=n) for n in range(6)]
    alone = [make_engine().generate(prompt_of(n), params).tokens for n, params in zip(lengths, settings, strict=True)]
    engine = make_engine(num_blocks=16, max_running=4)
    requests = [engine.submit(prompt_of(n), params) for n, params in zip(lengths, settings, strict=True)]
    finished = finish(engine)
    assert sorted(map(id, finished)) == sorted(map(id, requests))
    assert [request.output for request in requests] == alone


def test_requests_wait_in_order_until_their_blocks_are_free():
    engine = make_engine(num_blocks=4)
    requests = [engine.submit(prompt_of(n), SamplingParams(max_new_tokens=3)) for n in (300, 400, 50)]
    assert finish(engine) == requests


def test_running_requests_are_limited():
    engine = make_engine(max_running=2)
    requests = [engine.submit(prompt_of(10, seed), SamplingParams(max_new_tokens=50)) for seed in range(5)]
    started_at_once = 0
    while engine.has_work:
        engine.step()
        started_at_once = max(started_at_once, sum(bool(r.output) and r.generation is None for r in requests))
    assert started_at_once == 2


def test_decoding_goes_on_while_a_long_prompt_is_prefilled():
    engine = make_engine()
    short = engine.submit(prompt_of(10), SamplingParams(max_new_tokens=50))
    long = engine.submit(prompt_of(900), SamplingParams(max_new_tokens=1))
    while long.generation is None:
        engine.step()
    # One step for the short prompt, then eight chunks, each with a token for the short request.
    assert len(short.output) == 9


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_cancelled_request_gives_its_blocks_back(steps: int):
    engine = make_engine(num_blocks=4)
    request = engine.submit(prompt_of(400), SamplingParams(max_new_tokens=100))
    for _ in range(steps):
        engine.step()
    engine.cancel(request)
    engine.cancel(request)
    assert not engine.has_work
    assert request.generation is None
    assert len(engine.generate(prompt_of(500), SamplingParams(max_new_tokens=12)).tokens) == 12


def test_end_of_sequence_token_ends_a_request_unless_ignored():
    prompt, params = prompt_of(30), SamplingParams(max_new_tokens=20, temperature=2.0)
    tokens = make_engine().generate(prompt, params).tokens
    eos = tokens[3]
    engine = make_engine(eos_ids={eos})
    ended = engine.generate(prompt, params)
    assert (ended.tokens, ended.finish_reason) == (tokens[: tokens.index(eos) + 1], "eos")
    ignoring = SamplingParams(max_new_tokens=20, temperature=2.0, ignore_eos=True)
    ignored = engine.generate(prompt, ignoring)
    assert (ignored.tokens, ignored.finish_reason) == (tokens, "length")


@pytest.mark.parametrize(
    ("prompt", "new_tokens", "message"),
    [
        ([], 1, "the prompt is empty"),
        ([1, 211], 1, "outside"),
        ([-1], 1, "outside"),
        ([1] * 2000, 49, "2049 prompt and new tokens exceed the model's 2048"),
        ([1] * 512, 2, "5 KV blocks needed, the pool has 4"),
    ],
)
def test_request_that_can_never_run_is_refused_at_submit(prompt: list[int], new_tokens: int, message: str):
    engine = make_engine(num_blocks=4)
    with pytest.raises(ValueError, match=message):
        engine.submit(prompt, SamplingParams(max_new_tokens=new_tokens))
    assert not engine.has_work


def test_request_that_just_fits_the_pool_runs():
    generation = make_engine(num_blocks=4).generate([1] * 512, SamplingParams(max_new_tokens=1))
    assert len(generation.tokens) == 1
