"""Prefix hashes: 32-byte chained digests that name a block and everything before it.

    h[-1] = SHA-256(domain tag, namespace digest, salt, adapter)
    h[i]  = SHA-256(h[i-1] ‖ 128 token ids as u32 LE ‖ extra keys of block i)

Every variable field is tagged and length-prefixed. Nothing depends on the process, the host or the Python version; the
golden vectors in `tests/golden` hold for every later version.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from kvstore_api import encoding
from kvstore_api.chain import Chain
from kvstore_api.limits import BLOCK_TOKENS, HASH_BYTES, MAX_CHAIN_BLOCKS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

_SEED_DOMAIN = b"kvstore/prefix/1"
_TOKEN_LIMIT = 1 << 32


class TokenIdError(ValueError):
    """A token id is not an integer in [0, 2**32), named with its position; or there is no list of them."""


def prefix_seed(namespace: bytes, *, salt: bytes = b"", adapter: bytes = b"") -> bytes:
    """The hash before block 0: 32 bytes that bind a chain to its namespace, salt and adapter.

    Args:
        namespace: the namespace's 32-byte digest.
        salt: separates users of one namespace (a tenant's or a session's secret); any bytes.
        adapter: identity of a LoRA or other adapter, with its revision; any bytes.
    Raises:
        TypeError: salt or adapter is not bytes; text has no bytes until it is encoded.
        ValueError: the digest has not 32 bytes.
    """
    if len(namespace) != HASH_BYTES:
        raise ValueError(f"namespace digest has {len(namespace)} bytes, not {HASH_BYTES}")
    for name, value in (("salt", salt), ("adapter", adapter)):
        if not isinstance(value, bytes | bytearray | memoryview):
            raise TypeError(f"{name} is {type(value).__name__}, wanted is bytes")
    fields = (_SEED_DOMAIN, namespace, salt, adapter)
    return hashlib.sha256(b"".join(encoding.field(tag, value) for tag, value in enumerate(fields))).digest()


def prefix_hashes(
    seed: bytes,
    token_ids: Sequence[int] | NDArray[np.integer],
    block_tokens: int = BLOCK_TOKENS,
    extra_keys: Mapping[int, Sequence[bytes]] | None = None,
) -> Chain:
    """Hash every full block of `token_ids`, each chained on the block before it.

    Args:
        seed: 32 bytes from `prefix_seed`.
        token_ids: shape (n_tokens,), each an integer in [0, 2**32).
        block_tokens: tokens in a block.
        extra_keys: block position -> what else its KV depends on (digests of images, say), in order.
    Returns: a chain of n_tokens // block_tokens hashes. A partial last block has no name.
    Raises:
        TokenIdError: an id is out of range or no integer, never wrapped; or `token_ids` is no list or array of them.
        ValueError: the seed has not 32 bytes, block_tokens is not positive, or the chain would be over 65,536 blocks.
    """
    if len(seed) != HASH_BYTES:
        raise ValueError(f"seed has {len(seed)} bytes, not {HASH_BYTES}; make it with prefix_seed")
    if block_tokens < 1:
        raise ValueError(f"block_tokens is {block_tokens}, it must be positive")
    block_count = _count(token_ids) // block_tokens
    if block_count > MAX_CHAIN_BLOCKS:
        raise ValueError(f"{len(token_ids)} tokens are {block_count} blocks, the limit is {MAX_CHAIN_BLOCKS}")
    tokens = _as_u32(token_ids).tobytes()
    extra_keys = extra_keys or {}
    stride = 4 * block_tokens
    current = seed
    hashes = []
    for block in range(block_count):
        keys = b"".join(encoding.field(1, key) for key in extra_keys.get(block, ()))
        current = hashlib.sha256(current + tokens[block * stride : (block + 1) * stride] + keys).digest()
        hashes.append(current)
    return Chain(b"".join(hashes))


def _count(token_ids: Sequence[int] | NDArray[np.integer]) -> int:
    try:
        return len(token_ids)
    except TypeError:
        raise TokenIdError(
            f"token_ids is {type(token_ids).__name__}, wanted is a flat list or array of integers"
        ) from None


def _as_u32(token_ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.uint32]:
    """Check and convert to little-endian u32; ids that do not fit are refused, never wrapped."""
    try:
        array = np.asarray(token_ids)
    except (ValueError, OverflowError) as error:
        raise TokenIdError(f"token ids are no flat list of integers: {error}") from None
    if array.size == 0:
        return np.zeros(0, dtype="<u4")
    if array.ndim != 1:
        raise TokenIdError(f"token ids have shape {array.shape}, wanted is (n_tokens,)")
    if array.dtype.kind not in "iu":
        _refuse_first_bad(token_ids)
    bad = (array < 0) | (array >= _TOKEN_LIMIT)
    if bad.any():
        position = int(np.argmax(bad))
        raise TokenIdError(f"token id {token_ids[position]} at position {position} is not in [0, 2**32)")
    return array.astype("<u4")


def _refuse_first_bad(token_ids: Sequence[int] | NDArray[np.integer]) -> None:
    for position, token in enumerate(token_ids):
        if not isinstance(token, int | np.integer) or isinstance(token, bool) or not 0 <= token < _TOKEN_LIMIT:
            raise TokenIdError(f"token id {token!r} at position {position} is not an integer in [0, 2**32)")
    raise TokenIdError("token ids are no array of integers")
