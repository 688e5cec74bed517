"""Callers' memory: every kind of buffer is used in place, and whatever does not fit is refused before anything is sent."""

from __future__ import annotations

import array
import ctypes
import mmap
import subprocess
import sys

import numpy as np
import pytest
import torch

from kvstore_client.buffers import blocks_to_read, blocks_to_write, byte_view

SIZE = 64


def buffers() -> dict[str, object]:
    """One of each kind, of 64 bytes."""
    return {
        "bytearray": bytearray(SIZE),
        "memoryview": memoryview(bytearray(SIZE)),
        "part of a memoryview": memoryview(bytearray(3 * SIZE))[SIZE : 2 * SIZE],
        "memoryview of doubles": memoryview(bytearray(SIZE)).cast("d"),
        "memoryview of 2 dimensions": memoryview(bytearray(SIZE)).cast("B", (8, 8)),
        "mmap": mmap.mmap(-1, SIZE),
        "array": array.array("i", [0] * (SIZE // 4)),
        "ctypes": (ctypes.c_uint16 * (SIZE // 2))(),
        "numpy uint8": np.zeros(SIZE, np.uint8),
        "numpy float16 of 3 dimensions": np.zeros((2, 4, 4), np.float16),
        "numpy big-endian": np.zeros(SIZE // 4, ">f4"),
        "numpy datetime64": np.zeros(SIZE // 8, "datetime64[s]"),
        "numpy structured": np.zeros(SIZE // 16, [("a", "u8"), ("b", "f8")]),
        "row of a numpy array": np.zeros((3, SIZE), np.uint8)[1],
        "numpy scalar array": np.zeros((), "V64"),
        "torch uint8": torch.zeros(SIZE, dtype=torch.uint8),
        "torch bfloat16": torch.zeros((2, 2, 8), dtype=torch.bfloat16),
        "torch float8": torch.zeros(SIZE, dtype=torch.float8_e4m3fn),
        "torch of 0 dimensions in a row": torch.zeros(SIZE // 8, dtype=torch.float64)[None],
        "torch with gradient": torch.zeros(SIZE // 4, requires_grad=True),
        "row of a torch tensor": torch.zeros((3, SIZE // 2), dtype=torch.bfloat16)[1],
        "torch parameter": torch.nn.Parameter(torch.zeros(SIZE // 4)),
    }


@pytest.mark.parametrize("kind", buffers())
def test_every_kind_of_buffer_is_used_in_place(kind):
    buffer = buffers()[kind]
    view = byte_view(buffer, "out", writable=True)
    assert (len(view), view.format, view.ndim, view.readonly) == (SIZE, "B", 1, False)
    view[:] = bytes(range(SIZE))
    assert bytes(byte_view(buffer, "blocks")) == bytes(range(SIZE))


def test_bytes_written_to_a_tensor_are_its_elements():
    tensor = torch.zeros(3, dtype=torch.bfloat16)
    byte_view(tensor, "out", writable=True)[:] = (
        torch.tensor([1.0, -2.0, 0.5], dtype=torch.bfloat16).view(torch.uint8).numpy().data
    )
    assert tensor.tolist() == [1.0, -2.0, 0.5]


def test_scalar_tensor_is_a_buffer_too():
    assert bytes(byte_view(torch.tensor(1, dtype=torch.int16), "blocks")) == b"\x01\x00"


READ_ONLY_ARRAY = np.zeros(SIZE, np.uint8)
READ_ONLY_ARRAY.flags.writeable = False


@pytest.mark.parametrize(
    "buffer", [bytes(SIZE), memoryview(bytes(SIZE)), READ_ONLY_ARRAY], ids=lambda b: type(b).__name__
)
def test_read_only_memory_can_be_put_but_not_written(buffer):
    assert len(byte_view(buffer, "blocks")) == SIZE
    with pytest.raises(ValueError, match="out is read-only"):
        blocks_to_write(buffer, SIZE, 1)


@pytest.mark.parametrize(
    "buffer",
    [
        memoryview(bytearray(2 * SIZE))[::2],
        np.zeros(2 * SIZE, np.uint8)[::2],
        np.zeros((8, 16), np.uint8)[:, :8],
        np.asfortranarray(np.zeros((8, 8), np.uint8)),
        torch.zeros(2 * SIZE, dtype=torch.uint8)[::2],
        torch.zeros((8, 8), dtype=torch.uint8).t(),
        torch.zeros((8, 8), dtype=torch.uint8).to_sparse(),
    ],
    ids=[
        "memoryview",
        "numpy stride",
        "numpy columns",
        "numpy Fortran",
        "torch stride",
        "torch transposed",
        "torch sparse",
    ],
)
def test_memory_with_gaps_is_refused_and_not_copied(buffer):
    with pytest.raises(ValueError, match="out is not contiguous"):
        byte_view(buffer, "out", writable=True)


def test_tensor_outside_the_hosts_memory_is_refused_by_its_device():
    with pytest.raises(ValueError, match="tensor on meta; the client needs host memory"):
        byte_view(torch.zeros(SIZE, device="meta"), "out")


def _type_name(thing):
    return type(thing).__name__


@pytest.mark.parametrize("thing", [None, 5, "text", object(), {1: 2}, np.array([object()])], ids=_type_name)
def test_what_is_no_buffer_is_a_type_error(thing):
    with pytest.raises(TypeError, match="blocks"):
        blocks_to_read(thing, SIZE)
    with pytest.raises(TypeError, match=r"out\[1\]"):
        blocks_to_write([bytearray(SIZE), thing], SIZE, 2)


@pytest.mark.parametrize("size", [0, 1, SIZE - 1, SIZE + 1, 2 * SIZE - 1])
def test_bytes_that_are_no_whole_blocks_are_refused_with_the_numbers(size):
    with pytest.raises(ValueError, match=f"blocks has {size} bytes, .* multiple of {SIZE}"):
        blocks_to_read(bytes(size), SIZE)
    with pytest.raises(ValueError, match=rf"blocks\[1\] has {size} bytes, a block of this namespace has {SIZE}"):
        blocks_to_read([bytes(SIZE), bytes(size)], SIZE)


def test_no_blocks_at_all_are_refused():
    with pytest.raises(ValueError, match="blocks is empty"):
        blocks_to_read([], SIZE)


@pytest.mark.parametrize("size", [0, SIZE, 2 * SIZE - 1, 2 * SIZE + 1, 3 * SIZE])
def test_out_that_does_not_hold_exactly_the_blocks_is_refused_with_the_numbers(size):
    with pytest.raises(ValueError, match=f"out has {size} bytes, but 2 blocks of {SIZE} bytes are {2 * SIZE}"):
        blocks_to_write(bytearray(size), SIZE, 2)


def test_wrong_number_or_size_of_out_buffers_is_refused():
    with pytest.raises(ValueError, match="out has 1 buffers, but 2 blocks"):
        blocks_to_write([bytearray(2 * SIZE)], SIZE, 2)
    with pytest.raises(ValueError, match=rf"out\[1\] has {SIZE + 1} bytes"):
        blocks_to_write([bytearray(SIZE), bytearray(SIZE + 1)], SIZE, 2)


@pytest.mark.parametrize("offset", [0, 1, SIZE - 1])
def test_out_buffers_that_overlap_are_refused_because_one_would_overwrite_the_other(offset):
    memory = memoryview(bytearray(4 * SIZE))
    apart, low, high = memory[3 * SIZE :], memory[:SIZE], memory[offset : offset + SIZE]
    with pytest.raises(ValueError, match=r"out\[1\] and out\[2\] overlap"):
        blocks_to_write([apart, high, low], SIZE, 3)
    assert blocks_to_write([apart, memory[SIZE : 2 * SIZE], low], SIZE, 3).count == 3


def test_runs_of_blocks_are_pieces_of_the_callers_memory():
    flat = blocks_to_read(bytes(range(12)), 4)
    assert [bytes(piece) for piece in flat.run(1, 2)] == [bytes(range(4, 12))]
    assert bytes(flat.block(2)) == bytes(range(8, 12))
    scattered = blocks_to_read([b"abcd", b"efgh", b"ijkl"], 4)
    assert [bytes(piece) for piece in scattered.run(1, 2)] == [b"efgh", b"ijkl"]


def test_import_starts_nothing_and_loads_neither_torch_nor_the_server():
    script = (
        "import sys, threading; import kvstore_client;"
        "loaded = {'torch', 'lmdb', 'kvstore', 'pydantic'} & set(sys.modules);"
        "print(sorted(loaded), threading.active_count())"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "[] 1\n"
