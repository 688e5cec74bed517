"""What the engine asks of a prefix cache.

Nothing here may raise for trouble with the store: that is a miss, or a save that did not happen. All methods but `expect`
and the `wait`s return at once; the work goes on behind the engine.

Memory that the engine lends is its own again at a moment that is always said: a load's views when `wait` or `cancel` has
returned; a save's views when `save_blocks` has returned (COPIED), or when its `Saving` is done (HELD).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from kvstore_client import ReplayMode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What a request's KV depends on beside its tokens, and what it is kept for.

    Attributes:
        salt: separates requests that must not share KV.
        adapter: identity of the LoRA or other adapter the request runs with; empty for none.
        extra_keys: block -> what else its KV depends on, such as digests of the images in it.
        traffic_class: None for the store's default.
    """

    salt: bytes = b""
    adapter: bytes = b""
    extra_keys: Mapping[int, Sequence[bytes]] | None = None
    traffic_class: str | None = None


@dataclass(frozen=True, slots=True)
class LoadedPrefix:
    """What of a prompt is there already, and from where the engine goes on.

    Attributes:
        hit_blocks: leading blocks whose bytes are in the lent memory; 0 is a miss. They are not to be written again.
        replay_start_token: first token to compute; at most the end of the hit. Before it, no window KV exists but what
            `states` brings.
        mode: what the span from there to the end of the hit is.
        states: KV group -> its state at the end of the hit, for groups that are not replayed.
    """

    hit_blocks: int = 0
    replay_start_token: int = 0
    mode: ReplayMode = ReplayMode.NONE
    states: Mapping[str, bytearray] = field(default_factory=dict)


class PrefixLoad(Protocol):
    """A load under way."""

    def expect(self) -> LoadedPrefix:
        """What the store promises. Waits for the look-up, and not for the bytes."""
        ...

    def wait_layer(self, layer: int) -> bool:
        """Wait until one layer's KV of all promised blocks is there.

        Returns: False: it did not come. `wait` then says what there is, and the engine starts the prompt from that anew.
        """
        ...

    def wait(self) -> LoadedPrefix:
        """Wait for all of it. Returns: what there is now, which may be less than was promised."""
        ...

    def cancel(self) -> None:
        """Give it up."""
        ...


class Ownership(Enum):
    """Whose the views of a save are after `save_blocks` has returned."""

    COPIED = "copied"  # the engine's: the bytes have been copied
    HELD = "held"  # the save's, until it is done: the engine must not change them before


class Saving(Protocol):
    """A save under way."""

    @property
    def done(self) -> bool:
        """Whether the views are the engine's again: stored, refused, dropped or failed."""
        ...

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is done, at most for `timeout_s`. Returns: whether it is."""
        ...


class PrefixCacheHook(Protocol):
    """A store of KV blocks as the engine sees it. Called on the engine's thread, so its time is the requests' time."""

    def start_load(self, prompt: Sequence[int], context: RequestContext, views: Sequence[memoryview]) -> PrefixLoad:
        """Begin to fetch the KV of the longest stored prefix, once per request and before any of it is computed.

        Args:
            prompt: all of it. At least one of its tokens is left to compute, whose logits are needed.
            views: writable memory of the request's first blocks, lent; the hit is no longer than this.
        """
        ...

    def save_blocks(
        self,
        tokens: Sequence[int],
        first_block: int,
        views: Sequence[memoryview],
        context: RequestContext,
        ownership: Ownership = Ownership.COPIED,
    ) -> Saving:
        """Store complete blocks that the engine computed itself.

        Args:
            tokens: tokens from the start of the request, at least up to the end of the last block.
            first_block: index of the first view's block in the request; the others follow without a gap.
            views: the blocks' bytes.
        """
        ...

    def save_state(self, tokens: Sequence[int], group: str, state: memoryview, context: RequestContext) -> Saving:
        """Store a KV group's state at the end of `tokens`, whole blocks of them. The bytes are copied. Short-lived."""
        ...

    def note_prefill(self, tokens: int, took_s: float) -> None:
        """Tell how long it took to compute `tokens` of a prompt: what a load is compared with."""
        ...
