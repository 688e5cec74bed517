"""The paged KV memory of one engine: fixed blocks of 128 tokens, each one contiguous run of bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

BLOCK_TOKENS = 128  # The store's block size; a block of the pool is a block of the store.

# Names the byte layout inside a block, so that other engines' blocks are never mistaken for ours:
# layer, key-or-value, KV head, token, head dimension; the last varies fastest. RoPE is already applied to the keys, in
# the rotate-half pairing. Raise the version whenever a byte moves or changes meaning.
LAYOUT = "thin-paged-LKHTD-v1"

# Kinds of `KVPool.states`.
TAIL_STATE = "tail"


class PoolExhaustedError(RuntimeError):
    """More blocks were asked for than are free."""


class KVPool:
    """KV of all sequences in one tensor of shape (num_blocks, layers, 2, kv_heads, BLOCK_TOKENS, head_dim).

    The block index comes first, so everything about one block is contiguous and travels to and from a store as is.
    Not thread-safe: the thread that runs the engine owns it.
    """

    layout = LAYOUT

    def __init__(
        self, *, num_blocks: int, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32
    ) -> None:
        """Reserve the memory; the operating system commits it as blocks are first written."""
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.dtype = dtype
        self.kv = torch.zeros(num_blocks, layers, 2, kv_heads, BLOCK_TOKENS, head_dim, dtype=dtype)
        self.block_bytes = self.kv[0].nbytes
        # numpy has no bfloat16, hence the detour over uint8; it copies nothing.
        self._memory = self.kv.view(torch.uint8).reshape(-1).numpy().data
        self._free = list(reversed(range(num_blocks)))
        self._is_free = [True] * num_blocks

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
        end = start + keys.shape[0]
        new = torch.stack((keys, values)).transpose(1, 2)  # (2, kv_heads, T, head_dim)
        position = start
        while position < end:
            offset = position % BLOCK_TOKENS
            count = min(BLOCK_TOKENS - offset, end - position)
            page = self.kv[block_ids[position // BLOCK_TOKENS], layer]
            page[:, :, offset : offset + count] = new[:, :, position - start : position - start + count]
            position += count

    def gather(self, layer: int, block_ids: Sequence[int], length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's keys and values of a sequence's first `length` tokens, each (kv_heads, length, head_dim).

        A copy: attention over contiguous memory is worth more on a CPU than the copy costs. One `cat` of the pages
        is twice as fast as fancy indexing followed by a transpose.
        """
        full_blocks, rest = divmod(length, BLOCK_TOKENS)
        pages = [self.kv[block_id, layer] for block_id in block_ids[:full_blocks]]
        if rest:
            pages.append(self.kv[block_ids[full_blocks], layer, :, :, :rest])
        keys, values = torch.cat(pages, dim=2).unbind(0)
        return keys, values

    def state_sizes(self, end_token: int) -> dict[str, int]:
        """Kind -> bytes of each state in `states(…, end_token)`."""
        return {TAIL_STATE: self.kv[0, ..., 0, :].nbytes * (end_token % BLOCK_TOKENS)}

    def states(self, block_ids: Sequence[int], end_token: int) -> dict[str, bytearray]:
        """What a sequence's complete blocks lack to go on at exactly `end_token`; copies.

        Returns: kind -> bytes. TAIL_STATE: the KV of the tokens after the last complete block, shape (layers, 2, kv_heads,
            end_token % BLOCK_TOKENS, head_dim).
        """
        state = bytearray(self.state_sizes(end_token)[TAIL_STATE])
        if state:
            tail = self._tail(block_ids, end_token)
            torch.frombuffer(state, dtype=self.dtype).view(tail.shape).copy_(tail)
        return {TAIL_STATE: state}

    def load_states(self, block_ids: Sequence[int], end_token: int, states: Mapping[str, bytearray]) -> None:
        """Put back what `states` gave for the same `end_token`; a state of no bytes may be missing.

        Raises: ValueError: one has not the size of such a state; nothing is written then.
        """
        for kind, size in self.state_sizes(end_token).items():
            if len(states.get(kind, b"")) != size:
                raise ValueError(
                    f"state {kind!r} at token {end_token} has {size} bytes, got {len(states.get(kind, b''))}"
                )
        if states.get(TAIL_STATE):
            tail = self._tail(block_ids, end_token)
            tail.copy_(torch.frombuffer(states[TAIL_STATE], dtype=self.dtype).view(tail.shape))

    def _tail(self, block_ids: Sequence[int], end_token: int) -> torch.Tensor:
        full_blocks, rest = divmod(end_token, BLOCK_TOKENS)
        return self.kv[block_ids[full_blocks], ..., :rest, :]

    def _check(self, block_id: int) -> None:
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"KV block {block_id} is outside the pool of {self.num_blocks}")
