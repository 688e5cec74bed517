"""`kvstore-admin namespace`: who keeps blocks here, and what they agreed on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.admin_client import CHANGE_TIMEOUT_S, call, session_of
from kvstore.cli.admin_errors import CommandError, ExitCode
from kvstore.cli.admin_values import format_amount, format_bytes, format_hit_rate, format_share, parse_hex_prefix
from kvstore.cli.output import Cell, Digest, Facts, Listing, Result, Section, Sentence, format_time, time_of
from kvstore_api.namespace import KvGroup, NamespaceSpec, NamespaceSpecError, ParallelDimension
from kvstore_api.v1 import admin_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime

app = typer.Typer(no_args_is_help=True, help="List, show and drop namespaces.")

HexArgument = Annotated[
    str, typer.Argument(metavar="HEX", help="The namespace's digest, or at least 8 digits of its beginning.")
]


@dataclass(frozen=True, slots=True)
class Namespace(Result):
    """A namespace, its spec, what it holds, and what its matches asked for since the server's start."""

    namespace: bytes
    spec: NamespaceSpec
    blocks: int
    bytes: int
    create_time: datetime
    asked_tokens: int = 0
    hit_tokens: int = 0

    def sections(self) -> Iterable[Section]:
        """The result for people's eyes."""
        spec = self.spec
        yield Facts(
            [
                ("namespace", self.namespace.hex()),
                ("tenant", spec.tenant),
                ("model", spec.model),
                ("revision", spec.revision),
                ("engine", spec.engine),
                ("layout", spec.layout),
                ("kv dtype", spec.kv_dtype),
                ("block", f"{spec.block_tokens} tokens, {spec.block_bytes:,} bytes"),
                ("parallel", ", ".join(map(_dimension_text, spec.parallel)) or "-"),
                *((f"group {group.name}", _group_text(group)) for group in spec.groups),
                *((f"label {key}", value) for key, value in spec.labels.items()),
                ("holds", format_amount(self.blocks, self.bytes)),
                ("hit rate", format_hit_rate(self.hit_tokens, self.asked_tokens)),
                ("created", format_time(self.create_time)),
            ]
        )


@dataclass(frozen=True, slots=True)
class NamespaceList(Result):
    """All namespaces, by creation."""

    namespaces: Sequence[Namespace]

    def sections(self) -> Iterable[Section]:
        """The result for people's eyes."""
        if not self.namespaces:
            yield Sentence("no namespace is registered; an engine registers its own when it first connects")
            return
        rows: list[Sequence[Cell]] = [
            (
                Digest(n.namespace.hex()),
                n.spec.tenant,
                n.spec.model,
                n.spec.engine,
                n.spec.kv_dtype,
                n.spec.block_bytes,
                n.blocks,
                format_bytes(n.bytes),
                format_share(n.hit_tokens, n.asked_tokens),
                format_time(n.create_time),
            )
            for n in self.namespaces
        ]
        yield Listing(
            (
                *("namespace", "tenant", "model", "engine", "kv dtype", "block bytes"),
                *("blocks", "size", "hit rate", "created"),
            ),
            rows,
        )


@dataclass(frozen=True, slots=True)
class NamespaceDrop(Result):
    """What a drop forgot, or would forget."""

    done: bool
    namespace: bytes
    model: str
    blocks: int
    bytes: int

    def sections(self) -> Iterable[Section]:
        """The result for people's eyes."""
        verb = "dropped" if self.done else "would drop"
        yield Sentence(
            f"{verb} namespace {self.namespace.hex()} ({self.model}): {format_amount(self.blocks, self.bytes)}"
        )
        if not self.done:
            yield Sentence("nothing was changed; --yes does it")


@app.command("list")
def list_namespaces(ctx: typer.Context) -> NamespaceList:
    """Every namespace with its blocks and bytes.

    RPC: Admin.ListNamespaces. Example: kvstore-admin namespace list
    """
    session, request = session_of(ctx), admin_pb2.ListNamespacesRequest()
    namespaces: list[Namespace] = []
    while True:
        answer: admin_pb2.ListNamespacesResponse = call(session, "ListNamespaces", request)
        namespaces += map(_namespace, answer.namespaces)
        if not answer.next_page_token:
            return NamespaceList(namespaces)
        request.page_token = answer.next_page_token


@app.command("show")
def show(ctx: typer.Context, namespace: HexArgument) -> Namespace:
    """One namespace: everything its users agreed on, and what it holds.

    RPC: Admin.GetNamespace. Example: kvstore-admin namespace show 3f9a02c7
    """
    request = admin_pb2.GetNamespaceRequest(namespace_hex=parse_hex_prefix(namespace, "namespace"))
    answer: admin_pb2.GetNamespaceResponse = call(session_of(ctx), "GetNamespace", request)
    return _namespace(answer.namespace)


@app.command("drop")
def drop(
    ctx: typer.Context,
    namespace: HexArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without this, only say what would be dropped.")] = False,
) -> NamespaceDrop:
    """Forget a namespace, or say what would be forgotten.

    Its blocks are misses at once and for ever. Nothing is changed without --yes.

    RPC: Admin.DropNamespace. Example: kvstore-admin namespace drop 3f9a02c7 --yes
    """
    request = admin_pb2.DropNamespaceRequest(namespace_hex=parse_hex_prefix(namespace, "namespace"), dry_run=not yes)
    answer: admin_pb2.DropNamespaceResponse = call(session_of(ctx), "DropNamespace", request, CHANGE_TIMEOUT_S)
    info = answer.namespace
    return NamespaceDrop(
        done=yes, namespace=info.namespace, model=info.spec.model, blocks=info.live.blocks, bytes=info.live.bytes
    )


def _namespace(info: admin_pb2.NamespaceInfo) -> Namespace:
    try:
        spec = NamespaceSpec.from_proto(info.spec)
    except NamespaceSpecError as error:
        raise CommandError(
            f"namespace {info.namespace.hex()}: {error}",
            reason="SPEC_NOT_UNDERSTOOD",
            exit_code=ExitCode.ERROR,
            fix="use a kvstore-admin that is as new as the server",
        ) from None
    held, created = info.live, time_of(info.create_time)
    return Namespace(info.namespace, spec, held.blocks, held.bytes, created, info.asked_tokens, info.hit_tokens)


def _dimension_text(dimension: ParallelDimension) -> str:
    return f"{dimension.name} {dimension.rank} of {dimension.size}"


def _group_text(group: KvGroup) -> str:
    words = [group.kind.name.lower(), f"{len(group.layers)} layers"]
    if group.window_tokens:
        words.append(f"window {group.window_tokens} tokens")
    if group.replay_rule:
        words.append(f"replay {group.replay_rule.name.lower()}")
    if group.replay_tokens:
        words.append(f"of {group.replay_tokens} tokens")
    return ", ".join(words)
