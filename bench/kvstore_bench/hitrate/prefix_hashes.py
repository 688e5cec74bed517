"""Block ids as the prefix hashes that stand for them in a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.dropped import tags_of
from kvstore_api.chain import Chain
from kvstore_api.limits import HASH_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore_bench.hitrate.workload import Workload


class PrefixHashes:
    """A prefix hash for each block id, the same in every run."""

    def __init__(self, unique_blocks: int) -> None:
        data = np.random.default_rng(unique_blocks).bytes(unique_blocks * HASH_BYTES)
        self._table = np.frombuffer(data, dtype=f"V{HASH_BYTES}")

    @property
    def tags(self) -> NDArray[np.uint64]:
        """Shape (unique blocks,): what `kvstore.dropped` knows them by."""
        return tags_of(self._table.tobytes())

    def chains(self, workload: Workload, request: int) -> tuple[Chain, Chain]:
        """The chain of a request, its answer included, and the part of it that the prompt asks for."""
        chain = Chain(self._table[workload.chain(request)].tobytes())
        return chain, chain.first(int(workload.asked_blocks[request]))
