"""A request of vLLM's as its KV sees it: which tokens, and what else it depends on."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvstore_api.limits import BLOCK_TOKENS, HASH_BYTES
from kvstore_client import KVStoreConfigError, prefix_hashes, prefix_seed
from kvstore_engine.model_identity import weights_fingerprint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.v1.request import Request

    from kvstore_engine.vllm.messages import WorkerPlace

# In a request's `kv_transfer_params`: what its KV is kept for.
TRAFFIC_CLASS_KEY: Final = "kvstore_traffic_class"

_LOGGER = logging.getLogger("kvstore_engine.vllm")


def has_name(request: Request, *, media_have_names: bool = True) -> bool:
    """Whether the request's KV follows from token ids and the names of its images, for good.

    Not for embeddings given instead of them, nor for an input that is still being written, whose tokens may be replaced; nor with
    images that `media_have_names` says have none.
    """
    if request.mm_features and not media_have_names:
        return False
    return request.prompt_embeds is None and request.prompt_token_ids is not None and not request.resumable


def traffic_class(request: Request, default: str) -> str:
    """Why the request's KV is kept."""
    value = (request.kv_transfer_params or {}).get(TRAFFIC_CLASS_KEY, default)
    return value if isinstance(value, str) else default


class Adapters:
    """Which LoRA adapters vLLM has. It reads one's files once for its number, whatever becomes of them later."""

    def __init__(self) -> None:
        self._seen: dict[int, bytes] = {}

    def identity_of(self, request: Request) -> bytes | None:
        """The identity of the request's LoRA: its name and its weights; empty without one. Reads its files the first time.

        Returns: None when its weights cannot be told from others of that name, or its files have changed since they were first
            used: nobody knows whether vLLM has read them anew. Any thread may call it.
        """
        lora = request.lora_request
        if lora is None:
            return b""
        try:
            fingerprint = weights_fingerprint(Path(lora.lora_path))
        except (OSError, KVStoreConfigError) as error:
            _LOGGER.warning("requests with LoRA %r do without the store: %s", lora.lora_name, error)
            return None
        identity = b"\0".join((fingerprint.encode(), _bytes_of(lora.lora_name)))
        if self._seen.setdefault(lora.lora_int_id, identity) != identity:
            _LOGGER.warning(
                "requests with LoRA %r do without the store: its files are not those it began with", lora.lora_name
            )
            return None
        return identity


@dataclass
class Chains:
    """The prefix hashes of one request, for each worker's namespace; they grow with the request."""

    seeds: dict[WorkerPlace, bytes]
    data: dict[WorkerPlace, bytes] = field(default_factory=dict)

    @classmethod
    def of(
        cls, request: Request, namespaces: Mapping[WorkerPlace, bytes], adapter: bytes, weights: bytes = b""
    ) -> Chains:
        """Those of a request, of no block yet. `weights`: what tells the model's present weights from its first ones."""
        salt = _bytes_of(request.cache_salt or "")
        adapter += b"\0" + weights if weights else b""
        seeds = {place: prefix_seed(digest, salt=salt, adapter=adapter) for place, digest in namespaces.items()}
        return cls(seeds, dict.fromkeys(seeds, b""))

    @property
    def blocks(self) -> int:
        """How many blocks have hashes."""
        return min((len(data) for data in self.data.values()), default=0) // HASH_BYTES

    def grow(self, request: Request, blocks: int) -> None:
        """Hash up to so many blocks, which the request's tokens must fill."""
        first = self.blocks
        if blocks <= first:
            return
        tokens = request.all_token_ids[first * BLOCK_TOKENS : blocks * BLOCK_TOKENS]
        extra = _extra_keys(request, first, blocks)
        grown = {}
        for place, data in self.data.items():
            before = data[: first * HASH_BYTES]
            seed = before[-HASH_BYTES:] or self.seeds[place]
            grown[place] = before + prefix_hashes(seed, tokens, extra_keys=extra).data
        self.data = grown

    def first(self, blocks: int) -> dict[WorkerPlace, bytes]:
        """Those of the first blocks."""
        return {place: data[: blocks * HASH_BYTES] for place, data in self.data.items()}


def _extra_keys(request: Request, first: int, end: int) -> dict[int, Sequence[bytes]]:
    """What the KV of blocks [first, end) depends on beside tokens: images and the like, with their place in the block.

    Numbered from 0, as `prefix_hashes` numbers blocks. An item that began in an earlier block counts in each it reaches.
    """
    keys: dict[int, list[bytes]] = {}
    for feature in request.mm_features:
        start, length = feature.mm_position.offset, feature.mm_position.length
        for block in range(max(first, start // BLOCK_TOKENS), min(end, -(-(start + length) // BLOCK_TOKENS))):
            keys.setdefault(block - first, []).append(_mm_key(feature.identifier, start - block * BLOCK_TOKENS))
    return dict(keys)


def _mm_key(identifier: Any, offset: int) -> bytes:  # noqa: ANN401 - vLLM's hash of the item, or the user's name of it
    return _bytes_of(f"{offset}:{identifier}")


def _bytes_of(text: str) -> bytes:
    """JSON may have half of a surrogate pair in a text, which vLLM takes for a name as good as others."""
    return text.encode(errors="surrogatepass")
