"""Figures and names as words of a report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isnan

from kvstore_bench.report import plain

_UNITS_S = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_NOTHING = "-"


def percent(share: float | None) -> str:
    """A share in per cent, without the sign, to a hundredth of a point: replays agree within ten. A share of nothing is "-"."""
    return _NOTHING if share is None or isnan(share) else f"{share * 100:.2f}"


def short_percent(share: float) -> str:
    """A share that somebody has chosen, e.g. 10 % or 0.5 %."""
    return f"{share * 100:.4g} %"


def size(size_bytes: float | None) -> str:
    """Bytes for people, e.g. 4.2 GiB; the JSON has the exact number."""
    if size_bytes is None:
        return _NOTHING
    number = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:,.1f} PiB"


def duration(seconds: int) -> str:
    """As options take it, e.g. 3d or 1d12h."""
    parts, rest = [], seconds
    for unit, unit_s in _UNITS_S.items():
        count, rest = divmod(rest, unit_s)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def value_words(value: object) -> str:
    """A value of a configuration: text as it is, everything else as JSON."""
    if isinstance(value, str):
        return plain(value)
    return plain(json.dumps(dict(value) if isinstance(value, Mapping) else value, ensure_ascii=False, default=str))
