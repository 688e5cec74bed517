"""The check of an index file that was not closed in order: whatever LMDB would follow into a signal has to be noticed before."""

from __future__ import annotations

import random
import struct

import pytest

from kvstore.errors import StorageError
from kvstore.index import ENTRY_BYTES, BlockIndex, walk
from kvstore.index_file import open_environment
from kvstore.index_pages import check_tree
from kvstore.log.device import FileDevice
from kvstore.types import BlockAddr, SegmentId

PAGE = 4096
BRANCH, LEAF = 1, 2


@pytest.fixture
def index(tmp_path):
    """A closed index with some hundred leaf pages below two levels of branch pages, its file and what the main tree says of it."""
    index = BlockIndex(tmp_path / "index", "0" * 32, 1 << 30, FileDevice())
    numbers = random.Random(1)
    for _ in range(20):
        index.commit({numbers.randbytes(44): BlockAddr(SegmentId(7), slot) for slot in range(1000)})
    index.close()
    env = open_environment(tmp_path / "index", map_size_bytes=0)
    main = env.open_db(None)
    with env.begin() as txn:
        tree = txn.get(b"blocks", db=main)
    env.close()
    return tmp_path / "index" / "data.mdb", tree


def pages_of(data, tree):
    """Numbers of the tree's branch and leaf pages, the root first."""
    found, waiting = {BRANCH: [], LEAF: []}, [struct.unpack_from("<Q", tree, 40)[0]]
    while waiting:
        page = waiting.pop(0)
        (flags, lower) = struct.unpack_from("<HH", data, page * PAGE + 10)
        found[flags].append(page)
        for offset in struct.unpack_from(f"<{(lower - 16) // 2}H", data, page * PAGE + 16) if flags == BRANCH else ():
            low, high, top = struct.unpack_from("<HHH", data, page * PAGE + offset)
            waiting.append(low | high << 16 | top << 32)
    return found


def test_a_whole_index_is_whole(index):
    path, tree = index
    assert walk(path.parent) == ""
    assert walk(path.parent, "--readonly") == ""
    assert len(pages_of(path.read_bytes(), tree)[LEAF]) > 200
    assert len(pages_of(path.read_bytes(), tree)[BRANCH]) > 2


def test_an_empty_index_is_whole(tmp_path):
    BlockIndex(tmp_path / "index", "0" * 32, 1 << 30, FileDevice()).close()
    assert walk(tmp_path / "index") == ""


@pytest.mark.parametrize("kind", [BRANCH, LEAF])
def test_every_bit_of_a_page_that_lmdb_relies_on_is_looked_at(index, kind):
    path, tree = index
    data = bytearray(path.read_bytes())
    numbers = random.Random(2)
    pages = pages_of(data, tree)[kind]
    for _ in range(150):
        page = numbers.choice(pages) * PAGE
        (lower,) = struct.unpack_from("<H", data, page + 12)
        (node,) = struct.unpack_from("<H", data, page + numbers.randrange(16, lower, 2))
        # Two bytes of padding in the head are nobody's.
        at = page + numbers.choice([*range(8), *range(10, lower), *range(node, node + 8)])
        bit = 1 << numbers.randrange(8)
        data[at] ^= bit
        path.write_bytes(data)
        with pytest.raises(StorageError):
            check_tree(path, PAGE, tree, ENTRY_BYTES)
        data[at] ^= bit
    path.write_bytes(data)
    check_tree(path, PAGE, tree, ENTRY_BYTES)


def test_a_lost_page_is_noticed_by_the_number_of_entries(index):
    path, tree = index
    entries = struct.unpack_from("<Q", tree, 32)[0]
    with pytest.raises(StorageError, match=f"{entries} entries, it says {entries + 1}"):
        check_tree(path, PAGE, tree[:32] + struct.pack("<Q", entries + 1) + tree[40:], ENTRY_BYTES)


def test_a_tree_that_leads_back_into_itself_ends(index):
    path, tree = index
    data = bytearray(path.read_bytes())
    root = struct.unpack_from("<Q", tree, 40)[0]
    (first,) = struct.unpack_from("<H", data, root * PAGE + 16)
    struct.pack_into("<HHH", data, root * PAGE + first, root & 0xFFFF, root >> 16, 0)
    path.write_bytes(data)
    with pytest.raises(StorageError, match="none of its tree"):
        check_tree(path, PAGE, tree, ENTRY_BYTES)


def test_a_node_that_two_offsets_name_is_noticed(index):
    path, tree = index
    data = bytearray(path.read_bytes())
    page = pages_of(data, tree)[LEAF][5] * PAGE
    data[page + 16 : page + 18] = data[page + 18 : page + 20]
    path.write_bytes(data)
    with pytest.raises(StorageError, match="overlap"):
        check_tree(path, PAGE, tree, ENTRY_BYTES)


def test_a_key_one_byte_short_in_a_branch_page_is_noticed(index):
    """It takes the same room, nodes being filled up to an even number of bytes."""
    path, tree = index
    data = bytearray(path.read_bytes())
    page = pages_of(data, tree)[BRANCH][0] * PAGE
    (node,) = struct.unpack_from("<H", data, page + 18)
    assert data[page + node + 6] == 44
    data[page + node + 6] = 43
    path.write_bytes(data)
    with pytest.raises(StorageError, match="without the keys"):
        check_tree(path, PAGE, tree, ENTRY_BYTES)


def test_a_page_with_two_parents_is_noticed(index):
    """Also when it holds as many entries as the page that is lost for it."""
    path, tree = index
    data = bytearray(path.read_bytes())
    branch = pages_of(data, tree)[BRANCH][-1] * PAGE
    (lower,) = struct.unpack_from("<H", data, branch + 12)
    nodes = [branch + offset for offset in struct.unpack_from(f"<{(lower - 16) // 2}H", data, branch + 16)]
    by_size = {}
    for node in nodes:
        (page,) = struct.unpack_from("<I", data, node)
        (size,) = struct.unpack_from("<H", data, page * PAGE + 12)
        by_size.setdefault(size, []).append(node)
    one, other, *_ = max(by_size.values(), key=len)
    data[other : other + 6] = data[one : one + 6]
    path.write_bytes(data)
    with pytest.raises(StorageError, match="two parents"):
        check_tree(path, PAGE, tree, ENTRY_BYTES)
