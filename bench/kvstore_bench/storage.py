"""kvstore-bench storage: the bytes a model's KV takes in a store, and what not storing window KV saves: computed, not measured."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path  # noqa: TC003  typer reads the annotations
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvstore_api.limits import BLOCK_TOKENS
from kvstore_bench.errors import InputError
from kvstore_bench.machine import describe_commit
from kvstore_bench.options import JsonFile, write_json
from kvstore_bench.report import print_tables, utc_now
from kvstore_bench.units import DAY_S, parse_duration
from kvstore_client.model_config import ModelConfigError
from kvstore_client.model_kv import VLLM, ModelKv, model_kv_layout
from kvstore_client.presets import UnknownPresetError, preset_config, preset_names

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import NoReturn

# What a request of a coding agent adds, the mean over 692 public sessions: one snapshot at the end of each request is one every so
# many tokens. The mean and not the median (655), because bytes add up.
SNAPSHOT_EVERY_TOKENS = 1832

_MILLION = 1_000_000
_MAX_TOKENS_PER_DAY = 1e18


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """What is asked."""

    model: str
    kv_dtype: str
    engine: str
    snapshot_every_tokens: int
    tokens_per_day: float | None
    ttl_s: int | None


@dataclass(frozen=True, slots=True)
class KvBytes:
    """Bytes of one kind of KV. `resident_bytes` is for the tokens of a whole TTL, None when they are not known."""

    bytes_per_block: float
    bytes_per_million_tokens: float
    resident_bytes: float | None


@dataclass(frozen=True, slots=True)
class StorageFigures:
    """The estimate; its fields are keys of the JSON.

    Attributes:
        full: what is stored: the blocks, padding included.
        padding_bytes_per_block: of `full`.
        window_every_token: the window layers' KV, were every token's stored like a block's.
        window_snapshots: the same, were one snapshot of it stored every `snapshot_every_tokens`.
        share_saved_every_token, share_saved_snapshots: the window KV's share of all bytes in those two cases: what is saved by
            storing none of it.
    """

    block_tokens: int
    full_layers: tuple[int, ...]
    window_layers: tuple[int, ...]
    window_tokens: int
    padding_bytes_per_block: int
    snapshot_bytes: int
    full: KvBytes
    window_every_token: KvBytes
    window_snapshots: KvBytes
    share_saved_every_token: float
    share_saved_snapshots: float


def estimate(kv: ModelKv, config: StorageConfig) -> StorageFigures:
    """The figures of a model's KV."""
    full = _kv_bytes(kv.block_bytes, config)
    every_token = _kv_bytes(kv.window_block_bytes, config)
    snapshots = _kv_bytes(kv.snapshot_bytes * BLOCK_TOKENS / config.snapshot_every_tokens, config)
    return StorageFigures(
        block_tokens=BLOCK_TOKENS,
        full_layers=kv.layout.layers,
        window_layers=kv.window_layers,
        window_tokens=kv.window_tokens,
        padding_bytes_per_block=kv.layout.padding_bytes,
        snapshot_bytes=kv.snapshot_bytes,
        full=full,
        window_every_token=every_token,
        window_snapshots=snapshots,
        share_saved_every_token=_share(every_token, full),
        share_saved_snapshots=_share(snapshots, full),
    )


def _kv_bytes(bytes_per_block: float, config: StorageConfig) -> KvBytes:
    bytes_per_token = bytes_per_block / BLOCK_TOKENS
    resident_bytes = None
    if config.tokens_per_day is not None and config.ttl_s is not None:
        resident_bytes = bytes_per_token * config.tokens_per_day * config.ttl_s / DAY_S
    return KvBytes(bytes_per_block, bytes_per_token * _MILLION, resident_bytes)


def _share(part: KvBytes, rest: KvBytes) -> float:
    return part.bytes_per_block / (part.bytes_per_block + rest.bytes_per_block)


def storage(
    model: Annotated[str | None, typer.Option(metavar="NAME", help="A model that is known by name.")] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Any other model's config.json, as on Hugging Face.")
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="The KV's number format; the configuration's own if not given.")
    ] = None,
    engine: Annotated[
        str, typer.Option(metavar="NAME", help="Whose padding blocks of a compressing model have: vllm or deepinfer.")
    ] = VLLM,
    snapshot_every: Annotated[
        int,
        typer.Option(
            metavar="TOKENS",
            help="New tokens from one window snapshot to the next. The default is one a request: what requests of coding "
            "agents add on average (half of them add 655 or less).",
        ),
    ] = SNAPSHOT_EVERY_TOKENS,
    tokens_per_day: Annotated[
        float | None, typer.Option(metavar="N", help="New tokens a day, those not hit, e.g. 6e12; with --ttl.")
    ] = None,
    ttl: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="How long KV is kept, e.g. 36h, 3d or 1d12h; with --tokens-per-day."),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Compute what a model's KV takes in a store, and what not storing sliding-window KV saves.

    Full-attention KV is what is stored. Window KV is not: in many models it would take more than all the rest, and a short replay
    brings it back.

    Example: kvstore-bench storage --model deepseek-v4.1-flash --tokens-per-day 6e12 --ttl 3d
    """
    if snapshot_every < 1:
        raise InputError(f"--snapshot-every {snapshot_every} is out of range", "give 1 or more")
    ttl_s = _resident_inputs(tokens_per_day, ttl)
    name, values = _configuration(model, config)
    try:
        kv = model_kv_layout(values, kv_dtype, engine=engine)
    except ModelConfigError as error:
        _refuse(error, name)
    asked = StorageConfig(name, kv.kv_dtype, engine, snapshot_every, tokens_per_day, ttl_s)
    figures = estimate(kv, asked)
    if json_file is not None:
        _write(json_file, asked, figures)
    _print(asked, figures)


def _configuration(model: str | None, file: Path | None) -> tuple[str, Mapping[str, object]]:
    """The model's name and its configuration."""
    if model is not None and file is None:
        try:
            return model, preset_config(model)
        except UnknownPresetError as error:
            raise InputError(str(error), "name a known model, or give --config", "UNKNOWN_MODEL") from None
    if file is None or model is not None:
        problem = "both --model and --config are" if file is not None else "neither --model nor --config is"
        raise InputError(f"{problem} given", f"give one: --model {preset_names()[0]}, or --config config.json")
    return str(file), _read(file)


def _read(file: Path) -> Mapping[str, object]:
    try:
        values: Mapping[str, object] = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"--config {str(file)!r} cannot be read: {error.strerror}", "name a readable config.json"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"--config {str(file)!r} is no JSON: {error}", "name a model's config.json", "INVALID_MODEL_CONFIG"
        ) from None
    return values


def _refuse(error: ModelConfigError, name: str) -> NoReturn:
    if error.key == "kv_dtype":
        raise InputError(str(error), "give --kv-dtype with one of the model's formats") from None
    if error.key == "engine":
        raise InputError(str(error), "give --engine vllm or --engine deepinfer") from None
    raise InputError(f"{name}: {error}", f"correct {error.key} in the file", "INVALID_MODEL_CONFIG") from None


def _resident_inputs(tokens_per_day: float | None, ttl: str | None) -> int | None:
    """The TTL in seconds, or None when residence is not asked for."""
    if (tokens_per_day is None) != (ttl is None):
        raise InputError("--tokens-per-day and --ttl belong together", "give both, or neither")
    if tokens_per_day is None or ttl is None:
        return None
    if not 0 < tokens_per_day <= _MAX_TOKENS_PER_DAY:
        raise InputError(
            f"--tokens-per-day {tokens_per_day} is out of range",
            f"give a number above 0 and up to {_MAX_TOKENS_PER_DAY:g}, e.g. 6e12",
        )
    try:
        seconds = parse_duration(ttl)
    except ValueError:
        seconds = 0.0
    if not seconds:
        raise InputError(f"--ttl {ttl!r} is no duration, or none at all", "write e.g. 90s, 36h, 3d or 1d12h")
    return int(seconds)


def _write(file: Path, config: StorageConfig, figures: StorageFigures) -> None:
    report = {
        "benchmark": "storage",
        "kvstore_version": version("kvstore"),
        "commit": describe_commit(),
        "time": utc_now(),
        "config": asdict(config),
        "figures": asdict(figures),
    }
    write_json(file, report)


def _print(config: StorageConfig, figures: StorageFigures) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    heads = [f"bytes per {BLOCK_TOKENS} tokens", "MB per 1 M tokens", "saved by not storing it"]
    if config.tokens_per_day is not None:
        heads.append("resident TiB")
    table.add_column("")
    for head in heads:
        table.add_column(head, justify="right")
    for title, kv, share in (
        ("full-attention KV: stored", figures.full, None),
        ("window KV, of every token", figures.window_every_token, figures.share_saved_every_token),
        (
            f"window KV, a snapshot every {config.snapshot_every_tokens:,} tokens",
            figures.window_snapshots,
            figures.share_saved_snapshots,
        ),
    ):
        table.add_row(title, *_cells(kv, share))
    print_tables(_head(config, figures), [table], _definitions(config, figures))


def _cells(kv: KvBytes, share: float | None) -> list[str]:
    cells = [
        f"{kv.bytes_per_block:,.0f}",
        f"{kv.bytes_per_million_tokens / 1e6:,.1f}",
        "-" if share is None else f"{share:.1%}",
    ]
    if kv.resident_bytes is not None:
        cells.append(f"{kv.resident_bytes / 2**40:,.3f}")
    return cells


def _head(config: StorageConfig, figures: StorageFigures) -> str:
    windows = (
        f"{len(figures.window_layers)} layers have windows of {figures.window_tokens:,} tokens that a resume needs"
        if figures.window_layers
        else "no layer has a window"
    )
    return f"{config.model}, KV in {config.kv_dtype}: {len(figures.full_layers)} layers are in the block, {windows}"


def _definitions(config: StorageConfig, figures: StorageFigures) -> str:
    lines = [
        f"stored: blocks of {BLOCK_TOKENS} tokens as the engine ({config.engine}) pads them, "
        f"{figures.padding_bytes_per_block:,} B of it padding",
        "of every token: the window layers' KV of each token once, as if they were in the block",
        f"a snapshot: all window layers' slots, {figures.snapshot_bytes:,} B; "
        f"{BLOCK_TOKENS} tokens' part of it is {BLOCK_TOKENS} / {config.snapshot_every_tokens:,}",
        "saved: window bytes / (window + stored bytes): the share of the disk that storing that window KV as well would take",
    ]
    if config.tokens_per_day is not None and config.ttl_s is not None:
        lines.append(
            f"resident: bytes per token x {config.tokens_per_day:g} new tokens a day x {config.ttl_s / 86_400:g} days; "
            "each token once, and none used again before it expires: use prolongs, so take it for a lower bound"
        )
    return "\n".join(lines)
