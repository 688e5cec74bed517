"""What the engine asks of a prefix cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True)
class LoadedPrefix:
    """The outcome of asking for a prefix."""

    hit_blocks: int  # leading blocks whose bytes are now valid in the engine's memory; 0 is a miss


class PrefixCacheHook(Protocol):
    """A store of KV blocks as the engine sees it. Called on the engine's thread, so its time is the requests' time.

    Neither method may raise for trouble with the store: that is a miss, or a save that did not happen. Views are
    memory of the engine's pool: once a method has returned, nothing may read or write them any more, not even a
    transfer that was given up, because the blocks are reused at once.
    """

    def load_prefix(
        self,
        request_tokens: Sequence[int],
        max_hit_tokens: int,
        salt: bytes,
        traffic_class: str | None,
        allocate: Callable[[int], list[memoryview]],
    ) -> LoadedPrefix:
        """Fetch the KV of the longest stored prefix, once per request and before any of it is computed.

        Args:
            request_tokens: the whole prompt.
            max_hit_tokens: tokens that may be taken from the store: all but the last, whose logits are needed.
            salt: separates requests that must not share KV.
            traffic_class: why the blocks are wanted; None for the store's default.
            allocate: `allocate(n)` gives writable views of the request's first n blocks, for n of at most
                max_hit_tokens // 128. Calling it again gives the same memory.
        Returns: how many leading blocks were filled completely; at most the largest n allocated.
        """
        ...

    def save_blocks(
        self,
        request_tokens: Sequence[int],
        first_block: int,
        views: Sequence[memoryview],
        salt: bytes,
        traffic_class: str | None,
    ) -> None:
        """Take complete blocks that the engine computed itself: copied or sent when this returns.

        Args:
            request_tokens: tokens from the start of the request, at least up to the end of the last block.
            first_block: index of the first view's block in the request; the others follow without a gap.
            views: the blocks' bytes.
        """
        ...
