"""Calls that end in the middle, and clients that die there, a thousand times: the server and the client give everything back."""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from kvstore_client import AsyncKVStoreClient, ClientConfig, KVStoreClient, NamespaceSpec
from serving import running_server

SPEC = NamespaceSpec(model="m", revision="r", engine="e", layout="l", kv_dtype="bfloat16", block_bytes=114_688)
BLOCKS = 32
DATA = random.Random(0).randbytes(BLOCKS * SPEC.block_bytes)
PUT = memoryview(DATA)[: 8 * SPEC.block_bytes]
PATIENT_S = 60
TIMES = 1000
AT_ONCE = 8
# grpcio 1.85 keeps some 20 to 90 KB of each stream that its client cancels in the middle. A get that stays is 4 MB.
MEMORY_SLACK_BYTES = 160 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running_server(tmp_path_factory.mktemp("data"), "--capacity", "2GiB") as server:
        with KVStoreClient(ClientConfig(target=server.target, base_budget_s=PATIENT_S)) as client:
            namespace = client.namespace(SPEC)
            assert namespace.put(chain_of(namespace), DATA).stored == BLOCKS
        yield server


def chain_of(namespace):
    return namespace.chain(range(BLOCKS * 128))


def new_chain(namespace):
    return namespace.chain(np.frombuffer(random.randbytes(8 * 512), dtype="<u4"))


def give_up_by_deadline(namespace, number: int) -> str:
    """One call whose budget ends somewhere in it; what became of it."""
    budget_s = random.uniform(0.0005, 0.006)
    if number % 3 == 0:
        failure = namespace.put(new_chain(namespace), PUT, budget_s=budget_s).failure
    else:
        lease = namespace.match(chain_of(namespace)).lease if number % 3 == 1 else b""
        out = bytearray(len(DATA))
        failure = namespace.get(chain_of(namespace), out, lease=lease, budget_s=budget_s).failure
    return failure.reason if failure else "ended"


def blocking_calls_given_up(target: str, times: int) -> list[str]:
    outcomes: list[str] = []
    with KVStoreClient(ClientConfig(target=target, base_budget_s=PATIENT_S)) as client:
        namespace = client.namespace(SPEC)
        assert namespace.register() is None

        def work(first: int) -> None:
            outcomes.extend(give_up_by_deadline(namespace, number) for number in range(first, times, AT_ONCE))

        threads = [threading.Thread(target=work, args=(first,)) for first in range(AT_ONCE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return outcomes


async def give_up_by_cancelling(namespace, number: int) -> str:
    if number % 3 == 0:
        call = namespace.put(new_chain(namespace), PUT)
    else:
        lease = (await namespace.match(chain_of(namespace))).lease if number % 3 == 1 else b""
        call = namespace.get(chain_of(namespace), bytearray(len(DATA)), lease=lease)
    task = asyncio.create_task(call)
    await asyncio.sleep(random.uniform(0, 0.02))
    task.cancel()
    await asyncio.wait({task})
    return "cancelled" if task.cancelled() else "ended"


def awaited_calls_given_up(target: str, times: int) -> list[str]:
    outcomes: list[str] = []

    async def main() -> None:
        async with AsyncKVStoreClient(ClientConfig(target=target, base_budget_s=PATIENT_S)) as client:
            namespace = client.namespace(SPEC)
            assert await namespace.register() is None

            async def work(first: int) -> None:
                for number in range(first, times, AT_ONCE):
                    outcomes.append(await give_up_by_cancelling(namespace, number))

            await asyncio.gather(*(work(first) for first in range(AT_ONCE)))
            assert client.stats().failures == {}

    asyncio.run(main())
    return outcomes


VICTIM = """
import asyncio, os, random, sys, threading
import numpy as np
from kvstore_client import AsyncKVStoreClient, ClientConfig, KVStoreClient, NamespaceSpec
SPEC = NamespaceSpec(model="m", revision="r", engine="e", layout="l", kv_dtype="bfloat16", block_bytes=114_688)
CONFIG, DATA = ClientConfig(target=sys.argv[1], base_budget_s=60), bytes(8 * 114_688)

def new_chain(namespace):
    return namespace.chain(np.frombuffer(random.randbytes(8 * 512), dtype="<u4"))

def work(namespace, number):
    while True:
        if number % 2:
            namespace.put(new_chain(namespace), DATA)
        else:
            namespace.get(namespace.chain(range(32 * 128)), bytearray(32 * 114_688))
        os.write(1, b"in the middle\\n")

async def awork(namespace, number):
    while True:
        if number % 2:
            await namespace.put(new_chain(namespace), DATA)
        else:
            await namespace.get(namespace.chain(range(32 * 128)), bytearray(32 * 114_688))
        os.write(1, b"in the middle\\n")

async def main():
    namespace = AsyncKVStoreClient(CONFIG).namespace(SPEC)
    await asyncio.gather(*(awork(namespace, number) for number in range(8)))

if sys.argv[2] == "asyncio":
    asyncio.run(main())
namespace = KVStoreClient(CONFIG).namespace(SPEC)
for number in range(8):
    threading.Thread(target=work, args=(namespace, number)).start()
"""


def kill_in_the_middle(target: str, shape: str) -> None:
    victim = subprocess.Popen([sys.executable, "-c", VICTIM, target, shape], stdout=subprocess.PIPE, text=True)
    assert victim.stdout is not None
    try:
        for _ in range(10):
            assert victim.stdout.readline() == "in the middle\n"
    finally:
        victim.kill()
        victim.communicate(timeout=PATIENT_S)


class Use:
    """What a process holds now."""

    def __init__(self, pid: int) -> None:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        self.files = len(os.listdir(f"/proc/{pid}/fd"))
        self.threads = int(status["Threads"])
        self.own_bytes = int(status["RssAnon"].split()[0]) << 10

    def is_back_at(self, before: Use) -> bool:
        """Nothing is left of what began after `before`; a few threads and files may come and go by themselves."""
        return (
            self.files <= before.files + 8
            and self.threads <= before.threads + 8
            and self.own_bytes <= before.own_bytes + MEMORY_SLACK_BYTES
        )

    def __repr__(self) -> str:
        return f"{self.files} files, {self.threads} threads, {self.own_bytes >> 20} MiB"


def calls_at_server(server) -> float:
    """Calls that run or wait there."""
    with urllib.request.urlopen(server.metrics_url, timeout=PATIENT_S) as reply:
        text = reply.read().decode()
    return sum(float(value) for value in re.findall(r"(?m)^kvstore_(?:rpcs_running|pool_pending)\{.*\} (\S+)$", text))


def wait_until_back(server, before: list[Use]) -> list[Use]:
    end = time.monotonic() + PATIENT_S
    while True:
        now = [Use(server.pid), Use(os.getpid())]
        if calls_at_server(server) == 0 and all(use.is_back_at(then) for use, then in zip(now, before, strict=True)):
            return now
        assert time.monotonic() < end, f"before: {before}, now: {now}, {calls_at_server(server)} calls at the server"
        time.sleep(0.05)


SHAPES = {"sync": (blocking_calls_given_up, "DEADLINE"), "asyncio": (awaited_calls_given_up, "cancelled")}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_thousand_calls_given_up_and_clients_killed_leave_nothing_behind(server, shape):
    give_up, given_up = SHAPES[shape]
    give_up(server.target, 100)  # what is made once, such as pools of threads, is there from now on
    kill_in_the_middle(server.target, shape)
    before = [Use(server.pid), Use(os.getpid())]
    outcomes = give_up(server.target, TIMES)
    for _ in range(3):
        kill_in_the_middle(server.target, shape)
    after = wait_until_back(server, before)
    print(shape, before, after, outcomes.count(given_up))
    assert len(outcomes) == TIMES
    assert set(outcomes) <= {given_up, "ended"}
    assert outcomes.count(given_up) >= TIMES / 10
    with KVStoreClient(ClientConfig(target=server.target, base_budget_s=PATIENT_S)) as client:
        namespace, out = client.namespace(SPEC), bytearray(len(DATA))
        assert namespace.get(chain_of(namespace), out).leading_blocks == BLOCKS
        assert out == DATA
