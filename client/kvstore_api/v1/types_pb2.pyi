import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvGroupKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_GROUP_KIND_UNSPECIFIED: _ClassVar[KvGroupKind]
    KV_GROUP_KIND_FULL: _ClassVar[KvGroupKind]
    KV_GROUP_KIND_SLIDING_WINDOW: _ClassVar[KvGroupKind]
    KV_GROUP_KIND_STATE: _ClassVar[KvGroupKind]

class ReplayMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLAY_MODE_UNSPECIFIED: _ClassVar[ReplayMode]
    REPLAY_MODE_BOUNDED: _ClassVar[ReplayMode]
    REPLAY_MODE_EXACT: _ClassVar[ReplayMode]
    REPLAY_MODE_SNAPSHOT: _ClassVar[ReplayMode]

class PutStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PUT_STATUS_UNSPECIFIED: _ClassVar[PutStatus]
    PUT_STATUS_STORED: _ClassVar[PutStatus]
    PUT_STATUS_EXISTS: _ClassVar[PutStatus]
    PUT_STATUS_REJECTED: _ClassVar[PutStatus]

class RefreshRule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFRESH_RULE_UNSPECIFIED: _ClassVar[RefreshRule]
    REFRESH_RULE_ON_ACCESS: _ClassVar[RefreshRule]
    REFRESH_RULE_ON_WRITE: _ClassVar[RefreshRule]
KV_GROUP_KIND_UNSPECIFIED: KvGroupKind
KV_GROUP_KIND_FULL: KvGroupKind
KV_GROUP_KIND_SLIDING_WINDOW: KvGroupKind
KV_GROUP_KIND_STATE: KvGroupKind
REPLAY_MODE_UNSPECIFIED: ReplayMode
REPLAY_MODE_BOUNDED: ReplayMode
REPLAY_MODE_EXACT: ReplayMode
REPLAY_MODE_SNAPSHOT: ReplayMode
PUT_STATUS_UNSPECIFIED: PutStatus
PUT_STATUS_STORED: PutStatus
PUT_STATUS_EXISTS: PutStatus
PUT_STATUS_REJECTED: PutStatus
REFRESH_RULE_UNSPECIFIED: RefreshRule
REFRESH_RULE_ON_ACCESS: RefreshRule
REFRESH_RULE_ON_WRITE: RefreshRule

class KvGroup(_message.Message):
    __slots__ = ("name", "kind", "layers", "window_tokens", "replay_rule", "replay_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPLAY_RULE_FIELD_NUMBER: _ClassVar[int]
    REPLAY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: KvGroupKind
    layers: _containers.RepeatedScalarFieldContainer[int]
    window_tokens: int
    replay_rule: ReplayMode
    replay_tokens: int
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[_Union[KvGroupKind, str]] = ..., layers: _Optional[_Iterable[int]] = ..., window_tokens: _Optional[int] = ..., replay_rule: _Optional[_Union[ReplayMode, str]] = ..., replay_tokens: _Optional[int] = ...) -> None: ...

class ParallelDimension(_message.Message):
    __slots__ = ("name", "rank", "size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    rank: int
    size: int
    def __init__(self, name: _Optional[str] = ..., rank: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class Label(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: str
    def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class NamespaceSpec(_message.Message):
    __slots__ = ("tenant", "model", "revision", "engine", "layout", "kv_dtype", "block_tokens", "block_bytes", "parallel", "groups", "labels")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    model: str
    revision: str
    engine: str
    layout: str
    kv_dtype: str
    block_tokens: int
    block_bytes: int
    parallel: _containers.RepeatedCompositeFieldContainer[ParallelDimension]
    groups: _containers.RepeatedCompositeFieldContainer[KvGroup]
    labels: _containers.RepeatedCompositeFieldContainer[Label]
    def __init__(self, tenant: _Optional[str] = ..., model: _Optional[str] = ..., revision: _Optional[str] = ..., engine: _Optional[str] = ..., layout: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., block_tokens: _Optional[int] = ..., block_bytes: _Optional[int] = ..., parallel: _Optional[_Iterable[_Union[ParallelDimension, _Mapping]]] = ..., groups: _Optional[_Iterable[_Union[KvGroup, _Mapping]]] = ..., labels: _Optional[_Iterable[_Union[Label, _Mapping]]] = ...) -> None: ...

class ResumePlan(_message.Message):
    __slots__ = ("hit_tokens", "replay_start_token", "mode")
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPLAY_START_TOKEN_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    hit_tokens: int
    replay_start_token: int
    mode: ReplayMode
    def __init__(self, hit_tokens: _Optional[int] = ..., replay_start_token: _Optional[int] = ..., mode: _Optional[_Union[ReplayMode, str]] = ...) -> None: ...

class PutResult(_message.Message):
    __slots__ = ("block", "status", "reason", "detail")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    block: int
    status: PutStatus
    reason: str
    detail: str
    def __init__(self, block: _Optional[int] = ..., status: _Optional[_Union[PutStatus, str]] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class Miss(_message.Message):
    __slots__ = ("block", "reason")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    block: int
    reason: str
    def __init__(self, block: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class TrafficClass(_message.Message):
    __slots__ = ("name", "ttl", "refresh")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    REFRESH_FIELD_NUMBER: _ClassVar[int]
    name: str
    ttl: _duration_pb2.Duration
    refresh: RefreshRule
    def __init__(self, name: _Optional[str] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., refresh: _Optional[_Union[RefreshRule, str]] = ...) -> None: ...

class ClassUse(_message.Message):
    __slots__ = ("traffic_class", "last_use", "expiry")
    TRAFFIC_CLASS_FIELD_NUMBER: _ClassVar[int]
    LAST_USE_FIELD_NUMBER: _ClassVar[int]
    EXPIRY_FIELD_NUMBER: _ClassVar[int]
    traffic_class: str
    last_use: _timestamp_pb2.Timestamp
    expiry: _timestamp_pb2.Timestamp
    def __init__(self, traffic_class: _Optional[str] = ..., last_use: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., expiry: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...
