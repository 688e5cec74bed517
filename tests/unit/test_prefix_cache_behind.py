"""Loads and saves that run behind the engine: who owns the memory when, and what a store costs that does not keep up."""

from __future__ import annotations

import os
import random
import signal
import threading
import tracemalloc
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kvstore_client import BlockLayout, BlockPart, ClientConfig, Failure, GetResult, KVStoreClient, NamespaceSpec
from kvstore_engine.benefit import MeasuredBenefit, MinimumHit
from kvstore_engine.hook import LoadedPrefix, Ownership, RequestContext
from kvstore_engine.loading import Load
from kvstore_engine.prefix_cache import LOAD_THREADS, PrefixCache
from kvstore_engine.saving import Pending, SaveJob, SaveQueue
from serving import running_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from serving import RunningServer

PATIENCE_S = 60
BLOCK_BYTES = 10_000
CONTEXT = RequestContext()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("shared")) as running:
        yield running


@contextmanager
def cache_on(server: RunningServer, name: str, budget_s: float = PATIENCE_S, **options: Any) -> Iterator[PrefixCache]:
    """A cache in a namespace of the test's own, known to the server."""
    with connected(server, name, budget_s, **options) as (cache, _):
        yield cache


@contextmanager
def connected(
    server: RunningServer, name: str, budget_s: float, **options: Any
) -> Iterator[tuple[PrefixCache, KVStoreClient]]:
    spec = NamespaceSpec(model=name, revision="r", engine="e", layout="l", kv_dtype="uint8", block_bytes=BLOCK_BYTES)
    with KVStoreClient(ClientConfig(target=server.target, base_budget_s=budget_s)) as client:
        cache = PrefixCache(
            client.namespace(spec),
            block_tokens=128,
            block_bytes=BLOCK_BYTES,
            benefit=options.pop("benefit", MinimumHit(1)),
            **options,
        )
        assert cache.check(budget_s=PATIENCE_S) is None
        try:
            yield cache, client
        finally:
            cache.close()


@contextmanager
def stopped(server: RunningServer) -> Iterator[None]:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def tokens_of(blocks: int) -> list[int]:
    return [random.randrange(2**32) for _ in range(blocks * 128 + 1)]


def memory(blocks: int) -> list[memoryview]:
    return [memoryview(bytearray(random.randbytes(BLOCK_BYTES))) for _ in range(blocks)]


def test_a_cache_that_is_connected_takes_the_bounds_that_one_that_is_made_takes(server, request):
    spec = NamespaceSpec(
        model=request.node.name, revision="r", engine="e", layout="l", kv_dtype="uint8", block_bytes=BLOCK_BYTES
    )
    with KVStoreClient(ClientConfig(target=server.target, base_budget_s=PATIENCE_S)) as client:
        cache = PrefixCache.connect(
            client,
            spec,
            block_tokens=128,
            block_bytes=BLOCK_BYTES,
            max_put_bytes=BLOCK_BYTES,
            max_pending_save_bytes=2 * BLOCK_BYTES + 384 * 8,
        )
        cache.save_blocks(range(384), 0, [memoryview(bytes(BLOCK_BYTES))] * 3, CONTEXT).wait(PATIENCE_S)
        cache.close(flush_s=PATIENCE_S)
        assert (cache.stats().stored_blocks, cache.stats().unsaved_blocks) == (2, {"QUEUE_FULL": 1})
        assert client.stats().calls["put"] == 2


def test_copied_memory_is_the_engines_again_at_once(server: RunningServer, request: pytest.FixtureRequest):
    tokens, views = tokens_of(4), memory(4)
    before = [bytes(view) for view in views]
    with cache_on(server, request.node.name) as cache:
        with stopped(server):
            saving = cache.save_blocks(tokens, 0, views, CONTEXT)
            for view in views:
                view[:] = bytes(BLOCK_BYTES)
            assert not saving.done
        assert saving.wait(PATIENCE_S)
        out = memory(4)
        assert cache.start_load(tokens, CONTEXT, out).wait().hit_blocks == 4
        assert [bytes(view) for view in out] == before


def test_held_memory_is_read_until_the_save_is_done_and_not_after(
    server: RunningServer, request: pytest.FixtureRequest
):
    tokens, views = tokens_of(4), memory(4)
    with cache_on(server, request.node.name) as cache:
        with stopped(server):
            # The first save keeps the thread busy: nothing of the second has been read yet.
            first = cache.save_blocks(tokens_of(1), 0, memory(1), CONTEXT)
            second = cache.save_blocks(tokens, 0, views, CONTEXT, Ownership.HELD)
            assert not second.wait(0.05)
            assert not first.done
            views[2][:] = b"\x01" * BLOCK_BYTES  # not allowed; shows that it is not a copy
        assert second.wait(PATIENCE_S)
        views[3][:] = b"\x02" * BLOCK_BYTES  # allowed: it is done
        out = memory(4)
        assert cache.start_load(tokens, CONTEXT, out).wait().hit_blocks == 4
        assert bytes(out[2]) == b"\x01" * BLOCK_BYTES
        assert bytes(out[3]) not in (b"\x02" * BLOCK_BYTES, bytes(views[3]))


def test_store_that_does_not_keep_up_costs_saves_and_no_time_or_memory(
    server: RunningServer, request: pytest.FixtureRequest
):
    room = 7
    lists_bytes = (5 + 10) * 128 * 8  # of tokens: they are memory too
    with cache_on(server, request.node.name, max_pending_save_bytes=room * BLOCK_BYTES + lists_bytes + 1) as cache:
        tokens = tokens_of(10)
        with stopped(server):
            savings = [cache.save_blocks(tokens, 0, memory(5), CONTEXT)]
            savings += [cache.save_blocks(tokens, 5, memory(5), CONTEXT)]  # two of these fit
            savings += [cache.save_blocks(tokens_of(3), 0, memory(3), CONTEXT) for _ in range(100)]
            assert cache.stats().unsaved_blocks == {"QUEUE_FULL": 3 + 300}
            assert [saving.done for saving in savings[:2]] == [False, False]
            assert all(saving.done for saving in savings[2:])  # nothing of them is held
        assert cache.flush(PATIENCE_S)
        assert cache.stats().stored_blocks == room
        # Those taken are the leading ones: they can be hit.
        assert cache.start_load(tokens, CONTEXT, memory(10)).wait().hit_blocks == room
        # And there is room again.
        assert cache.save_blocks(tokens, 7, memory(3), CONTEXT).wait(PATIENCE_S)
        assert cache.stats().stored_blocks == 10


def test_load_is_under_way_before_anybody_waits_for_it(server: RunningServer, request: pytest.FixtureRequest):
    tokens, views, out = tokens_of(3), memory(3), memory(3)
    with cache_on(server, request.node.name) as cache:
        assert cache.save_blocks(tokens, 0, views, CONTEXT).wait(PATIENCE_S)
        load = cache.start_load(tokens, CONTEXT, out)
        while not cache.stats().loaded_blocks:
            threading.Event().wait(0.005)
        assert [bytes(view) for view in out] == [bytes(view) for view in views]
        assert load.expect() == load.wait() == LoadedPrefix(3, 384)
        assert load.wait_layer(0)


@pytest.mark.parametrize("waiting", ["expect", "wait", "wait_layer", "cancel"])
def test_engine_waits_for_a_stopped_server_no_longer_than_the_budget(
    server: RunningServer, request: pytest.FixtureRequest, waiting: str
):
    with cache_on(server, request.node.name, budget_s=0.2) as cache:
        tokens, out = tokens_of(3), memory(3)
        before = [bytes(view) for view in out]
        with stopped(server):
            load = cache.start_load(tokens, CONTEXT, out)
            outcome = load.wait_layer(0) if waiting == "wait_layer" else getattr(load, waiting)()
            assert outcome in (None, False, LoadedPrefix())
            assert load.wait() == LoadedPrefix()
            assert sum(cache.stats().misses.values()) == 1
        assert [bytes(view) for view in out] == before


def test_stores_that_are_cut_off_cost_neither_hashing_nor_copies(
    server: RunningServer, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    with cache_on(server, request.node.name, budget_s=0.1) as cache:
        tokens, out = tokens_of(3), memory(3)
        with stopped(server):  # look-ups and puts fail, so no get is ever tried
            for _ in range(3):
                assert cache.start_load(tokens, CONTEXT, out).wait() == LoadedPrefix()
                cache.save_blocks(tokens, 0, out, CONTEXT).wait(PATIENCE_S)
            refused = cache.stats().misses.get("BREAKER_OPEN", 0)
            monkeypatch.setattr(cache._steps, "chain", lambda *_: pytest.fail("hashed"))
            assert cache.start_load(tokens, CONTEXT, out).wait() == LoadedPrefix()
            assert cache.stats().misses["BREAKER_OPEN"] == refused + 1
            uncopied, untouched = _Untouchable(), memoryview(bytearray(64 << 20))
            assert cache.save_blocks(uncopied, 0, out, CONTEXT).done  # type: ignore[arg-type]
            tracemalloc.start()
            try:
                assert cache.save_state(tokens[:-1], "window", untouched, CONTEXT).done
                assert tracemalloc.get_traced_memory()[1] < 1 << 20
            finally:
                tracemalloc.stop()
            assert cache.stats().unsaved_blocks["BREAKER_OPEN"] >= 4


class _Untouchable:
    """Tokens that nobody may look at."""

    def __getitem__(self, _: object) -> object:
        pytest.fail("tokens of a refused save were copied")


def test_more_loads_than_threads_miss_instead_of_queueing_for_ever(
    server: RunningServer, request: pytest.FixtureRequest
):
    released, begun = threading.Event(), threading.Semaphore(0)
    with cache_on(server, request.node.name, budget_s=0.2) as cache:
        real_match = cache._namespace.match

        def match(*arguments: Any, **options: Any) -> Any:
            begun.release()
            assert released.wait(PATIENCE_S)
            return real_match(*arguments, **options)

        cache._namespace.match = match  # type: ignore[method-assign]
        slow = [cache.start_load(tokens_of(2), CONTEXT, memory(2)) for _ in range(LOAD_THREADS)]
        for _ in slow:
            assert begun.acquire(timeout=PATIENCE_S)
        behind = [cache.start_load(tokens_of(2), CONTEXT, memory(2)) for _ in range(3)]
        assert [load.wait() for load in behind] == [LoadedPrefix()] * 3
        released.set()
        assert [load.wait() for load in slow] == [LoadedPrefix()] * len(slow)
        while cache.stats().requests < len(slow) + len(behind):
            threading.Event().wait(0.005)
        assert cache.stats().misses["LOADER_BUSY"] == len(behind)
    assert cache.stats().wait_s > 0


def test_loads_started_long_before_they_are_needed_are_not_thrown_away(
    server: RunningServer, request: pytest.FixtureRequest
):
    """They wait for their thread longer than the engine would; that counts only from when the engine waits."""
    tokens, count = tokens_of(2), 3 * LOAD_THREADS
    with cache_on(server, request.node.name, budget_s=0.3) as cache:
        assert cache.save_blocks(tokens, 0, memory(2), CONTEXT).wait(PATIENCE_S)
        assert cache.stats().stored_blocks == 2
        namespace = cache._namespace
        real_match = namespace.match

        def match(*arguments: Any, **options: Any) -> Any:
            threading.Event().wait(0.2)
            return real_match(*arguments, **options)

        namespace.match = match  # type: ignore[method-assign]
        loads = [cache.start_load(tokens, CONTEXT, memory(2)) for _ in range(count)]
        while cache.stats().requests < count:
            threading.Event().wait(0.01)
        assert [load.wait().hit_blocks for load in loads] == [2] * count


def test_forked_child_does_not_wait_for_what_its_parent_has_under_way(
    server: RunningServer, request: pytest.FixtureRequest
):
    with cache_on(server, request.node.name) as cache:
        load = Load([], part_of_layer=lambda _: 0, start_budget_s=PATIENCE_S, on_wait=lambda _: None)
        assert load.begin()
        saving = Pending()
        pid = os.fork()
        if pid == 0:
            signal.alarm(10)
            load.cancel()
            good = (load.wait(), load.expect(), load.wait_layer(0)) == (LoadedPrefix(), LoadedPrefix(), False)
            os._exit(0 if good and saving.done and saving.wait() else 1)
        assert os.waitpid(pid, 0)[1] == 0
        load.settle(LoadedPrefix(1, 128))
        assert load.wait() == LoadedPrefix(1, 128)
        assert not saving.done
        assert cache.flush(0)


def test_cancelled_load_leaves_the_memory_alone(server: RunningServer, request: pytest.FixtureRequest):
    tokens, views = tokens_of(3), memory(3)
    with cache_on(server, request.node.name) as cache:
        assert cache.save_blocks(tokens, 0, views, CONTEXT).wait(PATIENCE_S)
        for _ in range(50):
            out = memory(3)
            cache.start_load(tokens, CONTEXT, out).cancel()
            reused = [bytes(view) for view in out]
            assert cache.start_load(tokens, CONTEXT, memory(3)).wait().hit_blocks == 3
            assert [bytes(view) for view in out] == reused


def test_hit_is_computed_where_that_is_faster(server: RunningServer, request: pytest.FixtureRequest):
    rule = MeasuredBenefit()
    with connected(server, request.node.name, PATIENCE_S, benefit=rule) as (cache, client):
        tokens = tokens_of(3)
        assert cache.save_blocks(tokens, 0, memory(3), CONTEXT).wait(PATIENCE_S)
        assert cache.start_load(tokens, CONTEXT, memory(3)).wait().hit_blocks == 3
        assert rule.load_s(BLOCK_BYTES) is not None  # measured by that load
        cache.note_prefill(128, 1e-9)
        matches = client.stats().calls["match"]
        assert cache.start_load(tokens, CONTEXT, memory(3)).wait() == LoadedPrefix()
        assert client.stats().calls["match"] == matches  # not even looked up
        assert cache.stats().misses == {"NOT_WORTH_IT": 1}
        cache.note_prefill(12_800, 1e4)
        assert cache.start_load(tokens, CONTEXT, memory(3)).wait().hit_blocks == 3


def test_closed_cache_saves_nothing_loads_nothing_and_holds_nothing(
    server: RunningServer, request: pytest.FixtureRequest
):
    before = set(threading.enumerate())
    with cache_on(server, request.node.name) as cache:
        tokens = tokens_of(3)
        saving = cache.save_blocks(tokens, 0, memory(3), CONTEXT)
        assert cache.start_load(tokens, CONTEXT, memory(3)).wait().hit_blocks in (0, 3)
        cache.close(flush_s=PATIENCE_S)
        cache.close()
        assert saving.done
        assert cache.stats().stored_blocks == 3
        assert cache.save_blocks(tokens, 0, memory(3), CONTEXT).done
        assert cache.start_load(tokens, CONTEXT, memory(3)).wait() == LoadedPrefix()
        assert cache.stats().unsaved_blocks == {"CLIENT_CLOSED": 3}
        assert cache.stats().misses["CLIENT_CLOSED"] == 1
        names = {thread.name for thread in set(threading.enumerate()) - before}
        assert not any(name.startswith(("kvstore-save", "kvstore-load")) for name in names)


def test_close_gives_saves_under_way_their_time_and_drops_the_rest(
    server: RunningServer, request: pytest.FixtureRequest
):
    with cache_on(server, request.node.name, budget_s=0.3) as cache:
        with stopped(server):
            savings = [cache.save_blocks(tokens_of(1), 0, memory(1), CONTEXT) for _ in range(9)]
            cache.close(flush_s=0)
            assert all(saving.done for saving in savings)
        unsaved = cache.stats().unsaved_blocks
        assert unsaved.pop("CLIENT_CLOSED") >= 8
        assert cache.stats().stored_blocks + sum(unsaved.values()) <= 1


def test_forked_process_loads_and_saves_with_threads_of_its_own(server: RunningServer, request: pytest.FixtureRequest):
    with cache_on(server, request.node.name) as cache:
        tokens, views = tokens_of(3), memory(3)
        assert cache.save_blocks(tokens, 0, views, CONTEXT).wait(PATIENCE_S)
        assert cache.start_load(tokens, CONTEXT, memory(3)).wait().hit_blocks == 3
        pid = os.fork()
        if pid == 0:
            more = tokens_of(2)
            good = cache.save_blocks(more, 0, memory(2), CONTEXT).wait(PATIENCE_S)
            good &= cache.start_load(more, CONTEXT, memory(2)).wait().hit_blocks == 2
            good &= cache.start_load(tokens, CONTEXT, memory(3)).wait().hit_blocks == 3
            os._exit(0 if good else 1)
        assert os.waitpid(pid, 0)[1] == 0


def job(size_bytes: int) -> SaveJob:
    return SaveJob((), 0, [bytes(size_bytes)], size_bytes, CONTEXT)


# Layers 2 and 3 begin at 4,000, and 500 bytes of padding stand before them and at the end.
LAYOUT = BlockLayout(
    (BlockPart((0, 1), 0, 3500), BlockPart((2, 3), 4000, 3000), BlockPart((9,), 7000, 2500)), BLOCK_BYTES
)


def test_load_in_parts_brings_every_byte_one_range_of_layers_after_the_other(
    server: RunningServer, request: pytest.FixtureRequest
):
    tokens, views, out = tokens_of(5), memory(5), memory(5)
    with connected(server, request.node.name, PATIENCE_S, layout=LAYOUT) as (cache, client):
        assert cache.save_blocks(tokens, 0, views, CONTEXT).wait(PATIENCE_S)
        load = cache.start_load(tokens, CONTEXT, out)
        for layer, end in ((0, 4000), (1, 4000), (7, 4000), (2, 7000), (3, 7000), (9, 10_000)):
            assert load.wait_layer(layer)
            assert [bytes(view[:end]) for view in out] == [bytes(view[:end]) for view in views]
        assert load.wait() == LoadedPrefix(5, 640)
        assert client.stats().calls["get"] == 3
        assert cache.stats().loaded_blocks == 5


@pytest.mark.parametrize("bad_part", [0, 1, 2])
@pytest.mark.parametrize("bad_block", [0, 2, 4])
def test_block_of_which_one_part_did_not_come_ends_the_hit(
    server: RunningServer, request: pytest.FixtureRequest, bad_part: int, bad_block: int
):
    tokens, views, out = tokens_of(5), memory(5), memory(5)
    with cache_on(server, request.node.name, layout=LAYOUT) as cache:
        assert cache.save_blocks(tokens, 0, views, CONTEXT).wait(PATIENCE_S)
        namespace, asked = cache._namespace, []
        real_get = namespace.get

        def get(chain: Any, buffers: list[memoryview], *, block_count: int, **options: Any) -> GetResult:
            asked.append(block_count)
            result = real_get(chain, buffers, block_count=block_count, **options)
            if len(asked) - 1 != bad_part:
                return result
            return replace(
                result, statuses=[*result.statuses[:bad_block], "CORRUPT", *result.statuses[bad_block + 1 :]]
            )

        namespace.get = get  # type: ignore[method-assign]
        load = cache.start_load(tokens, CONTEXT, out)
        assert load.expect() == LoadedPrefix(5, 640)
        assert not load.wait_layer(9)
        assert load.wait() == LoadedPrefix(bad_block, bad_block * 128)
        assert [bytes(view) for view in out[:bad_block]] == [bytes(view) for view in views[:bad_block]]
        # The parts behind are asked for only of the blocks that still count.
        after = [bad_block] * (2 - bad_part) if bad_block else []
        assert asked == [5] * (bad_part + 1) + after
        assert cache.stats().misses == {"CORRUPT": 1}


@pytest.mark.parametrize("replaced", [0, 2, 4])
@pytest.mark.parametrize("before_part", [1, 2])
def test_block_that_is_put_anew_between_its_parts_ends_the_hit(
    server: RunningServer, request: pytest.FixtureRequest, before_part: int, replaced: int
):
    """Its parts are sound, each by itself, and under the lease of the match; together they are nobody's block."""
    tokens, views, out = tokens_of(5), memory(5), memory(5)
    with cache_on(server, request.node.name, layout=LAYOUT) as cache:
        assert cache.save_blocks(tokens, 0, views, CONTEXT).wait(PATIENCE_S)
        namespace, calls = cache._namespace, []
        chain, real_get = namespace.chain(tokens), namespace.get

        def get(*arguments: Any, **options: Any) -> GetResult:
            calls.append(options["part"])
            if len(calls) - 1 == before_part:
                assert namespace.delete(chain, first_block=replaced, block_count=1).deleted_blocks == 1
                assert namespace.put(chain.first(replaced + 1), memory(1), first_block=replaced).stored == 1
            return real_get(*arguments, **options)

        namespace.get = get  # type: ignore[method-assign]
        assert cache.start_load(tokens, CONTEXT, out).wait() == LoadedPrefix(replaced, replaced * 128)
        assert [bytes(view) for view in out[:replaced]] == [bytes(view) for view in views[:replaced]]
        assert cache.stats().misses == {"REPLACED": 1}


def test_store_too_slow_for_all_parts_is_found_slow(server: RunningServer, request: pytest.FixtureRequest):
    tokens, out, benefit = tokens_of(5), memory(5), MeasuredBenefit()
    with cache_on(server, request.node.name, layout=LAYOUT, benefit=benefit) as cache:
        assert cache.save_blocks(tokens, 0, memory(5), CONTEXT).wait(PATIENCE_S)
        namespace, asked = cache._namespace, []
        real_get = namespace.get

        def get(*arguments: Any, **options: Any) -> GetResult:
            asked.append(options["part"])
            if len(asked) == 1:
                return real_get(*arguments, **options)
            return GetResult(["DEADLINE"] * 5, Failure("DEADLINE", ""))

        namespace.get = get  # type: ignore[method-assign]
        cache.note_prefill(1_000_000, 1e-6)
        assert cache.start_load(tokens, CONTEXT, out).wait() == LoadedPrefix()
        assert cache.start_load(tokens, CONTEXT, out).wait() == LoadedPrefix()
        assert cache.stats().misses == {"DEADLINE": 1, "NOT_WORTH_IT": 1}
        assert len(asked) == 2


def test_layout_of_other_blocks_is_refused(server: RunningServer, request: pytest.FixtureRequest):
    with (
        pytest.raises(ValueError, match="12 bytes, the engine's have 10000"),
        cache_on(server, request.node.name, layout=BlockLayout.uniform(3, 4)),
    ):
        pass


def new_load(start_budget_s: float) -> Load:
    return Load([], part_of_layer=lambda _: 0, start_budget_s=start_budget_s, on_wait=lambda _: None)


def test_load_that_no_thread_begins_in_time_is_a_miss_and_stays_one():
    load = new_load(0.01)
    assert load.wait() == LoadedPrefix()
    assert not load.begin()
    assert load.end_reason == "LOADER_BUSY"


def test_cancel_returns_only_when_nothing_writes_any_more():
    load, order = new_load(PATIENCE_S), []
    assert load.begin()

    def fetch() -> None:
        while not load.given_up:
            threading.Event().wait(0.001)
        threading.Event().wait(0.05)
        order.append("last write")
        load.settle(LoadedPrefix())

    thread = threading.Thread(target=fetch)
    thread.start()
    load.cancel()
    order.append("cancelled")
    thread.join()
    assert order == ["last write", "cancelled"]


def test_part_that_came_before_the_load_fell_short_is_not_vouched_for():
    load = new_load(PATIENCE_S)
    assert load.begin()
    load.promise(LoadedPrefix(3, 384))
    load.part_there()
    assert load.wait_layer(0)
    load.settle(LoadedPrefix(1, 128))
    assert not load.wait_layer(0)
    assert (load.expect(), load.wait()) == (LoadedPrefix(3, 384), LoadedPrefix(1, 128))


def test_queue_that_was_stopped_meanwhile_gives_a_job_back():
    dropped: list[SaveJob] = []
    queue = SaveQueue(100, lambda _: None, dropped.append)
    late = job(10 * queue.reserve(1, 10))
    queue.stop(0)
    queue.offer(late)
    assert (dropped, late.pending.done, queue.pending_bytes) == ([late], True, 0)


def test_flush_waits_for_what_came_before_it_only():
    turns = threading.Semaphore(0)
    queue = SaveQueue(1000, lambda _: bool(turns.acquire(timeout=PATIENCE_S)) or None, lambda _: None)
    first, second = (job(10 * queue.reserve(1, 10)) for _ in range(2))
    queue.offer(first)
    late = threading.Timer(0.1, lambda: (queue.offer(second), turns.release()))
    late.start()
    assert queue.flush(PATIENCE_S)
    assert (first.pending.done, second.pending.done) == (True, False)
    assert not queue.flush(0)
    turns.release()
    late.join()
    queue.stop(PATIENCE_S)


def test_queue_never_holds_more_than_it_may():
    release, most = threading.Event(), 0
    queue = SaveQueue(100, lambda _: bool(release.wait(PATIENCE_S)) or None, lambda _: None)
    for number in range(50):
        taken = 10 * queue.reserve(3, 10)
        most = max(most, queue.pending_bytes)
        if taken:
            queue.offer(job(taken))
        assert taken == (30 if number < 3 else 10 if number == 3 else 0)
    assert most == 100
    release.set()
    assert queue.flush(PATIENCE_S)
    assert queue.pending_bytes == 0
    queue.stop(0)


def test_thread_ends_when_there_is_nothing_to_store_and_comes_back():
    before = set(threading.enumerate())
    queue = SaveQueue(100, lambda _: None, lambda _: None, idle_s=0.05)
    for _ in range(3):
        one = job(10 * queue.reserve(1, 10))
        queue.offer(one)
        assert one.pending.wait(PATIENCE_S)
        while set(threading.enumerate()) - before:
            threading.Event().wait(0.005)
    queue.stop(0)


def test_jobs_are_stored_in_order_and_give_their_room_back():
    stored: list[int] = []
    queue = SaveQueue(100, lambda one: stored.append(one.size_bytes), lambda _: None)
    jobs = [job(size * queue.reserve(1, size)) for size in (10, 20, 30)]
    for one in jobs:
        queue.offer(one)
    assert queue.flush(PATIENCE_S)
    assert (stored, [one.pending.done for one in jobs]) == ([10, 20, 30], [True] * 3)
    queue.stop(0)
    assert queue.reserve(1, 1) == 0
