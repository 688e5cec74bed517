"""Payload frames are protobuf messages: other clients' classes read ours, and ours reads theirs."""

from __future__ import annotations

import os

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore_api.framing import FrameError, MessageBuffer, join_frame, split_frame
from kvstore_api.limits import MAX_FRAME_BLOCKS, MAX_FRAME_DATA_BYTES, MAX_MESSAGE_BYTES
from kvstore_api.v1 import block_store_pb2 as pb

MESSAGES = [pb.GetBlocksResponse, pb.PutBlocksRequest]
FRAMES = st.fixed_dictionaries(
    {
        "blocks": st.lists(st.integers(0, 2**32 - 1), max_size=10),
        "checksums": st.lists(st.integers(0, 2**64 - 1), max_size=10),
        "offset_bytes": st.integers(0, 2**64 - 1),
    }
)


@pytest.mark.parametrize("kind", MESSAGES)
@settings(deadline=None)
@given(fields=FRAMES, parts=st.lists(st.binary(max_size=300), max_size=4))
def test_joined_frame_is_what_protobuf_writes_and_splits_back(kind, fields, parts):
    data = b"".join(parts)
    frame = join_frame(kind(**fields), parts, len(data))
    assert frame == kind(**fields, data=data).SerializeToString()
    rest, found = split_frame(frame)
    assert kind.FromString(rest) == kind(**fields)
    assert found == data


@settings(deadline=None)
@given(
    fields=FRAMES, data=st.binary(max_size=300), misses=st.lists(st.tuples(st.integers(0, 9), st.text()), max_size=3)
)
def test_frame_with_nested_messages_splits(fields, data, misses):
    whole = pb.GetBlocksResponse(**fields, data=data)
    for block, reason in misses:
        whole.misses.add(block=block, reason=reason)
    rest, found = split_frame(whole.SerializeToString())
    whole.ClearField("data")
    assert pb.GetBlocksResponse.FromString(rest) == whole
    assert found == data


@settings(deadline=None)
@given(message=st.binary(max_size=120))
@example(b"\x7a\x05abc")
@example(b"\x7a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")
def test_any_bytes_split_as_protobuf_parses_them_or_are_refused(message):
    try:
        rest, data = split_frame(message)
    except FrameError:
        with pytest.raises(DecodeError):
            pb.GetBlocksResponse.FromString(message)
        return
    try:
        parsed = pb.GetBlocksResponse.FromString(message)
    except DecodeError:
        return  # protobuf is stricter, on the rest: whoever parses that will see it
    assert parsed.data == data
    parsed.ClearField("data")
    assert pb.GetBlocksResponse.FromString(rest) == parsed


@settings(deadline=None)
@given(data=st.binary(min_size=1, max_size=300), cut=st.integers(1, 300))
def test_frame_cut_short_is_refused_and_never_padded(data, cut):
    frame = join_frame(pb.GetBlocksResponse(), [data], len(data))
    with pytest.raises(FrameError):
        split_frame(frame[: max(1, len(frame) - cut)])


def test_data_is_a_view_and_not_a_copy():
    frame = join_frame(pb.GetBlocksResponse(blocks=[1]), [b"abc"], 3)
    _, data = split_frame(frame)
    assert data.obj is frame


def test_frame_without_data_has_an_empty_view():
    rest, data = split_frame(pb.GetBlocksResponse(blocks=[1]).SerializeToString())
    assert (pb.GetBlocksResponse.FromString(rest).blocks, len(data)) == ([1], 0)
    assert split_frame(b"") == (b"", b"")


def test_last_data_field_counts_as_protobuf_says():
    first, second = pb.GetBlocksResponse(data=b"one"), pb.GetBlocksResponse(data=b"three")
    message = first.SerializeToString() + second.SerializeToString()
    assert split_frame(message)[1] == pb.GetBlocksResponse.FromString(message).data == b"three"


def test_fullest_frame_is_far_below_the_message_limit():
    header = pb.GetBlocksResponse(
        blocks=[2**32 - 1] * MAX_FRAME_BLOCKS, checksums=[2**64 - 1] * MAX_FRAME_BLOCKS, offset_bytes=2**63
    )
    for block in range(MAX_FRAME_BLOCKS):
        header.misses.add(block=block, reason="NOT_FOUND")
    frame = join_frame(header, [bytes(MAX_FRAME_DATA_BYTES)], MAX_FRAME_DATA_BYTES)
    assert len(frame) < MAX_MESSAGE_BYTES / 2


@pytest.mark.parametrize("size", [1, 127, 128, 16_383, 16_384, 1 << 20])
@pytest.mark.parametrize("block_count", [1, 9, 4096])
def test_message_read_into_in_place_is_the_same_message(size, block_count):
    """Also when the other fields are larger than the room kept for them."""
    fields = pb.GetBlocksResponse(blocks=range(block_count), checksums=range(block_count))
    data = os.urandom(size)
    buffer = MessageBuffer(size)
    view = buffer.view()
    assert len(view) == size
    view[:] = data
    del view
    message = buffer.finish(fields)
    assert type(message) is bytes
    fields.data = data
    assert pb.GetBlocksResponse.FromString(message) == fields
    _, found = split_frame(message)
    assert bytes(found) == data


def test_message_whose_memory_is_still_written_to_is_refused():
    buffer = MessageBuffer(8)
    view = buffer.view()
    with pytest.raises(BufferError):
        buffer.finish(pb.GetBlocksResponse(blocks=[1]))
    del view
