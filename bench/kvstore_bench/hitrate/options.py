"""What `kvstore-bench hitrate` is told on its command line, made values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvstore_bench.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def parse_shares(option: str, text: str) -> list[float]:
    """Shares above 0, as `0.1` or `5%,0.1,0.5`. Raises: InputError."""
    try:
        shares = [float(word.rstrip("%")) / (100 if word.endswith("%") else 1) for word in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share <= 100 and math.isfinite(share) for share in shares):
        raise InputError(f"{option} {text!r} is no list of shares above 0", f"give e.g. {option} 0.05,0.1")
    return shares


def parse_by_class(
    option: str, texts: Sequence[str], classes: Sequence[str], parse: Callable[[object], float]
) -> dict[str, float]:
    """Values of `CLASS=VALUE`, each class once and none that the workload does not have.

    Args: parse: a function of `units.py`.
    Raises: InputError.
    """
    values: dict[str, float] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"{option} {text!r} names no class", f"give e.g. {option} {classes[0]}=…")
        if name not in classes:
            raise InputError(f"{option} {text!r}: the workload has no class {name!r}", f"it has {', '.join(classes)}")
        if name in values:
            raise InputError(f"{option} {name} is given twice", "give it once")
        values[name] = parsed(f"{option} {name}", value, parse)
    return values


def parsed(option: str, text: str, parse: Callable[[object], float]) -> float:
    """A value by a function of `units.py`. Raises: InputError."""
    try:
        return parse(text)
    except ValueError as error:
        raise InputError(f"{option} is {text!r}", str(error)) from None
