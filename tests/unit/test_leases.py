"""Lease tokens say where blocks are, and nothing that was not minted here is believed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.index import ADDR_DTYPE
from kvstore.leases import LeaseMint

MINT = LeaseMint(b"s" * 32)
CHAIN = b"".join(bytes([n]) * 32 for n in range(60))
PLACES = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5)), min_size=1, max_size=60)


def array(places):
    return np.array(places, dtype=ADDR_DTYPE)


@given(PLACES)
def test_a_token_names_exactly_what_went_in(places):
    token = MINT.make(5, CHAIN, array(places), 100.0)
    assert MINT.check(token, 5, CHAIN, 99.0).tolist() == places


@given(PLACES, st.data())
def test_no_changed_token_is_believed(places, data):
    token = bytearray(MINT.make(5, CHAIN, array(places), 100.0))
    position = data.draw(st.integers(0, len(token) - 1))
    token[position] ^= data.draw(st.integers(1, 255))
    assert MINT.check(bytes(token), 5, CHAIN, 99.0) is None


@pytest.mark.parametrize("size", range(0, 60, 7))
def test_no_cut_token_is_believed(size):
    token = MINT.make(5, CHAIN, array([(1, 1), (2, 2)]), 100.0)
    assert MINT.check(token[:size], 5, CHAIN, 99.0) is None


def test_old_foreign_and_other_namespaces_tokens_are_not_believed():
    token = MINT.make(5, CHAIN, array([(1, 1)]), 100.0)
    assert MINT.check(token, 5, CHAIN, 100.0) is not None
    assert MINT.check(token, 5, CHAIN, 100.1) is None
    assert MINT.check(token, 6, CHAIN, 99.0) is None
    assert LeaseMint(b"t" * 32).check(token, 5, CHAIN, 99.0) is None


def test_neighbours_make_one_run_so_that_long_hits_have_short_tokens():
    slots = [(1, slot) for slot in range(10_000)]
    assert len(MINT.make(5, bytes(32 * 10_000), array(slots), 100.0)) < 100


def test_a_token_is_for_the_chain_that_was_matched():
    token = MINT.make(5, CHAIN, array([(1, 1), (1, 2)]), 100.0)
    assert MINT.check(token, 5, CHAIN[32:], 99.0) is None
    assert MINT.check(token, 5, CHAIN[:32], 99.0) is not None
