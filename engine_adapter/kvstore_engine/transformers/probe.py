"""What a model does with its cache, found out by running it on a few tokens: what it is called says little."""

from __future__ import annotations

import math
from typing import Final

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from kvstore_client import KVStoreConfigError
from kvstore_engine.transformers.kv_cache import ReadableCache, cache_argument, why_unreadable
from kvstore_engine.transformers.layout import KvLayout
from kvstore_engine.transformers.modules import forget_positions, why_changed_modules

_PREFIX: Final = 8
_TOKENS: Final = 16


def probe(model: object) -> KvLayout:
    """Check that a prefix's KV can stand for the prefix, and find out its shape.

    Raises: KVStoreConfigError: UNSUPPORTED_MODEL; says what is against it.
    """
    if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
        raise unsupported(model, "wanted is a model of transformers itself, one that can generate and is in no wrapper")
    if reason := _why_not(model):
        raise unsupported(model, reason)
    try:
        return _run(model)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError) as error:
        raise unsupported(model, f"it does not run on {_TOKENS} tokens with a cache ({error})") from error


def unsupported(model: object, reason: str) -> KVStoreConfigError:
    """Why there is no store for a model."""
    return KVStoreConfigError("UNSUPPORTED_MODEL", f"KV of {type(model).__name__} cannot be stored: {reason}")


def _why_not(model: PreTrainedModel) -> str:
    config = model.config
    if config.is_encoder_decoder:
        return "it has an encoder, whose input its KV depends on too"
    if getattr(model, "_is_stateful", False) or not model._supports_default_dynamic_cache():
        return "it has a state of its own beside the keys and values of tokens"
    if (model.tp_size or 1) > 1:
        return "it is one of several that share the work (tensor parallel), and has a part of the KV"
    if any(_changes_with_length(rope) for rope in _rope_types(config.get_text_config(decoder=True))):
        return "its position embeddings change with the length of the text (dynamic or longrope), and so does a prefix's KV"
    if reason := why_changed_modules(model):
        return reason
    if not cache_argument(model):
        return "its forward() takes no cache"
    try:
        return why_unreadable(ReadableCache(model))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return f"no DynamicCache can be made for it ({type(error).__name__}: {error})"


def _run(model: PreTrainedModel) -> KvLayout:
    size = int(model.config.get_text_config(decoder=True).vocab_size)
    tokens = [(size // 2 + 3 * place) % size for place in range(_TOKENS)]
    others = [*tokens[:_PREFIX], *((token + 1) % size for token in tokens[_PREFIX:])]
    cache, logits = ReadableCache(model), ReadableCache(model)
    cold, _ = _forward(model, tokens, cache), _forward(model, others, logits)
    if cache.computed_tokens() != _TOKENS:
        raise unsupported(model, "its forward() does not fill the cache that it is given")
    if not _close(_prefix_of(cache), _prefix_of(logits)):
        raise unsupported(model, "the KV of a token depends on the tokens behind it")
    if not _close([_forward(model, tokens, _filled(model, cache))], [cold]):
        raise unsupported(model, "it does not go on from a filled cache as it does from its own")
    return KvLayout.of(cache)


def _forward(model: PreTrainedModel, tokens: list[int], cache: ReadableCache) -> torch.Tensor:
    """The last token's logits, as `generate` gets them: it prepares positions and masks. What the cache has is not computed."""
    ids = torch.tensor([tokens], device=model.get_input_embeddings().weight.device)
    forget_positions(model)
    config, model.generation_config = model.generation_config, GenerationConfig(pad_token_id=0)
    try:
        generated = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=1,
            return_dict_in_generate=True,
            output_logits=True,
            **{cache_argument(model): cache},
        )
    finally:
        model.generation_config = config
    return torch.as_tensor(generated.logits[0][0])


def _prefix_of(cache: ReadableCache) -> list[torch.Tensor]:
    return [states for layer in range(len(cache.layers)) for states in cache.read(layer, 0, _PREFIX)]


def _filled(model: PreTrainedModel, cache: ReadableCache) -> ReadableCache:
    copy = ReadableCache(model)
    for layer in range(len(cache.layers)):
        keys, values = cache.read(layer, 0, _PREFIX)
        copy.update(keys[None].clone(), values[None].clone(), layer)
    return copy


def _close(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether they differ by no more than rounding."""
    for one, other in zip(ones, others, strict=True):
        difference, size = (float(tensor.float().norm()) for tensor in (one.float() - other.float(), one))
        if not difference <= math.sqrt(torch.finfo(one.dtype).eps) * size:
            return False
    return True


def _rope_types(config: object) -> list[str]:
    """All that a configuration names, which may be one for each kind of layer."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    each = [given, *(value for value in given.values() if isinstance(value, dict))] if isinstance(given, dict) else []
    return [str(rope.get("rope_type") or rope.get("type") or "") for rope in each]


def _changes_with_length(rope_type: str) -> bool:
    return "dynamic" in rope_type or rope_type == "longrope"
