"""The LMDB index: block -> (segment, slot). It may lag the log, never lead it, and can be rebuilt from it.

LMDB writes its file itself, past the `Device`. That is safe because nothing there is the only copy of anything: its commits are
not synced, and a file that was in use when the machine stopped is thrown away and rebuilt from the segments. What decides
whether the file is trusted, the marker files beside it, goes through the `Device`.

Keys are clustered by chain: `namespace id ‖ anchor ‖ position in group ‖ prefix hash`. A chain is cut into groups of 32 blocks;
a group's anchor is the first 7 bytes of the prefix hash just before it, zeros for the first. A conversation's entries then
share pages even when all conversations start with one system prompt, and the cost of a match does not grow with the store.
State objects stand at position 255 under the first 7 bytes of their prefix hash.

Entries are sized so that two groups fill a page: 44 + 8 bytes and LMDB's 10 take 62 of 4,080. Measured with chains of 512
blocks, that is 88 bytes of index a block; with an anchor of 8 bytes and a value of 12 it was 129, because a page then held
little more than one group.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from itertools import chain, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import lmdb
import numpy as np
import xxhash

from kvstore.dropped import tags_of
from kvstore.errors import StorageError, StoreFullError
from kvstore.index_file import open_environment
from kvstore.index_pages import check_tree
from kvstore.index_room import Tree, growth_pages
from kvstore.log.format import ANCHOR_BYTES, GROUP_BLOCKS, KIND_STATE, NO_ANCHOR
from kvstore.types import BlockAddr, SegmentId
from kvstore_api.limits import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from kvstore.log.device import Device

KEY_BYTES = 4 + ANCHOR_BYTES + 1 + HASH_BYTES
_POSITION_AT = 4 + ANCHOR_BYTES
_STATE_POSITION = 255
_VALUE = itemgetter(1)
ENTRY_BYTES = (KEY_BYTES, 8)
_ADDR = struct.Struct("<Q")  # segment id in the upper 44 bits, slot in the lower 20
_SLOT_BITS = 20
_SLOT_MASK = (1 << _SLOT_BITS) - 1
ADDR_DTYPE = np.dtype([("segment_id", "<u8"), ("slot", "<u4")])

_MAP_SIZE_MIN_BYTES = 1 << 28
_MAP_SIZE_MAX_BYTES = 1 << 40  # it grows by itself beyond that
# A match looks up this many blocks at first, then eight times as many: a full miss costs one small batch, a long hit few.
_FIRST_BATCH_BLOCKS = 64
_BATCH_GROWTH = 8
_ADDED_AT_A_TIME = 1 << 14  # keys made Python's at a time when many are added

_CHECKSUM_FILE = "data.mdb.xxh3"
_DAMAGED_FILE = "damaged"
INDEX_FILES = frozenset({"data.mdb", "lock.mdb", _CHECKSUM_FILE, _DAMAGED_FILE})
_DAMAGE = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError, lmdb.BadTxnError, lmdb.InvalidError)
NOT_THERE = "it is not there"
MACHINE_STOPPED = "the machine stopped while it was in use"
_META_BOOT = b"boot_id"
_META_STORE = b"store_id"


@dataclass(frozen=True, slots=True)
class IndexState:
    """What the index was found to be at start. Not usable: it is empty now and has to be rebuilt."""

    usable: bool
    clean: bool
    why: str


_log = logging.getLogger(__name__)


class BlockIndex:
    """Thread-safe for readers; write methods are for the writer thread alone (LMDB has one writer)."""

    def __init__(self, directory: Path, store_id: str, capacity_bytes: int, device: Device) -> None:
        self._directory = directory
        self._device = device
        self._store_id = store_id.encode()
        self._env: Any = None  # an lmdb.Environment
        # The worst case is a block a page, about 150 bytes of index each; address space costs nothing.
        self._map_size_bytes = min(max(_MAP_SIZE_MIN_BYTES, capacity_bytes // 8 // 4096 * 4096), _MAP_SIZE_MAX_BYTES)
        self._damaged = False  # seen while it was in use; only ever set
        # After the last commit, and the most since the index was opened; writer thread only.
        self.entry_count = self.entry_count_max = 0
        self.found = self._open()
        if not self.found.usable:
            self.start_over()

    def _open(self) -> IndexState:
        """Open what is there and say whether it can be trusted.

        A file closed in order has its checksum beside it. Without one the last user died: its commits were not synced, but
        they were handed to the kernel, so they are whole unless the machine went down as well.
        """
        state = _file_state(self._directory)
        if not state.usable:
            return state
        try:
            self._open_env()
            with self._env.begin(db=self._meta) as txn:
                store, boot = txn.get(_META_STORE), txn.get(_META_BOOT)
            self._mark_in_use()
        except (lmdb.Error, StorageError) as error:
            if "already open" in str(error):
                raise StorageError(
                    f"index: {error}"
                ) from error  # nothing is wrong with it: whoever has it open needs it
            return IndexState(False, False, f"it is damaged: {error}")
        state = _owned_state(state, store, boot, self._store_id, self._device)
        if not state.usable:
            self._env.close()
        return state

    def _open_env(self) -> None:
        env = open_environment(self._directory, self._map_size_bytes)
        try:
            env.reader_check()
            self._blocks, self._meta = env.open_db(b"blocks"), env.open_db(b"meta")
            with env.begin() as txn:
                self._note_size(txn)
        except BaseException:
            env.close()
            raise
        self._env = env

    def _note_size(self, txn: lmdb.Transaction) -> None:
        stat = txn.stat(self._blocks)
        self._tree = Tree(stat["leaf_pages"], stat["branch_pages"], stat["depth"])
        self._page_bytes: int = stat["psize"]
        self.entry_count = stat["entries"]
        self.entry_count_max = max(self.entry_count_max, self.entry_count)

    def start_over(self) -> None:
        """Throw away what is there and begin with an empty index. Raises: StorageError."""
        if self._env is not None:
            self._env.close()
        self._damaged = False
        try:
            _empty(self._directory)
            # Until `complete`, or a start after a kill would take the part that is there by then for the whole.
            self._device.replace(self._directory / _DAMAGED_FILE, b"")
            self._open_env()
            self._mark_in_use()
        except lmdb.Error as error:
            raise StorageError(f"index: {error}") from error

    def complete(self) -> None:
        """All that the segments hold is in it, so the next start may take it for the whole."""
        if self._damaged:
            return
        try:
            self._device.unlink(self._directory / _DAMAGED_FILE)
        except FileNotFoundError:
            return
        except OSError as error:
            _log.warning("index: the next start will rebuild it once more: %s", error)

    def _mark_in_use(self) -> None:
        """Note that commits are about to come that are not synced."""
        self._remove_checksum()
        # On a full disk the old boot id stays, and the worst that follows is that the next start rebuilds.
        with contextlib.suppress(lmdb.DiskError), self._env.begin(write=True, db=self._meta) as txn:
            txn.put(_META_STORE, self._store_id)
            txn.put(_META_BOOT, self._device.boot_id())
        self._env.sync(True)

    def _remove_checksum(self) -> None:
        """Durably: one that came back after a power loss could vouch for an old copy of the file that came back as well."""
        with contextlib.suppress(FileNotFoundError):
            self._device.unlink(self._directory / _CHECKSUM_FILE)
            self._device.sync_directory(self._directory)

    def close(self) -> None:
        """Sync, close, and leave a checksum that says so."""
        try:
            self._env.sync(True)
            self._env.close()
            if not self._damaged:
                self._device.replace(self._directory / _CHECKSUM_FILE, _file_checksum(self._directory / "data.mdb"))
        except (lmdb.Error, OSError) as error:
            # A full disk must not keep a server from stopping; without the checksum it only counts as not stopped in order.
            _log.warning("index: closed without a checksum: %s", error)
            with contextlib.suppress(OSError):
                self._remove_checksum()

    @property
    def distrusted(self) -> bool:
        """Whether entries may be missing that the next start, which rebuilds it, will find again."""
        return self._damaged

    def abandon(self) -> None:
        """Close it as a process that dies leaves it."""
        self._env.close()

    def used_bytes(self) -> int:
        """What `du` counts for the index. Files that are gone count nothing: a scratch file that another thread has renamed, or
        all of them, deleted by somebody while LMDB goes on with what it has open; the next start rebuilds those."""
        used = 0
        with contextlib.suppress(FileNotFoundError):
            for path in self._directory.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    used += path.stat().st_blocks * 512
        return used

    def growth_bytes(self, changed: int, added: int = 0) -> int:
        """The most that a commit makes the file grow which changes or drops so many entries and adds so many."""
        trees = self._tree, Tree.assumed(self.entry_count)
        return self._page_bytes * max(growth_pages(tree, changed, added) for tree in trees)

    def clear_dead_readers(self) -> None:
        """Forget readers whose processes died while they read; what they saw would be kept for them, and the file grow.

        Raises: StorageError.
        """
        with self._typed_errors():
            self._env.reader_check()

    def leading_run(self, namespace_id: int, hashes: bytes) -> NDArray[np.void]:
        """Addresses (ADDR_DTYPE) of the blocks present from the start of the chain without a gap. Raises: StorageError."""
        total = len(hashes) // HASH_BYTES
        values: list[Iterable[bytes]] = []
        start, size = 0, _FIRST_BATCH_BLOCKS
        with self._typed_errors(), self._env.begin(db=self._blocks) as txn, txn.cursor() as cursor:
            while start < total:
                keys = block_keys(namespace_id, hashes, start, min(size, total - start))
                found = cursor.getmulti(keys)
                if len(found) == len(keys):
                    values.append(map(_VALUE, found))
                    start, size = start + len(keys), size * _BATCH_GROWTH
                    continue
                # `found` skips what is missing, so past the first gap no key stands where it is wanted any more.
                there = [value for (key, value), wanted in zip(found, keys, strict=False) if key == wanted]
                values.append(there)
                start += len(there)
                break
            data = b"".join(chain.from_iterable(values))
            if len(data) != start * _ADDR.size:
                raise lmdb.CorruptedError(f"entries of {len(data)} bytes for {start} blocks")
        packed = np.frombuffer(data, dtype="<u8")
        addrs = np.empty(len(packed), dtype=ADDR_DTYPE)
        addrs["segment_id"], addrs["slot"] = packed >> _SLOT_BITS, packed & _SLOT_MASK
        return addrs

    def lookup(self, keys: Sequence[bytes]) -> dict[bytes, BlockAddr]:
        """The addresses of those keys that are there. Raises: StorageError."""
        with self._typed_errors(), self._env.begin(db=self._blocks) as txn, txn.cursor() as cursor:
            return find_in(cursor, keys)

    def states_beside(self, namespace_id: int, hashes: bytes) -> list[bytes]:
        """Keys of all state objects beside these prefix hashes, whatever their names. Raises: StorageError.

        A key has 7 bytes of its prefix hash, so those of another hash of the namespace that begins alike are among them.
        """
        found: list[bytes] = []
        with self._typed_errors(), self._env.begin(db=self._blocks) as txn, txn.cursor() as cursor:
            for head in _state_heads(namespace_id, hashes):
                there = cursor.set_range(head)
                while there and (key := cursor.key()).startswith(head):
                    found.append(key)
                    there = cursor.next()
        return found

    def entries(self, after: bytes, limit: int) -> list[tuple[bytes, BlockAddr]]:
        """Up to `limit` entries behind the key `after` (empty: from the first), in key order. Raises: StorageError.

        A transaction of its own each time: one kept open over a whole walk would keep every page that was freed meanwhile.
        """
        with self._typed_errors(), self._env.begin(db=self._blocks) as txn, txn.cursor() as cursor:
            return read_entries(cursor, after, limit)

    def commit(self, put: Mapping[bytes, BlockAddr], remove: Iterable[tuple[bytes, BlockAddr]] = ()) -> int:
        """In one transaction: point keys at new addresses, and drop entries that still point where they are thought to.

        Returns: entries dropped. Raises: StoreFullError, StorageError: nothing is changed.
        """
        return self._change(lambda txn: _drop_and_put(txn, put, remove))

    def add(self, keys: NDArray[np.uint8], addrs: NDArray[np.void]) -> int:
        """Point keys (shape (n, KEY_BYTES)) at addresses (ADDR_DTYPE), but leave those alone that are there; in one transaction.

        Returns: entries added. Raises: StoreFullError, StorageError: nothing is changed.
        """
        values = (addrs["segment_id"] << _SLOT_BITS | addrs["slot"]).astype("<u8")
        # By anchor and position: then neighbours follow one another, which is what makes pages be shared.
        order = np.argsort(np.ascontiguousarray(keys[:, 4 : _POSITION_AT + 1]).view(">u8").ravel(), kind="stable")

        def put(txn: lmdb.Transaction) -> int:
            added = 0
            with txn.cursor() as cursor:
                for start in range(0, len(order), _ADDED_AT_A_TIME):
                    part = order[start : start + _ADDED_AT_A_TIME]
                    items = zip(split_keys(keys[part]), values[part].view("V8").tolist(), strict=True)
                    added += cursor.putmulti(items, overwrite=False)[1]
            return added

        return self._change(put)

    def _change(self, change: Callable[[lmdb.Transaction], int]) -> int:
        """Run a change in a write transaction, with a larger map if the one there is too small."""
        for _ in range(8):
            try:
                with self._env.begin(write=True, db=self._blocks) as txn:
                    changed = change(txn)
                    self._note_size(txn)
                return changed
            except lmdb.MapFullError:
                self._map_size_bytes *= 2
                self._env.set_mapsize(self._map_size_bytes)
            except lmdb.DiskError as error:
                raise StoreFullError(f"index: {error}") from error
            except lmdb.Error as error:
                self._note_damage(error)
                raise StorageError(f"index: {error}") from error
        raise StorageError(f"index: still full with a map of {self._map_size_bytes} bytes")

    @contextlib.contextmanager
    def _typed_errors(self) -> Iterator[None]:
        try:
            yield
        except lmdb.Error as error:
            self._note_damage(error)
            raise StorageError(f"index: {error}") from error

    def _note_damage(self, error: lmdb.Error) -> None:
        """Errors that a healthy file cannot cause."""
        if not self._damaged and isinstance(error, _DAMAGE):
            self.distrust(str(error))

    def distrust(self, why: str) -> None:
        """Let the next start rebuild it, however this process ends."""
        self._damaged = True
        _log.error("index: %s; some blocks are missed until the next start, which rebuilds it", why)
        with contextlib.suppress(OSError):
            self._device.replace(self._directory / _DAMAGED_FILE, b"")


def _empty(directory: Path) -> None:
    """Make the directory, or remove all that is in it; not the directory itself, which may be a link to another disk."""
    directory.mkdir(exist_ok=True)
    # What is to be distrusted goes before what says so, or a start after a kill in between could trust it.
    for path in sorted(directory.iterdir(), key=lambda path: path.name != "data.mdb"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _file_state(directory: Path, *walk_flags: str, always_walk: bool = False) -> IndexState:
    """Whether the file can be opened at all, before anything is."""
    data, checksum = directory / "data.mdb", directory / _CHECKSUM_FILE
    if not data.exists():
        return IndexState(False, False, NOT_THERE)
    if (directory / _DAMAGED_FILE).exists():
        return IndexState(False, False, "it was found damaged while in use, or was never completed")
    clean = checksum.exists()
    try:
        if clean and checksum.read_bytes() != _file_checksum(data):
            return IndexState(False, False, "its checksum is wrong")
    except OSError as error:
        return IndexState(False, False, f"it cannot be read: {error}")
    problem = walk(directory, *walk_flags) if always_walk or not clean else ""
    if problem:
        return IndexState(False, False, f"it is damaged: {problem}")
    return IndexState(True, clean, "closed in order" if clean else "the last process died")


def _owned_state(
    state: IndexState, store: bytes | None, boot: bytes | None, store_id: bytes, device: Device
) -> IndexState:
    """Whether what the file says of its owner lets it be used."""
    if store != store_id:
        return IndexState(False, False, "it belongs to another store")
    if not state.clean and boot != device.boot_id():
        return IndexState(False, False, MACHINE_STOPPED)
    return state


def inspect(directory: Path, store_id: str, device: Device) -> tuple[IndexState, lmdb.Environment | None]:
    """What the next start will find, and the environment to read if it is usable; the caller closes it. Changes nothing.

    The file is walked in another process first, because a damaged one could end this one with a signal.
    """
    state = _file_state(directory, "--readonly", always_walk=True)
    if not state.usable:
        return state, None
    try:
        env = open_environment(directory, map_size_bytes=0, readonly=True)
        meta = env.open_db(b"meta", create=False)
        with env.begin(db=meta) as txn:
            store, boot = txn.get(_META_STORE), txn.get(_META_BOOT)
    except (lmdb.Error, StorageError) as error:
        return IndexState(False, False, f"it is damaged: {error}"), None
    state = _owned_state(state, store, boot, store_id.encode(), device)
    if not state.usable:
        env.close()
        return state, None
    return state, env


def read_entries(cursor: Any, after: bytes, limit: int) -> list[tuple[bytes, BlockAddr]]:  # noqa: ANN401
    """Up to `limit` entries of an LMDB cursor behind the key `after` (empty: from the first)."""
    there = cursor.set_range(after) if after else cursor.first()
    if there and cursor.key() == after:
        there = cursor.next()
    found = list(islice(cursor.iternext(), limit)) if there else []
    for key, _ in found:
        if len(key) != KEY_BYTES:
            raise lmdb.CorruptedError(f"an entry's key of {len(key)} bytes")
    return [(key, _unpack(value)) for key, value in found]


def find_in(cursor: Any, keys: Sequence[bytes]) -> dict[bytes, BlockAddr]:  # noqa: ANN401
    """The addresses of those keys that an LMDB cursor finds."""
    return {key: _unpack(value) for key, value in cursor.getmulti(keys)}


def walk(directory: Path, *flags: str) -> str:
    """What is wrong with a file that nobody has open; empty when it is whole. Changes nothing that counts.

    LMDB looks at it in a process of its own, which a damaged page may end with a signal. The pages of the tree, which are
    nearly all there are, are looked at here, without LMDB.
    """
    command = [sys.executable, "-m", "kvstore.index_check", *flags, str(directory), *map(str, ENTRY_BYTES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode < 0:
        return f"opening it ended with signal {-done.returncode}"
    if done.returncode:
        return done.stderr.strip()[-500:] or "opening it failed"
    page_bytes, tree = done.stdout.split()
    try:
        check_tree(directory / "data.mdb", int(page_bytes), bytes.fromhex(tree), ENTRY_BYTES)
    except (StorageError, OSError) as error:
        return str(error)
    return ""


def block_keys(namespace_id: int, hashes: bytes, first_block: int, count: int) -> list[bytes]:
    """Index keys of blocks [first_block, first_block + count) of a chain."""
    rows = np.frombuffer(hashes, dtype=np.uint8).reshape(-1, HASH_BYTES)
    keys = np.empty((count, KEY_BYTES), dtype=np.uint8)
    keys[:, :4] = np.frombuffer(namespace_id.to_bytes(4, "big"), dtype=np.uint8)
    first_group = first_block // GROUP_BLOCKS
    groups = -(-(first_block + count) // GROUP_BLOCKS) - first_group
    anchors = np.zeros((groups, ANCHOR_BYTES), dtype=np.uint8)
    before = rows[max(first_group, 1) * GROUP_BLOCKS - 1 :: GROUP_BLOCKS, :ANCHOR_BYTES]
    skipped = 0 if first_group else 1  # the first group of a chain has no block before it
    anchors[skipped:] = before[: groups - skipped]
    within = first_block % GROUP_BLOCKS
    keys[:, 4:_POSITION_AT] = np.repeat(anchors, GROUP_BLOCKS, axis=0)[within : within + count]
    keys[:, _POSITION_AT] = np.arange(first_block, first_block + count) % GROUP_BLOCKS
    keys[:, _POSITION_AT + 1 :] = rows[first_block : first_block + count]
    return split_keys(keys)


def anchor_of(hashes: bytes, block: int) -> bytes:
    """The anchor of a block's group."""
    group = block // GROUP_BLOCKS
    if not group:
        return NO_ANCHOR
    start = (group * GROUP_BLOCKS - 1) * HASH_BYTES
    return hashes[start : start + ANCHOR_BYTES]


def key_array(rows: NDArray[np.void]) -> NDArray[np.uint8]:
    """The index keys of what a segment's rows describe, shape (n, KEY_BYTES)."""
    count = len(rows)
    keys = np.empty((count, KEY_BYTES), dtype=np.uint8)
    keys[:, :4] = rows["namespace_id"].astype(">u4").view(np.uint8).reshape(count, 4)
    keys[:, 4:_POSITION_AT] = _bytes_of(rows["anchor"], ANCHOR_BYTES)
    keys[:, _POSITION_AT] = np.where(rows["kind"] == KIND_STATE, _STATE_POSITION, rows["position"] % GROUP_BLOCKS)
    keys[:, _POSITION_AT + 1 :] = _bytes_of(rows["prefix_hash"], HASH_BYTES)
    return keys


def row_keys(rows: NDArray[np.void]) -> list[bytes]:
    """The same, one by one."""
    return split_keys(key_array(rows))


def split_keys(keys: NDArray[np.uint8]) -> list[bytes]:
    """Keys as LMDB takes them, of an array of shape (n, KEY_BYTES)."""
    split: list[bytes] = keys.view(f"V{KEY_BYTES}").ravel().tolist()  # six times as fast as slicing in Python
    return split


def row_tags(rows: NDArray[np.void]) -> NDArray[np.uint64]:
    """What `kvstore.dropped` knows the blocks by that a segment's rows describe. Shape (n,)."""
    return tags_of(rows["prefix_hash"].tobytes())


def _bytes_of(column: NDArray[np.void], width: int) -> NDArray[np.uint8]:
    return np.ascontiguousarray(column).view(np.uint8).reshape(len(column), width)


def row_key(row: np.void) -> bytes:
    """The index key of what a segment's row describes."""
    return row_keys(np.array([row]))[0]


def state_key(namespace_id: int, prefix_hash: bytes, state_hash: bytes) -> bytes:
    """The index key of a state object."""
    return state_keys(namespace_id, [prefix_hash], [state_hash])[0]


def state_keys(namespace_id: int, prefix_hashes: Sequence[bytes], state_hashes: Sequence[bytes]) -> list[bytes]:
    """The same of many."""
    return [
        _state_head(namespace_id, prefix_hash) + state_hash
        for prefix_hash, state_hash in zip(prefix_hashes, state_hashes, strict=True)
    ]


def _state_head(namespace_id: int, prefix_hash: bytes) -> bytes:
    """What the keys of all state objects beside a prefix hash begin with."""
    return namespace_id.to_bytes(4, "big") + prefix_hash[:ANCHOR_BYTES] + bytes([_STATE_POSITION])


def _state_heads(namespace_id: int, hashes: bytes) -> list[bytes]:
    """The same of many, each once and in key order: neighbours share pages."""
    starts = range(0, len(hashes), HASH_BYTES)
    return sorted({_state_head(namespace_id, hashes[start : start + HASH_BYTES]) for start in starts})


def _drop_and_put(
    txn: lmdb.Transaction, put: Mapping[bytes, BlockAddr], remove: Iterable[tuple[bytes, BlockAddr]]
) -> int:
    removed = 0
    for key, addr in remove:
        if txn.get(key) == _pack(addr):
            removed += txn.delete(key)
    with txn.cursor() as cursor:
        # In key order: neighbours share pages.
        cursor.putmulti([(key, _pack(put[key])) for key in sorted(put)])
    return removed


def _pack(addr: BlockAddr) -> bytes:
    return _ADDR.pack(addr.segment_id << _SLOT_BITS | addr.slot)


def _unpack(value: bytes) -> BlockAddr:
    if len(value) != _ADDR.size:
        raise lmdb.CorruptedError(f"an entry's value of {len(value)} bytes")
    (packed,) = _ADDR.unpack(value)
    return BlockAddr(SegmentId(packed >> _SLOT_BITS), packed & _SLOT_MASK)


def _file_checksum(path: Path) -> bytes:
    """xxh3-64 of a file in hex; some GB/s, so a large index costs a fraction of a second."""
    state = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            state.update(chunk)
    return state.hexdigest().encode()
