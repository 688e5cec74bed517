"""What the plug is told in `adapter_params`: the keys that all plugs know, and LMCache's own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvstore_api.limits import BLOCK_TOKENS
from kvstore_client import KVStoreConfigError
from kvstore_engine.model_identity import WeightsWatch, model_revision
from kvstore_engine.plug_settings import PlugSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

LMCACHE_CHUNK_SIZE: Final = 256  # LMCache's default
_OWN: Final = frozenset({"lmcache_model", "chunk_size", "hash_algorithm", "kv_dtype"})

# LMCache's hashes that name tokens for sure. Whether their first link is the same in every process.
_HASHES: Final = {"blake3": True, "sha256": False, "sha256_cbor": False}


@dataclass(frozen=True, slots=True)
class LMCacheSettings:
    """Settings of the plug, checked.

    Attributes:
        plug: what all plugs know.
        revision: what tells the weights from all others.
        lmcache_model: the model's name in LMCache's keys, which is what its engine calls it; `plug.model` if not given.
        chunk_size: tokens of an object, as in `lmcache server --chunk-size`.
        hash_algorithm: as in `lmcache server --hash-algorithm`.
        kv_dtype: what the numbers of the KV are, if their type in memory does not say it; empty if it does.
        weights: the files that the revision was found from; None if it was given.
    """

    plug: PlugSettings
    revision: str
    lmcache_model: str
    chunk_size: int
    hash_algorithm: str
    kv_dtype: str
    weights: WeightsWatch | None

    @property
    def pieces(self) -> int:
        """Blocks of the store that an object makes."""
        return self.chunk_size // BLOCK_TOKENS

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> LMCacheSettings:
        """Raises: KVStoreConfigError: a key is unknown or its value impossible, or the weights cannot be told from others."""
        plug = PlugSettings.read(given, foreign=_OWN)
        if not plug.model:
            raise _refused("model is not set, wanted is the model's name in the store")
        lmcache_model = _text(given, "lmcache_model", plug.model)
        weights = None if plug.revision.strip() else WeightsWatch(lmcache_model)
        return cls(
            plug,
            model_revision(lmcache_model, plug.revision),
            lmcache_model,
            _chunk_size(given.get("chunk_size", LMCACHE_CHUNK_SIZE)),
            _hash_algorithm(_text(given, "hash_algorithm", "blake3")),
            _text(given, "kv_dtype", ""),
            weights,
        )


def _chunk_size(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0 or value % BLOCK_TOKENS:
        raise _refused(
            f"chunk_size is {value!r}, wanted is a multiple of {BLOCK_TOKENS}, the tokens of a block of the store; "
            f"start LMCache with --chunk-size {LMCACHE_CHUNK_SIZE} or another multiple, and say the same here"
        )
    return value


def _hash_algorithm(name: str) -> str:
    if name not in _HASHES:
        known = ", ".join(_HASHES)
        raise _refused(
            f"hash_algorithm is {name!r}, whose values can collide or differ per process; wanted is one of: {known}"
        )
    if not _HASHES[name] and not os.environ.get("PYTHONHASHSEED", "").isdecimal():
        raise _refused(
            f"hash_algorithm is {name!r}, which LMCache seeds anew in each process, so that none could use what another stored; "
            "set PYTHONHASHSEED to the same number for all of them, or use blake3"
        )
    return name


def _text(given: Mapping[str, Any], name: str, default: str) -> str:
    value = given.get(name, default)
    if not isinstance(value, str):
        raise _refused(f"{name} is {value!r}, wanted is text")
    return value or default


def _refused(detail: str) -> KVStoreConfigError:
    return KVStoreConfigError("INVALID_CONFIG", detail)
