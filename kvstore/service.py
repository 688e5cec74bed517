"""The BlockStore service: unpack, ask the store on a pool, pack. No I/O on the event loop."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import grpc

from kvstore.assembly import BlockAssembler, check_part
from kvstore.errors import InvalidArgumentError, NamespaceMismatchError, NotServingError, UnknownTrafficClassError
from kvstore.messages import (
    from_duration,
    put_result_message,
    read_frame_message,
    resume_plan_message,
    state_frames,
    to_timestamp,
    traffic_class_message,
)
from kvstore.pool import StorePool, settled
from kvstore.rpc import Context, Handler, RpcEdge, deadline_s, parse
from kvstore_api.chain import Chain
from kvstore_api.framing import FrameError, split_frame
from kvstore_api.limits import HASH_BYTES, MAX_CHAIN_BLOCKS, MAX_STATE_BYTES, MAX_STATE_NAME_BYTES
from kvstore_api.namespace import NamespaceSpec, NamespaceSpecError
from kvstore_api.results import PutResult, PutStatus
from kvstore_api.v1 import block_store_pb2 as pb
from kvstore_api.v1 import types_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from concurrent.futures import Future

    from kvstore.config import ServerSection
    from kvstore.metrics import Metrics
    from kvstore.pool import Slot
    from kvstore.store import LocalStore
    from kvstore.types import PutBlock

T = TypeVar("T")
P = TypeVar("P", pb.PutBlocksRequest, pb.PutStateRequest)

SERVICE_NAME = "kvstore.v1.BlockStore"

# A put hands blocks to the writer in groups of about this size: large enough to share a group commit, small enough that
# the writer starts while the rest still travels.
PUT_GROUP_BYTES = 8 << 20
# Groups of one put that may wait for the writer; with the one being filled, that bounds what a put can hold in memory.
PUT_GROUPS_IN_FLIGHT = 2
# Rejected blocks whose detail is sent; 65,536 details would not fit in a message. Every block has its reason.
DETAILS_MAX = 1024

# Registering, deleting and the operators' calls: rare, some of them slow.
_CONTROL_THREADS, _CONTROL_PENDING_MAX = 4, 64
# A second scrub would read the same blocks again.
_SCRUB_THREADS, _SCRUB_PENDING_MAX = 1, 1


@dataclass(frozen=True, slots=True)
class Pools:
    """One bounded pool per kind of work, so that none starves another."""

    match: StorePool
    read: StorePool
    write: StorePool
    control: StorePool
    scrub: StorePool

    @classmethod
    def of(cls, config: ServerSection) -> Pools:
        """Pools of the configured sizes."""
        return cls(
            match=StorePool("match", config.match_threads, config.match_pending_max),
            read=StorePool("read", config.read_threads, config.read_pending_max),
            write=StorePool("write", config.write_threads, config.write_pending_max),
            control=StorePool("control", _CONTROL_THREADS, _CONTROL_PENDING_MAX),
            scrub=StorePool("scrub", _SCRUB_THREADS, _SCRUB_PENDING_MAX),
        )

    def all(self) -> tuple[StorePool, ...]:
        """Every pool."""
        return (self.match, self.read, self.write, self.control, self.scrub)

    def close(self) -> None:
        """Wait for all threads. Blocks."""
        for pool in self.all():
            pool.close()


class StoreDoor:
    """The store once it is open; until then, and after it is closed, calls are turned away."""

    def __init__(self) -> None:
        self.store: LocalStore | None = None

    def __call__(self) -> LocalStore:
        """Raises: NotServingError: the store is not open."""
        if self.store is None:
            raise NotServingError("the server is starting or stopping: its store is not open")
        return self.store


class BlockStoreService:
    """The RPCs of `kvstore.v1.BlockStore`. Lives on the event loop's thread."""

    def __init__(self, store: StoreDoor, pools: Pools, metrics: Metrics) -> None:
        self._store = store
        self._pools = pools
        self._metrics = metrics

    def handler(self) -> grpc.GenericRpcHandler:
        """What a gRPC server is given."""
        edge = RpcEdge(self._metrics)
        methods: dict[str, Handler] = {
            "RegisterNamespace": edge.unary("RegisterNamespace", pb.RegisterNamespaceRequest, self._register_namespace),
            "MatchPrefix": edge.unary("MatchPrefix", pb.MatchPrefixRequest, self._match_prefix),
            "GetBlocks": edge.streams_out("GetBlocks", pb.GetBlocksRequest, self._get_blocks),
            "PutBlocks": edge.streams_in("PutBlocks", self._put_blocks),
            "DeleteBlocks": edge.unary("DeleteBlocks", pb.DeleteBlocksRequest, self._delete_blocks),
            "GetState": edge.streams_out("GetState", pb.GetStateRequest, self._get_state),
            "PutState": edge.streams_in("PutState", self._put_state),
        }
        return grpc.method_handlers_generic_handler(SERVICE_NAME, methods)

    async def _register_namespace(
        self, request: pb.RegisterNamespaceRequest, context: Context
    ) -> pb.RegisterNamespaceResponse:
        store = self._store()
        spec = _spec(request)
        call = partial(store.register_namespace, spec)
        namespace = await self._pools.control.run(call, deadline_s(context))
        return pb.RegisterNamespaceResponse(
            namespace=namespace.digest,
            traffic_classes=[traffic_class_message(traffic_class) for traffic_class in store.traffic_classes()],
            max_chain_blocks=MAX_CHAIN_BLOCKS,
        )

    async def _match_prefix(self, request: pb.MatchPrefixRequest, context: Context) -> pb.MatchPrefixResponse:
        store = self._store()
        call = partial(
            store.match,
            store.namespace(request.namespace),
            _chain(request.chain),
            request.traffic_class,
            lease_s=from_duration(request.lease, "lease") if request.HasField("lease") else None,
            peek=request.peek,
        )
        match = await self._pools.match.run(call, deadline_s(context))
        return pb.MatchPrefixResponse(
            hit_length_blocks=match.hit_length_blocks,
            lease=match.lease,
            lease_expiry=to_timestamp(match.lease_expiry_s) if match.lease else None,
            plan=resume_plan_message(match.plan),
        )

    async def _get_blocks(self, request: pb.GetBlocksRequest, context: Context) -> None:
        store = self._store()
        namespace, chain = store.namespace(request.namespace), _chain(request.chain)

        def frames() -> Generator[bytes, None, None]:
            # On a reading thread. A frame's parts are valid until the next is asked for: join them right here.
            read = store.read(
                namespace,
                chain,
                request.first_block,
                request.block_count,
                request.lease,
                part_offset_bytes=request.part_offset_bytes,
                part_bytes=request.part_bytes,
                in_messages=True,
            )
            for frame in read:
                yield read_frame_message(frame)

        with self._pools.read.admit(deadline_s(context)) as slot:
            await _send(frames, slot, context)

    async def _put_blocks(self, context: Context) -> pb.PutBlocksResponse:
        store = self._store()
        request, data = await _first_message(pb.PutBlocksRequest, context)
        if data or request.blocks:
            raise InvalidArgumentError("the first message of a put holds only the header, but it brings blocks")
        header = request.header
        namespace, chain = store.namespace(header.namespace), _chain(header.chain)
        _check_range(chain, header.first_block, header.block_count)
        _check_traffic_class(store, header.traffic_class)
        assembler = BlockAssembler(header.first_block, header.block_count, namespace.spec.block_bytes)
        with self._pools.write.admit(deadline_s(context)) as slot:
            groups = _PutGroups(partial(store.submit_put, namespace, chain, traffic_class=header.traffic_class), slot)
            while (message := await context.read()) is not grpc.aio.EOF:
                frame, data = _split(pb.PutBlocksRequest, message)
                if frame.HasField("header"):
                    raise InvalidArgumentError("a second header in one put")
                arrived = list(assembler.add(frame, data))
                rejected = [result for result in arrived if isinstance(result, PutResult)]
                store.counters.add(blocks_rejected=len(rejected))
                groups.reject(rejected)
                await groups.add([block for block in arrived if not isinstance(block, PutResult)], len(message))
            assembler.finish()
            results = await groups.finish(range(header.first_block, header.first_block + header.block_count))
        self._metrics.count_rejected(results)
        return pb.PutBlocksResponse(results=_put_result_messages(results))

    async def _delete_blocks(self, request: pb.DeleteBlocksRequest, context: Context) -> pb.DeleteBlocksResponse:
        store = self._store()
        namespace, chain = store.namespace(request.namespace), _chain(request.chain)
        call = partial(store.delete, namespace, chain, request.first_block, request.block_count)
        return pb.DeleteBlocksResponse(deleted_blocks=await self._pools.control.run(call, deadline_s(context)))

    async def _get_state(self, request: pb.GetStateRequest, context: Context) -> None:
        store = self._store()
        namespace = store.namespace(request.namespace)

        def frames() -> Generator[bytes, None, None]:
            state = store.read_state(namespace, request.prefix_hash, request.name, request.traffic_class)
            yield from state_frames(state)

        with self._pools.read.admit(deadline_s(context)) as slot:
            await _send(frames, slot, context)

    async def _put_state(self, context: Context) -> pb.PutStateResponse:
        store = self._store()
        request, data = await _first_message(pb.PutStateRequest, context)
        if data:
            raise InvalidArgumentError(
                f"the first message of a put holds only the header, but it brings {len(data)} bytes"
            )
        header = request.header
        namespace = store.namespace(header.namespace)
        _check_state_name(header.prefix_hash, header.name)
        _check_traffic_class(store, header.traffic_class)
        if not 1 <= header.size_bytes <= MAX_STATE_BYTES:
            raise InvalidArgumentError(f"size_bytes is {header.size_bytes}, a state object has 1 to {MAX_STATE_BYTES}")
        with self._pools.write.admit(deadline_s(context)) as slot:
            buffer = await _receive_state(header.size_bytes, context)
            call = partial(
                store.submit_put_state,
                namespace,
                header.prefix_hash,
                header.name,
                buffer,
                header.checksum,
                header.traffic_class,
            )
            result = await settled(await slot.run(call))
        self._metrics.count_rejected([result])
        return pb.PutStateResponse(result=put_result_message(result))


class _PutGroups:
    """Blocks of one put on their way to the writer: filled to about `PUT_GROUP_BYTES`, few in flight.

    Args:
        submit: hands a group to the store; runs on the slot's threads because it checks the blocks' checksums.
    """

    def __init__(self, submit: Callable[[list[PutBlock]], Future[list[PutResult]]], slot: Slot) -> None:
        self._submit = submit
        self._slot = slot
        self._group: list[PutBlock] = []
        self._group_bytes = 0
        self._in_flight: deque[Future[list[PutResult]]] = deque()
        self._results: dict[int, PutResult] = {}

    async def add(self, blocks: Sequence[PutBlock], message_bytes: int) -> None:
        """Take a frame's blocks; waits when too much is in flight, and so makes the sender wait.

        Args:
            message_bytes: what views keep in memory, however little of it they show.
        """
        if not blocks:
            return
        self._group += blocks
        self._group_bytes += max(message_bytes, sum(memoryview(block.data).nbytes for block in blocks))
        if self._group_bytes >= PUT_GROUP_BYTES:
            await self._flush()

    def reject(self, results: Sequence[PutResult]) -> None:
        """Note blocks that were rejected before the store saw them."""
        self._results.update((result.block, result) for result in results)

    async def finish(self, blocks: range) -> list[PutResult]:
        """One result for each of `blocks`, once the store has answered for all that were added."""
        if self._group:
            await self._flush()
        while self._in_flight:
            await self._collect()
        missing = PutStatus.REJECTED, "MISSING", "the put announced this block and did not bring it"
        return [self._results.get(block) or PutResult(block, *missing) for block in blocks]

    async def _flush(self) -> None:
        if len(self._in_flight) >= PUT_GROUPS_IN_FLIGHT:
            await self._collect()
        group, self._group, self._group_bytes = self._group, [], 0
        self._in_flight.append(await self._slot.run(partial(self._submit, group)))

    async def _collect(self) -> None:
        for result in await settled(self._in_flight.popleft()):
            self._results[result.block] = result


async def _send(open_frames: Callable[[], Generator[bytes, None, None]], slot: Slot, context: Context) -> None:
    """Write frames that a thread produces, one ahead: while a frame travels, the next is read.

    Reading several at a time was tried and measured slower: the write then waits for the last of them. Returns when all are
    sent; whatever ends it, the iterator is closed on a thread.
    """
    source = _Frames(open_frames)
    ahead = slot.start(source.next)
    try:
        while (frame := await ahead) is not None:
            ahead = slot.start(source.next)
            await context.write(frame)
    except BaseException:  # most often the caller has left
        ahead.cancel()
        if ahead.done() and not ahead.cancelled():
            ahead.exception()  # seen, though nobody awaits it any more
        slot.last(source.close)
        raise


class _Frames:
    """A generator of frames that is opened, advanced and closed on pool threads, by one job at a time."""

    def __init__(self, open_frames: Callable[[], Generator[bytes, None, None]]) -> None:
        self._open = open_frames
        self._frames: Generator[bytes, None, None] | None = None

    def next(self) -> bytes | None:
        """The next frame; None at the end."""
        if self._frames is None:
            self._frames = self._open()
        return next(self._frames, None)

    def close(self) -> None:
        """Give back what the generator holds."""
        if self._frames is not None:
            self._frames.close()


async def _first_message(kind: type[P], context: Context) -> tuple[P, memoryview]:
    message = await context.read()
    if message is grpc.aio.EOF:
        raise InvalidArgumentError("the put ended without a header")
    request, data = _split(kind, message)
    if not request.HasField("header"):
        raise InvalidArgumentError("the first message of a put has no header")
    return request, data


def _split(kind: type[P], message: bytes) -> tuple[P, memoryview]:
    try:
        fields, data = split_frame(message)
    except FrameError as error:
        raise InvalidArgumentError(f"the request is no {kind.DESCRIPTOR.full_name}: {error}") from None
    return parse(kind, fields), data


async def _receive_state(size_bytes: int, context: Context) -> bytearray:
    buffer = bytearray()  # grows with what arrives: a size that was only announced costs nothing
    while (message := await context.read()) is not grpc.aio.EOF:
        frame, data = _split(pb.PutStateRequest, message)
        if frame.HasField("header"):
            raise InvalidArgumentError("a second header in one put")
        what = f"a state object, of which {len(buffer)} of {size_bytes} bytes have come"
        check_part(len(buffer), size_bytes, frame.offset_bytes, data, what)
        buffer += data
    if len(buffer) < size_bytes:
        raise InvalidArgumentError(f"the put ended after {len(buffer)} of {size_bytes} bytes")
    return buffer


def _put_result_messages(results: list[PutResult]) -> list[types_pb2.PutResult]:
    rejected = 0
    messages = []
    for result in results:
        rejected += result.status is PutStatus.REJECTED
        messages.append(put_result_message(result, with_detail=rejected <= DETAILS_MAX))
    return messages


def _spec(request: pb.RegisterNamespaceRequest) -> NamespaceSpec:
    try:
        spec = NamespaceSpec.from_proto(request.spec)
    except NamespaceSpecError as error:
        raise InvalidArgumentError(f"namespace spec: {error}") from None
    if request.namespace and request.namespace != spec.digest():
        raise NamespaceMismatchError(
            f"the client names this spec {request.namespace.hex()[:16]}…, the server {spec.digest().hex()[:16]}…: "
            "their versions do not fit"
        )
    return spec


def _chain(data: bytes) -> Chain:
    try:
        return Chain(data)
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from None


def _check_range(chain: Chain, first_block: int, block_count: int) -> None:
    """For puts, whose range is needed before the store sees a block; in other calls the store checks."""
    if block_count < 1:
        raise InvalidArgumentError(f"block_count is {block_count}, it must be at least 1")
    if first_block + block_count > len(chain):
        raise InvalidArgumentError(
            f"blocks {first_block} to {first_block + block_count - 1} are meant, but the chain has {len(chain)} blocks"
        )


def _check_traffic_class(store: LocalStore, name: str) -> None:
    """Before any byte is taken: the store would say so only with the first group."""
    names = [traffic_class.name for traffic_class in store.traffic_classes()]
    if name and name not in names:
        raise UnknownTrafficClassError(f"traffic class {name!r} is unknown; known are {', '.join(sorted(names))}")


def _check_state_name(prefix_hash: bytes, name: str) -> None:
    """For puts, before any byte is taken; in a get the store checks."""
    if len(prefix_hash) != HASH_BYTES:
        raise InvalidArgumentError(f"prefix_hash has {len(prefix_hash)} bytes, not {HASH_BYTES}")
    size = len(name.encode())
    if not 1 <= size <= MAX_STATE_NAME_BYTES:
        raise InvalidArgumentError(f"name has {size} bytes, allowed are 1 to {MAX_STATE_NAME_BYTES}")
