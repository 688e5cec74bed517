"""What only the asyncio client can get wrong: cancellation, event loops, and being the same client all the same."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import sys
import threading
import time

import grpc
import pytest

from kvstore_api.v1 import block_store_pb2 as pb
from kvstore_client import (
    AsyncKVStoreClient,
    AsyncNamespaceHandle,
    ClientConfig,
    KVStoreClient,
    NamespaceHandle,
    NamespaceSpec,
    prefix_hashes,
)
from wire_server import frame, wire_server

SIZE = 100
SPEC = NamespaceSpec(model="m", revision="r", engine="e", layout="l", kv_dtype="uint8", block_bytes=SIZE)
CHAIN = prefix_hashes(bytes(SPEC.digest()), range(4 * 128))
BLOCKS = {position: bytes([position + 1]) * SIZE for position in range(4)}
PATIENT_S = 30

CALLS = {
    "match": ("MatchPrefix", lambda n, memory: n.match(CHAIN)),
    "get": ("GetBlocks", lambda n, memory: n.get(CHAIN, memory)),
    "put": ("PutBlocks", lambda n, memory: n.put(CHAIN, memory)),
    "delete": ("DeleteBlocks", lambda n, memory: n.delete(CHAIN)),
    "get_state": ("GetState", lambda n, memory: n.get_state(CHAIN[0], "tail", max_bytes=SIZE)),
    "put_state": ("PutState", lambda n, memory: n.put_state(CHAIN[0], "tail", memory)),
}


@pytest.fixture
def peer():
    with wire_server() as server:
        server.answers["MatchPrefix"] = lambda *_: pb.MatchPrefixResponse()
        yield server


def client_of(peer) -> AsyncKVStoreClient:
    return AsyncKVStoreClient(ClientConfig(target=peer.target, base_budget_s=PATIENT_S))


@pytest.mark.parametrize(
    ("blocking", "awaited"), [(KVStoreClient, AsyncKVStoreClient), (NamespaceHandle, AsyncNamespaceHandle)]
)
def test_both_shapes_have_the_same_methods_and_parameters(blocking, awaited):
    def methods(shape) -> dict[str, object]:
        return {name: value for name, value in vars(shape).items() if callable(value) and not name.startswith("_")}

    plain = {"namespace", "stats", "chain", "budget_s", "cut_off"}
    assert methods(blocking).keys() == methods(awaited).keys()
    for name, method in methods(blocking).items():
        mine, its = inspect.signature(method), inspect.signature(methods(awaited)[name])
        assert mine.parameters == its.parameters, name
        assert inspect.iscoroutinefunction(methods(awaited)[name]) == (name not in plain), name
        returned = str(mine.return_annotation).replace("NamespaceHandle", "AsyncNamespaceHandle")
        assert its.return_annotation in (mine.return_annotation, returned), name


@pytest.mark.parametrize("call", CALLS)
def test_cancelled_call_ends_its_rpc_and_lets_go_of_the_callers_memory(peer, caplog, call):
    method, make = CALLS[call]
    begun, ended = threading.Event(), threading.Event()

    def answer(request, context):
        context.add_callback(ended.set)
        begun.set()
        if method == "GetBlocks":
            return iter([frame(CHAIN, {0: BLOCKS[0]}), peer.stall()])
        return iter([peer.stall()]) if method == "GetState" else peer.stall()

    peer.answers[method] = answer
    memory = bytearray(4 * SIZE)

    async def scenario() -> None:
        async with client_of(peer) as client:
            task = asyncio.create_task(make(client.namespace(SPEC), memory))
            await asyncio.to_thread(begun.wait, PATIENT_S)
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled()
            del task  # its exception's traceback holds everything
            gc.collect()
            memory.append(0)  # would raise if it were still held
            assert await asyncio.to_thread(ended.wait, PATIENT_S)
            assert not peer.released.is_set()
            assert client.stats().failures == {}

    asyncio.run(scenario())
    assert [record for record in caplog.records if record.name == "kvstore_client"] == []


def test_bytes_that_come_after_a_cancellation_change_nothing(peer):
    """The peer sends on and on; what the memory held when the await ended is what it holds."""
    sent = threading.Semaphore(0)

    def answer(_, context):
        for position in (0, 1, 2, 3):
            yield frame(CHAIN, {position: BLOCKS[position]})
            sent.release()
            if position == 1:
                cancelled.wait(PATIENT_S)

    cancelled = threading.Event()
    peer.answers["GetBlocks"] = answer
    memory = bytearray(4 * SIZE)

    async def scenario() -> bytes:
        async with client_of(peer) as client:
            task = asyncio.create_task(client.namespace(SPEC).get(CHAIN, memory))
            while memory[:SIZE] != BLOCKS[0]:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            left = bytes(memory)
            cancelled.set()
            await asyncio.sleep(0.05)
            return left

    left = asyncio.run(scenario())
    assert left == memory
    assert left[2 * SIZE :] == bytes(2 * SIZE)


def test_cancelled_call_leaves_the_registration_to_those_who_wait_for_it(peer):
    sound, begun, go_on = peer.answers["RegisterNamespace"], threading.Event(), threading.Event()

    def slow(request, context):
        begun.set()
        go_on.wait(PATIENT_S)
        return sound(request, context)

    peer.answers["RegisterNamespace"] = slow

    async def scenario() -> None:
        async with client_of(peer) as client:
            namespace = client.namespace(SPEC)
            first, second = (asyncio.create_task(namespace.match(CHAIN)) for _ in range(2))
            await asyncio.to_thread(begun.wait, PATIENT_S)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            go_on.set()
            assert (await second).failure is None

    asyncio.run(scenario())
    assert peer.calls == ["RegisterNamespace", "MatchPrefix"]


def test_callers_own_timeout_is_a_timeout(peer):
    peer.answers["MatchPrefix"] = peer.stall

    async def scenario() -> None:
        async with client_of(peer) as client:
            namespace = client.namespace(SPEC)
            assert await namespace.register() is None
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(namespace.match(CHAIN), 0.05)

    asyncio.run(scenario())


def test_many_tasks_share_one_channel(peer):
    async def scenario() -> list[object]:
        async with client_of(peer) as client:
            namespace = client.namespace(SPEC)
            results = await asyncio.gather(*(namespace.match(CHAIN) for _ in range(200)))
            assert client.stats().calls == {"match": 200}
            return [result.failure for result in results]

    assert asyncio.run(scenario()) == [None] * 200
    assert peer.calls.count("RegisterNamespace") == 1


def test_every_event_loop_has_its_own_channel_and_all_share_the_counts(peer):
    client, all_here, results = client_of(peer), threading.Barrier(3), []

    async def use() -> None:
        namespace = client.namespace(SPEC)
        for _ in range(20):
            results.append((await namespace.match(CHAIN)).failure)
        await asyncio.to_thread(all_here.wait)

    threads = [threading.Thread(target=asyncio.run, args=(use(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [None] * 60
    assert client.stats().calls == {"match": 60}
    asyncio.run(client.close())


def test_channels_made_on_many_threads_at_once_do_not_meet(peer):
    interval_s, end_s, errors = sys.getswitchinterval(), time.monotonic() + 3, []

    async def use() -> None:
        while time.monotonic() < end_s and not errors:
            async with client_of(peer) as client:
                client._channels.current()

    def work() -> None:
        try:
            asyncio.run(use())
        except RuntimeError as error:
            errors.append(error)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert errors == []


def test_channels_of_loops_that_have_ended_are_given_back(peer):
    client = client_of(peer)
    namespace = client.namespace(SPEC)
    files = []
    for _ in range(12):
        assert asyncio.run(namespace.match(CHAIN)).failure is None
        files.append(len(os.listdir("/proc/self/fd")))
    assert files[-1] <= files[3]
    asyncio.run(client.close())


def test_close_in_one_loop_closes_the_channel_of_another(peer):
    begun = threading.Event()
    client, outcomes = client_of(peer), []
    peer.answers["MatchPrefix"] = lambda *_: (begun.set(), peer.stall())[1]

    async def use() -> None:
        outcomes.append(await client.namespace(SPEC).match(CHAIN))

    thread = threading.Thread(target=asyncio.run, args=(use(),))
    thread.start()
    assert begun.wait(PATIENT_S)
    asyncio.run(client.close())
    thread.join()
    assert outcomes[0].failure.reason == "CANCELLED"


def test_client_needs_a_running_loop_and_says_so(peer):
    steps = client_of(peer).namespace(SPEC).match(CHAIN)
    with pytest.raises(RuntimeError, match="event loop"):
        steps.send(None)


def test_probe_asks_on_the_connection_of_puts_too_even_if_the_namespace_is_unknown(peer):
    for answer in (
        lambda *_: pb.MatchPrefixResponse(),
        lambda _, context: context.abort(grpc.StatusCode.NOT_FOUND, ""),
    ):
        peers: set[str] = set()

        def noted(request, context, answer=answer, peers=peers):
            peers.add(context.peer())
            return answer(request, context)

        peer.answers["MatchPrefix"] = noted
        with KVStoreClient(ClientConfig(target=peer.target)) as client:
            assert client._connections.current().probe(PATIENT_S) is None
        assert len(peers) == 2


def test_call_after_an_outage_does_not_wait_for_the_pause_its_own_channel_makes_between_attempts_to_connect(
    monkeypatch,
):
    monkeypatch.setattr("kvstore_client.channel.RECONNECT_BACKOFF_INITIAL_MS", 120_000)
    with wire_server() as peer:
        target = peer.target
    config = ClientConfig(target=target, base_budget_s=PATIENT_S, reconnect_backoff_max_s=120, breaker_probe_s=0.01)

    async def outage() -> list[object]:
        async with AsyncKVStoreClient(config) as client:
            namespace = client.namespace(SPEC)
            breaker = client._channels.connections.current().breaker
            monkeypatch.setattr(breaker, "_start_probing", lambda: None)
            assert [(await namespace.match(CHAIN)).failure.reason for _ in range(3)] == ["UNREACHABLE"] * 3
            with wire_server(target) as peer:
                peer.answers["MatchPrefix"] = lambda *_: pb.MatchPrefixResponse()
                while namespace.cut_off("lookup") is not None:
                    await asyncio.to_thread(breaker.probe_once)
                return [(await namespace.match(CHAIN)).failure, await namespace.register()]

    assert asyncio.run(outage()) == [None, None]
