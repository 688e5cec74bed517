"""The pages of SGLang's host memory as bytes: which pools and layouts are supported, and where a page's bytes are."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvstore_api.limits import BLOCK_TOKENS, MAX_BLOCK_BYTES
from kvstore_client import KVStoreConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from numpy.typing import NDArray

# Pool class -> layouts of which `get_page_buffer_meta` tells all bytes of a page. Other classes, subclasses of these included,
# keep bytes elsewhere, such as scales, or may do so in a later release.
_SUPPORTED: Final = {
    "MHATokenToKVPoolHost": ("layer_first", "page_first", "page_first_direct", "page_head"),
    "MLATokenToKVPoolHost": ("layer_first", "page_first", "page_first_direct"),
}


class Page:
    """One page: its pieces of memory, which in this order are the block in the store."""

    __slots__ = ("_pieces", "_staging")

    def __init__(self, pieces: Sequence[NDArray[np.uint8]], staging: Staging) -> None:
        self._pieces = pieces
        self._staging = staging

    def contents(self) -> memoryview:
        """All bytes in one piece. A copy, if there are several: good until this thread asks for another page's."""
        if len(self._pieces) == 1:
            return self._pieces[0].data
        return np.concatenate(self._pieces, out=self._whole()).data

    def fill(self, fetch: Callable[[memoryview], bool]) -> bool:
        """Let `fetch` write all bytes in one piece, and bring them where they belong if it returns True. Returns: that."""
        if len(self._pieces) == 1:
            return fetch(self._pieces[0].data)
        whole = self._whole()
        if not fetch(whole.data):
            return False
        start = 0
        for piece in self._pieces:
            piece[:] = whole[start : start + piece.size]
            start += piece.size
        return True

    def _whole(self) -> NDArray[np.uint8]:
        return self._staging.of(sum(piece.size for piece in self._pieces))


class Staging(threading.local):
    """A page's bytes in one piece, where the pool keeps K and V, or layers, apart: one buffer for each thread.

    The client takes a buffer for each block. Loading the pieces as parts of a block would spare the copy, and cost a call and a
    check of the whole block for each: more than the copy, which takes a tenth of the load's time (measured, pages of 3 MB).
    """

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)

    def of(self, size_bytes: int) -> NDArray[np.uint8]:
        """This thread's buffer."""
        if self._buffer.size != size_bytes:
            self._buffer = np.empty(size_bytes, np.uint8)
        return self._buffer


class HostPages:
    """A host pool's pages.

    Attributes:
        page_bytes: bytes of a page.
        layout: what the order of a page's bytes depends on, as text.
        dtype: what the pool keeps, such as "bfloat16"; "uint8" for all kinds of FP8.
    """

    def __init__(self, pool: Any) -> None:
        """Raises: KVStoreConfigError: the pool's pages are no blocks of the store; says why."""
        _check(pool)
        self._pool = pool  # keeps the memory
        self._staging = Staging()
        # In `get_page_buffer_meta` K and V of a layer alternate; a flat page has all of K first.
        self._regrouped = type(pool).__name__.startswith("MHA") and pool.layout == "layer_first"
        self.dtype = str(pool.dtype).removeprefix("torch.")
        self.layout = _layout_text(pool)
        self.page_bytes = self._size_of_pages()

    def at(self, host_indices: torch.Tensor) -> list[Page]:
        """The pages that consist of these tokens of the pool, in order. Raises: ValueError: they are no whole pages."""
        pages, odd = divmod(len(host_indices), BLOCK_TOKENS)
        if odd or not pages:
            raise ValueError(f"{len(host_indices)} tokens of the pool are no whole pages of {BLOCK_TOKENS}")
        addresses, sizes = self._pool.get_page_buffer_meta(host_indices)
        each = len(addresses) // pages
        return [
            self._page(addresses[start : start + each], sizes[start : start + each])
            for start in range(0, len(addresses), each)
        ]

    def flat(self, view: memoryview) -> Page:
        """A page that lies in other memory than the pool's. Raises: ValueError: it has another size."""
        if len(view) != self.page_bytes:
            raise ValueError(f"{len(view)} bytes are no page, which has {self.page_bytes}")
        return Page([np.frombuffer(view, np.uint8)], self._staging)

    def _page(self, addresses: Sequence[int], sizes: Sequence[int]) -> Page:
        pieces = [_bytes_at(address, size) for address, size in zip(addresses, sizes, strict=True)]
        return Page(pieces[0::2] + pieces[1::2] if self._regrouped else pieces, self._staging)

    def _size_of_pages(self) -> int:
        """Raises: KVStoreConfigError: not all of a page's bytes are told, or they are more than a block may have."""
        _, sizes = self._pool.get_page_buffer_meta(np.arange(BLOCK_TOKENS))
        page_bytes, wanted = int(sum(sizes)), int(self._pool.get_size_per_token()) * BLOCK_TOKENS
        if page_bytes != wanted:
            raise _refused(f"SGLang tells where {page_bytes} bytes of a page are, and it has {wanted}")
        if page_bytes > MAX_BLOCK_BYTES:
            raise _refused(
                f"a page has {page_bytes} bytes, and a block of the store at most {MAX_BLOCK_BYTES}; use a larger --tp-size"
            )
        return page_bytes


def _check(pool: Any) -> None:
    kind, page_size = type(pool).__name__, getattr(pool, "page_size", None)
    if kind not in _SUPPORTED:
        raise _refused(f"SGLang keeps this model's KV in a {kind}; supported are {', '.join(_SUPPORTED)}")
    if pool.layout not in _SUPPORTED[kind]:
        raise _refused(
            f"--hicache-mem-layout {pool.layout} of a {kind} is not supported; choose {', '.join(_SUPPORTED[kind])}"
        )
    if page_size != BLOCK_TOKENS:
        raise _refused(
            f"SGLang's pages hold {page_size} tokens and the store's blocks {BLOCK_TOKENS}, and no page of one is a block of the "
            f"other; start SGLang with --page-size {BLOCK_TOKENS}, and if its log says that it changes that, with another "
            "--attention-backend"
        )
    if pool.kv_buffer is None:
        raise _refused(
            "SGLang has started without a storage backend, and keeps this model's KV in the host memory of one rank alone; "
            "start it with this backend"
        )
    drafts = pool.layer_num - getattr(pool, "target_layer_num", pool.layer_num)
    if drafts:
        raise _refused(f"the pages hold {drafts} layers of a draft model, whose weights the namespace does not name")


def _layout_text(pool: Any) -> str:
    """Everything that says which byte of a page is what."""
    shape = {name: getattr(pool, name, None) for name in ("head_num", "head_dim", "v_head_dim", "kv_cache_dim")}
    known = "".join(f" {name}={value}" for name, value in shape.items() if value is not None)
    layers = f"layers={pool.start_layer}-{pool.end_layer} layer_num={pool.layer_num}"
    # The host's memory has what the device has, page by page, in whichever order the device's kernels keep a page.
    device = pool.device_k_buffers if hasattr(pool, "device_k_buffers") else pool.device_kv_buffers
    rows = "x".join(str(size) for size in device[0].shape[1:]) if device else "none"
    return f"{type(pool).__name__} {pool.layout} {layers}{known} device={rows}"


def _refused(detail: str) -> KVStoreConfigError:
    return KVStoreConfigError("INVALID_CONFIG", detail)


def _bytes_at(address: int, size_bytes: int) -> NDArray[np.uint8]:
    """Memory that somebody else keeps alive, as an array."""
    return np.frombuffer(memoryview((ctypes.c_uint8 * size_bytes).from_address(address)), np.uint8)
