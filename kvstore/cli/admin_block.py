"""`kvstore-admin block`: everything known about single blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli.admin_client import call, session_of
from kvstore.cli.admin_errors import CommandError, ExitCode
from kvstore.cli.admin_values import parse_hex_prefix
from kvstore.cli.output import Cell, Facts, Listing, Result, Section, format_time, time_of
from kvstore_api.v1 import admin_pb2, types_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime

app = typer.Typer(no_args_is_help=True, help="Show single blocks.")


@dataclass(frozen=True, slots=True)
class ClassUse:
    """A class's last use of a block, and when that alone would let it expire."""

    traffic_class: str
    last_use: datetime
    expiry: datetime


@dataclass(frozen=True, slots=True)
class Block:
    """A block and where it lies."""

    namespace: bytes | None  # None once its namespace was dropped
    prefix_hash: bytes
    block: int  # position in its chain
    state: str  # live, expired, dead (evicted or deleted, not yet reclaimed) or dropped (its namespace is gone)
    state_object: bool
    size_bytes: int
    checksum: str  # xxh3-64, 16 hex digits
    segment_id: int
    slot: int
    create_time: datetime
    uses: Sequence[ClassUse]


@dataclass(frozen=True, slots=True)
class BlockList(Result):
    """The blocks whose prefix hash begins so, at most 100."""

    blocks: Sequence[Block]

    def sections(self) -> Iterable[Section]:
        """The result for people's eyes."""
        for block in self.blocks:
            yield _facts(block)
            rows: list[Sequence[Cell]] = [
                (use.traffic_class, format_time(use.last_use), format_time(use.expiry)) for use in block.uses
            ]
            yield Listing(("used by class", "last use", "expiry"), rows)


@app.command("show")
def show(
    ctx: typer.Context,
    prefix_hash: Annotated[
        str, typer.Argument(metavar="HASH", help="A prefix hash in hex, or at least 8 digits of its beginning.")
    ],
) -> BlockList:
    """Where a block lies, who used it last, when it expires.

    State objects beside it are shown too; at most 100 in all.

    RPC: Admin.FindBlocks. Example: kvstore-admin block show 5be1c8d04a77
    """
    digits = parse_hex_prefix(prefix_hash, "prefix hash")
    answer: admin_pb2.FindBlocksResponse = call(
        session_of(ctx), "FindBlocks", admin_pb2.FindBlocksRequest(prefix_hash_hex=digits)
    )
    if not answer.blocks:
        raise CommandError(
            f"block {digits!r} not found",
            reason="BLOCK_NOT_FOUND",
            exit_code=ExitCode.NOT_FOUND,
            fix="check the hash; a block that was reclaimed leaves no trace",
        )
    return BlockList([_block(info) for info in answer.blocks])


def _block(info: admin_pb2.BlockInfo) -> Block:
    return Block(
        namespace=info.namespace or None,
        prefix_hash=info.prefix_hash,
        block=info.block,
        state=info.state,
        state_object=info.state_object,
        size_bytes=info.size_bytes,
        checksum=f"{info.checksum:016x}",
        segment_id=info.segment_id,
        slot=info.slot,
        create_time=time_of(info.create_time),
        uses=[_use(use) for use in info.uses],
    )


def _use(use: types_pb2.ClassUse) -> ClassUse:
    return ClassUse(use.traffic_class, time_of(use.last_use), time_of(use.expiry))


def _facts(block: Block) -> Facts:
    return Facts(
        [
            ("prefix hash", block.prefix_hash.hex()),
            ("namespace", block.namespace.hex() if block.namespace else "-"),
            ("kind", "state object" if block.state_object else f"block {block.block} of its chain"),
            ("state", block.state),
            ("size", f"{block.size_bytes:,} bytes"),
            ("checksum", block.checksum),
            ("segment", f"{block.segment_id}, slot {block.slot}"),
            ("stored", format_time(block.create_time)),
        ]
    )
