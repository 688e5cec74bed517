"""A real model with a sliding window imposed on half of its layers: what not storing window KV costs after a hit.

The model runs in this process, the server in its own. A cold run of each prompt stores the same KV under one namespace per
replay mode. Then an engine with fresh memory goes on from what the store brings, in each mode, and is compared with the
cold run on the text that really follows the prompt:

    first token      how long it took
    answers          the tokens that the engine goes on with by itself, greedily
    following text   both are given it token by token (teacher forcing), and their predictions compared: how often the
                     likeliest token is the same, and the Kullback-Leibler divergence KL(cold || resumed) in nats
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pydoc_data.topics import topics
from statistics import median
from typing import TYPE_CHECKING, Final

import torch

from kvstore_bench.processes import running_store
from kvstore_bench.sliding_window_hooks import ColdWriter, score
from kvstore_bench.workload import VerificationError
from kvstore_client import ClientConfig, KVStoreClient, ReplayMode
from kvstore_engine.benefit import MinimumHit
from kvstore_engine.kv_pool import BLOCK_TOKENS
from kvstore_engine.sampling import SamplingParams
from kvstore_engine.smollm2 import MODEL_NAME, SmolLM2, load_smollm2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from kvstore_engine.engine import Generation
    from kvstore_engine.prefix_cache import PrefixCache

LAYERS: Final = 30
PATTERNS: Final = {"alternate": tuple(range(1, LAYERS, 2)), "second-half": tuple(range(LAYERS // 2, LAYERS))}
MODES: Final = {"bounded": ReplayMode.BOUNDED, "exact": ReplayMode.EXACT, "snapshot": ReplayMode.SNAPSHOT}
MAX_TOTAL_TOKENS: Final = 8000
# Rounding, and no more: single precision, summed in another order. Measured: 0 where all chunks are the same, else 1e-11.
MAX_NOISE_KL: Final = 1e-6
_LAYER_BYTES: Final = 196_608  # of a block; checked against the loaded model
_FLUSH_S: Final = 300.0
_WARM_UP_TOKENS: Final = 300


@dataclass(frozen=True, slots=True)
class SlidingWindowConfig:
    """What is measured.

    Attributes:
        prompt_tokens: the shortest prompt; each is up to a block longer.
        follow_tokens: of the text that follows each prompt.
        answer_tokens: generated behind each prompt.
    """

    pattern: str
    window_tokens: int
    prompts: int
    prompt_tokens: int
    follow_tokens: int
    answer_tokens: int
    seed: int

    @property
    def window_layers(self) -> tuple[int, ...]:
        """Layers with a window."""
        return PATTERNS[self.pattern]

    @property
    def exact_span(self) -> int:
        """Tokens that an exact replay computes."""
        return -(-self.window_tokens * len(self.window_layers) // BLOCK_TOKENS) * BLOCK_TOKENS

    @property
    def total_tokens(self) -> int:
        """Of the longest prompt and what comes behind it."""
        return self.prompt_tokens + BLOCK_TOKENS + max(self.follow_tokens, self.answer_tokens)

    @property
    def disk_bytes(self) -> int:
        """Room that the server's directory needs."""
        blocks = -(-self.total_tokens // BLOCK_TOKENS) * (self.prompts + 1) * len(MODES)
        return 2 * blocks * _LAYER_BYTES * LAYERS + (2 << 30)


@dataclass(frozen=True, slots=True)
class ModeFigures:
    """One replay mode. Times are medians over the prompts, in seconds; the rest is over all of them."""

    bytes_per_128_tokens: float  # stored, states included
    state_bytes: int  # of one snapshot; there is one per prompt
    hit_tokens: int
    replay_tokens: float  # mean per prompt
    top1_agreement: float  # share of the tokens that follow
    kl_per_token: float  # mean, nats
    kl_worst_token: float
    equal_answers: int
    equal_answer_tokens: float  # mean length of the common beginning of both answers
    ttft_s: float
    load_s: float  # of ttft_s
    ttft_cold_to_ttft: float  # median over the prompts


@dataclass(frozen=True, slots=True)
class SlidingWindowMeasurements:
    """What came out."""

    model: str
    full_layers: int
    window_layers: int
    prompt_tokens: Sequence[int]
    scored_tokens: int
    all_layers_bytes_per_128_tokens: int  # if window KV were stored too
    cold_ttft_s: float
    modes: Mapping[str, ModeFigures]
    faults: Sequence[str]  # where exact or snapshot are not a cold run; empty if all is well


@dataclass(frozen=True, slots=True)
class _Run:
    """One prompt in one mode, or cold."""

    generation: Generation
    log_probabilities: torch.Tensor  # (follow tokens, vocabulary), float64


def step_count(config: SlidingWindowConfig) -> int:
    """Steps that `run` announces."""
    return 2 + config.prompts * (1 + len(MODES))


def run(config: SlidingWindowConfig, scratch: Path, advance: Callable[[str], None]) -> SlidingWindowMeasurements:
    """Measure; `advance` is called at each step with what it is.

    Raises: VerificationError: the store did not take or bring what it should have.
    """
    advance("loading the model")
    plain = load_smollm2(pool_blocks=1)
    blocks = -(-max(config.total_tokens, _WARM_UP_TOKENS + 1) // BLOCK_TOKENS)
    models = {
        name: plain.with_windows(config.window_tokens, config.window_layers, mode, pool_blocks=blocks)
        for name, mode in MODES.items()
    }
    texts = _texts(config, plain)
    with (
        running_store(scratch, "store", config.disk_bytes) as server,
        KVStoreClient(ClientConfig(target=server.target, base_budget_s=10.0)) as client,
    ):
        bench = _Bench(config, client, models)
        advance("warming up")
        bench.warm_up()
        cold, resumed = [], {name: list[_Run]() for name in MODES}
        for number, (prompt, following) in enumerate(texts, 1):
            advance(f"prompt {number}, cold")
            cold.append(bench.run_cold(prompt, following))
            for name, runs in resumed.items():
                advance(f"prompt {number}, {name}")
                runs.append(bench.run_resumed(name, prompt, following))
        bytes_stored = bench.bytes_per_128_tokens([len(prompt) for prompt, _ in texts])
        bench.close()
    pool = models["bounded"].pool
    state_bytes = {"snapshot": pool.window_state_bytes(config.window_tokens)}
    figures = {
        name: _figures(bytes_stored[name], state_bytes.get(name, 0), cold, runs) for name, runs in resumed.items()
    }
    return SlidingWindowMeasurements(
        model=MODEL_NAME,
        full_layers=len(pool.full_layers),
        window_layers=len(pool.window_layers),
        prompt_tokens=[len(prompt) for prompt, _ in texts],
        scored_tokens=sum(len(following) for _, following in texts),
        all_layers_bytes_per_128_tokens=pool.block_bytes // len(pool.full_layers) * LAYERS,
        cold_ttft_s=median(one.generation.ttft_s for one in cold),
        modes=figures,
        faults=find_faults(figures),
    )


class _Bench:
    """The models of all modes, and the caches that write for them."""

    def __init__(self, config: SlidingWindowConfig, client: KVStoreClient, models: Mapping[str, SmolLM2]) -> None:
        self._answer = SamplingParams(max_new_tokens=config.answer_tokens, ignore_eos=True)
        self._client = client
        self._models = models
        self._writers = {name: self._connect(model) for name, model in models.items()}

    def _connect(self, model: SmolLM2) -> PrefixCache:
        return model.connect(self._client, benefit=MinimumHit(1))

    def warm_up(self) -> None:
        """Commit the KV memory; let torch, client and server set themselves up."""
        for name, model in self._models.items():
            model.pool.kv.zero_()
            model.pool.window_kv.zero_()
            model.engine(self._writers[name]).generate(range(_WARM_UP_TOKENS), SamplingParams(max_new_tokens=2))
        self.close()
        self._writers = {name: self._connect(model) for name, model in self._models.items()}

    def close(self) -> None:
        """End the caches' threads."""
        for cache in self._writers.values():
            cache.close(flush_s=_FLUSH_S)

    def run_cold(self, prompt: list[int], following: list[int]) -> _Run:
        """Compute a prompt, and store its KV for every mode."""
        # The model with snapshots saves states too, and the others' caches do not take them.
        model = self._models["snapshot"]
        hook = ColdWriter(self._writers, states_for="snapshot", prompt_tokens=len(prompt))
        _poison(model)
        generation = model.engine(hook).generate(prompt, self._answer)
        for name, cache in self._writers.items():
            if not cache.flush(_FLUSH_S) or cache.stats().unsaved_blocks:
                raise VerificationError(f"{name}: the server did not take the KV: {cache.stats().unsaved_blocks}")
        _poison(model)
        return _Run(generation, score(model, None, prompt, following))

    def run_resumed(self, name: str, prompt: list[int], following: list[int]) -> _Run:
        """Go on from what the store has."""
        model = self._models[name]
        cache = self._connect(model)
        _poison(model)
        generation = model.engine(cache).generate(prompt, self._answer)
        if generation.hit_tokens != len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS:
            raise VerificationError(
                f"{name}: {generation.hit_tokens} of {len(prompt)} tokens hit: {cache.stats().misses}"
            )
        _poison(model)
        log_probabilities = score(model, cache, prompt, following)
        cache.close()
        return _Run(generation, log_probabilities)

    def bytes_per_128_tokens(self, lengths: Sequence[int]) -> dict[str, float]:
        """What the server has taken, for each mode, over the blocks of the prompts."""
        blocks = sum(length // BLOCK_TOKENS for length in lengths)
        stored = {}
        for name, cache in self._writers.items():
            stats, pool = cache.stats(), self._models[name].pool
            state_bytes = stats.saved_states * pool.window_state_bytes(pool.window_tokens)
            stored[name] = (stats.stored_blocks * pool.block_bytes + state_bytes) / blocks
        return stored


def _poison(model: SmolLM2) -> None:
    """A fresh node's memory: reading KV that was neither computed nor loaded makes every number NaN."""
    model.pool.kv.fill_(float("nan"))
    model.pool.window_kv.fill_(float("nan"))


def _texts(config: SlidingWindowConfig, model: SmolLM2) -> list[tuple[list[int], list[int]]]:
    """Prompts with the text that follows each: sections of the Python reference, which ships with Python.

    Sections are put together in an order drawn from the seed, until there is enough text for a prompt.
    """
    source = random.Random(config.seed)
    names = sorted(topics)
    source.shuffle(names)
    texts: list[tuple[list[int], list[int]]] = []
    text = ""
    while len(texts) < config.prompts:
        if not names:
            raise VerificationError(f"the Python reference has text for {len(texts)} prompts only")
        text += topics[names.pop()] + "\n"
        if len(text) < 2 * config.total_tokens:
            continue  # surely too short, whatever the tokenizer makes of it
        tokens = model.tokenizer.encode(text)
        length = config.prompt_tokens + source.randrange(BLOCK_TOKENS)
        if len(tokens) >= length + config.follow_tokens:
            texts.append((tokens[:length], tokens[length : length + config.follow_tokens]))
            text = ""
    return texts


def _figures(
    bytes_per_128_tokens: float, state_bytes: int, cold: Sequence[_Run], resumed: Sequence[_Run]
) -> ModeFigures:
    agreement = torch.cat([_agreement(one, other) for one, other in zip(cold, resumed, strict=True)])
    kl = torch.cat([_kl(one, other) for one, other in zip(cold, resumed, strict=True)])
    pairs = [(one.generation, other.generation) for one, other in zip(cold, resumed, strict=True)]
    return ModeFigures(
        bytes_per_128_tokens=bytes_per_128_tokens,
        state_bytes=state_bytes,
        hit_tokens=sum(other.hit_tokens for _, other in pairs),
        replay_tokens=sum(other.replayed_tokens for _, other in pairs) / len(pairs),
        top1_agreement=agreement.double().mean().item(),
        kl_per_token=kl.mean().item(),
        kl_worst_token=kl.max().item(),
        equal_answers=sum(one.tokens == other.tokens for one, other in pairs),
        equal_answer_tokens=sum(_common(one.tokens, other.tokens) for one, other in pairs) / len(pairs),
        ttft_s=median(other.ttft_s for _, other in pairs),
        load_s=median(other.load_s for _, other in pairs),
        ttft_cold_to_ttft=median(one.ttft_s / other.ttft_s for one, other in pairs),
    )


def _agreement(cold: _Run, resumed: _Run) -> torch.Tensor:
    return cold.log_probabilities.argmax(-1) == resumed.log_probabilities.argmax(-1)


def _kl(cold: _Run, resumed: _Run) -> torch.Tensor:
    difference = cold.log_probabilities - resumed.log_probabilities
    return (cold.log_probabilities.exp() * difference).sum(-1)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def find_faults(figures: Mapping[str, ModeFigures]) -> list[str]:
    """Where a mode that promises a cold run's results does not give them. NaN is a fault too."""
    faults = [
        f"{name}: KL {figures[name].kl_per_token:.3g} a token is more than rounding ({MAX_NOISE_KL:.0e})"
        for name in ("exact", "snapshot")
        if not figures[name].kl_per_token <= MAX_NOISE_KL
    ]
    if not figures["bounded"].kl_per_token >= 0:
        faults.append("bounded: its predictions are no numbers: KV was read that is not there")
    return faults
