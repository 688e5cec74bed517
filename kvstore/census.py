"""Counting and finding blocks across all segments, for operators. Reads tables, never payloads or the index."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.log import format as fmt
from kvstore.types import BlockAddr, BlockInfo, ClassUse, Usage
from kvstore_api.limits import HASH_BYTES
from kvstore_api.namespace import NamespaceDigest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from kvstore.catalog import ClassRecord
    from kvstore.expiry import TtlTable
    from kvstore.log.segment import Segment


def total(segments: Iterable[Segment], live: Callable[[Segment], NDArray[np.bool_]]) -> Usage:
    """Live blocks and their bytes."""
    return _sum(_live_lengths(segment, live) for segment in segments)


def by_class(segments: Iterable[Segment], live: Callable[[Segment], NDArray[np.bool_]]) -> dict[int, Usage]:
    """The same by the class whose segments they are in."""
    grouped: dict[int, list[NDArray[np.uint32]]] = {}
    for segment in segments:
        grouped.setdefault(segment.header.class_id, []).append(_live_lengths(segment, live))
    return {class_id: _sum(lengths) for class_id, lengths in grouped.items()}


def by_namespace(segments: Iterable[Segment], live: Callable[[Segment], NDArray[np.bool_]]) -> dict[int, Usage]:
    """The same by namespace id."""
    blocks: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for segment in segments:
        mask = live(segment)
        ids, lengths = segment.namespace_ids[: len(mask)][mask], segment.lengths[: len(mask)][mask]
        for namespace_id in np.unique(ids).tolist():
            mine = ids == namespace_id
            blocks[namespace_id] = blocks.get(namespace_id, 0) + int(mine.sum())
            sizes[namespace_id] = sizes.get(namespace_id, 0) + int(lengths[mine].sum())
    return {namespace_id: Usage(count, sizes[namespace_id]) for namespace_id, count in blocks.items()}


def _live_lengths(segment: Segment, live: Callable[[Segment], NDArray[np.bool_]]) -> NDArray[np.uint32]:
    mask = live(segment)
    return segment.lengths[: len(mask)][mask]  # slots may have been added meanwhile


def find(
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
    elif use[0]:
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


def _sum(lengths: Iterable[NDArray[np.uint32]]) -> Usage:
    blocks = size = 0
    for part in lengths:
        blocks += len(part)
        size += int(part.sum())
    return Usage(blocks, size)
