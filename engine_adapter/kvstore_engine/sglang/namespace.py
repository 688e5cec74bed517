"""The namespace of SGLang's pages: everything beside the tokens that their bytes depend on."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any, Final

import sglang
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.runtime_context import get_server_args

from kvstore_client import KVStoreConfigError, NamespaceSpec, ParallelDimension
from kvstore_engine.model_identity import config_digest, model_revision

if TYPE_CHECKING:
    from kvstore_engine.plug_settings import PlugSettings
    from kvstore_engine.sglang.host_pages import HostPages

# The server's arguments that change what its layers compute. The type of the KV has a field of its own.
_CONFIG: Final = (
    "context_length",
    "dtype",
    "json_model_override_args",
    "load_format",
    "model_impl",
    "quantization",
    "quantization_param_path",
)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


def namespace_of(settings: PlugSettings, config: Any, pages: HostPages) -> NamespaceSpec:
    """Raises: KVStoreConfigError: the weights, or an adapter's, cannot be told from others; or the way is not supported."""
    _check(config)
    arguments = _server_arguments()
    return NamespaceSpec(
        model=settings.model or config.model_name or getattr(arguments, "model_path", "") or "",
        revision=_revision(settings, config, arguments),
        # Another release may order a page's bytes differently under the same name of a layout.
        engine=f"sglang {sglang.__version__}",
        layout=pages.layout,
        kv_dtype=_kv_dtype(pages, arguments),
        block_bytes=pages.page_bytes,
        tenant=settings.tenant,
        parallel=_parallel(config),
        labels=_labels(arguments),
    )


def _check(config: Any) -> None:
    if config.should_split_heads:
        raise KVStoreConfigError("INVALID_CONFIG", "pages that are split by heads ('tp_lcm_size') are not supported")
    if config.dcp_size > 1:
        raise KVStoreConfigError("INVALID_CONFIG", f"--dcp-size {config.dcp_size} is not supported")


def _server_arguments() -> Any:
    """SGLang's arguments as it runs with them. None where its parts run without a server."""
    try:
        return resolved_view(get_server_args())
    except ValueError:
        return None


def _revision(settings: PlugSettings, config: Any, arguments: Any) -> str:
    model = getattr(arguments, "model_path", None) or config.model_name or ""
    asked = getattr(arguments, "revision", None)
    if settings.revision.strip() or not asked:
        return model_revision(model, settings.revision)
    if _COMMIT.fullmatch(asked):
        return str(asked)
    raise KVStoreConfigError(
        "IDENTITY_UNKNOWN",
        f"--revision {asked} of model {model!r} is a name that can come to mean other weights; set 'revision' in the extra "
        "configuration, or start SGLang with a commit or a directory",
    )


def _kv_dtype(pages: HostPages, arguments: Any) -> str:
    """The pool keeps every kind of FP8 as plain bytes. Which it is follows from the argument and the weights."""
    if pages.dtype != "uint8":
        return pages.dtype
    argument = getattr(arguments, "kv_cache_dtype", None)
    if argument is None:
        raise KVStoreConfigError(
            "IDENTITY_UNKNOWN", "the KV is kept as bytes, and SGLang does not say of which type it is"
        )
    return f"uint8 {argument}"


def _parallel(config: Any) -> tuple[ParallelDimension, ...]:
    """Which part of the KV these pages hold. With MLA the ranks of one stage hold the same, and one of them saves for all."""
    dimensions = [
        ParallelDimension("pp", config.pp_rank, config.pp_size),
        ParallelDimension("cp", config.attn_cp_rank, config.attn_cp_size),
    ]
    if not config.is_mla_model:
        dimensions.append(ParallelDimension("tp", config.tp_rank, config.tp_size))
    return tuple(dimensions)


def _labels(arguments: Any) -> dict[str, str]:
    if arguments is None:
        return {}
    labels = {"config": config_digest({name: getattr(arguments, name, None) for name in _CONFIG})}
    if adapters := getattr(arguments, "lora_paths", None):
        labels["adapters"] = _adapters_digest(adapters)
    return labels


def _adapters_digest(adapters: Any) -> str:
    """The weights of the adapters that SGLang starts with, of which it knows name and path alone.

    One that is loaded later has a random name there, and shares KV with nothing.
    """
    found = sorted((_path_of(adapter), model_revision(_path_of(adapter), "")) for adapter in adapters)
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def _path_of(adapter: Any) -> str:
    if isinstance(adapter, str):
        return adapter.partition("=")[2] or adapter
    return str(adapter["lora_path"] if isinstance(adapter, dict) else adapter.lora_path)
