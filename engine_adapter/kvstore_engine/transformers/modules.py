"""What may change a model's computation beside its parameters: modes, adapters, code hooked in, and what modules keep loosely."""

from __future__ import annotations

import functools
import inspect
from types import MethodType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

_LIBRARIES: Final = frozenset({"torch", "transformers"})
# Whose forward() in place of a module's own computes the same: `accelerate` moves what it is given to another device before.
_WRAPPERS: Final = frozenset({"transformers", "accelerate"})
# What vision-language models note of one call's images, for the positions of that call's next tokens.
_POSITIONS: Final = "rope_deltas"
# Attributes of modules that decide nothing, or that are looked at otherwise.
_NOT_LOOSE: Final = frozenset(vars(nn.Module())) | {"name_or_path", "_is_hf_initialized", _POSITIONS}

_LEAF: Final = (torch.Tensor, bool, int, float, str, type(None))


def why_changed_modules(model: PreTrainedModel) -> str:
    """Why the model's weights and configuration do not say what it computes; empty: they do."""
    if torch.is_autocast_enabled(model.device.type):
        return "torch.autocast computes in another dtype than the model's own"
    for module in model.modules():
        if module.training:
            return "it is in training mode, or one of its modules is; call model.eval()"
        if type(module).__module__.split(".")[0] == "peft":
            return (
                "it has adapters that can be switched; merge them into the weights (merge_and_unload) or leave them out"
            )
        if _hooks_of_others(module):
            return "hooks in its modules may change what they compute"
        if module._compiled_call_impl is not None:
            return "it is compiled, rounds elsewhere, and would be compiled anew for each call's cache"
        if _is_replaced(module) or _is_patched(type(module)):
            return f"forward() of a {type(module).__name__} in it has been replaced"
    return ""


def forget_positions(model: PreTrainedModel) -> None:
    """As before the first call: text that begins in a cache would be put behind the images, or the batch, of the last one."""
    for module in model.modules():
        if vars(module).get(_POSITIONS) is not None:
            setattr(module, _POSITIONS, None)


def loose_parts(model: PreTrainedModel) -> Iterator[tuple[str, object]]:
    """What modules compute with, other than parameters and buffers, by name: their kinds, numbers, words and tensors.

    Such as the scale of an adapter or the vector that steers a layer; of classes from elsewhere their source too.
    """
    for name, module in model.named_modules():
        kind = type(module)
        yield name, f"{kind.__module__}.{kind.__qualname__}"
        foreign = kind.__module__.split(".")[0] not in _LIBRARIES
        if foreign:
            yield f"{name} source", _source(kind)  # type: ignore[arg-type]  # classes can be hashed
        for key, value in vars(module).items():
            if key not in _NOT_LOOSE and (foreign or not key.startswith("_")):
                if isinstance(value, _LEAF):
                    yield f"{name}.{key}", value
                elif isinstance(value, dict | list | tuple):
                    yield from leaves(f"{name}.{key}", value)


def leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    """The numbers, words and tensors in a value, which may be a list or a mapping of more of them."""
    if isinstance(value, _LEAF):
        yield name, value
    elif isinstance(value, dict):
        for place, (key, item) in enumerate(value.items()):
            yield from leaves(f"{name}[{key if isinstance(key, str | int) else place}]", item)
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from leaves(f"{name}[{place}]", item)


@functools.cache
def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""


def _hooks_of_others(module: nn.Module) -> bool:
    """`transformers` itself leaves hooks in modules, which only read."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(not getattr(hook, "__module__", "").startswith("transformers.") for hook in hooks)


def _is_replaced(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    return forward is not None and _home(forward) not in _WRAPPERS


def _is_patched(kind: type) -> bool:
    """Whether a class of a library has a forward() from elsewhere."""
    owner = next((each for each in kind.__mro__ if "forward" in vars(each)), nn.Module)
    return owner.__module__.split(".")[0] in _LIBRARIES and _home(vars(owner)["forward"]) not in _LIBRARIES


def _home(call: Any) -> str:  # noqa: ANN401
    """The package in which a function was written, whatever it is wrapped in."""
    while isinstance(call, functools.partial | MethodType):
        call = call.func if isinstance(call, functools.partial) else call.__func__
    return str(getattr(call, "__globals__", {}).get("__name__", "")).split(".")[0]
