"""Reading a model's configuration, a mapping as in a Hugging Face config.json, with errors that name the key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

_NO_DEFAULT = -1
# Beyond any model; a slip of the keyboard is told, and not computed with for minutes.
_MAX_NUMBER = 2**31 - 1
_MAX_LAYERS = 4_096


class ModelConfigError(ValueError):
    """A key of a model's configuration is missing, impossible or contradicts another; `key` is its name."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key} {problem}")
        self.key = key


class ModelConfig:
    """A config.json's keys. Those of a multimodal model's `text_config` count before the outer ones."""

    def __init__(self, config: Mapping[str, object]) -> None:
        if not isinstance(config, Mapping):
            raise ModelConfigError("config", f"is a {type(config).__name__}; wanted is a mapping as in a config.json")
        text = config.get("text_config", {})
        if not isinstance(text, Mapping):
            raise ModelConfigError("text_config", f"is {text!r}; wanted is a mapping")
        self._values = {**config, **text}

    def has(self, key: str) -> bool:
        """Whether the key is there and neither null, false, 0 nor empty."""
        return bool(self._values.get(key))

    def is_off(self, key: str) -> bool:
        """Whether the key is there and false."""
        return self._values.get(key) is False

    def text(self, key: str) -> str:
        """A text, or "" when the key is not there."""
        return str(self._values.get(key) or "")

    def number(self, key: str, *, default: int = _NO_DEFAULT, at_most: int = _MAX_NUMBER) -> int:
        """A whole number from 1 to `at_most`, or `default` when the key is missing or null.

        Raises: ModelConfigError: it is something else, or missing without a default.
        """
        value = self._values.get(key)
        if value is None and default != _NO_DEFAULT:
            return default
        if value is None:
            raise ModelConfigError(key, "is missing")
        if not _is_whole(value) or value < 1:
            raise ModelConfigError(key, f"is {value!r}; wanted is a whole number of 1 or more")
        if value > at_most:
            raise ModelConfigError(key, f"is {value!r:.40}; wanted is at most {at_most:,}")
        return value

    def layer_count(self) -> int:
        """How many layers the model has. Raises: ModelConfigError: as `number`."""
        return self.number("num_hidden_layers", at_most=_MAX_LAYERS)

    def numbers(self, key: str, *, at_least: int) -> list[int]:
        """A list of at least `at_least` whole numbers, none negative. Raises: ModelConfigError: it is missing or something else."""
        values = self.items(key)
        whole = [value for value in values if _is_whole(value) and value >= 0]
        if len(whole) != len(values) or len(values) < at_least:
            raise ModelConfigError(key, f"is {values!r}; wanted are {at_least} or more whole numbers of 0 or more")
        return whole

    def items(self, key: str) -> list[object]:
        """A list. Raises: ModelConfigError: it is missing or no list."""
        values = self._values.get(key)
        if values is None:
            raise ModelConfigError(key, "is missing")
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise ModelConfigError(key, f"is {values!r}; wanted is a list")
        return list(values)

    def layer_ids(self, key: str, layers: int) -> list[int]:
        """Indices below `layers`, ascending, each once. Raises: ModelConfigError: they are not."""
        ids = self.numbers(key, at_least=1)
        if ids != sorted(set(ids)) or ids[-1] >= layers:
            raise ModelConfigError(key, f"is {ids}; wanted are indices of the {layers} layers, ascending, each once")
        return ids


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
