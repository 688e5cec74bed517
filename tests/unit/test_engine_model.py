"""The model over paged KV: how the tokens are cut into passes must not matter."""

import dataclasses
from itertools import pairwise

import pytest
import torch

from kvstore_engine.kv_pool import KVPool
from kvstore_engine.model import Llama, LlamaConfig, Span, random_weights

CONFIG = LlamaConfig(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    layers=2,
    heads=6,
    kv_heads=2,
    head_dim=16,
    rope_theta=10_000.0,
    rms_norm_eps=1e-5,
    max_positions=1024,
)
MODEL = Llama(CONFIG, random_weights(CONFIG, seed=3))
TOKENS = torch.randint(0, 97, (300,), generator=torch.Generator().manual_seed(4)).tolist()


def make_pool(dtype: torch.dtype = torch.float32) -> KVPool:
    return KVPool(num_blocks=8, layers=2, kv_heads=2, head_dim=16, dtype=dtype)


@pytest.mark.parametrize("cuts", [[0, 128, 256, 300], [0, 1, 2, 127, 129, 300], [0, 299, 300]])
def test_passes_over_parts_equal_one_pass_over_all(cuts: list[int]):
    whole = MODEL.forward(TOKENS, [Span([0, 1, 2], 0, 300)], make_pool())
    pool = make_pool()
    parts = [MODEL.forward(TOKENS[a:b], [Span([5, 0, 7], a, b - a)], pool) for a, b in pairwise(cuts)]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-4, rtol=0)


def test_spans_of_one_pass_do_not_see_each_other():
    together, alone = make_pool(), make_pool()
    spans = [Span([3, 4], 0, 150), Span([6], 0, 1), Span([1], 0, 90)]
    tokens = TOKENS[:150] + TOKENS[150:151] + TOKENS[151:241]
    mixed = MODEL.forward(tokens, spans, together)
    separate, row = [], 0
    for span in spans:
        separate.append(MODEL.forward(tokens[row : row + span.length], [span], alone))
        row += span.length
    torch.testing.assert_close(mixed, torch.cat(separate), atol=1e-4, rtol=0)
    torch.testing.assert_close(together.kv, alone.kv, atol=1e-4, rtol=0)


def test_token_depends_on_none_after_it():
    hidden = MODEL.forward(TOKENS, [Span([0, 1, 2], 0, 300)], make_pool())
    changed = MODEL.forward([*TOKENS[:-1], (TOKENS[-1] + 1) % 97], [Span([0, 1, 2], 0, 300)], make_pool())
    assert torch.equal(hidden[:-1], changed[:-1])


def test_token_depends_on_the_positions_of_those_before_it():
    # One layer: in a second, even a model without positions would tell the tokens apart by what they could see.
    config = dataclasses.replace(CONFIG, layers=1)
    model = Llama(config, random_weights(config, seed=3))
    first, second, last = TOKENS[:3]
    hidden = model.forward([first, second, last], [Span([0], 0, 3)], make_pool())
    swapped = model.forward([second, first, last], [Span([0], 0, 3)], make_pool())
    assert not torch.allclose(hidden[-1], swapped[-1], atol=1e-3)


def test_bfloat16_pool_costs_little_accuracy():
    exact = MODEL.logits(MODEL.forward(TOKENS, [Span([0, 1, 2], 0, 300)], make_pool()))
    rounded = MODEL.logits(MODEL.forward(TOKENS, [Span([0, 1, 2], 0, 300)], make_pool(torch.bfloat16)))
    assert exact.shape == rounded.shape == (300, 97)
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(rounded, exact, atol=0.1, rtol=0)


def test_random_weights_are_the_seeds_and_finite():
    same, other = random_weights(CONFIG, seed=3), random_weights(CONFIG, seed=9)
    assert torch.equal(same.layers[1].down, MODEL.weights.layers[1].down)
    assert not torch.equal(other.layers[1].down, MODEL.weights.layers[1].down)
    assert same.lm_head is same.embedding
    untied = random_weights(CONFIG, seed=3, tied=False)
    assert untied.lm_head.shape == same.lm_head.shape
    assert not torch.equal(untied.lm_head, untied.embedding)


@pytest.mark.parametrize(("field", "value"), [("kv_heads", 4), ("head_dim", 15)])
def test_impossible_head_shape_is_refused(field: str, value: int):
    with pytest.raises(ValueError, match=str(value)):
        dataclasses.replace(CONFIG, **{field: value})
