"""Whether a store answers: the one place that knows, and that keeps calls away from a store that does not.

Each kind of call, a lane, is judged by itself, so that a store whose matches answer and whose gets hang is cut off from gets
alone. A lane that is cut off refuses calls at once. A thread asks the store meanwhile, so that no request pays for asking
and an outage ends without requests. When the store answers it, one call per lane goes through as a trial.

    closed ── failures in a row ──▶ cut off ── the store answers the probe ──▶ on trial ── the call is answered ──▶ closed
                                       ▲                                          │
                                       └──────── the call fails: longer pause ────┘
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Literal, get_args

from kvstore_client.results import BREAKER_OPEN, DEADLINE, FORKING, UNREACHABLE, Failure

if TYPE_CHECKING:
    from collections.abc import Callable

Lane = Literal["lookup", "read", "write"]
LANES: tuple[Lane, ...] = get_args(Lane)
LANE_OF: dict[str, Lane] = {
    "register": "lookup",
    "match": "lookup",
    "delete": "lookup",
    "get": "read",
    "get_state": "read",
    "put": "write",
    "put_state": "write",
}

PROBE_TIMEOUT_S = 1.0
# A pause doubles with each trial that fails, up to this: with the probe's own time a store is back within 3 s.
PAUSE_MAX_S = 2.0
# After this a trial no longer keeps the next call waiting: its caller may have died, or wait for a long transfer.
TRIAL_S = 1.0

# Nobody there, or there and not serving: no kind of call can succeed.
_OUTAGE = frozenset({UNREACHABLE, "NOT_SERVING"})
# The second is what a server says that noticed the end of the call's time before the client did.
_SILENCE = frozenset({DEADLINE, "DEADLINE_EXCEEDED"})
# Never asked, held up or ended by this side.
_NO_EVIDENCE = frozenset({BREAKER_OPEN, FORKING, "CANCELLED"})

_LOGGER = logging.getLogger("kvstore_client")


class _LaneState:
    """What is known of one lane; guarded by the breaker's lock."""

    __slots__ = ("cut_off", "failure", "pause_s", "proved", "retry_at_s", "silent_calls", "since_s", "trial_until_s")

    def __init__(self) -> None:
        self.silent_calls = 0  # in a row, that ended without an answer in time
        self.failure: Failure | None = None  # the last that counted
        self.since_s = 0.0  # when the calls began to fail
        self.cut_off = False
        self.pause_s = 0.0
        self.retry_at_s = 0.0  # no probe before this
        self.proved = False  # the store has answered a probe since: trials may begin
        self.trial_until_s = 0.0  # no other trial before this

    def cut(self, now_s: float, pause_s: float) -> None:
        self.cut_off, self.proved = True, False
        self.pause_s, self.retry_at_s, self.trial_until_s = pause_s, now_s + pause_s, 0.0


class Breaker:
    """One per connection. Threads and event loops may share it; nothing here waits for the store but the probing thread.

    Attributes:
        recoveries: how often the store has answered a probe after calls had failed.
    """

    def __init__(
        self,
        target: str,
        failures_max: int,
        probe_s: float,
        probe: Callable[[float], Failure | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A breaker that lets everything through.

        Args:
            target: the store's name in log lines.
            failures_max: failures in a row that cut a lane off; 0 for never.
            probe_s: the first pause before the store is asked again.
            probe: asks the store something for at most so many seconds; None when its service has answered. Without a probe,
                or without a thread for it, the first call after the pause is the trial.
        """
        self._target = target
        self._failures_max = failures_max
        self._probe_s = probe_s
        self._probe = probe
        self._clock = clock
        self._pid = os.getpid()
        self._stop = threading.Event()
        self.recoveries = 0  # written under the lock
        self._lock = threading.Lock()  # guards everything below
        self._lanes: dict[str, _LaneState] = {lane: _LaneState() for lane in LANES}
        self._outage_calls = 0  # in a row, over all lanes
        self._failed_calls = 0  # since the trouble began; 0 exactly when nothing is wrong
        self._prober: threading.Thread | None = None
        self._closed = False

    def admit(self, lane: Lane) -> Failure | None:
        """Let a call through, or say why not: BREAKER_OPEN. Each call that is let through has to be noted at its end."""
        state = self._lanes[lane]
        if not state.cut_off:  # the common case, without the lock
            return None
        with self._lock:
            now_s = self._clock()
            refusal = self._refusal(state, now_s)
            if refusal is None:
                state.trial_until_s = now_s + TRIAL_S
            return refusal

    def cut_off(self, lane: Lane) -> Failure | None:
        """Why a call would be refused now; None when it would be let through. Changes nothing."""
        state = self._lanes[lane]
        if not state.cut_off:
            return None
        with self._lock:
            return self._refusal(state, self._clock())

    def note(
        self, lane: Lane, failure: Failure | None, *, brought_something: bool = False, conclusive: bool = True
    ) -> None:
        """A call has ended. A refusal with a reason is an answer; only silence and a closed door are trouble.

        Args:
            brought_something: a call out of time has brought a part that can be used, which is an answer, too.
            conclusive: False for a call whose end says nothing about the store: too short a budget, nothing sent, cancelled.
        """
        if failure is None and not self._failed_calls:  # the common case, without the lock
            return
        reason = "" if failure is None else failure.reason
        if reason in _NO_EVIDENCE or not conclusive:
            self._end_trial(lane)
        elif failure is not None and reason in _OUTAGE:
            self._failed(lane, failure, outage=True)
        elif failure is not None and reason in _SILENCE and not brought_something:
            self._failed(lane, failure, outage=False)
        else:
            self._answered(lane)

    def probed(self, failure: Failure | None) -> float | None:
        """The store was asked. Returns: seconds until it is to be asked again; None when nothing waits for an answer."""
        with self._lock:
            now_s = self._clock()
            self.recoveries += failure is None
            for state in self._unproved():
                if state.retry_at_s <= now_s:
                    state.proved = failure is None
                    state.retry_at_s = now_s + self._probe_s
            waiting = self._unproved()
            if not waiting or self._closed:
                self._prober = None
                return None
            return max(0.0, min(state.retry_at_s for state in waiting) - now_s)

    def probe_once(self) -> float | None:
        """Ask the store; see `probed`. Blocks for at most PROBE_TIMEOUT_S."""
        failure: Failure | None = Failure(UNREACHABLE, "no probe")
        if self._probe is not None and not self._stop.is_set():
            try:
                failure = self._probe(PROBE_TIMEOUT_S)
            # Whatever it is, the store has not answered; a closed client ends the thread below.
            except Exception as error:
                failure = Failure(UNREACHABLE, f"{type(error).__name__}: {error}")
        return self.probed(failure)

    def close(self) -> None:
        """End the probing thread. Idempotent."""
        with self._lock:
            self._closed = True
            prober = self._prober
        self._stop.set()
        if prober is not None and prober.is_alive() and prober is not threading.current_thread():
            prober.join(2 * PROBE_TIMEOUT_S)

    def close_at_exit(self) -> None:
        """The interpreter is about to end, and a thread inside gRPC must not see that."""
        if os.getpid() == self._pid:  # a forked child has neither the thread nor, for sure, a free lock
            self.close()

    def _refusal(self, state: _LaneState, now_s: float) -> Failure | None:
        if not state.cut_off:
            return None
        proved = state.proved or (not self._probing() and now_s >= state.retry_at_s)
        if proved and now_s >= state.trial_until_s:
            return None
        last = state.failure
        again = "a trial is under way" if proved else f"asked again in {max(0.0, state.retry_at_s - now_s):.1f} s"
        return Failure(
            BREAKER_OPEN,
            f"not sent: store {self._target} has not answered such calls for {now_s - state.since_s:.1f} s, "
            f"the last with {last.reason if last else ''}: {last.detail if last else ''}; {again}",
        )

    def _failed(self, lane: Lane, failure: Failure, *, outage: bool) -> None:
        with self._lock:
            if outage:
                self._outage_calls += 1
            else:
                self._lanes[lane].silent_calls += 1
            begins, self._failed_calls = not self._failed_calls, self._failed_calls + 1
            now_s = self._clock()
            for concerned in LANES if outage else (lane,):
                self._judge(self._lanes[concerned], failure, now_s)
            self._start_probing()
        if begins:
            _LOGGER.warning(
                "store %s does not answer: %s: %s; calls are misses until it does",
                self._target,
                failure.reason,
                failure.detail,
            )

    def _judge(self, state: _LaneState, failure: Failure, now_s: float) -> None:
        if state.failure is None:
            state.since_s = now_s
        state.failure = failure
        if not state.cut_off:
            if self._is_too_much(state):
                state.cut(now_s, self._probe_s)
        elif state.proved or state.trial_until_s:  # the trial, or a call from before that ends only now
            state.cut(now_s, max(self._probe_s, min(2 * state.pause_s, PAUSE_MAX_S)))

    def _is_too_much(self, state: _LaneState) -> bool:
        return 0 < self._failures_max <= self._outage_calls + state.silent_calls

    def _answered(self, lane: Lane) -> None:
        with self._lock:
            self._outage_calls = self._lanes[lane].silent_calls = 0
            for state in self._lanes.values():
                if not state.silent_calls:
                    state.failure = None
                if state.cut_off and not self._is_too_much(state):
                    state.cut_off = False
            if any(state.silent_calls for state in self._lanes.values()):
                return
            failed_calls, self._failed_calls = self._failed_calls, 0
        if failed_calls:
            _LOGGER.info("store %s answers again, after %d failed calls", self._target, failed_calls)

    def _end_trial(self, lane: Lane) -> None:
        with self._lock:
            self._lanes[lane].trial_until_s = 0.0

    def _unproved(self) -> list[_LaneState]:
        return [state for state in self._lanes.values() if state.cut_off and not state.proved]

    def _probing(self) -> bool:
        return self._prober is not None and self._prober.is_alive()

    def _start_probing(self) -> None:
        if self._probe is None or self._closed or self._probing() or not self._unproved():
            return
        # The thread keeps neither the breaker nor its connection alive: a client may be dropped without being closed.
        about = (weakref.ref(self), self._stop, self._probe_s)
        prober = threading.Thread(target=_probe_until_answered, args=about, name="kvstore-probe", daemon=True)
        try:
            prober.start()
        except RuntimeError:  # no more threads, or the interpreter ends: calls are the trial, see `_refusal`
            return
        self._prober = prober
        _close_at_exit(self)


def is_no_answer(reason: str) -> bool:
    """Whether a call that ended so has not been answered by a store that serves."""
    return reason in _OUTAGE | _SILENCE | _NO_EVIDENCE


def _probe_until_answered(breaker_ref: weakref.ref[Breaker], stop: threading.Event, pause_s: float) -> None:
    while not stop.wait(pause_s):
        breaker = breaker_ref()
        if breaker is None:
            return
        next_pause_s = breaker.probe_once()
        if next_pause_s is None:
            return
        pause_s = next_pause_s
        del breaker


_probing_breakers: weakref.WeakSet[Breaker] = weakref.WeakSet()


def _close_at_exit(breaker: Breaker) -> None:
    atexit.unregister(_close_all)
    atexit.register(_close_all)
    _probing_breakers.add(breaker)


def _close_all() -> None:
    for breaker in list(_probing_breakers):
        breaker.close_at_exit()
