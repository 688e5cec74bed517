"""Long chains have open segments of their own."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.clock import ManualClock
from kvstore.index import block_keys
from kvstore.log.streams import LANES_MAX, Lanes, Stream, crowded
from stores import chain_of, open_store, put, spec

SEGMENT_BYTES = 1000


@pytest.fixture
def opened():
    return {}


@pytest.fixture
def crowds():
    return [False]


@pytest.fixture
def lanes(opened, crowds):
    return Lanes(opened, lambda tags: np.array(tags, dtype=np.uint64), lambda: crowds[-1], SEGMENT_BYTES)


def test_short_chains_share_and_long_ones_do_not(lanes):
    assert lanes.of(1, 0, 499) == 0
    first, second = lanes.of(1, 0, 500), lanes.of(1, 0, 5000)
    assert 0 < first < second


def test_a_chain_goes_on_where_its_last_block_is_while_that_is_open(lanes, opened):
    lane = lanes.of(1, 0, 600)
    opened[Stream(1)] = [99]
    opened[Stream(1, lane=lane)] = [7, 8, 9]
    opened[Stream(1, 3, lane=lane)] = [5]
    assert lanes.of(1, 8, 700) == lanes.of(1, 5, 700) == lane  # also where it branches off
    assert lanes.of(2, 8, 700) != lane  # of another class
    assert lanes.of(1, 99, 700) not in (0, lane)
    del opened[Stream(1, lane=lane)]
    assert lanes.of(1, 9, 700) != lane


def test_the_lane_used_longest_ago_is_surplus_with_all_that_is_open_of_it(lanes, opened):
    used = []
    for tag in range(1, LANES_MAX + 3):
        used.append(Stream(1, lane=lanes.of(1, 0, 600)))
        opened[used[-1]] = [tag, 500]
    opened[Stream(1)] = [1000]
    more = Stream(1, 2, lane=used[1].lane)
    opened[more] = [1001, 500]
    assert lanes.of(1, 1, 600) == used[0].lane
    assert set(lanes.surplus()) == {used[1], more, used[2]}
    for stream in lanes.surplus():
        del opened[stream]
    assert lanes.surplus() == []


def test_where_there_are_many_files_no_lane_is_sealed_for_another(lanes, opened, crowds):
    """Else each put of more chains than there may be lanes would begin a file."""
    crowds.append(True)
    for tag in range(1, LANES_MAX + 1):
        opened[Stream(1, lane=lanes.of(1, 0, 600))] = [tag]
    assert lanes.of(1, 0, 600) == 0
    assert lanes.of(1, 5, 600) != 0
    crowds.append(False)
    assert lanes.of(1, 0, 600) != 0


def test_there_are_twice_as_many_files_as_full_ones_at_most():
    assert not crowded(200, 100 << 20, 1 << 20)
    assert crowded(201, 100 << 20, 1 << 20)


def test_sessions_that_grow_side_by_side_lie_apart(tmp_path):
    """Each turn of each adds a few blocks; what is one session's is in one segment, however they took turns."""
    store = open_store(tmp_path, ManualClock(), capacity=16 << 20, segment_size=256 << 10)
    namespace = store.register_namespace(spec(4096))
    chains = [chain_of(namespace, session, 60) for session in range(4)]
    for end in range(40, 60, 4):
        for chain in chains:
            put(store, namespace, chain.first(end), range(0 if end == 40 else end - 4, end))
    for chain in chains:
        found = store._index.lookup(block_keys(namespace.namespace_id, chain.data, 0, len(chain)))
        places = {addr.segment_id for addr in found.values()}
        assert len(places) <= 2
    segments = [segment.segment_id for segment in store._segments.all()]
    assert len(segments) <= 8
    store.close()


def test_no_more_files_are_open_than_there_may_be_lanes(tmp_path):
    store = open_store(tmp_path, ManualClock(), capacity=64 << 20, segment_size=128 << 10)
    namespace = store.register_namespace(spec(4096))
    for session in range(LANES_MAX + 10):
        put(store, namespace, chain_of(namespace, session, 20))
    assert len(store._writer._open) <= LANES_MAX + 1
    assert store.invariants().violations == ()
    store.close()
