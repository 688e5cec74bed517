"""Callers' memory as flat bytes: numpy arrays, torch tensors, anything with the buffer protocol. Nothing is copied.

torch is never imported: a tensor is recognised by the torch module that its owner has loaded. bfloat16 and the fp8 types
have no numpy counterpart, so a tensor is viewed as bytes by itself, before numpy sees it.
"""

from __future__ import annotations

import ctypes
import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


class BlockBuffers(Protocol):
    """`count` equal blocks of the caller's memory."""

    count: int

    def block(self, index: int) -> memoryview:
        """Block `index`, as bytes."""
        ...

    def run(self, index: int, count: int) -> Sequence[memoryview]:
        """Blocks [index, index + count) in order, in as few pieces as possible."""
        ...


class FlatBlocks:
    """Blocks that lie one after another in one buffer."""

    __slots__ = ("_block_bytes", "_view", "count")

    def __init__(self, view: memoryview, block_bytes: int) -> None:
        self._view = view
        self._block_bytes = block_bytes
        self.count = len(view) // block_bytes

    def block(self, index: int) -> memoryview:
        """Block `index`, as bytes."""
        return self._view[index * self._block_bytes : (index + 1) * self._block_bytes]

    def run(self, index: int, count: int) -> Sequence[memoryview]:
        """Blocks [index, index + count) as one piece."""
        return (self._view[index * self._block_bytes : (index + count) * self._block_bytes],)


class ScatteredBlocks:
    """Blocks that have a buffer each."""

    __slots__ = ("_views", "count")

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self.count = len(views)

    def block(self, index: int) -> memoryview:
        """Block `index`, as bytes."""
        return self._views[index]

    def run(self, index: int, count: int) -> Sequence[memoryview]:
        """Blocks [index, index + count), a piece each."""
        return self._views[index : index + count]


def blocks_to_read(blocks: object, block_bytes: int) -> BlockBuffers:
    """The blocks of a put: a list or tuple of buffers of `block_bytes` each, or one buffer of a multiple of that.

    Raises:
        TypeError: no buffer at all.
        ValueError: a buffer has the wrong size, is not contiguous, or is not in the host's memory; or there are none.
    """
    if isinstance(blocks, list | tuple):
        views = [byte_view(buffer, f"blocks[{index}]") for index, buffer in enumerate(blocks)]
        _check_sizes(views, block_bytes, "blocks")
        if not views:
            raise ValueError("blocks is empty, at least one block is needed")
        return ScatteredBlocks(views)
    view = byte_view(blocks, "blocks")
    if not len(view) or len(view) % block_bytes:
        raise ValueError(
            f"blocks has {len(view)} bytes, which is no positive multiple of {block_bytes}, the namespace's block size"
        )
    return FlatBlocks(view, block_bytes)


def blocks_to_write(out: object, block_bytes: int, block_count: int) -> BlockBuffers:
    """The memory of a get: a list or tuple of `block_count` writable buffers of `block_bytes` each, or one for all.

    Raises:
        TypeError: no buffer at all.
        ValueError: a buffer has the wrong size, is read-only, not contiguous, or not in the host's memory; the number of
            buffers is wrong; or two of them overlap.
    """
    if isinstance(out, list | tuple):
        if len(out) != block_count:
            raise ValueError(f"out has {len(out)} buffers, but {block_count} blocks are asked for")
        views = [byte_view(buffer, f"out[{index}]", writable=True) for index, buffer in enumerate(out)]
        _check_sizes(views, block_bytes, "out")
        _check_no_overlap(views, block_bytes)
        return ScatteredBlocks(views)
    view = byte_view(out, "out", writable=True)
    if len(view) != block_count * block_bytes:
        raise ValueError(
            f"out has {len(view)} bytes, but {block_count} blocks of {block_bytes} bytes are {block_count * block_bytes}"
        )
    return FlatBlocks(view, block_bytes)


def byte_view(buffer: object, name: str, *, writable: bool = False) -> memoryview:
    """One buffer as flat bytes that share its memory.

    Raises:
        TypeError: no buffer.
        ValueError: not contiguous, not in the host's memory, or read-only although `writable` is asked for.
    """
    view = _flat_view(buffer, name)
    if writable and view.readonly:
        raise ValueError(f"{name} is read-only; wanted is memory that can be written")
    return view


def _flat_view(buffer: object, name: str) -> memoryview:
    if isinstance(buffer, np.ndarray):
        return _array_bytes(buffer, name).data
    if _is_tensor(buffer):
        return _tensor_bytes(buffer, name).data
    try:
        view = memoryview(buffer)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"{name} is of type {type(buffer).__name__}; wanted is a numpy array, a torch tensor, or another object with "
            "the buffer protocol"
        ) from None
    if not view.c_contiguous:
        raise ValueError(f"{name} is not contiguous (shape {view.shape}, strides {view.strides})")
    if view.format == "B" and view.ndim == 1:
        return view
    # memoryview.cast knows native single characters only; numpy takes any format, ctypes' "<B" for one.
    return np.frombuffer(view, np.uint8).data if view.nbytes else memoryview(b"")


def _array_bytes(array: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    if array.dtype.hasobject:
        raise TypeError(f"{name} is a numpy array of Python objects, which are not bytes")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} is not contiguous (shape {array.shape}, strides {array.strides})")
    return np.asarray(array).reshape(-1).view(np.uint8)


def _is_tensor(buffer: object) -> bool:
    torch = sys.modules.get("torch")
    tensor_type = getattr(torch, "Tensor", None)  # None while torch is only half imported
    return tensor_type is not None and isinstance(buffer, tensor_type)


def _tensor_bytes(tensor: Any, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:  # noqa: ANN401 - torch's type, not imported
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu":
        raise ValueError(
            f"{name} is a tensor on {tensor.device}; the client needs host memory, such as a pinned CPU tensor"
        )
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous (shape {tuple(tensor.shape)}, layout {tensor.layout})")
    array: np.ndarray[Any, np.dtype[np.uint8]] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return array


def _check_sizes(views: Sequence[memoryview], block_bytes: int, name: str) -> None:
    for index, view in enumerate(views):
        if len(view) != block_bytes:
            raise ValueError(f"{name}[{index}] has {len(view)} bytes, a block of this namespace has {block_bytes}")


def _check_no_overlap(views: Sequence[memoryview], block_bytes: int) -> None:
    """A block that is verified must not be overwritten by the next one."""
    starts = [ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in views]
    order = sorted(range(len(starts)), key=starts.__getitem__)
    for before, after in pairwise(order):
        if starts[after] - starts[before] < block_bytes:
            raise ValueError(f"out[{min(before, after)}] and out[{max(before, after)}] overlap in memory")
