"""Checking a data directory that no server runs on: everything that can be damaged, and what the next start does about it.

Changes nothing, not even a time stamp that matters: files are opened for reading, the index without its lock file. Nothing is
repaired here either; a start repairs what can be repaired, and what cannot is a miss.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import lmdb
import numpy as np

from kvstore.catalog import CATALOG_FILE, Catalog
from kvstore.data_dir import INDEX_DIR, SEGMENTS_DIR, held_still, leftovers
from kvstore.errors import CorruptDataDirError, ForeignSegmentError, FormatVersionError
from kvstore.expiry import TtlTable
from kvstore.index import MACHINE_STOPPED, NOT_THERE, IndexState, find_in, inspect, read_entries, row_keys
from kvstore.invariants import misplaced_entries, named
from kvstore.log import format as fmt
from kvstore.log.check import Alive, Damage, check_blocks, whole_rows
from kvstore.log.readonly import ReadOnlyDevice
from kvstore.log.segment import Segment, segment_name
from kvstore.log.segments import UNREADABLE_ERRNOS, is_blank
from kvstore.types import BlockAddr, SegmentId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

FINDINGS_MAX = 10_000  # kept; all are counted

# What can be wrong; stable names.
CATALOG_DAMAGED = "CATALOG_DAMAGED"
INDEX_DAMAGED = "INDEX_DAMAGED"
INDEX_MISSING = "INDEX_MISSING"
SEGMENT_DAMAGED = "SEGMENT_DAMAGED"
SEGMENT_FOREIGN = "SEGMENT_FOREIGN"
SEGMENT_UNREADABLE = "SEGMENT_UNREADABLE"
SEAL_WRONG = "SEAL_WRONG"
USE_ROW_WRONG = "USE_ROW_WRONG"
NOT_INDEXED = "NOT_INDEXED"
ENTRY_WRONG = "ENTRY_WRONG"

_REBUILDS = "rebuilds the index from the segments"
_REFUSES = "the start is refused"
_MISS = "a miss"
_MISS_UNTIL_REBUILT = "a miss; without the directory index/ a start rebuilds the index and finds it"

_ROWS_PER_STEP = 2048
_ENTRIES_PER_STEP = 4096
_SEGMENTS_OPEN = 64  # while entries are looked up: their tables are held in memory
# How the work divides, for the progress shown: the entries are a small part of the bytes.
_SEGMENTS_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong."""

    kind: str  # a name above, or why a block is damaged: see `log/check.py`
    file: str  # in the data directory
    segment_id: int | None
    slot: int | None
    namespace: bytes | None  # digest and hash, where it is a block and they are known
    prefix_hash: bytes | None
    detail: str
    next_start: str  # what the next start does about it


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file that the store does not use."""

    file: str
    bytes: int  # allocated


@dataclass(slots=True)
class FsckReport:
    """What was looked at and found. Blocks that expired, were dropped or flagged are not read: nobody will get them."""

    data_dir: str
    clean: bool = True  # nothing is wrong
    store_id: str = ""
    namespaces: int = 0
    segments: int = 0
    retired_segments: int = 0  # the next start removes them once no lease names them
    slots: int = 0
    blocks_checked: int = 0
    bytes_read: int = 0
    index: str = ""  # in what state it was found
    index_entries: int = 0
    stale_entries: int = 0  # of these, entries that name a segment that is gone: harmless
    unfiled_blocks: int = 0  # whole, not yet in the index of a server that died: the next start files them
    finding_count: int = 0
    findings: list[Finding] = field(default_factory=list)
    leftovers: list[Leftover] = field(default_factory=list)

    def add(self, finding: Finding) -> None:
        """Note something that is wrong."""
        self.clean = False
        self.finding_count += 1
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(finding)


def fsck(data_dir: Path, now_s: float, progress: Callable[[float, str], None]) -> FsckReport:
    """Check the directory, holding its lock.

    Args:
        now_s: decides which blocks have expired.
        progress: called often with the share that is done, 0 to 1, and a few words.
    Raises: NotADataDirError, DataDirLockedError, FormatVersionError, ConfigError: it cannot be looked at.
    """
    with held_still(data_dir):
        report = FsckReport(str(data_dir))
        report.leftovers = [
            Leftover(str(path.relative_to(data_dir)), path.stat().st_blocks * 512) for path in leftovers(data_dir)
        ]
        catalog = _catalog(data_dir, report)
        if catalog is not None:
            _Check(data_dir, catalog, report, now_s, progress).run()
        return report


def _catalog(data_dir: Path, report: FsckReport) -> Catalog | None:
    try:
        if not (data_dir / CATALOG_FILE).exists():
            raise CorruptDataDirError(
                f"{CATALOG_FILE} is not there, and nothing else knows whose blocks the segments hold"
            )
        return Catalog.load(data_dir)
    except CorruptDataDirError as error:
        report.add(Finding(CATALOG_DAMAGED, CATALOG_FILE, None, None, None, None, str(error), _REFUSES))
        return None


class _Check:
    """One run over one directory."""

    def __init__(
        self, data_dir: Path, catalog: Catalog, report: FsckReport, now_s: float, progress: Callable[[float, str], None]
    ) -> None:
        self._data_dir, self._catalog, self._report, self._progress = data_dir, catalog, report, progress
        self._digests = {int(n.namespace_id): bytes(digest) for digest, n in catalog.namespaces.items()}
        self._device = ReadOnlyDevice()
        ttls, ids = TtlTable(catalog.classes.values()), np.array(sorted(self._digests), dtype=np.uint32)
        self._alive = Alive(
            unexpired=lambda uses: ttls.live(uses, now_s), known=lambda namespace_ids: np.isin(namespace_ids, ids)
        )
        self._paths = {path.name: path for path in (data_dir / SEGMENTS_DIR).glob("*.seg")}
        self._broken: set[str] = set()  # names of segment files that the next start will not have

    def run(self) -> None:
        """Fill the report."""
        report = self._report
        report.store_id, report.namespaces = self._catalog.store_id, len(self._catalog.namespaces)
        state, env = inspect(self._data_dir / INDEX_DIR, self._catalog.store_id, ReadOnlyDevice())
        self._note_index(state)
        try:
            for done, name in enumerate(sorted(self._paths)):
                self._check_segment(name, state, env, done)
            if env is not None:
                self._check_entries(env)
        except lmdb.Error as error:
            self._find(INDEX_DAMAGED, f"{INDEX_DIR}/data.mdb", f"cannot be read: {error}", _REBUILDS)
        finally:
            if env is not None:
                env.close()
        self._progress(1.0, self._numbers())

    def _note_index(self, state: IndexState) -> None:
        self._report.index = state.why
        if state.usable:
            return
        if state.why == NOT_THERE:
            if self._paths:
                self._find(INDEX_MISSING, f"{INDEX_DIR}/data.mdb", state.why, _REBUILDS)
        elif state.why != MACHINE_STOPPED:  # which is nobody's fault, and told in the report
            self._find(INDEX_DAMAGED, f"{INDEX_DIR}/data.mdb", state.why, _REBUILDS)

    # Segments

    def _check_segment(self, name: str, state: IndexState, env: lmdb.Environment | None, done: int) -> None:
        self._report.segments += 1
        file = f"{SEGMENTS_DIR}/{name}"
        aside = f"sets it aside as {name}.damaged and serves the rest; its blocks are misses"
        try:
            segment = self._open(name)
            trusted_slots = self._open(name, trust_seal=True).slot_count
        except CorruptDataDirError as error:
            blank = "removes it: nothing is in it, as after a power loss shortly after it was made"
            self._broken_segment(SEGMENT_DAMAGED, name, str(error), blank if is_blank(self._paths[name]) else aside)
        except (ForeignSegmentError, FormatVersionError) as error:
            self._broken_segment(SEGMENT_FOREIGN, name, str(error), _REFUSES)
        except OSError as error:
            next_start = f"{aside}; refused when most files are so" if error.errno in UNREADABLE_ERRNOS else _REFUSES
            self._broken_segment(SEGMENT_UNREADABLE, name, str(error), next_start)
        else:
            if segment.segment_id >= self._catalog.next_segment_id:
                detail = f"its id was never given out: {CATALOG_FILE} says that the next one is {self._catalog.next_segment_id}"
                self._find(CATALOG_DAMAGED, file, detail, "serves it; a later segment may find its name taken")
            if segment.state == fmt.STATE_RETIRED:
                self._report.retired_segments += 1
                return
            self._report.slots += segment.slot_count
            self._check_seal(segment, file, trusted_slots)
            self._check_use_rows(segment, file)
            self._check_blocks(segment, file, done)
            if env is not None:
                self._check_lookups(segment, file, state, env)

    def _open(self, name: str, *, trust_seal: bool = False) -> Segment:
        """By its rows, unless the seal is trusted, as a start after an orderly stop does."""
        return Segment.open(
            self._paths[name], self._device, bytes.fromhex(self._catalog.store_id), trust_seal=trust_seal
        )

    def _broken_segment(self, kind: str, name: str, detail: str, next_start: str) -> None:
        self._broken.add(name)
        self._find(kind, f"{SEGMENTS_DIR}/{name}", detail, next_start)

    def _check_seal(self, segment: Segment, file: str, trusted_slots: int) -> None:
        """The seal says how many slots there are; only an append that failed, and flagged its slots, may lie behind it."""
        first, end = sorted((segment.slot_count, trusted_slots))
        if self._alive.unexpired(segment.uses[first:end]).any():
            detail = f"its seal says {trusted_slots} slots, its rows say {segment.slot_count}"
            self._find(
                SEAL_WRONG,
                file,
                detail,
                "believes the seal; what lies behind is not counted, and lost when it is reclaimed",
                segment.segment_id,
            )

    def _check_use_rows(self, segment: Segment, file: str) -> None:
        """What a use row repeats of its row, for counting."""
        for first_slot in range(0, segment.slot_count, _ROWS_PER_STEP):
            here = slice(first_slot, min(first_slot + _ROWS_PER_STEP, segment.slot_count))
            try:
                rows = segment.read_rows(first_slot, here.stop - first_slot)
            except OSError:
                return  # told when the blocks are checked
            wrong = (rows["namespace_id"] != segment.namespace_ids[here]) | (
                rows["length_bytes"] != segment.lengths[here]
            )
            wrong &= self._alive.unexpired(segment.uses[here]) & whole_rows(segment, rows, first_slot)
            for at in np.flatnonzero(wrong).tolist():
                damage = Damage(first_slot + at, USE_ROW_WRONG, rows[at])
                self._find_block(USE_ROW_WRONG, segment, file, damage, "serves it, but counts it wrongly")

    def _check_blocks(self, segment: Segment, file: str, done: int) -> None:
        report = self._report
        try:
            for checked in check_blocks(segment, 0, self._alive):
                report.blocks_checked += checked.blocks
                report.bytes_read += checked.bytes
                for damage in checked.damaged:
                    self._find_block(damage.reason, segment, file, damage, _MISS)
                share = (done + checked.next_slot / segment.slot_count) / len(self._paths)
                self._progress(_SEGMENTS_SHARE * share, self._numbers())
        except OSError as error:
            next_start = "its blocks are misses until it can be read; their space is not reclaimed"
            self._find(SEGMENT_UNREADABLE, file, str(error), next_start, segment.segment_id)

    def _check_lookups(self, segment: Segment, file: str, state: IndexState, env: lmdb.Environment) -> None:
        """Every live block has its entry."""
        will_be_filed = not state.clean and segment.state == fmt.STATE_OPEN
        blocks = env.open_db(b"blocks", create=False)
        for first_slot in range(0, segment.slot_count, _ROWS_PER_STEP):
            count = min(_ROWS_PER_STEP, segment.slot_count - first_slot)
            try:
                rows = segment.read_rows(first_slot, count)
            except OSError:
                return  # told already
            live = self._alive.unexpired(segment.uses[first_slot : first_slot + count])
            live &= self._alive.known(rows["namespace_id"]) & whole_rows(segment, rows, first_slot)
            slots = np.flatnonzero(live)
            keys = row_keys(rows[slots])
            with env.begin(db=blocks) as txn, txn.cursor() as cursor:
                found = find_in(cursor, keys)
            for at, key in zip(slots.tolist(), keys, strict=True):
                other = found.get(key)
                if other == BlockAddr(segment.segment_id, first_slot + at):
                    continue
                if will_be_filed:
                    self._report.unfiled_blocks += 1
                    continue
                where = f"says segment {other.segment_id} slot {other.slot}" if other else "does not have it"
                damage = Damage(first_slot + at, f"the block is whole, but the index {where}", rows[at])
                self._find_block(NOT_INDEXED, segment, file, damage, _MISS_UNTIL_REBUILT)

    # Index

    def _check_entries(self, env: lmdb.Environment) -> None:
        """Every entry leads to a row that carries its key."""
        open_segment = lru_cache(_SEGMENTS_OPEN)(self._open)
        blocks = env.open_db(b"blocks", create=False)
        with env.begin(db=blocks) as txn:
            total = txn.stat(blocks)["entries"]
        last_key = b""
        while True:
            with env.begin(db=blocks) as txn, txn.cursor() as cursor:
                entries = read_entries(cursor, last_key, _ENTRIES_PER_STEP)
            self._report.index_entries += len(entries)
            by_segment: dict[SegmentId, list[tuple[int, bytes]]] = {}
            for key, addr in entries:
                by_segment.setdefault(addr.segment_id, []).append((addr.slot, key))
            for segment_id, wanted in by_segment.items():
                self._check_entries_of(segment_id, wanted, open_segment)
            self._progress(
                _SEGMENTS_SHARE + (1 - _SEGMENTS_SHARE) * self._report.index_entries / max(1, total), self._numbers()
            )
            if len(entries) < _ENTRIES_PER_STEP:
                return
            last_key = entries[-1][0]

    def _check_entries_of(
        self, segment_id: SegmentId, wanted: Sequence[tuple[int, bytes]], open_segment: Callable[[str], Segment]
    ) -> None:
        file, name = f"{INDEX_DIR}/data.mdb", segment_name(segment_id)
        if name in self._paths and name not in self._broken:
            for sentence in misplaced_entries(open_segment(name), wanted):
                self._find(ENTRY_WRONG, file, sentence, _MISS, segment_id)
        elif segment_id < self._catalog.next_segment_id:
            self._report.stale_entries += len(wanted)
        else:
            for _, key in wanted:
                detail = f"{named(key)} is said to lie in segment {segment_id}, which never was"
                self._find(ENTRY_WRONG, file, detail, _MISS, segment_id)

    # Findings

    def _find_block(self, kind: str, segment: Segment, file: str, damage: Damage, next_start: str) -> None:
        row = damage.row
        detail = damage.reason if kind == NOT_INDEXED else _DETAILS.get(kind, kind)
        namespace = self._digests.get(int(row["namespace_id"])) if row is not None else None
        prefix_hash = row["prefix_hash"].tobytes() if row is not None else None
        self._report.add(
            Finding(kind, file, segment.segment_id, damage.slot, namespace, prefix_hash, detail, next_start)
        )

    def _find(self, kind: str, file: str, detail: str, next_start: str, segment_id: int | None = None) -> None:
        self._report.add(Finding(kind, file, segment_id, None, None, None, detail, next_start))

    def _numbers(self) -> str:
        report = self._report
        return (
            f"{report.segments:,} of {len(self._paths):,} segments, {report.blocks_checked:,} blocks, "
            f"{report.index_entries:,} index entries, {report.finding_count:,} findings"
        )


_DETAILS = {
    USE_ROW_WRONG: "its use row names another namespace or length than its row",
    "ROW_DAMAGED": "its row is damaged, so nobody knows which block it was",
    "BAD_CHECKSUM": "its bytes are not those that were stored",
    "TRUNCATED": "the file ends before it does",
    "IO_ERROR": "the disk does not give it",
}
