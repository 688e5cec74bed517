"""Which model this is: its weights as they are in memory, whatever has been done to them since they were read from files."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import transformers
import xxhash

from kvstore_client import KVStoreConfigError, NamespaceSpec
from kvstore_engine.model_identity import config_digest
from kvstore_engine.transformers.modules import leaves, loose_parts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from kvstore_engine.plug_settings import PlugSettings
    from kvstore_engine.transformers.layout import KvLayout

ENGINE_NAME: Final = "transformers"
_PIECE_BYTES: Final = 64 << 20
# What a configuration says about where it is from, and how the model is asked to answer.
_NOT_OF_THE_KV: Final = frozenset({"_name_or_path", "transformers_version", "use_cache", "return_dict", "output_attentions",
    "output_hidden_states"})  # fmt: skip


def namespace_spec(model: PreTrainedModel, layout: KvLayout, settings: PlugSettings) -> NamespaceSpec:
    """The namespace of a model as it is now.

    Attention kernels and kinds of devices round differently, and releases of `transformers` compute differently, so each has
    KV of its own: what a hit brings is what this very set-up would have computed.

    Raises:
        KVStoreConfigError: IDENTITY_UNKNOWN; the weights cannot be read, and no revision was given.
        NamespaceSpecError: the blocks are too large for a store.
    """
    spec = NamespaceSpec(
        model=settings.model or _name(model),
        revision=settings.revision.strip() or weights_fingerprint(model),
        engine=f"{ENGINE_NAME} {'.'.join(transformers.__version__.split('.')[:2])}",
        layout=layout.describe(),
        kv_dtype=layout.dtype_name,
        block_bytes=layout.block_bytes,
        tenant=settings.tenant,
        labels={
            "attention": _kernels(model),
            "class": f"{type(model).__module__}.{type(model).__qualname__}",
            "config": model_config_digest(model),
            "device": layout.device_types,
        },
    )
    spec.validate()
    return spec


def weights_fingerprint(model: PreTrainedModel) -> str:
    """xxh3-128 over names, shapes and contents of all parameters and buffers, and what else modules compute with, in hex.

    Raises: KVStoreConfigError: IDENTITY_UNKNOWN; some of them are not in memory, or not as plain numbers.
    """
    digest = xxhash.xxh3_128()
    for name, part in chain(_parts(model), _packed_parts(model)):
        if not isinstance(part, torch.Tensor):
            digest.update(repr((name, part)).encode())
            continue
        digest.update(f"{len(name)}:{name}:{part.dtype}:{tuple(part.shape)}:".encode())
        try:
            _digest_tensor(digest, part)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise KVStoreConfigError(
                "IDENTITY_UNKNOWN",
                f"the weights of the model cannot be told from others, {name} cannot be read ({error}); set 'revision' to "
                "something that changes whenever they do, such as a commit or a checksum",
            ) from None
    return f"xxh3-128:{digest.hexdigest()}"


def model_config_digest(model: PreTrainedModel) -> str:
    """Of all that a model's configuration says about what it computes."""
    config: dict[str, Any] = model.config.to_dict()
    return config_digest({name: value for name, value in config.items() if name not in _NOT_OF_THE_KV})


class Unchanged:
    """Notices that a model is no longer what it was when this was made. Takes a millisecond; a fingerprint may take seconds."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._then = _marks(model)

    def is_still(self, model: PreTrainedModel) -> bool:
        """Whether weights, configuration and attention kernel are what they were.

        Sees tensors that were replaced or changed in place. Of those changed behind torch's back, through `.data`, it looks at
        one number of each.
        """
        return _marks(model) == self._then


def _marks(model: PreTrainedModel) -> list[object]:
    marks: list[object] = [model_config_digest(model), _kernels(model)]
    for name, part in _parts(model):
        marks.append((name, _mark(part) if isinstance(part, torch.Tensor) else repr(part)))
    return marks


def _mark(tensor: torch.Tensor) -> tuple[object, ...]:
    version = -1 if tensor.is_inference() else tensor._version
    try:
        return tensor.data_ptr(), version, tensor.dtype, tuple(tensor.shape), _middle_of(tensor)
    except (RuntimeError, NotImplementedError):  # sparse, or packed
        return id(tensor), version


def _middle_of(tensor: torch.Tensor) -> str:
    """As text, in which a NaN is equal to itself."""
    if tensor.is_meta or not tensor.numel():
        return ""
    return repr(tensor.detach()[tuple(size // 2 for size in tensor.shape)].item())


def _parts(model: PreTrainedModel) -> Iterator[tuple[str, object]]:
    return chain(model.named_parameters(), model.named_buffers(), loose_parts(model))


def _packed_parts(model: PreTrainedModel) -> Iterator[tuple[str, object]]:
    """What modules save with the weights although it is neither a parameter nor a buffer: quantized ones pack them otherwise."""
    known = {name for name, _ in chain(model.named_parameters(remove_duplicate=False), model.named_buffers())}
    for name, value in model.state_dict(keep_vars=True).items():
        if name not in known:
            yield from leaves(name, value)


def _kernels(model: PreTrainedModel) -> str:
    """What decides how the same numbers are rounded."""
    config = model.config.get_text_config(decoder=True)
    return f"{getattr(config, '_attn_implementation', '')}, matmul {torch.get_float32_matmul_precision()}"


def _digest_tensor(digest: xxhash.xxh3_128, tensor: torch.Tensor) -> None:
    if tensor.is_quantized:
        raise NotImplementedError("it is of a quantized type")  # to look at its bytes would end the process
    numbers = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, len(numbers), _PIECE_BYTES):
        digest.update(numbers[start : start + _PIECE_BYTES].cpu().numpy().data)


def _name(model: PreTrainedModel) -> str:
    """As the hub calls it; of a directory, its own name, since it may lie elsewhere on another machine."""
    given = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
    return Path(given).resolve().name or given if Path(given).is_dir() else given
