"""What `PrefixStore` does not serve: models refused at the start, and calls that are the model's alone."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig

from causal_models import (
    GREEDY,
    PATIENCE_S,
    build,
    make_model,
    open_store,
    prompt_of,
    replace_a_forward,
    shared_model,
    steer,
)
from kvstore_client import KVStoreConfigError, NamespaceSpecError
from kvstore_engine.transformers import PrefixStore
from serving import running_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from serving import RunningServer

NOWHERE = "127.0.0.1:1"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("data")) as running:
        yield running


PROMPT, TWO = prompt_of(300), torch.cat([prompt_of(300), prompt_of(300, seed=1)])
PADDED = torch.ones_like(PROMPT)
PADDED[0, :7] = 0
SEEN = {"return_dict_in_generate": True, "max_new_tokens": 3}


def filled(input_ids: torch.Tensor) -> DynamicCache:
    model, cache = shared_model(), DynamicCache(config=shared_model().config)
    with torch.no_grad():
        model(input_ids=input_ids, past_key_values=cache)
    return cache


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "two prompts": lambda: {"input_ids": TWO},
    "left padding": lambda: {"input_ids": PROMPT, "attention_mask": PADDED},
    "padding told by its token": lambda: {"input_ids": PROMPT, "pad_token_id": int(PROMPT[0, 0]), "eos_token_id": 210},
    "embeddings": lambda: {"inputs_embeds": shared_model().get_input_embeddings()(PROMPT)},
    "embeddings beside tokens": lambda: {
        "input_ids": PROMPT,
        "inputs_embeds": shared_model().get_input_embeddings()(PROMPT + 0).flip(1),
    },
    "the other name of the prompt": lambda: {"inputs": PROMPT},
    "beams": lambda: {"input_ids": PROMPT, "num_beams": 3},
    "beams in a configuration": lambda: {
        "input_ids": PROMPT,
        "generation_config": GenerationConfig(num_beams=2, max_new_tokens=8, do_sample=False),
    },
    "several answers": lambda: {"input_ids": PROMPT, "do_sample": True, "num_return_sequences": 3},
    "prompt look-up": lambda: {"input_ids": PROMPT, "prompt_lookup_num_tokens": 3},
    "assistant": lambda: {"input_ids": PROMPT, "assistant_model": make_model(num_hidden_layers=1)},
    "no cache": lambda: {"input_ids": PROMPT, "use_cache": False},
    "static cache": lambda: {"input_ids": PROMPT, "cache_implementation": "static", "disable_compile": True},
    "cache by its name": lambda: {"input_ids": PROMPT, "cache_implementation": "dynamic"},
    "cache of the caller's": lambda: {"input_ids": PROMPT, "past_key_values": filled(PROMPT[:, :200])},
    "positions": lambda: {"input_ids": PROMPT, "position_ids": torch.arange(7, 307)[None]},
    "hidden states": lambda: {"input_ids": PROMPT, "output_hidden_states": True, **SEEN},
    "chunked prefill": lambda: {"input_ids": PROMPT, "prefill_chunk_size": 64},
    "guidance": lambda: {"input_ids": PROMPT, "guidance_scale": 1.5},
}


def said(model: Any, call: Callable[..., Any], given: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(3)
    settings = {} if "generation_config" in given else {"do_sample": False, "max_new_tokens": 8}
    output = call(**{**settings, **given})
    if isinstance(output, torch.Tensor):
        return output
    return torch.cat([output.sequences.flatten().float(), *(layer.flatten() for layer in output.hidden_states[0])])


@pytest.mark.filterwarnings("ignore")  # of `transformers` about some of these ways to call it
@pytest.mark.parametrize("case", CALLS)
def test_call_that_a_prefix_cannot_serve_is_the_models_alone(
    server: RunningServer, case: str, caplog: pytest.LogCaptureFixture
):
    model = shared_model()
    expected = said(model, model.generate, CALLS[case]())
    with open_store(model, server.target) as store:
        store.generate(PROMPT, max_new_tokens=1, **GREEDY)
        assert store.flush(PATIENCE_S)
        before = store.stats()
        with caplog.at_level(logging.WARNING, "kvstore_engine"):
            for _ in range(2):
                assert torch.equal(said(model, store.generate, CALLS[case]()), expected)
        assert store.bypassed == {store.last.bypassed: 2}
        assert len([record for record in caplog.records if record.name.startswith("kvstore_engine")]) == 1
        assert (store.stats().requests, store.stats().saved_blocks) == (before.requests, before.saved_blocks)


def test_the_models_own_generation_settings_count_too(server: RunningServer):
    model = make_model()
    with open_store(model, server.target) as store:
        model.generation_config.num_beams = 2
        expected = model.generate(PROMPT, max_new_tokens=8)
        assert torch.equal(store.generate(PROMPT, max_new_tokens=8), expected)
        assert store.last.bypassed == "setting num_beams"
        store.generate(PROMPT, max_new_tokens=8, num_beams=1)
        assert not store.last.bypassed


@pytest.mark.parametrize(
    "given",
    [
        {"attention_mask": torch.ones_like(PROMPT)},
        {"generation_config": GenerationConfig(do_sample=False)},
        {"pad_token_id": int(PROMPT[0, 0]), "eos_token_id": int(PROMPT[0, 0])},
        {"pad_token_id": int(PROMPT[0, 0]), "eos_token_id": 210, "attention_mask": torch.ones_like(PROMPT)},
        {"num_beams": 1, "use_cache": True, "prompt_lookup_num_tokens": None, "cache_implementation": None},
        {"bad_words_ids": [[3]], "no_repeat_ngram_size": 2, "min_new_tokens": 5},
    ],
)
def test_call_that_a_prefix_can_serve_is_served(server: RunningServer, given: dict[str, Any]):
    model = shared_model()
    with open_store(model, server.target) as store:
        expected = model.generate(PROMPT, max_new_tokens=8, **given)
        for _ in range(2):
            assert torch.equal(store.generate(PROMPT, max_new_tokens=8, **given), expected)
            assert store.flush(PATIENCE_S)
        assert not store.bypassed
        assert store.last.hit_tokens == 256


def test_closed_store_leaves_the_model_alone(server: RunningServer):
    store = open_store(shared_model(), server.target)
    store.close()
    store.close()
    expected = shared_model().generate(PROMPT, max_new_tokens=3)
    assert torch.equal(store.generate(PROMPT, max_new_tokens=3), expected)
    assert store.last.bypassed == "the store is closed"


# Models that are refused


def peft_like() -> Any:
    model = make_model()
    layer = type("Linear", (nn.Linear,), {"__module__": "peft.tuners.lora.layer"})
    model.model.layers[0].self_attn.k_proj = layer(32, 16, bias=False)
    return model.eval()


def steered() -> Any:
    model = make_model()
    steer(model)
    return model


def replaced() -> Any:
    model = make_model()
    replace_a_forward(model)
    return model


def compiled() -> Any:
    model = make_model()
    model.compile()
    return model


class Shifted(nn.Module):
    """A layer that mixes each token with the one before, and does not keep that one in a cache."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden + torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], dim=1))


def shifted() -> Any:
    model = make_model()
    model.model.layers[1].mlp = Shifted(model.model.layers[1].mlp)
    return model.eval()


def one_of_two() -> Any:
    model = make_model()
    model._tp_size = 2  # what `from_pretrained` notes when it cuts a model into parts
    return model


BERT = {"num_hidden_layers": 2, "head_dim": 8}
MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "no model of transformers": (lambda: nn.Linear(2, 2), "model of transformers"),
    "wrapped": (lambda: torch.compile(make_model()), "wrapper"),
    "encoder": (
        lambda: build("T5Config", "T5ForConditionalGeneration", d_model=32, d_kv=8, d_ff=32, num_heads=4, num_layers=2),
        "encoder",
    ),
    "mamba": (lambda: build("MambaConfig", "MambaForCausalLM"), "state"),
    "linear attention": (
        lambda: build("Qwen3NextConfig", "Qwen3NextForCausalLM", num_hidden_layers=4, num_experts=4),
        "state",
    ),
    "convolutions": (
        lambda: build("Lfm2Config", "Lfm2ForCausalLM", layer_types=["conv", "full_attention", "conv"]),
        "layers of the kind",
    ),
    "both directions": (lambda: build("BertConfig", "BertLMHeadModel", **BERT), "tokens behind it"),
    "both directions in a causal class": (
        lambda: make_model("gemma3", use_bidirectional_attention=True),
        "tokens behind it",
    ),
    "dynamic rope": (
        lambda: make_model(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        "length of the text",
    ),
    "no classes to cache": (shifted, "does not go on"),
    "training": (lambda: make_model().train(), "eval"),
    "replaced forward": (replaced, "has been replaced"),
    "tensor parallel": (one_of_two, "tensor parallel"),
    "adapters of peft": (peft_like, "merge_and_unload"),
    "hooks": (steered, "hooks"),
    "compiled": (compiled, "compiled"),
}


@pytest.mark.filterwarnings("ignore")  # of `transformers` about some of these models
@pytest.mark.parametrize("case", MODELS)
def test_model_whose_kv_is_not_that_of_its_tokens_is_refused(case: str):
    make, words = MODELS[case]
    with pytest.raises(KVStoreConfigError, match=words) as caught:
        PrefixStore(make(), target=NOWHERE)
    assert caught.value.reason == "UNSUPPORTED_MODEL"


def test_store_made_under_autocast_is_refused():
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(KVStoreConfigError, match="autocast"):
        PrefixStore(shared_model(), target=NOWHERE)


def test_blocks_too_large_for_a_store_are_refused():
    with pytest.raises(NamespaceSpecError, match="block_bytes"):
        PrefixStore(make_model(num_key_value_heads=4, head_dim=8 << 10), target=NOWHERE)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"taget": NOWHERE}, "taget.*did you mean 'target'"),
        ({"min_hit_token": 1}, "did you mean 'min_hit_tokens'"),
        ({"target": "nowhere"}, "target"),
        ({"min_hit_tokens": -1}, "min_hit_tokens"),
        ({"tenant": ""}, "tenant"),
        ({"base_budget_s": 0}, "base_budget_s"),
        ({"revision": 3}, "revision"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], words: str):
    with pytest.raises(KVStoreConfigError, match=words) as caught:
        PrefixStore(shared_model(), **settings)
    assert caught.value.reason == "INVALID_CONFIG"


def test_a_store_that_is_not_there_is_no_obstacle():
    model = shared_model()
    expected = model.generate(PROMPT, max_new_tokens=5)
    with PrefixStore(model, target=NOWHERE) as store:
        for _ in range(3):
            assert torch.equal(store.generate(PROMPT, max_new_tokens=5), expected)
        assert not store.bypassed
        assert store.stats().hit_blocks == 0
