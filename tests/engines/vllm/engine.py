"""A real vLLM in a process of its own, told what to do command by command."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

ROOT = Path(__file__).parents[3]
# vLLM's attention on a CPU dies by SIGILL when the first forward of a process has two tokens and its model is tiny, which a hit
# on such a model makes of a prompt. So each engine begins with this one, shorter than a block.
FIRST_PROMPT = list(range(3, 43))
# To import them takes longer than to start an engine. One process does it once, and every engine is a fork of it. The servers of
# the OpenAI interface are not: they have nothing in common, the seed of Python's own hashes included.
PRELOADED = ("vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner")
FORKS = multiprocessing.get_context("forkserver")


class Engine:
    """What a test tells the process. Token ids in, token ids out."""

    def __init__(self, process: BaseProcess, connection: Connection, log_path: Path) -> None:
        self._process = process
        self._connection = connection
        self._log_path = log_path

    def generate(self, *prompts: list[int] | dict[str, Any], **more: Any) -> list[dict[str, Any]]:
        """All prompts at once, each token ids or what else vLLM takes as one. Returns: for each its `tokens`, and `cached` tokens.

        More: `salt`, `lora` (name, directory), `traffic_class`, `max_tokens`; `reads_cache` False: its prompt is to be computed.
        """
        return self._ask("generate", prompts=list(prompts), **more)

    def metrics(self) -> dict[str, float]:
        """vLLM's counters whose name has "kvstore" or "prefix_cache" in it; a reason follows after a colon."""
        return self._ask("metrics")

    def namespaces(self) -> list[bytes]:
        """The namespace of each worker's KV, as on the wire, in the order of their ranks."""
        return self._ask("namespaces")

    def flush(self) -> None:
        """Wait until the store has all that was saved."""
        assert self._ask("flush")

    def reset(self) -> bool:
        """Have vLLM forget its own prefix cache, and what connectors have."""
        return self._ask("reset")

    def generate_with_a_layer_that_fails(self, ids: list[int]) -> str:
        """Returns: the error that it ends with."""
        return self._ask("fail", ids=ids)

    def log(self) -> str:
        """What the process has written."""
        return self._log_path.read_text()

    def _ask(self, what: str, **more: Any) -> Any:
        try:
            self._connection.send((what, more))
            return self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            raise AssertionError(f"the engine ended with {self._process.exitcode}:\n{self.log()[-4000:]}") from None


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
    """Start one, and end it in order. More: `environ`, variables of its environment, and arguments of vllm.LLM."""
    arguments = {"model": str(model), "kv_transfer_config": transfer, **more}
    ours, its = FORKS.Pipe()
    process = FORKS.Process(target=be_engine, args=(its, arguments, str(log_path)))
    process.start()
    its.close()
    try:
        yield Engine(process, ours, log_path)
        ours.close()
        process.join(120)
        assert process.exitcode == 0, log_path.read_text()[-4000:]
    finally:
        ours.close()
        process.kill()
        process.join()


def be_engine(connection: Connection, arguments: dict[str, Any], log_path: str) -> None:
    """Be the process."""
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    warnings.simplefilter("ignore")  # those of vLLM and of torch about themselves
    os.environ.update(arguments.pop("environ", {}), VLLM_ENABLE_V1_MULTIPROCESSING="0")
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

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
            **arguments,
        }
    )

    def generate(
        prompts: list[list[int] | dict[str, Any]],
        salt: str | None = None,
        lora: list[str] | None = None,
        traffic_class: str = "",
        max_tokens: int = 16,
        reads_cache: bool = True,
    ) -> list[dict[str, Any]]:
        hints = {"kv_transfer_params": {"kvstore_traffic_class": traffic_class}} if traffic_class else None
        sampling = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args=hints,
            skip_reading_prefix_cache=not reads_cache,
        )
        whole = [one if isinstance(one, dict) else {"prompt_token_ids": one} for one in prompts]
        inputs = [{**one, **({"cache_salt": salt} if salt is not None else {})} for one in whole]
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

    def namespaces() -> list[bytes]:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler
        handles = sorted(scheduler._namespaces.items())
        return [handle.spec.to_proto().SerializeToString() for _, handle in handles]

    def fail(ids: list[int]) -> str:
        def raise_error(*_: Any, **__: Any) -> None:
            raise ArithmeticError("a layer fails")

        runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        runner.model.model.layers[3].forward = raise_error
        try:
            generate([ids])
        except ArithmeticError as error:
            return str(error)
        return ""

    commands = {
        "fail": fail,
        "generate": generate,
        "metrics": metrics,
        "namespaces": namespaces,
        "flush": lambda: worker().flush(60),
        "reset": lambda: llm.reset_prefix_cache(reset_connector=True),
    }
    generate([FIRST_PROMPT], max_tokens=1)
    while True:
        try:
            what, more = connection.recv()
        except EOFError:
            break
        connection.send(commands[what](**more))
    llm.llm_engine.engine_core.shutdown()
