"""The end of a process that uses a client, and forks that take an asyncio client along: nothing hangs, nothing complains."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from kvstore_api.v1 import block_store_pb2 as pb
from wire_server import wire_server

HEAD = """
import asyncio, logging, os, sys, threading, time
from kvstore_client import AsyncKVStoreClient, ClientConfig, KVStoreClient, NamespaceSpec
SPEC = NamespaceSpec(model="m", revision="r", engine="e", layout="l", kv_dtype="uint8", block_bytes=100)
CONFIG = ClientConfig(target=sys.argv[1], base_budget_s=30)
CHAIN = KVStoreClient().namespace(SPEC).chain(range(512))
logging.getLogger("kvstore_client").addHandler(logging.NullHandler())
client, aio = KVStoreClient(CONFIG), AsyncKVStoreClient(CONFIG)

def match(count=1):
    assert [client.namespace(SPEC).match(CHAIN).failure for _ in range(count)] == [None] * count

async def amatch():
    assert (await aio.namespace(SPEC).match(CHAIN)).failure is None

def stall():
    client.namespace(SPEC).get(CHAIN, bytearray(400), budget_s=0.5)

def fork(work):
    pid = os.fork()
    if pid == 0:
        work()
        sys.exit(0)
    return os.waitpid(pid, 0)[1]
"""

# what a process does; all of them must end by themselves, with exit code 0 and nothing on stderr
ENDINGS = {
    "never used": "",
    "never closed": "match()",
    "closed twice": "match(); client.close(); client.close()",
    "closed unused": "client.close()",
    "collected, not closed": "match(); del client",
    "thread in a call": "match(); threading.Thread(target=stall).start(); time.sleep(0.1)",
    "daemon thread in a call": "match(); threading.Thread(target=stall, daemon=True).start(); time.sleep(0.1)",
    "closed with a thread in a call": (
        "match(); threading.Thread(target=stall).start(); time.sleep(0.1); client.close()"
    ),
    "daemon threads that go on calling": (
        "[threading.Thread(target=match, args=(10**9,), daemon=True).start() for _ in range(4)]; time.sleep(0.3)"
    ),
    "asyncio, closed twice": """
async def main():
    await amatch(); await aio.close(); await aio.close()
asyncio.run(main())""",
    "asyncio, never closed": "asyncio.run(amatch())",
    "asyncio, never closed, loop after loop": "[asyncio.run(amatch()) for _ in range(5)]",
    "asyncio, collected, not closed": "asyncio.run(amatch()); del aio",
    "asyncio, a call under way when the loop ends": """
async def main():
    await amatch()
    task = asyncio.create_task(aio.namespace(SPEC).get(CHAIN, bytearray(400)))
    await asyncio.sleep(0.1)
asyncio.run(main())""",
    "asyncio, registering when the loop ends": """
async def main():
    await asyncio.wait_for(aio.namespace(SLOW).match(CHAIN), 0.2)
SLOW = NamespaceSpec(model="slow", revision="r", engine="e", layout="l", kv_dtype="uint8", block_bytes=100)
try:
    asyncio.run(main())
except TimeoutError:
    pass""",
    "asyncio, closed in another loop": "asyncio.run(amatch()); asyncio.run(aio.close())",
    "both shapes": "match(); asyncio.run(amatch())",
    "blocking client in a fork of an asyncio process": """
asyncio.run(amatch()); match()
assert fork(match) == 0; match()""",
    "asyncio client in a fork": """
async def main():
    await amatch()
    await aio.close()
asyncio.run(main())
aio = AsyncKVStoreClient(CONFIG)
assert fork(lambda: asyncio.run(amatch())) == 0
asyncio.run(amatch())""",
    "asyncio client with a connection in a fork": """
asyncio.run(amatch())
def work():
    try:
        asyncio.run(amatch())
    except RuntimeError as error:
        assert "fork" in str(error), error
    else:
        raise AssertionError("no error")
assert fork(work) == 0; asyncio.run(amatch())""",
    "asyncio client with the parent's event loop in a fork": """
loop = asyncio.new_event_loop()
loop.run_until_complete(amatch())
def work():
    try:
        loop.run_until_complete(amatch())
    except RuntimeError as error:
        assert "fork" in str(error), error
    else:
        raise AssertionError("no error")
assert fork(work) == 0; loop.run_until_complete(amatch())""",
    "closed in a fork": "match(); assert fork(lambda: client.close()) == 0; match()",
    "closed before a fork": "match(); client.close(); assert fork(lambda: None) == 0",
}


@pytest.fixture(scope="module")
def target():
    with wire_server() as peer:
        sound = peer.answers["RegisterNamespace"]
        peer.answers |= {
            "RegisterNamespace": lambda request, context: (
                peer.stall() if request.spec.model == "slow" else sound(request, context)
            ),
            "MatchPrefix": lambda *_: pb.MatchPrefixResponse(),
            "GetBlocks": lambda _, context: _until_ended(context),
        }
        yield peer.target


def _until_ended(context):
    ended = threading.Event()
    context.add_callback(ended.set)
    ended.wait(60)
    return []


@pytest.mark.parametrize("how", ENDINGS)
def test_process_ends_by_itself_and_without_complaint(target, how):
    run = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", HEAD + ENDINGS[how], target],
        capture_output=True,
        text=True,
        timeout=60,
    )
    # gRPC's own remark on forking beside its asyncio thread is no complaint of ours.
    complaints = [line for line in run.stderr.splitlines() if "skipping fork() handlers" not in line]
    assert (run.returncode, complaints) == (0, [])
