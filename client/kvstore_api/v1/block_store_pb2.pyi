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

class RegisterNamespaceRequest(_message.Message):
    __slots__ = ("spec", "namespace")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    spec: _types_pb2.NamespaceSpec
    namespace: bytes
    def __init__(self, spec: _Optional[_Union[_types_pb2.NamespaceSpec, _Mapping]] = ..., namespace: _Optional[bytes] = ...) -> None: ...

class RegisterNamespaceResponse(_message.Message):
    __slots__ = ("namespace", "traffic_classes", "max_chain_blocks")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_CLASSES_FIELD_NUMBER: _ClassVar[int]
    MAX_CHAIN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    traffic_classes: _containers.RepeatedCompositeFieldContainer[_types_pb2.TrafficClass]
    max_chain_blocks: int
    def __init__(self, namespace: _Optional[bytes] = ..., traffic_classes: _Optional[_Iterable[_Union[_types_pb2.TrafficClass, _Mapping]]] = ..., max_chain_blocks: _Optional[int] = ...) -> None: ...

class MatchPrefixRequest(_message.Message):
    __slots__ = ("namespace", "chain", "traffic_class", "lease", "peek")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_CLASS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PEEK_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    chain: bytes
    traffic_class: str
    lease: _duration_pb2.Duration
    peek: bool
    def __init__(self, namespace: _Optional[bytes] = ..., chain: _Optional[bytes] = ..., traffic_class: _Optional[str] = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., peek: bool = ...) -> None: ...

class MatchPrefixResponse(_message.Message):
    __slots__ = ("hit_length_blocks", "lease", "lease_expiry", "plan")
    HIT_LENGTH_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LEASE_EXPIRY_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    hit_length_blocks: int
    lease: bytes
    lease_expiry: _timestamp_pb2.Timestamp
    plan: _types_pb2.ResumePlan
    def __init__(self, hit_length_blocks: _Optional[int] = ..., lease: _Optional[bytes] = ..., lease_expiry: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., plan: _Optional[_Union[_types_pb2.ResumePlan, _Mapping]] = ...) -> None: ...

class GetBlocksRequest(_message.Message):
    __slots__ = ("namespace", "chain", "first_block", "block_count", "lease", "part_offset_bytes", "part_bytes")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PART_OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    PART_BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    chain: bytes
    first_block: int
    block_count: int
    lease: bytes
    part_offset_bytes: int
    part_bytes: int
    def __init__(self, namespace: _Optional[bytes] = ..., chain: _Optional[bytes] = ..., first_block: _Optional[int] = ..., block_count: _Optional[int] = ..., lease: _Optional[bytes] = ..., part_offset_bytes: _Optional[int] = ..., part_bytes: _Optional[int] = ...) -> None: ...

class GetBlocksResponse(_message.Message):
    __slots__ = ("blocks", "checksums", "offset_bytes", "misses", "block_checksums", "data")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    offset_bytes: int
    misses: _containers.RepeatedCompositeFieldContainer[_types_pb2.Miss]
    block_checksums: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, blocks: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[int]] = ..., offset_bytes: _Optional[int] = ..., misses: _Optional[_Iterable[_Union[_types_pb2.Miss, _Mapping]]] = ..., block_checksums: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class PutBlocksHeader(_message.Message):
    __slots__ = ("namespace", "chain", "first_block", "block_count", "traffic_class")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_CLASS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    chain: bytes
    first_block: int
    block_count: int
    traffic_class: str
    def __init__(self, namespace: _Optional[bytes] = ..., chain: _Optional[bytes] = ..., first_block: _Optional[int] = ..., block_count: _Optional[int] = ..., traffic_class: _Optional[str] = ...) -> None: ...

class PutBlocksRequest(_message.Message):
    __slots__ = ("header", "blocks", "checksums", "offset_bytes", "sizes", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: PutBlocksHeader
    blocks: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    offset_bytes: int
    sizes: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, header: _Optional[_Union[PutBlocksHeader, _Mapping]] = ..., blocks: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[int]] = ..., offset_bytes: _Optional[int] = ..., sizes: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class PutBlocksResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[_types_pb2.PutResult]
    def __init__(self, results: _Optional[_Iterable[_Union[_types_pb2.PutResult, _Mapping]]] = ...) -> None: ...

class DeleteBlocksRequest(_message.Message):
    __slots__ = ("namespace", "chain", "first_block", "block_count")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    chain: bytes
    first_block: int
    block_count: int
    def __init__(self, namespace: _Optional[bytes] = ..., chain: _Optional[bytes] = ..., first_block: _Optional[int] = ..., block_count: _Optional[int] = ...) -> None: ...

class DeleteBlocksResponse(_message.Message):
    __slots__ = ("deleted_blocks",)
    DELETED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    deleted_blocks: int
    def __init__(self, deleted_blocks: _Optional[int] = ...) -> None: ...

class GetStateRequest(_message.Message):
    __slots__ = ("namespace", "prefix_hash", "name", "traffic_class")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_CLASS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    prefix_hash: bytes
    name: str
    traffic_class: str
    def __init__(self, namespace: _Optional[bytes] = ..., prefix_hash: _Optional[bytes] = ..., name: _Optional[str] = ..., traffic_class: _Optional[str] = ...) -> None: ...

class GetStateResponse(_message.Message):
    __slots__ = ("found", "size_bytes", "checksum", "offset_bytes", "data")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    found: bool
    size_bytes: int
    checksum: int
    offset_bytes: int
    data: bytes
    def __init__(self, found: bool = ..., size_bytes: _Optional[int] = ..., checksum: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class PutStateHeader(_message.Message):
    __slots__ = ("namespace", "prefix_hash", "name", "traffic_class", "size_bytes", "checksum")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_CLASS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    prefix_hash: bytes
    name: str
    traffic_class: str
    size_bytes: int
    checksum: int
    def __init__(self, namespace: _Optional[bytes] = ..., prefix_hash: _Optional[bytes] = ..., name: _Optional[str] = ..., traffic_class: _Optional[str] = ..., size_bytes: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class PutStateRequest(_message.Message):
    __slots__ = ("header", "offset_bytes", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: PutStateHeader
    offset_bytes: int
    data: bytes
    def __init__(self, header: _Optional[_Union[PutStateHeader, _Mapping]] = ..., offset_bytes: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class PutStateResponse(_message.Message):
    __slots__ = ("result",)
    RESULT_FIELD_NUMBER: _ClassVar[int]
    result: _types_pb2.PutResult
    def __init__(self, result: _Optional[_Union[_types_pb2.PutResult, _Mapping]] = ...) -> None: ...
