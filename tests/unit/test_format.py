"""The bytes on disk do not change by accident: golden rows, a golden data directory, and the page that describes them."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.clock import ManualClock
from kvstore.errors import CorruptDataDirError, FormatVersionError
from kvstore.log import format as fmt
from kvstore.log.device import FileDevice
from kvstore.log.segment import Segment, segment_name
from kvstore.types import ClassId, SegmentId
from stores import assert_whole, chain_of, open_store, spec

GOLDEN = Path(__file__).parent.parent / "golden"
PAGE = (Path(kvstore.__file__).parent / "FORMAT.md").read_text()

ENTRY = fmt.Entry(
    namespace_id=1,
    kind=fmt.KIND_BLOCK,
    class_id=1,
    position=3,
    anchor=fmt.NO_ANCHOR,
    prefix_hash=bytes(range(32, 64)),
    length_bytes=5,
    create_time_s=1_800_000_000,
    checksum=0x1122334455667788,
)
HEADER = fmt.SegmentHeader(SegmentId(7), bytes(range(16)), ClassId(2), 256, 1_800_000_000)


def test_the_worked_examples_are_what_the_code_writes(tmp_path):
    page = re.search(r"## 5\. Worked example.*?## 6", PAGE, re.S)
    assert page is not None
    row, use, seal = (bytes.fromhex(example) for example in re.findall(r"```\n(.*?)```", page[0], re.S))
    assert row == fmt.encode_row(SegmentId(7), 0, 12_288, ENTRY)
    segment = Segment.create(tmp_path / segment_name(SegmentId(7)), FileDevice(), HEADER)
    uses = np.zeros((1, fmt.USE_COLUMNS), dtype="<u4")
    uses[0, ENTRY.class_id] = ENTRY.create_time_s
    segment.append([(ENTRY, b"12345")], uses, np.zeros((1, 2), dtype=np.uint64))
    assert segment.uses[0].tobytes() == use
    assert segment.read_rows(0, 1)["length_bytes"][0] == 5
    assert fmt.encode_seal(SegmentId(7), 1, 16_384) == seal
    segment.seal()
    assert fmt.decode_seal(segment.path.read_bytes()[fmt.SEAL_OFFSET :][: fmt.SEAL.size], SegmentId(7)) == (
        1,
        segment.end_bytes,
    )


def test_a_golden_header():
    page = HEADER.encode()
    assert len(page) == fmt.HEADER_BYTES
    assert page[:52].hex() == (GOLDEN / "segment-header-v2.hex").read_text().strip()
    assert fmt.SegmentHeader.decode(page, "x") == HEADER


@pytest.mark.parametrize("name", [name for name in dir(fmt) if name.isupper() and isinstance(getattr(fmt, name), int)])
def test_each_number_of_the_format_stands_on_the_page(name):
    value = getattr(fmt, name)
    spellings = {f"{value}", f"{value:,}", f"{value:#010x}", f"0x{value:08X}"}
    assert any(spelling in PAGE for spelling in spellings), f"{name} = {value} is not in FORMAT.md"


@pytest.mark.parametrize("position", [0, 4, 8, 12, 16, 24, 28, 36, 51])
def test_any_damage_to_a_header_is_seen(position):
    page = bytearray(HEADER.encode())
    page[position] ^= 1
    with pytest.raises((CorruptDataDirError, FormatVersionError)):
        fmt.SegmentHeader.decode(bytes(page), "x")


@pytest.mark.parametrize("position", range(96))
def test_any_damage_to_a_row_is_seen(position):
    row = bytearray(fmt.encode_row(SegmentId(7), 0, 12_288, ENTRY))
    assert fmt.valid_rows(np.frombuffer(row, dtype=fmt.ROW_DTYPE), SegmentId(7)).all()
    row[position] ^= 0x40
    assert not fmt.valid_rows(np.frombuffer(row, dtype=fmt.ROW_DTYPE), SegmentId(7)).any()


def test_a_row_of_another_segment_or_slot_is_none_of_ours():
    row = np.frombuffer(fmt.encode_row(SegmentId(7), 0, 12_288, ENTRY), dtype=fmt.ROW_DTYPE)
    assert not fmt.valid_rows(row, SegmentId(8)).any()
    assert not fmt.valid_rows(row, SegmentId(7), first_slot=1).any()


def test_a_hole_of_zeros_is_no_row():
    assert not fmt.valid_rows(np.zeros(8, dtype=fmt.ROW_DTYPE), SegmentId(0)).any()


def test_a_directory_of_the_version_before_is_refused_clearly_and_left_alone(tmp_path):
    with tarfile.open(GOLDEN / "data-dir-v1.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(
        FormatVersionError, match=r"format version 1, this server reads and writes 2; .*empty data directory"
    ):
        open_store(tmp_path / "data", ManualClock(1_800_000_100.0))
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p.name != "LOCK"} == before


def test_a_seal_that_is_not_whole_is_no_seal():
    seal = bytearray(fmt.encode_seal(SegmentId(7), 3, 40_960))
    assert fmt.decode_seal(bytes(seal), SegmentId(8)) is None
    assert fmt.decode_seal(bytes(fmt.SEAL.size), SegmentId(7)) is None
    for position in range(len(seal)):
        seal[position] ^= 0x10
        assert fmt.decode_seal(bytes(seal), SegmentId(7)) is None
        seal[position] ^= 0x10


def test_a_golden_data_directory_opens(tmp_path):
    """Two conversations of 40 blocks that share 10. The index is not in it, it can be rebuilt."""
    with tarfile.open(GOLDEN / "data-dir-v2.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    store = open_store(tmp_path / "data", ManualClock(1_800_000_100.0))
    namespace = store.register_namespace(spec())
    for conversation in range(2):
        chain = chain_of(namespace, conversation, 40, shared_blocks=10)
        assert store.match(namespace, chain).hit_length_blocks == 40
        assert_whole(store, namespace, chain)
    assert store.status().live.blocks == 70
    store.close()
