"""Models whose KV is known by name: the namespace and the layout of its blocks, computed from a configuration shipped here.

    known = preset("deepseek-v4.1-flash", revision="…")
    namespace = client.namespace(known.spec)
    offset_bytes, size_bytes = known.layout.range_of(8, 8)

A preset is a file in `model_configs/`, named after the model: a config.json with the keys that `model_kv_layout` reads.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from kvstore_api.namespace import NamespaceSpec, ReplayMode
from kvstore_client.model_kv import VLLM, model_kv_layout

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from kvstore_client.layout import BlockLayout
    from kvstore_client.model_kv import ModelKv

_SUFFIX = ".json"


class UnknownPresetError(ValueError):
    """No preset has that name; the message lists those that exist."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A known model: `spec` for `KVStoreClient.namespace`, and `kv`, what its sizes follow from."""

    spec: NamespaceSpec
    kv: ModelKv

    @property
    def layout(self) -> BlockLayout:
        """Which bytes of a block belong to which layers."""
        return self.kv.layout

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of one window snapshot, a state object beside a prefix hash."""
        return self.kv.snapshot_bytes


def preset_names() -> list[str]:
    """The models that `preset` knows."""
    files = (entry.name for entry in _directory().iterdir())
    return sorted(name.removesuffix(_SUFFIX) for name in files if name.endswith(_SUFFIX))


def preset_config(name: str) -> dict[str, Any]:
    """The configuration that a preset is computed from. Raises: UnknownPresetError: there is none of that name."""
    known = preset_names()
    if name not in known:
        close = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UnknownPresetError(f"no preset is called {name!r}; {hint}known are: {', '.join(known)}")
    config: dict[str, Any] = json.loads((_directory() / f"{name}{_SUFFIX}").read_text(encoding="utf-8"))
    return config


def preset(
    name: str,
    *,
    revision: str,
    tenant: str = "default",
    kv_dtype: str | None = None,
    engine: str = VLLM,
    replay: ReplayMode = ReplayMode.BOUNDED,
    padding_bytes: int | None = None,
) -> Preset:
    """The namespace and the block layout of a known model.

    Args:
        name: one of `preset_names()`.
        revision: the weights' revision or fingerprint. It has no default: under a wrong one, other weights' KV would match.
        kv_dtype, engine, padding_bytes: as for `model_kv_layout`.
        replay: how window KV comes back after a hit: BOUNDED, EXACT or SNAPSHOT.
    Raises:
        UnknownPresetError: there is none of that name.
        ModelConfigError: the number format is none of the model's, or the engine's padding is not known.
        NamespaceSpecError: the revision, tenant or replay rule is impossible.
    """
    kv = model_kv_layout(preset_config(name), kv_dtype, engine=engine, padding_bytes=padding_bytes)
    spec = NamespaceSpec(
        model=name,
        revision=revision,
        engine=engine,
        layout=kv.layout_name,
        kv_dtype=kv.kv_dtype,
        block_bytes=kv.block_bytes,
        tenant=tenant,
        groups=kv.groups(replay),
    )
    spec.validate()
    return Preset(spec, kv)


def _directory() -> Traversable:
    return resources.files(__package__) / "model_configs"
