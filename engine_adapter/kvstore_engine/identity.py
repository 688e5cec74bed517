"""What the thin engine's KV is interchangeable with: its namespace in a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore_client import KvGroup, KvGroupKind, NamespaceSpec, NamespaceSpecError, ReplayMode

if TYPE_CHECKING:
    from kvstore_engine.kv_pool import KVPool

ENGINE_NAME = "kvstore-thin"
# The KV groups of a model with window layers.
FULL_GROUP = "full"
WINDOW_GROUP = "window"


def namespace_spec(
    model: str,
    fingerprint: str,
    pool: KVPool,
    *,
    tenant: str = "default",
    replay: ReplayMode = ReplayMode.BOUNDED,
    replay_tokens: int = 0,
) -> NamespaceSpec:
    """The namespace of a model served from `pool`.

    A model with window layers has one for each `replay`: after a bounded replay an engine computes, and stores, KV that
    differs a little from what a cold run computes.

    Args:
        model: its name, for people.
        fingerprint: what tells its weights from all others, such as their SHA-256 (`gguf_loader.weights_fingerprint`):
            the namespace's revision.
        replay: how window layers get their KV back after a hit; without such layers it has no meaning.
        replay_tokens: the least number of tokens to replay; the window if 0.
    Raises: NamespaceSpecError: model or fingerprint is empty, or the pool's blocks are too large for a store.
    """
    if not fingerprint.strip():
        raise NamespaceSpecError(
            f"the weights of model {model!r} have no fingerprint: other weights under the same name would be served "
            "this one's KV; give e.g. the SHA-256 of the weights file"
        )
    spec = NamespaceSpec(
        model=model,
        revision=fingerprint,
        engine=ENGINE_NAME,
        layout=pool.layout,
        kv_dtype=pool.dtype_name,
        block_bytes=pool.block_bytes,
        tenant=tenant,
        groups=_groups(pool, replay, replay_tokens) if pool.window_layers else (),
    )
    spec.validate()
    return spec


def _groups(pool: KVPool, replay: ReplayMode, replay_tokens: int) -> tuple[KvGroup, ...]:
    window = KvGroup(
        WINDOW_GROUP,
        KvGroupKind.SLIDING_WINDOW,
        pool.window_layers,
        window_tokens=pool.window_tokens,
        replay_rule=replay,
        replay_tokens=replay_tokens,
    )
    return (KvGroup(FULL_GROUP, KvGroupKind.FULL, pool.full_layers), window)
