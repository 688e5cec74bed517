"""The kvstore client: what an inference worker installs.

    from kvstore_client import ClientConfig, KVStoreClient, NamespaceSpec

    client = KVStoreClient(ClientConfig(target="127.0.0.1:7420"))
    namespace = client.namespace(NamespaceSpec(model=..., revision=..., engine=..., layout=..., kv_dtype=..., block_bytes=...))
    chain = namespace.chain(token_ids)
    match = namespace.match(chain)
    result = namespace.get(chain, out, block_count=match.hit_length_blocks, lease=match.lease)

AsyncKVStoreClient is the same for asyncio: its calls are awaited.

Importing it starts nothing: no channel, no thread, no event loop.
"""

from kvstore_api.chain import Chain, PrefixHash
from kvstore_api.namespace import (
    KvGroup,
    KvGroupKind,
    NamespaceDigest,
    NamespaceSpec,
    NamespaceSpecError,
    ParallelDimension,
    ReplayMode,
)
from kvstore_api.results import PutResult, PutStatus
from kvstore_api.resume import ResumePlan
from kvstore_client.aio import AsyncKVStoreClient, AsyncNamespaceHandle
from kvstore_client.client import KVStoreClient, NamespaceHandle
from kvstore_client.config import ClientConfig
from kvstore_client.errors import ClientClosedError, KVStoreConfigError
from kvstore_client.hashing import TokenIdError, prefix_hashes, prefix_seed
from kvstore_client.layout import BlockLayout, BlockLayoutError, BlockPart
from kvstore_client.model_config import ModelConfigError
from kvstore_client.model_kv import ModelKv, model_kv_layout
from kvstore_client.presets import Preset, UnknownPresetError, preset, preset_names
from kvstore_client.results import DeleteResult, Failure, GetResult, MatchResult, PutReport, StateResult
from kvstore_client.stats import ClientStats

__all__ = [
    "AsyncKVStoreClient",
    "AsyncNamespaceHandle",
    "BlockLayout",
    "BlockLayoutError",
    "BlockPart",
    "Chain",
    "ClientClosedError",
    "ClientConfig",
    "ClientStats",
    "DeleteResult",
    "Failure",
    "GetResult",
    "KVStoreClient",
    "KVStoreConfigError",
    "KvGroup",
    "KvGroupKind",
    "MatchResult",
    "ModelConfigError",
    "ModelKv",
    "NamespaceDigest",
    "NamespaceHandle",
    "NamespaceSpec",
    "NamespaceSpecError",
    "ParallelDimension",
    "PrefixHash",
    "Preset",
    "PutReport",
    "PutResult",
    "PutStatus",
    "ReplayMode",
    "ResumePlan",
    "StateResult",
    "TokenIdError",
    "UnknownPresetError",
    "model_kv_layout",
    "prefix_hashes",
    "prefix_seed",
    "preset",
    "preset_names",
]
