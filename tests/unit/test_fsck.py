"""Checking a stopped data directory: each kind of damage is told with what the next start does, and does; nothing changes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import lmdb
import numpy as np
import pytest

from kvstore import fsck as fsck_module
from kvstore.clock import ManualClock
from kvstore.config import TrafficClassConfig
from kvstore.errors import ConfigError, DataDirLockedError, FormatVersionError, NotADataDirError
from kvstore.fsck import FsckReport, fsck
from kvstore.index import _file_checksum, row_key
from kvstore.log import format as fmt
from kvstore.log.readonly import ReadOnlyDevice
from kvstore.log.segment import Segment
from stores import BLOCK_BYTES, chain_of, get, open_store, put, spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.store import LocalStore

BLOCKS = 40
GOLDEN = Path(__file__).resolve().parents[1] / "golden"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def filled(tmp_path: Path, clock: ManualClock):
    """A store closed in order, with 40 blocks in segments of 13; its directory, namespace and chain."""
    store = open_store(tmp_path / "data", clock, capacity=1 << 20)
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, BLOCKS)
    put(store, namespace, chain)
    store.close()
    return tmp_path / "data", namespace, chain


def everything(path: Path) -> dict[str, tuple[bytes, int, int]]:
    """All there is in the directory: contents, times, allocated blocks."""
    return {
        str(entry.relative_to(path)): (
            entry.read_bytes() if entry.is_file() else b"",
            entry.stat().st_mtime_ns,
            entry.stat().st_blocks,
        )
        for entry in [path, *path.rglob("*")]
    }


def check(path: Path, clock: ManualClock) -> FsckReport:
    """Run it, and make sure that nothing changed."""
    before = everything(path)
    report = fsck(path, clock.now_s(), lambda share, text: None)
    assert everything(path) == before
    return report


def kinds(report: FsckReport) -> list[tuple[str, str | None]]:
    assert report.finding_count == len(report.findings)
    assert report.clean == (not report.findings)
    for finding in report.findings:
        assert finding.detail
        assert finding.next_start
    return [(finding.kind, finding.slot) for finding in report.findings]


def look_at(path: Path, number: int = 1) -> Segment:
    """One of the segments, to find places in it."""
    catalog = json.loads(json.loads((path / "catalog.json").read_text())["catalog"])
    file = sorted((path / "segments").iterdir())[number]
    return Segment.open(file, ReadOnlyDevice(), bytes.fromhex(catalog["store_id"]), trust_seal=False)


def write_at(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def change_index(path: Path, change: Callable[[lmdb.Transaction], None]) -> None:
    """Change entries for real; the checksum of an orderly stop is made anew, so that the file counts as whole."""
    env = lmdb.open(str(path / "index"), max_dbs=4, lock=False)
    with env.begin(write=True, db=env.open_db(b"blocks")) as txn:
        change(txn)
    env.sync(True)
    env.close()
    (path / "index" / "data.mdb.xxh3").write_bytes(_file_checksum(path / "index" / "data.mdb"))


def reopened(path: Path, clock: ManualClock) -> LocalStore:
    return open_store(path, clock, capacity=1 << 20)


def test_a_store_closed_in_order_is_clean(filled, clock):
    path, _, _ = filled
    report = check(path, clock)
    assert kinds(report) == []
    assert (report.blocks_checked, report.bytes_read) == (BLOCKS, BLOCKS * BLOCK_BYTES)
    assert (report.index, report.index_entries, report.slots) == ("closed in order", BLOCKS, BLOCKS)
    assert (report.namespaces, report.segments, report.unfiled_blocks) == (1, 4, 0)
    assert report.leftovers == []


def test_a_new_directory_is_clean(tmp_path, clock):
    open_store(tmp_path, clock).close()
    report = check(tmp_path, clock)
    assert kinds(report) == []
    assert report.segments == 0


def test_progress_is_told_and_never_goes_back(filled, clock):
    path, _, _ = filled
    shares: list[float] = []
    fsck(path, clock.now_s(), lambda share, text: shares.append(share))
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(set(shares)) > 4


def test_a_released_directory_is_clean(tmp_path, clock):
    for archive in GOLDEN.glob("data-dir-v*.tar.gz"):
        with tarfile.open(archive) as tar:
            tar.extractall(tmp_path / archive.name, filter="data")
        (path,) = (entry.parent for entry in (tmp_path / archive.name).rglob("catalog.json"))
        try:
            report = check(path, clock)
        except FormatVersionError:
            assert f"v{fmt.FORMAT_VERSION}." not in archive.name
            continue
        assert report.segments > 0
        assert [finding for finding in report.findings if finding.kind != "INDEX_MISSING"] == []


class TestBlocks:
    def test_a_flipped_bit_in_a_payload(self, filled, clock):
        path, namespace, chain = filled
        segment = look_at(path)
        row = segment.read_rows(3, 1)[0]
        place = int(row["offset_bytes"]) + 100
        write_at(segment.path, place, bytes([segment.path.read_bytes()[place] ^ 1]))
        report = check(path, clock)
        assert kinds(report) == [("BAD_CHECKSUM", 3)]
        (finding,) = report.findings
        assert finding.file == f"segments/{segment.path.name}"
        assert (finding.namespace, finding.prefix_hash) == (namespace.digest, row["prefix_hash"].tobytes())
        assert finding.next_start == "a miss"
        store = reopened(path, clock)
        assert list(get(store, namespace, chain)[1].values()) == ["CORRUPT"]
        store.close()
        assert kinds(check(path, clock)) == []  # flagged: nobody is offered it

    def test_a_damaged_row(self, filled, clock):
        path, _, _ = filled
        segment = look_at(path)
        write_at(segment.path, segment.layout.row_offset(5) + 40, b"\xee\xee")
        report = check(path, clock)
        assert kinds(report) == [("ROW_DAMAGED", 5)]
        assert report.findings[0].prefix_hash is None

    def test_a_file_cut_short(self, filled, clock):
        path, _, _ = filled
        segment = look_at(path)
        data = segment.path.read_bytes()
        segment.path.write_bytes(data[:-1])
        size = segment.slot_count
        last = segment.read_rows(size - 1, 1)[0]
        assert int(last["offset_bytes"]) + 4096 == len(data)
        segment.path.write_bytes(data[: int(last["offset_bytes"]) + BLOCK_BYTES - 1])
        assert kinds(check(path, clock)) == [("TRUNCATED", size - 1)]

    @pytest.mark.parametrize("column", [fmt.USE_NAMESPACE, fmt.USE_LENGTH])
    def test_a_use_row_that_does_not_repeat_its_row(self, filled, clock, column):
        path, namespace, chain = filled
        segment = look_at(path)
        write_at(segment.path, segment.layout.use_offset(3) + 4 * column, b"\x63\0\0\0")
        report = check(path, clock)
        assert kinds(report) == [("USE_ROW_WRONG", 3)]
        assert report.findings[0].next_start == "serves it, but counts it wrongly"
        assert report.blocks_checked == BLOCKS
        store = reopened(path, clock)
        assert get(store, namespace, chain)[1] == {}
        assert not store.invariants().ok
        store.close()

    @pytest.mark.parametrize(("slots", "missed"), [(12, 1), (13, 0)])
    def test_a_seal_that_says_less_than_there_is(self, filled, clock, slots, missed):
        path, _, _ = filled
        segment = look_at(path)
        assert segment.slot_count == 13
        write_at(segment.path, fmt.SEAL_OFFSET, fmt.encode_seal(segment.segment_id, slots, segment.end_bytes))
        report = check(path, clock)
        assert [kind for kind, _ in kinds(report)] == ["SEAL_WRONG"] * missed
        store = reopened(path, clock)
        assert store.status().live.blocks == BLOCKS - missed
        assert store.invariants().ok == (not missed)
        store.close()

    def test_damage_that_nobody_will_get_is_none(self, tmp_path, clock):
        classes = {"long": TrafficClassConfig(ttl_s=1000), "short": TrafficClassConfig(ttl_s=10)}
        store = open_store(tmp_path, clock, capacity=1 << 20, traffic_classes=classes)
        namespace = store.register_namespace(spec())
        kept, gone = chain_of(namespace, 1, 5), chain_of(namespace, 2, 5)
        put(store, namespace, kept)
        put(store, namespace, gone, traffic_class="short")
        store.delete(namespace, kept, 4, 1)
        places = []
        for block_hash in (kept[4], gone[0]):
            (info,) = store.find_blocks(block_hash.hex())
            segment = store._segments.get(info.addr.segment_id)
            places.append((segment.path, int(segment.read_rows(info.addr.slot, 1)["offset_bytes"][0])))
        del segment
        store.close()
        for file, offset in places:
            write_at(file, offset, b"\x99" * 50)
        clock.advance(11)
        report = check(tmp_path, clock)
        assert kinds(report) == []
        assert report.blocks_checked == 4


class TestSegments:
    @pytest.mark.parametrize("keep", [0, 5000, 9000])
    def test_damaged_tables(self, filled, clock, keep):
        path, namespace, chain = filled
        file = look_at(path).path
        file.write_bytes(file.read_bytes()[:keep])
        report = check(path, clock)
        assert [kind for kind, _ in kinds(report)] == ["SEGMENT_DAMAGED"]
        assert (f"{file.name}.damaged" if keep else "removes it") in report.findings[0].next_start
        assert report.stale_entries == 13
        store = reopened(path, clock)
        assert len(get(store, namespace, chain)[0]) == BLOCKS - 13
        store.close()
        report = check(path, clock)
        assert kinds(report) == []
        left = [f"segments/{file.name}.damaged"] if keep else []
        assert [leftover.file for leftover in report.leftovers] == left

    def test_a_damaged_header(self, filled, clock):
        path, _, _ = filled
        write_at(look_at(path).path, 20, b"\xff")
        assert [kind for kind, _ in kinds(check(path, clock))] == ["SEGMENT_DAMAGED"]

    def test_a_segment_of_another_store(self, filled, clock, tmp_path):
        path, _, _ = filled
        open_store(tmp_path / "other", clock).close()
        shutil.copy(look_at(path).path, tmp_path / "other" / "segments")
        report = check(tmp_path / "other", clock)
        assert [kind for kind, _ in kinds(report)] == ["SEGMENT_FOREIGN"]
        assert report.findings[0].next_start == "the start is refused"

    def test_a_disk_that_does_not_give_a_table(self, filled, clock, monkeypatch):
        path, _, _ = filled
        segment = look_at(path)
        table, name, read = segment.layout.mapped_bytes, segment.path, ReadOnlyDevice.read
        inode = name.stat().st_ino

        def fail(self, descriptor, buffers, offset_bytes):
            if os.fstat(descriptor).st_ino == inode and table <= offset_bytes < segment.layout.payload_offset - 1:
                raise OSError(errno.EIO, "injected")
            return read(self, descriptor, buffers, offset_bytes)

        monkeypatch.setattr(ReadOnlyDevice, "read", fail)
        report = check(path, clock)
        assert [kind for kind, _ in kinds(report)] == ["SEGMENT_UNREADABLE"]
        assert report.blocks_checked == BLOCKS - 13

    def test_an_id_that_was_never_given_out(self, filled, clock):
        path, _, _ = filled
        before = json.loads((path / "catalog.json").read_text())
        catalog = json.loads(before["catalog"])
        catalog["next_segment_id"] = 3
        body = json.dumps(catalog)
        before.update(catalog=body, crc32=zlib.crc32(body.encode()))
        (path / "catalog.json").write_text(json.dumps(before))
        report = check(path, clock)
        assert [kind for kind, _ in kinds(report)] == ["CATALOG_DAMAGED"] * 2


class TestIndex:
    def test_a_block_without_an_entry(self, filled, clock):
        path, namespace, chain = filled
        segment = look_at(path)
        key = row_key(segment.read_rows(3, 1)[0])
        change_index(path, lambda txn: txn.delete(key))
        report = check(path, clock)
        assert kinds(report) == [("NOT_INDEXED", 3)]
        assert "does not have it" in report.findings[0].detail
        assert report.findings[0].namespace == namespace.digest
        store = reopened(path, clock)
        assert len(get(store, namespace, chain)[0]) == BLOCKS - 1
        store.close()
        shutil.rmtree(path / "index")  # what the finding says
        store = reopened(path, clock)
        assert len(get(store, namespace, chain)[0]) == BLOCKS
        store.close()

    def test_an_entry_that_leads_to_another_block(self, filled, clock):
        path, namespace, chain = filled
        segment = look_at(path)
        key = row_key(segment.read_rows(3, 1)[0])
        change_index(path, lambda txn: txn.put(key, (segment.segment_id << 20 | 4).to_bytes(8, "little")))
        report = check(path, clock)
        assert kinds(report) == [("NOT_INDEXED", 3), ("ENTRY_WRONG", None)]
        assert f"says segment {segment.segment_id} slot 4" in report.findings[0].detail
        assert f"segment {segment.segment_id} slot 4, which holds" in report.findings[1].detail
        store = reopened(path, clock)
        assert list(get(store, namespace, chain)[1].values()) == ["NOT_FOUND"]
        store.close()

    def test_entries_of_slots_and_segments_that_never_were(self, filled, clock):
        path, _, _ = filled
        segment = look_at(path)

        def add(txn: lmdb.Transaction) -> None:
            txn.put(b"\0\0\0\1" + b"\1" * 40, (segment.segment_id << 20 | 200).to_bytes(8, "little"))
            txn.put(b"\0\0\0\1" + b"\2" * 40, (1 << 50).to_bytes(8, "little"))
            txn.put(b"\0\0\0\1" + b"\3" * 40, (900 << 20).to_bytes(8, "little"))  # reserved: it may have been

        change_index(path, add)
        report = check(path, clock)
        assert kinds(report) == [("ENTRY_WRONG", None)] * 2
        assert report.stale_entries == 1

    def test_every_entry_is_looked_at(self, filled, clock, monkeypatch):
        monkeypatch.setattr(fsck_module, "_ENTRIES_PER_STEP", 7)
        path, _, _ = filled
        change_index(path, lambda txn: txn.put(b"\xff" * 44, (1 << 50).to_bytes(8, "little")))
        report = check(path, clock)
        assert report.index_entries == BLOCKS + 1
        assert kinds(report) == [("ENTRY_WRONG", None)]

    def test_a_missing_index_is_rebuilt(self, filled, clock):
        path, namespace, chain = filled
        shutil.rmtree(path / "index")
        report = check(path, clock)
        assert [kind for kind, _ in kinds(report)] == ["INDEX_MISSING"]
        assert "rebuilds the index" in report.findings[0].next_start
        assert report.blocks_checked == BLOCKS
        assert not (path / "index").exists()
        store = reopened(path, clock)
        assert store.match(namespace, chain).hit_length_blocks == BLOCKS
        store.close()

    @pytest.mark.parametrize("clean", [True, False])
    @pytest.mark.parametrize(
        "damage",
        [
            lambda data: b"",
            lambda data: data[: len(data) // 2],
            lambda data: data[:8192] + b"\xff" * (len(data) - 8192),
            lambda data: b"\0" * len(data),
        ],
    )
    def test_a_damaged_index_is_told_and_no_signal(self, filled, clock, damage, clean):
        path, _, _ = filled
        if not clean:
            (path / "index" / "data.mdb.xxh3").unlink()
        data = path / "index" / "data.mdb"
        data.write_bytes(damage(data.read_bytes()))
        report = check(path, clock)
        assert [kind for kind, _ in kinds(report)] == ["INDEX_DAMAGED"]
        assert report.blocks_checked == BLOCKS

    def test_an_index_whose_pages_lead_nowhere_is_told_and_no_signal(self, filled):
        """In a process of its own: reading such pages ends in a signal, which only the walk in a child of that process survives."""
        path, _, _ = filled
        data = path / "index" / "data.mdb"
        content = bytearray(data.read_bytes())
        for page in range(2, len(content) // 4096):
            # The page's header stays as it is; where its entries begin points far behind the file's end.
            content[page * 4096 + 16 : (page + 1) * 4096] = b"\xff" * 4080
        data.write_bytes(content)
        (path / "index" / "data.mdb.xxh3").write_bytes(_file_checksum(data))
        command = [sys.executable, "-m", "kvstore.cli.server", "fsck", "--data-dir", str(path), "-o", "json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 9, done.stderr
        (finding,) = json.loads(done.stdout)["findings"]
        assert finding["kind"] == "INDEX_DAMAGED"
        assert "signal" in finding["detail"]

    def test_an_index_marked_as_damaged(self, filled, clock):
        path, _, _ = filled
        (path / "index" / "damaged").touch()
        report = check(path, clock)
        assert [kind for kind, _ in kinds(report)] == ["INDEX_DAMAGED"]
        assert "while in use" in report.findings[0].detail

    def test_an_index_of_another_store(self, filled, clock, tmp_path):
        path, _, _ = filled
        open_store(tmp_path / "other", clock).close()
        shutil.rmtree(path / "index")
        shutil.copytree(tmp_path / "other" / "index", path / "index")
        report = check(path, clock)
        assert "another store" in report.findings[0].detail

    def test_what_a_dead_server_had_not_filed_is_no_damage(self, tmp_path, clock):
        store = open_store(tmp_path, clock)
        namespace = store.register_namespace(spec())
        chain = chain_of(namespace, 1, 6)
        put(store, namespace, chain, range(3))
        commit = store._index.commit
        store._index.commit = lambda put, remove=(): 0  # dies after the rows, before the index commit
        put(store, namespace, chain, range(3, 6))
        store._index.commit = commit
        store._writer.close()
        for segment in store._segments.all():
            segment.state = fmt.STATE_OPEN
        del segment
        store._index._env.close()
        store._segments.release()
        store._data_dir.close()
        report = check(tmp_path, clock)
        assert kinds(report) == []
        assert (report.unfiled_blocks, report.index_entries) == (3, 3)
        assert report.index == "the last process died"
        store = open_store(tmp_path, clock)
        assert store.match(namespace, chain).hit_length_blocks == 6
        store.close()

    def test_an_index_of_another_boot_is_no_damage_but_will_be_rebuilt(self, filled, clock, monkeypatch, tmp_path):
        path, _, _ = filled
        (path / "index" / "data.mdb.xxh3").unlink()
        (tmp_path / "boot_id").write_text("another boot")
        monkeypatch.setattr("kvstore.log.device._BOOT_ID_FILE", tmp_path / "boot_id")
        report = check(path, clock)
        assert kinds(report) == []
        assert "machine stopped" in report.index


class TestDirectory:
    @pytest.mark.parametrize(
        "text", ["", "{", f'{{"crc32": 1, "format_version": {fmt.FORMAT_VERSION}, "catalog": "{{}}"}}']
    )
    def test_a_damaged_catalog(self, filled, clock, text):
        path, _, _ = filled
        (path / "catalog.json").write_text(text)
        report = check(path, clock)
        assert kinds(report) == [("CATALOG_DAMAGED", None)]
        assert report.findings[0].next_start == "the start is refused"

    def test_a_missing_catalog(self, filled, clock):
        path, _, _ = filled
        (path / "catalog.json").unlink()
        assert kinds(check(path, clock)) == [("CATALOG_DAMAGED", None)]

    def test_another_format_version(self, filled, clock):
        path, _, _ = filled
        document = json.loads((path / "catalog.json").read_text())
        document["format_version"] = fmt.FORMAT_VERSION + 1
        (path / "catalog.json").write_text(json.dumps(document))
        with pytest.raises(FormatVersionError):
            check(path, clock)

    def test_leftovers_are_listed(self, filled, clock):
        path, _, _ = filled
        for name in ("catalog.json.new", "notes.txt", "segments/0000000000000001.seg.damaged", "index/core"):
            (path / name).write_bytes(b"x" * 5000)
        report = check(path, clock)
        assert kinds(report) == []
        assert [(leftover.file, leftover.bytes) for leftover in report.leftovers] == [
            ("catalog.json.new", 8192),
            ("index/core", 8192),
            ("notes.txt", 8192),
            ("segments/0000000000000001.seg.damaged", 8192),
        ]

    def test_a_directory_in_use_is_refused_by_name(self, tmp_path, clock):
        store = open_store(tmp_path, clock)
        with pytest.raises(DataDirLockedError, match=f"process {os.getpid()}"):
            check(tmp_path, clock)
        store.close()
        check(tmp_path, clock)

    def test_no_server_starts_while_it_is_looked_at(self, filled, clock):
        path, _, _ = filled
        refused = []

        def try_to_start(share: float, text: str) -> None:
            with pytest.raises(DataDirLockedError):
                open_store(path, clock)
            refused.append(share)

        fsck(path, clock.now_s(), try_to_start)
        assert refused

    def test_a_copy_without_a_lock_file_can_be_looked_at(self, filled, clock):
        path, _, _ = filled
        (path / "LOCK").unlink()
        assert kinds(check(path, clock)) == []

    def test_something_else_is_no_data_directory(self, tmp_path, clock):
        (tmp_path / "thesis.tex").write_text("x")
        for path in (tmp_path, tmp_path / "thesis.tex", tmp_path / "nothing"):
            with pytest.raises(NotADataDirError, match="no data directory of kvstore"):
                fsck(path, clock.now_s(), lambda share, text: None)
        assert issubclass(NotADataDirError, ConfigError)

    def test_a_great_many_findings_are_counted_and_some_kept(self, filled, clock, monkeypatch):
        monkeypatch.setattr(fsck_module, "FINDINGS_MAX", 5)
        path, _, _ = filled
        segment = look_at(path)
        for slot in range(13):
            write_at(segment.path, segment.layout.row_offset(slot) + 40, b"\xee\xee")
        report = fsck(path, clock.now_s(), lambda share, text: None)
        assert (report.finding_count, len(report.findings), report.clean) == (13, 5, False)


def test_the_device_changes_nothing(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(8192))
    device = ReadOnlyDevice()
    descriptor = device.open(file)
    array = np.frombuffer(device.map(descriptor, 4096), dtype=np.uint8)
    array[:] = 1
    for call in (
        lambda: device.write(descriptor, [b"x"], 0),
        lambda: device.resize(descriptor, 0),
        lambda: device.unlink(file),
        lambda: device.create(tmp_path / "new"),
        lambda: device.rename(file, tmp_path / "new"),
        lambda: device.replace(file, b"x"),
    ):
        with pytest.raises(OSError, match="only looks"):
            call()
    device.close(descriptor)
    assert file.read_bytes() == bytes(8192)
    assert list(tmp_path.iterdir()) == [file]
