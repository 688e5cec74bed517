"""Time to first token of a real model: computed, and gone on from what a store brings; and from which length on that pays.

The model runs in this process, the server in its own. Each length has prompts of its own: the first engine computes them and saves
their KV, a second one, whose memory knows nothing of them, loads it. Where the two meet is what the engine's own rule says that it
has measured: a look-up and n tokens' KV at the measured bandwidth take as long as computing n tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from kvstore_bench.processes import running_store
from kvstore_bench.workload import VerificationError
from kvstore_client import ClientConfig, KVStoreClient
from kvstore_engine.benefit import MeasuredBenefit
from kvstore_engine.kv_pool import BLOCK_TOKENS
from kvstore_engine.sampling import SamplingParams
from kvstore_engine.smollm2 import MODEL_NAME, load_smollm2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvstore_engine.engine import Generation
    from kvstore_engine.prefix_cache import PrefixCache
    from kvstore_engine.smollm2 import SmolLM2

MAX_PROMPT_TOKENS = 8000
_BLOCK_BYTES = 5_898_240  # of the model's KV in float32; checked against the loaded model
_FLUSH_S = 300.0
_WARM_UP_TOKENS = 300
_ONE_TOKEN = SamplingParams(max_new_tokens=1, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class TtftConfig:
    """What is measured."""

    lengths: Sequence[int]
    rounds: int
    seed: int

    @property
    def disk_bytes(self) -> int:
        """Room that the server's directory needs."""
        blocks = sum(length // BLOCK_TOKENS for length in self.lengths) * self.rounds
        return 2 * (blocks * _BLOCK_BYTES + (1 << 30))


@dataclass(frozen=True, slots=True)
class LengthFigures:
    """Prompts of one length; times are medians over the rounds, in seconds."""

    prompt_tokens: int
    hit_tokens: int
    ttft_cold_s: float
    ttft_hit_s: float
    load_s: float  # of ttft_hit_s: waiting for the store
    ratio: float  # median of cold ÷ hit

    @property
    def is_worth(self) -> bool:
        """Whether the hit was faster."""
        return self.ratio > 1


@dataclass(frozen=True, slots=True)
class TtftMeasurements:
    """What came out.

    `break_even_tokens` is None where loading never becomes faster.
    """

    model: str
    kv_bytes_per_token: float
    lengths: Sequence[LengthFigures]
    look_up_s: float
    load_bytes_per_s: float
    prefill_tokens_per_s: float
    break_even_tokens: float | None


def step_count(config: TtftConfig) -> int:
    """Steps that `run` announces."""
    return 1 + 2 * len(config.lengths) * config.rounds


def run(config: TtftConfig, scratch: Path, advance: Callable[[str], None]) -> TtftMeasurements:
    """Measure; `advance` is called at each step with what it is.

    Raises: VerificationError: a hit was not complete, or gave another token than computing did.
    """
    advance("loading the model")
    longest = max(*config.lengths, _WARM_UP_TOKENS)
    loaded = load_smollm2(pool_blocks=longest // BLOCK_TOKENS + 1)
    with (
        running_store(scratch, "store", config.disk_bytes) as server,
        KVStoreClient(ClientConfig(target=server.target, base_budget_s=10.0)) as client,
    ):
        rule = _Observer()
        cache = loaded.connect(client, benefit=rule)
        _warm_up(loaded, cache)
        rule.forget()
        figures = [_measure(length, config, loaded, cache, advance) for length in config.lengths]
        cache.close()
    return _summary(loaded, figures, rule)


class _Observer(MeasuredBenefit):
    """The engine's own rule, which measures, but uses every hit."""

    def is_worth(self, saved_tokens: int, size_bytes: int) -> bool:
        """Always."""
        del saved_tokens, size_bytes
        return True

    def forget(self) -> None:
        """What was measured so far was for warming up."""
        super().__init__()


def _measure(
    length: int, config: TtftConfig, loaded: SmolLM2, cache: PrefixCache, advance: Callable[[str], None]
) -> LengthFigures:
    cold, hit = [], []
    for round_number in range(config.rounds):
        source = random.Random(f"{config.seed} {length} {round_number}")
        prompt = [source.randrange(loaded.model.config.vocab_size) for _ in range(length)]
        advance(f"{length:,} tokens, computed")
        cold.append(loaded.engine(cache).generate(prompt, _ONE_TOKEN))
        if not cache.flush(_FLUSH_S):
            raise VerificationError(f"{length} tokens: the server did not take their KV within {_FLUSH_S:.0f} s")
        advance(f"{length:,} tokens, loaded")
        loaded.pool.kv.fill_(float("nan"))
        hit.append(loaded.engine(cache).generate(prompt, _ONE_TOKEN))
        _verify(length, cold[-1], hit[-1])
    return LengthFigures(
        prompt_tokens=length,
        hit_tokens=hit[0].hit_tokens,
        ttft_cold_s=median(generation.ttft_s for generation in cold),
        ttft_hit_s=median(generation.ttft_s for generation in hit),
        load_s=median(generation.load_s for generation in hit),
        ratio=median(one.ttft_s / other.ttft_s for one, other in zip(cold, hit, strict=True)),
    )


def _verify(length: int, cold: Generation, hit: Generation) -> None:
    wanted = (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    if cold.hit_tokens or hit.hit_tokens != wanted:
        raise VerificationError(f"{length} tokens: {cold.hit_tokens} and then {hit.hit_tokens} hit, not 0 and {wanted}")
    if cold.tokens != hit.tokens:
        raise VerificationError(f"{length} tokens: the hit gave token {hit.tokens}, computing {cold.tokens}")


def _warm_up(loaded: SmolLM2, cache: PrefixCache) -> None:
    """Commit the KV memory; let torch, client and server set themselves up."""
    loaded.pool.kv.zero_()
    for _ in range(2):
        loaded.engine(cache).generate(range(_WARM_UP_TOKENS), _ONE_TOKEN)
        cache.flush(_FLUSH_S)


def _summary(loaded: SmolLM2, figures: Sequence[LengthFigures], rule: MeasuredBenefit) -> TtftMeasurements:
    look_up_s, a_megabyte_s, a_token_s = rule.load_s(0), rule.load_s(1_000_000), rule.prefill_s(1)
    if look_up_s is None or a_megabyte_s is None or a_token_s is None:
        raise VerificationError("no length has a full block before its last token: nothing was loaded")
    s_per_byte = (a_megabyte_s - look_up_s) / 1e6
    kv_bytes = loaded.pool.block_bytes / BLOCK_TOKENS
    gain_s = a_token_s - s_per_byte * kv_bytes  # of loading a token instead of computing it
    return TtftMeasurements(
        model=MODEL_NAME,
        kv_bytes_per_token=kv_bytes,
        lengths=figures,
        look_up_s=look_up_s,
        load_bytes_per_s=1 / s_per_byte,
        prefill_tokens_per_s=1 / a_token_s,
        break_even_tokens=look_up_s / gain_s if gain_s > 0 else None,
    )
