import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from kvstore_api.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Usage(_message.Message):
    __slots__ = ("blocks", "bytes")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    bytes: int
    def __init__(self, blocks: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class ClassUsage(_message.Message):
    __slots__ = ("traffic_class", "usage", "asked_tokens", "hit_tokens")
    TRAFFIC_CLASS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    ASKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    traffic_class: _types_pb2.TrafficClass
    usage: Usage
    asked_tokens: int
    hit_tokens: int
    def __init__(self, traffic_class: _Optional[_Union[_types_pb2.TrafficClass, _Mapping]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., asked_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ...) -> None: ...

class Counter(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: int
    def __init__(self, name: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("version", "store_id", "start_time", "data_dir", "capacity_bytes", "used_bytes", "retiring_bytes", "live", "segment_count", "classes", "namespace_count", "counters", "hit_rate", "durability", "invariants", "write_amplification", "clock_ahead_s")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    DATA_DIR_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RETIRING_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_COUNT_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    INVARIANTS_FIELD_NUMBER: _ClassVar[int]
    WRITE_AMPLIFICATION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_AHEAD_S_FIELD_NUMBER: _ClassVar[int]
    version: str
    store_id: str
    start_time: _timestamp_pb2.Timestamp
    data_dir: str
    capacity_bytes: int
    used_bytes: int
    retiring_bytes: int
    live: Usage
    segment_count: int
    classes: _containers.RepeatedCompositeFieldContainer[ClassUsage]
    namespace_count: int
    counters: _containers.RepeatedCompositeFieldContainer[Counter]
    hit_rate: float
    durability: str
    invariants: InvariantReport
    write_amplification: float
    clock_ahead_s: float
    def __init__(self, version: _Optional[str] = ..., store_id: _Optional[str] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., data_dir: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., retiring_bytes: _Optional[int] = ..., live: _Optional[_Union[Usage, _Mapping]] = ..., segment_count: _Optional[int] = ..., classes: _Optional[_Iterable[_Union[ClassUsage, _Mapping]]] = ..., namespace_count: _Optional[int] = ..., counters: _Optional[_Iterable[_Union[Counter, _Mapping]]] = ..., hit_rate: _Optional[float] = ..., durability: _Optional[str] = ..., invariants: _Optional[_Union[InvariantReport, _Mapping]] = ..., write_amplification: _Optional[float] = ..., clock_ahead_s: _Optional[float] = ...) -> None: ...

class InvariantReport(_message.Message):
    __slots__ = ("time", "segments", "slots", "live_blocks", "index_entries", "stale_entries", "accounted_bytes", "allocated_bytes", "violation_count", "violations")
    TIME_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    LIVE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    INDEX_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    STALE_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    ACCOUNTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALLOCATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    VIOLATION_COUNT_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    time: _timestamp_pb2.Timestamp
    segments: int
    slots: int
    live_blocks: int
    index_entries: int
    stale_entries: int
    accounted_bytes: int
    allocated_bytes: int
    violation_count: int
    violations: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., segments: _Optional[int] = ..., slots: _Optional[int] = ..., live_blocks: _Optional[int] = ..., index_entries: _Optional[int] = ..., stale_entries: _Optional[int] = ..., accounted_bytes: _Optional[int] = ..., allocated_bytes: _Optional[int] = ..., violation_count: _Optional[int] = ..., violations: _Optional[_Iterable[str]] = ...) -> None: ...

class ListNamespacesRequest(_message.Message):
    __slots__ = ("page_token",)
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_token: str
    def __init__(self, page_token: _Optional[str] = ...) -> None: ...

class NamespaceInfo(_message.Message):
    __slots__ = ("namespace", "spec", "live", "create_time", "asked_tokens", "hit_tokens")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    ASKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    spec: _types_pb2.NamespaceSpec
    live: Usage
    create_time: _timestamp_pb2.Timestamp
    asked_tokens: int
    hit_tokens: int
    def __init__(self, namespace: _Optional[bytes] = ..., spec: _Optional[_Union[_types_pb2.NamespaceSpec, _Mapping]] = ..., live: _Optional[_Union[Usage, _Mapping]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., asked_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ...) -> None: ...

class ListNamespacesResponse(_message.Message):
    __slots__ = ("namespaces", "next_page_token")
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceInfo]
    next_page_token: str
    def __init__(self, namespaces: _Optional[_Iterable[_Union[NamespaceInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetNamespaceRequest(_message.Message):
    __slots__ = ("namespace_hex",)
    NAMESPACE_HEX_FIELD_NUMBER: _ClassVar[int]
    namespace_hex: str
    def __init__(self, namespace_hex: _Optional[str] = ...) -> None: ...

class GetNamespaceResponse(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: NamespaceInfo
    def __init__(self, namespace: _Optional[_Union[NamespaceInfo, _Mapping]] = ...) -> None: ...

class DropNamespaceRequest(_message.Message):
    __slots__ = ("namespace_hex", "dry_run")
    NAMESPACE_HEX_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    namespace_hex: str
    dry_run: bool
    def __init__(self, namespace_hex: _Optional[str] = ..., dry_run: bool = ...) -> None: ...

class DropNamespaceResponse(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: NamespaceInfo
    def __init__(self, namespace: _Optional[_Union[NamespaceInfo, _Mapping]] = ...) -> None: ...

class ListTrafficClassesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTrafficClassesResponse(_message.Message):
    __slots__ = ("classes",)
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    classes: _containers.RepeatedCompositeFieldContainer[ClassUsage]
    def __init__(self, classes: _Optional[_Iterable[_Union[ClassUsage, _Mapping]]] = ...) -> None: ...

class SetTrafficClassTtlRequest(_message.Message):
    __slots__ = ("traffic_class", "ttl")
    TRAFFIC_CLASS_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    traffic_class: str
    ttl: _duration_pb2.Duration
    def __init__(self, traffic_class: _Optional[str] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class SetTrafficClassTtlResponse(_message.Message):
    __slots__ = ("before", "after")
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    before: _types_pb2.TrafficClass
    after: _types_pb2.TrafficClass
    def __init__(self, before: _Optional[_Union[_types_pb2.TrafficClass, _Mapping]] = ..., after: _Optional[_Union[_types_pb2.TrafficClass, _Mapping]] = ...) -> None: ...

class ListQuotasRequest(_message.Message):
    __slots__ = ("page_token",)
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_token: str
    def __init__(self, page_token: _Optional[str] = ...) -> None: ...

class QuotaUsage(_message.Message):
    __slots__ = ("traffic_class", "tenant", "share", "limit", "usage", "taken_bytes")
    TRAFFIC_CLASS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TAKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    traffic_class: str
    tenant: str
    share: float
    limit: float
    usage: Usage
    taken_bytes: int
    def __init__(self, traffic_class: _Optional[str] = ..., tenant: _Optional[str] = ..., share: _Optional[float] = ..., limit: _Optional[float] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., taken_bytes: _Optional[int] = ...) -> None: ...

class ListQuotasResponse(_message.Message):
    __slots__ = ("quotas", "next_page_token", "capacity_bytes")
    QUOTAS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    quotas: _containers.RepeatedCompositeFieldContainer[QuotaUsage]
    next_page_token: str
    capacity_bytes: int
    def __init__(self, quotas: _Optional[_Iterable[_Union[QuotaUsage, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., capacity_bytes: _Optional[int] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("namespace_hex", "traffic_class", "older_than", "down_to_share", "dry_run")
    NAMESPACE_HEX_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_CLASS_FIELD_NUMBER: _ClassVar[int]
    OLDER_THAN_FIELD_NUMBER: _ClassVar[int]
    DOWN_TO_SHARE_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    namespace_hex: str
    traffic_class: str
    older_than: _duration_pb2.Duration
    down_to_share: float
    dry_run: bool
    def __init__(self, namespace_hex: _Optional[str] = ..., traffic_class: _Optional[str] = ..., older_than: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., down_to_share: _Optional[float] = ..., dry_run: bool = ...) -> None: ...

class EvictResponse(_message.Message):
    __slots__ = ("blocks", "bytes")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    bytes: int
    def __init__(self, blocks: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class FindBlocksRequest(_message.Message):
    __slots__ = ("prefix_hash_hex",)
    PREFIX_HASH_HEX_FIELD_NUMBER: _ClassVar[int]
    prefix_hash_hex: str
    def __init__(self, prefix_hash_hex: _Optional[str] = ...) -> None: ...

class BlockInfo(_message.Message):
    __slots__ = ("namespace", "prefix_hash", "block", "size_bytes", "checksum", "segment_id", "slot", "create_time", "uses", "state", "state_object")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STATE_OBJECT_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    prefix_hash: bytes
    block: int
    size_bytes: int
    checksum: int
    segment_id: int
    slot: int
    create_time: _timestamp_pb2.Timestamp
    uses: _containers.RepeatedCompositeFieldContainer[_types_pb2.ClassUse]
    state: str
    state_object: bool
    def __init__(self, namespace: _Optional[bytes] = ..., prefix_hash: _Optional[bytes] = ..., block: _Optional[int] = ..., size_bytes: _Optional[int] = ..., checksum: _Optional[int] = ..., segment_id: _Optional[int] = ..., slot: _Optional[int] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., uses: _Optional[_Iterable[_Union[_types_pb2.ClassUse, _Mapping]]] = ..., state: _Optional[str] = ..., state_object: bool = ...) -> None: ...

class FindBlocksResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockInfo]
    def __init__(self, blocks: _Optional[_Iterable[_Union[BlockInfo, _Mapping]]] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("cursor", "bytes_per_second", "max_bytes")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    cursor: str
    bytes_per_second: int
    max_bytes: int
    def __init__(self, cursor: _Optional[str] = ..., bytes_per_second: _Optional[int] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class DamagedBlock(_message.Message):
    __slots__ = ("namespace", "prefix_hash", "segment_id", "slot", "reason")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    prefix_hash: bytes
    segment_id: int
    slot: int
    reason: str
    def __init__(self, namespace: _Optional[bytes] = ..., prefix_hash: _Optional[bytes] = ..., segment_id: _Optional[int] = ..., slot: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class UnreadableSegment(_message.Message):
    __slots__ = ("segment_id", "detail")
    SEGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    segment_id: int
    detail: str
    def __init__(self, segment_id: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("cursor", "segments_done", "segments_total", "bytes_done", "bytes_total", "blocks_checked", "damaged", "unreadable", "finished", "invariants_done", "invariants")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_DONE_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CHECKED_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    UNREADABLE_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    INVARIANTS_DONE_FIELD_NUMBER: _ClassVar[int]
    INVARIANTS_FIELD_NUMBER: _ClassVar[int]
    cursor: str
    segments_done: int
    segments_total: int
    bytes_done: int
    bytes_total: int
    blocks_checked: int
    damaged: _containers.RepeatedCompositeFieldContainer[DamagedBlock]
    unreadable: _containers.RepeatedCompositeFieldContainer[UnreadableSegment]
    finished: bool
    invariants_done: float
    invariants: InvariantReport
    def __init__(self, cursor: _Optional[str] = ..., segments_done: _Optional[int] = ..., segments_total: _Optional[int] = ..., bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ..., blocks_checked: _Optional[int] = ..., damaged: _Optional[_Iterable[_Union[DamagedBlock, _Mapping]]] = ..., unreadable: _Optional[_Iterable[_Union[UnreadableSegment, _Mapping]]] = ..., finished: bool = ..., invariants_done: _Optional[float] = ..., invariants: _Optional[_Union[InvariantReport, _Mapping]] = ...) -> None: ...
