"""What is remembered of chains: it may be forgotten or wrong, and still every object is named once, in order."""

from __future__ import annotations

import random

from kvstore_engine.lmcache.segments import SegmentBook

NAMES = [bytes([place]) * 30 for place in range(40)]


def shape(book: SegmentBook, names) -> list[tuple[int, int]]:
    """Of each run: how many objects are before it in its chain, and how many it has."""
    return [(run.first, run.count) for run in book.runs(names)]


def test_what_nobody_has_asked_for_stands_alone():
    assert shape(SegmentBook(), NAMES[:3]) == [(0, 1), (0, 1), (0, 1)]


def test_what_was_asked_for_stands_in_one_chain_and_what_follows_a_stored_object_goes_on_behind_it():
    book = SegmentBook()
    book.asked(NAMES[:6], [])
    assert shape(book, NAMES[:4]) == [(0, 4)]
    book.stored(NAMES[:4], 0)
    assert shape(book, NAMES[4:6]) == [(4, 2)]
    assert shape(book, NAMES[2:4]) == [(2, 2)]


def test_a_segment_that_was_found_begins_where_it_was_found_to_begin():
    book = SegmentBook()
    book.asked(NAMES[:8], [(0, 3), (3, 4)])
    assert shape(book, NAMES[:8]) == [(0, 3), (0, 5)]
    assert [run.names[0] for run in book.runs(NAMES[4:8])] == [NAMES[3]]


def test_what_a_look_up_no_longer_finds_is_not_gone_on_from():
    book = SegmentBook()
    book.asked(NAMES[:6], [(0, 6)])
    book.asked(NAMES[:6], [(0, 2)])
    assert shape(book, NAMES[4:6]) == [(0, 2)]


def test_a_look_up_that_ended_early_takes_nothing_back():
    book = SegmentBook()
    book.asked(NAMES[:6], [(0, 4), (4, 6)])
    book.asked(NAMES[:6], [(0, 2)], whole=False)
    assert shape(book, NAMES[2:6]) == [(2, 2), (0, 2)]
    book.asked(NAMES[:8], [], whole=False)
    assert shape(book, NAMES[4:8]) == [(0, 4)]


def test_whatever_is_forgotten_every_object_is_named_once_and_no_more_is_remembered_than_allowed():
    for seed in range(200):
        chance = random.Random(seed)
        book = SegmentBook(max_names=chance.randint(1, 30))
        for _ in range(30):
            names = NAMES[chance.randint(0, 20) :][: chance.randint(1, 20)]
            cut = chance.randint(1, len(names))
            if chance.random() < 0.5:
                segments = [(0, cut), *([(cut, len(names))] if cut < len(names) else [])]
                book.asked(names, segments[: chance.randint(0, 2)])
            wanted = chance.sample(names, chance.randint(1, len(names)))
            runs = book.runs(wanted)
            assert [name for run in runs for name in run.names[run.first :]] == wanted
            for run in runs:
                book.stored(run.names, run.first)
        assert len(book._entries) <= book._max_names
