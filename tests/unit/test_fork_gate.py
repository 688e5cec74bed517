"""The gate between fork() and gRPC: who waits for whom, and that nobody waits for ever."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from kvstore_client.budget import Budget
from kvstore_client.errors import CallFailedError
from kvstore_client.fork_gate import ForkGate

PATIENT_S = 60


class Held:
    """Something that a thread of its own is in the middle of, until it is let go."""

    def __init__(self, enter, leave=None) -> None:
        self._go_on, self.inside = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, args=(enter, leave))
        self._thread.start()

    def _work(self, enter, leave) -> None:
        if leave is None:
            with enter():
                self._stay()
        else:
            enter()
            self._stay()
            leave()

    def _stay(self) -> None:
        self.inside.set()
        assert self._go_on.wait(PATIENT_S)

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()

    def let_go(self) -> None:
        self._go_on.set()
        self._thread.join()


@pytest.fixture
def gate():
    return ForkGate(PATIENT_S)


def forking(gate: ForkGate) -> Held:
    return Held(gate.close, gate.open)


def test_fork_waits_for_calls_of_other_threads_and_those_that_come_meanwhile_for_the_fork(gate):
    with Held(gate.call) as call:
        assert call.inside.wait(PATIENT_S)
        with forking(gate) as fork:
            assert not fork.inside.wait(0.05)
            with Held(gate.call) as late:
                assert not late.inside.wait(0.05)
                call.let_go()
                assert fork.inside.wait(PATIENT_S)
                assert not late.inside.wait(0.05)
                fork.let_go()
                assert late.inside.wait(PATIENT_S)


def test_fork_waits_for_a_registration_in_the_background(gate):
    with gate.call():
        ended = gate.background_call()
    with forking(gate) as fork:
        assert not fork.inside.wait(0.05)
        ended()
        assert fork.inside.wait(PATIENT_S)


def test_call_that_a_fork_holds_up_ends_by_its_budget(gate):
    with forking(gate) as fork:
        assert fork.inside.wait(PATIENT_S)
        with pytest.raises(CallFailedError) as raised, gate.call(Budget(0.05)):
            pass
        assert raised.value.failure.reason == "FORKING"
        with pytest.raises(CallFailedError) as raised, gate.call(Budget(0)):
            pass
        assert raised.value.failure.reason == "DEADLINE"
    with gate.call(Budget(PATIENT_S)):
        pass


def test_fork_inside_its_own_threads_call_waits_for_nobody(gate):
    with gate.call(), gate.call():
        gate.close()
        with gate.call():  # nor does a call of the thread that forks
            pass
        gate.open()
    with forking(gate) as fork:
        assert fork.inside.wait(PATIENT_S)


def test_forks_inside_of_calls_of_two_threads_do_not_wait_for_each_other(gate):
    def call_and_fork(both_inside: threading.Barrier) -> None:
        with gate.call():
            both_inside.wait(PATIENT_S)
            gate.close()
            gate.open()

    both_inside = threading.Barrier(2)
    threads = [threading.Thread(target=call_and_fork, args=(both_inside,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENT_S / 2)
    assert not any(thread.is_alive() for thread in threads)


def test_call_inside_a_call_that_a_fork_waits_for_is_let_through(gate):
    with gate.call():
        fork = forking(gate)
        assert not fork.inside.wait(0.05)
        with gate.call(Budget(PATIENT_S)):
            pass
        assert not fork.inside.is_set()
    assert fork.inside.wait(PATIENT_S)
    fork.let_go()


def test_fork_goes_on_with_a_warning_when_a_call_does_not_end(caplog):
    gate = ForkGate(0.05)
    with Held(gate.call) as call:
        assert call.inside.wait(PATIENT_S)
        gate.close()
        gate.open()
    assert [record.getMessage()[:24] for record in caplog.records] == ["forking although 1 calls"]


def test_call_that_raises_is_a_call_that_has_ended(gate):
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), gate.call():
            raise KeyboardInterrupt
    gate.close()
    gate.open()


def test_child_begins_with_an_open_gate_whatever_its_parent_was_doing(gate):
    """In the child nobody ends the parent's calls; its own forks must not wait for them."""
    with Held(gate.call) as call:
        assert call.inside.wait(PATIENT_S)
        with gate.call():
            gate.background_call()
            gate.renew()  # what the child does first; from here on this is the child
        before = time.monotonic()
        gate.close()
        with gate.call():
            pass
        gate.open()
        assert time.monotonic() - before < PATIENT_S / 2


@pytest.mark.parametrize("depth", [1, 2])
def test_real_forks_inside_calls_leave_parent_and_children_a_gate_that_works(depth):
    gate = ForkGate(PATIENT_S)

    def fork_and_use(depth: int) -> None:
        with gate.call():
            pid = os.fork()
            if pid == 0:
                signal.alarm(PATIENT_S)
                status = 1
                try:
                    if depth > 1:
                        fork_and_use(depth - 1)
                    status = 0
                finally:
                    if status:
                        os._exit(status)
        if pid == 0:
            with gate.call():
                pass
            gate.close()
            gate.open()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        gate.close()
        gate.open()

    fork_and_use(depth)
