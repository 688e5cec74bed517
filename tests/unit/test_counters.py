"""Every counter moves by exactly what happened, and with no other; none moves when nothing does."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from faults import FaultyDevice, flip_bit
from kvstore.clock import ManualClock
from kvstore.counters import COUNTERS
from kvstore.log import format as fmt
from kvstore.types import EvictSelection
from kvstore_api.checksum import block_checksum
from stores import BLOCK_BYTES, chain_of, get, open_store, payload, put, put_block, spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kvstore_api.chain import Chain

# What a small block costs in its file: a page, and its rows.
WRITTEN_BYTES = fmt.ALIGNMENT_BYTES + fmt.ROW_BYTES + fmt.USE_BYTES


class Watched:
    """A store of tiny blocks whose counters are watched."""

    def __init__(self, path: Path) -> None:
        self.path, self.clock = path, ManualClock()
        self.store = open_store(path, self.clock)
        self.namespace = self.store.register_namespace(spec())
        self.chain = chain_of(self.namespace, 1, 10)
        self.moved: set[str] = set()

    def put(self, blocks: Sequence[int] | None = None, chain: Chain | None = None) -> None:
        put(self.store, self.namespace, chain or self.chain, blocks)

    def files(self) -> list[Path]:
        """Segment files, oldest first."""
        return sorted(self.path.rglob("*.seg"))

    def taken_bytes(self) -> int:
        """What all segment files take on the disk."""
        return sum(path.stat().st_blocks * 512 for path in self.files())

    @contextlib.contextmanager
    def moves(self, **expected: int) -> Iterator[None]:
        """What happens inside moves these counters by these amounts, and no other."""
        before = self.store.counters.snapshot()
        yield
        after = self.store.counters.snapshot()
        assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == expected
        self.moved |= expected.keys()


def match_of_ten_with_six_there(it: Watched) -> None:
    it.put(range(6))
    with it.moves(matches=1, asked_blocks=10, hit_blocks=6, asked_tokens=1280, hit_tokens=768):
        it.store.match(it.namespace, it.chain)
    with it.moves():
        it.store.match(it.namespace, it.chain, peek=True)


def put_of_five(it: Watched) -> None:
    with it.moves(blocks_stored=5, bytes_stored=5 * BLOCK_BYTES, bytes_written=5 * WRITTEN_BYTES):
        it.put(range(5))
    with it.moves(blocks_stored=1, bytes_stored=100, bytes_written=WRITTEN_BYTES):
        data = bytes(100)
        it.store.submit_put_state(
            it.namespace, it.chain[0], "tail", data, block_checksum(data, it.chain[0]), ""
        ).result()


def put_of_what_is_there(it: Watched) -> None:
    it.put(range(5))
    moved = {"blocks_stored": 2, "bytes_stored": 2 * BLOCK_BYTES, "bytes_written": 2 * WRITTEN_BYTES}
    with it.moves(blocks_exist=5, **moved):
        it.put(range(7))


def put_of_wrong_bytes(it: Watched) -> None:
    wrong = [put_block(it.chain, block, payload(it.chain[block + 1], size)) for block, size in ((0, 511), (1, 513))]
    moved = {"blocks_stored": 1, "bytes_stored": BLOCK_BYTES, "bytes_written": WRITTEN_BYTES}
    with it.moves(blocks_rejected=2, **moved):
        it.store.submit_put(it.namespace, it.chain, [*wrong, put_block(it.chain, 2)]).result()


def get_of_ten_with_six_there(it: Watched) -> None:
    it.put(range(6))
    with it.moves(blocks_read=6, bytes_read=6 * BLOCK_BYTES, blocks_missed=4):
        get(it.store, it.namespace, it.chain)


def get_of_a_damaged_block(it: Watched) -> None:
    it.put()
    (path,) = it.files()
    flip_bit(path, path.read_bytes().index(payload(it.chain[3])), 0)
    for _ in range(2):  # the second time it is not offered any more
        first = not it.moved
        with it.moves(
            **({"blocks_corrupt": 1} if first else {}), blocks_read=9, bytes_read=9 * BLOCK_BYTES, blocks_missed=1
        ):
            get(it.store, it.namespace, it.chain)


def get_that_the_disk_refuses(it: Watched) -> None:
    it.store.close()
    device = FaultyDevice()
    it.store = open_store(it.path, it.clock, device=device)
    it.put(range(2))
    with it.moves(blocks_unreadable=2, blocks_missed=10):
        device.fail_read = True
        get(it.store, it.namespace, it.chain)
    device.heal()


def expiry_of_ten(it: Watched) -> None:
    it.put()
    with it.moves(blocks_expired=10, segments_reclaimed=1, segments_dropped_whole=1, bytes_reclaimed=it.taken_bytes()):
        it.clock.advance(3 * 86_400)
        it.store.sweep()
        it.store.sweep()


def eviction_of_ten(it: Watched) -> None:
    it.put()
    with it.moves(blocks_evicted=10, segments_reclaimed=1, segments_dropped_whole=1, bytes_reclaimed=it.taken_bytes()):
        it.store.evict(EvictSelection(traffic_class="agent"), dry_run=True)
        it.store.evict(EvictSelection(traffic_class="agent"), dry_run=False)


def delete_of_two(it: Watched) -> None:
    it.put(range(5))
    with it.moves(blocks_deleted=2):
        for _ in range(2):  # the second time they are gone
            it.store.delete(it.namespace, it.chain, 3, 7)


def reclaim_that_moves_four_of_forty(it: Watched) -> None:
    chain = chain_of(it.namespace, 2, 40)
    it.put(chain=chain)
    taken_bytes = it.taken_bytes()
    with it.moves(
        blocks_deleted=36,
        blocks_moved=4,
        segments_reclaimed=1,
        bytes_reclaimed=taken_bytes,
        bytes_written=4 * WRITTEN_BYTES,
    ):
        it.store.delete(it.namespace, chain, 4, 36)
        it.store.sweep()


CASES: dict[str, Callable[[Watched], None]] = {
    "matches": match_of_ten_with_six_there,
    "asked_blocks": match_of_ten_with_six_there,
    "hit_blocks": match_of_ten_with_six_there,
    "asked_tokens": match_of_ten_with_six_there,
    "hit_tokens": match_of_ten_with_six_there,
    "blocks_stored": put_of_five,
    "blocks_exist": put_of_what_is_there,
    "blocks_rejected": put_of_wrong_bytes,
    "bytes_stored": put_of_five,
    "blocks_read": get_of_ten_with_six_there,
    "bytes_read": get_of_ten_with_six_there,
    "blocks_missed": get_of_ten_with_six_there,
    "blocks_corrupt": get_of_a_damaged_block,
    "blocks_unreadable": get_that_the_disk_refuses,
    "blocks_expired": expiry_of_ten,
    "blocks_evicted": eviction_of_ten,
    "blocks_deleted": delete_of_two,
    "blocks_moved": reclaim_that_moves_four_of_forty,
    "segments_reclaimed": reclaim_that_moves_four_of_forty,
    "segments_dropped_whole": expiry_of_ten,
    "bytes_reclaimed": expiry_of_ten,
    "bytes_written": reclaim_that_moves_four_of_forty,
}


@pytest.mark.parametrize("counter", COUNTERS)
def test_a_counter_moves_by_exactly_what_happened(tmp_path, counter):
    it = Watched(tmp_path)
    CASES[counter](it)
    assert counter in it.moved, "its case does not move it"
    with it.moves():
        it.store.status()
        it.store.sweep()
    it.store.close()


def test_room_given_back_once_leases_have_passed_is_counted_whoever_needs_it(tmp_path):
    """By the next tick, or by a put that cannot wait for it."""
    it = Watched(tmp_path)
    conversation = 0
    while it.store.status().used_bytes < 0.8 * (4 << 20):
        conversation += 1
        chain = chain_of(it.namespace, conversation, 40)
        it.put(chain=chain)
        it.store.match(it.namespace, chain, lease_s=60)
    waiting_bytes = it.taken_bytes()
    before = it.store.counters.snapshot()["bytes_reclaimed"]
    it.store.evict(EvictSelection(older_than_s=0), dry_run=False)
    assert it.store.counters.snapshot()["bytes_reclaimed"] == before
    assert it.store.status().retiring_bytes == waiting_bytes
    it.clock.advance(61)
    it.put(chain=chain_of(it.namespace, 0, 160))
    assert it.store.counters.snapshot()["bytes_reclaimed"] == before + waiting_bytes
    it.store.close()
