"""Start after damage: lost or broken index, broken segments, a crash between any two steps of a put or a reclaim."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from faults import FaultyDevice, flip_bit
from kvstore import store as store_module
from kvstore.clock import ManualClock
from kvstore.config import DEFAULT_TRAFFIC_CLASSES, StoreConfig, TrafficClassConfig
from kvstore.errors import (
    ConfigError,
    CorruptDataDirError,
    DataDirLockedError,
    ForeignSegmentError,
    FormatVersionError,
    StorageError,
    StoreFullError,
)
from kvstore.index import BlockIndex, block_keys
from kvstore.log import format as fmt
from kvstore.log.device import FileDevice
from kvstore.store import LocalStore
from kvstore.types import BlockAddr, EvictSelection
from kvstore_api.results import PutStatus
from stores import (
    assert_stays_deleted,
    assert_whole,
    chain_of,
    du_bytes,
    fill_up,
    get,
    open_store,
    payload,
    put,
    put_block,
    put_in_segments,
    seal,
    spec,
)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def filled(tmp_path, clock):
    """A closed store with three conversations in one segment, its namespace and its chains."""
    store = open_store(tmp_path, clock, capacity=16 << 20)
    namespace = store.register_namespace(spec())
    chains = [chain_of(namespace, conversation, 40, shared_blocks=10) for conversation in range(3)]
    for chain in chains:
        put(store, namespace, chain)
    store.close()
    return tmp_path, namespace, chains


class DiedError(BaseException):
    """What stands for the end of the process."""


def crash(store):
    """What a dead process leaves: nothing closed in order, but the lock and the descriptors are gone."""
    store._writer.close()
    for segment in store._segments.all():
        segment.state = fmt.STATE_OPEN
    store._index._env.close()
    store._segments.release()
    store._data_dir.close()


def reopen_and_check(path, clock, namespace, chains):
    store = open_store(path, clock)
    for chain in chains:
        assert store.match(namespace, chain).hit_length_blocks == len(chain)
        assert_whole(store, namespace, chain)
    store.close()


def test_a_clean_restart_finds_everything(filled, clock):
    reopen_and_check(*filled[:1], clock, *filled[1:])


def test_a_deleted_index_is_rebuilt(filled, clock, caplog):
    path, namespace, chains = filled
    shutil.rmtree(path / "index")
    reopen_and_check(path, clock, namespace, chains)
    assert any("rebuilding it from" in record.message for record in caplog.records)


CUTS = [lambda data: b"", lambda data: data[: len(data) // 2], lambda data: data[:-1]]
SCRIBBLES = [
    lambda data: b"\0" * len(data),
    lambda data: data[:4096] + b"\xff" * (len(data) - 4096),
    lambda data: data[:9000] + bytes([data[9000] ^ 1]) + data[9001:],
]


@pytest.mark.parametrize("damage", [*CUTS, *SCRIBBLES])
def test_an_index_damaged_after_a_clean_stop_is_rebuilt(filled, clock, damage):
    path, namespace, chains = filled
    data = path / "index" / "data.mdb"
    data.write_bytes(damage(data.read_bytes()))
    reopen_and_check(path, clock, namespace, chains)


@pytest.mark.parametrize("damage", CUTS)
def test_an_index_cut_short_after_a_crash_is_rebuilt_and_not_a_signal(filled, clock, damage):
    path, namespace, chains = filled
    (path / "index" / "data.mdb.xxh3").unlink()
    data = path / "index" / "data.mdb"
    data.write_bytes(damage(data.read_bytes()))
    reopen_and_check(path, clock, namespace, chains)


DAMAGED_INDEX_CHILD = """
import sys
from pathlib import Path
from stores import chain_of, get, open_store, payload, put, put_block, spec
from kvstore.clock import ManualClock
store = open_store(Path(sys.argv[1]), ManualClock(), capacity=16 << 20)
namespace = store.register_namespace(spec())
for conversation in range(3):
    chain = chain_of(namespace, conversation, 40, shared_blocks=10)
    hit = store.match(namespace, chain).hit_length_blocks
    found, _ = get(store, namespace, chain)
    assert all(data == payload(chain[block]) for block, data in found.items()), "wrong bytes"
    assert set(range(hit)) <= set(found)
    put(store, namespace, chain_of(namespace, 10 + conversation, 4))
store.close()
"""


@pytest.mark.parametrize("page", range(2, 30, 3))
def test_an_index_scribbled_on_after_a_crash_costs_misses_and_no_start(filled, page):
    """In a process of its own: the worst that an engine reading damaged pages could do is a signal."""
    path, _, _ = filled
    (path / "index" / "data.mdb.xxh3").unlink()
    data = path / "index" / "data.mdb"
    content = bytearray(data.read_bytes())
    content[page * 4096 : (page + 1) * 4096] = os.urandom(min(4096, max(0, len(content) - page * 4096)))
    data.write_bytes(content)
    for _ in range(2):
        command = [sys.executable, "-c", DAMAGED_INDEX_CHILD, str(path)]
        done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def test_an_index_of_another_boot_is_not_trusted(filled, clock):
    class Rebooted(FileDevice):
        def boot_id(self) -> bytes:
            return b"another boot"

    path, namespace, chains = filled
    (path / "index" / "data.mdb.xxh3").unlink()
    store_id = json.loads(json.loads((path / "catalog.json").read_text())["catalog"])["store_id"]
    index = BlockIndex(path / "index", store_id, 1 << 20, Rebooted())
    assert not index.found.usable
    assert "machine stopped" in index.found.why
    index.close()
    shutil.rmtree(path / "index")
    reopen_and_check(path, clock, namespace, chains)


def test_rows_without_an_index_entry_are_indexed_after_a_crash(tmp_path, clock):
    store = open_store(tmp_path, clock)
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 6)
    put(store, namespace, chain, range(3))
    commit = store._index.commit
    store._index.commit = lambda put, remove=(): 0  # dies after the rows, before the index commit
    put(store, namespace, chain, range(3, 6))
    store._index.commit = commit
    crash(store)
    reopen_and_check(tmp_path, clock, namespace, [chain])


def test_payloads_without_rows_leave_nothing(tmp_path, clock):
    device = FaultyDevice()
    store = open_store(tmp_path, clock, device=device)
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 6)
    put(store, namespace, chain, range(3))
    device.fail_write_after = 1  # payloads reach the disk, use rows and rows do not
    put(store, namespace, chain, range(3, 6))
    crash(store)
    store = open_store(tmp_path, clock)
    assert store.match(namespace, chain).hit_length_blocks == 3
    assert store.status().used_bytes == du_bytes(tmp_path)
    assert [result.status for result in put(store, namespace, chain)].count(PutStatus.STORED) == 3
    assert_whole(store, namespace, chain)
    store.close()


def test_a_crash_while_a_segment_is_being_reclaimed(tmp_path, clock):
    """At each step: moved but not committed, committed but not retired, retired but not unlinked."""
    for step in ("commit", "retire", "reap"):
        path = tmp_path / step
        store = open_store(path, clock)
        namespace = store.register_namespace(spec())
        kept, dropped = chain_of(namespace, 1, 4), chain_of(namespace, 2, 30)
        put(store, namespace, kept)
        put(store, namespace, dropped)
        seal(store)
        store.delete(namespace, dropped, 0, 30)
        owner = store._index if step == "commit" else store._segments
        original = getattr(owner, step)

        def die(*_args, **_kwargs):
            raise RuntimeError("died here")

        setattr(owner, step, die)
        with pytest.raises(RuntimeError):
            store.sweep()
        setattr(owner, step, original)
        segments = store._segments.all()
        states = {segment.segment_id: segment.state for segment in segments}
        crash(store)
        for segment in segments:
            # Only what was open stays open; the reclaimed segment was sealed.
            segment.state = states[segment.segment_id]
        reopened = open_store(path, clock)
        assert reopened.match(namespace, kept).hit_length_blocks == 4, step
        assert_whole(reopened, namespace, kept)
        assert reopened.match(namespace, dropped).hit_length_blocks == 0, step
        reopened.sweep()
        assert reopened.status().used_bytes == du_bytes(path)
        reopened.close()


@pytest.mark.parametrize("cut", [1, 100, 4096, 30_000])
def test_a_segment_cut_short_loses_only_its_end(filled, clock, cut):
    path, namespace, chains = filled
    (segment,) = (path / "segments").iterdir()
    data = segment.read_bytes()
    segment.write_bytes(data[:-cut])
    store = open_store(path, clock)
    lost = 0
    for chain in chains:
        found, misses = get(store, namespace, chain)
        assert all(content == payload(chain[block]) for block, content in found.items())
        lost += len(misses)
    # Payloads of 512 bytes stand on 4 KiB boundaries.
    assert lost <= -(-cut // 4096) + 1
    assert store.match(namespace, chains[0]).hit_length_blocks == 40
    store.close()


def test_a_segment_that_was_never_written_before_the_machine_stopped_is_removed(filled, clock, caplog):
    path, namespace, chains = filled
    (segment,) = (path / "segments").iterdir()
    for blank in (b"", bytes(4096), bytes(100_000)):
        other = path / "segments" / f"{len(blank):016x}.seg"
        other.write_bytes(blank)
        store = open_store(path, clock)
        assert [file.name for file in (path / "segments").iterdir()] == [segment.name]
        assert any("is removed" in record.message for record in caplog.records)
        assert store.status().used_bytes == du_bytes(path)
        store.close()
    reopen_and_check(path, clock, namespace, chains)


@pytest.mark.parametrize("keep", [10, 4096, 8192, 20_000])
def test_a_segment_cut_inside_its_tables_is_set_aside_and_the_server_starts(filled, clock, keep, caplog):
    path, namespace, chains = filled
    (segment,) = (path / "segments").iterdir()
    segment.write_bytes(segment.read_bytes()[:keep])
    store = open_store(path, clock)
    assert store.match(namespace, chains[0]).hit_length_blocks == 0
    assert get(store, namespace, chains[0])[0] == {}
    assert any("set aside" in record.message for record in caplog.records)
    assert (path / "segments" / f"{segment.name}.damaged").exists()
    assert store.status().used_bytes == du_bytes(path)
    put(store, namespace, chains[0])
    assert_whole(store, namespace, chains[0])
    store.close()
    reopen_and_check(path, clock, namespace, chains[:1])


def test_damaged_rows_are_skipped_by_a_rebuild(filled, clock):
    path, namespace, chains = filled
    (segment,) = (path / "segments").iterdir()
    rows = open_store(path, clock)
    offset = rows._segments.all()[0].layout.row_offset(5)
    rows.close()
    with segment.open("r+b") as file:
        file.seek(offset + 50)
        file.write(b"\xee")
    shutil.rmtree(path / "index")
    store = open_store(path, clock)
    assert store.match(namespace, chains[0]).hit_length_blocks == 5
    assert get(store, namespace, chains[0])[1] == {5: "NOT_FOUND"}
    store.close()


@pytest.mark.parametrize("index_there", [True, False])
def test_of_a_block_that_is_twice_in_a_segment_the_later_place_counts(tmp_path, clock, index_there):
    """As after a crash between the commit of a block's new place and the flag on its old one."""
    store = open_store(tmp_path, clock)
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 20)
    put(store, namespace, chain)
    (segment,) = store._segments.all()
    segment.flag(np.arange(20), fmt.FLAG_EVICTED)
    put(store, namespace, chain)
    segment.uses[:20, 0] = 0
    crash(store)
    if not index_there:
        shutil.rmtree(tmp_path / "index")
    store = open_store(tmp_path, clock)
    assert store.status().live.blocks == 20
    (segment,) = store._segments.all()
    assert segment.uses[:40, 0].tolist() == [fmt.FLAG_EVICTED] * 20 + [0] * 20
    assert_whole(store, namespace, chain)
    store.close()


def test_live_segments_are_never_overwritten(filled, clock):
    path, namespace, _chains = filled
    (segment,) = (path / "segments").iterdir()
    payloads = segment.read_bytes()[fmt.Layout(256).payload_offset :]
    for round_number in range(3):
        shutil.rmtree(path / "index")
        store = open_store(path, clock)
        put(store, namespace, chain_of(namespace, 10 + round_number, 4))
        store.evict(EvictSelection(older_than_s=10**6), dry_run=False)
        store.close()
    assert segment.read_bytes()[fmt.Layout(256).payload_offset :] == payloads
    assert len(list((path / "segments").iterdir())) == 4


def test_segment_ids_are_never_used_twice(tmp_path, clock):
    seen: list[str] = []
    for _ in range(4):
        store = open_store(tmp_path, clock)
        namespace = store.register_namespace(spec())
        put(store, namespace, chain_of(namespace, len(seen), 2))
        seen += [path.name for path in (tmp_path / "segments").iterdir()]
        store.evict(EvictSelection(older_than_s=0), dry_run=False)
        store.sweep()
        store.sweep()
        store.close()
        shutil.rmtree(tmp_path / "index")
    assert len(seen) == len(set(seen)) == 4


def test_a_second_store_on_the_directory_is_refused_and_told_who_has_it(tmp_path, clock):
    store = open_store(tmp_path, clock)
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 4)
    put(store, namespace, chain)
    with pytest.raises(DataDirLockedError, match=f"process {os.getpid()}"):
        open_store(tmp_path, clock)
    assert_whole(store, namespace, chain)
    store.close()


def test_a_newer_format_is_refused_and_nothing_is_changed(filled, clock):
    path, _, _ = filled
    catalog = path / "catalog.json"
    document = json.loads(catalog.read_text())
    document["format_version"] = fmt.FORMAT_VERSION + 1
    catalog.write_text(json.dumps(document))
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file() and p.name != "LOCK"}
    with pytest.raises(FormatVersionError, match=r"format version 3.*reads and writes 2"):
        open_store(path, clock)
    assert before == {p: p.read_bytes() for p in path.rglob("*") if p.is_file() and p.name != "LOCK"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"crc32": 1, "format_version": 2, "catalog": "{}"}',
        "[]",
        '{"crc32": 1, "format_version": 2, "catalog": 5}',
    ],
)
def test_a_broken_catalog_is_refused_by_name(filled, clock, text):
    path, _, _ = filled
    (path / "catalog.json").write_text(text)
    with pytest.raises(CorruptDataDirError, match=r"catalog\.json"):
        open_store(path, clock)


def test_segments_without_a_catalog_are_not_adopted(filled, clock):
    path, _, _ = filled
    (path / "catalog.json").unlink()
    with pytest.raises(CorruptDataDirError, match="1 segment files"):
        open_store(path, clock)


def test_a_segment_of_another_store_is_refused_and_left_alone(filled, clock, tmp_path_factory):
    path, _, _ = filled
    other = tmp_path_factory.mktemp("other")
    open_store(other, clock).close()
    (segment,) = (path / "segments").iterdir()
    foreign = other / "segments" / segment.name
    foreign.write_bytes(segment.read_bytes())
    before = foreign.read_bytes()
    with pytest.raises(ForeignSegmentError, match="move it away"):
        open_store(other, clock)
    assert foreign.read_bytes() == before


def test_a_directory_of_other_files_is_not_taken_over(tmp_path, clock):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        open_store(tmp_path, clock)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    file = tmp_path / "thesis.tex"
    with pytest.raises(ConfigError, match="cannot be used"):
        open_store(file, clock)


def test_segments_are_a_share_of_a_small_capacity():
    assert store_module.segment_size_bytes(StoreConfig(capacity=16 << 20)) == 1 << 20
    assert store_module.segment_size_bytes(StoreConfig(capacity=10 << 30)) == 256 << 20


def test_a_block_deleted_where_a_reclaim_moved_it_does_not_come_back_from_where_it_was(tmp_path, clock):
    """The process dies right after the index has learnt the new place; later the block is deleted, and later the index lost."""

    store = open_store(tmp_path, clock)
    namespace = store.register_namespace(spec())
    kept, dropped = chain_of(namespace, 1, 4), chain_of(namespace, 2, 30)
    put(store, namespace, kept)
    put(store, namespace, dropped)
    seal(store)
    store.delete(namespace, dropped, 0, 30)
    commit, states = store._index.commit, {}

    def commit_and_die(*args):
        commit(*args)
        states.update({segment: segment.state for segment in store._segments.all()})
        raise DiedError

    store._index.commit = commit_and_die
    with pytest.raises(DiedError):
        store._reclaimer.sweep(store._writer)
    store._index.commit = commit
    crash(store)
    for segment, state in states.items():
        segment.state = state
    store = open_store(tmp_path, clock)
    assert_whole(store, namespace, kept)
    assert store.invariants().violations == ()
    assert_stays_deleted(store, tmp_path, clock, namespace, kept)


def test_a_kill_between_a_moves_flags_and_its_commit_loses_nothing_whichever_segment_is_older(tmp_path, clock):
    """The copies may lie in a segment that was opened before the one they come from."""

    def start():
        return open_store(tmp_path, clock, capacity=512 << 10, segment_size=32 << 10, tick_s=None)

    store = start()
    namespace = store.register_namespace(spec(4000))
    chains = {number: chain_of(namespace, number, 7) for number in (1, 2, 5, 6)}
    for number in (1, 2):
        put(store, namespace, chains[number])
    store.delete(namespace, chains[1], 1, 6)
    store.sweep()
    for number in (5, 6):
        put(store, namespace, chains[number])
    store.delete(namespace, chains[5], 0, 6)
    store.delete(namespace, chains[6], 1, 6)
    commit, states = store._index.commit, {}

    def die_before_commit(put_, remove=()):
        if put_:
            states.update({segment: segment.state for segment in store._segments.all()})
            raise DiedError
        return commit(put_, remove)

    store._index.commit = die_before_commit
    with contextlib.suppress(DiedError):
        for _ in range(4):
            store._reclaimer.sweep(store._writer)
    assert states, "it did not come to a move"
    store._index.commit = commit
    crash(store)
    for segment, state in states.items():
        segment.state = state
    store = start()
    alive = {(1, 0), *((2, block) for block in range(7)), (5, 6), (6, 0)}
    for number, chain in chains.items():
        found, _ = get(store, namespace, chain)
        assert set(found) == {block for other, block in alive if other == number}, number
        assert all(data == payload(chain[block], 4000) for block, data in found.items())
    assert store.invariants().violations == ()
    store.close()


def test_a_catalog_restored_from_an_older_copy_does_not_give_ids_out_again(tmp_path, clock):
    store = open_store(tmp_path, clock)
    namespace = store.register_namespace(spec())
    old = (tmp_path / "catalog.json").read_bytes()
    store.close()
    for conversation in range(3):
        store = open_store(tmp_path, clock)
        put(store, namespace, chain_of(namespace, conversation, 2))
        store.close()
    (tmp_path / "catalog.json").write_bytes(old)
    store = open_store(tmp_path, clock)
    for conversation in range(6):
        results = put(store, namespace, chain_of(namespace, conversation, 2))
        assert {result.status for result in results} <= {PutStatus.STORED, PutStatus.EXISTS}
        assert_whole(store, namespace, chain_of(namespace, conversation, 2))
    store.close()


class BadSegments(FaultyDevice):
    """A disk that does not give some segment files: not at all, or not a part of them."""

    def __init__(self, bad, error=errno.EIO, part=lambda offset_bytes: True):
        super().__init__()
        self.bad = set(bad)
        self.fail_read_of = lambda path, begin, end: error if path.name[:16] in self.bad and part(begin) else 0

    def spoil(self, name):
        """What to give as `progress`, so that the file is bad once it was opened."""
        return lambda done, total: self.bad.add(name)


def fill_segments(path, clock, durability="memory"):
    """A closed store of three conversations in a segment each."""
    store = open_store(path, clock, durability=durability)
    namespace = store.register_namespace(spec())
    chains = [chain_of(namespace, conversation, 20) for conversation in range(3)]
    put_in_segments(store, namespace, chains)
    names = [segment.path.name.partition(".")[0] for segment in store._segments.all()]
    store.close()
    assert len(names) == 3
    return namespace, chains, names


def in_uses(offset_bytes):
    return 4096 <= offset_bytes < 8192  # a use table begins behind the header


@pytest.mark.parametrize("error", [errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA])
@pytest.mark.parametrize("part", [lambda offset_bytes: True, in_uses], ids=["any of it", "its use table"])
@pytest.mark.parametrize("lose_index", [False, True])
def test_one_file_the_disk_does_not_give_is_set_aside_and_the_rest_served(
    tmp_path, clock, error, part, lose_index, caplog
):
    namespace, chains, names = fill_segments(tmp_path, clock)
    if lose_index:
        shutil.rmtree(tmp_path / "index")
    store = open_store(tmp_path, clock, device=BadSegments(names[:1], error, part))
    assert f"set aside as {names[0]}.seg.damaged: [Errno {error}]" in caplog.text
    assert [store.match(namespace, chain).hit_length_blocks for chain in chains] == [0, 20, 20]
    for chain in chains[1:]:
        assert_whole(store, namespace, chain)
    assert store.status().used_bytes == du_bytes(tmp_path)
    assert store.invariants().violations == ()
    (tmp_path / "segments" / f"{names[0]}.seg.damaged").unlink()  # by an operator
    assert store.status().used_bytes == du_bytes(tmp_path)
    assert store.invariants().violations == ()
    store.sweep()
    store.close()


@pytest.mark.parametrize("lose_index", [False, True])
@pytest.mark.parametrize("how", ["delete", "put and delete", "evict", "expire and lengthen"])
def test_what_ended_while_the_disk_did_not_give_a_file_stays_ended(tmp_path, clock, how, lose_index):
    namespace, chains, names = fill_segments(tmp_path, clock, "sync")
    store = open_store(tmp_path, clock, device=BadSegments(names[:1]), durability="sync")
    if how == "put and delete":
        put(store, namespace, chains[0])
    if how in ("delete", "put and delete"):
        store.delete(namespace, chains[0], 0, len(chains[0]))
    elif how == "evict":
        store.evict(EvictSelection(namespace=namespace), dry_run=False)
    else:
        clock.advance(8 * 86_400)
        store.set_ttl("agent", 90 * 86_400)
    store.close()
    if lose_index:
        shutil.rmtree(tmp_path / "index")
    store = open_store(tmp_path, clock, durability="sync")  # and the disk is well again
    assert store.match(namespace, chains[0]).hit_length_blocks == 0
    assert get(store, namespace, chains[0])[0] == {}
    store.close()


@pytest.mark.parametrize("lose_index", [False, True])
def test_a_disk_that_gives_few_files_is_refused_and_nothing_is_set_aside(tmp_path, clock, lose_index):
    namespace, chains, names = fill_segments(tmp_path, clock)
    if lose_index:
        shutil.rmtree(tmp_path / "index")
    with pytest.raises(StorageError, match=r"does not give 2 of 3 segment files .*look at the disk"):
        open_store(tmp_path, clock, device=BadSegments(names[1:]))
    reopen_and_check(tmp_path, clock, namespace, chains)


def test_rows_that_a_rebuild_cannot_read_any_more_are_set_aside(tmp_path, clock, caplog):
    """They were read once, when the file was opened."""
    namespace, chains, names = fill_segments(tmp_path, clock)
    shutil.rmtree(tmp_path / "index")
    device = BadSegments([])
    config = StoreConfig(capacity=4 << 20)
    store = LocalStore.open(
        tmp_path, config, DEFAULT_TRAFFIC_CLASSES, clock, device=device, progress=device.spoil(names[0])
    )
    assert f"set aside as {names[0]}.seg.damaged" in caplog.text
    assert [store.match(namespace, chain).hit_length_blocks for chain in chains] == [0, 20, 20]
    assert store.status().used_bytes == du_bytes(tmp_path)
    assert store.invariants().violations == ()
    store.close()


DIES_IN_A_REBUILD = """
import os, sys
from pathlib import Path
from kvstore.clock import ManualClock
from kvstore.config import DEFAULT_TRAFFIC_CLASSES, StoreConfig
from kvstore.store import LocalStore
path, step = Path(sys.argv[1]), int(sys.argv[2])
seen = []
def progress(done, total):
    seen.append(done)
    if len(seen) > step:
        os._exit(7)
LocalStore.open(path, StoreConfig(capacity=4 << 20), DEFAULT_TRAFFIC_CLASSES, ManualClock(), progress=progress)
"""


@pytest.mark.parametrize("step", range(4))
def test_a_process_that_dies_in_a_rebuild_leaves_the_next_one_to_do_it(tmp_path, clock, step):
    namespace, chains, _ = fill_segments(tmp_path, clock)
    shutil.rmtree(tmp_path / "index")
    for _ in range(2):
        command = [sys.executable, "-c", DIES_IN_A_REBUILD, str(tmp_path), str(step)]
        assert subprocess.run(command, cwd=Path(__file__).parent.parent, check=False).returncode == 7
    store = open_store(tmp_path, clock)
    for chain in chains:
        assert store.match(namespace, chain).hit_length_blocks == len(chain)
    assert store.invariants().violations == ()
    store.close()
    assert not (tmp_path / "index" / "damaged").exists()


def test_a_start_that_is_refused_after_it_lost_the_index_leaves_the_next_one_to_rebuild_it(tmp_path, clock):
    namespace, chains, names = fill_segments(tmp_path, clock)
    shutil.rmtree(tmp_path / "index")
    with pytest.raises(StorageError, match="Operation not permitted"):
        open_store(tmp_path, clock, device=BadSegments(names[:1], errno.EPERM))
    assert (tmp_path / "segments" / f"{names[0]}.seg").exists()
    reopen_and_check(tmp_path, clock, namespace, chains)


@pytest.mark.parametrize("damage", [b"", b"\xff" * 50_000])
def test_an_index_on_another_disk_is_rebuilt_there(tmp_path, tmp_path_factory, clock, damage):
    namespace, chains, _ = fill_segments(tmp_path, clock)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    shutil.rmtree(tmp_path / "index")
    (tmp_path / "index").symlink_to(elsewhere)
    (elsewhere / "data.mdb").write_bytes(damage)
    for _ in range(2):
        reopen_and_check(tmp_path, clock, namespace, chains)
    assert (elsewhere / "data.mdb").exists()


@pytest.mark.parametrize("field", ["offset_bytes", "length_bytes", "prefix_hash", "crc32"])
def test_of_two_places_of_a_block_one_with_a_damaged_row_is_never_the_better(tmp_path, clock, field):
    """Its row is not believed: it may say that its bytes lie anywhere, and are any number."""
    store = open_store(tmp_path, clock)
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 1)
    put(store, namespace, chain)
    seal(store)
    (old,) = store._segments.all()
    old.suspect(0)
    put(store, namespace, chain)
    # As if the process had died before it flagged the old place and committed the new one.
    (key,) = block_keys(namespace.namespace_id, chain.data, 0, 1)
    store._index.commit({key: BlockAddr(old.segment_id, 0)})
    old.uses[0, fmt.USE_FLAGS] = 0
    old.uses[0, 1] += 10
    crash(store)
    old.state = fmt.STATE_SEALED
    last_bit = fmt.ROW_DTYPE.fields[field][0].itemsize * 8 - 1
    flip_bit(old.path, old.layout.row_offset(0) + fmt.ROW_DTYPE.fields[field][1] + last_bit // 8, last_bit % 8)
    store = open_store(tmp_path, clock)
    assert store.match(namespace, chain).hit_length_blocks == 1
    assert_whole(store, namespace, chain)
    store.close()


def test_an_index_that_cannot_be_read_is_rebuilt(filled, clock, caplog):
    path, namespace, chains = filled
    (path / "index" / "data.mdb").unlink()
    (path / "index" / "data.mdb").symlink_to("/proc/self/mem")  # whose first page nothing is mapped at: EIO
    reopen_and_check(path, clock, namespace, chains)
    assert "it cannot be read: [Errno 5]" in caplog.text
    assert not (path / "index" / "data.mdb").is_symlink()


def test_a_catalog_that_cannot_be_written_keeps_no_changed_class_from_being_served(tmp_path, clock, caplog):
    namespace, chains, _ = fill_segments(tmp_path, clock)
    device = FaultyDevice()
    device.fail_create = True
    classes = {
        "agent": TrafficClassConfig(ttl_s=30 * 86_400),
        "chatbot": TrafficClassConfig(ttl_s=86_400),
        "night": TrafficClassConfig(ttl_s=3_600),
    }
    store = open_store(tmp_path, clock, device=device, traffic_classes=classes)
    assert "its traffic classes are those of this run" in caplog.text
    assert {c.name: c.ttl_s for c in store.traffic_classes()}["night"] == 3_600
    for chain in chains:
        assert_whole(store, namespace, chain)
    device.heal()
    (result, *_) = put(store, namespace, chain_of(namespace, 9, 1), traffic_class="night")
    assert result.status is PutStatus.STORED
    store.close()
    store = open_store(tmp_path, clock, traffic_classes=classes)
    clock.advance(3_601)
    assert store.match(namespace, chain_of(namespace, 9, 1)).hit_length_blocks == 0
    assert store.match(namespace, chains[0]).hit_length_blocks == len(chains[0])
    store.close()


@pytest.mark.parametrize("ends", ["in order", "by a kill"])
def test_a_longer_ttl_that_could_not_be_written_at_the_start_is_written_later(tmp_path, clock, ends):
    """Or the next start would end by the old one what has lived by the new."""
    short, long = ({"agent": TrafficClassConfig(ttl_s=ttl_s)} for ttl_s in (3_600, 86_400))
    store = open_store(tmp_path, clock, traffic_classes=short)
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 8)
    put(store, namespace, chain)
    store.close()
    device = FaultyDevice()
    device.fail_create = True
    store = open_store(tmp_path, clock, device=device, traffic_classes=long)
    clock.advance(5_000)
    assert store.match(namespace, chain, peek=True).hit_length_blocks == 8
    device.heal()
    if ends == "in order":
        store.close()
    else:
        store._on_writer(store._tick)
        crash(store)
    store = open_store(tmp_path, clock, traffic_classes=long)
    assert store.match(namespace, chain).hit_length_blocks == 8
    store.close()


@pytest.mark.parametrize("step", range(6))
def test_an_index_thrown_away_is_not_trusted_whatever_is_left_of_it(filled, clock, step, monkeypatch):
    path, namespace, chains = filled
    store = open_store(path, clock)
    keys = block_keys(namespace.namespace_id, chains[1].data, 0, len(chains[1]))
    store._index.commit({}, store._index.lookup(keys).items())
    store._index.distrust("it has lost some")
    crash_sealed(store)

    class DiedError(BaseException):
        pass

    unlink, steps = Path.unlink, []

    def dies(self, missing_ok=False):
        steps.append(self.name)
        if len(steps) > step:
            raise DiedError
        unlink(self, missing_ok)

    with monkeypatch.context() as patched, contextlib.suppress(DiedError):
        patched.setattr(Path, "unlink", dies)
        crash_sealed(open_store(path, clock))
    reopen_and_check(path, clock, namespace, chains)


def test_rows_that_could_not_be_filed_or_told_of_are_filed_by_the_next_start(tmp_path, clock, monkeypatch):
    """The disk is too full for the index, and even for the mark that it is not whole."""
    store = open_store(tmp_path, clock)
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 8)
    with monkeypatch.context() as patched:
        patched.setattr(store._index, "commit", lambda *_: 0)
        put(store, namespace, chain)
    crash(store)

    def full(*_):
        raise StoreFullError("no room")

    device = FaultyDevice()
    with monkeypatch.context() as patched:
        patched.setattr(BlockIndex, "add", full)
        device.fail_create = True
        store = open_store(tmp_path, clock, device=device)
        crash_sealed(store)
    store = open_store(tmp_path, clock)
    assert store.match(namespace, chain).hit_length_blocks == 8
    store.close()


def crash_sealed(store):
    """A dead process that leaves its segments in the state they are in."""
    store._writer.close()
    store._index._env.close()
    store._segments.release()
    store._data_dir.close()


@pytest.mark.parametrize("when", ["at once", "in the rebuild"])
def test_the_new_name_of_a_file_set_aside_is_durable(tmp_path, clock, when):
    _, _, names = fill_segments(tmp_path, clock, "sync")
    shutil.rmtree(tmp_path / "index")
    device = BadSegments(names[:1] if when == "at once" else [])
    durable_names = set()

    def sync_directory(path):
        FileDevice.sync_directory(device, path)
        if path.name == "segments":
            durable_names.clear()
            durable_names.update(entry.name for entry in path.iterdir())

    device.sync_directory = sync_directory
    config = StoreConfig(capacity=4 << 20, durability="sync")
    store = LocalStore.open(
        tmp_path, config, DEFAULT_TRAFFIC_CLASSES, clock, device=device, progress=device.spoil(names[0])
    )
    assert f"{names[0]}.seg.damaged" in durable_names
    assert f"{names[0]}.seg" not in durable_names
    store.close()


@pytest.mark.parametrize("blocks", [8, 12, 16])
def test_a_suspected_block_that_is_moved_while_it_is_stored_again_has_one_place(tmp_path, clock, blocks):
    """Room for the group is made between the look at what is there and the flag on it."""
    store = open_store(tmp_path, clock, capacity=8 << 20, segment_size=256 << 10, tick_s=None)
    namespace = store.register_namespace(spec())
    chains = fill_up(store, namespace, clock, 60_000)
    for chain in chains[:6]:
        store.delete(namespace, chain, 1, 7)  # so that this segment is the one to be compacted
    target = chains[2]
    store._segments.all()[0].suspect(16)
    big = chain_of(namespace, 2_000, blocks)
    gate = threading.Event()
    store._writer.call(lambda: gate.wait(10))
    answers = [
        store.submit_put(namespace, big, [put_block(big, i, payload(big[i])) for i in range(blocks)]),
        store.submit_put(namespace, target, [put_block(target, 0, payload(target[0]))]),
    ]
    gate.set()
    assert {result.status for answer in answers for result in answer.result()} == {PutStatus.STORED}
    assert store.delete(namespace, target, 0, 1) == 1
    store.close()
    (tmp_path / "index" / "data.mdb").unlink()
    store = open_store(tmp_path, clock, capacity=8 << 20, segment_size=256 << 10)
    assert get(store, namespace, target)[0] == {}
    store.close()


def test_a_full_disk_has_no_room_for_the_note_in_the_lock_file(tmp_path, clock, monkeypatch):
    namespace, chains, _ = fill_segments(tmp_path, clock)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("kvstore.data_dir.os.pwrite", full)
        store = open_store(tmp_path, clock)
        with pytest.raises(DataDirLockedError, match="held by another process"):
            open_store(tmp_path, clock)
    assert_whole(store, namespace, chains[0])
    store.close()


def test_the_expired_copy_of_a_block_stored_again_is_flagged_before_the_index_learns_the_new_place(tmp_path, clock):
    store = open_store(tmp_path, clock)
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 3)
    put(store, namespace, chain)
    seal(store)
    clock.advance(4 * 86_400)
    old = store._segments.all()[0]
    commit, flags = store._index.commit, []

    def look(put_, remove=()):
        flags.append(old.uses[:3, 0].tolist())
        return commit(put_, remove)

    store._index.commit = look
    put(store, namespace, chain)
    assert flags[0] == [fmt.FLAG_EVICTED] * 3
    assert_whole(store, namespace, chain)
    store.close()


def suspected_copy(store, device):
    """A block stored, in a sealed segment that the disk has just refused to give."""
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 3)
    put(store, namespace, chain)
    seal(store)
    device.fail_read = True
    assert set(get(store, namespace, chain)[1].values()) == {"IO_ERROR"}
    device.fail_read = False
    return namespace, chain, store._segments.all()[0]


def test_a_put_that_the_index_refuses_costs_no_older_copy_that_was_only_suspected(tmp_path, clock):
    device = FaultyDevice()
    store = open_store(tmp_path, clock, device=device)
    namespace, chain, old = suspected_copy(store, device)
    commit = store._index.commit

    def refuse(put_, remove=()):
        raise StoreFullError("injected: no room for the index")

    before = store.counters.snapshot()
    store._index.commit = refuse
    assert {result.status for result in put(store, namespace, chain)} == {PutStatus.REJECTED}
    store._index.commit = commit
    after = store.counters.snapshot()
    assert after["blocks_expired"] == before["blocks_expired"]
    assert after["blocks_evicted"] == before["blocks_evicted"]
    old.suspects = {}  # as after a minute
    assert store.match(namespace, chain).hit_length_blocks == 3
    assert_whole(store, namespace, chain)
    store.close()
    reopen_and_check(tmp_path, clock, namespace, [chain])


def test_a_refused_put_leaves_an_expired_copy_as_it_was_and_it_is_counted_once(tmp_path, clock):
    store = open_store(tmp_path, clock)
    namespace = store.register_namespace(spec())
    chain = chain_of(namespace, 1, 3)
    put(store, namespace, chain)
    clock.advance(4 * 86_400)
    commit = store._index.commit

    def refuse(put_, remove=()):
        raise StoreFullError("injected: no room for the index")

    store._index.commit = refuse
    put(store, namespace, chain)
    store._index.commit = commit
    assert store.counters.snapshot()["blocks_expired"] == 0
    assert store.match(namespace, chain).hit_length_blocks == 0
    assert {result.status for result in put(store, namespace, chain)} == {PutStatus.STORED}
    store.sweep()
    assert store.counters.snapshot()["blocks_expired"] == 3
    assert_whole(store, namespace, chain)
    store.close()


@pytest.mark.parametrize("dies", ["before the commit", "after the commit", "not"])
def test_a_suspected_copy_and_the_one_stored_for_it_never_both_live(tmp_path, clock, dies):
    """Wherever the process ends: the block is there, and a delete ends it for good, even if the index is rebuilt after it."""
    device = FaultyDevice()
    store = open_store(tmp_path, clock, device=device)
    namespace, chain, old = suspected_copy(store, device)
    before = store.counters.snapshot()
    commit, states = store._index.commit, {}

    def commit_and_die(put_, remove=()):
        if dies == "after the commit":
            commit(put_, remove)
        states.update({segment: segment.state for segment in store._segments.all()})
        raise DiedError

    if dies == "not":
        assert {result.status for result in put(store, namespace, chain)} == {PutStatus.STORED}
        after = store.counters.snapshot()
        assert {name for name in after if after[name] != before[name]} == {
            "blocks_stored",
            "bytes_stored",
            "bytes_written",
        }
    else:
        store._index.commit = commit_and_die
        jobs = []
        store._writer.submit = lambda job: jobs.append(job) or True
        store.submit_put(namespace, chain, [put_block(chain, block) for block in range(3)])
        with pytest.raises(DiedError):
            store._writer._write_and_commit(jobs)
        assert old.state == fmt.STATE_SEALED
        store._index.commit = commit
        crash(store)
        for segment, state in states.items():
            segment.state = state
        store = open_store(tmp_path, clock)
    assert_whole(store, namespace, chain)
    assert store.invariants().violations == ()
    assert_stays_deleted(store, tmp_path, clock, namespace, chain)
