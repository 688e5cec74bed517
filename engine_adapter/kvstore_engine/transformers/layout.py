"""Where the KV of a model's layers stands in a block of the store: layer after layer, keys before values.

A layer's keys are [head][token][dimension] for the 128 tokens of the block, in the model's own dtype; its values likewise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvstore_api.limits import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore_engine.transformers.kv_cache import ReadableCache


@dataclass(frozen=True, slots=True)
class TensorKv:
    """One layer's keys, or its values."""

    heads: int
    dimension: int
    dtype: torch.dtype
    device: torch.device

    @property
    def block_bytes(self) -> int:
        """Bytes of it in one block."""
        return self.heads * BLOCK_TOKENS * self.dimension * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """For a namespace."""
        return str(self.dtype).removeprefix("torch.")


class KvLayout:
    """The KV of all layers in a block."""

    def __init__(self, layers: Sequence[tuple[TensorKv, TensorKv]]) -> None:
        self._layers = list(layers)
        self.block_bytes = sum(keys.block_bytes + values.block_bytes for keys, values in layers)

    @classmethod
    def of(cls, cache: ReadableCache) -> KvLayout:
        """That of a cache which a model has filled."""
        layers = [cache.read(layer, 0, 0) for layer in range(len(cache.layers))]
        return cls([(_tensor_kv(keys), _tensor_kv(values)) for keys, values in layers])

    @property
    def dtype_name(self) -> str:
        """Of all that is in it, in order and each once."""
        return ",".join(dict.fromkeys(tensor.dtype_name for layer in self._layers for tensor in layer))

    @property
    def device_types(self) -> str:
        """Kinds of devices that the layers are on."""
        return ",".join(dict.fromkeys(tensor.device.type for layer in self._layers for tensor in layer))

    def describe(self) -> str:
        """For a namespace: equal runs of layers are counted."""
        runs: list[tuple[str, int]] = []
        for keys, values in self._layers:
            text = "/".join(f"{tensor.heads}x{tensor.dimension}:{tensor.dtype_name}" for tensor in (keys, values))
            before = runs.pop() if runs and runs[-1][0] == text else (text, 0)
            runs.append((text, before[1] + 1))
        return "layer,k/v,head,token,dim " + " ".join(f"{count}*{text}" for text, count in runs)

    def pack(self, cache: ReadableCache, first_block: int, end_block: int) -> list[memoryview]:
        """The bytes of blocks, copied out of a cache that has all of their tokens."""
        blocks = end_block - first_block
        memory = torch.empty((blocks, self.block_bytes), dtype=torch.uint8)
        places = self._places(memory)
        for layer in range(len(self._layers)):
            for states in cache.read(layer, first_block * BLOCK_TOKENS, end_block * BLOCK_TOKENS):
                next(places).copy_(_blocks_of(states))
        return [memoryview(block.numpy()) for block in memory]

    def fill(self, cache: ReadableCache, memory: torch.Tensor) -> None:
        """Give an empty cache the KV of blocks: (blocks, block bytes)."""
        places = self._places(memory)
        for layer, tensors in enumerate(self._layers):
            keys, values = (_states(next(places)).to(tensor.device) for tensor in tensors)
            cache.update(keys, values, layer)

    def _places(self, memory: torch.Tensor) -> Iterator[torch.Tensor]:
        """Keys and values of layer after layer in the bytes of blocks: (blocks, heads, 128, dimension) each."""
        offset = 0
        for tensor in (tensor for layer in self._layers for tensor in layer):
            part = memory[:, offset : offset + tensor.block_bytes].view(tensor.dtype)
            offset += tensor.block_bytes
            yield part.view(len(memory), tensor.heads, BLOCK_TOKENS, tensor.dimension)


def _blocks_of(states: torch.Tensor) -> torch.Tensor:
    """(heads, tokens, dimension) -> (blocks, heads, 128, dimension), without a copy."""
    heads, tokens, dimension = states.shape
    return states.view(heads, tokens // BLOCK_TOKENS, BLOCK_TOKENS, dimension).transpose(0, 1)


def _states(place: torch.Tensor) -> torch.Tensor:
    """(blocks, heads, 128, dimension) -> (1, heads, tokens, dimension), as a cache has them."""
    blocks, heads, tokens, dimension = place.shape
    return place.transpose(0, 1).reshape(1, heads, blocks * tokens, dimension)


def _tensor_kv(states: torch.Tensor) -> TensorKv:
    heads, _, dimension = states.shape
    if not math.prod((heads, dimension)):
        raise ValueError("a layer's keys or values are empty")
    return TensorKv(heads, dimension, states.dtype, states.device)
