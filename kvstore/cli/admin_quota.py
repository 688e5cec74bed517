"""`kvstore-admin quota`: what traffic classes and tenants may hold, and hold."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import typer

from kvstore.cli.admin_client import call, session_of
from kvstore.cli.admin_values import format_bytes
from kvstore.cli.output import Cell, Listing, Result, Section
from kvstore_api.v1 import admin_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

app = typer.Typer(no_args_is_help=True, help="Show what traffic classes and tenants may hold.")


class Kind(Enum):
    """Who may hold something."""

    TRAFFIC_CLASS = "traffic class"
    TENANT = "tenant"


@dataclass(frozen=True, slots=True)
class Quota:
    """A traffic class or tenant: what it may hold, as parts of the capacity, and what it holds."""

    kind: Kind
    name: str
    share: float  # while it holds no more than that, its blocks are evicted last
    limit: float  # puts beyond it are rejected
    blocks: int
    bytes: int
    taken_bytes: int  # with padding; what share and limit are compared with


@dataclass(frozen=True, slots=True)
class QuotaList(Result):
    """Every traffic class, then every tenant that has a namespace or a quota; by name."""

    capacity_bytes: int
    quotas: Sequence[Quota]

    def sections(self) -> Iterable[Section]:
        """The result for people's eyes."""
        rows: list[Sequence[Cell]] = [
            (
                quota.kind.value,
                quota.name,
                _percent(quota.share),
                _percent(quota.limit),
                f"{format_bytes(quota.taken_bytes)} ({quota.taken_bytes / self.capacity_bytes:.1%})",
            )
            for quota in self.quotas
        ]
        yield Listing(("kind", "name", "share", "limit", "held"), rows)


@app.command("list")
def list_quotas(ctx: typer.Context) -> QuotaList:
    """Every traffic class and tenant: what it may hold, and what it holds.

    While somebody holds no more than the share, its blocks are evicted after everybody else's. Puts beyond the limit are
    rejected. What is held is shown with padding, which counts, and as a part of the capacity. A tenant "other" is the quota of
    each one not named.

    RPC: Admin.ListQuotas. Example: kvstore-admin quota list
    """
    session, request = session_of(ctx), admin_pb2.ListQuotasRequest()
    quotas: list[Quota] = []
    while True:
        answer: admin_pb2.ListQuotasResponse = call(session, "ListQuotas", request)
        quotas += map(_quota, answer.quotas)
        if not answer.next_page_token:
            return QuotaList(answer.capacity_bytes, quotas)
        request.page_token = answer.next_page_token


def _quota(message: admin_pb2.QuotaUsage) -> Quota:
    tenant = message.WhichOneof("holder") == "tenant"
    return Quota(
        kind=Kind.TENANT if tenant else Kind.TRAFFIC_CLASS,
        name=message.tenant if tenant else message.traffic_class,
        share=message.share,
        limit=message.limit,
        blocks=message.usage.blocks,
        bytes=message.usage.bytes,
        taken_bytes=message.taken_bytes,
    )


def _percent(share: float) -> str:
    return f"{100 * share:g}%"
