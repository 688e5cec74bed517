"""The bridge to blocking code is bounded, and a place is taken until its thread is free."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

import pytest

from kvstore.errors import OverloadedError
from kvstore.pool import DeadlinePassedError, StorePool, settled

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

T = TypeVar("T")


class Gate:
    """Blocks the threads that enter until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self._open = threading.Event()

    def __call__(self) -> str:
        self.entered.release()
        assert self._open.wait(60)
        return "passed"

    def open(self) -> None:
        self._open.set()

    async def until_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.acquire, timeout=60)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


def in_loop(pool: StorePool, body: Callable[[], Awaitable[T]]) -> T:
    """Run `body` on a loop that outlives the pool's threads, as in the server."""

    async def run() -> T:
        try:
            return await body()
        finally:
            await asyncio.to_thread(pool.close)

    return asyncio.run(run())


async def until_free(pool: StorePool) -> None:
    while pool.pending:
        await asyncio.sleep(0)


def test_results_and_exceptions_come_back():
    pool = StorePool("test", 1, 1)

    async def body() -> None:
        assert await pool.run(lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            await pool.run(lambda: 1 // 0)
        assert pool.pending == 0

    in_loop(pool, body)


def test_calls_run_beside_the_loop_not_on_it():
    pool = StorePool("test", 1, 1)

    async def body() -> str:
        return await pool.run(lambda: threading.current_thread().name)

    assert in_loop(pool, body).startswith("kvstore-test")


def test_overload_is_an_error_with_the_numbers_and_not_a_queue(gate):
    pool = StorePool("read", 1, 2)

    async def body() -> None:
        running = [asyncio.create_task(pool.run(gate)) for _ in range(2)]
        await gate.until_entered()
        with pytest.raises(OverloadedError, match="2 read calls are running or waiting, the limit is 2"):
            await pool.run(lambda: None)
        assert pool.refused == 1
        gate.open()
        assert await asyncio.gather(*running) == ["passed", "passed"]
        assert await pool.run(lambda: "again") == "again"

    in_loop(pool, body)


def test_a_cancelled_call_keeps_its_place_until_its_thread_is_free(gate):
    pool = StorePool("read", 1, 1)

    async def body() -> None:
        call = asyncio.create_task(pool.run(gate))
        await gate.until_entered()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        with pytest.raises(OverloadedError):
            await pool.run(lambda: None)
        gate.open()
        await until_free(pool)
        assert await pool.run(lambda: "free") == "free"

    in_loop(pool, body)


def test_a_call_cancelled_while_it_waits_never_runs(gate):
    pool = StorePool("read", 1, 2)
    ran = []

    async def body() -> None:
        first = asyncio.create_task(pool.run(gate))
        await gate.until_entered()
        second = asyncio.create_task(pool.run(lambda: ran.append("ran")))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert pool.pending == 1
        gate.open()
        await first

    in_loop(pool, body)
    assert ran == []


def test_work_whose_deadline_has_passed_is_dropped():
    pool = StorePool("read", 1, 2)
    ran = []

    async def body() -> None:
        with pytest.raises(DeadlinePassedError):
            await pool.run(lambda: ran.append("late"), deadline_s=time.monotonic() - 1)
        await pool.run(lambda: ran.append("in time"), deadline_s=time.monotonic() + 60)

    in_loop(pool, body)
    assert ran == ["in time"]


def test_one_slot_runs_many_jobs_and_counts_once():
    pool = StorePool("read", 4, 1)

    async def body() -> None:
        with pool.admit() as slot:
            assert [await slot.run(lambda number=number: number) for number in range(5)] == [0, 1, 2, 3, 4]
            assert pool.pending == 1
        assert pool.pending == 0

    in_loop(pool, body)


def test_the_last_job_waits_for_the_one_that_runs_and_keeps_the_place(gate):
    pool = StorePool("read", 4, 1)
    order = []

    async def body() -> None:
        with pool.admit() as slot:
            running = slot.start(lambda: order.append(gate()))
            await gate.until_entered()
            running.cancel()
            slot.last(lambda: order.append("closed"))
        assert pool.pending == 1
        gate.open()
        await until_free(pool)

    in_loop(pool, body)
    assert order == ["passed", "closed"]


def test_the_last_job_runs_even_after_one_that_failed_or_never_ran(gate):
    pool = StorePool("read", 1, 3)
    order = []

    async def body() -> None:
        with pool.admit() as slot:
            with pytest.raises(ZeroDivisionError):
                await slot.run(lambda: 1 // 0)
            slot.last(lambda: order.append("after failure"))
        busy = asyncio.create_task(pool.run(gate))
        await gate.until_entered()
        with pool.admit() as slot:
            slot.start(lambda: order.append("never")).cancel()
            await asyncio.sleep(0)  # asyncio tells the thread's future in the loop's next round
            slot.last(lambda: order.append("after cancelled"))
        gate.open()
        await busy
        await until_free(pool)

    in_loop(pool, body)
    assert order == ["after failure", "after cancelled"]


def test_a_cancelled_call_leaves_the_future_to_the_thread_that_sets_it():
    answer: Future[str] = Future()

    async def body() -> None:
        call = asyncio.create_task(settled(answer))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.sleep(0)  # asyncio would tell the future in the loop's next round
        assert not answer.cancelled()
        answer.set_result("stored")
        assert await settled(answer) == "stored"

    asyncio.run(body())
