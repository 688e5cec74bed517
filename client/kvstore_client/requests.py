"""Callers' arguments, checked and turned into messages. Whatever is wrong with them is raised here, before anything is sent."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from google.protobuf.duration_pb2 import Duration

from kvstore_api.chain import Chain
from kvstore_api.limits import HASH_BYTES, MAX_STATE_BYTES, MAX_STATE_NAME_BYTES
from kvstore_api.v1 import block_store_pb2

if TYPE_CHECKING:
    from kvstore_api.namespace import NamespaceDigest

_MAX_LEASE_S = 86_400.0


def block_range(chain: Chain, first_block: int, block_count: int | None) -> int:
    """The number of blocks meant; the rest of the chain when None.

    Raises:
        TypeError: the chain is none, or a number is no integer.
        ValueError: the range is empty or not in the chain.
    """
    if not isinstance(chain, Chain):
        raise TypeError(f"chain is of type {type(chain).__name__}, wanted is a Chain")
    _check_integer("first_block", first_block)
    if block_count is None:
        block_count = len(chain) - first_block
    _check_integer("block_count", block_count)
    if first_block < 0 or block_count < 1 or first_block + block_count > len(chain):
        raise ValueError(f"{block_count} blocks from block {first_block} on are not in a chain of {len(chain)} blocks")
    return block_count


def match(digest: NamespaceDigest, chain: Chain, traffic_class: str, lease_s: float | None, peek: bool) -> bytes:
    """A MatchPrefixRequest."""
    if not isinstance(chain, Chain):
        raise TypeError(f"chain is of type {type(chain).__name__}, wanted is a Chain")
    return block_store_pb2.MatchPrefixRequest(
        namespace=digest,
        chain=chain.data,
        traffic_class=_traffic_class(traffic_class),
        lease=None if lease_s is None else _lease(lease_s),
        peek=peek,
    ).SerializeToString()


def part_bytes(part: tuple[int, int], block_bytes: int) -> int:
    """The size of a part of each block, given as (offset, size) in bytes.

    Raises:
        TypeError: it is no pair of integers.
        ValueError: it is empty, or not in the block.
    """
    if not isinstance(part, tuple) or len(part) != 2:
        raise TypeError(f"part is {part!r}, wanted is (offset_bytes, size_bytes)")
    offset, size = part
    _check_integer("part's offset_bytes", offset)
    _check_integer("part's size_bytes", size)
    if offset < 0 or size < 1 or offset + size > block_bytes:
        raise ValueError(f"part is {size} bytes from byte {offset} on, which are not in a block of {block_bytes} bytes")
    return size


def get(
    digest: NamespaceDigest,
    chain: Chain,
    first_block: int,
    block_count: int,
    lease: bytes,
    part: tuple[int, int] | None,
) -> bytes:
    """A GetBlocksRequest, for a range and a part that have been checked."""
    offset, size = part if part is not None else (0, 0)
    return block_store_pb2.GetBlocksRequest(
        namespace=digest,
        chain=chain.first(first_block + block_count).data,
        first_block=first_block,
        block_count=block_count,
        lease=lease,
        part_offset_bytes=offset,
        part_bytes=size,
    ).SerializeToString()


def put_header(
    digest: NamespaceDigest, chain: Chain, first_block: int, block_count: int, traffic_class: str
) -> block_store_pb2.PutBlocksHeader:
    """A PutBlocksHeader."""
    block_range(chain, first_block, block_count)
    return block_store_pb2.PutBlocksHeader(
        namespace=digest,
        chain=chain.first(first_block + block_count).data,
        first_block=first_block,
        block_count=block_count,
        traffic_class=_traffic_class(traffic_class),
    )


def delete(digest: NamespaceDigest, chain: Chain, first_block: int, block_count: int) -> bytes:
    """A DeleteBlocksRequest, for a range that has been checked."""
    return block_store_pb2.DeleteBlocksRequest(
        namespace=digest,
        chain=chain.first(first_block + block_count).data,
        first_block=first_block,
        block_count=block_count,
    ).SerializeToString()


def get_state(digest: NamespaceDigest, prefix_hash: bytes, name: str, traffic_class: str) -> bytes:
    """A GetStateRequest."""
    _check_state_name(prefix_hash, name)
    return block_store_pb2.GetStateRequest(
        namespace=digest, prefix_hash=prefix_hash, name=name, traffic_class=_traffic_class(traffic_class)
    ).SerializeToString()


def put_state_header(
    digest: NamespaceDigest, prefix_hash: bytes, name: str, size_bytes: int, traffic_class: str
) -> block_store_pb2.PutStateHeader:
    """A PutStateHeader without its checksum."""
    _check_state_name(prefix_hash, name)
    if not 1 <= size_bytes <= MAX_STATE_BYTES:
        raise ValueError(f"data has {size_bytes} bytes, a state object has 1 to {MAX_STATE_BYTES}")
    return block_store_pb2.PutStateHeader(
        namespace=digest,
        prefix_hash=prefix_hash,
        name=name,
        traffic_class=_traffic_class(traffic_class),
        size_bytes=size_bytes,
    )


def _traffic_class(name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"traffic_class is {name!r}, wanted is a name or '' for the server's default")
    return name


def _lease(lease_s: float) -> Duration:
    if not isinstance(lease_s, int | float) or isinstance(lease_s, bool):
        raise TypeError(f"lease_s is {lease_s!r}, wanted is a number of seconds")
    if not math.isfinite(lease_s) or not 0 < lease_s <= _MAX_LEASE_S:
        raise ValueError(f"lease_s is {lease_s!r}, wanted is more than 0 and at most {_MAX_LEASE_S:g} seconds")
    lease = Duration()
    lease.FromNanoseconds(round(lease_s * 1e9))
    return lease


def _check_state_name(prefix_hash: bytes, name: str) -> None:
    if not isinstance(prefix_hash, bytes) or len(prefix_hash) != HASH_BYTES:
        raise ValueError(f"prefix_hash is {prefix_hash!r}, wanted are {HASH_BYTES} bytes, such as chain[i]")
    if not isinstance(name, str):
        raise TypeError(f"name is {name!r}, wanted is text")
    if not 1 <= len(name.encode()) <= MAX_STATE_NAME_BYTES:
        raise ValueError(f"name has {len(name.encode())} bytes, wanted are 1 to {MAX_STATE_NAME_BYTES}")


def _check_integer(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, wanted is an integer")
