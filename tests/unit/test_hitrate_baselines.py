"""LRU, FIFO and Belady's policy against the same written block by block, and against the values known of public traces."""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvstore_bench.hitrate.baselines import belady, fifo, hit_share, lru, unlimited
from kvstore_bench.hitrate.chains import ChainCollector
from kvstore_bench.hitrate.engine_replay import replay_in_engine
from kvstore_bench.hitrate.misses import (
    BROKEN,
    EVICTED,
    EXPIRED,
    FIRST_SEEN,
    TAIL,
    Misses,
    changed_prefixes,
    explain_misses,
)
from kvstore_bench.hitrate.settings import ReplaySettings
from kvstore_bench.hitrate.sources import TRACES_VARIABLE, SourceOptions, load_workload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore_bench.hitrate.workload import Workload

# A chain is a walk down a tree: at each step one of three ways. A prompt and an answer make one.
TALKS = st.lists(st.tuples(st.text("abc", max_size=6), st.text("abc", max_size=3)), min_size=1, max_size=25)


def made(walks: Sequence[str], **fields: Sequence[float]) -> Workload:
    """One request a second, whose blocks are the prefixes of its walk; it asks for all of them, or for so many as `asked` says."""
    asked = [int(blocks) for blocks in fields.get("asked", [len(walk) for walk in walks])]
    chains = ChainCollector(["agent", "chatbot"])
    for second, walk in enumerate(walks):
        chains.add(
            fields.get("times", range(len(walks)))[second],
            int(fields.get("tokens", [blocks * 10 + 3 for blocks in asked])[second]),
            [walk[: end + 1] for end in range(len(walk))],
            class_id=int(fields.get("classes", [0] * len(walks))[second]),
            session=int(fields.get("sessions", [-1] * len(walks))[second]),
        )
    return replace(chains.workload("walks", 10, {}), asked_blocks=np.array(asked, dtype=np.int32))


def made_of_talks(talks: Sequence[tuple[str, str]]) -> Workload:
    return made([prompt + answer for prompt, answer in talks], asked=[len(prompt) for prompt, _ in talks])


def leading(chain: Sequence[int], present: Sequence[int] | OrderedDict[int, None]) -> int:
    return next((i for i, block in enumerate(chain) if block not in present), len(chain))


def queued(workload: Workload, capacity: int, *, moves: bool) -> list[int]:
    """LRU, or FIFO: blocks one by one from a chain's end; used ones move to the queue's end, or do not."""
    queue: OrderedDict[int, None] = OrderedDict()
    hits = []
    for request in range(workload.requests):
        chain = workload.chain(request).tolist()
        hits.append(leading(workload.asked(request).tolist(), queue))
        if moves:
            for block in reversed(chain):
                queue.pop(block, None)
                queue[block] = None
            while len(queue) > capacity:
                queue.popitem(last=False)
            continue
        for block in reversed(chain):
            if block not in queue:
                if len(queue) >= capacity:
                    queue.popitem(last=False)
                queue[block] = None
    return hits


def clairvoyant(workload: Workload, capacity: int) -> list[int]:
    """Keeps what is used soonest, in a prompt or an answer; of one request the beginning."""
    chains = [workload.chain(request).tolist() for request in range(workload.requests)]
    kept: list[int] = []
    hits = []
    for request, chain in enumerate(chains):
        hits.append(leading(workload.asked(request).tolist(), kept))

        def next_use(block: int, after: int = request) -> tuple[int, int]:
            user = next((r for r in range(after + 1, len(chains)) if block in chains[r]), len(chains))
            return user, chains[user].index(block) if user < len(chains) else 0

        wanted = {*kept, *chain}
        kept = sorted((b for b in wanted if next_use(b)[0] < len(chains)), key=next_use)[:capacity]
    return hits


@given(TALKS, st.integers(1, 12))
@settings(deadline=None)
def test_fast_policies_hit_what_slow_ones_hit(talks, capacity):
    assume(any(prompt + answer for prompt, answer in talks))
    workload = made_of_talks(talks)
    assert lru(workload, capacity).tolist() == queued(workload, capacity, moves=True)
    assert fifo(workload, capacity).tolist() == queued(workload, capacity, moves=False)
    assert belady(workload, capacity).tolist() == clairvoyant(workload, capacity)


@given(TALKS)
@settings(deadline=None)
def test_with_room_for_all_every_policy_hits_what_was_there_before(talks):
    assume(any(prompt + answer for prompt, answer in talks))
    workload = made_of_talks(talks)
    room = max(1, workload.unique_blocks)
    expected = unlimited(workload).tolist()
    for policy in (lru, fifo, belady):
        assert policy(workload, room).tolist() == expected


def missed(workload: Workload, hits: Sequence[int], ttls_s: Sequence[float]) -> Misses:
    return explain_misses(workload, np.array(hits), ttls_s, changed_prefixes(workload))


def in_engine(workload: Workload, scratch: Path, ttl_s: int) -> list[int]:
    room = ReplaySettings(4 << 20, 512, 64 << 10, {"agent": ttl_s, "chatbot": ttl_s})
    return replay_in_engine(workload, room, scratch)[0].tolist()


def test_answer_stored_when_made_is_hit_by_the_next_turn(tmp_path):
    # The second request continues the answer to the first, the third that to the second; then the first one comes again, and is
    # answered with blocks that are there. The last prompt has no full block.
    walks, asked = ["abcd", "abcdef", "abcdefg", "abcd", "x"], [2, 5, 7, 2, 0]
    workload, unanswered = made(walks, asked=asked), made([w[:n] for w, n in zip(walks, asked, strict=True)])
    policies = [unlimited, lambda w: lru(w, 8), lambda w: fifo(w, 8), lambda w: belady(w, 8)]
    for policy in policies:
        assert policy(workload).tolist() == [0, 4, 6, 2, 0]
        assert policy(unanswered).tolist() == [0, 2, 5, 2, 0]
    assert in_engine(workload, tmp_path / "answered", 3600) == [0, 4, 6, 2, 0]
    assert in_engine(unanswered, tmp_path / "unanswered", 3600) == [0, 2, 5, 2, 0]


def test_blocks_that_an_answer_has_again_live_on(tmp_path):
    workload = made(["ab", "ab", "ab"], asked=[2, 1, 2], times=[0, 600, 1200])
    assert unlimited(workload, [900, 900]).tolist() == [0, 1, 2]
    assert lru(workload, 2).tolist() == [0, 1, 2]
    assert in_engine(workload, tmp_path, 900) == [0, 1, 2]
    assert missed(workload, [0, 1, 0], [900, 900]).by_cause()[EVICTED] == 20


@pytest.mark.parametrize("asked", [[3], [-1], [1, 1]])
def test_request_asks_for_the_beginning_of_its_chain(asked):
    with pytest.raises(AssertionError):
        replace(made(["ab"]), asked_blocks=np.array(asked, dtype=np.int32))


def test_ttl_counts_from_the_last_use_by_the_class_that_keeps_longest():
    workload = made(["ab", "a", "ab", "ab"], times=[0, 5, 11, 25], classes=[0, 1, 0, 0])
    # Class 0 keeps for 10 s, class 1 for 20: "a" lives to 25, "ab" to 10 and then to 21.
    assert unlimited(workload, [10, 20]).tolist() == [0, 1, 1, 0]
    assert unlimited(workload, [11.5, 20.5]).tolist() == [0, 1, 2, 1]


def test_hit_rate_is_of_input_tokens_of_measured_requests():
    workload = made(["ab", "abc", "abc"], tokens=[25, 38, 38])
    assert hit_share(workload, unlimited(workload)) == pytest.approx((0 + 20 + 30) / (25 + 38 + 38))


def test_last_block_that_is_not_full_counts_for_what_it_holds():
    workload = made(["ab", "ab"], tokens=[14, 14])
    assert hit_share(workload, unlimited(workload)) == pytest.approx(0.5)
    assert sum(missed(workload, [0, 1], [9.0, 9.0]).by_cause().values()) == 14 + 4


def test_missed_tokens_are_split_by_cause():
    walks = ["abc", "abd", "abd", "abcd", "x"]
    workload = made(walks, times=[0, 1, 2, 100, 101], tokens=[33, 30, 30, 40, 10], sessions=[1, 1, 2, 2, 3])
    # The third hits all; the fourth comes when all has expired but "ab", as its TTL says, and finds "a" alone.
    misses = missed(workload, [0, 2, 3, 1, 0], [98.5, 1.0])
    assert changed_prefixes(workload).tolist() == [0, 3, 0, 3, 0]
    assert misses.by_cause(0) == {FIRST_SEEN: 30 + 10 + 10, BROKEN: 10, EXPIRED: 10, EVICTED: 10, TAIL: 3}
    assert sum(misses.by_cause(1).values()) == 0


def test_answers_are_not_missed_but_their_blocks_are_known():
    # The second leaves what the first was answered with; the third comes when all has expired, "d" of the first answer as well.
    workload = made(["abcd", "abce", "abcdf"], asked=[2, 4, 4], times=[0, 1, 200], sessions=[1, 1, 2])
    misses = missed(workload, [0, 3, 0], [100.0, 100.0])
    assert misses.by_cause() == {FIRST_SEEN: 20, BROKEN: 10, EXPIRED: 40, EVICTED: 0, TAIL: 9}


@pytest.mark.parametrize("asked", [[3, 3, 3, 1], [1, 2, 3, 0]])
def test_missed_tokens_and_hits_make_up_the_measured_input(asked):
    workload = made(["abc", "abd", "aab", "b"], asked=asked)
    tokens = workload.input_tokens.sum()
    for policy in (lru, fifo, belady):
        hits = policy(workload, 3)
        tokens_missed = sum(missed(workload, hits, [2.0, 2.0]).by_cause().values())
        assert tokens_missed + hit_share(workload, hits) * tokens == pytest.approx(tokens)


KNOWN = {
    "conversation": (12_031, 144.8e6, 182_790, 37.4, [28.4, 25.3, 37.4]),
    "synthetic": (3_993, 61.2e6, 43_924, 65.1, [26.7, 25.2, 51.6]),
    "claude_code": (46_218, 5.467e9, 1_548_625, 96.3, [95.2, None, 96.3]),
}


@pytest.mark.parametrize("name", KNOWN)
def test_public_trace_gives_the_values_known_of_it(name):
    """Source: the traces' README; hit rates without limit and at 10 % of the unique blocks, by LRU, FIFO and Belady."""
    directory = os.environ.get(TRACES_VARIABLE)
    if not directory:
        pytest.skip(f"{TRACES_VARIABLE} does not say where public traces lie")
    workload = load_workload(
        name, Path(name), SourceOptions(Path(directory), 1, 128, "agent", None), lambda share: None
    )
    requests, tokens, blocks, ceiling, at_a_tenth = KNOWN[name]
    assert (workload.requests, workload.unique_blocks) == (requests, blocks)
    assert workload.input_tokens.sum() == pytest.approx(tokens, rel=5e-4)
    assert percent(workload, unlimited) == pytest.approx(ceiling, abs=0.051)
    tenth = workload.unique_blocks // 10
    for policy, known in zip((lru, fifo, belady), at_a_tenth, strict=True):
        if known is not None:
            assert percent(workload, policy, tenth) == pytest.approx(known, abs=0.051), policy.__name__


def percent(workload: Workload, policy: Callable[..., np.ndarray], *room: int) -> float:
    return 100 * hit_share(workload, policy(workload, *room))


def test_tokens_that_a_last_block_lacks_are_taken_from_its_own_cause():
    workload = made(["abc", "x", "abcd"], tokens=[30, 10, 31])
    misses = missed(workload, [0, 0, 0], [9.0, 9.0])
    assert misses.by_cause() == {FIRST_SEEN: 40 + 1, BROKEN: 0, EXPIRED: 0, EVICTED: 30, TAIL: 0}
