"""What names LMCache's objects in a store: a namespace for all that must agree, and a chain link for the rest.

LMCache's key has: chunk hash (of all tokens so far), model name, KV rank, object group, salt. It lacks revision of the weights,
number format, shape, LMCache's own version. Hash and salt are the object's name here; everything else is in the namespace.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvstore_api import encoding
from kvstore_api.limits import HASH_BYTES, MAX_BLOCK_BYTES
from kvstore_client import NamespaceSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore_engine.lmcache.settings import LMCacheSettings

_DOMAIN: Final = b"kvstore/lmcache/1"
_PIECE_BYTES: Final = 2
NAME_BYTES: Final = HASH_BYTES - _PIECE_BYTES  # 240 bits of a cryptographic hash
_LEAST_HASH_BYTES: Final = 16  # Python's built-in hash, LMCache's fallback, has 8 and collides
_BYTES_ONLY: Final = frozenset(
    {"uint8", "int8"}
)  # how engines keep numbers that have no type of their own, such as FP8's kinds
_LONGEST_LAYOUT: Final = 1000  # characters


@dataclass(frozen=True, slots=True)
class Layout:
    """The shapes and number types of one object's parts, in order."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]  # as torch names them, such as "bfloat16"
    size_bytes: int

    @classmethod
    def of(cls, shapes: Sequence[Any], dtypes: Sequence[Any]) -> Layout:
        """Of torch's sizes and types, as LMCache has them."""
        size_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
        names = tuple(str(dtype).removeprefix("torch.") for dtype in dtypes)
        return cls(tuple(tuple(shape) for shape in shapes), names, size_bytes)

    @classmethod
    def of_object(cls, memory_object: Any) -> Layout:  # noqa: ANN401 - LMCache's MemoryObj
        """Of one of LMCache's objects in memory."""
        meta = memory_object.metadata
        return cls.of(meta.shapes or [meta.shape], meta.dtypes or [meta.dtype])

    def __str__(self) -> str:
        parts = zip(self.dtypes, self.shapes, strict=True)
        return ",".join(f"{dtype}[{'x'.join(map(str, shape))}]" for dtype, shape in parts)


@dataclass(frozen=True, slots=True)
class Kind:
    """What objects have in common that can be interchanged: the part of their keys that is in the namespace."""

    lmcache_model: str
    kv_rank: int
    object_group: int
    layout: Layout

    @classmethod
    def of(cls, key: Any, layout: Layout) -> Kind:  # noqa: ANN401 - LMCache's ObjectKey
        """The kind of the object with this key and layout."""
        return cls(key.model_name, key.kv_rank, key.object_group_id, layout)

    def refusal(self, settings: LMCacheSettings) -> str:
        """Why such objects are not kept: empty if they are."""
        if self.lmcache_model != settings.lmcache_model:
            return f"LMCache's key is of model {self.lmcache_model!r}, and this plug keeps {settings.lmcache_model!r}"
        if not all(settings.chunk_size in shape for shape in self.layout.shapes):
            return (
                f"chunk_size is {settings.chunk_size}, but LMCache's objects are {self.layout}, which have not so many tokens; "
                "set chunk_size to that of `lmcache server`, and leave its serde off"
            )
        if not settings.kv_dtype and _BYTES_ONLY & set(self.layout.dtypes):
            return f"the KV is {self.layout}, which does not say what its numbers are; set kv_dtype, such as 'fp8_e4m3'"
        return self._refusal_of_size(settings.pieces)

    def _refusal_of_size(self, pieces: int) -> str:
        size_bytes = self.layout.size_bytes
        if not size_bytes or size_bytes % pieces:
            return f"objects of {size_bytes} bytes do not make {pieces} blocks of equal size"
        if size_bytes // pieces > MAX_BLOCK_BYTES:
            return f"objects of {size_bytes} bytes make {pieces} blocks of more than {MAX_BLOCK_BYTES} bytes"
        return ""

    def spec(self, settings: LMCacheSettings, lmcache_version: str) -> NamespaceSpec:
        """The namespace of these objects' blocks."""
        return NamespaceSpec(
            model=settings.plug.model,
            revision=settings.revision,
            engine="lmcache",
            layout=f"lmcache-{lmcache_version} {_shortened(str(self.layout))}",
            kv_dtype=settings.kv_dtype or ",".join(sorted(set(self.layout.dtypes))),
            block_bytes=self.layout.size_bytes // settings.pieces,
            tenant=settings.plug.tenant,
            labels={
                "lmcache_model": self.lmcache_model,
                "kv_rank": f"{self.kv_rank:#010x}",  # number and count of the ranks, packed by LMCache
                "object_group": str(self.object_group),
                "chunk_size": str(settings.chunk_size),
                "hash_algorithm": settings.hash_algorithm,
            },
        )


def object_name(key: Any) -> bytes | None:  # noqa: ANN401 - LMCache's ObjectKey
    """Names an object in its namespace: 30 bytes. None if the key's hash is too short to tell contents apart."""
    if len(key.chunk_hash) < _LEAST_HASH_BYTES:
        return None
    fields = (encoding.field(0, _DOMAIN), encoding.field(1, key.chunk_hash), encoding.text_field(2, key.cache_salt))
    return hashlib.sha256(b"".join(fields)).digest()[:NAME_BYTES]


def chain_links(names: Sequence[bytes], pieces: int) -> bytes:
    """The links of a chain that are the objects' blocks, in order."""
    suffixes = [piece.to_bytes(_PIECE_BYTES, "big") for piece in range(pieces)]
    return b"".join(name + suffix for name in names for suffix in suffixes)


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST_LAYOUT:
        return text
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
