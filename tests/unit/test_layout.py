"""Which bytes of a block belong to which layers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_client import BlockLayout, BlockLayoutError, BlockPart

FOUR = BlockLayout.packed([(2, 100), (8, 100), (14, 100), (20, 200)], padding_bytes=12)
WITH_GAPS = BlockLayout((BlockPart((0, 1), 0, 10), BlockPart((2,), 16, 10), BlockPart((5,), 32, 10)), 48)


@st.composite
def layouts(draw):
    """Parts of any sizes, one after the other with any gaps, and any padding at the end."""
    layers = sorted(draw(st.sets(st.integers(0, 60), min_size=1, max_size=12)))
    parts, offset = [], 0
    while layers:
        count = draw(st.integers(1, len(layers)))
        offset += draw(st.integers(0, 3))
        parts.append(BlockPart(tuple(layers[:count]), offset, draw(st.integers(1, 1000))))
        offset, layers = parts[-1].end_bytes, layers[count:]
    return BlockLayout(tuple(parts), offset + draw(st.integers(0, 50)))


@pytest.mark.parametrize(
    ("first", "last", "wanted"),
    [
        (2, 2, (0, 100)),
        (8, 8, (100, 100)),
        (20, 20, (300, 200)),
        (2, 8, (0, 200)),
        (0, 39, (0, 500)),
        (3, 13, (100, 100)),
        (9, 20, (200, 300)),
    ],
)
def test_a_range_of_layers_is_the_bytes_of_those_that_have_some(first, last, wanted):
    assert FOUR.range_of(first, last) == wanted


def test_a_part_of_several_layers_comes_whole_and_a_gap_inside_the_range_too():
    assert WITH_GAPS.range_of(1, 1) == (0, 10)
    assert WITH_GAPS.range_of(1, 2) == (0, 26)
    assert WITH_GAPS.padding_bytes == 18


@pytest.mark.parametrize(("first", "last"), [(0, 1), (3, 7), (21, 99), (14, 8), (-5, -1)])
def test_a_range_without_any_layer_of_the_block_names_those_it_has(first, last):
    with pytest.raises(BlockLayoutError, match=rf"no layer from {first} to {last} .* \(2, 8, 14, 20\)"):
        FOUR.range_of(first, last)


@given(layouts(), st.integers(0, 60), st.integers(0, 60))
def test_any_range_is_inside_the_block_and_holds_exactly_the_parts_it_names(layout, first, last):
    named = [part for part in layout.parts if any(first <= layer <= last for layer in part.layers)]
    if not named:
        with pytest.raises(BlockLayoutError):
            layout.range_of(first, last)
        return
    offset, size = layout.range_of(first, last)
    assert 0 <= offset < offset + size <= layout.block_bytes
    inside = [part for part in layout.parts if offset <= part.offset_bytes and part.end_bytes <= offset + size]
    assert inside == named


@given(layouts(), st.data())
def test_merging_keeps_every_layer_at_its_bytes(layout, data):
    count = data.draw(st.integers(1, len(layout.parts)))
    merged = layout.merged(count)
    assert len(merged.parts) == count
    assert (merged.layers, merged.block_bytes) == (layout.layers, layout.block_bytes)
    for part in layout.parts:
        (whole,) = [candidate for candidate in merged.parts if set(part.layers) & set(candidate.layers)]
        assert set(part.layers) <= set(whole.layers)
        assert whole.offset_bytes <= part.offset_bytes < part.end_bytes <= whole.end_bytes


def test_merging_spreads_the_parts_evenly():
    assert [part.layers for part in BlockLayout.uniform(10, 7).merged(4).parts] == [
        (0, 1),
        (2, 3, 4),
        (5, 6),
        (7, 8, 9),
    ]
    assert FOUR.merged(4) == FOUR


@pytest.mark.parametrize("count", [0, -1, 5])
def test_merging_into_no_or_more_parts_is_refused(count):
    with pytest.raises(BlockLayoutError, match=f"4 parts cannot be merged into {count}"):
        FOUR.merged(count)


def test_a_uniform_layout_is_layer_after_layer_with_the_padding_behind():
    layout = BlockLayout.uniform((1, 3, 4), 50, padding=6)
    assert layout == BlockLayout((BlockPart((1,), 0, 50), BlockPart((3,), 50, 50), BlockPart((4,), 100, 50)), 156)
    assert BlockLayout.uniform(3, 50).layers == (0, 1, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BlockLayout((), 10), "at least one part"),
        (lambda: BlockLayout.uniform(0, 10), "at least one part"),
        (lambda: BlockLayout.uniform(2, 0), "0 bytes at offset 0"),
        (lambda: BlockLayout.uniform(2, 5, padding=-1), "padding is -1"),
        (lambda: BlockLayout((BlockPart((0,), 0, 10), BlockPart((1,), 9, 10)), 20), "before layers .* end at 10"),
        (
            lambda: BlockLayout((BlockPart((1,), 0, 10), BlockPart((0,), 10, 10)), 20),
            r"\(0,\) come after layers \(1,\)",
        ),
        (lambda: BlockLayout((BlockPart((1,), 0, 10), BlockPart((1, 2), 10, 10)), 20), r"\(1, 2\) come after"),
        (lambda: BlockLayout((BlockPart((0,), 0, 10), BlockPart((1,), 10, 11)), 20), "end at byte 21 of a block of 20"),
        (lambda: BlockPart((), 0, 10), "ascending, each once"),
        (lambda: BlockPart((2, 1), 0, 10), "ascending, each once"),
        (lambda: BlockPart((1, 1), 0, 10), "ascending, each once"),
        (lambda: BlockPart((-1, 0), 0, 10), "ascending, each once"),
        (lambda: BlockPart((0,), -1, 10), "10 bytes at offset -1"),
    ],
)
def test_a_contradictory_layout_is_refused_by_the_layers_it_is_about(make, message):
    with pytest.raises(BlockLayoutError, match=message):
        make()
