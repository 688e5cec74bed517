"""Sliding-window layers in the model and in the pool: what they see, what they leave, and what a snapshot holds."""

import dataclasses
import math
from itertools import pairwise

import pytest
import torch

from kvstore_engine.kv_pool import HYBRID_LAYOUT, LAYOUT, KVPool
from kvstore_engine.model import Llama, LlamaConfig, Span, random_weights

CONFIG = LlamaConfig(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    layers=4,
    heads=6,
    kv_heads=2,
    head_dim=16,
    rope_theta=10_000.0,
    rms_norm_eps=1e-5,
    max_positions=1024,
)
WEIGHTS = random_weights(CONFIG, seed=3)
TOKENS = torch.randint(0, 97, (420,), generator=torch.Generator().manual_seed(4)).tolist()
PATTERNS = [(1, 3), (2, 3), (0,)]
NAN = float("nan")


def windowed(window_tokens: int, layers: tuple[int, ...]) -> Llama:
    return Llama(dataclasses.replace(CONFIG, window_tokens=window_tokens, window_layers=layers), WEIGHTS)


def poisoned_pool(model: Llama) -> KVPool:
    pool = KVPool.for_model(model.config, num_blocks=12)
    pool.kv.fill_(NAN)
    pool.window_kv.fill_(NAN)
    return pool


def dense(
    model: Llama, tokens: list[int], start: int = 0, kept: tuple[int, list[torch.Tensor]] = (0, [])
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The model in float64 with one mask per layer over everything: nothing paged, nothing chunked, nothing sliced.

    Computes from `start` on. `kept` is a position and each layer's keys and values: full layers take them from there below
    that position. Returns: hidden states (tokens, hidden_size), and each layer's keys and values (2, kv_heads, tokens, d).
    """
    config, weights = model.config, model.weights
    position = torch.arange(start, len(tokens)).double()
    angles = position[:, None] / config.rope_theta ** (torch.arange(0, config.head_dim, 2).double() / config.head_dim)
    turn = torch.polar(torch.ones_like(angles), angles)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight.double() * x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()

    def rotate(x: torch.Tensor) -> torch.Tensor:  # (heads, tokens, head_dim)
        first, second = x.chunk(2, dim=-1)
        turned = torch.complex(first, second) * turn
        return torch.cat((turned.real, turned.imag), dim=-1)

    hidden, kv = weights.embedding.double()[tokens[start:]], []
    for number, layer in enumerate(weights.layers):
        heads = norm(hidden, layer.attention_norm) @ layer.qkv.double().T
        heads = heads.view(len(position), -1, config.head_dim).transpose(0, 1)
        query = rotate(heads[: config.heads])
        key = rotate(heads[config.heads : config.heads + config.kv_heads])
        new, at = torch.stack((key, heads[config.heads + config.kv_heads :])), position
        if number not in config.window_layers and kept[0]:
            new = torch.cat((kept[1][number][:, :, : kept[0]], new[:, :, kept[0] - start :]), dim=2)
            at = torch.arange(len(tokens)).double()
        kv.append(new)
        key, value = new.repeat_interleave(config.heads // config.kv_heads, dim=1)
        distance = position[:, None] - at[None, :]
        seen = (distance >= 0) & (distance < (config.window_tokens if number in config.window_layers else math.inf))
        scores = (query @ key.transpose(1, 2) / math.sqrt(config.head_dim)).masked_fill(~seen, -math.inf)
        hidden = (
            hidden
            + (scores.softmax(-1) @ value).transpose(0, 1).reshape(len(position), -1) @ layer.attention_out.double().T
        )
        gate, up = (norm(hidden, layer.mlp_norm) @ layer.gate_up.double().T).chunk(2, dim=-1)
        hidden = hidden + (gate * gate.sigmoid() * up) @ layer.down.double().T
    return norm(hidden, weights.final_norm), kv


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("layers", PATTERNS)
@pytest.mark.parametrize("window_tokens", [1, 100, 127, 128, 129, 1000])
def test_windows_equal_a_dense_mask_however_the_tokens_are_cut(window_tokens: int, layers: tuple[int, ...]):
    model = windowed(window_tokens, layers)
    expected, _ = dense(model, TOKENS[:300])
    for cuts in ([0, 300], [0, 128, 256, 300], [0, 1, 99, 227, 228, 300]):
        pool = poisoned_pool(model)
        parts = [model.forward(TOKENS[a:b], [Span([5, 0, 7], a, b - a)], pool) for a, b in pairwise(cuts)]
        assert_close(torch.cat(parts), expected)


def test_a_window_changes_the_answer():
    # The control of all tests here: a window that was ignored would pass those that compare this model with itself.
    without = Llama(CONFIG, WEIGHTS)
    hidden = [
        m.forward(TOKENS[:300], [Span([0, 1, 2], 0, 300)], poisoned_pool(m)) for m in (windowed(128, (1, 3)), without)
    ]
    assert_close(hidden[0][:128], hidden[1][:128])
    assert not torch.allclose(hidden[0][129:], hidden[1][129:], atol=1e-2)


@pytest.mark.parametrize("layers", PATTERNS)
def test_batched_decode_beside_a_prefill_equals_a_dense_mask(layers: tuple[int, ...]):
    model = windowed(100, layers)
    pool = poisoned_pool(model)
    lengths = {(3, 4, 9): 270, (6,): 99, (1, 2): 128}
    for block_ids, length in lengths.items():
        model.forward(TOKENS[:length], [Span(block_ids, 0, length)], pool)
    for step in range(3):
        spans = [Span(block_ids, length + step, 1) for block_ids, length in lengths.items()] + [Span([11], step * 7, 7)]
        tokens = [TOKENS[length + step] for length in lengths.values()] + TOKENS[step * 7 : step * 7 + 7]
        hidden = model.forward(tokens, spans, pool)
        for row, length in enumerate(lengths.values()):
            assert_close(hidden[row], dense(model, TOKENS[: length + step + 1])[0][-1])
        assert_close(hidden[3:], dense(model, TOKENS[: step * 7 + 7])[0][-7:])


@pytest.mark.parametrize("layers", PATTERNS)
@pytest.mark.parametrize(("start", "hit"), [(128, 256), (200, 256), (256, 256), (255, 256), (0, 384), (0, 128)])
def test_replay_reads_the_kept_full_layers_and_no_window_before_its_start(
    start: int, hit: int, layers: tuple[int, ...]
):
    model = windowed(100, layers)
    cold = poisoned_pool(model)
    model.forward(TOKENS, [Span(range(4), 0, len(TOKENS))], cold)
    _, cold_kv = dense(model, TOKENS)
    expected, _ = dense(model, TOKENS, start, (hit, cold_kv))

    pool = poisoned_pool(model)
    pool.kv[: hit // 128] = cold.kv[: hit // 128]
    kept = pool.kv[: hit // 128].clone()
    parts = []
    for a, b in pairwise([start, *range(start // 128 * 128 + 128, 400, 128), 400, *range(401, 421)]):
        parts.append(model.forward(TOKENS[a:b], [Span(range(4), a, b - a, start, hit)], pool))
    assert_close(torch.cat(parts), expected)
    assert torch.equal(pool.kv[: hit // 128], kept), "replayed tokens rewrote what was loaded"
    assert pool.kv.view(12, -1)[:3].isfinite().all(), "KV behind the hit was not written"
    window = pool.window_kv[:4].permute(0, 4, 1, 2, 3, 5).reshape(4 * 128, -1)  # a row for each token
    assert window[:start].isnan().all()
    assert window[start:420].isfinite().all()


def test_span_that_would_leave_a_gap_in_the_window_is_refused():
    with pytest.raises(ValueError, match="from token 129 on leaves a gap before token 128"):
        Span([0, 1], 128, 1, window_start=129)


def test_each_layer_is_announced_before_it_is_read_and_may_be_refused():
    model = windowed(128, (1, 3))
    pool = poisoned_pool(model)
    order: list[int] = []

    def refuse_layer_2(layer: int) -> None:
        order.append(layer)
        assert pool.kv[0, :, 0, 0, 0, 0].isfinite().tolist() == [layer > 0, False]
        if layer == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        model.forward(TOKENS[:10], [Span([0], 0, 10)], pool, before_layer=refuse_layer_2)
    assert order == [0, 1, 2]


@pytest.mark.parametrize(
    ("window_tokens", "layers", "message"),
    [
        (128, (), "does not fit 0"),
        (0, (1,), "does not fit 1"),
        (-1, (1,), "does not fit"),
        (128, (3, 1), "ascending"),
        (128, (1, 1), "ascending"),
        (128, (4,), "below 4"),
        (128, (-1,), "below 4"),
        (128, (0, 1, 2, 3), "all 4 layers"),
    ],
)
def test_impossible_windows_are_refused(window_tokens: int, layers: tuple[int, ...], message: str):
    with pytest.raises(ValueError, match=message):
        windowed(window_tokens, layers)
    with pytest.raises(ValueError, match=message):
        KVPool(num_blocks=1, layers=4, kv_heads=2, head_dim=16, window_tokens=window_tokens, window_layers=layers)


def random_pool(window_tokens: int = 100, dtype: torch.dtype = torch.float32) -> KVPool:
    pool = KVPool.for_model(windowed(window_tokens, (1, 3)).config, num_blocks=8, dtype=dtype)
    pool.kv.copy_(torch.randn(pool.kv.shape, generator=torch.Generator().manual_seed(1)))
    pool.window_kv.copy_(torch.randn(pool.window_kv.shape, generator=torch.Generator().manual_seed(2)))
    return pool


def test_blocks_hold_the_full_layers_only():
    pool = random_pool()
    assert (pool.layout, pool.full_layers, pool.window_layers) == (HYBRID_LAYOUT, (0, 2), (1, 3))
    assert pool.block_bytes == 2 * 2 * 2 * 128 * 16 * 4
    plain = KVPool(num_blocks=8, layers=2, kv_heads=2, head_dim=16)
    assert (plain.layout, plain.block_bytes, plain.full_layers) == (LAYOUT, pool.block_bytes, (0, 1))
    assert pool.block_layout.layers == pool.full_layers
    assert pool.block_layout.range_of(1, 3) == (pool.block_bytes // 2, pool.block_bytes // 2)
    keys = torch.randn(10, 2, 16, generator=torch.Generator().manual_seed(3))
    before, windows = bytes(pool.block_view(3)), pool.window_kv.clone()
    pool.write(3, [3], 5, keys, -keys)
    assert bytes(pool.block_view(3)) == before
    pool.write(2, [3], 5, keys, -keys)
    plain.write(1, [3], 5, keys, -keys)
    half = pool.block_bytes // 2
    assert bytes(pool.block_view(3)[:half]) == before[:half]
    changed = torch.frombuffer(pool.block_view(3)[half:], dtype=torch.float32).view(plain.kv[3, 1].shape)
    assert torch.equal(changed[:, :, 5:15], plain.kv[3, 1, :, :, 5:15])
    assert torch.equal(pool.window_kv[:, 0], windows[:, 0])
    assert torch.equal(pool.window_kv[3, 1, 0, :, 5:15], keys.transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window_tokens", [1, 100, 300])
@pytest.mark.parametrize("end_token", [0, 1, 128, 129, 256, 300])
def test_snapshot_moves_the_last_window_and_nothing_else(end_token: int, window_tokens: int, dtype: torch.dtype):
    source, target = random_pool(window_tokens, dtype), random_pool(window_tokens, dtype)
    target.window_kv.fill_(NAN)
    full = target.kv.clone()
    state = source.window_state([6, 1, 4], end_token)
    tokens = min(window_tokens, end_token)
    assert len(state) == target.window_state_bytes(end_token) == 2 * 2 * 2 * tokens * 16 * dtype.itemsize
    target.load_window_state([0, 5, 2], end_token, state)
    for layer in (1, 3):
        moved = target.gather(layer, [0, 5, 2], end_token, first=end_token - tokens) if tokens else ()
        wanted = source.gather(layer, [6, 1, 4], end_token, first=end_token - tokens) if tokens else ()
        assert all(torch.equal(a, b) for a, b in zip(moved, wanted, strict=True))
    assert target.window_kv.isfinite().sum() == 2 * 2 * 2 * tokens * 16, "more than the window was written"
    assert torch.equal(target.kv, full)


@pytest.mark.parametrize("change", [-1, 1, -64])
def test_snapshot_of_another_size_is_refused(change: int):
    pool = random_pool()
    wanted = pool.window_state_bytes(128)
    before = pool.window_kv.clone()
    with pytest.raises(ValueError, match=f"has {wanted} bytes, got {wanted + change}"):
        pool.load_window_state([0], 128, bytearray(wanted + change))
    assert torch.equal(pool.window_kv, before)


def test_pool_without_windows_has_an_empty_snapshot():
    pool = KVPool(num_blocks=2, layers=2, kv_heads=2, head_dim=16)
    assert pool.window_state([0, 1], 200) == bytearray()
    pool.load_window_state([0, 1], 200, bytearray())
    with pytest.raises(ValueError, match="has 0 bytes, got 4"):
        pool.load_window_state([0, 1], 200, bytearray(4))
