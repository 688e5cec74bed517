"""The formulas of `kvstore-bench plan`; docs/capacity-plan.md says what they assume.

All figures are bytes, seconds, tokens, and bytes or tokens per second. A token that is missed is computed and stored once; one that
is hit is read once. What is written at a steady rate and stays for a mean life is resident by Little's law: rate x life.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore_bench.units import DAY_S

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstore_bench.plan.config import PlanConfig, Prefill, TrafficClass

CAPACITY, BANDWIDTH, ENDURANCE = "capacity", "reads and writes", "endurance"


@dataclass(frozen=True, slots=True)
class ClassFigures:
    """One traffic class.

    Attributes:
        mean_life_s: from a block's first write to its expiry: the reuse span, then the TTL after the last use.
        resident_bytes: live payload, one copy.
        ssd_bytes: drives' bytes that it takes: all copies, and the room that is not filled.
    """

    share: float
    hit_rate: float
    ttl_s: float
    mean_life_s: float
    input_tokens_per_day: float
    missed_tokens_per_day: float
    written_tokens_per_day: float
    resident_bytes: float
    ssd_bytes: float


@dataclass(frozen=True, slots=True)
class Flow:
    """A rate, on average and at the peak."""

    average: float
    peak: float


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes per second: read from the store, put into it, and written to its drives: all copies, amplified."""

    read: Flow
    written: Flow
    drive_written: Flow


@dataclass(frozen=True, slots=True)
class Drives:
    """How many drives each need asks for, and what these then write.

    Attributes:
        by: need -> drives; reads and writes add up, because both peaks may come at once.
        by_reads, by_writes: the two parts of that need, each alone.
        binding: the need that asks for most.
        writes_per_day: times that each of `count` drives is written over in a day, and the part of its rating that this is.
    """

    count: int
    binding: str
    by: Mapping[str, int]
    by_reads: int
    by_writes: int
    written_bytes_per_day: float
    writes_per_day: float
    rating_used: float


@dataclass(frozen=True, slots=True)
class Nics:
    """Ports of storage nodes for the peaks: out are reads and copies to other nodes, in is what is put and those copies."""

    count: int
    by_out: int
    by_in: int


@dataclass(frozen=True, slots=True)
class WindowKv:
    """Window KV, were it stored for as long as the blocks; `share` is its part of all bytes then."""

    bytes_per_token: float
    resident_bytes: float
    ssd_bytes: float
    average_written: float
    share: float


@dataclass(frozen=True, slots=True)
class PrefillFigures:
    """Tokens per second to prefill and the instances for them, at the load's average and peak; or at a rate that was measured."""

    missed_tokens_per_s: Flow
    average_instances: int
    peak_instances: int
    measured_tokens_per_s: float | None
    measured_instances: int | None


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """The plan; its fields are keys of the JSON."""

    bytes_per_token: float
    hit_tokens_per_day: float
    missed_tokens_per_day: float
    written_tokens_per_day: float
    resident_bytes: float
    ssd_bytes: float
    classes: Mapping[str, ClassFigures]
    bandwidth: Bandwidth
    drives: Drives
    nics: Nics
    window_every_token: WindowKv | None
    window_snapshots: WindowKv | None
    prefill: PrefillFigures | None


def make_plan(config: PlanConfig, measured_tokens_per_s: float | None = None) -> PlanFigures:
    """Compute the plan; `measured_tokens_per_s` is a rate of missed tokens to size prefill for, besides the load's own."""
    rates = config.hit_rates()
    classes = {name: class_figures(config, item, rates[name]) for name, item in config.classes.items()}
    missed = sum(figures.missed_tokens_per_day for figures in classes.values())
    written = sum(figures.written_tokens_per_day for figures in classes.values())
    hit = sum(figures.input_tokens_per_day for figures in classes.values()) - missed
    resident = sum(figures.resident_bytes for figures in classes.values())
    ssd_bytes = sum(figures.ssd_bytes for figures in classes.values())
    bandwidth = _bandwidth(config, hit, written)
    windows = _windows(config, written, resident)
    return PlanFigures(
        bytes_per_token=config.kv.token_bytes,
        hit_tokens_per_day=hit,
        missed_tokens_per_day=missed,
        written_tokens_per_day=written,
        resident_bytes=resident,
        ssd_bytes=ssd_bytes,
        classes=classes,
        bandwidth=bandwidth,
        drives=_drives(config, ssd_bytes, bandwidth),
        nics=_nics(config, bandwidth),
        window_every_token=windows[0] if windows else None,
        window_snapshots=windows[1] if windows else None,
        prefill=_prefill(config.prefill, missed, measured_tokens_per_s) if config.prefill else None,
    )


def class_figures(config: PlanConfig, item: TrafficClass, hit_rate: float, ttl_s: float | None = None) -> ClassFigures:
    """A class's figures, with its own TTL or another."""
    ttl_s = item.ttl if ttl_s is None else ttl_s
    tokens = config.load.tokens_per_day * item.share
    missed = tokens * (1 - hit_rate)
    written = missed + tokens * config.load.output_share
    life_s = item.reuse_span + ttl_s
    resident = resident_bytes(written, config.kv.token_bytes, life_s)
    return ClassFigures(
        share=item.share,
        hit_rate=hit_rate,
        ttl_s=ttl_s,
        mean_life_s=life_s,
        input_tokens_per_day=tokens,
        missed_tokens_per_day=missed,
        written_tokens_per_day=written,
        resident_bytes=resident,
        ssd_bytes=resident * config.store.copies / config.store.fill,
    )


def resident_bytes(tokens_per_day: float, token_bytes: float, life_s: float) -> float:
    """What is there when so much is written each day and stays for so long on average: Little's law."""
    return tokens_per_day * token_bytes * life_s / DAY_S


def instances(tokens_per_s: float, prefill: Prefill) -> int:
    """Prefill instances for a rate of missed tokens."""
    return _whole(tokens_per_s / (prefill.tokens_per_second * prefill.utilisation))


def _bandwidth(config: PlanConfig, hit_per_day: float, written_per_day: float) -> Bandwidth:
    token_bytes, peak = config.kv.token_bytes, config.load.peak_factor
    read = hit_per_day * token_bytes / DAY_S
    written = written_per_day * token_bytes / DAY_S
    drive_written = written * config.store.copies * config.store.write_amplification
    return Bandwidth(*(Flow(average, average * peak) for average in (read, written, drive_written)))


def _drives(config: PlanConfig, ssd_bytes: float, bandwidth: Bandwidth) -> Drives:
    drive = config.drive
    reads = bandwidth.read.peak / (drive.read * drive.utilisation)
    writes = bandwidth.drive_written.peak / (drive.write * drive.utilisation)
    written_per_day = bandwidth.drive_written.average * DAY_S
    by = {
        CAPACITY: _whole(ssd_bytes / drive.size),
        BANDWIDTH: _whole(reads + writes),
        ENDURANCE: _whole(written_per_day / (drive.size * drive.writes_per_day)),
    }
    binding = max(by, key=by.__getitem__)
    count = by[binding]
    writes_per_day = written_per_day / (count * drive.size)
    return Drives(
        count=count,
        binding=binding,
        by=by,
        by_reads=_whole(reads),
        by_writes=_whole(writes),
        written_bytes_per_day=written_per_day,
        writes_per_day=writes_per_day,
        rating_used=writes_per_day / drive.writes_per_day,
    )


def _nics(config: PlanConfig, bandwidth: Bandwidth) -> Nics:
    usable = config.nic.speed * config.nic.utilisation
    copied = bandwidth.written.peak * (config.store.copies - 1)  # the first node to have a block sends it on
    by_out = _whole((bandwidth.read.peak + copied) / usable)
    by_in = _whole((bandwidth.written.peak + copied) / usable)
    return Nics(max(by_out, by_in), by_out, by_in)


def _windows(config: PlanConfig, written_per_day: float, resident: float) -> Sequence[WindowKv]:
    """Stored for every token; and as snapshots. They live as long as the blocks beside them."""
    window, token_bytes = config.window, config.kv.token_bytes
    if window is None:
        return ()
    return [
        WindowKv(
            bytes_per_token=per_token,
            resident_bytes=resident * per_token / token_bytes,
            ssd_bytes=resident * per_token / token_bytes * config.store.copies / config.store.fill,
            average_written=written_per_day * per_token / DAY_S,
            share=per_token / (per_token + token_bytes),
        )
        for per_token in (window.bytes_per_token, window.snapshot_bytes / window.snapshot_every_tokens)
    ]


def _prefill(prefill: Prefill, missed_per_day: float, measured: float | None) -> PrefillFigures:
    missed = Flow(missed_per_day / DAY_S, missed_per_day / DAY_S * prefill.peak_factor)
    return PrefillFigures(
        missed_tokens_per_s=missed,
        average_instances=instances(missed.average, prefill),
        peak_instances=instances(missed.peak, prefill),
        measured_tokens_per_s=measured,
        measured_instances=None if measured is None else instances(measured, prefill),
    )


def _whole(count: float) -> int:
    """Rounded up; what floats get wrong in the last digits is no reason for one more."""
    return math.ceil(count * (1 - 1e-12))
