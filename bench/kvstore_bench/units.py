"""Quantities as people write them (155T, 112KiB, 15.36TB, 400Gbps, 3d, 96%), read strictly, and written for tables."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

DAY_S = 86_400

_DECIMAL = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}
_SIZES: Mapping[str, float] = {"B": 1, **{f"{prefix}B": factor for prefix, factor in {**_DECIMAL, **_BINARY}.items()}}
_RATES = {f"{unit}/s": factor for unit, factor in _SIZES.items()}
_LINE_RATES = {f"{prefix}bps": factor / 8 for prefix, factor in _DECIMAL.items()}
_COUNTS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_SHARES = {"": 1.0, "%": 0.01}
_PLAIN = {"": 1.0}

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]{1,3})?) ?([A-Za-z/%]*)", re.ASCII)
# As kvstore-admin reads them.
_DURATION = re.compile(r"(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?", re.ASCII)
_DURATION_S = (DAY_S, 3600, 60, 1)
_LARGEST = 1e30  # beyond all that is sold, and far from what floats can do


def parse_size(value: object) -> float:
    """Bytes, from a number with a unit. Raises: ValueError."""
    return _quantity(
        value, _SIZES, "a size with its unit: kB, MB, GB, TB, PB are decimal, KiB, MiB … binary, e.g. 112KiB"
    )


def parse_bytes(value: object) -> float:
    """Bytes, from a size, or a plain number where the name says that it is in bytes. Raises: ValueError."""
    return _quantity(
        value, {**_SIZES, **_PLAIN}, "bytes, or a size with its unit (kB decimal, KiB binary), e.g. 896 or 112KiB"
    )


def parse_rate(value: object) -> float:
    """Bytes per second. Raises: ValueError."""
    return _quantity(value, _RATES, "bytes per second with their unit (GB/s decimal, GiB/s binary), e.g. 7GB/s")


def parse_line_rate(value: object) -> float:
    """Bytes per second, from bits per second as networks are sold. Raises: ValueError."""
    return _quantity(value, _LINE_RATES, "bits per second with their decimal unit (Mbps, Gbps, Tbps), e.g. 400Gbps")


def parse_count(value: object) -> float:
    """How many. Raises: ValueError."""
    return _quantity(value, _COUNTS, "a number, with k, M, B (billion) or T (trillion) if you like, e.g. 155T")


def parse_share(value: object) -> float:
    """0 to 1. Raises: ValueError."""
    wanted = "a share from 0 to 1, e.g. 0.96 or 96%"
    share = _quantity(value, _SHARES, wanted)
    if share > 1:
        raise ValueError(f"wanted is {wanted}")
    return share


def parse_number(value: object) -> float:
    """A plain number, 0 or more. Raises: ValueError."""
    return _quantity(value, _PLAIN, "a plain number, e.g. 1.5")


def parse_whole(value: object) -> int:
    """A whole number. Raises: ValueError."""
    number = _quantity(value, _PLAIN, "a whole number, e.g. 2")
    if number != int(number):
        raise ValueError("wanted is a whole number, e.g. 2")
    return int(number)


def parse_duration(value: object) -> float:
    """Seconds. Raises: ValueError."""
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None or not value:
        raise ValueError("wanted is a duration: days, hours, minutes, seconds, e.g. 90s, 36h, 3d or 1d12h")
    return float(sum(int(number or 0) * unit for number, unit in zip(match.groups(), _DURATION_S, strict=True)))


def _quantity(value: object, units: Mapping[str, float], wanted: str) -> float:
    """Raises: ValueError: no number, a unit that is not among `units`, negative, or beyond 1e30."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = repr(value)
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in units:
        raise ValueError(f"wanted is {wanted}")
    # Times a whole number of hundredths, so that 96% is exactly what 0.96 is.
    amount = float(match[1]) / 100 if match[2] == "%" else float(match[1]) * units[match[2]]
    if not math.isfinite(amount) or amount > _LARGEST:
        raise ValueError(f"it is beyond {_LARGEST:g}, wanted is {wanted}")
    return amount


def format_size(size_bytes: float) -> str:
    """Binary units, three digits or more: 20.7 PiB."""
    power = min(max(int(math.log2(size_bytes)) // 10, 0), len(_BINARY)) if size_bytes >= 1 else 0
    unit = ["B", *(f"{prefix}B" for prefix in _BINARY)][power]
    return f"{_digits(size_bytes / 2 ** (10 * power))} {unit}"


def format_rate(bytes_per_s: float) -> str:
    """Binary units: 1.40 TiB/s."""
    return f"{format_size(bytes_per_s)}/s"


def format_count(count: float) -> str:
    """Decimal, with words that cannot be taken for bytes: 6.20 T."""
    for unit in ("T", "B", "M", "k"):
        if count >= _COUNTS[unit]:
            return f"{_digits(count / _COUNTS[unit])} {unit}"
    return _digits(count)


def format_days(seconds: float) -> str:
    """3.25 d."""
    return f"{_digits(seconds / DAY_S)} d"


def _digits(value: float) -> str:
    """Three significant digits, and all of those before the point; without zeros that say nothing behind a whole number."""
    if value >= 99.95 or math.isclose(value, round(value)):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
