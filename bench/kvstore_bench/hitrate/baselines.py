"""What other policies reach with the same room, block by block: no limit at all, LRU, FIFO, and Belady's, who knows the future.

All count as the store does: a request hits the leading blocks that are there, of those that it asks for, and its whole chain is
there afterwards, the answer's blocks included. A chain is inserted and touched from its end to its beginning, so that what is
dropped first is its end.

LRU and Belady are fast because blocks go in intervals. Whoever uses a block uses all before it; so the blocks whose last user
is request q are a stretch of q's chain, and so are those whose next user is q. What is dropped is cut off that stretch's end.
"""

from __future__ import annotations

import heapq
from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvstore_bench.hitrate.workload import Workload


def hit_share(workload: Workload, hit_blocks: NDArray[np.int64]) -> float:
    """The hit rate of a replay: hit tokens ÷ input tokens, of the measured requests.

    Args: hit_blocks: shape (requests,): leading blocks that each found, of those that it asked for.
    """
    assert (hit_blocks <= workload.asked_blocks).all(), "nobody hits what they do not ask for"
    counted = workload.measured
    tokens = np.minimum(hit_blocks * workload.block_tokens, workload.input_tokens)
    return float(tokens[counted].sum() / max(1, workload.input_tokens[counted].sum()))


def leading(present: NDArray[np.bool_]) -> int:
    """How many are true before the first that is not."""
    return len(present) if present.all() else int(np.argmin(present))


def unlimited(workload: Workload, ttls_s: Sequence[float] | None = None) -> NDArray[np.int64]:
    """Hits with room for everything. Shape (requests,).

    Args: ttls_s: by class: after its last use by the class a block is kept for so long; None: for ever.
    """
    hits = np.zeros(workload.requests, dtype=np.int64)
    ends_s = np.full(workload.unique_blocks, -np.inf)
    ttls = [np.inf] * len(workload.classes) if ttls_s is None else ttls_s
    for request, now_s in enumerate(workload.time_s):
        chain = workload.chain(request)
        hits[request] = leading(ends_s[workload.asked(request)] > now_s)
        ends_s[chain] = np.maximum(ends_s[chain], now_s + ttls[workload.class_id[request]])
    return hits


def lru(workload: Workload, capacity_blocks: int) -> NDArray[np.int64]:
    """Hits when the block goes that was used longest ago, of one chain the last. Shape (requests,)."""
    hits = np.zeros(workload.requests, dtype=np.int64)
    user = np.full(workload.unique_blocks, -1, dtype=np.int32)  # the last one, of those that are there
    ends = np.zeros(workload.requests, dtype=np.int64)  # a request's own blocks reach at most so far
    size = oldest = 0
    for request in range(workload.requests):
        chain = workload.chain(request)
        there = leading(user[chain] >= 0)  # all that are: a chain loses its end first
        hits[request] = min(there, workload.asked_blocks[request])
        size += len(chain) - there
        user[chain], ends[request] = request, len(chain)
        while size > capacity_blocks:
            own = workload.chain(oldest)[: ends[oldest]]
            own = own[user[own] == oldest]
            dropped = own[max(0, len(own) - (size - capacity_blocks)) :]
            user[dropped] = -1
            size -= len(dropped)
            ends[oldest] -= len(dropped)
            if len(dropped) == len(own):
                oldest += 1
    return hits


def fifo(workload: Workload, capacity_blocks: int) -> NDArray[np.int64]:
    """Hits when the block goes that came first. Shape (requests,).

    Blocks come one by one; one of the chain itself that had to go for another of it comes again in its turn.
    """
    hits = np.zeros(workload.requests, dtype=np.int64)
    present = np.zeros(workload.unique_blocks, dtype=bool)
    queue: deque[int] = deque()
    for request in range(workload.requests):
        chain = workload.chain(request)[::-1]
        hits[request] = leading(present[workload.asked(request)])
        new = chain[~present[chain]].tolist()
        for block in _that_come(chain, new, queue, capacity_blocks):
            if present[block]:
                continue
            if len(queue) >= capacity_blocks:
                present[queue.popleft()] = False
            present[block] = True
            queue.append(block)
    return hits


def _that_come(chain: NDArray[np.int32], new: list[int], queue: deque[int], capacity_blocks: int) -> Sequence[int]:
    """Those that are missing now; all of the chain if some of it may have to go for them."""
    going = len(queue) + len(new) - capacity_blocks
    if going <= 0:
        return new
    first = np.fromiter((queue[i] for i in range(min(going, len(queue)))), dtype=np.int32)
    return chain.tolist() if len(new) > len(queue) or np.isin(first, chain).any() else new


def belady(workload: Workload, capacity_blocks: int) -> NDArray[np.int64]:
    """Hits when the block goes whose next use is the latest, and what is never used again is not kept. Shape (requests,).

    A use is a use, in an answer too: blocks for a prompt and for the answer behind it are kept alike, so that next uses ascend
    along a chain. Answers whose blocks never come twice, as the generator's, are never used but in prompts.
    Source: L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966.
    """
    hits = np.zeros(workload.requests, dtype=np.int64)
    next_use = _next_uses(workload)
    present = np.zeros(workload.unique_blocks, dtype=bool)
    kept = _KeptFor(workload.requests)
    size = 0
    for request in range(workload.requests):
        chain = workload.chain(request)
        there = leading(present[chain])
        hits[request] = min(there, workload.asked_blocks[request])
        size -= there  # those that are there were there for this request
        present[chain[:there]] = False
        kept.forget(request)
        uses = next_use[workload.starts[request] : workload.starts[request + 1]]
        again = int(np.searchsorted(uses, workload.requests))
        kept.keep(uses[:again])
        present[chain[:again]] = True
        size += again
        while size > capacity_blocks:
            user, first, end = kept.latest(size - capacity_blocks)
            present[workload.chain(user)[first:end]] = False
            size -= end - first
    return hits


def _next_uses(workload: Workload) -> NDArray[np.int32]:
    """Shape (len(blocks),): the next request whose chain has the block; as many as there are: none. Ascending in a chain."""
    next_use = np.empty(len(workload.blocks), dtype=np.int32)
    coming = np.full(workload.unique_blocks, workload.requests, dtype=np.int32)
    for request in range(workload.requests - 1, -1, -1):
        chain = workload.chain(request)
        next_use[workload.starts[request] : workload.starts[request + 1]] = coming[chain]
        coming[chain] = request
    return next_use


class _KeptFor:
    """Which stretch of each future request's chain is kept for it, the latest request first."""

    def __init__(self, requests: int) -> None:
        self._firsts = np.zeros(requests, dtype=np.int64)
        self._ends = np.zeros(requests, dtype=np.int64)
        self._latest: list[int] = []  # a heap of negative numbers

    def forget(self, request: int) -> None:
        """The request is there: nothing is kept for it any more."""
        self._ends[request] = self._firsts[request] = 0

    def keep(self, users: NDArray[np.int32]) -> None:
        """Keep the beginning of a chain. Args: users: of each block, ascending."""
        edges = [0, *(np.flatnonzero(np.diff(users)) + 1).tolist(), len(users)] if len(users) else [0]
        for first, end in pairwise(edges):
            user = int(users[first])
            if self._ends[user] > self._firsts[user]:
                first, end = min(first, int(self._firsts[user])), max(end, int(self._ends[user]))
            else:
                heapq.heappush(self._latest, -user)
            self._firsts[user], self._ends[user] = first, end

    def latest(self, blocks_max: int) -> tuple[int, int, int]:
        """Give up blocks kept for the latest user: which, and the stretch of its chain that goes."""
        while self._ends[-self._latest[0]] <= self._firsts[-self._latest[0]]:
            heapq.heappop(self._latest)
        user = -self._latest[0]
        end = int(self._ends[user])
        first = max(int(self._firsts[user]), end - blocks_max)
        self._ends[user] = first
        return user, first, end
