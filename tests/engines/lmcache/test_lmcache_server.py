"""A real `lmcache server` with the plug, driven by LMCache's own `lmcache bench server` with KV in the CPU's memory."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from serving import running_server

LMCACHE = str(Path(sys.executable).with_name("lmcache"))
MODEL = "test-model"  # what the bench calls it
PROMPTS, CHUNKS, RANKS = 3, 4, 2
SHAPES = "(1,256,16,1,64):bfloat16:2;(2,256,16,2,16):float16:3"  # an object of two parts
ENV = {**os.environ, "no_proxy": "*", "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}
WAIT_S = 120


@dataclass
class Server:
    """An `lmcache server` that answers."""

    rpc_port: int
    http_port: int

    def adapter(self) -> dict:
        """What its status says of the plug."""
        return self._call("GET", "/status")["storage_manager"]["l2_adapters"][0]

    def delete(self, key: dict) -> dict:
        """Have LMCache delete an object from its second level."""
        return self._call("DELETE", "/cache/objects", {"keys": [key], "tier": "l2"})

    def _call(self, method: str, path: str, body: dict | None = None) -> dict:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        data, headers = json.dumps(body).encode() if body else None, {"Content-Type": "application/json"}
        url = f"http://127.0.0.1:{self.http_port}{path}"
        with opener.open(urllib.request.Request(url, data, headers, method=method), timeout=10) as reply:
            return json.load(reply)

    def bench(self, first: int) -> dict[str, list[str]]:
        """Store each prompt, or load it if it is there; empty the engine's KV, load it, and compare.

        Returns: for each prompt and pass, the chunks hit; and the checksums of its ranks' KV.
        """
        command = [
            LMCACHE,
            "bench",
            "server",
            "--mode",
            "cpu",
            "--transfer-mode",
            "lmcache_driven",
            "--interval",
            "0.3",
        ]
        command += ["--rpc-url", f"tcp://127.0.0.1:{self.rpc_port}", "--url", f"http://127.0.0.1:{self.http_port}"]
        command += ["--tp-size", str(RANKS), "--num-tokens", str(CHUNKS * 256), "--kvcache-shape-spec", SHAPES]
        command += ["--start", str(first), "--end", str(first + PROMPTS)]
        done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "MISMATCH" not in done.stdout, done.stdout
        return {
            "cold": re.findall(r"/cold\] LOOKUP: (\S+) chunks hit", done.stdout),
            "warm": re.findall(r"/warm\] LOOKUP: (\S+) chunks hit", done.stdout),
            "stored": re.findall(r"/cold\] .*CHECKSUM: (\w+)", done.stdout),
            "loaded": re.findall(r"/warm\] .*CHECKSUM: (\w+)", done.stdout),
        }


@contextmanager
def running_lmcache(scratch: Path, params: dict) -> Iterator[Server]:
    server = Server(*free_ports())
    plug = {"type": "plugin", "module_path": "kvstore_engine.lmcache", "class_name": "KVStoreL2Adapter"}
    command = [LMCACHE, "server", "--host", "127.0.0.1", "--port", str(server.rpc_port), "--http-host", "127.0.0.1"]
    command += ["--http-port", str(server.http_port), "--l1-size-gb", "0.25", "--no-l1-use-lazy"]
    command += ["--eviction-policy", "LRU", "--l2-adapter", json.dumps({**plug, "adapter_params": params})]
    with (
        (scratch / "lmcache.log").open("a") as log,
        subprocess.Popen(command, env=ENV, stdout=log, stderr=log) as process,
    ):
        try:
            deadline_s = time.monotonic() + WAIT_S
            while not answers(server):
                assert process.poll() is None, (scratch / "lmcache.log").read_text()[-3000:]
                assert time.monotonic() < deadline_s
                time.sleep(0.2)
            yield server
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def answers(server: Server) -> bool:
    try:
        return server.adapter()["is_healthy"]
    except OSError:
        return False


def free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as two:
        for free in (one, two):
            free.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]


def until_stored(server: Server, keys: int) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while server.adapter()["store"]["good_keys"] < keys:
        assert time.monotonic() < deadline_s, server.adapter()
        time.sleep(0.1)


def test_what_lmcaches_bench_stores_through_one_server_it_loads_through_another_and_a_dead_store_harms_neither(
    tmp_path,
):
    all_hit, none_hit = [f"{CHUNKS}/{CHUNKS}"] * PROMPTS, [f"0/{CHUNKS}"] * PROMPTS
    with running_server(tmp_path / "data") as store:
        params = {"target": store.target, "model": MODEL, "revision": "r", "base_budget_s": 10.0}
        with running_lmcache(tmp_path, params) as server:
            stored = server.bench(0)
            until_stored(server, PROMPTS * CHUNKS * RANKS)
        assert stored["cold"] == none_hit
        assert (
            len(set(stored["stored"])) == PROMPTS
        )  # no two prompts' KV are equal, so that the comparison below can fail
        with running_lmcache(tmp_path, {**params, "revision": "others"}) as server:
            assert server.bench(0)["cold"] == none_hit
        with running_lmcache(tmp_path, {**params, "base_budget_s": 2.0}) as server:
            loaded = server.bench(0)
            assert loaded["cold"] == loaded["warm"] == all_hit
            assert loaded["loaded"] == stored["stored"]
            assert server.adapter()["load"]["good_keys"] >= PROMPTS * CHUNKS * RANKS
            told = server.delete({"chunk_hash_hex": "00" * 32, "model_name": MODEL, "kv_rank": 0})
            assert (told["ok"], told["deleted"]) == (False, 0)  # LMCache's default is to say that it is done
            assert "kvstore-admin" in told["error"]
            store.kill()
            alone = server.bench(100)
            assert alone["cold"] == none_hit
            assert set(alone["loaded"]) <= set(alone["stored"])  # from LMCache's own memory
            assert server.adapter()["store"]["failures"]
            assert server.adapter()["is_healthy"]
