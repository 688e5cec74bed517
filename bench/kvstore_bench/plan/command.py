"""The command line of `kvstore-bench plan`."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  typer reads the annotations
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore_bench.errors import InputError
from kvstore_bench.options import JsonFile, write_json
from kvstore_bench.units import parse_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# A key of the configuration, its value, and the option that gave it.
_Change = tuple[tuple[str, ...], object, str]


def plan(
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A deployment of your own as TOML, instead of the reference deployment."),
    ] = None,
    tokens_per_day: Annotated[
        str | None, typer.Option(metavar="N", help="Input tokens a day, e.g. 155T or 2e9.")
    ] = None,
    hit_rate: Annotated[str | None, typer.Option(metavar="SHARE", help="Of input tokens, e.g. 0.96 or 96%.")] = None,
    bytes_per_token: Annotated[
        str | None, typer.Option(metavar="SIZE", help="KV of one token; or --block-bytes.")
    ] = None,
    block_bytes: Annotated[str | None, typer.Option(metavar="SIZE", help="KV of one block, e.g. 112KiB.")] = None,
    block_tokens: Annotated[str | None, typer.Option(metavar="N", help="Tokens of a block.")] = None,
    peak_factor: Annotated[
        str | None, typer.Option(metavar="X", help="Bandwidth at the peak over the average, 1 or more.")
    ] = None,
    share: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLASS=SHARE", help="A class's part of the input tokens; repeat it. A new name is a new class."
        ),
    ] = None,
    ttl: Annotated[
        list[str] | None,
        typer.Option(metavar="CLASS=DURATION", help="A class's TTL after the last use, e.g. chatbot=3d."),
    ] = None,
    reuse_span: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLASS=DURATION", help="Mean time from a block's first write to its last use, in a class."
        ),
    ] = None,
    class_hit_rate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLASS=SHARE", help="A class's own hit rate; the others make up for it, so that --hit-rate holds."
        ),
    ] = None,
    prefill_speed: Annotated[
        str | None, typer.Option(metavar="N", help="Missed tokens per second that one prefill instance computes.")
    ] = None,
    missed_tokens_per_s: Annotated[
        str | None,
        typer.Option(metavar="N", help="A rate that was measured: also say how many prefill instances it needs."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any other key of docs/capacity-plan.md, e.g. drive.size=15.36TB.",
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Compute what a load needs: SSD by class, bandwidth, drives, NICs, endurance, prefill instances.

    Without options it computes the reference deployment and shows where what is published of it and arithmetic differ. Sizes
    take decimal (kB, MB, GB, TB, PB) and binary (KiB … PiB) units, counts k, M, B, T. Nothing is measured.

    Example: kvstore-bench plan --tokens-per-day 2B --hit-rate 0.9 --share agent=0.5 --share chatbot=0.5 --ttl chatbot=3d
    """
    changes = [
        *_single(
            {
                "--tokens-per-day": (("load", "tokens_per_day"), tokens_per_day),
                "--hit-rate": (("load", "hit_rate"), hit_rate),
                "--peak-factor": (("load", "peak_factor"), peak_factor),
                "--bytes-per-token": (("kv", "bytes_per_token"), bytes_per_token),
                "--block-bytes": (("kv", "block_bytes"), block_bytes),
                "--block-tokens": (("kv", "block_tokens"), block_tokens),
                "--prefill-speed": (("prefill", "tokens_per_second"), prefill_speed),
            }
        ),
        *_of_classes({"--share": ("share", share), "--ttl": ("ttl", ttl)}),
        *_of_classes({"--reuse-span": ("reuse_span", reuse_span), "--class-hit-rate": ("hit_rate", class_hit_rate)}),
        *((tuple(key.split(".")), value, "--set") for key, value in _pairs("--set", set_ or [])),
    ]
    _run(config, changes, missed_tokens_per_s, json_file)


def _run(
    file: Path | None, changes: Sequence[_Change], missed_tokens_per_s: str | None, json_file: Path | None
) -> None:
    from kvstore_bench.plan.compare import compare
    from kvstore_bench.plan.config import load_plan
    from kvstore_bench.plan.model import make_plan
    from kvstore_bench.plan.report import plan_json, print_plan

    measured = _measured(missed_tokens_per_s)
    config = load_plan(file, changes)
    if measured is not None and config.prefill is None:
        raise InputError("--missed-tokens-per-s needs a prefill speed", "add a [prefill] table to the file")
    figures = make_plan(config, measured)
    comparisons = compare(config, figures)
    write_json(json_file, plan_json(config, figures, comparisons))
    print_plan(config, figures, comparisons)


def _measured(text: str | None) -> float | None:
    try:
        return None if text is None else parse_count(text)
    except ValueError as error:
        raise InputError(f"--missed-tokens-per-s is {text!r}, {error}", "give tokens per second, e.g. 2.5M") from None


def _single(options: Mapping[str, tuple[tuple[str, ...], str | None]]) -> Iterator[_Change]:
    for option, (key, value) in options.items():
        if value is not None:
            yield key, value, option


def _of_classes(options: Mapping[str, tuple[str, list[str] | None]]) -> Iterator[_Change]:
    for option, (key, given) in options.items():
        for name, value in _pairs(option, given or []):
            yield ("classes", name, key), value, option


def _pairs(option: str, given: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each NAME=VALUE, split. Raises: InputError: there is no name or no value, or a name stands twice."""
    seen: set[str] = set()
    for word in given:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise InputError(f"{option} {word!r} has no name or no value", f"write {option} NAME=VALUE")
        if name in seen:
            raise InputError(f"{option} gives {name!r} twice", "give it once")
        seen.add(name)
        yield name, value
