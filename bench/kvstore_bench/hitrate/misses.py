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
_ORDER: Final = {cause: number for number, cause in enumerate(CAUSES)}


@dataclass(frozen=True, slots=True)
class Misses:
    """Tokens by cause. `tokens`: shape (classes, causes), of the measured requests, causes in the order of `CAUSES`."""

    tokens: NDArray[np.int64]

    def by_cause(self, class_id: int | None = None) -> dict[str, int]:
        """Of all classes, or of one."""
        row = self.tokens.sum(axis=0) if class_id is None else self.tokens[class_id]
        return dict(zip(CAUSES, row.tolist(), strict=True))


def explain_misses(
    workload: Workload, hit_blocks: NDArray[np.int64], ttls_s: Sequence[float], changed: NDArray[np.int64]
) -> Misses:
    """Split missed tokens by cause.

    Args:
        hit_blocks: shape (requests,): leading blocks that each request found, of those it asked for.
        ttls_s: by class, refreshed by use.
        changed: of the workload's `changed_prefixes`.
    """
    tokens = np.zeros((len(workload.classes), len(CAUSES)), dtype=np.int64)
    ends_s = np.full(workload.unique_blocks, -np.inf)  # never asked for
    for request, now_s in enumerate(workload.time_s.tolist()):
        class_id, hit = workload.class_id[request], int(hit_blocks[request])
        if now_s >= workload.measured_from_s:
            ends = ends_s[workload.asked(request)[hit:]]
            causes = _causes(ends, now_s, changed[request] - hit)
            tokens[class_id] += _as_tokens(workload, request, hit, causes)
        chain = workload.chain(request)
        ends_s[chain] = np.maximum(ends_s[chain], now_s + ttls_s[class_id])
    return Misses(tokens)


def _causes(ends_s: NDArray[np.float64], now_s: float, changed: int) -> NDArray[np.intp]:
    """Shape (blocks,): which of `CAUSES`. Args: changed: leading blocks where the conversation had others before."""
    is_new = np.isneginf(ends_s)
    causes = np.where(is_new, _ORDER[FIRST_SEEN], np.where(ends_s <= now_s, _ORDER[EXPIRED], _ORDER[EVICTED]))
    causes[is_new & (np.arange(len(ends_s)) < changed)] = _ORDER[BROKEN]
    return causes


def _as_tokens(workload: Workload, request: int, hit: int, causes: NDArray[np.intp]) -> NDArray[np.int64]:
    """Missed blocks as tokens by cause. What no block holds is the tail; a last block that is not full counts for what it holds."""
    tokens = np.bincount(causes, minlength=len(CAUSES)) * workload.block_tokens
    rest = int(workload.input_tokens[request]) - workload.tokens_of(request, hit) - int(tokens.sum())
    tokens[causes[-1] if rest < 0 else _ORDER[TAIL]] += rest
    return tokens


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
