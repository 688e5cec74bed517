"""The catalog: what the segments cannot say and nothing could rebuild, in one small file, replaced atomically.

Store identity and secret, namespaces, traffic classes with operators' TTLs, and the next segment id. Written rarely.
"""

from __future__ import annotations

import json
import secrets
import zlib
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvstore.errors import ConfigError, CorruptDataDirError, FormatVersionError
from kvstore.log.format import FORMAT_VERSION, wrong_version
from kvstore.traffic import MAX_TRAFFIC_CLASSES, RefreshRule, TrafficClass
from kvstore.types import ClassId, Namespace, NamespaceId, SegmentId
from kvstore_api.namespace import KvGroup, KvGroupKind, NamespaceDigest, NamespaceSpec, ParallelDimension, ReplayMode

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kvstore.config import TrafficClassConfig
    from kvstore.log.device import Device

CATALOG_FILE = "catalog.json"
# Segment ids are reserved in runs, so that making a segment does not write the catalog; a restart skips the rest of a run.
_SEGMENT_ID_RUN = 1024


@dataclass(frozen=True, slots=True)
class ClassRecord:
    """A traffic class as the store keeps it."""

    class_id: ClassId
    traffic_class: TrafficClass
    config_ttl_s: int  # what the configuration said when `traffic_class.ttl_s` was set; another value there wins


@dataclass(frozen=True, slots=True)
class Catalog:
    """An immutable picture of the file. `next_segment_id` is the first id no run has been reserved from."""

    store_id: str
    secret: bytes
    next_segment_id: int = 1
    next_namespace_id: int = 1
    namespaces: Mapping[NamespaceDigest, Namespace] = field(default_factory=dict)
    classes: Mapping[str, ClassRecord] = field(default_factory=dict)

    @classmethod
    def new(cls) -> Catalog:
        """An empty store's."""
        return cls(secrets.token_hex(16), secrets.token_bytes(32))

    def with_namespace(self, spec: NamespaceSpec, now_s: float) -> Catalog:
        """The catalog with one more namespace, under an id never used before."""
        digest = spec.digest()
        namespace = Namespace(NamespaceId(self.next_namespace_id), digest, spec, now_s)
        namespaces = {**self.namespaces, digest: namespace}
        return replace(self, namespaces=namespaces, next_namespace_id=self.next_namespace_id + 1)

    def without_namespace(self, namespace: Namespace) -> Catalog:
        """The catalog without it; its id is never given out again, so its blocks can never match."""
        kept = {digest: other for digest, other in self.namespaces.items() if digest != namespace.digest}
        return replace(self, namespaces=kept)

    def with_ttl(self, name: str, ttl_s: int) -> Catalog:
        """The catalog with a class's TTL changed by an operator."""
        record = self.classes[name]
        changed = replace(record, traffic_class=replace(record.traffic_class, ttl_s=ttl_s))
        return replace(self, classes={**self.classes, name: changed})

    def with_classes(self, configured: Mapping[str, TrafficClassConfig]) -> Catalog:
        """The catalog with the configured classes.

        An operator's TTL stays until the configuration itself says something new. Classes no longer configured keep their
        id and TTL, because blocks may still be kept for them.
        Raises: ConfigError: more classes than a use row has columns.
        """
        classes = dict(self.classes)
        for name, config in configured.items():
            known = classes.get(name)
            if known is None:
                class_id = ClassId(len(classes) + 1)
                if class_id > MAX_TRAFFIC_CLASSES:
                    raise ConfigError(
                        f"traffic_classes: {name!r} would be class {class_id} this data directory has known, "
                        f"the limit is {MAX_TRAFFIC_CLASSES}; reuse a name among {', '.join(classes)}"
                    )
            else:
                class_id = known.class_id
            overridden = known is not None and known.config_ttl_s == config.ttl_s
            ttl_s = known.traffic_class.ttl_s if known is not None and overridden else config.ttl_s
            refresh = RefreshRule.ON_WRITE if config.refresh == "on_write" else RefreshRule.ON_ACCESS
            classes[name] = ClassRecord(class_id, TrafficClass(name, ttl_s, refresh), config.ttl_s)
        return replace(self, classes=classes)

    def with_segment_run(self) -> tuple[Catalog, SegmentId]:
        """The catalog with a run of 1,024 more segment ids reserved, and the first of them."""
        first = SegmentId(self.next_segment_id)
        return replace(self, next_segment_id=self.next_segment_id + _SEGMENT_ID_RUN), first

    def save(self, directory: Path, device: Device) -> None:
        """Replace the file: on disk is always the old one or the new one, whole. Raises: OSError."""
        body = json.dumps(_to_json(self), indent=1, sort_keys=True)
        text = json.dumps({"crc32": zlib.crc32(body.encode()), "format_version": FORMAT_VERSION, "catalog": body})
        device.replace(directory / CATALOG_FILE, text.encode())

    @classmethod
    def load(cls, directory: Path) -> Catalog:
        """Read the file. Raises: FormatVersionError, CorruptDataDirError; both name the file and the fix."""
        path = directory / CATALOG_FILE
        fix = "restore it from a backup, or start with an empty data directory"
        try:
            envelope = json.loads(path.read_text())
            version, body, crc = envelope["format_version"], envelope["catalog"], envelope["crc32"]
            checksum = zlib.crc32(body.encode())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptDataDirError(f"{path} cannot be read ({error}); {fix}") from error
        if version != FORMAT_VERSION:
            raise FormatVersionError(wrong_version(str(path), version))
        if checksum != crc:
            raise CorruptDataDirError(f"{path}: crc32 {checksum:#010x}, want {crc}; {fix}")
        return _from_json(json.loads(body))


def _to_json(catalog: Catalog) -> dict[str, Any]:
    return {
        "store_id": catalog.store_id,
        "secret": catalog.secret.hex(),
        "next_segment_id": catalog.next_segment_id,
        "next_namespace_id": catalog.next_namespace_id,
        "namespaces": [
            {"id": n.namespace_id, "create_time_s": n.create_time_s, "spec": asdict(n.spec)}
            for n in catalog.namespaces.values()
        ],
        "classes": [
            {
                "id": record.class_id,
                "name": name,
                "ttl_s": record.traffic_class.ttl_s,
                "refresh": int(record.traffic_class.refresh),
                "config_ttl_s": record.config_ttl_s,
            }
            for name, record in catalog.classes.items()
        ],
    }


def _from_json(document: dict[str, Any]) -> Catalog:
    namespaces = {}
    for item in document["namespaces"]:
        spec = _spec_from_json(item["spec"])
        namespaces[spec.digest()] = Namespace(NamespaceId(item["id"]), spec.digest(), spec, item["create_time_s"])
    classes = {
        item["name"]: ClassRecord(
            ClassId(item["id"]),
            TrafficClass(item["name"], item["ttl_s"], RefreshRule(item["refresh"])),
            item["config_ttl_s"],
        )
        for item in document["classes"]
    }
    return Catalog(
        store_id=document["store_id"],
        secret=bytes.fromhex(document["secret"]),
        next_segment_id=document["next_segment_id"],
        next_namespace_id=document["next_namespace_id"],
        namespaces=namespaces,
        classes=classes,
    )


def _spec_from_json(document: dict[str, Any]) -> NamespaceSpec:
    groups = tuple(
        KvGroup(
            **{
                **group,
                "kind": KvGroupKind(group["kind"]),
                "layers": tuple(group["layers"]),
                "replay_rule": ReplayMode(group["replay_rule"]),
            }
        )
        for group in document["groups"]
    )
    parallel = tuple(ParallelDimension(**dimension) for dimension in document["parallel"])
    return NamespaceSpec(**{**document, "groups": groups, "parallel": parallel})
