"""Two vLLM servers as people run them, and one store: what the first has computed, the second loads."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

from engine import environment, transfer_config

START_TIMEOUT_S = 240
TEXT = " ".join(f"Line {number}: the quick brown fox jumps over {number * 7} lazy dogs." for number in range(40))


@contextmanager
def openai_server(model, store_target: str, log_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m", "--dtype", "float32"]
    command += ["--block-size", "128", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "4"]
    command += ["--kv-cache-memory-bytes", str(256 << 20), "--enable-prompt-tokens-details"]
    command += ["--kv-transfer-config", json.dumps(transfer_config(store_target))]
    with log_path.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment())
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(process, url, log_path)
        yield url
        process.terminate()
        assert process.wait(120) == 0, log_path.read_text()[-4000:]
    finally:
        process.kill()
        process.wait()


def wait_until_ready(process, url: str, log_path) -> None:
    end_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end_s:
        assert process.poll() is None, log_path.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(log_path.read_text()[-4000:])


def complete(url: str, **more) -> tuple[str, int]:
    """Returns: the answer, and how many tokens of the prompt were cached."""
    body = {"model": "m", "prompt": TEXT, "max_tokens": 16, "temperature": 0, **more}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer = json.loads(response.read())
    details = answer["usage"].get("prompt_tokens_details") or {}
    return answer["choices"][0]["text"], details.get("cached_tokens") or 0


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def until_stored(url: str, blocks: int) -> None:
    """A server reports its counts with the steps that follow; a request of its own makes some."""
    for _ in range(100):
        if metric(url, "vllm:kvstore_stored_blocks_total") >= blocks:
            return
        complete(url, prompt="Hello")
        time.sleep(0.2)
    raise AssertionError("nothing was stored")


def test_second_server_answers_from_what_the_first_computed(smollm2, store, tmp_path):
    with openai_server(smollm2, store.target, tmp_path / "1.log") as first:
        plain = complete(first)
        salted = complete(first, cache_salt="tenant a", kv_transfer_params={"kvstore_traffic_class": "agent"})
        assert plain[1] == salted[1] == 0
        assert plain[0] == salted[0]
        until_stored(first, 8)
        with openai_server(smollm2, store.target, tmp_path / "2.log") as second:
            for more in ({}, {"cache_salt": "tenant a"}):
                answer, cached = complete(second, **more)
                assert answer == plain[0]
                assert cached >= 512
                assert cached % 128 == 0
            assert complete(second, cache_salt="tenant b") == (plain[0], 0)
            assert metric(second, "vllm:kvstore_hit_tokens_total") == metric(
                second, "vllm:external_prefix_cache_hits_total"
            )
            assert metric(second, "vllm:kvstore_hit_tokens_total") >= 1024
    assert "kvstore at 127.0.0.1" in (tmp_path / "2.log").read_text()
