"""The Admin service: what operators ask and order."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from functools import partial
from typing import TYPE_CHECKING

import grpc

from kvstore.errors import InvalidArgumentError, NotServingError
from kvstore.messages import (
    block_info_message,
    class_usage_messages,
    damaged_block_message,
    from_duration,
    invariants_message,
    namespace_message,
    quota_message,
    to_timestamp,
    traffic_class_message,
    usage_message,
)
from kvstore.rpc import Context, Handler, RpcEdge, deadline_s
from kvstore.scrub import Pace
from kvstore.types import EvictSelection
from kvstore_api.v1 import admin_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import TypeVar

    from kvstore.metrics import Metrics
    from kvstore.pool import Slot, StorePool
    from kvstore.scrub import ScrubStep
    from kvstore.service import Pools, StoreDoor
    from kvstore.store import LocalStore
    from kvstore.types import Namespace, TokenCounts, Usage

    T = TypeVar("T")

SERVICE_NAME = "kvstore.v1.Admin"

# Serialized namespaces in one answer: far from the 4 MiB that a message may have, and still hundreds of usual ones.
PAGE_BYTES_MAX = 1 << 20

# How often a scrub says how far it is; damage is told at once.
_PROGRESS_INTERVAL_S = 0.5

_PAGE_TOKEN = re.compile(r"[1-9][0-9]{0,9}")
_NAMESPACE_ID_MAX = 2**32 - 1


class AdminService:
    """The RPCs of `kvstore.v1.Admin`; they run on the control pool, but for scrubs, which have a thread of their own.

    Args:
        version: of the server.
        start_time_s: when it started, seconds since the epoch.
    """

    def __init__(self, store: StoreDoor, pools: Pools, metrics: Metrics, *, version: str, start_time_s: float) -> None:
        self._store = store
        self._pool: StorePool = pools.control
        self._scrub_pool: StorePool = pools.scrub
        self._stopping = asyncio.Event()
        self._metrics = metrics
        self._version = version
        self._start_time_s = start_time_s

    def handler(self) -> grpc.GenericRpcHandler:
        """What a gRPC server is given."""
        edge = RpcEdge(self._metrics)
        unary = edge.unary
        methods: dict[str, Handler] = {
            "GetStatus": unary("GetStatus", pb.GetStatusRequest, self._get_status),
            "ListNamespaces": unary("ListNamespaces", pb.ListNamespacesRequest, self._list_namespaces),
            "GetNamespace": unary("GetNamespace", pb.GetNamespaceRequest, self._get_namespace),
            "DropNamespace": unary("DropNamespace", pb.DropNamespaceRequest, self._drop_namespace),
            "ListTrafficClasses": unary("ListTrafficClasses", pb.ListTrafficClassesRequest, self._list_classes),
            "SetTrafficClassTtl": unary("SetTrafficClassTtl", pb.SetTrafficClassTtlRequest, self._set_ttl),
            "ListQuotas": unary("ListQuotas", pb.ListQuotasRequest, self._list_quotas),
            "Evict": unary("Evict", pb.EvictRequest, self._evict),
            "FindBlocks": unary("FindBlocks", pb.FindBlocksRequest, self._find_blocks),
            "Verify": edge.streams_out("Verify", pb.VerifyRequest, self._verify),
        }
        return grpc.method_handlers_generic_handler(SERVICE_NAME, methods)

    def stop_scrubs(self) -> None:
        """End scrubs that run: they go on for hours, and can be continued, so a server that stops does not wait for them."""
        self._stopping.set()

    async def _run(self, call: Callable[[], T], context: Context) -> T:
        return await self._pool.run(call, deadline_s(context))

    async def _get_status(self, _: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        store = self._store()
        status = await self._run(store.status, context)
        counters = store.counters.snapshot()
        return pb.GetStatusResponse(
            version=self._version,
            store_id=status.store_id,
            start_time=to_timestamp(self._start_time_s),
            data_dir=status.data_dir,
            capacity_bytes=status.capacity_bytes,
            used_bytes=status.used_bytes,
            retiring_bytes=status.retiring_bytes,
            live=usage_message(status.live),
            segment_count=status.segment_count,
            classes=class_usage_messages(status),
            namespace_count=status.namespace_count,
            counters=[pb.Counter(name=name, value=value) for name, value in counters.items()],
            hit_rate=_hit_rate(counters),
            durability=status.durability,
            invariants=invariants_message(status.invariants) if status.invariants is not None else None,
            write_amplification=_write_amplification(counters),
            clock_ahead_s=status.clock_ahead_s,
        )

    async def _list_namespaces(self, request: pb.ListNamespacesRequest, context: Context) -> pb.ListNamespacesResponse:
        return await self._run(partial(_namespace_page, self._store(), _last_namespace(request.page_token)), context)

    async def _get_namespace(self, request: pb.GetNamespaceRequest, context: Context) -> pb.GetNamespaceResponse:
        found = await self._run(partial(_find, self._store(), request.namespace_hex), context)
        return pb.GetNamespaceResponse(namespace=namespace_message(*found))

    async def _drop_namespace(self, request: pb.DropNamespaceRequest, context: Context) -> pb.DropNamespaceResponse:
        store = self._store()

        def drop() -> tuple[Namespace, Usage, TokenCounts]:
            namespace = store.find_namespace(request.namespace_hex)
            tokens = store.tokens_of(namespace)
            return namespace, store.drop_namespace(namespace, dry_run=request.dry_run), tokens

        return pb.DropNamespaceResponse(namespace=namespace_message(*await self._run(drop, context)))

    async def _list_classes(self, _: pb.ListTrafficClassesRequest, context: Context) -> pb.ListTrafficClassesResponse:
        status = await self._run(self._store().status, context)
        return pb.ListTrafficClassesResponse(classes=class_usage_messages(status))

    async def _set_ttl(self, request: pb.SetTrafficClassTtlRequest, context: Context) -> pb.SetTrafficClassTtlResponse:
        ttl_s = from_duration(request.ttl, "ttl")
        if ttl_s != int(ttl_s):
            raise InvalidArgumentError(f"ttl is {ttl_s} s, it must be whole seconds, at least 1")
        call = partial(self._store().set_ttl, request.traffic_class, int(ttl_s))
        before, after = await self._run(call, context)
        return pb.SetTrafficClassTtlResponse(before=traffic_class_message(before), after=traffic_class_message(after))

    async def _list_quotas(self, request: pb.ListQuotasRequest, context: Context) -> pb.ListQuotasResponse:
        return await self._run(partial(_quota_page, self._store(), _last_holder(request.page_token)), context)

    async def _evict(self, request: pb.EvictRequest, context: Context) -> pb.EvictResponse:
        store = self._store()

        def evict() -> Usage:
            return store.evict(_selection(store, request), dry_run=request.dry_run)

        usage = await self._run(evict, context)
        return pb.EvictResponse(blocks=usage.blocks, bytes=usage.bytes)

    async def _find_blocks(self, request: pb.FindBlocksRequest, context: Context) -> pb.FindBlocksResponse:
        infos = await self._run(partial(self._store().find_blocks, request.prefix_hash_hex), context)
        return pb.FindBlocksResponse(blocks=[block_info_message(info) for info in infos])

    async def _verify(self, request: pb.VerifyRequest, context: Context) -> None:
        store = self._store()
        steps = store.scrub(request.cursor, request.max_bytes)
        pace = Pace(request.bytes_per_second, time.monotonic())
        news = _ScrubNews()
        with self._scrub_pool.admit(deadline_s(context)) as slot:
            while (step := await self._next(steps, slot)) is not None:
                pause_s = pace.pause_s(news.add(step), time.monotonic())
                if news.due(pause_s):
                    await context.write(news.take())
                await self._pause(pause_s)
            if news.finished:
                check = store.invariant_steps()
                while (share := await self._next(check, slot)) is not None:
                    if news.due():
                        await context.write(news.take(invariants_done=share))
                report = store.last_invariants
                assert report is not None, "a check left no report"
                await context.write(news.take(invariants_done=1.0, invariants=invariants_message(report)))
            else:
                await context.write(news.take())

    async def _next(self, steps: Iterator[T], slot: Slot) -> T | None:
        if self._stopping.is_set():
            raise NotServingError("the server is stopping; continue from the last cursor once it is back")
        return await slot.run(partial(next, steps, None))

    async def _pause(self, pause_s: float) -> None:
        """Wait, unless the server stops."""
        if pause_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)


class _ScrubNews:
    """What a scrub has to tell since its last answer."""

    def __init__(self) -> None:
        self.finished = False
        self._message = pb.VerifyResponse()
        self._next_s = time.monotonic() + _PROGRESS_INTERVAL_S

    def add(self, step: ScrubStep) -> int:
        """Take a step in; returns the bytes it has read."""
        message, read_bytes = self._message, step.bytes_done - self._message.bytes_done
        message.cursor = str(step.cursor)
        message.segments_done, message.segments_total = step.segments_done, step.segments_total
        message.bytes_done, message.bytes_total = step.bytes_done, step.bytes_total
        message.blocks_checked = step.blocks_checked
        message.damaged.extend(damaged_block_message(block) for block in step.damaged)
        message.unreadable.extend(
            pb.UnreadableSegment(segment_id=segment.segment_id, detail=segment.why) for segment in step.unreadable
        )
        message.finished = self.finished = step.finished
        return read_bytes

    def due(self, pause_s: float = 0.0) -> bool:
        """Whether it is time for an answer, or will be within a pause that is about to be made."""
        found = self._message.damaged or self._message.unreadable
        return bool(found) or time.monotonic() + pause_s >= self._next_s

    def take(self, *, invariants_done: float = 0.0, invariants: pb.InvariantReport | None = None) -> bytes:
        """The answer, serialized; what was found is told only once."""
        self._next_s = time.monotonic() + _PROGRESS_INTERVAL_S
        self._message.invariants_done = invariants_done
        if invariants is not None:
            self._message.invariants.CopyFrom(invariants)
        data = self._message.SerializeToString()
        self._message.ClearField("damaged")
        self._message.ClearField("unreadable")
        return data


def _last_namespace(page_token: str) -> int:
    """The id of the last namespace sent before; 0 at the beginning."""
    if not page_token:
        return 0
    if _PAGE_TOKEN.fullmatch(page_token) and int(page_token) <= _NAMESPACE_ID_MAX:
        return int(page_token)
    raise InvalidArgumentError(f"page_token is {page_token[:64]!r}, which no answer of this call has given")


def _namespace_page(store: LocalStore, last_id: int) -> pb.ListNamespacesResponse:
    """Namespaces after `last_id`, as many as fit in a page; ids only rise, so those dropped meanwhile are no trouble."""
    page = pb.ListNamespacesResponse()
    page_bytes = 0
    for namespace, usage in store.namespaces():
        if namespace.namespace_id <= last_id:
            continue
        message = namespace_message(namespace, usage, store.tokens_of(namespace))
        page_bytes += message.ByteSize()
        if page.namespaces and page_bytes > PAGE_BYTES_MAX:
            page.next_page_token = str(last_id)
            break
        page.namespaces.append(message)
        last_id = namespace.namespace_id
    return page


# A token of quotas names the last holder sent before; classes come before tenants.
_HOLDER_KINDS = ("class", "tenant")


def _last_holder(page_token: str) -> tuple[int, str]:
    """What sorts as the last holder sent before; before all of them at the beginning."""
    kind, _, name = page_token.partition("/")
    if not page_token:
        return 0, ""
    if name and kind in _HOLDER_KINDS:
        return _HOLDER_KINDS.index(kind), name
    raise InvalidArgumentError(f"page_token is {page_token[:64]!r}, which no answer of this call has given")


def _quota_page(store: LocalStore, last: tuple[int, str]) -> pb.ListQuotasResponse:
    """Quotas of those whose names sort after `last`, as many as fit in a page; who comes or goes meanwhile is no trouble."""
    page = pb.ListQuotasResponse(capacity_bytes=store.capacity_bytes)
    page_bytes = 0
    holders = {(int(bool(quota.tenant)), quota.tenant or quota.traffic_class): quota for quota in store.quotas()}
    for holder in sorted(holders):
        if holder <= last:
            continue
        message = quota_message(holders[holder])
        page_bytes += message.ByteSize()
        if page.quotas and page_bytes > PAGE_BYTES_MAX:
            page.next_page_token = f"{_HOLDER_KINDS[last[0]]}/{last[1]}"
            break
        page.quotas.append(message)
        last = holder
    return page


def _find(store: LocalStore, hex_prefix: str) -> tuple[Namespace, Usage, TokenCounts]:
    namespace = store.find_namespace(hex_prefix)
    usage = {found.digest: usage for found, usage in store.namespaces()}
    return namespace, usage[namespace.digest], store.tokens_of(namespace)


def _selection(store: LocalStore, request: pb.EvictRequest) -> EvictSelection:
    """Raises: NamespaceNotFoundError, NamespaceAmbiguousError, InvalidArgumentError."""
    return EvictSelection(
        namespace=store.find_namespace(request.namespace_hex) if request.namespace_hex else None,
        traffic_class=request.traffic_class,
        older_than_s=from_duration(request.older_than, "older_than") if request.HasField("older_than") else None,
        down_to_share=request.down_to_share if request.HasField("down_to_share") else None,
    )


def _hit_rate(counters: Mapping[str, int]) -> float:
    asked = counters["asked_tokens"]
    return counters["hit_tokens"] / asked if asked else 0.0


def _write_amplification(counters: Mapping[str, int]) -> float:
    stored = counters["bytes_stored"]
    return counters["bytes_written"] / stored if stored else 0.0
