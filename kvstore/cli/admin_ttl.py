"""`kvstore-admin ttl`: traffic classes and how long they keep a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from google.protobuf import duration_pb2

from kvstore.cli.admin_client import call, session_of
from kvstore.cli.admin_values import check_class_name, format_bytes, format_duration, format_share, parse_duration
from kvstore.cli.output import Cell, Listing, Result, Section, Sentence
from kvstore_api.v1 import admin_pb2, types_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


app = typer.Typer(no_args_is_help=True, help="Show and change how long traffic classes keep blocks.")

_REFRESH_RULES = {types_pb2.REFRESH_RULE_ON_ACCESS: "on_access", types_pb2.REFRESH_RULE_ON_WRITE: "on_write"}


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """A class's rules."""

    name: str
    ttl_s: int
    refresh: str  # on_access: a match or put of a block starts its TTL anew; on_write: only storing it does


@dataclass(frozen=True, slots=True)
class ClassUsage:
    """A class, what lies in its segments, and what its matches asked for since the server's start."""

    name: str
    ttl_s: int
    refresh: str
    blocks: int
    bytes: int
    asked_tokens: int = 0
    hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TtlList(Result):
    """The classes in force, by name."""

    classes: Sequence[ClassUsage]

    def sections(self) -> Iterable[Section]:
        """The result for people's eyes."""
        yield class_listing(self.classes)


@dataclass(frozen=True, slots=True)
class TtlChange(Result):
    """A class before and after its TTL was set."""

    before: TrafficClass
    after: TrafficClass

    def sections(self) -> Iterable[Section]:
        """The result for people's eyes."""
        before, after = format_duration(self.before.ttl_s), format_duration(self.after.ttl_s)
        yield Sentence(f"traffic class {self.after.name!r}: TTL was {before}, is now {after}")


def class_listing(classes: Sequence[ClassUsage]) -> Listing:
    """Classes as a table."""
    rows: list[Sequence[Cell]] = [
        (
            usage.name,
            format_duration(usage.ttl_s),
            usage.refresh,
            usage.blocks,
            format_bytes(usage.bytes),
            usage.asked_tokens,
            format_share(usage.hit_tokens, usage.asked_tokens),
        )
        for usage in classes
    ]
    return Listing(("class", "ttl", "refresh", "blocks", "size", "asked tokens", "hit rate"), rows)


def class_usage(usage: admin_pb2.ClassUsage) -> ClassUsage:
    """Read the wire form."""
    rules = _traffic_class(usage.traffic_class)
    held = usage.usage
    return ClassUsage(
        rules.name, rules.ttl_s, rules.refresh, held.blocks, held.bytes, usage.asked_tokens, usage.hit_tokens
    )


@app.command("list")
def list_classes(ctx: typer.Context) -> TtlList:
    """Every class: TTL, refresh rule, and what it keeps.

    RPC: Admin.ListTrafficClasses. Example: kvstore-admin ttl list
    """
    answer: admin_pb2.ListTrafficClassesResponse = call(
        session_of(ctx), "ListTrafficClasses", admin_pb2.ListTrafficClassesRequest()
    )
    return TtlList([class_usage(usage) for usage in answer.classes])


@app.command("set")
def set_ttl(
    ctx: typer.Context,
    traffic_class: Annotated[str, typer.Argument(metavar="CLASS", help="The traffic class, e.g. agent.")],
    ttl: Annotated[str, typer.Argument(metavar="DURATION", help="The new TTL, e.g. 90s, 10m, 36h, 7d or 1d12h.")],
) -> TtlChange:
    """Change how long a class keeps its blocks.

    Acts at once on the blocks already stored, and survives a restart. A shorter TTL lets blocks expire now; a longer one keeps
    those alive for longer, but revives nothing that has expired.

    RPC: Admin.SetTrafficClassTtl. Example: kvstore-admin ttl set chatbot 7d
    """
    request = admin_pb2.SetTrafficClassTtlRequest(
        traffic_class=check_class_name(traffic_class, "CLASS"),
        ttl=duration_pb2.Duration(seconds=parse_duration(ttl, "DURATION")),
    )
    answer: admin_pb2.SetTrafficClassTtlResponse = call(session_of(ctx), "SetTrafficClassTtl", request)
    return TtlChange(_traffic_class(answer.before), _traffic_class(answer.after))


def _traffic_class(traffic_class: types_pb2.TrafficClass) -> TrafficClass:
    refresh = _REFRESH_RULES.get(traffic_class.refresh, "on_access")  # unspecified means the default
    return TrafficClass(traffic_class.name, traffic_class.ttl.seconds, refresh)
