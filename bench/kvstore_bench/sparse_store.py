"""Real data directories with millions of blocks whose payloads are holes: index, tables and files are what they always are."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.clock import SystemClock
from kvstore.config import DEFAULT_TRAFFIC_CLASSES, StoreConfig
from kvstore.log import format as fmt
from kvstore.log.device import FileDevice
from kvstore.log.segment import row_capacity
from kvstore.store import LocalStore, segment_size_bytes
from kvstore.types import PutBlock
from kvstore_api.chain import Chain
from kvstore_api.checksum import block_checksum
from kvstore_api.limits import HASH_BYTES
from kvstore_api.results import PutStatus
from kvstore_bench.workload import CHAIN_BLOCKS, VerificationError, namespace_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from typing_extensions import Buffer

    from kvstore.types import Namespace
    from kvstore_api.results import PutResult

BLOCK_BYTES = 114_688
PROMPT_BLOCKS = 117  # the system prompt that most chains share: some 15,000 tokens
PUT_BLOCKS = 64
_CONVERSATIONS_AT_A_TIME = 16
_PUTS_IN_FLIGHT = 16  # 117 MB, which fills group commits: each holds blocks of four or five conversations
_CAPACITY_BYTES_MIN = 4 << 30  # segments are a sixteenth of it at most, and full-sized ones are wanted


class SparseDevice(FileDevice):
    """A file system on which payloads are holes. Everything in front of them is written as it is."""

    def __init__(self, payload_offset: int) -> None:
        self.payload_offset = payload_offset

    def write(self, descriptor: int, buffers: Sequence[Buffer], offset_bytes: int) -> None:
        """Write the buffers, or let the file reach behind them if they are payloads."""
        if offset_bytes < self.payload_offset:
            super().write(descriptor, buffers, offset_bytes)
        else:
            self.resize(descriptor, offset_bytes + sum(memoryview(buffer).nbytes for buffer in buffers))


def store_config(blocks: int) -> StoreConfig:
    """Room for so many blocks, with segments of full size."""
    capacity = max(_CAPACITY_BYTES_MIN, blocks * BLOCK_BYTES * 5 // 4)
    return StoreConfig.model_validate({"capacity": capacity, "put_queue": 1 << 30})


def open_store(directory: Path, blocks: int) -> LocalStore:
    """The real store on a sparse device."""
    config = store_config(blocks)
    payload_offset = fmt.Layout(row_capacity(segment_size_bytes(config))).payload_offset
    return LocalStore.open(
        directory, config, DEFAULT_TRAFFIC_CLASSES, SystemClock(), device=SparseDevice(payload_offset)
    )


def scale_namespace(store: LocalStore) -> Namespace:
    """The namespace all blocks are in."""
    return store.register_namespace(namespace_spec("scale", BLOCK_BYTES))


@dataclass(frozen=True, slots=True)
class Conversations:
    """Chains that can be made again from the seed and their number, `total_blocks` blocks together.

    Prefix hashes are random bytes, as the real ones are. Three chains of four begin with one system prompt.
    """

    seed: int
    total_blocks: int

    def chain(self, number: int) -> Chain:
        """The whole chain of a conversation, also of one that is not stored."""
        own = np.random.default_rng((self.seed, 1, number)).bytes(CHAIN_BLOCKS * HASH_BYTES)
        if not self.shares_prompt(number):
            return Chain(own)
        prompt = np.random.default_rng((self.seed, 0)).bytes(PROMPT_BLOCKS * HASH_BYTES)
        return Chain(prompt + own[len(prompt) :])

    def shares_prompt(self, number: int) -> bool:
        """Whether it begins with the system prompt."""
        return number % 4 != 1

    def stored(self) -> Iterator[tuple[int, int, int]]:
        """Each conversation that is stored: its number, and the range of blocks that it adds to the store."""
        left, number = self.total_blocks, 0
        while left:
            first = PROMPT_BLOCKS if number and self.shares_prompt(number) else 0
            end = min(CHAIN_BLOCKS, first + left)
            yield number, first, end
            left -= end - first
            number += 1

    def whole(self) -> list[int]:
        """Numbers of the conversations that are stored to their end."""
        return [number for number, _, end in self.stored() if end == CHAIN_BLOCKS]


def fill(store: LocalStore, conversations: Conversations, advance: Callable[[int], None]) -> None:
    """Put every block the way a server does; `advance` is told the blocks stored, now and then.

    Sixteen conversations at a time put 64 blocks in turn, in an order of chance, so that a group commit holds parts of several.
    Raises: VerificationError: a block was not stored.
    """
    namespace = scale_namespace(store)
    payload = bytes(BLOCK_BYTES)
    in_flight: deque[Future[list[PutResult]]] = deque()
    stored = 0
    for chain, first, end in _puts(conversations):
        blocks = [PutBlock(block, payload, block_checksum(payload, chain[block])) for block in range(first, end)]
        in_flight.append(store.submit_put(namespace, chain, blocks))
        if len(in_flight) >= _PUTS_IN_FLIGHT:
            stored += _settle(in_flight.popleft())
            advance(stored)
    while in_flight:
        stored += _settle(in_flight.popleft())
    advance(stored)


def _puts(conversations: Conversations) -> Iterator[tuple[Chain, int, int]]:
    """A chain and a range of its blocks each."""
    waiting = conversations.stored()
    random = np.random.default_rng((conversations.seed, 2))
    active: list[tuple[Chain, int, int]] = []
    while True:
        while len(active) < _CONVERSATIONS_AT_A_TIME and (new := next(waiting, None)) is not None:
            number, first, end = new
            active.append((conversations.chain(number), first, end))
            if number == 0:  # it brings the prompt, before anybody follows it
                chain, first, end = active.pop()
                yield chain, first, min(end, PROMPT_BLOCKS)
                active.append((chain, min(end, PROMPT_BLOCKS), end))
        if not active:
            return
        turn = int(random.integers(len(active)))
        chain, first, end = active[turn]
        upto = min(end, first + PUT_BLOCKS)
        if first < upto:
            yield chain, first, upto
        if upto == end:
            active.pop(turn)
        else:
            active[turn] = (chain, upto, end)


def _settle(put: Future[list[PutResult]]) -> int:
    results = put.result()
    bad = next((result for result in results if result.status is not PutStatus.STORED), None)
    if bad is not None:
        raise VerificationError(f"block {bad.block} was not stored but {bad.status.name.lower()}: {bad.detail}")
    return len(results)
