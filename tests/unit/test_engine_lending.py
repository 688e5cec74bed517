"""What the thin engine lends to loads and saves: layers as they arrive, and blocks that are not its own again yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

import nodes
from hooks import Saved
from kvstore_client import ReplayMode
from kvstore_engine.engine import Engine
from kvstore_engine.hook import LoadedPrefix, Ownership, RequestContext
from kvstore_engine.kv_pool import KVPool
from kvstore_engine.model import Llama, LlamaConfig, random_weights
from kvstore_engine.sampling import SamplingParams

CONFIG = replace(nodes.CONFIG, layers=4)
HYBRID = replace(CONFIG, window_tokens=128, window_layers=(1, 3))
WEIGHTS = random_weights(CONFIG, seed=5, tied=False)
FEW = SamplingParams(max_new_tokens=5)
PROMPT = nodes.prompt_of(900)
MISS = LoadedPrefix()


class SlowSaving:
    """A save that is done when the test says so."""

    def __init__(self) -> None:
        self.done = False
        self.waits: list[float | None] = []

    def wait(self, timeout_s: float | None = None) -> bool:
        self.waits.append(timeout_s)
        return self.done


@dataclass
class Hook:
    """A prefix cache that brings the blocks it is given, one layer when it is waited for and not before."""

    pool: KVPool
    promised: LoadedPrefix = MISS
    outcome: LoadedPrefix | None = None  # as promised, unless said otherwise
    blocks: Sequence[bytes] = ()
    missing_layer: int | None = None
    saving: type = Saved
    calls: list[str] = field(default_factory=list)
    ownerships: list[Ownership] = field(default_factory=list)
    savings: list[SlowSaving] = field(default_factory=list)
    free_when_cancelled: int = -1
    views: Sequence[memoryview] = ()

    def start_load(self, prompt: Sequence[int], context: RequestContext, views: Sequence[memoryview]) -> Hook:
        self.views = views
        return self

    def expect(self) -> LoadedPrefix:
        self.calls.append("expect")
        return self.promised

    def wait_layer(self, layer: int) -> bool:
        self.calls.append(f"layer {layer}")
        if layer == self.missing_layer:
            return False
        offset, size = self.pool.block_layout.range_of(layer, layer)
        for view, block in zip(self.views, self.blocks, strict=False):
            view[offset : offset + size] = block[offset : offset + size]
        return True

    def wait(self) -> LoadedPrefix:
        self.calls.append("wait")
        outcome = self.outcome if self.outcome is not None else self.promised
        for index, (view, block) in enumerate(zip(self.views, self.blocks, strict=False)):
            view[:] = block if index < outcome.hit_blocks else b"\xff" * len(view)  # NaN
        return outcome

    def cancel(self) -> None:
        self.calls.append("cancel")
        self.free_when_cancelled = self.pool.free_blocks

    def save_blocks(self, *arguments: object) -> object:
        self.ownerships.append(arguments[-1])
        self.savings.append(self.saving())
        return self.savings[-1]

    def save_state(self, *_: object) -> Saved:
        return Saved()

    def note_prefill(self, tokens: int, took_s: float) -> None:
        pass


def make_engine(config: LlamaConfig, num_blocks: int = 8, **options) -> tuple[Engine, Hook]:
    pool = KVPool.for_model(config, num_blocks=num_blocks)
    pool.kv.fill_(float("nan"))
    pool.window_kv.fill_(float("nan"))
    hook = Hook(pool)
    return Engine(Llama(config, WEIGHTS), pool, prefix_cache=hook, **options), hook


def cold_run(config: LlamaConfig) -> tuple[list[int], list[bytes], bytearray]:
    """The answer, the blocks of the prompt, and the window state behind the sixth."""
    engine, hook = make_engine(config)
    tokens = engine.generate(PROMPT, FEW).tokens
    return tokens, [bytes(view) for view in hook.views], hook.pool.window_state(range(8), 768)


def prefix(config: LlamaConfig, blocks: int, start: int, state: bytearray) -> LoadedPrefix:
    if start < blocks * 128 or config is CONFIG:
        mode = ReplayMode.EXACT if start < blocks * 128 else ReplayMode.NONE
        return LoadedPrefix(blocks, start, mode)
    return LoadedPrefix(blocks, start, ReplayMode.SNAPSHOT, {"window": state})


CASES = [(CONFIG, 6, 768), (HYBRID, 6, 768), (HYBRID, 6, 512)]


@pytest.mark.parametrize(("config", "blocks", "start"), CASES)
def test_layers_are_read_as_they_arrive_and_only_those_that_are_stored(config: LlamaConfig, blocks: int, start: int):
    tokens, stored, state = cold_run(config)
    engine, hook = make_engine(config)
    hook.blocks, hook.promised = stored[:blocks], prefix(config, blocks, start, state)
    generation = engine.generate(PROMPT, FEW)
    assert generation.tokens == tokens
    assert (generation.hit_tokens, generation.replayed_tokens) == (768, 768 - start)
    layers = [f"layer {layer}" for layer in hook.pool.full_layers]
    assert hook.calls == ["expect", *layers, "wait"]


@pytest.mark.parametrize(("config", "blocks", "start"), CASES)
@pytest.mark.parametrize("missing_layer", [0, 2, None])
@pytest.mark.parametrize("arrived", [0, 4, 5])
def test_nothing_stays_of_an_attempt_whose_layers_did_not_come(
    config: LlamaConfig, blocks: int, start: int, missing_layer: int | None, arrived: int
):
    tokens, stored, state = cold_run(config)
    engine, hook = make_engine(config)
    hook.blocks, hook.promised = stored[:blocks], prefix(config, blocks, start, state)
    hook.missing_layer = missing_layer  # None: all came, and then the load says that some are bad
    restart = arrived * 128 if config is CONFIG else max(0, arrived * 128 - 256)
    hook.outcome = prefix(config, arrived, restart, state) if arrived else MISS
    generation = engine.generate(PROMPT, FEW)
    assert generation.tokens == tokens
    assert (generation.hit_tokens, generation.prefill_tokens) == (arrived * 128, 900 - restart)
    assert hook.pool.kv[:7].isfinite().all()
    for block in range(7):
        again = torch.frombuffer(bytearray(hook.pool.block_view(block)), dtype=torch.float32)
        torch.testing.assert_close(
            again, torch.frombuffer(bytearray(stored[block]), dtype=torch.float32), atol=1e-4, rtol=0
        )


@pytest.mark.parametrize(
    ("config", "claim"),
    [
        (CONFIG, LoadedPrefix(8, 1024)),
        (CONFIG, LoadedPrefix(-1, 0)),
        (CONFIG, LoadedPrefix(2, 257)),
        (HYBRID, LoadedPrefix(2, 256)),
        (HYBRID, LoadedPrefix(2, 129, ReplayMode.BOUNDED)),
        (HYBRID, LoadedPrefix(2, -1, ReplayMode.BOUNDED)),
    ],
)
def test_claim_that_would_leave_layers_without_kv_is_refused(config: LlamaConfig, claim: LoadedPrefix):
    engine, hook = make_engine(config)
    hook.promised = claim
    with pytest.raises(RuntimeError, match="prefix cache"):
        engine.generate(PROMPT, FEW)
    assert hook.pool.free_blocks == 8
    hook.promised = MISS
    assert len(engine.generate(PROMPT, FEW).tokens) == 5


def test_load_is_given_up_before_its_blocks_are():
    engine, hook = make_engine(CONFIG)
    hook.promised = LoadedPrefix(6, 768)

    def interrupt(layer: int) -> bool:
        raise InterruptedError

    hook.wait_layer = interrupt
    request = engine.submit(PROMPT, FEW)
    with pytest.raises(InterruptedError):
        engine.step()
    engine.cancel(request)
    assert hook.calls[-1] == "cancel"
    assert (hook.free_when_cancelled, hook.pool.free_blocks) == (0, 8)
    engine.cancel(request)
    assert hook.calls.count("cancel") == 1


def test_saves_are_copied_unless_the_engine_holds_its_blocks():
    for hold, ownership in ((False, Ownership.COPIED), (True, Ownership.HELD)):
        engine, hook = make_engine(CONFIG, hold_saves=hold)
        engine.generate(PROMPT, FEW)
        assert hook.ownerships == [ownership]
        assert hook.pool.free_blocks == 8


@pytest.mark.parametrize("cancelled", [False, True])
def test_blocks_that_a_save_holds_are_not_used_again_before_it_is_done(cancelled: bool):
    engine, hook = make_engine(CONFIG, num_blocks=9, hold_saves=True)
    hook.saving = SlowSaving
    request = engine.submit(PROMPT, FEW)
    while not hook.savings:
        engine.step()
    if cancelled:
        engine.cancel(request)
    while engine.has_work:
        engine.step()
    assert hook.pool.free_blocks == 1
    before = [bytes(hook.pool.block_view(block)) for block in range(7)]
    waiting, small = engine.submit(PROMPT[::-1], FEW), engine.submit(PROMPT[:20], FEW)
    for _ in range(5):
        engine.step()
    assert hook.savings[0].waits, "a step without work does not spin"
    assert [bytes(hook.pool.block_view(block)) for block in range(7)] == before
    assert (waiting.output, small.output) == ([], [])
    hook.savings[0].done = True
    hook.saving = Saved
    while engine.has_work:
        engine.step()
    assert waiting.generation is not None
    assert small.generation is not None
    assert hook.pool.free_blocks == 9
