"""What may change a model's computation beside its weights: adapters, and code hooked into its modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def why_changed_modules(model: PreTrainedModel) -> str:
    """Why the model's weights and configuration do not say what it computes; empty: they do."""
    for module in model.modules():
        if type(module).__module__.split(".")[0] == "peft":
            return (
                "it has adapters that can be switched; merge them into the weights (merge_and_unload) or leave them out"
            )
        if _hooks_of_others(module):
            return "hooks in its modules may change what they compute"
    return ""


def _hooks_of_others(module: nn.Module) -> bool:
    """`transformers` itself leaves hooks in modules, which only read."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(not getattr(hook, "__module__", "").startswith("transformers.") for hook in hooks)
