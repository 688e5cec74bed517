"""Why tokens were missed, told from outside: from the requests, the TTLs and how much each request hit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore_bench.hitrate.baselines import leading
from kvstore_bench.hitrate.workload import NO_SESSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvstore_bench.hitrate.workload import Workload

FIRST_SEEN: Final = "first_seen"
BROKEN: Final = "prefix_broken"
EXPIRED: Final = "expired"
EVICTED: Final = "evicted"
TAIL: Final = "no_full_block"
CAUSES: Final = {
    FIRST_SEEN: "nobody had asked for the block before, or been answered with it",
    BROKEN: "new as well, in a place where the conversation's request before had another block: its prefix was changed",
    EXPIRED: "its time to live had passed",
    EVICTED: "it was dropped to make room, or stands behind one that was",
    TAIL: "tokens behind a prompt's last full block, which has no name",
}


@dataclass(frozen=True, slots=True)
class Misses:
    """Tokens by cause. `tokens`: shape (classes, causes), of the measured requests, causes in the order of `CAUSES`."""

    tokens: NDArray[np.int64]

    def by_cause(self, class_id: int | None = None) -> dict[str, int]:
        """Of all classes, or of one."""
        row = self.tokens.sum(axis=0) if class_id is None else self.tokens[class_id]
        return dict(zip(CAUSES, row.tolist(), strict=True))


def explain_misses(workload: Workload, hit_blocks: NDArray[np.int64], ttls_s: Sequence[float]) -> Misses:
    """Split missed tokens of prompts by cause.

    Args:
        hit_blocks: shape (requests,): leading blocks that each request found, of those that it asked for.
        ttls_s: by class, refreshed by use.
    """
    tokens = np.zeros((len(workload.classes), len(CAUSES)), dtype=np.int64)
    ends_s = np.full(workload.unique_blocks, -np.inf)  # never stored
    changed = changed_prefixes(workload)
    for request, now_s in enumerate(workload.time_s.tolist()):
        chain, asked, hit = workload.chain(request), workload.asked(request), int(hit_blocks[request])
        class_id = workload.class_id[request]
        if now_s >= workload.measured_from_s:
            ends = ends_s[asked[hit:]]
            is_new = np.isneginf(ends)
            is_changed = is_new & (np.arange(hit, len(asked)) < changed[request])
            is_expired = ~is_new & (ends <= now_s)
            counts = [
                (is_new & ~is_changed).sum(),
                is_changed.sum(),
                is_expired.sum(),
                (~is_new & ~is_expired).sum(),
                0,
            ]
            tokens[class_id] += _as_tokens(workload, request, hit, counts)
        ends_s[chain] = np.maximum(ends_s[chain], now_s + ttls_s[class_id])
    return Misses(tokens)


def _as_tokens(workload: Workload, request: int, hit: int, counts: Sequence[int]) -> NDArray[np.int64]:
    """Blocks by cause as tokens; what no block holds is the tail, and a last block that is not full counts for what it holds."""
    missed = np.array(counts, dtype=np.int64) * workload.block_tokens
    rest = int(workload.input_tokens[request]) - workload.tokens_of(request, hit) - int(missed.sum())
    if rest < 0:
        missed[np.flatnonzero(missed)[-1]] += rest
    else:
        missed[-1] = rest
    return missed


def changed_prefixes(workload: Workload) -> NDArray[np.int64]:
    """Shape (requests,): blocks up to the end of the conversation's request before, where this one leaves its chain; else 0.

    The request before ends with its answer, if the workload has that.
    """
    changed = np.zeros(workload.requests, dtype=np.int64)
    before: dict[int, int] = {}
    for request, session in enumerate(workload.session.tolist()):
        if session == NO_SESSION:
            continue
        if session in before:
            old, new = workload.chain(before[session]), workload.asked(request)
            common = min(len(old), len(new))
            if leading(old[:common] == new[:common]) < len(old):
                changed[request] = len(old)
        before[session] = request
    return changed
