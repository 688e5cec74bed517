"""`kvstore-admin evict`: make room by what blocks are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from google.protobuf import duration_pb2

from kvstore.cli.admin_client import CHANGE_TIMEOUT_S, call, session_of
from kvstore.cli.admin_errors import CommandError, ExitCode, usage_error
from kvstore.cli.admin_values import (
    check_class_name,
    format_amount,
    format_duration,
    parse_duration,
    parse_hex_prefix,
    parse_share,
)
from kvstore.cli.output import Result, Section, Sentence
from kvstore_api.v1 import admin_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Selection:
    """Which blocks: every condition given must hold."""

    namespace: str | None
    traffic_class: str | None
    older_than_s: int | None
    down_to_share: float | None

    def __str__(self) -> str:
        words = []
        if self.namespace:
            words.append(f"in namespace {self.namespace}")
        if self.traffic_class:
            words.append(f"in traffic class {self.traffic_class!r}")
        if self.older_than_s:
            words.append(f"last used at least {format_duration(self.older_than_s)} ago")
        if self.down_to_share is not None:
            words.append(f"coldest first, down to {self.down_to_share:.1%} of the capacity")
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Eviction(Result):
    """What was evicted, or would be."""

    done: bool
    selection: Selection
    blocks: int
    bytes: int

    def sections(self) -> Iterable[Section]:
        """The result for people's eyes."""
        verb = "evicted" if self.done else "would evict"
        yield Sentence(f"{verb} {format_amount(self.blocks, self.bytes)}: {self.selection}")
        if not self.done and self.blocks:
            yield Sentence("nothing was changed; --yes does it")

    def complaint(self) -> CommandError | None:
        """That nothing matched. A share that is kept already is a target reached, not a failed search."""
        if self.blocks or self.selection.down_to_share is not None:
            return None
        return CommandError(
            f"no block is {self.selection}",
            reason="NOTHING_MATCHED",
            exit_code=ExitCode.NOT_FOUND,
            fix="widen the conditions; `kvstore-admin status` shows what is there",
        )


def evict(
    ctx: typer.Context,
    namespace: Annotated[
        str | None, typer.Option(metavar="HEX", help="Only this namespace: its digest, or 8 digits or more of it.")
    ] = None,
    traffic_class: Annotated[
        str | None, typer.Option("--class", metavar="NAME", help="Only blocks kept in this traffic class's segments.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Only blocks last used at least this long ago, e.g. 36h, 2d.")
    ] = None,
    down_to: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="Coldest first, until live blocks use at most this share of the capacity, e.g. 0.5 or 50%.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without this, only say what would be evicted.")] = False,
) -> Eviction:
    """Evict blocks by what they are, or say what would be evicted.

    Blocks must meet every condition given, and at least one must be given. Nothing is changed without --yes.

    Exits 4 when no block matches; with --down-to, a share that is kept already is no error.

    RPC: Admin.Evict. Example: kvstore-admin evict --class chatbot --older-than 2d --yes
    """
    selection = _selection(namespace, traffic_class, older_than, down_to)
    answer: admin_pb2.EvictResponse = call(
        session_of(ctx), "Evict", _request(selection, dry_run=not yes), CHANGE_TIMEOUT_S
    )
    return Eviction(done=yes, selection=selection, blocks=answer.blocks, bytes=answer.bytes)


def _selection(
    namespace: str | None, traffic_class: str | None, older_than: str | None, down_to: str | None
) -> Selection:
    if namespace is traffic_class is older_than is down_to is None:
        raise usage_error(
            "evict needs a condition", "give at least one of --namespace, --class, --older-than and --down-to"
        )
    return Selection(
        namespace=None if namespace is None else parse_hex_prefix(namespace, "--namespace"),
        traffic_class=None if traffic_class is None else check_class_name(traffic_class, "--class"),
        older_than_s=None if older_than is None else parse_duration(older_than, "--older-than"),
        down_to_share=None if down_to is None else parse_share(down_to, "--down-to"),
    )


def _request(selection: Selection, *, dry_run: bool) -> admin_pb2.EvictRequest:
    return admin_pb2.EvictRequest(
        namespace_hex=selection.namespace or "",
        traffic_class=selection.traffic_class or "",
        older_than=None if selection.older_than_s is None else duration_pb2.Duration(seconds=selection.older_than_s),
        down_to_share=selection.down_to_share,
        dry_run=dry_run,
    )
