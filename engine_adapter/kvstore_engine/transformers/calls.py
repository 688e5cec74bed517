"""Which calls of `generate` a stored prefix can serve. All others are the model's alone, and just as right."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import GenerationConfig
from transformers.generation import GenerationMode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

# What `generate` can be given, beside its settings, that says nothing about the prompt's KV. Anything else may.
_HARMLESS: Final = frozenset({"attention_mask", "generation_config", "logits_processor", "stopping_criteria",
    "prefix_allowed_tokens_fn", "streamer", "tokenizer"})  # fmt: skip
_MODES: Final = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
# Setting -> what it may be; None is always its default. The others of `generate` act on logits, or on when to stop.
_SETTINGS: Final[dict[str, tuple[object, ...]]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "use_cache": (True,),
    "cache_implementation": (),
    "token_healing": (False,),
    "prefill_chunk_size": (),
    "guidance_scale": (1, 1.0),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "is_assistant": (False,),
}


def why_not_served(model: PreTrainedModel, input_ids: object, given: Mapping[str, Any]) -> str:
    """Why a call cannot begin from a stored prefix; empty: it can. `given` are its other arguments, by name."""
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or input_ids.is_floating_point():
        return "no input_ids of two dimensions"
    if input_ids.shape[0] != 1:
        return "more than one sequence"
    config = _settings(model, given)
    for name, value in given.items():
        if value is not None and name not in _HARMLESS and not hasattr(config, name):
            return f"argument {name}"
    return _why_not_settings(config) or _why_not_mask(config, input_ids, given.get("attention_mask"))


def _settings(model: PreTrainedModel, given: Mapping[str, Any]) -> GenerationConfig:
    """As `generate` will put them together: what is given, then the configuration given, then the model's own."""
    config = copy.deepcopy(given.get("generation_config") or GenerationConfig())
    for name, value in model.generation_config.to_dict().items():
        if getattr(config, name, None) is None:
            # "hybrid" is in the files of some models, from a time when it was what the others call "dynamic".
            setattr(config, name, None if (name, value) == ("cache_implementation", "hybrid") else value)
    for name, value in given.items():
        if hasattr(config, name):
            setattr(config, name, value)
    return config


def _why_not_settings(config: GenerationConfig) -> str:
    for name, allowed in _SETTINGS.items():
        value = getattr(config, name, None)
        if value is not None and value not in allowed:
            return f"setting {name}"
    mode = config.get_generation_mode()
    return "" if mode in _MODES else f"generation mode {mode.value}"


def _why_not_mask(config: GenerationConfig, input_ids: torch.Tensor, mask: torch.Tensor | None) -> str:
    if mask is not None:
        return (
            "" if mask.shape == input_ids.shape and bool((mask == 1).all()) else "attention_mask with other than ones"
        )
    # `generate` takes these for padding when nothing says that they are not.
    padding, ends = config.pad_token_id, config.eos_token_id
    if padding is None or padding == ends or (isinstance(ends, list) and padding in ends):
        return ""
    return "padding tokens without an attention_mask" if bool((input_ids == padding).any()) else ""
