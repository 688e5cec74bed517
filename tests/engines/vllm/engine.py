"""A real vLLM in a process of its own, told what to do line by line; run as a program, it is that process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

REPLY = "REPLY "
ROOT = Path(__file__).parents[3]
# vLLM's attention on a CPU dies by SIGILL when the first forward of a process has two tokens and its model is tiny, which a hit
# on such a model makes of a prompt. So each engine begins with this one, shorter than a block.
FIRST_PROMPT = list(range(3, 43))


class Engine:
    """What a test tells the process. Token ids in, token ids out."""

    def __init__(self, process: subprocess.Popen[str], log_path: Path) -> None:
        self._process = process
        self._log_path = log_path

    def generate(self, *prompts: list[int], **more: Any) -> list[dict[str, Any]]:
        """All prompts at once. Returns: for each its `tokens`, and `cached` tokens of the prompt.

        More: `salt`, `lora` (name, directory), `traffic_class`, `max_tokens`.
        """
        return self._ask("generate", prompts=list(prompts), **more)

    def metrics(self) -> dict[str, float]:
        """vLLM's counters whose name has "kvstore" or "prefix_cache" in it; a reason follows after a colon."""
        return self._ask("metrics")

    def namespace(self) -> bytes:
        """The namespace of the worker's KV, as on the wire."""
        return bytes.fromhex(self._ask("namespace"))

    def flush(self) -> None:
        """Wait until the store has all that was saved."""
        assert self._ask("flush")

    def reset(self) -> bool:
        """Have vLLM forget its own prefix cache, and what connectors have."""
        return self._ask("reset")

    def log(self) -> str:
        """What the process has written."""
        return self._log_path.read_text()

    def _ask(self, what: str, **more: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"what": what, **more}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(REPLY):
                return json.loads(line[len(REPLY) :])
        raise AssertionError(f"the engine ended with {self._process.wait()}:\n{self.log()[-4000:]}")


def transfer_config(target: str, **settings: Any) -> dict[str, Any]:
    """What a user gives as --kv-transfer-config. Budgets are such that a busy machine loses no hit."""
    return {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "kvstore_engine.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"target": target, "min_hit_tokens": 1, "base_budget_s": 5, **settings},
    }


def environment() -> dict[str, str]:
    """This process's, with the packages of this clone, and no network."""
    places = [str(ROOT), str(ROOT / "client"), str(ROOT / "engine_adapter")]
    quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONFAULTHANDLER": "1"}
    return {**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(places)}


@contextmanager
def engine(model: Path, log_path: Path, transfer: dict[str, Any] | None = None, **more: Any) -> Iterator[Engine]:
    """Start one, and end it in order. More: arguments of vllm.LLM."""
    arguments = {"model": str(model), "kv_transfer_config": transfer, **more}
    with log_path.open("a") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**environment(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        )
    try:
        yield Engine(process, log_path)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(120) == 0, log_path.read_text()[-4000:]
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def main() -> None:
    """Be the process."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    answers = os.dup(1)
    os.dup2(2, 1)  # what vLLM prints is no answer

    llm = LLM(
        **{
            "skip_tokenizer_init": True,
            "block_size": 128,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 512 << 20,
            "dtype": "float32",  # else the shape of a batch decides between tokens that are nearly as likely
            "max_num_seqs": 8,
            "max_model_len": 4096,
            "disable_log_stats": False,
            **json.loads(sys.argv[1]),
        }
    )

    def generate(
        prompts: list[list[int]],
        salt: str | None = None,
        lora: list[str] | None = None,
        traffic_class: str = "",
        max_tokens: int = 16,
    ) -> list[dict[str, Any]]:
        hints = {"kv_transfer_params": {"kvstore_traffic_class": traffic_class}} if traffic_class else None
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=hints)
        inputs = [{"prompt_token_ids": ids, **({"cache_salt": salt} if salt is not None else {})} for ids in prompts]
        request = LoRARequest(lora[0], int(lora[2]), lora[1]) if lora else None
        outputs = llm.generate(inputs, sampling, use_tqdm=False, lora_request=request)
        return [{"tokens": list(o.outputs[0].token_ids), "cached": o.num_cached_tokens} for o in outputs]

    def metrics() -> dict[str, float]:
        found: dict[str, float] = {}
        for metric in llm.get_metrics():
            if hasattr(metric, "value") and ("kvstore" in metric.name or "prefix_cache" in metric.name):
                reason = metric.labels.get("reason") or metric.labels.get("source")
                name = metric.name.removeprefix("vllm:") + (f":{reason}" if reason else "")
                found[name] = found.get(name, 0) + metric.value
        return found

    def worker() -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker

    commands = {
        "generate": generate,
        "metrics": metrics,
        "namespace": lambda: worker()._ready.spec.hex(),
        "flush": lambda: worker().flush(60),
        "reset": lambda: llm.reset_prefix_cache(reset_connector=True),
    }
    generate([FIRST_PROMPT], max_tokens=1)
    for line in sys.stdin:
        command = json.loads(line)
        reply = commands[command.pop("what")](**command)
        os.write(answers, f"{REPLY}{json.dumps(reply)}\n".encode())
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
