"""A prefill node of the demo: one process with one model and one engine, driven by JSON lines.

    python -m kvstore_bench.prefill_node --target 127.0.0.1:7420 [--no-load]

    stdin    {"name", "traffic_class", "messages", "max_new_tokens"}, a line per request; it ends when its input does
    stdout   {"event": "ready", …} once the model is loaded
             {"event": "progress", "done_tokens", "total_tokens"} after each chunk of prefill
             {"event": "answer", …} after each request
             {"event": "end", …} with the prefix cache's counts

With --no-load it computes every prompt from scratch and only stores: the cold reference.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from kvstore_client import ClientConfig, KVStoreClient
from kvstore_engine.hook import Ownership
from kvstore_engine.sampling import SamplingParams
from kvstore_engine.smollm2 import MODEL_NAME, SmolLM2, load_smollm2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore_engine.engine import Engine, Generation
    from kvstore_engine.hook import PrefixLoad, RequestContext, Saving
    from kvstore_engine.prefix_cache import PrefixCache

POOL_BLOCKS = 40  # 5,120 tokens: the longest prompt of the demo, its answer, and some room
FLUSH_S = 60.0  # what was computed is to be there for the next node
_WARM_UP_TOKENS = 200  # one whole chunk and a part of one


class PromptsOnly:
    """Saves the KV of prompts, but not of answers.

    KV computed while decoding, a token at a time, equals that of a prefill only up to rounding. A serving node stores it
    all the same; but the answers compared here are to be equal bit for bit, on every machine, or else it is a fault.
    """

    def __init__(self, cache: PrefixCache, *, loads: bool) -> None:
        self._cache = cache
        self._loads = loads
        self._prompt_tokens = 0  # of the request being served: the node serves one at a time

    def start_load(self, prompt: Sequence[int], context: RequestContext, views: Sequence[memoryview]) -> PrefixLoad:
        """As the cache, unless loading is off."""
        self._prompt_tokens = len(prompt)
        return self._cache.start_load(prompt, context, views if self._loads else [])

    def save_blocks(
        self,
        tokens: Sequence[int],
        first_block: int,
        views: Sequence[memoryview],
        context: RequestContext,
        ownership: Ownership = Ownership.COPIED,
    ) -> Saving:
        """As the cache, for blocks that hold nothing but the prompt."""
        prompts_only = views if len(tokens) <= self._prompt_tokens else []
        return self._cache.save_blocks(tokens, first_block, prompts_only, context, ownership)

    def save_state(self, tokens: Sequence[int], group: str, state: memoryview, context: RequestContext) -> Saving:
        """As the cache."""
        return self._cache.save_state(tokens, group, state, context)

    def note_prefill(self, tokens: int, took_s: float) -> None:
        """As the cache."""
        self._cache.note_prefill(tokens, took_s)


def main() -> None:
    """Serve until the input ends."""
    parser = argparse.ArgumentParser(prog="kvstore_bench.prefill_node", description="A prefill node of the demo.")
    parser.add_argument("--target", required=True, help="the store, host:port")
    parser.add_argument("--no-load", action="store_true", help="compute every prompt from scratch, and only store")
    arguments = parser.parse_args()
    send = claim_stdout()
    started = time.perf_counter()
    loaded = load_smollm2(pool_blocks=POOL_BLOCKS)
    warm_up(loaded)
    with KVStoreClient(client_config(arguments.target)) as client:
        cache = loaded.connect(client)
        send(
            event="ready",
            model=MODEL_NAME,
            revision=loaded.spec.revision,
            kv_dtype=loaded.spec.kv_dtype,
            block_bytes=loaded.spec.block_bytes,
            threads=torch.get_num_threads(),
            start_s=time.perf_counter() - started,
        )
        engine = loaded.engine(PromptsOnly(cache, loads=not arguments.no_load))
        for line in sys.stdin:
            send(event="answer", **_serve(json.loads(line), engine, loaded, send))
        cache.close(flush_s=FLUSH_S)
        send(event="end", **asdict(cache.stats()))


def client_config(target: str) -> ClientConfig:
    """The nodes' client, with more time than a serving engine would give it.

    The default, 50 ms and 1 s per 200 MB, suits a machine whose cores are not all busy with something else. Measured here,
    2 cores, 20 blocks of 5.9 MB: get 0.2 to 0.3 s of 0.64 s allowed even beside 4 busy processes, but a put of 5 blocks 0.15
    to 0.42 s of 0.2 s. A save given up would show as a missing hit, and the demo is to show what the store can do.
    """
    return ClientConfig(target=target, base_budget_s=10.0)


def _serve(request: dict[str, Any], engine: Engine, loaded: SmolLM2, send: Callable[..., None]) -> dict[str, Any]:
    tokenizer = loaded.tokenizer
    prompt = tokenizer.encode_chat(request["messages"])
    generation = engine.generate(
        prompt,
        SamplingParams(max_new_tokens=request["max_new_tokens"]),
        traffic_class=request["traffic_class"],
        on_prefill=lambda done, total: send(event="progress", done_tokens=done, total_tokens=total),
    )
    return {
        "tokens": generation.tokens,
        "text": tokenizer.decode(generation.tokens, skip_special_tokens=True),
        "prompt_sha256": hashlib.sha256(repr(prompt).encode()).hexdigest(),
        "logits_sha256": hashlib.sha256(generation.first_logits.numpy().tobytes()).hexdigest(),
        **_figures(generation),
    }


def _figures(generation: Generation) -> dict[str, Any]:
    names = ("prompt_tokens", "hit_tokens", "ttft_s", "load_s", "prefill_s", "decode_s", "save_s", "finish_reason")
    return {name: getattr(generation, name) for name in names}


def warm_up(loaded: SmolLM2) -> None:
    """What an engine does before it takes traffic: commit the KV memory, let torch set itself up."""
    loaded.pool.kv.zero_()
    loaded.engine().generate(range(_WARM_UP_TOKENS), SamplingParams(max_new_tokens=2, ignore_eos=True))


def claim_stdout() -> Callable[..., None]:
    """Keep stdout for events: whatever else is printed goes to stderr. Returns: what sends an event."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(**event: object) -> None:
        print(json.dumps(event), file=out, flush=True)

    return send


if __name__ == "__main__":
    main()
