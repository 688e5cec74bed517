"""What must agree for two engines to be able to use each other's blocks, and the digest that names it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NewType

from kvstore_api import encoding
from kvstore_api.limits import BLOCK_TOKENS, MAX_BLOCK_BYTES, MAX_SPEC_BYTES, MIN_BLOCK_BYTES
from kvstore_api.v1 import types_pb2

NamespaceDigest = NewType("NamespaceDigest", bytes)  # 32 bytes: SHA-256 of the spec

_DIGEST_DOMAIN = b"kvstore/namespace/1"
_MAX_TEXT_BYTES = 4096
_MAX_ITEMS = 4096
_MAX_U32 = 2**32 - 1


class NamespaceSpecError(ValueError):
    """The spec is incomplete or contradicts itself; names the field."""


class KvGroupKind(IntEnum):
    """How the layers of a group behave in a prefix cache; values as in `types.proto`."""

    FULL = 1
    SLIDING_WINDOW = 2
    STATE = 3


class ReplayMode(IntEnum):
    """How window or recurrent state comes back after a hit; values as in `types.proto`."""

    NONE = 0
    BOUNDED = 1
    EXACT = 2
    SNAPSHOT = 3


@dataclass(frozen=True, slots=True)
class KvGroup:
    """The layers of a model that share one cache behaviour."""

    name: str
    kind: KvGroupKind
    layers: tuple[int, ...]
    window_tokens: int = 0
    replay_rule: ReplayMode = ReplayMode.NONE
    replay_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ParallelDimension:
    """One place in one dimension of a parallel layout, e.g. ("tp", 1, 4)."""

    name: str
    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class NamespaceSpec:
    """Everything that must agree for bytes to be interchangeable.

    `revision` is the model's revision or a fingerprint of its weights: a display name alone would let other weights'
    KV match. `parallel` dimensions of size 1 and the order of `parallel` and `labels` do not matter.
    """

    model: str
    revision: str
    engine: str
    layout: str
    kv_dtype: str
    block_bytes: int
    tenant: str = "default"
    block_tokens: int = BLOCK_TOKENS
    parallel: tuple[ParallelDimension, ...] = ()
    groups: tuple[KvGroup, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)

    def validate(self) -> None:
        """Raises: NamespaceSpecError: a field is missing, out of range or contradicts another; names it."""
        for name in ("tenant", "model", "revision", "engine", "layout", "kv_dtype"):
            _check_text(name, getattr(self, name))
        if self.block_tokens != BLOCK_TOKENS:
            raise NamespaceSpecError(
                f"block_tokens is {self.block_tokens}, this store's blocks hold {BLOCK_TOKENS} tokens; regroup the engine's pages"
            )
        _check_number("block_bytes", self.block_bytes, MIN_BLOCK_BYTES, MAX_BLOCK_BYTES)
        _check_items("parallel", self.parallel, ParallelDimension)
        _check_parallel(self.parallel)
        _check_items("groups", self.groups, KvGroup)
        _check_groups(self.groups)
        if not isinstance(self.labels, Mapping):
            raise NamespaceSpecError(f"labels is {self.labels!r}, wanted is a dict of text to text")
        if len(self.labels) > _MAX_ITEMS:
            raise NamespaceSpecError(f"labels has {len(self.labels)} entries, at most {_MAX_ITEMS} are allowed")
        for key, value in self.labels.items():
            _check_text("labels: key", key)
            _check_text(f"label {key!r}", value, may_be_empty=True)
        size_bytes = self.to_proto().ByteSize()
        if size_bytes > MAX_SPEC_BYTES:
            raise NamespaceSpecError(f"the spec has {size_bytes} bytes, at most {MAX_SPEC_BYTES} are allowed")

    def digest(self) -> NamespaceDigest:
        """SHA-256 over every field, tagged and length-prefixed: 32 bytes that name the namespace."""
        parts = [
            encoding.field(0, _DIGEST_DOMAIN),
            encoding.text_field(1, self.tenant),
            encoding.text_field(2, self.model),
            encoding.text_field(3, self.revision),
            encoding.text_field(4, self.engine),
            encoding.text_field(5, self.layout),
            encoding.text_field(6, self.kv_dtype),
            encoding.number_field(7, self.block_tokens),
            encoding.number_field(8, self.block_bytes),
        ]
        # A dimension of one rank is the same as no dimension.
        for dimension in sorted((d for d in self.parallel if d.size > 1), key=lambda d: d.name):
            parts.append(encoding.field(9, _encode_dimension(dimension)))
        parts.extend(encoding.field(10, _encode_group(group)) for group in self.groups)
        for key in sorted(self.labels):
            parts.append(encoding.field(11, encoding.text_field(1, key) + encoding.text_field(2, self.labels[key])))
        return NamespaceDigest(hashlib.sha256(b"".join(parts)).digest())

    def to_proto(self) -> types_pb2.NamespaceSpec:
        """The wire form."""
        return types_pb2.NamespaceSpec(
            tenant=self.tenant,
            model=self.model,
            revision=self.revision,
            engine=self.engine,
            layout=self.layout,
            kv_dtype=self.kv_dtype,
            block_tokens=self.block_tokens,
            block_bytes=self.block_bytes,
            parallel=[types_pb2.ParallelDimension(name=d.name, rank=d.rank, size=d.size) for d in self.parallel],
            groups=[
                types_pb2.KvGroup(
                    name=g.name,
                    kind=types_pb2.KvGroupKind.Name(g.kind),
                    layers=g.layers,
                    window_tokens=g.window_tokens,
                    replay_rule=types_pb2.ReplayMode.Name(g.replay_rule),
                    replay_tokens=g.replay_tokens,
                )
                for g in self.groups
            ],
            labels=[types_pb2.Label(key=key, value=value) for key, value in sorted(self.labels.items())],
        )

    @classmethod
    def from_proto(cls, spec: types_pb2.NamespaceSpec) -> NamespaceSpec:
        """Read the wire form. Raises: NamespaceSpecError: unknown group kind or replay rule, or a label given twice."""
        labels = {label.key: label.value for label in spec.labels}
        if len(labels) != len(spec.labels):
            raise NamespaceSpecError("labels: a key is given twice")
        return cls(
            tenant=spec.tenant,
            model=spec.model,
            revision=spec.revision,
            engine=spec.engine,
            layout=spec.layout,
            kv_dtype=spec.kv_dtype,
            block_tokens=spec.block_tokens,
            block_bytes=spec.block_bytes,
            parallel=tuple(ParallelDimension(d.name, d.rank, d.size) for d in spec.parallel),
            groups=tuple(_group_from_proto(group) for group in spec.groups),
            labels=labels,
        )


def _group_from_proto(group: types_pb2.KvGroup) -> KvGroup:
    try:
        kind, rule = KvGroupKind(group.kind), ReplayMode(group.replay_rule)
    except ValueError as error:
        raise NamespaceSpecError(f"groups: {group.name!r}: {error}") from None
    return KvGroup(group.name, kind, tuple(group.layers), group.window_tokens, rule, group.replay_tokens)


def _encode_dimension(dimension: ParallelDimension) -> bytes:
    return (
        encoding.text_field(1, dimension.name)
        + encoding.number_field(2, dimension.rank)
        + encoding.number_field(3, dimension.size)
    )


def _encode_group(group: KvGroup) -> bytes:
    return b"".join(
        (
            encoding.text_field(1, group.name),
            encoding.number_field(2, group.kind),
            encoding.field(3, b"".join(layer.to_bytes(4, "little") for layer in group.layers)),
            encoding.number_field(4, group.window_tokens),
            encoding.number_field(5, group.replay_rule),
            encoding.number_field(6, group.replay_tokens),
        )
    )


def _check_text(name: str, value: object, *, may_be_empty: bool = False) -> None:
    if not isinstance(value, str):
        raise NamespaceSpecError(f"{name} is {value!r}, wanted is text")
    if not value and not may_be_empty:
        raise NamespaceSpecError(f"{name} is empty; it is part of what makes bytes interchangeable and must be given")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise NamespaceSpecError(f"{name} is no valid Unicode text: {error}") from None
    if size > _MAX_TEXT_BYTES:
        raise NamespaceSpecError(f"{name} has {size} bytes, at most {_MAX_TEXT_BYTES} are allowed")


def _check_number(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise NamespaceSpecError(f"{name} is {value!r}, allowed are {low} to {high}")


def _check_items(name: str, value: object, kind: type) -> None:
    if not isinstance(value, tuple | list) or not all(isinstance(item, kind) for item in value):
        raise NamespaceSpecError(f"{name} is {value!r}, wanted is a tuple of {kind.__name__}")


def _check_parallel(parallel: tuple[ParallelDimension, ...]) -> None:
    names = [dimension.name for dimension in parallel]
    if len(set(names)) != len(names):
        raise NamespaceSpecError(f"parallel: a dimension is given twice in {names}")
    for dimension in parallel:
        _check_text("parallel: name", dimension.name)
        _check_number(f"parallel: {dimension.name}: size", dimension.size, 1, _MAX_U32)
        _check_number(f"parallel: {dimension.name}: rank", dimension.rank, 0, _MAX_U32)
        if dimension.rank >= dimension.size:
            raise NamespaceSpecError(f"parallel: {dimension.name} has rank {dimension.rank} of {dimension.size}")


def _check_groups(groups: tuple[KvGroup, ...]) -> None:
    names = [group.name for group in groups]
    if len(set(names)) != len(names):
        raise NamespaceSpecError(f"groups: a name is given twice in {names}")
    # A layer may have caches of several kinds, such as compressed KV of everything and a window, but one of each kind.
    owner: dict[tuple[KvGroupKind, int], str] = {}
    for group in groups:
        _check_group(group)
        for layer in group.layers:
            other = owner.setdefault((group.kind, layer), group.name)
            if other != group.name:
                raise NamespaceSpecError(
                    f"groups: layer {layer} is in {other!r} and in {group.name!r}, both {group.kind.name}"
                )


def _check_group(group: KvGroup) -> None:
    _check_text("groups: name", group.name)
    where = f"groups: {group.name!r}"
    for layer in group.layers:
        _check_number(f"{where}: layer", layer, 0, _MAX_U32)
    _check_number(f"{where}: window_tokens", group.window_tokens, 0, _MAX_U32)
    _check_number(f"{where}: replay_tokens", group.replay_tokens, 0, _MAX_U32)
    if len(group.layers) > _MAX_ITEMS or list(group.layers) != sorted(set(group.layers)):
        raise NamespaceSpecError(f"{where}: layers must be ascending, without repetition, and at most {_MAX_ITEMS}")
    if group.kind is KvGroupKind.SLIDING_WINDOW:
        if group.window_tokens < 1:
            raise NamespaceSpecError(
                f"{where}: window_tokens is {group.window_tokens}, a sliding window needs at least 1"
            )
        if group.replay_rule is ReplayMode.NONE:
            raise NamespaceSpecError(f"{where}: replay_rule is missing; say bounded, exact or snapshot")
    elif group.window_tokens:
        raise NamespaceSpecError(f"{where}: window_tokens is {group.window_tokens} but the group is {group.kind.name}")
    if group.kind is KvGroupKind.FULL and (group.replay_rule or group.replay_tokens):
        raise NamespaceSpecError(f"{where}: a FULL group is not replayed, but a replay rule or span is given")
