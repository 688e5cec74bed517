"""The paged KV memory of one engine: fixed blocks of 128 tokens, each one contiguous run of bytes.

A block holds the KV of the layers that see everything: what a store keeps. The KV of sliding-window layers lies beside it,
under the same block ids, and leaves the pool only as a snapshot of the last window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvstore_client.layout import BlockLayout
from kvstore_engine.model import check_windows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvstore_engine.model import LlamaConfig

BLOCK_TOKENS = 128  # The store's block size; a block of the pool is a block of the store.

# Names the byte layout inside a block, so that other engines' blocks are never mistaken for ours:
# layer, key-or-value, KV head, token, head dimension; the last varies fastest. RoPE is already applied to the keys, in
# the rotate-half pairing. Raise the version whenever a byte moves or changes meaning.
LAYOUT = "thin-paged-LKHTD-v1"
# The same with the window layers left out. A window snapshot is laid out alike, with the window layers and their tokens.
HYBRID_LAYOUT = "thin-hybrid-LKHTD-v1"

# Kinds of `KVPool.states`.
TAIL_STATE = "tail"
WINDOW_STATE = "window"


class PoolExhaustedError(RuntimeError):
    """More blocks were asked for than are free."""


class KVPool:
    """KV of all sequences in one tensor of shape (num_blocks, full layers, 2, kv_heads, BLOCK_TOKENS, head_dim).

    The block index comes first, so everything about one block is contiguous and travels to and from a store as is.
    Not thread-safe: the thread that runs the engine owns it.

    Attributes:
        layout: names the byte layout of a block, for the namespace identity.
        kv: the full layers' KV.
        window_kv: the window layers' KV, of the same shape but for the number of layers.
        full_layers, window_layers: the model's layers in the one and in the other, ascending.
        window_tokens: how far window layers see, 0 without such layers.
        block_bytes: bytes of a block, those of its full layers.
        block_layout: where in a block the layers are.
    """

    layout: str = LAYOUT

    def __init__(
        self,
        *,
        num_blocks: int,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        window_tokens: int = 0,
        window_layers: Sequence[int] = (),
    ) -> None:
        """Reserve the memory; the operating system commits it as blocks are first written."""
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, got {num_blocks}")
        check_windows(layers, window_layers, window_tokens)
        self.num_blocks = num_blocks
        self.dtype = dtype
        self.window_tokens = window_tokens
        self.window_layers = tuple(window_layers)
        self.full_layers = tuple(layer for layer in range(layers) if layer not in self.window_layers)
        if self.window_layers:
            self.layout = HYBRID_LAYOUT
        page = (2, kv_heads, BLOCK_TOKENS, head_dim)
        self.kv = torch.zeros(num_blocks, len(self.full_layers), *page, dtype=dtype)
        self.window_kv = torch.zeros(num_blocks, len(self.window_layers), *page, dtype=dtype)
        self._layer_kv = {layer: self.kv[:, index] for index, layer in enumerate(self.full_layers)}
        self._layer_kv |= {layer: self.window_kv[:, index] for index, layer in enumerate(self.window_layers)}
        self.block_bytes = self.kv[0].nbytes
        self.block_layout = BlockLayout.uniform(self.full_layers, self.kv[0, 0].nbytes)
        # numpy has no bfloat16, hence the detour over uint8; it copies nothing.
        self._memory = self.kv.view(torch.uint8).reshape(-1).numpy().data
        self._free = list(reversed(range(num_blocks)))
        self._is_free = [True] * num_blocks

    @classmethod
    def for_model(cls, config: LlamaConfig, *, num_blocks: int, dtype: torch.dtype = torch.float32) -> KVPool:
        """A pool for the KV of a model."""
        return cls(
            num_blocks=num_blocks,
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            window_tokens=config.window_tokens,
            window_layers=config.window_layers,
        )

    @property
    def dtype_name(self) -> str:
        """Element type as text ("float32"), for the namespace identity."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def free_blocks(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks. Their bytes are whatever the last owner left.

        Raises: PoolExhaustedError: fewer are free; nothing is taken then. ValueError: `count` is negative.
        """
        if count < 0:
            raise ValueError(f"cannot allocate {count} blocks")
        if count > len(self._free):
            raise PoolExhaustedError(f"{count} KV blocks wanted, {len(self._free)} of {self.num_blocks} free")
        taken = [self._free.pop() for _ in range(count)]
        for block_id in taken:
            self._is_free[block_id] = False
        return taken

    def free(self, block_ids: Iterable[int]) -> None:
        """Give blocks back. Raises: ValueError: a block is free already; those before it have been given back."""
        for block_id in block_ids:
            self._check(block_id)
            if self._is_free[block_id]:
                raise ValueError(f"KV block {block_id} is free already")
            self._is_free[block_id] = True
            self._free.append(block_id)

    def block_view(self, block_id: int) -> memoryview:
        """The `block_bytes` bytes of one block: flat, writable, not a copy. Writing to it changes the KV."""
        self._check(block_id)
        return self._memory[block_id * self.block_bytes : (block_id + 1) * self.block_bytes]

    def write(self, layer: int, block_ids: Sequence[int], start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store one layer's KV of a sequence's tokens [start, start + T).

        Args:
            block_ids: the sequence's blocks in order, at least up to token start + T.
            keys, values: shape (T, kv_heads, head_dim); converted to the pool's dtype.
        """
        layer_kv = self._layer_kv[layer]
        end = start + keys.shape[0]
        new = torch.stack((keys, values)).transpose(1, 2)  # (2, kv_heads, T, head_dim)
        position = start
        while position < end:
            offset = position % BLOCK_TOKENS
            count = min(BLOCK_TOKENS - offset, end - position)
            page = layer_kv[block_ids[position // BLOCK_TOKENS]]
            page[:, :, offset : offset + count] = new[:, :, position - start : position - start + count]
            position += count

    def gather(
        self, layer: int, block_ids: Sequence[int], end: int, *, first: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's keys and values of a sequence's tokens [first, end), each (kv_heads, end - first, head_dim).

        A copy: attention over contiguous memory is worth more on a CPU than the copy costs. One `cat` of the pages
        is twice as fast as fancy indexing followed by a transpose.
        """
        keys, values = torch.cat(_pages(self._layer_kv[layer], block_ids, first, end), dim=-2).unbind(0)
        return keys, values

    def state_sizes(self, end_token: int) -> dict[str, int]:
        """Kind -> bytes of each state in `states(…, end_token)`."""
        tail_bytes = self.kv[0, ..., 0, :].nbytes * (end_token % BLOCK_TOKENS)
        return {TAIL_STATE: tail_bytes, WINDOW_STATE: self.window_state_bytes(end_token)}

    def states(self, block_ids: Sequence[int], end_token: int) -> dict[str, bytearray]:
        """What a sequence's complete blocks lack to go on at exactly `end_token`; copies.

        Returns: kind -> bytes. TAIL_STATE: the full layers' KV of the tokens after the last complete block, shape (layers, 2,
            kv_heads, end_token % BLOCK_TOKENS, head_dim). WINDOW_STATE: as `window_state`.
        """
        tail = bytearray(self.state_sizes(end_token)[TAIL_STATE])
        if tail:
            kv = self._tail(block_ids, end_token)
            torch.frombuffer(tail, dtype=self.dtype).view(kv.shape).copy_(kv)
        return {TAIL_STATE: tail, WINDOW_STATE: self.window_state(block_ids, end_token)}

    def load_states(self, block_ids: Sequence[int], end_token: int, states: Mapping[str, bytearray]) -> None:
        """Put back what `states` gave for the same `end_token`; a state of no bytes may be missing.

        Raises: ValueError: one has not the size of such a state; nothing is written then.
        """
        for kind, size in self.state_sizes(end_token).items():
            got = len(states.get(kind, b""))
            if got != size:
                raise ValueError(f"state {kind!r} at token {end_token} has {size} bytes, got {got}")
        if states.get(TAIL_STATE):
            kv = self._tail(block_ids, end_token)
            kv.copy_(torch.frombuffer(states[TAIL_STATE], dtype=self.dtype).view(kv.shape))
        self.load_window_state(block_ids, end_token, states.get(WINDOW_STATE, bytearray()))

    def _tail(self, block_ids: Sequence[int], end_token: int) -> torch.Tensor:
        full_blocks, rest = divmod(end_token, BLOCK_TOKENS)
        return self.kv[block_ids[full_blocks], ..., :rest, :]

    def window_state_bytes(self, end_token: int) -> int:
        """Bytes of `window_state(…, end_token)`."""
        return self.window_kv[0, ..., 0, :].nbytes * min(self.window_tokens, end_token)

    def window_state(self, block_ids: Sequence[int], end_token: int) -> bytearray:
        """A copy of what the window layers need to go on at `end_token`: the KV of the last W tokens before it.

        Args:
            block_ids: the sequence's blocks in order, at least up to that token, which need not be the end of a block.
        Returns: shape (window layers, 2, kv_heads, min(W, end_token), head_dim); empty if there are no window layers.
        """
        state = bytearray(self.window_state_bytes(end_token))
        if state:
            first = max(0, end_token - self.window_tokens)
            kv = torch.cat(_pages(self.window_kv, block_ids, first, end_token), dim=-2)
            torch.frombuffer(state, dtype=self.dtype).view(kv.shape).copy_(kv)
        return state

    def load_window_state(self, block_ids: Sequence[int], end_token: int, state: bytearray | memoryview) -> None:
        """Put back what `window_state` gave for the same `end_token`.

        Raises: ValueError: it has not the size of such a state.
        """
        if len(state) != self.window_state_bytes(end_token):
            raise ValueError(
                f"a window state at token {end_token} has {self.window_state_bytes(end_token)} bytes, got {len(state)}"
            )
        first = max(0, end_token - self.window_tokens)
        if not state:
            return
        layers, kinds, heads, _, dimensions = self.window_kv.shape[1:]
        kv = torch.frombuffer(state, dtype=self.dtype).view(layers, kinds, heads, end_token - first, dimensions)
        done = 0
        for page in _pages(self.window_kv, block_ids, first, end_token):
            page.copy_(kv[..., done : done + page.shape[-2], :])
            done += page.shape[-2]

    def _check(self, block_id: int) -> None:
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"KV block {block_id} is outside the pool of {self.num_blocks}")


def _pages(kv: torch.Tensor, block_ids: Sequence[int], first: int, end: int) -> list[torch.Tensor]:
    """The parts of a sequence's tokens [first, end), a view of (…, tokens, head_dim) for each block they are in."""
    pages = []
    for index in range(first // BLOCK_TOKENS, -(-end // BLOCK_TOKENS)):
        start = index * BLOCK_TOKENS
        page = kv[block_ids[index]]
        if first > start or end < start + BLOCK_TOKENS:
            page = page[..., max(first - start, 0) : end - start, :]
        pages.append(page)
    return pages
