"""Evicted blocks are remembered by their tags, the ones used last longest."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.dropped import NO_TAG, UNREACHABLE, Children, DroppedBlocks, tag_of, tags_of

RNG = np.random.default_rng(3)


def some_tags(count):
    return RNG.integers(1, 1 << 63, count, dtype=np.uint64)


def add(table, tags, kind=1, last_use_s=100):
    size = len(tags)
    return table.add(tags, np.full(size, kind, dtype=np.uint8), np.full(size, last_use_s, dtype=np.uint32))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "forget", "grow"]),
            st.lists(st.integers(0, 40), max_size=12),
            st.integers(0, 41),
            st.integers(1, 1 << 31),
        ),
        max_size=30,
    )
)
def test_with_room_for_all_it_is_a_dictionary(steps):
    tags = np.random.default_rng(1).integers(1, 1 << 63, 41, dtype=np.uint64)
    table, model = DroppedBlocks(1 << 16), {}
    for what, numbers, kind, last_use_s in steps:
        some = tags[numbers]
        if what == "add":
            assert len(add(table, some, kind, last_use_s).kind) == 0
            model |= dict.fromkeys(some.tolist(), (kind, last_use_s))
        elif what == "forget":
            table.forget(some)
            for tag in some.tolist():
                model.pop(tag, None)
        else:
            table.make_room_for(1 << kind % 16)
        there, found = table.find(tags)
        assert there.tolist() == table.holds(tags).tolist() == [tag in model for tag in tags.tolist()]
        assert list(zip(found.kind, found.last_use_s, strict=True)) == [model[t] for t in tags.tolist() if t in model]
        sample, of_each = table.sample(1 << 20)
        assert (len(sample.kind), of_each) == (len(model), 1.0)


def test_where_there_is_no_room_those_used_longest_ago_are_forgotten():
    table = DroppedBlocks(1 << 12)
    old, young = some_tags(3000), some_tags(3000)
    forgotten = add(table, old, last_use_s=5)
    forgotten_then = add(table, young, last_use_s=9)
    assert len(forgotten.kind) + len(forgotten_then.kind) == 6000 - (table.holds(old).sum() + table.holds(young).sum())
    assert table.holds(young).mean() > 0.95
    assert table.holds(old).mean() < 0.45
    assert set(forgotten.last_use_s.tolist()) <= {5}


def test_it_grows_up_to_its_limit_and_loses_nothing_by_it():
    table = DroppedBlocks(1 << 16)
    tags = some_tags(2000)
    add(table, tags)
    held = table.holds(tags)
    for blocks in (10_000, 30_000, 10, 1 << 40):
        table.make_room_for(blocks)
        assert (table.holds(tags) == held).all()
    more = some_tags(30_000)
    add(table, more)
    assert table.holds(more).mean() > 0.99
    sample, of_each = table.sample(1 << 12)
    assert of_each == 16
    assert len(sample.kind) * of_each == pytest.approx(32_000, rel=0.1)


def test_a_block_of_which_nothing_is_known_is_never_there():
    table = DroppedBlocks(1 << 12)
    nothing = np.array([NO_TAG, NO_TAG])
    add(table, nothing)
    assert not table.holds(nothing).any()
    assert not table.find(nothing)[0].any()
    table.forget(nothing)
    assert len(table.sample(1 << 12)[0].kind) == 0


def test_what_lives_out_of_reach_is_told_apart_from_what_was_evicted():
    table = DroppedBlocks(1 << 12)
    tags = some_tags(10)
    add(table, tags[:4], UNREACHABLE)
    add(table, tags[4:], 7)
    _, found = table.find(tags)
    assert found.evicted().kind.tolist() == [7] * 6


def test_children_are_found_where_they_were_put_last():
    children = Children(1 << 12)
    parents = some_tags(3)
    children.add(parents, 4)
    children.add(parents[:1], 9)
    assert children.segments_of(parents[1:]) == {4}
    assert children.segments_of(parents) == {4, 9}
    assert children.segments_of(np.array([NO_TAG])) == set()


def test_a_tag_is_the_beginning_of_a_prefix_hash():
    hashes = [bytes(range(first, first + 32)) for first in range(3)]
    assert tags_of(b"".join(hashes)).tolist() == [tag_of(prefix_hash) for prefix_hash in hashes]
    assert tag_of(hashes[1]) == int.from_bytes(bytes(range(1, 9)), "little")
    assert len(tags_of(b"")) == 0
