"""State objects beside a chain: what names one, and at which ends of a chain one is alive."""

from __future__ import annotations

from collections import defaultdict
from hashlib import sha256
from typing import TYPE_CHECKING

from kvstore.errors import InvalidArgumentError
from kvstore.index import state_keys
from kvstore_api import encoding
from kvstore_api.limits import HASH_BYTES, MAX_STATE_NAME_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.types import NamespaceId
    from kvstore_api.chain import Chain

_DOMAIN = encoding.field(0, b"kvstore/state/1")
# Most often the last end has one. Where none has, all of a long hit's ends are asked for, in few look-ups.
_FIRST_ENDS = 4
_ENDS_GROWTH = 16


def state_hash(prefix_hash: bytes, name: str) -> bytes:
    """Names a state object: 32 bytes over the prefix hash it stands beside, and its name there. Raises: InvalidArgumentError."""
    if len(prefix_hash) != HASH_BYTES:
        raise InvalidArgumentError(f"prefix hash has {len(prefix_hash)} bytes, not {HASH_BYTES}")
    size = len(name.encode())
    if not 1 <= size <= MAX_STATE_NAME_BYTES:
        raise InvalidArgumentError(f"state name has {size} bytes, allowed are 1 to {MAX_STATE_NAME_BYTES}")
    return _state_hashes([prefix_hash], name)[0]


class ChainStates:
    """Whether a state object is alive at an end of a chain: looks up many ends at once, as a plan asks from the last one down.

    Args:
        alive: whether what the index has under those keys is alive, in their order.
    """

    def __init__(
        self, namespace_id: NamespaceId, chain: Chain, alive: Callable[[Sequence[bytes]], Sequence[bool]]
    ) -> None:
        self._namespace_id, self._chain, self._alive = namespace_id, chain, alive
        self._known: defaultdict[str, dict[int, bool]] = defaultdict(dict)
        self._next_ends: dict[str, int] = {}

    def __call__(self, blocks: int, name: str) -> bool:
        """Whether one of that name is alive at the end of the chain's first `blocks` blocks, at least 1."""
        known = self._known[name]
        if blocks not in known:
            self._look_up(blocks, name)
        return known[blocks]

    def _look_up(self, blocks: int, name: str) -> None:
        count = min(self._next_ends.get(name, _FIRST_ENDS), blocks)
        self._next_ends[name] = count * _ENDS_GROWTH
        alive = self._alive(self._keys(blocks, count, name))
        self._known[name].update(zip(range(blocks - count + 1, blocks + 1), alive, strict=True))

    def _keys(self, blocks: int, count: int, name: str) -> list[bytes]:
        """Index keys of the state objects at the last `count` of the ends of so many blocks, ascending."""
        data = self._chain.data
        starts = range((blocks - count) * HASH_BYTES, blocks * HASH_BYTES, HASH_BYTES)
        hashes = [data[start : start + HASH_BYTES] for start in starts]
        return state_keys(self._namespace_id, hashes, _state_hashes(hashes, name))


def _state_hashes(prefix_hashes: Sequence[bytes], name: str) -> list[bytes]:
    """A match may ask for hundreds, so what they share is encoded once."""
    head = _DOMAIN + encoding.field(1, bytes(HASH_BYTES))[:-HASH_BYTES]
    tail = encoding.text_field(2, name)
    return [sha256(head + prefix_hash + tail).digest() for prefix_hash in prefix_hashes]
