"""What is put and got: random blocks behind chains of random tokens, all of it from one seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore_api.limits import BLOCK_TOKENS
from kvstore_api.namespace import NamespaceSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore_api.chain import Chain
    from kvstore_client import NamespaceHandle

# The length of a chain: 1,024 blocks are a context of 131,072 tokens. Every request carries the hashes up to its last block.
CHAIN_BLOCKS = 1024
_VOCABULARY = 128_000

# A slow moment of the machine must show as a slow batch, not as a miss: the engine's budget is not what is measured.
CALL_BUDGET_S = 60.0


class VerificationError(RuntimeError):
    """An answer was wrong or missing: whatever was measured is worthless."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The blocks of one call: [first_block, first_block + batch size) of a chain, and which bytes they hold."""

    chain: Chain
    first_block: int
    payload: memoryview
    payload_offset: int  # where it begins in all payload


class Payload:
    """Random bytes for all batches of a round. Rounds hold the same batches in turned order, so that no block's bytes
    are those of the round before: a stale answer cannot pass for the right one.
    """

    def __init__(self, seed: int, batch_count: int, batch_bytes: int) -> None:
        words = -(-batch_count * batch_bytes // 8)
        random = np.random.default_rng(seed).integers(0, 1 << 64, words, dtype=np.uint64)
        self.data = random.data.cast("B")[: batch_count * batch_bytes]
        self._batch_count = batch_count
        self._batch_bytes = batch_bytes

    def offset(self, round_number: int, index: int) -> int:
        """Where a round's batch begins in `data`."""
        return (index + round_number) % self._batch_count * self._batch_bytes

    def at(self, offset: int) -> memoryview:
        """The batch that begins there."""
        return self.data[offset : offset + self._batch_bytes]


def namespace_spec(name: str, block_bytes: int) -> NamespaceSpec:
    """A namespace of the benchmark's own."""
    return NamespaceSpec(
        tenant="bench",
        model=f"random bytes for {name}",
        revision="1",
        engine="kvstore-bench",
        layout="opaque/1",
        kv_dtype="uint8",
        block_bytes=block_bytes,
    )


def random_chains(handle: NamespaceHandle, seed: int, block_count: int, chain_blocks: int) -> Iterator[Chain]:
    """Chains of `chain_blocks` blocks, the last one perhaps shorter, with `block_count` blocks in all."""
    random = np.random.default_rng(seed)
    for start in range(0, block_count, chain_blocks):
        blocks = min(chain_blocks, block_count - start)
        yield handle.chain(random.integers(0, _VOCABULARY, blocks * BLOCK_TOKENS, dtype=np.uint32))


def chain_blocks_for(batch_blocks: int) -> int:
    """Chains hold whole batches: the fewest that make at least 1,024 blocks."""
    return -(-CHAIN_BLOCKS // batch_blocks) * batch_blocks


def round_batches(
    handle: NamespaceHandle, payload: Payload, seed: int, round_number: int, block_count: int, batch_blocks: int
) -> list[Batch]:
    """The batches of a round, under chains that no other round uses."""
    batches: list[Batch] = []
    # Another stream of random numbers than any other round's and than the payload's.
    chain_seed = int(np.random.SeedSequence((seed, round_number)).generate_state(1, np.uint64)[0])
    for chain in random_chains(handle, chain_seed, block_count, chain_blocks_for(batch_blocks)):
        for first_block in range(0, len(chain), batch_blocks):
            offset = payload.offset(round_number, len(batches))
            batches.append(Batch(chain, first_block, payload.at(offset), offset))
    return batches
