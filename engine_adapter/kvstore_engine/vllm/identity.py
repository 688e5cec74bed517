"""What a worker's KV is interchangeable with: its namespace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from kvstore_client import KVStoreConfigError, NamespaceSpec, ParallelDimension
from kvstore_engine.model_identity import config_digest, model_name, model_revision

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvstore_engine.plug_settings import PlugSettings
    from kvstore_engine.vllm.placement import Placement

# Names, versions and special tokens of a configuration, which no layer's output depends on.
_SAYS_NOTHING = frozenset(
    {"_name_or_path", "transformers_version", "architectures", "bos_token_id", "eos_token_id", "pad_token_id"}
)

# What vLLM's settings for images and the like say of memory, transport and limits, which no embedding depends on. All others are
# taken to change what the model sees.
_MEDIA_SAYS_NOTHING = frozenset(
    {
        "allow_missing_mm_embeddings",
        "enable_mm_embeds",
        "interleave_mm_strings",
        "language_model_only",
        "limit_per_prompt",
        "mm_encoder_only",
        "mm_encoder_tp_mode",
        "mm_hasher_algorithm",
        "mm_ipc_gpu_memory_gb",
        "mm_processor_cache_gb",
        "mm_processor_cache_type",
        "mm_shm_cache_max_object_size_mb",
        "mm_tensor_ipc",
        "skip_mm_profiling",
    }
)

# Ways to guess tokens that need no model of their own.
_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix")


def check_identity(config: VllmConfig, settings: PlugSettings) -> str:
    """The revision of the model that vLLM serves.

    Raises: KVStoreConfigError: it is not known, or the KV would depend on what no namespace says.
    """
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise KVStoreConfigError("UNSUPPORTED_MODEL", f"{name} is {getattr(parallel, name)}, supported is 1")
    policy = config.kv_transfer_config.kv_load_failure_policy
    if policy != "recompute":
        raise KVStoreConfigError(
            "INVALID_CONFIG",
            f"kv_load_failure_policy is {policy!r}, with which a request ends when its KV does not come; set it to 'recompute'",
        )
    speculation = config.speculative_config
    if speculation is not None and speculation.method not in _WITHOUT_KV:
        raise KVStoreConfigError(
            "UNSUPPORTED_MODEL",
            f"speculative decoding by {speculation.method!r} has KV of a draft model; supported are {', '.join(_WITHOUT_KV)}",
        )
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise KVStoreConfigError(
            "UNSUPPORTED_MODEL",
            "calculate_kv_scales gives each process scales of its own, with which no other reads its KV",
        )
    model = config.model_config
    if str(config.load_config.load_format) == "dummy" and not settings.revision:
        raise KVStoreConfigError(
            "IDENTITY_UNKNOWN",
            "load_format is dummy, so the weights are none of the model's; set 'revision' to name them",
        )
    return model_revision(model.model, settings.revision, hub_cache=config.load_config.download_dir)


def media_have_names(config: VllmConfig) -> bool:
    """Whether vLLM's name of an image or the like says what the model sees.

    With both of its caches off vLLM numbers them, in each process. With an encoder in FP8 its scales depend on what it saw before.
    """
    multimodal = config.model_config.multimodal_config
    if multimodal is None:
        return True
    if multimodal.mm_encoder_attn_dtype is not None:
        return False
    return multimodal.mm_processor_cache_gb > 0 or bool(config.cache_config.enable_prefix_caching)


def media_labels(config: VllmConfig) -> dict[str, str]:
    """How this server has images and the like processed, for its namespace; empty for a model that takes none.

    vLLM's name of an image says what its request wants of the processor, and nothing of what the server was told at its start.
    """
    multimodal = config.model_config.multimodal_config
    if multimodal is None:
        return {}
    said = {name: value for name, value in vars(multimodal).items() if name not in _MEDIA_SAYS_NOTHING}
    return {"media": config_digest(said)}


def worker_namespace(config: VllmConfig, settings: PlugSettings, revision: str, placement: Placement) -> NamespaceSpec:
    """The namespace of this worker's KV.

    The release of vLLM is part of it: what lies where in a block, and how it is computed, is vLLM's to change.
    Raises: NamespaceSpecError: e.g. a block is larger than a store takes.
    """
    model, pp, tp = config.model_config, get_pp_group(), get_tp_group()
    spec = NamespaceSpec(
        model=settings.model or model_name(model.model),
        revision=revision,
        engine="vllm " + ".".join(vllm.__version__.split(".")[:2]),
        layout=placement.layout,
        kv_dtype=placement.dtype,
        block_bytes=placement.block_bytes,
        tenant=settings.tenant,
        parallel=(
            ParallelDimension("pp", pp.rank_in_group, pp.world_size),
            ParallelDimension("tp", tp.rank_in_group, tp.world_size),
        ),
        labels={
            "attention": attention_of(config, placement),
            "config": config_digest(_config_of(model.hf_config)),
            "dtype": str(model.dtype).removeprefix("torch."),
            "kv_cache_dtype": str(config.cache_config.cache_dtype),
            "quantization": str(model.quantization or ""),
            **media_labels(config),
        },
    )
    spec.validate()
    return spec


def attention_of(config: VllmConfig, placement: Placement) -> str:
    """Which kernels read and write the KV: memory of one shape and type means something else to each.

    On a CPU also for which instructions they are made: those for AMX keep keys and values in another order.
    """
    layers = config.compilation_config.static_forward_context
    kinds = {
        (layers[name].get_attn_backend().get_name(), getattr(layers[name], "isa", "")) for name in placement.layer_names
    }
    return "+".join(sorted(f"{backend} {isa}".strip() for backend, isa in kinds))


def _config_of(hf_config: Any) -> dict[str, object]:  # noqa: ANN401 - transformers has no types here
    return {name: value for name, value in hf_config.to_dict().items() if name not in _SAYS_NOTHING}
