"""The breaker: when it cuts a store off, when it lets it back in, and that it leaves no thread behind."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import time
import weakref
from contextlib import contextmanager

import grpc
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore_api.v1 import block_store_pb2 as pb
from kvstore_client import ClientConfig, Failure, KVStoreClient, NamespaceSpec, prefix_hashes
from kvstore_client.breaker import LANES, PAUSE_MAX_S, PROBE_TIMEOUT_S, TRIAL_S, Breaker
from kvstore_client.budget import Budget
from wire_server import frame, refuse, wire_server

PROBE_S = 0.5
SIZE = 100
SPEC = NamespaceSpec(model="m", revision="r", engine="e", layout="l", kv_dtype="uint8", block_bytes=SIZE)
CHAIN = prefix_hashes(bytes(SPEC.digest()), range(4 * 128))
every_lane = pytest.mark.parametrize("lane", LANES)


def failure(reason: str) -> Failure:
    return Failure(reason, f"because {reason}")


class Driven:
    """A breaker with a clock and probes that the test drives; no thread."""

    def __init__(self, failures_max: int = 3) -> None:
        self.now_s = 1000.0
        self.breaker = Breaker("store:1", failures_max, PROBE_S, None, lambda: self.now_s)

    def fail(self, lane: str, reason: str = "DEADLINE", times: int = 1) -> None:
        for _ in range(times):
            self.breaker.note(lane, failure(reason))

    def answer(self, lane: str) -> None:
        self.breaker.note(lane, None)

    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    def admitted(self, lane: str) -> bool:
        return self.breaker.admit(lane) is None

    def open_lanes(self) -> set[str]:
        """Lanes cut off, without taking a trial."""
        return {lane for lane in LANES if self.breaker.cut_off(lane) is not None}


@every_lane
@pytest.mark.parametrize("reason", ["DEADLINE", "DEADLINE_EXCEEDED"])
def test_silence_cuts_off_its_own_lane_only(lane, reason):
    driven = Driven()
    driven.fail(lane, reason, 2)
    assert driven.open_lanes() == set()
    driven.fail(lane, reason)
    assert driven.open_lanes() == {lane}


@every_lane
@pytest.mark.parametrize("reason", ["UNREACHABLE", "NOT_SERVING"])
def test_store_that_is_not_there_is_cut_off_altogether(lane, reason):
    driven = Driven()
    driven.fail(lane, reason, 3)
    assert driven.open_lanes() == set(LANES)


@every_lane
@pytest.mark.parametrize(
    "reason", ["OVERLOADED", "STORE_FULL", "QUOTA_EXCEEDED", "STORAGE_ERROR", "INVALID_ARGUMENT", "BAD_REPLY", None]
)
def test_any_answer_is_health(lane, reason):
    driven = Driven()
    for _ in range(5):
        driven.fail(lane, times=2)
        driven.breaker.note(lane, failure(reason) if reason else None)
    assert driven.open_lanes() == set()


def test_useful_part_is_an_answer():
    driven = Driven()
    for _ in range(10):
        driven.fail("read", times=2)
        driven.breaker.note("read", failure("DEADLINE"), brought_something=True)
    assert driven.open_lanes() == set()


@pytest.mark.parametrize(
    "ended",
    [{"conclusive": False}, {"failure": failure("CANCELLED")}, {"failure": failure("FORKING")}],
    ids=["short", "cancelled", "held up by a fork"],
)
def test_call_that_says_nothing_neither_cuts_off_nor_lets_back_in(ended):
    driven = Driven()
    note = {"lane": "read", "failure": failure("DEADLINE"), **ended}
    for _ in range(10):
        driven.breaker.note(**note)
    driven.fail("read", times=2)
    driven.breaker.note(**note)
    assert driven.open_lanes() == set()
    driven.fail("read")
    driven.breaker.note(**note)
    assert driven.open_lanes() == {"read"}


def test_zero_failures_switch_it_off():
    driven = Driven(failures_max=0)
    driven.fail("read", times=100)
    driven.fail("write", "UNREACHABLE", 100)
    assert driven.open_lanes() == set()


def test_refusal_says_what_was_wrong_since_when_and_when_the_store_is_asked_again():
    driven = Driven()
    driven.fail("read", times=3)
    driven.wait(0.2)
    refusal = driven.breaker.admit("read")
    assert refusal.reason == "BREAKER_OPEN"
    for words in ("store:1", "for 0.2 s", "DEADLINE: because DEADLINE", "again in 0.3 s"):
        assert words in refusal.detail


@every_lane
def test_one_trial_at_a_time_decides(lane):
    driven = Driven()
    driven.fail(lane, times=3)
    driven.wait(PROBE_S)
    assert [driven.admitted(lane) for _ in range(4)] == [True, False, False, False]
    driven.answer(lane)
    assert all(driven.admitted(lane) for _ in range(4))


@pytest.mark.parametrize("end", ["died", "inconclusive"])
def test_trial_that_ends_without_a_word_is_followed_by_another(end):
    driven = Driven()
    driven.fail("read", times=3)
    driven.wait(PROBE_S)
    assert driven.admitted("read")
    if end == "inconclusive":
        driven.breaker.note("read", None, conclusive=False)
    else:
        driven.wait(TRIAL_S)
    assert [driven.admitted("read") for _ in range(3)] == [True, False, False]


def test_pauses_double_with_each_trial_that_fails_up_to_a_limit_and_start_anew_after_an_answer():
    driven = Driven()
    for _ in range(2):
        driven.fail("read", times=3)
        for pause_s in (PROBE_S, 2 * PROBE_S, PAUSE_MAX_S, PAUSE_MAX_S):
            driven.wait(pause_s - 0.01)
            assert not driven.admitted("read")
            driven.wait(0.01)
            assert driven.admitted("read")
            driven.fail("read")
        driven.wait(PAUSE_MAX_S)
        assert driven.admitted("read")
        driven.answer("read")


def test_longest_wait_for_a_store_that_is_back_is_three_seconds():
    """A pause, and a probe that begins just too early; gRPC's own back-off, a fifth longer at most, ends within both."""
    config = ClientConfig()
    longest_pause_s = max(PAUSE_MAX_S, config.breaker_probe_s)
    assert longest_pause_s + PROBE_TIMEOUT_S <= 3
    assert 1.2 * config.reconnect_backoff_max_s + config.breaker_probe_s + PROBE_TIMEOUT_S <= 3


def test_answer_on_one_lane_ends_an_outage_for_all_but_not_the_silence_of_another():
    driven = Driven()
    driven.fail("write", times=3)
    driven.fail("lookup", "UNREACHABLE", times=3)
    assert driven.open_lanes() == set(LANES)
    driven.answer("lookup")
    assert driven.open_lanes() == {"write"}


class BreakerModel(RuleBasedStateMachine):
    """Against the plain words: who is cut off is a matter of failures in a row; a trial is one call."""

    def __init__(self) -> None:
        super().__init__()
        self.driven = Driven()
        self.outage = 0
        self.silent = dict.fromkeys(LANES, 0)
        self.trial_s: dict[str, float] = {}  # lane -> when its last trial was let through

    def cut_off(self, lane: str) -> bool:
        return self.outage + self.silent[lane] >= 3

    @rule(lane=st.sampled_from(LANES), reason=st.sampled_from(["DEADLINE", "UNREACHABLE", "OVERLOADED", None]))
    def end_a_call(self, lane, reason):
        self.driven.breaker.note(lane, failure(reason) if reason else None)
        if reason == "UNREACHABLE":
            self.outage += 1
            self.trial_s.clear()
        elif reason == "DEADLINE":
            self.silent[lane] += 1
            self.trial_s.pop(lane, None)
        else:
            self.outage = self.silent[lane] = 0
            self.trial_s = {other: when for other, when in self.trial_s.items() if self.cut_off(other)}

    @rule(lane=st.sampled_from(LANES))
    def begin_a_call(self, lane):
        if self.driven.admitted(lane) and self.cut_off(lane):
            last = self.trial_s.get(lane)
            assert last is None or self.driven.now_s - last >= TRIAL_S
            self.trial_s[lane] = self.driven.now_s

    @rule(seconds=st.sampled_from([0.1, PROBE_S, TRIAL_S]))
    def time_passes(self, seconds):
        self.driven.wait(seconds)

    @precondition(lambda self: any(self.cut_off(lane) for lane in LANES))
    @rule(lane=st.sampled_from(LANES))
    def every_lane_gets_a_trial_within_3_s(self, lane):
        self.driven.wait(PAUSE_MAX_S + TRIAL_S)
        assert self.driven.breaker.cut_off(lane) is None

    @invariant()
    def lanes_that_are_not_cut_off_let_everything_through(self):
        assert all(self.driven.breaker.cut_off(lane) is None for lane in LANES if not self.cut_off(lane))


TestBreakerModel = BreakerModel.TestCase
TestBreakerModel.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


# With the probing thread, over the wire


@contextmanager
def client_of(target: str, **more):
    with KVStoreClient(ClientConfig(target=target, base_budget_s=30, breaker_probe_s=0.02, **more)) as client:
        yield client


def count_probers() -> int:
    return sum(thread.name == "kvstore-probe" for thread in threading.enumerate())


def until(true, within_s: float = 30) -> None:
    end_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def cut_reads_off(peer, namespace) -> None:
    """Let gets hang until they are cut off, each with just enough of a budget to count."""
    peer.answers["GetBlocks"] = lambda *_: iter([peer.stall()])
    breaker = namespace._connections.current().breaker
    for _ in range(3):
        breaker.note("read", failure("DEADLINE"))


@pytest.fixture
def peer():
    with wire_server() as peer:
        peer.answers["MatchPrefix"] = lambda *_: pb.MatchPrefixResponse()
        yield peer


def test_store_whose_gets_hang_is_cut_off_from_gets_alone_and_costs_no_request(peer):
    peer.answers["GetBlocks"] = lambda *_: iter([peer.stall()])
    settings = ClientConfig(target=peer.target, base_budget_s=0.2, breaker_probe_s=3600)
    with KVStoreClient(settings) as client:
        namespace = client.namespace(SPEC)
        assert namespace.register(budget_s=30) is None
        reasons = [namespace.get(CHAIN, bytearray(4 * SIZE)).failure.reason for _ in range(103)]
        assert reasons == ["DEADLINE"] * 3 + ["BREAKER_OPEN"] * 100
        assert peer.calls.count("GetBlocks") == 3
        assert namespace.match(CHAIN, budget_s=30).failure is None
        assert client.stats().failures == {"DEADLINE": 3, "BREAKER_OPEN": 100}
        assert namespace.cut_off("read").reason == client.cut_off("read").reason == "BREAKER_OPEN"
        assert (namespace.cut_off("lookup"), namespace.cut_off("write")) == (None, None)


def test_own_budget_counts_from_half_of_the_configured_one_on(peer):
    peer.answers["MatchPrefix"] = peer.stall
    with KVStoreClient(ClientConfig(target=peer.target, base_budget_s=0.2, breaker_probe_s=3600)) as client:
        namespace = client.namespace(SPEC)
        assert namespace.register(budget_s=30) is None
        for budget_s, reason in [(0.05, "DEADLINE")] * 5 + [(0.15, "DEADLINE")] * 3 + [(0.15, "BREAKER_OPEN")]:
            assert namespace.match(CHAIN, budget_s=budget_s).failure.reason == reason


@pytest.mark.parametrize(
    ("reason", "conclusive"), [(None, (False, False)), ("DEADLINE", (True, False)), ("OVERLOADED", (True, True))]
)
def test_end_within_a_budget_tells_of_the_store_if_something_was_sent_or_there_was_time_enough(reason, conclusive):
    ended = failure(reason) if reason else None
    assert (Budget(1).is_conclusive(ended), Budget(1, enough=False).is_conclusive(ended)) == conclusive


def test_gets_that_bring_a_leading_part_are_never_cut_off(peer):
    def part(*_):
        yield frame(CHAIN, {0: bytes(SIZE)})
        peer.released.wait(60)

    peer.answers["GetBlocks"] = part
    with KVStoreClient(ClientConfig(target=peer.target, base_budget_s=1)) as client:
        namespace = client.namespace(SPEC)
        assert namespace.register(budget_s=30) is None
        results = [namespace.get(CHAIN, bytearray(4 * SIZE)) for _ in range(4)]
        assert [(result.leading_blocks, result.failure.reason) for result in results] == [(1, "DEADLINE")] * 4


def refusing(code: grpc.StatusCode, reason: str):
    return lambda _, context: refuse(context, code, reason)


SERVES = {
    "answers": lambda *_: pb.MatchPrefixResponse(),
    "knows no namespace": refusing(grpc.StatusCode.NOT_FOUND, "NAMESPACE_NOT_FOUND"),
    "overloaded": refusing(grpc.StatusCode.UNAVAILABLE, "OVERLOADED"),
}
DOES_NOT_SERVE = {
    "starts or stops": refusing(grpc.StatusCode.UNAVAILABLE, "NOT_SERVING"),
    "answers late": lambda _, context: refuse(context, grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
}


@pytest.mark.parametrize("serving", SERVES)
def test_probe_lets_back_in_without_a_request(peer, serving, caplog):
    caplog.set_level(logging.INFO, "kvstore_client")
    peer.answers["MatchPrefix"] = SERVES[serving]
    with client_of(peer.target) as client:
        namespace = client.namespace(SPEC)
        cut_reads_off(peer, namespace)
        until(lambda: namespace.cut_off("read") is None)
        assert set(peer.calls) == {"MatchPrefix"}
        assert all(request.peek for request in peer.requests)
        until(lambda: not count_probers())
        peer.answers["GetBlocks"] = lambda *_: [frame(CHAIN, {i: bytes(SIZE) for i in range(4)})]
        assert namespace.get(CHAIN, bytearray(4 * SIZE)).failure is None
    levels = [record.levelname for record in caplog.records if record.name == "kvstore_client"]
    assert levels == ["WARNING", "INFO"]


@pytest.mark.parametrize("serving", DOES_NOT_SERVE)
def test_store_that_does_not_serve_is_asked_until_it_does(peer, serving):
    peer.answers["MatchPrefix"] = DOES_NOT_SERVE[serving]
    with client_of(peer.target) as client:
        namespace = client.namespace(SPEC)
        cut_reads_off(peer, namespace)
        until(lambda: peer.calls.count("MatchPrefix") == 3)
        assert namespace.cut_off("read") is not None
        peer.answers["MatchPrefix"] = SERVES["answers"]
        until(lambda: namespace.cut_off("read") is None)


@pytest.mark.parametrize("end", ["closed", "dropped"])
def test_no_thread_outlives_its_client(peer, end):
    peer.answers["MatchPrefix"] = peer.stall
    for _ in range(5):
        client = KVStoreClient(ClientConfig(target=peer.target, breaker_probe_s=0.02))
        namespace = client.namespace(SPEC)
        cut_reads_off(peer, namespace)
        cut_reads_off(peer, namespace)
        assert count_probers() == 1
        gone = weakref.ref(client)
        if end == "closed":
            client.close()
            assert count_probers() == 0
        del client, namespace
        gc.collect()
        assert gone() is None
        until(lambda: (gc.collect(), not count_probers())[1])


def test_calls_are_their_own_trial_when_no_thread_is_to_be_had(peer, monkeypatch):
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with client_of(peer.target) as client:
        namespace = client.namespace(SPEC)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            cut_reads_off(peer, namespace)
        assert count_probers() == 0
        until(lambda: namespace.cut_off("read") is None)


EXIT_SCRIPT = """
import os, sys
from kvstore_client import ClientConfig, KVStoreClient, NamespaceSpec
client = KVStoreClient(ClientConfig(target=sys.argv[1], breaker_failures=1, breaker_probe_s=0.01))
namespace = client.namespace(NamespaceSpec(model="m", revision="r", engine="e", layout="l", kv_dtype="u", block_bytes=1))
chain = namespace.chain(range(128))
assert namespace.match(chain).failure.reason == "DEADLINE"
assert namespace.match(chain).failure.reason == "BREAKER_OPEN"
pid = os.fork()
if pid == 0:
    assert namespace.cut_off("lookup") is None
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
print("ended")
"""


def test_process_ends_while_its_breaker_is_open_and_a_forked_child_begins_afresh(peer):
    peer.answers["RegisterNamespace"] = peer.answers["MatchPrefix"] = peer.stall
    run = subprocess.run([sys.executable, "-c", EXIT_SCRIPT, peer.target], capture_output=True, text=True, timeout=60)
    assert (run.stdout, run.returncode) == ("ended\n", 0), run.stderr
