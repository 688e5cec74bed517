"""Draining an engine: what can finish finishes, the rest goes on elsewhere, and the process may end."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import serving
from kvstore_engine.drain import Drain
from kvstore_engine.engine import Engine, NotAdmittingError, Request
from kvstore_engine.identity import namespace_spec
from kvstore_engine.model import Llama
from kvstore_engine.sampling import SamplingParams
from nodes import CONFIG, PATIENCE_S, WEIGHTS, Node, make_pool, patient_client, prompt_of, undisturbed
from serving import running_server

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore_client import KVStoreClient

PARAMS = SamplingParams(max_new_tokens=20, temperature=0.7, seed=3)


class ManualClock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make_engine(client: KVStoreClient, model_name: str) -> Engine:
    handle = client.namespace(namespace_spec(model_name, "weights-1", make_pool()))
    return Node(handle, num_blocks=32, max_running=2).engine


def params_of(seed: int) -> SamplingParams:
    return replace(PARAMS, seed=seed)


class Drained:
    """Two engines with the same store, the first with three requests: one decodes, one is in its prefill, one waits."""

    def __init__(self, client: KVStoreClient, name: str) -> None:
        self.engine, self.heir = make_engine(client, name), make_engine(client, name)
        self.clock = ManualClock()
        self.drain = Drain(self.engine, grace_s=10, patience_s=PATIENCE_S, clock=self.clock)
        self.requests = [self.engine.submit(prompt_of(length), params_of(length)) for length in (130, 300, 200)]
        while not self.requests[1].computed_tokens:
            self.engine.step()
        assert self.engine.unfinished == self.requests
        assert self.engine.waiting == self.requests[2:]
        self.given: dict[Request, bytes] = {}
        self.steps = 0

    def give(self, request: Request, ticket: bytes) -> None:
        self.given[request] = ticket

    def pass_time(self, _finished: Sequence[Request]) -> None:
        self.steps += 1
        self.clock.now_s += 1

    def check_all_tokens(self) -> None:
        moved = {request: self.heir.take_over(ticket) for request, ticket in self.given.items()}
        while self.heir.has_work:
            self.heir.step()
        for request in self.requests:
            generation = request.generation or moved[request].generation
            assert generation is not None
            assert generation.tokens == undisturbed(list(request.prompt), request.params)
        assert [request for request in moved if moved[request].recomputed_tokens] == []


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_server(tmp_path_factory.mktemp("shared")) as running:
        yield running.target


@pytest.fixture
def drained(target: str, request: pytest.FixtureRequest) -> Iterator[Drained]:
    with patient_client(target) as client:
        yield Drained(client, request.node.name)


def test_requests_go_on_for_the_grace_period_and_then_leave_with_their_kv(drained: Drained):
    drained.drain.tell()
    with pytest.raises(NotAdmittingError):
        drained.engine.submit([1])
    report = drained.drain.run(drained.give, on_step=drained.pass_time)
    assert (report.finished, report.handed_over, report.grace_used_s) == (0, 3, 10)
    assert drained.steps == 10
    # The one that waited left at once, without a step.
    assert list(drained.given) == [drained.requests[2], *drained.requests[:2]]
    assert drained.requests[2].output == []
    assert min(len(request.output) for request in drained.requests[:2]) > 5
    assert not drained.engine.has_work
    drained.check_all_tokens()


def test_it_ends_early_when_all_have_finished(drained: Drained):
    drained.drain.tell()
    drained.clock.now_s += 1
    report = drained.drain.run(drained.give)
    assert (report.finished, report.handed_over, report.grace_used_s) == (2, 1, 1)
    drained.check_all_tokens()


def test_told_again_it_hands_over_at_once(drained: Drained):
    def tell_again(_finished: object) -> None:
        drained.steps += 1
        drained.drain.tell()

    report = drained.drain.run(drained.give, on_step=tell_again)
    assert (drained.steps, report.handed_over, report.grace_used_s) == (1, 3, 0)
    drained.check_all_tokens()


def test_signals_tell_it_and_are_given_back(drained: Drained):
    before = signal.getsignal(signal.SIGTERM)
    with drained.drain.on_signal(signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), signal.SIGTERM)
        assert drained.drain.begun
        os.kill(os.getpid(), signal.SIGINT)
        report = drained.drain.run(drained.give, on_step=drained.pass_time)
    assert (drained.steps, report.handed_over) == (0, 3)
    assert signal.getsignal(signal.SIGTERM) is before
    drained.check_all_tokens()


def test_a_ticket_that_nobody_takes_does_not_keep_the_others(drained: Drained):
    def give(request: Request, ticket: bytes) -> None:
        if request is drained.requests[0]:
            raise ConnectionError("nobody there")
        drained.give(request, ticket)

    drained.drain.tell()
    drained.drain.tell()
    with pytest.raises(ConnectionError, match="nobody there"):
        drained.drain.run(give)
    assert drained.given.keys() == set(drained.requests[1:])
    assert not drained.engine.has_work


def test_an_engine_that_cannot_hand_over_says_so_when_it_has_to(drained: Drained):
    bare = Engine(Llama(CONFIG, WEIGHTS), make_pool())
    kept = bare.submit(prompt_of(30), PARAMS)
    with pytest.raises(RuntimeError, match="no prefix cache that hands requests over"):
        Drain(bare, grace_s=0).run(drained.give)
    assert bare.unfinished == [kept]


@pytest.mark.parametrize("times", [{"grace_s": -1}, {"patience_s": -1}])
def test_impossible_times_are_refused(drained: Drained, times: dict[str, float]):
    with pytest.raises(ValueError, match="must not be negative"):
        Drain(drained.engine, **times)


WORKER = """
import base64, json, sys
sys.path[:0] = sys.argv[2:]
import test_drain as t

with t.patient_client(sys.argv[1]) as client:
    engine = t.make_engine(client, "processes")
    for length in (130, 300):
        engine.submit(t.prompt_of(length), t.SamplingParams(max_new_tokens=1500, temperature=0.7, seed=length))
    drain = t.Drain(engine, grace_s=0)
    with drain.on_signal():
        while not drain.begun:
            engine.step()
            if len(engine.unfinished) == 2 and all(r.output for r in engine.unfinished):
                print("decoding", flush=True)
        report = drain.run(lambda _, ticket: print(base64.b64encode(ticket).decode(), flush=True))
    print(json.dumps([report.finished, report.handed_over]), flush=True)
"""


def test_a_process_that_is_terminated_leaves_its_requests_to_another(target: str):
    places = [os.path.dirname(__file__), os.path.dirname(serving.__file__)]
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, target, *places], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "decoding\n"
        process.send_signal(signal.SIGTERM)
        lines = [line for line in process.stdout if line != "decoding\n"]
    assert process.returncode == 0
    assert json.loads(lines.pop()) == [0, 2]
    with patient_client(target) as client:
        heir = make_engine(client, "processes")
        moved = [heir.take_over(base64.b64decode(line)) for line in lines]
        while not all(request.generation or len(request.output) > 40 for request in moved):
            heir.step()
        for request in moved:
            assert request.recomputed_tokens == 0
            params = SamplingParams(max_new_tokens=len(request.output), temperature=0.7, seed=len(request.prompt))
            assert request.output == undisturbed(list(request.prompt), params)
