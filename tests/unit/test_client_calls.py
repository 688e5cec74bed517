"""Every call of the client: its arguments, its budget, its failures, and what it makes of a peer that lies."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import struct
import threading
import time

import grpc
import pytest

from kvstore_api.checksum import block_checksum
from kvstore_api.v1 import block_store_pb2 as pb
from kvstore_client import (
    Chain,
    ClientClosedError,
    ClientConfig,
    KVStoreClient,
    KVStoreConfigError,
    NamespaceSpec,
    NamespaceSpecError,
    ReplayMode,
    ResumePlan,
    TokenIdError,
    prefix_hashes,
)
from kvstore_client.budget import Budget, check_budget_s
from kvstore_client.channel import KEEPALIVE_TIME_MS
from kvstore_client.errors import CallFailedError
from wire_server import frame, refuse, wire_server

SIZE = 100
SPEC = NamespaceSpec(model="m", revision="r", engine="e", layout="l", kv_dtype="uint8", block_bytes=SIZE)
CHAIN = prefix_hashes(bytes(SPEC.digest()), range(4 * 128))
BLOCKS = {position: bytes([position]) * SIZE for position in range(4)}

# Every call of a namespace that goes to the server, with its method. A new call has to be added here, and so is tried below.
CALLS = {
    "match": ("MatchPrefix", lambda namespace, **more: namespace.match(CHAIN, **more)),
    "get": ("GetBlocks", lambda namespace, **more: namespace.get(CHAIN, bytearray(4 * SIZE), **more)),
    "put": ("PutBlocks", lambda namespace, **more: namespace.put(CHAIN, bytes(4 * SIZE), **more)),
    "delete": ("DeleteBlocks", lambda namespace, **more: namespace.delete(CHAIN, **more)),
    "get_state": ("GetState", lambda namespace, **more: namespace.get_state(CHAIN[0], "tail", max_bytes=SIZE, **more)),
    "put_state": ("PutState", lambda namespace, **more: namespace.put_state(CHAIN[0], "tail", b"abc", **more)),
}
every_call = pytest.mark.parametrize("call", CALLS)


@pytest.fixture
def peer():
    with wire_server() as server:
        yield server


@pytest.fixture
def client_of(door):
    """A client in either shape, as a context."""
    return lambda target, **settings: door(ClientConfig(target=target, **{"base_budget_s": 30, **settings}))


@pytest.fixture
def namespace(peer, client_of):
    with client_of(peer.target) as client:
        yield client.namespace(SPEC)


def address_of(bound: socket.socket) -> str:
    return "{}:{}".format(*bound.getsockname())


def succeed(peer) -> None:
    """Let every method answer as a sound server would."""
    stored = [{"block": position, "status": 1} for position in range(4)]
    plan = {"hit_tokens": 512, "replay_start_token": 512}
    peer.answers |= {
        "MatchPrefix": lambda *_: pb.MatchPrefixResponse(hit_length_blocks=4, lease=b"lease", plan=plan),
        "GetBlocks": lambda *_: [frame(CHAIN, BLOCKS)],
        "PutBlocks": lambda messages, _: (list(messages), pb.PutBlocksResponse(results=stored))[1],
        "DeleteBlocks": lambda *_: pb.DeleteBlocksResponse(deleted_blocks=4),
        "GetState": lambda *_: [state(b"abc")],
        "PutState": lambda messages, _: (list(messages), pb.PutStateResponse(result=stored[0]))[1],
    }


def state(data: bytes, /, **fields) -> pb.GetStateResponse:
    checksum = block_checksum(data, CHAIN[0])
    return pb.GetStateResponse(**{"found": True, "size_bytes": len(data), "checksum": checksum, "data": data, **fields})


def test_every_call_of_the_namespace_is_tried():
    public = {name for name, value in vars(type(KVStoreClient().namespace(SPEC))).items() if callable(value)}
    assert {name for name in public if not name.startswith("_")} - {"chain", "register", "cut_off", "budget_s"} == set(
        CALLS
    )


@every_call
def test_sound_answer_has_no_failure(peer, namespace, call):
    succeed(peer)
    assert CALLS[call][1](namespace).failure is None
    assert peer.calls == ["RegisterNamespace", CALLS[call][0]]


@every_call
def test_server_that_does_not_answer_costs_the_budget_and_no_exception(peer, namespace, call):
    method, make = CALLS[call]
    assert namespace.register() is None
    peer.answers[method] = lambda *_: iter([peer.stall()]) if method.startswith("Get") else peer.stall()
    assert make(namespace, budget_s=0.3).failure.reason == "DEADLINE"


@every_call
def test_registration_counts_for_the_budget(peer, namespace, call):
    peer.answers["RegisterNamespace"] = peer.stall
    assert CALLS[call][1](namespace, budget_s=0.3).failure.reason == "DEADLINE"
    assert CALLS[call][0] not in peer.calls


@every_call
@pytest.mark.parametrize("budget_s", [0, -1, 1e-9])
def test_budget_that_is_used_up_is_a_deadline_and_nothing_is_sent(peer, namespace, call, budget_s):
    assert namespace.register() is None
    assert CALLS[call][1](namespace, budget_s=budget_s).failure.reason == "DEADLINE"
    assert peer.calls == ["RegisterNamespace"]


@every_call
@pytest.mark.parametrize(
    ("budget_s", "error"), [(math.nan, ValueError), (math.inf, ValueError), ("1", TypeError), (True, TypeError)]
)
def test_budget_that_is_no_time_is_refused(peer, namespace, call, budget_s, error):
    with pytest.raises(error, match="budget_s"):
        CALLS[call][1](namespace, budget_s=budget_s)
    assert peer.calls == []


@every_call
def test_default_budget_ends_a_call_on_a_stalled_server(peer, call, door):
    method, make = CALLS[call]
    peer.answers[method] = lambda *_: iter([peer.stall()]) if method.startswith("Get") else peer.stall()
    with door(ClientConfig(target=peer.target)) as client:
        namespace = client.namespace(SPEC)
        assert namespace.register(budget_s=30) is None
        assert make(namespace).failure.reason == "DEADLINE"


@every_call
def test_dead_server_is_a_failure_at_once(call, client_of):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: connecting is refused
        with client_of(address_of(closed)) as client:
            assert CALLS[call][1](client.namespace(SPEC)).failure.reason == "UNREACHABLE"


@every_call
@pytest.mark.parametrize("reason", ["INVALID_ARGUMENT", "UNKNOWN_TRAFFIC_CLASS", "NAMESPACE_MISMATCH"])
def test_refusal_that_only_another_configuration_cures_is_raised(peer, namespace, call, reason):
    peer.answers[CALLS[call][0]] = lambda _, context: refuse(context, grpc.StatusCode.INVALID_ARGUMENT, reason)
    with pytest.raises(KVStoreConfigError, match=f"because {reason}") as raised:
        CALLS[call][1](namespace)
    assert raised.value.reason == reason


@every_call
def test_server_without_the_method_is_a_configuration_error(peer, namespace, call):
    peer.answers[CALLS[call][0]] = lambda _, context: context.abort(grpc.StatusCode.UNIMPLEMENTED, "not here")
    with pytest.raises(KVStoreConfigError, match="UNIMPLEMENTED"):
        CALLS[call][1](namespace)


STATUSES = {
    "OVERLOADED": (grpc.StatusCode.UNAVAILABLE, "OVERLOADED", "kvstore"),
    "STORAGE_ERROR": (grpc.StatusCode.INTERNAL, "STORAGE_ERROR", "kvstore"),
    "DEADLINE": (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "kvstore"),  # the server has noticed first
    "UNREACHABLE": (grpc.StatusCode.UNAVAILABLE, "INVALID_ARGUMENT", "example.org"),
    "DATA_LOSS": (grpc.StatusCode.DATA_LOSS, "no stable name", "kvstore"),
    "INTERNAL": (grpc.StatusCode.INTERNAL, "OK", "kvstore"),
}


@every_call
@pytest.mark.parametrize("expected", STATUSES)
def test_refusal_becomes_its_reason(peer, namespace, call, expected):
    peer.answers[CALLS[call][0]] = lambda _, context: refuse(context, *STATUSES[expected])
    assert CALLS[call][1](namespace).failure.reason == expected


@pytest.mark.parametrize("details", [b"", b"\xff\xff", b"\x1a\x03\x0a\x01x"])
def test_damaged_error_details_leave_the_status_code(peer, namespace, details):
    def answer(_, context):
        context.set_trailing_metadata((("grpc-status-details-bin", details),))
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too much")

    peer.answers["MatchPrefix"] = answer
    assert namespace.match(CHAIN).failure.reason == "RESOURCE_EXHAUSTED"


@every_call
def test_forgotten_namespace_is_registered_once_more(peer, namespace, call):
    method, make = CALLS[call]
    succeed(peer)
    sound = peer.answers[method]

    def forgetful(request, context):
        peer.answers[method] = sound
        refuse(context, grpc.StatusCode.NOT_FOUND, "NAMESPACE_NOT_FOUND")

    peer.answers[method] = forgetful
    assert make(namespace).failure is None
    assert make(namespace).failure is None
    assert peer.calls == ["RegisterNamespace", method, "RegisterNamespace", method, method]


@every_call
def test_namespace_that_is_forgotten_at_once_again_is_a_failure(peer, namespace, call):
    method, make = CALLS[call]
    peer.answers[method] = lambda _, context: refuse(context, grpc.StatusCode.NOT_FOUND, "NAMESPACE_NOT_FOUND")
    assert make(namespace).failure.reason == "NAMESPACE_NOT_FOUND"
    assert peer.calls == ["RegisterNamespace", method] * 2


def test_slow_registration_goes_on_while_calls_give_up(peer, namespace):
    succeed(peer)
    sound, go_on = peer.answers["RegisterNamespace"], threading.Event()

    def slow(request, context):
        go_on.wait(60)
        return sound(request, context)

    peer.answers["RegisterNamespace"] = slow
    assert [namespace.match(CHAIN, budget_s=0.1).failure.reason for _ in range(3)] == ["DEADLINE"] * 3
    go_on.set()
    assert namespace.match(CHAIN).hit_length_blocks == 4
    assert peer.calls == ["RegisterNamespace", "MatchPrefix"]


def test_failed_registration_is_tried_anew(peer, namespace):
    succeed(peer)
    sound = peer.answers["RegisterNamespace"]
    peer.answers["RegisterNamespace"] = lambda _, context: refuse(context, grpc.StatusCode.UNAVAILABLE, "NOT_SERVING")
    assert namespace.match(CHAIN).failure.reason == "NOT_SERVING"
    peer.answers["RegisterNamespace"] = sound
    assert namespace.match(CHAIN).hit_length_blocks == 4


def test_threads_that_begin_at_once_share_one_registration(peer, namespace):
    succeed(peer)
    sound, all_here = peer.answers["RegisterNamespace"], threading.Barrier(17)

    def slow(request, context):
        time.sleep(0.1)  # leaves time for a second registration, should there be one
        return sound(request, context)

    peer.answers["RegisterNamespace"] = slow
    results = []

    def work():
        all_here.wait()
        results.append(namespace.match(CHAIN))

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    all_here.wait()
    for thread in threads:
        thread.join()
    assert [result.hit_length_blocks for result in results] == [4] * 16
    assert peer.calls.count("RegisterNamespace") == 1


def test_server_that_computes_another_digest_is_a_configuration_error(peer, namespace):
    peer.answers["RegisterNamespace"] = lambda *_: pb.RegisterNamespaceResponse(namespace=bytes(32))
    with pytest.raises(KVStoreConfigError, match=f"client {SPEC.digest().hex()}") as raised:
        namespace.register()
    assert raised.value.reason == "NAMESPACE_MISMATCH"


@pytest.mark.parametrize("reply", [b"", b"\xff", b"\x0a\x02ab"])
def test_garbled_registration_is_a_failure(peer, namespace, reply):
    peer.answers["RegisterNamespace"] = lambda *_: reply
    assert namespace.register().reason == "BAD_REPLY"


MATCHES = {
    "hit": ({"hit_length_blocks": 4, "plan": {"hit_tokens": 512, "replay_start_token": 512}}, 4),
    "replayed hit": ({"hit_length_blocks": 2, "plan": {"hit_tokens": 256, "replay_start_token": 128, "mode": 1}}, 2),
    "miss": ({}, 0),
    "miss with a plan": ({"plan": {"hit_tokens": 512}}, 0),
    "longer than the chain": ({"hit_length_blocks": 5, "plan": {"hit_tokens": 640}}, None),
    "far longer": ({"hit_length_blocks": 2**32 - 1}, None),
    "no plan": ({"hit_length_blocks": 4}, None),
    "plan for more tokens": ({"hit_length_blocks": 3, "plan": {"hit_tokens": 512}}, None),
    "plan for fewer tokens": ({"hit_length_blocks": 4, "plan": {"hit_tokens": 511}}, None),
    "replay behind the hit": ({"hit_length_blocks": 4, "plan": {"hit_tokens": 512, "replay_start_token": 513}}, None),
    "unknown replay mode": ({"hit_length_blocks": 4, "plan": {"hit_tokens": 512, "mode": 9}}, None),
}


@pytest.mark.parametrize("name", MATCHES)
def test_match_that_cannot_be_right_is_no_hit(peer, namespace, name):
    fields, expected = MATCHES[name]
    peer.answers["MatchPrefix"] = lambda *_: pb.MatchPrefixResponse(**fields, lease=b"lease")
    result = namespace.match(CHAIN)
    assert result.hit_length_blocks == (expected or 0)
    assert (result.failure.reason if result.failure else None) == ("BAD_REPLY" if expected is None else None)
    assert result.lease == (b"lease" if expected else b"")
    assert result.plan.hit_tokens == 128 * (expected or 0)


def test_match_gives_the_plan_of_the_server(peer, namespace):
    peer.answers["MatchPrefix"] = lambda *_: pb.MatchPrefixResponse(**MATCHES["replayed hit"][0])
    assert namespace.match(CHAIN).plan == ResumePlan(256, 128, ReplayMode.BOUNDED)


def test_match_sends_what_it_is_asked(peer, namespace):
    succeed(peer)
    namespace.match(CHAIN, "agent", lease_s=1.5, peek=True)
    request = peer.requests[-1]
    assert (request.namespace, request.chain, request.traffic_class) == (SPEC.digest(), CHAIN.data, "agent")
    assert (request.lease.ToMilliseconds(), request.peek) == (1500, True)
    namespace.match(CHAIN)
    assert (peer.requests[-1].HasField("lease"), peer.requests[-1].traffic_class) == (False, "")


def test_match_of_no_blocks_asks_nobody(peer, namespace):
    assert namespace.match(Chain(b"")).hit_length_blocks == 0
    assert peer.calls == []


@pytest.mark.parametrize("reply", [b"\xff", pb.DeleteBlocksResponse(deleted_blocks=5)], ids=repr)
def test_delete_that_cannot_be_right_is_a_failure(peer, namespace, reply):
    peer.answers["DeleteBlocks"] = lambda *_: reply
    result = namespace.delete(CHAIN)
    assert (result.deleted_blocks, result.failure.reason) == (0, "BAD_REPLY")


def test_delete_names_the_range(peer, namespace):
    succeed(peer)
    peer.answers["DeleteBlocks"] = lambda *_: pb.DeleteBlocksResponse(deleted_blocks=1)
    assert namespace.delete(CHAIN, first_block=1, block_count=2).deleted_blocks == 1
    request = peer.requests[-1]
    assert (request.chain, request.first_block, request.block_count) == (CHAIN.first(3).data, 1, 2)


def states() -> dict[str, tuple[list, str, bool]]:
    """What the peer sends for a state of at most 100 bytes; what becomes of it; whether the call failed."""
    return {
        "one frame": ([state(b"abc")], "OK", False),
        "largest": ([state(bytes(SIZE))], "OK", False),
        "two frames": ([state(b"abc", data=b"a"), pb.GetStateResponse(offset_bytes=1, data=b"bc")], "OK", False),
        "size first": ([state(b"abc", data=b""), pb.GetStateResponse(data=b"abc")], "OK", False),
        "not found": ([pb.GetStateResponse()], "NOT_FOUND", False),
        "not found, then one": ([pb.GetStateResponse(), state(b"abc")], "NOT_FOUND", False),
        "nothing": ([], "NO_RESULT", False),
        "too large": ([state(bytes(SIZE + 1))], "TOO_LARGE", False),
        "far too large": ([state(b"abc", size_bytes=2**63)], "TOO_LARGE", False),
        "no size": ([state(b"")], "BAD_REPLY", True),
        "cut short": ([state(b"abc", data=b"ab")], "CORRUPT", False),
        "without bytes": ([state(b"abc", data=b"")], "CORRUPT", False),
        "too long": ([state(b"abc", data=b"abcd")], "BAD_REPLY", True),
        "too long by a frame": ([state(b"abc"), pb.GetStateResponse(offset_bytes=3, data=b"d")], "BAD_REPLY", True),
        "gap": ([state(b"abc", data=b"a"), pb.GetStateResponse(offset_bytes=2, data=b"c")], "BAD_REPLY", True),
        "twice": ([state(b"abc"), state(b"abc")], "BAD_REPLY", True),
        "flipped bit": ([state(b"abc", data=b"abb")], "CORRUPT", False),
        "another prefix's": ([state(b"abc", checksum=block_checksum(b"abc", CHAIN[1]))], "CORRUPT", False),
        "garbage": ([b"\xff"], "BAD_REPLY", True),
    }


@pytest.mark.parametrize("name", states())
def test_state_object_comes_whole_and_verified_or_not_at_all(peer, namespace, name):
    messages, reason, failed = states()[name]
    peer.answers["GetState"] = lambda *_: messages
    result = namespace.get_state(CHAIN[0], "tail", max_bytes=SIZE)
    assert (result.reason, result.failure is not None) == (reason, failed)
    assert result.data == (None if reason != "OK" else bytes(SIZE) if name == "largest" else b"abc")


WRONG_ARGUMENTS = {
    "bytes for a chain": (TypeError, "chain", lambda n: n.match(CHAIN.data)),
    "hashes for a chain": (TypeError, "chain", lambda n: n.get(list(CHAIN), bytearray(SIZE))),
    "class that is no text": (TypeError, "traffic_class", lambda n: n.match(CHAIN, None)),
    "class of a put that is no text": (
        TypeError,
        "traffic_class",
        lambda n: n.put(CHAIN, bytes(SIZE), traffic_class=3),
    ),
    "lease that is no number": (TypeError, "lease_s", lambda n: n.match(CHAIN, lease_s="1")),
    "no lease": (ValueError, "lease_s", lambda n: n.match(CHAIN, lease_s=0)),
    "endless lease": (ValueError, "lease_s", lambda n: n.match(CHAIN, lease_s=math.inf)),
    "block before the chain": (
        ValueError,
        "not in a chain",
        lambda n: n.get(CHAIN, bytearray(SIZE), first_block=-1, block_count=1),
    ),
    "block behind the chain": (
        ValueError,
        "not in a chain",
        lambda n: n.get(CHAIN, bytearray(SIZE), first_block=4, block_count=1),
    ),
    "no blocks": (ValueError, "not in a chain", lambda n: n.get(CHAIN, bytearray(SIZE), block_count=0)),
    "rest of a chain that has none": (ValueError, "not in a chain", lambda n: n.delete(CHAIN, first_block=4)),
    "position that is no integer": (TypeError, "first_block", lambda n: n.get(CHAIN, bytearray(SIZE), first_block=1.0)),
    "count that is no integer": (TypeError, "block_count", lambda n: n.delete(CHAIN, block_count=True)),
    "more blocks than the chain": (ValueError, "not in a chain", lambda n: n.put(CHAIN, bytes(5 * SIZE))),
    "blocks past the chain's end": (
        ValueError,
        "not in a chain",
        lambda n: n.put(CHAIN, bytes(2 * SIZE), first_block=3),
    ),
    "half a block": (ValueError, "multiple of 100", lambda n: n.put(CHAIN, bytes(SIZE + 1))),
    "out for whole blocks instead of parts": (
        ValueError,
        "out has 400 bytes",
        lambda n: n.get(CHAIN, bytearray(4 * SIZE), part=(0, 1)),
    ),
    "part before the block": (
        ValueError,
        "part is 1 bytes from byte -1",
        lambda n: n.get(CHAIN, bytearray(4), part=(-1, 1)),
    ),
    "part past the block's end": (
        ValueError,
        "in a block of 100",
        lambda n: n.get(CHAIN, bytearray(8), part=(SIZE - 1, 2)),
    ),
    "part far past the block's end": (
        ValueError,
        "in a block of 100",
        lambda n: n.get(CHAIN, bytearray(4), part=(1 << 70, 1)),
    ),
    "empty part": (ValueError, "part is 0 bytes", lambda n: n.get(CHAIN, b"", part=(0, 0))),
    "part that is no pair": (TypeError, "part is 5", lambda n: n.get(CHAIN, bytearray(20), part=5)),
    "part of three": (TypeError, "offset_bytes, size_bytes", lambda n: n.get(CHAIN, bytearray(4), part=(0, 1, 2))),
    "part in fractions": (TypeError, "part's size_bytes", lambda n: n.get(CHAIN, bytearray(4), part=(0, 1.0))),
    "out too small": (ValueError, "out has 100 bytes", lambda n: n.get(CHAIN, bytearray(SIZE))),
    "hash cut short": (ValueError, "prefix_hash", lambda n: n.get_state(CHAIN[0][:31], "tail", max_bytes=1)),
    "empty name": (ValueError, "name has 0 bytes", lambda n: n.put_state(CHAIN[0], "", b"abc")),
    "long name": (ValueError, "name has 258 bytes", lambda n: n.put_state(CHAIN[0], "ä" * 129, b"abc")),
    "name that is no text": (TypeError, "name", lambda n: n.get_state(CHAIN[0], b"tail", max_bytes=1)),
    "empty state": (ValueError, "data has 0 bytes", lambda n: n.put_state(CHAIN[0], "tail", b"")),
    "huge state": (ValueError, "state object", lambda n: n.put_state(CHAIN[0], "tail", bytes((64 << 20) + 1))),
    "state of no bytes wanted": (ValueError, "max_bytes", lambda n: n.get_state(CHAIN[0], "tail", max_bytes=0)),
    "state too large wanted": (
        ValueError,
        "max_bytes",
        lambda n: n.get_state(CHAIN[0], "tail", max_bytes=(64 << 20) + 1),
    ),
}


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_mistake_of_the_caller_is_raised_before_anything_is_sent(peer, namespace, name):
    error, message, make = WRONG_ARGUMENTS[name]
    with pytest.raises(error, match=message):
        make(namespace)
    assert peer.calls == []


def test_incomplete_spec_is_refused_by_its_field(door):
    with door() as client, pytest.raises(NamespaceSpecError, match="revision is empty"):
        client.namespace(NamespaceSpec(model="m", revision="", engine="e", layout="l", kv_dtype="d", block_bytes=1))


def test_handle_says_what_its_namespace_is_and_hashes_in_it(door):
    with door() as client:
        namespace = client.namespace(SPEC)
    assert (namespace.spec, namespace.digest) == (SPEC, SPEC.digest())
    assert (namespace.block_bytes, namespace.block_tokens) == (SIZE, 128)
    chains = {
        namespace.chain(range(256), **more).data
        for more in ({}, {"salt": b"x"}, {"adapter": b"x"}, {"extra_keys": {1: [b"x"]}})
    }
    assert len(chains) == 4
    assert len(namespace.chain(range(300))) == 2


@pytest.mark.parametrize("arguments", [{"salt": "x"}, {"adapter": "x"}], ids=repr)
def test_text_as_salt_or_adapter_is_refused_by_name(namespace, arguments):
    (name,) = arguments
    with pytest.raises(TypeError, match=f"^{name} is str, wanted is bytes$"):
        namespace.chain(range(256), **arguments)


@pytest.mark.parametrize("token_ids", [None, 7, iter([1])], ids=["None", "int", "iterator"])
def test_token_ids_that_are_no_list_are_refused_by_name(namespace, token_ids):
    with pytest.raises(TokenIdError, match=f"^token_ids is {type(token_ids).__name__}, wanted is"):
        namespace.chain(token_ids)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"target": ""}, "target"),
        ({"target": "host name:1"}, "target"),
        ({"target": None}, "target"),
        ({"base_budget_s": 0}, "base_budget_s"),
        ({"base_budget_s": -0.1}, "base_budget_s"),
        ({"base_budget_s": math.nan}, "base_budget_s"),
        ({"base_budget_s": math.inf}, "base_budget_s"),
        ({"base_budget_s": "0.05"}, "base_budget_s"),
        ({"base_budget_s": True}, "base_budget_s"),
        ({"budget_bandwidth_bytes_per_s": 0}, "budget_bandwidth_bytes_per_s"),
        ({"register_timeout_s": 0}, "register_timeout_s"),
        ({"connect_timeout_s": 0.01}, "connect_timeout_s"),
        ({"reconnect_backoff_max_s": 1000}, "reconnect_backoff_max_s"),
        ({"breaker_probe_s": 0}, "breaker_probe_s"),
        ({"breaker_failures": -1}, "breaker_failures"),
        ({"breaker_failures": 1.5}, "breaker_failures"),
        ({"breaker_failures": True}, "breaker_failures"),
    ],
)
def test_impossible_setting_is_refused_by_its_name(settings, field):
    with pytest.raises(KVStoreConfigError, match=f"^{field} is ") as raised:
        ClientConfig(**settings)
    assert raised.value.reason == "INVALID_CONFIG"


@pytest.mark.parametrize(
    "target",
    [
        "127.0.0.1:1",
        "store-0.stores.example:65535",
        "store_0:7420",
        "[::1]:7420",
        "[fe80::1%eth0]:7420",
        "unix:/run/kvstore.sock",
        "unix:///run/kvstore.sock",
        "unix:kvstore.sock",
        "unix-abstract:kvstore",
        "dns:store:7420",
        "dns:///store:7420",
        "dns:///[::1]:7420",
        "ipv4:127.0.0.1:7420",
        "ipv4:127.0.0.1:7420,127.0.0.2:7420",
        "ipv6:[::1]:7420",
        "ipv6:[::1]:7420,[::2]:7420",
        "ipv6:%5B::1%5D:7420",
    ],
)
def test_every_form_of_a_target_is_taken(target):
    assert ClientConfig(target=target).target == target


@pytest.mark.parametrize(
    "target",
    [
        "127.0.0.1",
        "127.0.0.1:",
        "127.0.0.1:0",
        "127.0.0.1:65536",
        "127.0.0.1:99999",
        "127.0.0.1:-1",
        "127.0.0.1:7420/",
        "127.0.0.1:7420,127.0.0.2:7420",
        "127.0.0.1:\u0661",
        "foo",
        "foo:http",
        ":7420",
        "::1:7420",
        "[::1]",
        "[::1]:99999",
        "[::g]:7420",
        "http://127.0.0.1:7420",
        "xds:///store:7420",
        "unix:",
        "unix://",
        "unix://run/kvstore.sock",
        "unix-abstract:",
        "dns:",
        "dns:store",
        "dns:///store:99999",
        "dns:7420",
        "ipv4:127.0.0.1",
        "ipv4:store:7420",
        "ipv4:127.0.0.1:7420,",
        "ipv6:::1",
        "ipv6:[127.0.0.1]:7420",
    ],
)
def test_target_that_can_never_answer_is_refused_with_an_example(target):
    with pytest.raises(KVStoreConfigError) as raised:
        ClientConfig(target=target)
    assert raised.value.reason == "INVALID_CONFIG"
    assert raised.value.detail.startswith(f"target is {target!r}; wanted is")
    assert "'127.0.0.1:7420'" in raised.value.detail


def test_default_budget_is_50_ms_and_the_bytes_at_200_mb_per_s():
    config = ClientConfig()
    assert config.budget_s(0) == 0.050
    assert config.budget_s(200_000_000) == 1.050


def test_budget_counts_down_to_a_deadline():
    budget = Budget(1000)
    assert 0 < budget.remaining_s() <= 1000
    with pytest.raises(CallFailedError) as raised:
        Budget(0).remaining_s()
    assert raised.value.failure.reason == "DEADLINE"
    assert check_budget_s(2) == 2.0


def test_keepalive_is_silent_between_calls_and_rarer_than_a_default_server_punishes():
    """Pings go only while a call is active; a default server forgives two that come sooner than after 5 minutes."""
    assert KEEPALIVE_TIME_MS >= 10_000


@every_call
def test_use_after_close_is_raised(peer, call, door):
    client = door(ClientConfig(target=peer.target))
    namespace = client.namespace(SPEC)
    client.close()
    client.close()
    with pytest.raises(ClientClosedError):
        CALLS[call][1](namespace)
    with pytest.raises(ClientClosedError):
        client.stats()
    assert peer.calls == []


@every_call
def test_close_ends_a_call_under_way(peer, call, client_of):
    method, make = CALLS[call]
    started, outcomes = threading.Event(), []

    def stall(*_):
        started.set()
        return iter([peer.stall()]) if method.startswith("Get") else peer.stall()

    peer.answers[method] = stall
    with client_of(peer.target) as client:
        namespace = client.namespace(SPEC)
        thread = threading.Thread(target=lambda: outcomes.append(make(namespace, budget_s=60)))
        thread.start()
        assert started.wait(60)
    thread.join()
    assert outcomes[0].failure.reason == "CANCELLED"


@pytest.mark.parametrize("call", ["get", "put", "get_state"])
def test_interrupted_call_leaves_no_stream_behind(peer, namespace, call):
    method, make = CALLS[call]
    assert namespace.register() is None
    cancelled = threading.Event()

    def interrupt(_, context):
        context.add_callback(cancelled.set)
        time.sleep(0.2)  # until the caller waits; in the instant of starting, only the deadline would end the stream
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return iter([peer.stall()]) if method.startswith("Get") else peer.stall()

    peer.answers[method] = interrupt
    with pytest.raises(KeyboardInterrupt):
        make(namespace, budget_s=100)
    assert cancelled.wait(30)
    assert not peer.released.is_set()
    succeed(peer)
    assert make(namespace).failure is None


def test_calls_that_end_early_leave_no_threads_and_files_behind(peer, namespace):
    def endless(_, context):
        while context.is_active():
            yield frame(CHAIN, {0: BLOCKS[0]})

    peer.answers["GetBlocks"] = endless  # a bad reply from the second frame on
    peer.answers["PutBlocks"] = lambda _, context: refuse(context, grpc.StatusCode.UNAVAILABLE, "OVERLOADED")

    def give_up() -> None:
        assert namespace.get(CHAIN, bytearray(4 * SIZE)).failure.reason == "BAD_REPLY"
        assert namespace.put(CHAIN, bytes(4 * SIZE)).failure.reason == "OVERLOADED"

    def count_threads() -> int:
        """Without the peer's own, which it makes as it needs them."""
        return sum(not thread.name.startswith("wire-server") for thread in threading.enumerate())

    for _ in range(30):
        give_up()
    files, threads = len(os.listdir("/proc/self/fd")), count_threads()
    for _ in range(200):
        give_up()
    assert len(os.listdir("/proc/self/fd")) <= files
    while count_threads() > threads:  # those of the last puts are just ending
        time.sleep(0.01)


def test_outage_is_one_line_and_its_end_another(caplog, client_of):
    caplog.set_level(logging.INFO, "kvstore_client")
    with wire_server() as peer, client_of(peer.target, base_budget_s=0.05) as client:
        succeed(peer)
        namespace = client.namespace(SPEC)
        assert namespace.match(CHAIN, budget_s=30).failure is None
        target = peer.target
        peer.answers["MatchPrefix"] = peer.stall
        assert [namespace.match(CHAIN).failure.reason for _ in range(2)] == ["DEADLINE"] * 2
        peer.answers["MatchPrefix"] = lambda _, context: refuse(context, grpc.StatusCode.UNAVAILABLE, "OVERLOADED")
        assert namespace.match(CHAIN, budget_s=30).failure.reason == "OVERLOADED"
    lines = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "kvstore_client"]
    assert len(lines) == 2
    assert lines[0][0] == "WARNING"
    assert f"store {target} does not answer: DEADLINE" in lines[0][1]
    assert lines[1] == ("INFO", f"store {target} answers again, after 2 failed calls")


@every_call
@pytest.mark.parametrize("registered", [True, False])
def test_callers_own_used_up_budget_is_no_outage(peer, namespace, caplog, call, registered):
    caplog.set_level(logging.INFO, "kvstore_client")
    succeed(peer)
    if registered:
        assert namespace.register() is None
    assert CALLS[call][1](namespace, budget_s=0).failure.reason == "DEADLINE"
    assert peer.calls == ["RegisterNamespace"] * registered
    assert CALLS[call][1](namespace).failure is None
    assert [record.getMessage() for record in caplog.records if record.name == "kvstore_client"] == []


def test_used_up_budget_and_a_call_that_sends_nothing_do_not_end_an_outage(peer, caplog, client_of):
    caplog.set_level(logging.INFO, "kvstore_client")
    with client_of(peer.target, base_budget_s=0.05) as client:
        namespace = client.namespace(SPEC)
        assert namespace.register(budget_s=30) is None
        peer.answers["MatchPrefix"] = peer.stall
        assert namespace.match(CHAIN).failure.reason == "DEADLINE"
        assert namespace.match(CHAIN, budget_s=0).failure.reason == "DEADLINE"
        assert namespace.register() is None
        assert namespace.register(budget_s=1) is None
    assert [record.levelname for record in caplog.records if record.name == "kvstore_client"] == ["WARNING"]


def test_configured_budget_that_is_always_used_up_is_not_hidden(peer, caplog, client_of):
    with client_of(peer.target, base_budget_s=1e-9, budget_bandwidth_bytes_per_s=1e15) as client:
        assert client.namespace(SPEC).match(CHAIN).failure.reason == "DEADLINE"
    assert [record.levelname for record in caplog.records if record.name == "kvstore_client"] == ["WARNING"]


def test_restarted_server_is_found_again(client_of):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = address_of(probe)
    with client_of(address) as client:
        namespace = client.namespace(SPEC)
        for _ in range(3):
            with wire_server(address) as peer:
                succeed(peer)
                while (result := namespace.match(CHAIN)).failure is not None:
                    time.sleep(0.01)
                assert result.hit_length_blocks == 4
            while namespace.match(CHAIN, budget_s=1).failure is None:
                time.sleep(0.01)


def reset(connection: socket.socket) -> None:
    """Close so that the other side sees a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


PEERS = {
    "closes": lambda connection: connection.close(),
    "resets": reset,
    "talks HTTP/1": lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "talks garbage": lambda connection: connection.sendall(bytes(range(256)) * 100),
    "says nothing": lambda connection: None,
}


@pytest.mark.parametrize("behaviour", PEERS)
def test_peer_that_is_no_grpc_server_is_a_failure_within_the_budget(behaviour, client_of):
    connections = []

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connections.append(connection)
            PEERS[behaviour](connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        with client_of(address_of(listener)) as client:
            failure = client.namespace(SPEC).match(CHAIN, budget_s=0.5).failure
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in connections:
        connection.close()
    assert failure.reason in ("UNREACHABLE", "DEADLINE")


def test_statistics_count_each_thing_once(peer, client_of):
    succeed(peer)
    with client_of(peer.target) as client:
        namespace = client.namespace(SPEC)
        namespace.match(CHAIN)
        namespace.get(CHAIN, bytearray(4 * SIZE))
        peer.answers["GetBlocks"] = lambda *_: [
            frame(CHAIN, {0: BLOCKS[0]}),
            pb.GetBlocksResponse(misses=[{"block": 1, "reason": "EXPIRED"}]),
        ]
        namespace.get(CHAIN, bytearray(4 * SIZE))
        namespace.put(CHAIN, bytes(4 * SIZE))
        results = [{"block": 0, "status": 2}, {"block": 1, "status": 3, "reason": "STORE_FULL"}]
        peer.answers["PutBlocks"] = lambda messages, _: (list(messages), pb.PutBlocksResponse(results=results))[1]
        namespace.put(CHAIN, bytes(3 * SIZE))
        namespace.put_state(CHAIN[0], "tail", b"abc")
        peer.answers["MatchPrefix"] = lambda _, context: refuse(context, grpc.StatusCode.UNAVAILABLE, "OVERLOADED")
        namespace.match(CHAIN)
        stats = client.stats()
    assert stats.calls == {"match": 2, "get": 2, "put": 2, "put_state": 1}
    assert stats.failures == {"OVERLOADED": 1}
    assert (stats.asked_blocks, stats.hit_blocks) == (8, 4)
    assert (stats.ok_blocks, stats.ok_bytes) == (5, 5 * SIZE)
    assert stats.missed_blocks == {"EXPIRED": 1, "NO_RESULT": 2}
    assert (stats.stored_blocks, stats.exists_blocks, stats.put_bytes) == (5, 1, 4 * SIZE + 3)
    assert stats.rejected_blocks == {"STORE_FULL": 1, "NO_RESULT": 1}
