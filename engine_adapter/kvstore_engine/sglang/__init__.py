"""The plug for SGLang's hierarchical cache: `--hicache-storage-backend dynamic` loads `KVStoreHiCache` from here."""

from kvstore_engine.sglang.hicache import KVStoreHiCache

__all__ = ["KVStoreHiCache"]
