"""Choosing tokens: greedy, limited, and the same again for the same seed."""

import pytest
import torch

from kvstore_engine.sampling import Sampler, SamplingParams

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])


def draw(params: SamplingParams, count: int, logits: torch.Tensor = LOGITS) -> list[int]:
    sampler = Sampler(params)
    return [sampler.sample(logits) for _ in range(count)]


def test_zero_temperature_takes_the_likeliest_token():
    assert draw(SamplingParams(), 3) == [1, 1, 1]


def test_frequencies_follow_the_softmax_at_the_temperature():
    tokens = torch.tensor(draw(SamplingParams(temperature=2.0, seed=1), 8000))
    frequencies = tokens.bincount(minlength=5) / 8000
    # Three standard deviations of a frequency near 0.4 over 8,000 draws are 0.017.
    assert torch.allclose(frequencies, (LOGITS / 2).softmax(-1), atol=0.02)


def test_top_k_leaves_the_k_likeliest():
    assert set(draw(SamplingParams(temperature=5.0, top_k=2), 300)) == {1, 3}


def test_top_p_leaves_the_smallest_set_that_reaches_it():
    # softmax(LOGITS) is 0.03, 0.64, 0.09, 0.23, 0.01: two tokens reach 0.8, one reaches 0.6.
    assert set(draw(SamplingParams(temperature=1.0, top_p=0.8), 300)) == {1, 3}
    assert set(draw(SamplingParams(temperature=1.0, top_p=0.6), 300)) == {1}


def test_top_p_applies_to_what_top_k_left():
    # Of the two tokens left by top_k, the first has 0.73.
    assert set(draw(SamplingParams(temperature=1.0, top_k=2, top_p=0.7), 300)) == {1}


def test_seed_decides_the_tokens():
    again = [draw(SamplingParams(temperature=3.0, seed=seed), 40) for seed in (7, 7, 8)]
    assert again[0] == again[1] != again[2]


def test_vanishing_temperature_is_greedy_and_not_infinite():
    for temperature in (1e-40, 1e-50, 5e-324):
        assert draw(SamplingParams(temperature=temperature), 5, LOGITS * 1e3) == [1] * 5


def test_vanishing_top_p_leaves_the_likeliest():
    assert draw(SamplingParams(temperature=1.0, top_p=1e-50), 20) == [1] * 20


def test_temperature_may_be_a_large_whole_number():
    assert set(draw(SamplingParams(temperature=10**30), 100)) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 2.5),
        ("max_new_tokens", True),
        ("top_k", 1.5),
        ("seed", 0.5),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 10**400),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
    ],
)
def test_impossible_parameter_is_named(field: str, value: float):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})
