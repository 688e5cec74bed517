"""Lease tokens: where matched blocks are, until when their files exist, and a proof that this store said so.

Stateless: nothing is kept for a lease, so nothing can leak. A token that is old, foreign or forged is no error; the get that
brought it looks its chain up instead.

    ┌─────────┬─────────────┬──────────────┬───────────┬───────────┬─────────────────────────────────┬───────────────┐
    │ version │ deadline_ms │ namespace_id │ run count │ last hash │ runs of (segment u64, slot u32, │ BLAKE2b keyed │
    │ u8      │ u64         │ u32          │ u32       │ 8 B       │ count u32)                      │ 16 B          │
    └─────────┴─────────────┴──────────────┴───────────┴───────────┴─────────────────────────────────┴───────────────┘

The last hash (its first 8 bytes) names the chain that was matched: for another one the token is no use, and the look-up is right.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import TYPE_CHECKING

import numpy as np

from kvstore.index import ADDR_DTYPE
from kvstore_api.limits import HASH_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

_VERSION = 1
_HEAD = struct.Struct("<BQII8s")
_RUN_DTYPE = np.dtype([("segment_id", "<u8"), ("slot", "<u4"), ("count", "<u4")])
_MAC_BYTES = 16


class LeaseMint:
    """Makes and checks tokens with the store's secret."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def make(self, namespace_id: int, chain: bytes, addrs: NDArray[np.void], deadline_s: float) -> bytes:
        """A token for blocks 0 … len(addrs) - 1 of a chain; runs of neighbouring slots are one entry each."""
        runs = _to_runs(addrs)
        last_hash = _last_hash(chain, len(addrs))
        body = _HEAD.pack(_VERSION, int(deadline_s * 1000), namespace_id, len(runs), last_hash) + runs.tobytes()
        return body + self._mac(body)

    def check(self, token: bytes, namespace_id: int, chain: bytes, now_s: float) -> NDArray[np.void] | None:
        """The addresses a token names that is valid for this chain (shape (hit_length,), ADDR_DTYPE), or None."""
        if len(token) < _HEAD.size + _MAC_BYTES or token[0] != _VERSION:
            return None
        body, mac = token[:-_MAC_BYTES], token[-_MAC_BYTES:]
        if not hmac.compare_digest(self._mac(body), mac):
            return None
        _, deadline_ms, owner, run_count, last_hash = _HEAD.unpack_from(body)
        if owner != namespace_id or now_s * 1000 > deadline_ms:
            return None
        addrs = _from_runs(np.frombuffer(body, dtype=_RUN_DTYPE, offset=_HEAD.size, count=run_count))
        # A get may ask for less than was matched, and then brings a shorter chain: its rows are checked one by one anyway.
        longer = len(chain) >= len(addrs) * HASH_BYTES
        return None if longer and _last_hash(chain, len(addrs)) != last_hash else addrs

    def _mac(self, body: bytes) -> bytes:
        return hashlib.blake2b(body, key=self._secret, digest_size=_MAC_BYTES, person=b"kvstore/lease/1").digest()


def _last_hash(chain: bytes, block_count: int) -> bytes:
    end = block_count * HASH_BYTES
    return chain[end - HASH_BYTES : end - HASH_BYTES + 8]


def _to_runs(addrs: NDArray[np.void]) -> NDArray[np.void]:
    segment_ids, slots = addrs["segment_id"], addrs["slot"].astype(np.int64)
    breaks = np.flatnonzero((segment_ids[1:] != segment_ids[:-1]) | (slots[1:] != slots[:-1] + 1)) + 1
    starts = np.concatenate(([0], breaks)) if len(addrs) else breaks
    runs = np.zeros(len(starts), dtype=_RUN_DTYPE)
    runs["segment_id"], runs["slot"] = segment_ids[starts], slots[starts]
    runs["count"] = np.diff(np.append(starts, len(addrs)))
    return runs


def _from_runs(runs: NDArray[np.void]) -> NDArray[np.void]:
    addrs = np.zeros(int(runs["count"].sum()), dtype=ADDR_DTYPE)
    addrs["segment_id"] = np.repeat(runs["segment_id"], runs["count"])
    first_of_run = np.concatenate(([0], np.cumsum(runs["count"])[:-1])).astype(np.int64)
    within = np.arange(len(addrs)) - np.repeat(first_of_run, runs["count"])
    addrs["slot"] = np.repeat(runs["slot"], runs["count"]) + within
    return addrs
