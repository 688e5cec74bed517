"""Block ids as the prefix hashes that stand for them in a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore_api.chain import Chain
from kvstore_api.limits import HASH_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray


class PrefixHashes:
    """A prefix hash for each block id, the same in every run."""

    def __init__(self, unique_blocks: int) -> None:
        data = np.random.default_rng(unique_blocks).bytes(unique_blocks * HASH_BYTES)
        self._table = np.frombuffer(data, dtype=f"V{HASH_BYTES}")

    def chain(self, blocks: NDArray[np.int32]) -> Chain:
        """The chain of these ids."""
        return Chain(self._table[blocks].tobytes())
