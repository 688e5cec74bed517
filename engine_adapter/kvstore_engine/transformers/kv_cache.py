"""A model's cache, of which every token's keys and values can be read and which can be filled with stored ones."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Final

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

# What these layers hold follows from the keys and values given to them, so that a filled one is like one that a model filled.
_LAYERS: Final = (DynamicLayer, DynamicSlidingWindowLayer)
# How a model is given its cache: transformers 5 had the one name first and has the other now.
_ARGUMENTS: Final = ("cache", "past_key_values")


class ReadableCache(DynamicCache):
    """The cache that `generate` would make itself. Layers with a window forget; what they were given is kept beside them."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(config=model.config.get_text_config(decoder=True))
        self._given: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._is_keeping = True
        self._on_pass: Callable[[], None] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `DynamicCache.update`, which a model calls with the KV of new tokens."""
        if self._is_keeping and self.layers[layer_idx].is_sliding:
            self._given.setdefault(layer_idx, []).append((key_states, value_states))
        states: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self._on_pass is not None and layer_idx == len(self.layers) - 1:
            on_pass, self._on_pass = self._on_pass, None
            on_pass()
        return states

    def on_next_pass(self, call: Callable[[], None]) -> None:
        """Call it once, when the last layer has the KV of the tokens that the model computes next."""
        self._on_pass = call

    def computed_tokens(self) -> int:
        """Tokens whose KV every layer has been given."""
        return min((self._tokens_of(index) for index in range(len(self.layers))), default=0)

    def read(self, layer: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the tokens [first, end): (heads, tokens, dimension) each."""
        keys, values = self._all_of(layer)
        return keys[0, :, first:end], values[0, :, first:end]

    def forget_given(self) -> None:
        """Keep no more than what `generate` needs, now and when its caller goes on with this cache."""
        self._is_keeping = False
        self._given.clear()

    def _all_of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.layers[layer].is_sliding:
            return self.layers[layer].keys, self.layers[layer].values
        keys, values = zip(*self._given[layer], strict=True)
        joined = torch.cat(keys, dim=-2), torch.cat(values, dim=-2)
        self._given[layer] = [joined]
        return joined

    def _tokens_of(self, layer: int) -> int:
        if not self.layers[layer].is_sliding:
            return int(self.layers[layer].get_seq_length())
        return sum(keys.shape[-2] for keys, _ in self._given.get(layer, ()))


def why_unreadable(cache: DynamicCache) -> str:
    """Why such a cache is more than the keys and values of its tokens; empty: it is not."""
    if not cache.layers:
        return "its configuration does not say which layers it has"
    others = {type(layer).__name__ for layer in cache.layers if type(layer) not in _LAYERS}
    return f"its cache has layers of the kind {', '.join(sorted(others))}" if others else ""


def cache_argument(model: PreTrainedModel) -> str:
    """How `generate` of this model calls its cache; empty: it takes none."""
    known = inspect.signature(model.forward).parameters
    return next((name for name in _ARGUMENTS if name in known), "")
