"""The plug for LMCache: an L2 adapter plug-in that keeps LMCache's objects in a kvstore. See docs/engines/lmcache.md."""

from kvstore_engine.lmcache.adapter import KVStoreL2Adapter

__all__ = ["KVStoreL2Adapter"]
