"""The Admin service: what operators ask and order."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

import grpc

from kvstore.errors import InvalidArgumentError
from kvstore.messages import (
    block_info_message,
    class_usage_message,
    from_duration,
    namespace_message,
    to_timestamp,
    traffic_class_message,
    usage_message,
)
from kvstore.rpc import Context, Handler, RpcEdge, deadline_s
from kvstore.types import EvictSelection
from kvstore_api.v1 import admin_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TypeVar

    from kvstore.metrics import Metrics
    from kvstore.pool import StorePool
    from kvstore.service import StoreDoor
    from kvstore.store import LocalStore
    from kvstore.types import Namespace, Usage

    T = TypeVar("T")

SERVICE_NAME = "kvstore.v1.Admin"

# Serialized namespaces in one answer: far from the 4 MiB that a message may have, and still hundreds of usual ones.
PAGE_BYTES_MAX = 1 << 20

_PAGE_TOKEN = re.compile(r"[1-9][0-9]{0,9}")
_NAMESPACE_ID_MAX = 2**32 - 1


class AdminService:
    """The RPCs of `kvstore.v1.Admin`; all of them run on the control pool.

    Args:
        version: of the server.
        start_time_s: when it started, seconds since the epoch.
    """

    def __init__(
        self, store: StoreDoor, pool: StorePool, metrics: Metrics, *, version: str, start_time_s: float
    ) -> None:
        self._store = store
        self._pool = pool
        self._metrics = metrics
        self._version = version
        self._start_time_s = start_time_s

    def handler(self) -> grpc.GenericRpcHandler:
        """What a gRPC server is given."""
        unary = RpcEdge(self._metrics).unary
        methods: dict[str, Handler] = {
            "GetStatus": unary("GetStatus", pb.GetStatusRequest, self._get_status),
            "ListNamespaces": unary("ListNamespaces", pb.ListNamespacesRequest, self._list_namespaces),
            "GetNamespace": unary("GetNamespace", pb.GetNamespaceRequest, self._get_namespace),
            "DropNamespace": unary("DropNamespace", pb.DropNamespaceRequest, self._drop_namespace),
            "ListTrafficClasses": unary("ListTrafficClasses", pb.ListTrafficClassesRequest, self._list_classes),
            "SetTrafficClassTtl": unary("SetTrafficClassTtl", pb.SetTrafficClassTtlRequest, self._set_ttl),
            "Evict": unary("Evict", pb.EvictRequest, self._evict),
            "FindBlocks": unary("FindBlocks", pb.FindBlocksRequest, self._find_blocks),
        }
        return grpc.method_handlers_generic_handler(SERVICE_NAME, methods)

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
            classes=[class_usage_message(traffic_class, usage) for traffic_class, usage in status.classes],
            namespace_count=status.namespace_count,
            counters=[pb.Counter(name=name, value=value) for name, value in counters.items()],
            hit_rate=_hit_rate(counters),
            durability=status.durability,
        )

    async def _list_namespaces(self, request: pb.ListNamespacesRequest, context: Context) -> pb.ListNamespacesResponse:
        return await self._run(partial(_namespace_page, self._store(), _last_namespace(request.page_token)), context)

    async def _get_namespace(self, request: pb.GetNamespaceRequest, context: Context) -> pb.GetNamespaceResponse:
        namespace, usage = await self._run(partial(_find, self._store(), request.namespace_hex), context)
        return pb.GetNamespaceResponse(namespace=namespace_message(namespace, usage))

    async def _drop_namespace(self, request: pb.DropNamespaceRequest, context: Context) -> pb.DropNamespaceResponse:
        store = self._store()

        def drop() -> tuple[Namespace, Usage]:
            namespace = store.find_namespace(request.namespace_hex)
            return namespace, store.drop_namespace(namespace, dry_run=request.dry_run)

        return pb.DropNamespaceResponse(namespace=namespace_message(*await self._run(drop, context)))

    async def _list_classes(self, _: pb.ListTrafficClassesRequest, context: Context) -> pb.ListTrafficClassesResponse:
        status = await self._run(self._store().status, context)
        return pb.ListTrafficClassesResponse(classes=[class_usage_message(*pair) for pair in status.classes])

    async def _set_ttl(self, request: pb.SetTrafficClassTtlRequest, context: Context) -> pb.SetTrafficClassTtlResponse:
        ttl_s = from_duration(request.ttl, "ttl")
        if ttl_s != int(ttl_s):
            raise InvalidArgumentError(f"ttl is {ttl_s} s, it must be whole seconds, at least 1")
        call = partial(self._store().set_ttl, request.traffic_class, int(ttl_s))
        before, after = await self._run(call, context)
        return pb.SetTrafficClassTtlResponse(before=traffic_class_message(before), after=traffic_class_message(after))

    async def _evict(self, request: pb.EvictRequest, context: Context) -> pb.EvictResponse:
        store = self._store()

        def evict() -> Usage:
            return store.evict(_selection(store, request), dry_run=request.dry_run)

        usage = await self._run(evict, context)
        return pb.EvictResponse(blocks=usage.blocks, bytes=usage.bytes)

    async def _find_blocks(self, request: pb.FindBlocksRequest, context: Context) -> pb.FindBlocksResponse:
        infos = await self._run(partial(self._store().find_blocks, request.prefix_hash_hex), context)
        return pb.FindBlocksResponse(blocks=[block_info_message(info) for info in infos])


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
        message = namespace_message(namespace, usage)
        page_bytes += message.ByteSize()
        if page.namespaces and page_bytes > PAGE_BYTES_MAX:
            page.next_page_token = str(last_id)
            break
        page.namespaces.append(message)
        last_id = namespace.namespace_id
    return page


def _find(store: LocalStore, hex_prefix: str) -> tuple[Namespace, Usage]:
    namespace = store.find_namespace(hex_prefix)
    usage = {found.digest: usage for found, usage in store.namespaces()}
    return namespace, usage[namespace.digest]


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
