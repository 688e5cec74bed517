"""Where the KV of 128 tokens lies in a worker's memory, and how it is copied into and out of a block of the store.

A block of the store holds, layer after layer, the engine's blocks of those tokens, each in the order in which its tensor counts
them. Layers that see everything come first, those with a window behind them, so that the KV of the first can be fetched without
that of the second. What the engine does not look up again, because it computes it anew after a hit, is not in a block.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    group_kernel_blocks,
)

from kvstore_api.limits import BLOCK_TOKENS
from kvstore_client import KVStoreConfigError
from kvstore_engine.vllm.messages import NOT_HERE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

# Whose pages hold what follows from the tokens before them, and nothing else: not the states of an encoder, nor of a recurrence.
_SUPPORTED = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, SlidingWindowMLASpec)


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A KV group of the engine whose blocks are stored.

    Attributes:
        index: its number among the engine's groups.
        ratio: engine blocks that make up a block of the store.
        has_window: only its last blocks are needed after a hit.
    """

    index: int
    ratio: int
    has_window: bool
    layer_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Layer:
    name: str
    group: int  # index in Placement.groups
    cache: torch.Tensor  # shape (engine blocks, ...)
    offset_bytes: int
    size_bytes: int  # of BLOCK_TOKENS tokens


def stored_groups(config: KVCacheConfig) -> tuple[StoredGroup, ...]:
    """The groups that are stored, those with a window last.

    Raises: KVStoreConfigError: a group's blocks cannot be regrouped to the store's, or have no tokens.
    """
    groups = []
    for index in config.prefix_cacheable_group_ids:
        group = config.kv_cache_groups[index]
        specs = _layer_specs(group.kv_cache_spec)
        for spec in specs:
            _check_spec(spec, index)
        if group.is_eagle_group:
            raise KVStoreConfigError(
                "UNSUPPORTED_MODEL", f"KV group {index} is that of a draft model, which is not supported: leave it out"
            )
        has_window = any(isinstance(spec, SlidingWindowSpec) for spec in specs)
        ratio = BLOCK_TOKENS // group.kv_cache_spec.block_size
        groups.append(StoredGroup(index, ratio, has_window, tuple(group.layer_names)))
    if not groups or all(group.has_window for group in groups):
        raise KVStoreConfigError("UNSUPPORTED_MODEL", "no KV group of the model sees all tokens: nothing can be stored")
    return tuple(sorted(groups, key=lambda group: (group.has_window, group.index)))


def _layer_specs(spec: KVCacheSpec) -> list[KVCacheSpec]:
    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def _check_spec(spec: KVCacheSpec, index: int) -> None:
    if type(spec) not in _SUPPORTED:
        raise KVStoreConfigError(
            "UNSUPPORTED_MODEL",
            f"KV group {index} is {type(spec).__name__}; supported are {', '.join(kind.__name__ for kind in _SUPPORTED)}",
        )
    if spec.block_size < 1 or BLOCK_TOKENS % spec.block_size:
        raise KVStoreConfigError(
            "BLOCK_SIZE",
            f"the engine's blocks of KV group {index} hold {spec.block_size} tokens, the store's {BLOCK_TOKENS}; "
            f"set --block-size to a divisor of {BLOCK_TOKENS}",
        )


class Placement:
    """One worker's memory, as blocks of the store see it."""

    def __init__(self, config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Raises: KVStoreConfigError: as `stored_groups`; or a layer's memory is not made of blocks."""
        self.groups = stored_groups(config)
        self._layers = list(_place(self.groups, config.num_blocks, kv_caches))
        self.device = self._layers[0].cache.device
        self.block_bytes = sum(layer.size_bytes for layer in self._layers)
        windowed = [layer.offset_bytes for layer in self._layers if self.groups[layer.group].has_window]
        # Of each block, the bytes of the layers that see everything.
        self.full_bytes = windowed[0] if windowed else self.block_bytes

    @property
    def layer_names(self) -> list[str]:
        """The layers whose KV is stored."""
        return [layer.name for layer in self._layers]

    @property
    def dtype(self) -> str:
        """The element type of the KV; of several, all."""
        return "+".join(sorted({str(layer.cache.dtype).removeprefix("torch.") for layer in self._layers}))

    @property
    def layout(self) -> str:
        """A text that changes whenever bytes would come to lie elsewhere: layers, shapes, types and order in memory."""
        digest = hashlib.sha256()
        for layer in self._layers:
            cache = layer.cache
            order = sorted(range(1, cache.dim()), key=cache.stride, reverse=True)
            group = self.groups[layer.group]
            about = (layer.name, group.ratio, group.has_window, tuple(cache.shape[1:]), str(cache.dtype), order)
            digest.update(repr(about).encode())
        sizes = "+".join(str(BLOCK_TOKENS // group.ratio) for group in self.groups)
        return f"{len(self._layers)} layers of {sizes} tokens on {self.device.type}, {digest.hexdigest()[:32]}"

    def needs_windows(self, engine_blocks: Sequence[Sequence[Sequence[int]]], block: int) -> bool:
        """Whether a load of this block, the nth concerned, has to bring layers with a window."""
        return any(
            group.has_window and any(number != NOT_HERE for number in engine_blocks[position][block])
            for position, group in enumerate(self.groups)
        )

    def is_whole(self, engine_blocks: Sequence[Sequence[Sequence[int]]], block: int) -> bool:
        """Whether everything of this block, the nth concerned, is in the engine's memory."""
        return all(number != NOT_HERE for ids in engine_blocks for number in ids[block])

    def copy_out(self, engine_blocks: Sequence[Sequence[Sequence[int]]], blocks: range, out: torch.Tensor) -> None:
        """Copy blocks, numbered within those concerned, to `out`: uint8 on the CPU, shape (len(blocks), block_bytes)."""
        ids = self._ids(engine_blocks, blocks)
        for layer in self._layers:
            rows = layer.cache[ids[layer.group]].contiguous().view(torch.uint8).reshape(len(blocks), layer.size_bytes)
            out[:, layer.offset_bytes : layer.offset_bytes + layer.size_bytes].copy_(rows)

    def copy_in(
        self, engine_blocks: Sequence[Sequence[Sequence[int]]], blocks: range, data: torch.Tensor, *, windows: bool
    ) -> None:
        """Copy blocks from `data`, shaped as in `copy_out`, to where they belong; of windows only if `windows`."""
        all_ids = self._ids(engine_blocks, blocks)
        for layer in self._layers:
            if self.groups[layer.group].has_window and not windows:
                continue
            part = data[:, layer.offset_bytes : layer.offset_bytes + layer.size_bytes]
            ids = all_ids[layer.group]
            rows = part.reshape(len(ids), -1).view(layer.cache.dtype).reshape(len(ids), *layer.cache.shape[1:])
            here = ids != NOT_HERE
            layer.cache[ids[here]] = rows[here].to(layer.cache.device)
        if self.device.type != "cpu":  # the engine's own stream must find it there
            torch.accelerator.synchronize(self.device)

    def _ids(self, engine_blocks: Sequence[Sequence[Sequence[int]]], blocks: range) -> list[torch.Tensor]:
        return [torch.tensor([number for block in blocks for number in ids[block]]) for ids in engine_blocks]


def _place(groups: Sequence[StoredGroup], num_blocks: int, kv_caches: Mapping[str, torch.Tensor]) -> Iterator[_Layer]:
    offset = 0
    for position, group in enumerate(groups):
        for name in group.layer_names:
            cache = kv_caches[name]
            if not isinstance(cache, torch.Tensor) or cache.shape[0] % num_blocks:
                raise KVStoreConfigError("UNSUPPORTED_MODEL", f"the KV memory of layer {name} is not made of blocks")
            cache = group_kernel_blocks(cache, num_blocks)
            size = group.ratio * cache[0].numel() * cache.element_size()
            yield _Layer(name, position, cache, offset, size)
            offset += size
