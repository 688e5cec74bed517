"""Finding blocks by the beginning of their hash, for operators. Reads all tables, but neither payloads nor the index."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.log import format as fmt
from kvstore.types import BlockAddr, BlockInfo, ClassUse
from kvstore_api.limits import HASH_BYTES
from kvstore_api.namespace import NamespaceDigest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from kvstore.catalog import ClassRecord
    from kvstore.expiry import TtlTable
    from kvstore.log.segment import Segment


def find_blocks(
    segments: Iterable[Segment],
    hash_prefix: bytes,
    half_digit: int | None,
    namespaces: Mapping[int, NamespaceDigest],
    classes: Iterable[ClassRecord],
    ttls: TtlTable,
    now_s: float,
) -> Iterator[BlockInfo]:
    """Every slot whose prefix hash begins with `hash_prefix` (and then the 4 bits `half_digit`)."""
    records = list(classes)
    for segment in segments:
        rows = segment.read_rows(0, segment.slot_count)
        matches = np.ones(len(rows), dtype=bool)
        hashes = np.frombuffer(rows["prefix_hash"].tobytes(), dtype=np.uint8).reshape(len(rows), HASH_BYTES)
        for column, byte in enumerate(hash_prefix):
            matches &= hashes[:, column] == byte
        if half_digit is not None:
            matches &= hashes[:, len(hash_prefix)] >> 4 == half_digit
        matches &= fmt.valid_rows(rows, segment.segment_id) if matches.any() else False
        for slot in np.flatnonzero(matches).tolist():
            yield _describe(segment, slot, rows[slot], namespaces, records, ttls, now_s)


def find_slots(segment: Segment, namespace_id: int, hashes: bytes) -> NDArray[np.intp]:
    """Every slot that holds a block of one of these prefix hashes in the namespace, whatever its flags. Raises: OSError."""
    wanted = np.frombuffer(hashes, dtype=f"V{HASH_BYTES}")
    rows = segment.read_rows(0, segment.slot_count)
    named = np.isin(np.ascontiguousarray(rows["prefix_hash"]).view(wanted.dtype), wanted)
    return np.flatnonzero(named & (rows["namespace_id"] == namespace_id) & fmt.valid_rows(rows, segment.segment_id))


def find_state_slots(segment: Segment, namespace_id: int, hashes: bytes) -> NDArray[np.intp]:
    """Every slot that holds a state object beside one of these prefix hashes, by their first 7 bytes. Raises: OSError."""
    rows = segment.read_rows(0, segment.slot_count)
    starts = np.frombuffer(hashes, dtype=f"V{HASH_BYTES}").view(np.uint8).reshape(-1, HASH_BYTES)[:, : fmt.ANCHOR_BYTES]
    anchors = np.ascontiguousarray(starts).view(f"V{fmt.ANCHOR_BYTES}").ravel()
    beside = np.isin(np.ascontiguousarray(rows["anchor"]), anchors) & (rows["kind"] == fmt.KIND_STATE)
    return np.flatnonzero(beside & (rows["namespace_id"] == namespace_id) & fmt.valid_rows(rows, segment.segment_id))


def _describe(
    segment: Segment,
    slot: int,
    row: np.void,
    namespaces: Mapping[int, NamespaceDigest],
    classes: Iterable[ClassRecord],
    ttls: TtlTable,
    now_s: float,
) -> BlockInfo:
    use = segment.uses[slot]
    namespace = namespaces.get(int(row["namespace_id"]))
    if namespace is None:
        state = "dropped"
    elif use[fmt.USE_FLAGS]:
        state = "dead"
    else:
        state = "live" if ttls.live(use.reshape(1, -1), now_s)[0] else "expired"
    uses = [
        ClassUse(
            record.traffic_class.name, int(use[record.class_id]), int(use[record.class_id]) + record.traffic_class.ttl_s
        )
        for record in classes
        if use[record.class_id]
    ]
    return BlockInfo(
        namespace=namespace if namespace is not None else _NO_NAMESPACE,
        prefix_hash=row["prefix_hash"].tobytes(),
        block=int(row["position"]),
        size_bytes=int(row["length_bytes"]),
        checksum=int(row["checksum"]),
        addr=BlockAddr(segment.segment_id, slot),
        create_time_s=int(row["create_time_s"]),
        uses=uses,
        state=state,
        state_object=int(row["kind"]) == fmt.KIND_STATE,
    )


_NO_NAMESPACE = NamespaceDigest(b"")  # a dropped namespace has no digest any more
