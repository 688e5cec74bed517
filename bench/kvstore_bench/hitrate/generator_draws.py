"""Random draws of the workload generator, the same ones on every machine.

Everything comes from uniform doubles of PCG64, whose stream NumPy keeps fixed across versions, which it does not promise for
its normal distribution. Each conversation has streams of its own, and draws a row of fixed width for each sitting and each
request: a changed parameter changes what it is about and leaves other conversations, and earlier draws, as they were.
`exp`, `log` and `cos` may differ in their last bit between processors, so that results are rounded: tokens to whole
ones, times to milliseconds.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from kvstore_bench.units import DAY_S

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore_bench.hitrate.generator_parameters import LogNormal, Returns, Starts, TwoLogNormals

    Floats = NDArray[np.float64]

_MINUTES = 24 * 60


def stream(seed: int, *key: int) -> np.random.Generator:
    """A stream of its own for each key."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))


def lognormal(wanted: LogNormal, uniforms: Floats) -> Floats:
    """Shape (…,) from uniforms of shape (…, 2), by Box and Muller's method."""
    normal = np.sqrt(-2.0 * np.log1p(-uniforms[..., 0])) * np.cos(2.0 * np.pi * uniforms[..., 1])
    drawn: Floats = wanted.median * np.exp(wanted.sigma * normal)
    return drawn


def two_lognormals(wanted: TwoLogNormals, uniforms: Floats) -> Floats:
    """Shape (…,) from uniforms of shape (…, 3)."""
    is_long = uniforms[..., 0] < wanted.long_share
    return np.where(is_long, lognormal(wanted.long, uniforms[..., 1:]), lognormal(wanted.short, uniforms[..., 1:]))


def whole(values: Floats, at_least: int) -> NDArray[np.int64]:
    """Rounded down."""
    return np.maximum(np.floor(values), at_least).astype(np.int64)


def start_s(starts: Starts, first_day: int, end_day: int, uniforms: Floats) -> float:
    """When a conversation begins, in seconds from midnight of day 0; from two uniforms: the day and the time of day."""
    day = first_day + np.floor(uniforms[0] * (end_day - first_day))
    minute = np.interp(uniforms[1], _starts_by_minute(starts), np.arange(_MINUTES + 1))
    return float(day * DAY_S + minute * 60.0)


@lru_cache(maxsize=8)
def _starts_by_minute(starts: Starts) -> Floats:
    """Shape (minutes of a day + 1,): share of a day's starts that lie before; the integral of the density in closed form."""
    hours = np.arange(_MINUTES + 1) / 60.0
    angle, zero = (2 * np.pi * (at - starts.peak_hour) / 24 for at in (hours, 0.0))
    before: Floats = hours / 24 + starts.diurnal_amplitude * (np.sin(angle) - np.sin(zero)) / (2 * np.pi)
    return before


def return_gap_s(returns: Returns, uniforms: Floats) -> float:
    """From the last request of a sitting to the first of the next; from four uniforms: same day, two for the gap, jitter."""
    if uniforms[0] < returns.same_day_share:
        return float(lognormal(returns.same_day_gap_s, uniforms[1:3]))
    days = 1 + np.searchsorted(_returns_by_day(returns), uniforms[1], side="right")
    return float(days * DAY_S + (2 * uniforms[3] - 1) * returns.jitter_hours * 3600)


@lru_cache(maxsize=8)
def _returns_by_day(returns: Returns) -> Floats:
    """Shape (max_days,): share of the returns after a day or more that come within 1, 2, … days; the last one is 1."""
    days = np.arange(1, returns.max_days + 1)
    weights = days**-returns.exponent * np.where(days % 7 == 0, returns.weekly_factor, 1.0)
    within: Floats = np.cumsum(weights) / weights.sum()
    within[-1] = 1.0
    return within


@lru_cache(maxsize=16)
def _popularity(count: int, exponent: float) -> Floats:
    weights = np.arange(1, count + 1) ** -exponent
    within: Floats = np.cumsum(weights) / weights.sum()
    within[-1] = 1.0
    return within


def pick_popular(count: int, exponent: float, uniform: float) -> int:
    """From 0 to `count` - 1, where n has P ∝ (n + 1)^-exponent."""
    return int(np.searchsorted(_popularity(count, exponent), uniform, side="right"))
