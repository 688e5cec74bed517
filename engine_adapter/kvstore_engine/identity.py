"""What the thin engine's KV is interchangeable with: its namespace in a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore_client import NamespaceSpec, NamespaceSpecError

if TYPE_CHECKING:
    from kvstore_engine.kv_pool import KVPool

ENGINE_NAME = "kvstore-thin"


def namespace_spec(model: str, fingerprint: str, pool: KVPool, *, tenant: str = "default") -> NamespaceSpec:
    """The namespace of a model served from `pool`.

    Args:
        model: its name, for people.
        fingerprint: what tells its weights from all others, such as their SHA-256 (`gguf_loader.weights_fingerprint`):
            the namespace's revision.
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
    )
    spec.validate()
    return spec
