"""The thin engine's KV memory: who owns a block, and where its bytes are."""

import pytest
import torch

from kvstore_engine.kv_pool import BLOCK_TOKENS, KVPool, PoolExhaustedError


def make_pool(num_blocks: int = 4, dtype: torch.dtype = torch.float32) -> KVPool:
    return KVPool(num_blocks=num_blocks, layers=3, kv_heads=2, head_dim=8, dtype=dtype)


def test_exhausted_pool_names_the_numbers_and_takes_nothing():
    pool = make_pool(num_blocks=4)
    pool.allocate(3)
    with pytest.raises(PoolExhaustedError, match="2 KV blocks wanted, 1 of 4 free"):
        pool.allocate(2)
    assert pool.free_blocks == 1


def test_allocated_blocks_are_distinct_until_given_back():
    pool = make_pool(num_blocks=4)
    first, second = pool.allocate(2), pool.allocate(2)
    assert sorted(first + second) == [0, 1, 2, 3]
    pool.free(first)
    assert sorted(pool.allocate(2)) == sorted(first)


def test_block_freed_twice_is_refused():
    pool = make_pool()
    (block_id,) = pool.allocate(1)
    pool.free([block_id])
    with pytest.raises(ValueError, match="free already"):
        pool.free([block_id])
    assert pool.free_blocks == pool.num_blocks


@pytest.mark.parametrize("block_id", [-1, 4])
def test_block_outside_the_pool_has_no_view(block_id: int):
    with pytest.raises(ValueError, match="outside the pool of 4"):
        make_pool(num_blocks=4).block_view(block_id)


@pytest.mark.parametrize(("dtype", "element_bytes"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_view_is_the_memory_of_one_block_and_no_other(dtype: torch.dtype, element_bytes: int):
    pool = make_pool(dtype=dtype)
    view = pool.block_view(2)
    assert view.format == "B"
    assert view.ndim == 1
    assert not view.readonly
    assert len(view) == pool.block_bytes == 3 * 2 * 2 * BLOCK_TOKENS * 8 * element_bytes

    view[:] = bytes(range(256)) * (pool.block_bytes // 256)
    assert bytes(pool.block_view(2)) == pool.kv[2].reshape(-1).view(torch.uint8).numpy().tobytes() == bytes(view)
    assert not pool.kv[[0, 1, 3]].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_moves_between_pools_as_bytes(dtype: torch.dtype):
    source, target = make_pool(dtype=dtype), make_pool(dtype=dtype)
    source.kv.copy_(torch.randn(source.kv.shape, generator=torch.Generator().manual_seed(1)))
    target.block_view(3)[:] = source.block_view(1)
    assert torch.equal(target.kv[3], source.kv[1])
    assert source.dtype_name == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize(("start", "count"), [(0, 128), (0, 1), (127, 2), (100, 200), (128, 128), (300, 5)])
def test_gather_returns_what_write_stored_across_scattered_blocks(start: int, count: int):
    pool, generator = make_pool(num_blocks=8), torch.Generator().manual_seed(2)
    block_ids = [6, 1, 4]
    keys, values = (torch.randn(start + count, 2, 8, generator=generator) for _ in range(2))
    pool.write(1, block_ids, 0, keys[:start], values[:start])
    pool.write(1, block_ids, start, keys[start:], values[start:])
    stored_keys, stored_values = pool.gather(1, block_ids, start + count)
    assert torch.equal(stored_keys, keys.transpose(0, 1))
    assert torch.equal(stored_values, values.transpose(0, 1))
    assert not pool.kv[:, [0, 2]].any(), "another layer was written"
    assert not pool.kv[[0, 2, 3, 5, 7]].any(), "another block was written"


def test_layout_of_a_block_is_layer_kind_head_token_dimension():
    pool = make_pool(num_blocks=2)
    keys = torch.zeros(BLOCK_TOKENS, 2, 8)
    keys[5, 1, 3] = 1.0
    pool.write(2, [1], 0, keys, -keys)
    flat = pool.kv[1].reshape(-1)
    key_at = (((2 * 2 + 0) * 2 + 1) * BLOCK_TOKENS + 5) * 8 + 3
    value_at = (((2 * 2 + 1) * 2 + 1) * BLOCK_TOKENS + 5) * 8 + 3
    assert pool.layout == "thin-paged-LKHTD-v1"
    assert flat.nonzero().flatten().tolist() == [key_at, value_at]
    assert flat[[key_at, value_at]].tolist() == [1.0, -1.0]
