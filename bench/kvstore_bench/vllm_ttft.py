"""Time to first token of a real vLLM: computed, from its own prefix cache, and loaded from a store. All in one run.

Runs in an environment that has vLLM: `python -m kvstore_bench.vllm_ttft --model DIR`. The engine runs in this process, the server
in its own. For each prompt of random tokens, one after the other: nobody knows it; vLLM has it; vLLM has forgotten it and the
store has it. Between them the saves are waited for, so that no measurement pays for the one before.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvstore_bench.machine import describe_commit, describe_machine
from kvstore_bench.options import DataDir, JsonFile  # noqa: TC001 - typer reads them
from kvstore_bench.processes import running_store

if TYPE_CHECKING:
    from collections.abc import Sequence

_WAYS = ("cold", "vllm_cache", "kvstore")
_FLUSH_S = 300.0


def main(
    model: Annotated[str, typer.Option(metavar="DIR", help="The model, as vLLM takes it.")],
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens, comma-separated.")] = "512,2048,6144",
    rounds: Annotated[int, typer.Option(min=1, help="Prompts of each length.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 1,
    data_dir: DataDir = None,
    json_file: JsonFile = None,
) -> None:
    """Measure the time to first token of vLLM, computed and loaded."""
    counts = [int(length) for length in lengths.split(",")]
    with tempfile.TemporaryDirectory(prefix="kvstore-vllm-", dir=data_dir) as scratch:
        machine = describe_machine(Path(scratch))
        with running_store(Path(scratch), "store", 32 << 30) as store:
            rows = _measure(model, store.target, counts, rounds, seed)
    _print(rows)
    if json_file is not None:
        about = {
            "commit": describe_commit(),
            "machine": asdict(machine),
            "seed": seed,
            "rounds": rounds,
            "model": model,
        }
        json_file.write_text(json.dumps({**about, "lengths": rows}, indent=2) + "\n", encoding="utf-8")


def _measure(model: str, target: str, lengths: Sequence[int], rounds: int, seed: int) -> list[dict[str, Any]]:
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    settings = {"target": target, "min_hit_tokens": 1, "base_budget_s": 5}
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        block_size=128,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 30,
        max_model_len=max(lengths) + 128,
        kv_transfer_config={
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "kvstore_engine.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": settings,
        },
    )
    one_token = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    draw = random.Random(seed)

    def first_token(ids: list[int]) -> tuple[float, int, list[int]]:
        began_s = time.perf_counter()
        output = llm.generate([{"prompt_token_ids": ids}], one_token, use_tqdm=False)[0]
        took_s = time.perf_counter() - began_s
        get_kv_transfer_group()._worker.flush(_FLUSH_S)
        return took_s, output.num_cached_tokens, list(output.outputs[0].token_ids)

    first_token([draw.randrange(3, 1000) for _ in range(300)])  # what is made once is made here
    rows = []
    for length in lengths:
        times: dict[str, list[float]] = {way: [] for way in _WAYS}
        for _ in range(rounds):
            ids = [draw.randrange(3, 1000) for _ in range(length)]
            cached, answers = [], []
            for way in _WAYS:
                if way == "kvstore":
                    llm.reset_prefix_cache()
                took_s, hit, answer = first_token(ids)
                times[way].append(took_s)
                cached.append(hit)
                answers.append(answer)
            usable = (length - 1) // 128 * 128
            if cached != [0, usable, usable]:
                raise SystemExit(f"cached were {cached} of {length} tokens, expected [0, {usable}, {usable}]")
            if answers[1:] != answers[:1] * 2:
                typer.echo(f"a first token differs: {answers}", err=True)
        rows.append({"prompt_tokens": length, **{f"{way}_s": median(times[way]) for way in _WAYS}})
    llm.llm_engine.engine_core.shutdown()
    return rows


def _print(rows: Sequence[dict[str, Any]]) -> None:
    table = Table("prompt tokens", "computed", "vLLM's prefix cache", "kvstore", "computed / kvstore")
    for row in rows:
        seconds = [f"{row[f'{way}_s']:.2f} s" for way in _WAYS]
        table.add_row(f"{row['prompt_tokens']:,}", *seconds, f"{row['cold_s'] / row['kvstore_s']:.1f}x")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
