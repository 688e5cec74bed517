"""The namespace of SGLang's pages: everything beside the tokens that their bytes depend on."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import sglang
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.runtime_context import get_context, get_server_args

from kvstore_client import KVStoreConfigError, NamespaceSpec, ParallelDimension
from kvstore_engine.model_identity import config_digest, model_revision

if TYPE_CHECKING:
    from kvstore_engine.plug_settings import PlugSettings
    from kvstore_engine.sglang.host_pages import HostPages

# SGLang's arguments that change what its layers compute, or with which kernels. The type of the KV has a field of its own.
CONFIG: Final = """
    model_config_parser json_model_override_args decrypted_config_file model_impl context_length
    load_format model_loader_extra_config kt_weight_path kt_method kt_num_gpu_experts
    dtype quantization quantization_param_path modelopt_quant modelopt_checkpoint_restore_path rl_quant_profile
    enable_tf32_matmul enable_w4a4_mxfp4_megamoe flashinfer_mxfp4_moe_precision enable_quant_communications
    attention_backend prefill_attention_backend decode_attention_backend mm_attention_backend
    enable_hisparse hisparse_config dllm_algorithm dllm_algorithm_config rl_on_policy_target enable_deterministic_inference
    mm_process_config image_processor_backend disable_fast_image_processor enable_precise_embedding_interpolation
"""
# Formats in which nothing but the model's own files is read.
_OF_THE_FILES: Final = (
    "auto safetensors pt npcache gguf bitsandbytes mistral layered sharded_state instanttensor fastsafetensors"
)
# Arguments, and what they may be for all that decides about the KV to be in the model's own files.
PLAIN: Final[dict[str, tuple[Any, ...]]] = {
    "load_format": (None, *_OF_THE_FILES.split()),
    "weight_cache_mode": (None, "off"),
    "checkpoint_engine_wait_weights_before_ready": (None, False),
    "decrypted_config_file": (None,),
    "dllm_algorithm_config": (None,),
    "kt_weight_path": (None,),
    "modelopt_checkpoint_restore_path": (None,),
    "quantization_param_path": (None,),
    "rl_quant_profile": (None,),
}
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


def namespace_of(settings: PlugSettings, config: Any, pages: HostPages) -> NamespaceSpec:
    """Raises: KVStoreConfigError: the weights, or an adapter's, cannot be told from others; or the way is not supported."""
    _check(config)
    model = argument("model_path") or config.model_name or ""
    return NamespaceSpec(
        model=settings.model or config.model_name or model,
        revision=_revision(settings, model),
        # Another release may order a page's bytes differently under the same name of a layout.
        engine=f"sglang {sglang.__version__}",
        layout=pages.layout,
        kv_dtype=_kv_dtype(pages),
        block_bytes=pages.page_bytes,
        tenant=settings.tenant,
        parallel=_parallel(config),
        labels=_labels(),
    )


def argument(name: str) -> Any:
    """What SGLang runs with now. None too where its parts run without a server.

    Not from `get_server_args`, which stays what it was at the start when weights are exchanged.
    """
    try:
        return get_context().config_leaf(name)
    except ValueError:
        return None


def weights_in_use() -> tuple[Any, ...]:
    """Changes when SGLang has been given other weights, as far as it knows: not when they were handed over without a version."""
    return tuple(argument(name) for name in ("model_path", "load_format", "weight_version"))


def _check(config: Any) -> None:
    if config.should_split_heads:
        raise KVStoreConfigError("INVALID_CONFIG", "pages that are split by heads ('tp_lcm_size') are not supported")
    if config.dcp_size > 1:
        raise KVStoreConfigError("INVALID_CONFIG", f"--dcp-size {config.dcp_size} is not supported")


def _revision(settings: PlugSettings, model: str) -> str:
    if settings.revision.strip():
        return settings.revision
    asked, on_disk = argument("revision"), Path(model).exists()
    if asked and not on_disk and _COMMIT.fullmatch(asked) and not _exchanged():
        _check_plain(model)
        return str(asked)
    if asked and not on_disk:
        raise _unknown(
            f"--revision {asked} of model {model!r} is a name that can come to mean other weights",
            "or start SGLang with a commit or a directory",
        )
    if argument("model_path") and not argument("hicache_storage_backend"):
        raise _unknown(
            f"the files of model {model!r} may be others than those that SGLang has loaded before it was told of this backend",
            "or restart SGLang with it",
        )
    _check_plain(model)
    return model_revision(model, "", hub_cache=argument("download_dir"))


def _check_plain(model: str) -> None:
    for name, values in PLAIN.items():
        if (value := argument(name)) not in values:
            raise _unknown(
                f"the files of model {model!r} alone do not say what SGLang computes with {name} {value!r}",
                "and change it with everything that this comes from",
            )


def _unknown(why: str, instead: str) -> KVStoreConfigError:
    return KVStoreConfigError("IDENTITY_UNKNOWN", f"{why}; set 'revision' in the extra configuration, {instead}")


def _exchanged() -> bool:
    """Whether the weights in use are from elsewhere than those that SGLang has started with."""
    try:
        return bool(argument("model_path") != resolved_view(get_server_args()).model_path)
    except ValueError:
        return False


def _kv_dtype(pages: HostPages) -> str:
    """The pool keeps every kind of FP8 as plain bytes. Which it is follows from the argument and the weights."""
    if pages.dtype != "uint8":
        return pages.dtype
    given = argument("kv_cache_dtype")
    if given is None:
        raise KVStoreConfigError(
            "IDENTITY_UNKNOWN", "the KV is kept as bytes, and SGLang does not say of which type it is"
        )
    return f"uint8 {given}"


def _parallel(config: Any) -> tuple[ParallelDimension, ...]:
    """Which part of the KV these pages hold. With MLA the ranks of one stage hold the same, and one of them saves for all."""
    dimensions = [
        ParallelDimension("pp", config.pp_rank, config.pp_size),
        ParallelDimension("cp", config.attn_cp_rank, config.attn_cp_size),
    ]
    if not config.is_mla_model:
        dimensions.append(ParallelDimension("tp", config.tp_rank, config.tp_size))
    return tuple(dimensions)


def _labels() -> dict[str, str]:
    labels = {"config": config_digest({name: argument(name) for name in CONFIG.split()})}
    if version := argument("weight_version"):
        labels["weights"] = f"{version} from {argument('model_path')}" if _exchanged() else str(version)
    if adapters := argument("lora_paths"):
        labels["adapters"] = _adapters_digest(adapters)
    return labels


def _adapters_digest(adapters: Any) -> str:
    """The weights of the adapters that SGLang starts with, of which it knows name and path alone.

    One that is loaded later has a random name there, and shares KV with nothing.
    """
    if not argument("hicache_storage_backend"):
        raise KVStoreConfigError(
            "IDENTITY_UNKNOWN",
            "the adapters of --lora-paths may have other files by now than when SGLang loaded them; restart it with this backend",
        )
    found = sorted((_path_of(adapter), model_revision(_path_of(adapter), "")) for adapter in adapters)
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def _path_of(adapter: Any) -> str:
    if isinstance(adapter, str):
        return adapter.partition("=")[2] or adapter
    return str(adapter["lora_path"] if isinstance(adapter, dict) else adapter.lora_path)
