"""The store's types to wire messages and back. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf import duration_pb2, timestamp_pb2

from kvstore.errors import InvalidArgumentError
from kvstore.types import TokenCounts
from kvstore_api.framing import join_frame
from kvstore_api.limits import MAX_FRAME_DATA_BYTES
from kvstore_api.v1 import admin_pb2, block_store_pb2, types_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.scrub import DamagedBlock
    from kvstore.traffic import TrafficClass
    from kvstore.types import (
        BlockInfo,
        InvariantReport,
        Namespace,
        QuotaUsage,
        ReadFrame,
        StateObject,
        StoreStatus,
        Usage,
    )
    from kvstore_api.results import PutResult
    from kvstore_api.resume import ResumePlan

_NANOS = 1_000_000_000


def to_timestamp(time_s: float) -> timestamp_pb2.Timestamp:
    """Seconds since the epoch."""
    nanos = round(time_s * _NANOS)
    return timestamp_pb2.Timestamp(seconds=nanos // _NANOS, nanos=nanos % _NANOS)


def to_duration(seconds: int) -> duration_pb2.Duration:
    """Whole seconds."""
    return duration_pb2.Duration(seconds=seconds)


def from_duration(duration: duration_pb2.Duration, name: str) -> float:
    """Seconds, 0 or more. Raises: InvalidArgumentError: negative, or no valid duration; names the field."""
    if duration.seconds < 0 or not 0 <= duration.nanos < _NANOS:
        raise InvalidArgumentError(f"{name} is {duration.seconds} s and {duration.nanos} ns, it must not be negative")
    return duration.seconds + duration.nanos / _NANOS


def traffic_class_message(traffic_class: TrafficClass) -> types_pb2.TrafficClass:
    """A traffic class."""
    refresh = types_pb2.RefreshRule.Name(traffic_class.refresh)
    return types_pb2.TrafficClass(name=traffic_class.name, ttl=to_duration(traffic_class.ttl_s), refresh=refresh)


def resume_plan_message(plan: ResumePlan) -> types_pb2.ResumePlan:
    """A resume plan."""
    mode = types_pb2.ReplayMode.Name(plan.mode)
    return types_pb2.ResumePlan(hit_tokens=plan.hit_tokens, replay_start_token=plan.replay_start_token, mode=mode)


def put_result_message(result: PutResult, *, with_detail: bool = True) -> types_pb2.PutResult:
    """A put's result for one block."""
    status = types_pb2.PutStatus.Name(result.status)
    detail = result.detail if with_detail else ""
    return types_pb2.PutResult(block=result.block, status=status, reason=result.reason, detail=detail)


def read_frame_message(frame: ReadFrame) -> bytes:
    """A `GetBlocksResponse`, serialized; copies the frame's parts once, and bytes that are in the message already never."""
    fields = block_store_pb2.GetBlocksResponse(
        blocks=frame.blocks,
        checksums=frame.checksums,
        offset_bytes=frame.offset_bytes,
        block_checksums=frame.block_checksums,
        misses=[types_pb2.Miss(block=miss.block, reason=miss.reason) for miss in frame.misses],
    )
    if frame.message is not None:
        return frame.message.finish(fields)
    return join_frame(fields, frame.parts, frame.size_bytes)


def state_frames(state: StateObject | None) -> Iterator[bytes]:
    """The `GetStateResponse`s of a state object, serialized; one that says so when there is none."""
    if state is None:
        yield block_store_pb2.GetStateResponse(found=False).SerializeToString()
        return
    view = memoryview(state.data)
    for offset in range(0, max(len(view), 1), MAX_FRAME_DATA_BYTES):
        fields = block_store_pb2.GetStateResponse(offset_bytes=offset)
        if offset == 0:
            fields.found, fields.size_bytes, fields.checksum = True, len(view), state.checksum
        part = view[offset : offset + MAX_FRAME_DATA_BYTES]
        yield join_frame(fields, (part,), len(part))


def usage_message(usage: Usage) -> admin_pb2.Usage:
    """Blocks and bytes."""
    return admin_pb2.Usage(blocks=usage.blocks, bytes=usage.bytes)


def class_usage_messages(status: StoreStatus) -> list[admin_pb2.ClassUsage]:
    """Each class, what lies in its segments, and what its matches asked for."""
    messages = []
    for traffic_class, usage in status.classes:
        tokens = status.class_tokens.get(traffic_class.name, TokenCounts())
        messages.append(
            admin_pb2.ClassUsage(
                traffic_class=traffic_class_message(traffic_class),
                usage=usage_message(usage),
                asked_tokens=tokens.asked_tokens,
                hit_tokens=tokens.hit_tokens,
            )
        )
    return messages


def quota_message(quota: QuotaUsage) -> admin_pb2.QuotaUsage:
    """What a class or tenant may hold, and holds."""
    message = admin_pb2.QuotaUsage(
        share=quota.share, limit=quota.limit, usage=usage_message(quota.usage), taken_bytes=quota.usage.taken_bytes
    )
    if quota.tenant:
        message.tenant = quota.tenant
    else:
        message.traffic_class = quota.traffic_class
    return message


def namespace_message(namespace: Namespace, usage: Usage, tokens: TokenCounts) -> admin_pb2.NamespaceInfo:
    """A namespace, what it holds, and what its matches asked for."""
    return admin_pb2.NamespaceInfo(
        namespace=namespace.digest,
        spec=namespace.spec.to_proto(),
        live=usage_message(usage),
        create_time=to_timestamp(namespace.create_time_s),
        asked_tokens=tokens.asked_tokens,
        hit_tokens=tokens.hit_tokens,
    )


def block_info_message(info: BlockInfo) -> admin_pb2.BlockInfo:
    """Everything known about a block."""
    return admin_pb2.BlockInfo(
        namespace=info.namespace,
        prefix_hash=info.prefix_hash,
        block=info.block,
        size_bytes=info.size_bytes,
        checksum=info.checksum,
        segment_id=info.addr.segment_id,
        slot=info.addr.slot,
        create_time=to_timestamp(info.create_time_s),
        uses=[
            types_pb2.ClassUse(
                traffic_class=use.traffic_class,
                last_use=to_timestamp(use.last_use_s),
                expiry=to_timestamp(use.expiry_s),
            )
            for use in info.uses
        ],
        state=info.state,
        state_object=info.state_object,
    )


def damaged_block_message(block: DamagedBlock) -> admin_pb2.DamagedBlock:
    """A block that a scrub found damaged."""
    return admin_pb2.DamagedBlock(
        namespace=block.namespace,
        prefix_hash=block.prefix_hash,
        segment_id=block.segment_id,
        slot=block.slot,
        reason=block.reason,
    )


def invariants_message(report: InvariantReport) -> admin_pb2.InvariantReport:
    """A check of the store against itself."""
    return admin_pb2.InvariantReport(
        time=to_timestamp(report.time_s),
        segments=report.segments,
        slots=report.slots,
        live_blocks=report.live_blocks,
        index_entries=report.index_entries,
        stale_entries=report.stale_entries,
        accounted_bytes=report.accounted_bytes,
        allocated_bytes=report.allocated_bytes,
        violation_count=report.violation_count,
        violations=report.violations,
    )
