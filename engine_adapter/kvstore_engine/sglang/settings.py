"""The extra configuration of SGLang's storage backend, as far as it is this plug's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvstore_client import KVStoreConfigError
from kvstore_engine.plug_settings import PlugSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

# SGLang's own: the first four load the plug, the fifth it adds by itself. The others it takes out before the plug sees them, but
# not where a decoding server saves what it has computed.
_OF_SGLANG: Final = frozenset(
    {"backend_name", "module_path", "class_name", "interface_v1", "file_storage_path"}
    | {
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
    }
)
# What SGLang decides. A setting without an effect is worse than an unknown one.
_WITHOUT_EFFECT: Final = {
    "min_hit_tokens": "SGLang itself decides which hits are loaded, by its key 'prefetch_threshold'",
    "max_pending_save_bytes": "SGLang itself keeps what is to be saved, in its host memory",
}


def read_settings(extra_config: Mapping[str, Any]) -> PlugSettings:
    """Raises: KVStoreConfigError: a key is unknown, has no effect, or has an impossible value; or SGLang's own is missing."""
    for key, why in _WITHOUT_EFFECT.items():
        if key in extra_config:
            raise KVStoreConfigError("INVALID_CONFIG", f"{key!r} has no effect in SGLang: {why}")
    settings = PlugSettings.read(extra_config, foreign=_OF_SGLANG)
    if not extra_config.get("interface_v1"):
        raise KVStoreConfigError(
            "INVALID_CONFIG",
            'the extra configuration lacks "interface_v1": 1, without which SGLang would copy each page once more',
        )
    return settings
