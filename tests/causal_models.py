"""Tiny models of `transformers` with random weights, and prompts for them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers

from kvstore_engine.transformers import PrefixStore

VOCABULARY = 211
PATIENCE_S = 60
# No chance in it, and no running in circles, as random models do.
GREEDY: dict[str, Any] = {"do_sample": False, "no_repeat_ngram_size": 2}
_CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    # Untied, and with larger weights than usual: else a random model sees little but its last token, which hides mistakes.
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# As many KV heads as others or fewer; keys and values of one size or not; without windows, with some, with nothing else.
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "gpt-neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    "deepseek-v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 8,
            "moe_intermediate_size": 16,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
        },
    ),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 50}),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {"sliding_window": 200, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM", {"sliding_window": 50, "num_local_experts": 4}),
}

# A vision-language model; its images are of IMAGE_TOKEN's tokens.
IMAGE_TOKEN, VIDEO_TOKEN, VISION_START_TOKEN, VISION_END_TOKEN = range(VOCABULARY - 4, VOCABULARY)
_EYES = {"depth": 1, "hidden_size": 32, "num_heads": 4, "intermediate_size": 32, "out_hidden_size": 32}


def make_seeing_model() -> Any:
    """Qwen 3 VL, whose images take fewer positions than tokens."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = transformers.Qwen3VLConfig(
        text_config={**_CONFIG, "rope_parameters": rope},
        vision_config={**_EYES, "patch_size": 4, "num_position_embeddings": 64, "deepstack_visual_indexes": []},
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=VISION_START_TOKEN,
        vision_end_token_id=VISION_END_TOKEN,
    )
    model = transformers.Qwen3VLForConditionalGeneration(config).eval()
    model.generation_config = transformers.GenerationConfig()
    return model


def with_image(prompt: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a processor makes of the prompt and an image before it: 8 x 8 patches, 16 tokens."""
    image = torch.tensor([[VISION_START_TOKEN, *[IMAGE_TOKEN] * 16, VISION_END_TOKEN]])
    input_ids = torch.cat([image, prompt], dim=1)
    return {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "mm_token_type_ids": (input_ids == IMAGE_TOKEN).int(),
        "pixel_values": torch.randn((64, 3 * 2 * 4 * 4), generator=torch.Generator().manual_seed(0)),
        "image_grid_thw": torch.tensor([[1, 8, 8]]),
    }


def make_model(kind: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """A model of its own, ready to generate. `config` replaces what the kind has."""
    config_name, class_name, special = KINDS[kind]
    return build(config_name, class_name, seed=seed, dtype=dtype, **{**special, **config})


def build(
    config_name: str, class_name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any
) -> Any:
    """The same of classes of `transformers`, by name."""
    torch.manual_seed(seed)
    made = getattr(transformers, config_name)(**{**_CONFIG, **config})
    return getattr(transformers, class_name)(made).to(dtype).eval()


@cache
def shared_model(kind: str = "llama") -> Any:
    """One that no test changes."""
    return make_model(kind)


def open_store(model: Any, target: str, /, **settings: Any) -> PrefixStore:
    """Uses every hit, though such a model computes faster than any store brings, and waits for a busy machine."""
    return PrefixStore(model, **{"target": target, "min_hit_tokens": 1, "base_budget_s": PATIENCE_S, **settings})


def prompt_of(tokens: int, seed: int = 0) -> torch.Tensor:
    """(1, tokens)."""
    return torch.randint(VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(seed))


def alone(model: Any, input_ids: torch.Tensor, **given: Any) -> torch.Tensor:
    """What the model says without a store."""
    return model.generate(input_ids, **GREEDY, **given)


def replace_a_forward(model: Any) -> None:
    """As those do who want to see what a layer is good for."""
    mlp = model.model.layers[0].mlp
    own = mlp.forward
    mlp.forward = lambda hidden: own(hidden) * 1.5


def steer(model: Any) -> None:
    """The same with a hook."""
    model.model.layers[0].register_forward_hook(lambda _module, _given, output: output * 1.5)
