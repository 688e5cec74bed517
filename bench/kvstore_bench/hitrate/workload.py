"""What a replay needs of traffic: who asks for which blocks, when. Readers and the generator make it, replays consume it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

NO_SESSION = -1


class WorkloadError(Exception):
    """A workload that cannot be used; the message names file, line and field."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their times. A block id stands for a prefix hash: equal ids mean an equal block *and* prefix.

    Attributes:
        block_tokens: tokens of a block.
        classes: names of traffic classes.
        time_s: shape (requests,), ascending; seconds from any zero.
        class_id: shape (requests,): which of `classes`.
        session: shape (requests,): which conversation a request belongs to; `NO_SESSION` where that is not known.
        input_tokens: shape (requests,): of the whole prompt, those behind its last block included.
        starts: shape (requests + 1,): where each request's chain begins in `blocks`.
        blocks: ids from 0 to `unique_blocks` - 1, chain behind chain.
        asked_blocks: shape (requests,): how many leading blocks of its chain the prompt asks for. The others are the answer's:
            they are stored, and used, right after the prompt's, but nobody asks for them, so that they are no hit and no miss.
        measured_from_s: requests before it only warm up the store.
        origin: what a report says of where it comes from: file, seed, parameters.
    """

    name: str
    block_tokens: int
    classes: tuple[str, ...]
    time_s: NDArray[np.float64]
    class_id: NDArray[np.uint8]
    session: NDArray[np.int32]
    input_tokens: NDArray[np.int64]
    starts: NDArray[np.int64]
    blocks: NDArray[np.int32]
    asked_blocks: NDArray[np.int32]
    unique_blocks: int
    measured_from_s: float = -math.inf
    origin: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.time_s)
        assert len(self.starts) == count + 1, "starts has one entry more than there are requests"
        assert all(len(column) == count for column in (self.class_id, self.session, self.input_tokens))
        assert self.starts[-1] == len(self.blocks), "chains make up the blocks"
        asked = self.asked_blocks
        assert asked.shape == (count,), "each request asks"
        assert ((asked >= 0) & (asked <= np.diff(self.starts))).all(), "what is asked for is the chain's beginning"
        assert not count or (np.diff(self.time_s) >= 0).all(), "requests are in the order of their times"

    @property
    def requests(self) -> int:
        """How many."""
        return len(self.time_s)

    @property
    def measured(self) -> NDArray[np.bool_]:
        """Shape (requests,): those that count."""
        is_measured: NDArray[np.bool_] = self.time_s >= self.measured_from_s
        return is_measured

    def chain(self, request: int) -> NDArray[np.int32]:
        """Block ids of a request, from block 0 on, those of the answer included: what is stored afterwards; a view."""
        return self.blocks[self.starts[request] : self.starts[request + 1]]

    def asked(self, request: int) -> NDArray[np.int32]:
        """Block ids that the request asks for: its chain without the answer's; a view."""
        return self.chain(request)[: self.asked_blocks[request]]

    def class_of(self, request: int) -> str:
        """The name of its traffic class."""
        name: str = self.classes[self.class_id[request]]
        return name

    def tokens_of(self, request: int, blocks: int) -> int:
        """Tokens in the leading blocks of a request: a trace may name the last block of a prompt although it is not full."""
        return min(blocks * self.block_tokens, int(self.input_tokens[request]))
