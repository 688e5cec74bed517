"""Pages through SGLang's own cache controller: what one saves, another brings back, byte for byte, and exactly so much of it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import urllib.request
from array import array

import pytest
import torch

from hicaches import (
    PAGE,
    RadixKey,
    back_up,
    contents,
    controller,
    device_pool,
    extra_config,
    host_pool,
    prefetch,
)
from kvstore_client import Chain

TOKENS = list(range(10 * PAGE))


@pytest.mark.parametrize(
    ("kind", "layout", "hybrid"),
    [
        *(("mha", layout, False) for layout in ("layer_first", "page_first", "page_first_direct", "page_head")),
        *(("mla", layout, False) for layout in ("layer_first", "page_first", "page_first_direct")),
        ("mha", "page_first", True),
        ("mla", "page_first", True),
    ],
)
def test_pages_that_one_controller_saved_come_back_in_another(server, model, kind, layout, hybrid):
    device = device_pool(kind)
    with controller(server.target, host_pool(device, layout), device, hybrid=hybrid, model=model) as one:
        _, saved, tokens = back_up(one, TOKENS, seed=1)
        assert tokens == len(TOKENS)
    pool = host_pool(device, layout)
    before = contents(pool, torch.arange(pool.size))
    with controller(server.target, pool, device, hybrid=hybrid, model=model) as two:
        found, came, _ = prefetch(two, TOKENS)
        assert (found, came) == (len(TOKENS), saved)
        # The plain interface has the same order of bytes, and no page but the prompt's was touched.
        flat = pool.get_dummy_flat_data_page()
        assert two.storage_backend.get(_names(two)[4], flat) is flat
        assert flat.view(torch.uint8).numpy().tobytes() == saved[4]
    after = contents(pool, torch.arange(pool.size))
    assert sum(one != other for one, other in zip(before, after, strict=True)) == len(saved)


def test_pages_that_another_process_saved_come_back(server, model):
    script = (
        "import sys, hicaches; device = hicaches.device_pool()\n"
        "with hicaches.controller(sys.argv[1], hicaches.host_pool(device), device, model=sys.argv[2]) as one:\n"
        f"    print(hicaches.back_up(one, {TOKENS}, seed=5)[1][7].hex())\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, server.target, model]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=True)
    device = device_pool()
    with controller(server.target, host_pool(device), device, model=model) as two:
        _, came, _ = prefetch(two, TOKENS)
    assert len(came) == 10
    assert came[7].hex() == ran.stdout.split()[-1]


@pytest.mark.parametrize("hybrid", [False, True])
def test_the_rest_of_a_prompt_is_found_though_sglang_does_not_name_what_lies_before_it(server, model, hybrid):
    device = device_pool()
    with controller(server.target, host_pool(device), device, hybrid=hybrid, model=model) as made:
        names, saved, _ = back_up(made, TOKENS, seed=1)
        found, came, _ = prefetch(made, TOKENS[4 * PAGE :], last_hash=names[3])
        assert (found, came) == (6 * PAGE, saved[4:])


@pytest.mark.parametrize("hole", [0, 3, 9])
def test_a_hit_ends_at_the_first_page_that_is_not_there(server, model, hole):
    device = device_pool()
    with controller(server.target, host_pool(device), device, model=model) as made:
        names, saved, _ = back_up(made, TOKENS, seed=1)
        _delete(made, names[hole])
        assert made.storage_backend.batch_exists(names) == hole
        assert [made.storage_backend.exists(name) for name in names] == [page != hole for page in range(10)]
        found, came, _ = prefetch(made, TOKENS)
        assert (found, came) == (hole * PAGE, saved[:hole])
        # A look-up that is out of date promises more than there is.
        indices = made.mem_pool_host.alloc(len(TOKENS))
        assert made.storage_backend.batch_get_v1(names, indices) == [True] * hole + [False] * (10 - hole)
        assert contents(made.mem_pool_host, indices)[:hole] == saved[:hole]


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_prompt_of_more_pages_than_sglang_moves_at_once_comes_up_to_its_hole(server, model, hybrid):
    tokens = list(range(300 * PAGE))
    device = device_pool("mla")
    with controller(server.target, host_pool(device, pages=300), device, hybrid=hybrid, model=model) as made:
        names, saved, backed_up = back_up(made, tokens, seed=1)
        assert backed_up == len(tokens)
        assert prefetch(made, tokens)[1] == saved
        _delete(made, names[257])
        found, came, _ = prefetch(made, tokens)
        assert (found, came) == (257 * PAGE, saved[:257])


def test_a_page_that_is_there_already_counts_as_saved(server, model):
    device = device_pool()
    with controller(server.target, host_pool(device), device, model=model) as made:
        assert back_up(made, TOKENS[: 4 * PAGE], seed=1)[2] == 4 * PAGE
        assert back_up(made, TOKENS, seed=1)[2] == 10 * PAGE


def test_other_bytes_under_a_page_s_name_are_noticed_by_these_tests(server, model):
    """The control: the comparisons above look at bytes, and the bytes are the store's."""
    device = device_pool()
    with controller(server.target, host_pool(device), device, model=model) as made:
        names, saved, _ = back_up(made, TOKENS, seed=1)
        _delete(made, names[2])
        altered = bytes([saved[2][0] ^ 1]) + saved[2][1:]
        made.storage_backend._namespace.put(Chain(bytes.fromhex(names[2])), [altered])
        _, came, _ = prefetch(made, TOKENS)
        assert came != saved
        assert came[2] == altered


@pytest.mark.parametrize("hybrid", [False, True])
def test_salts_and_adapters_keep_pages_apart(server, model, hybrid):
    tokens = TOKENS[: 3 * PAGE]
    ways = [
        {},
        {"cache_salt": "A"},
        {"cache_salt": "B"},
        {"extra_key": "A"},
        {"extra_key": "A" * 32, "cache_salt": "A"},
    ]
    device = device_pool()
    with controller(server.target, host_pool(device), device, hybrid=hybrid, model=model) as made:
        saved = {}
        for number, way in enumerate(ways):
            assert prefetch(made, RadixKey(array("q", tokens), **way))[0] == 0
            saved[number] = back_up(made, RadixKey(array("q", tokens), **way), seed=number)[1]
        for number, way in enumerate(ways):
            assert prefetch(made, RadixKey(array("q", tokens), **way))[1] == saved[number]


def test_sglang_s_names_are_chained_over_all_tokens(server):
    """What makes them prefix hashes, checked in the release that runs here: SHA-256 of the name before and the tokens."""
    device = device_pool()
    with controller(server.target, host_pool(device), device) as made:
        names = made.get_hash_str([5, 0, 2**32 - 1, *TOKENS[: 2 * PAGE - 3]], None, page_size=PAGE)
    first = hashlib.sha256(array("I", [5, 0, 2**32 - 1, *TOKENS[: PAGE - 3]]).tobytes()).digest()
    second = hashlib.sha256(first + array("I", TOKENS[PAGE - 3 : 2 * PAGE - 3]).tobytes()).digest()
    assert names == [first.hex(), second.hex()]


def test_pages_behind_a_miss_count_in_the_store_s_hit_rate(server, model):
    device = device_pool()
    with controller(server.target, host_pool(device), device, model=model) as made:
        names, _, _ = back_up(made, TOKENS[: 3 * PAGE], seed=1)
        before = _counted(server)
        assert made.storage_backend.batch_exists(names + ["ab" * 32] * 37) == 3
        after = _counted(server)
    assert [after[name] - before[name] for name in ("asked", "hit")] == [40 * PAGE, 3 * PAGE]


def test_sglang_s_metrics_get_pages_and_bandwidths_once(server, model):
    device = device_pool()
    with controller(server.target, host_pool(device), device, metrics=True, model=model) as made:
        back_up(made, TOKENS, seed=1)
        prefetch(made, TOKENS[: 4 * PAGE])
        stats = made.storage_backend.get_stats()
        assert (stats.backup_pgs, stats.prefetch_pgs) == ([10], [4])
        assert all(
            len(speeds) == 1 and 0 < speeds[0] < 1000 for speeds in (stats.backup_bandwidth, stats.prefetch_bandwidth)
        )
        assert made.storage_backend.get_stats().backup_pgs == []
    with controller(server.target, host_pool(device), device, model=model) as made:
        assert made.storage_backend.get_stats() is None


def test_a_configuration_file_is_read_as_sglang_reads_it(server, model, tmp_path):
    file = tmp_path / "hicache.json"
    given = {
        **extra_config(server.target, model=model),
        "prefetch_threshold": 512,
        "hicache_storage_pass_prefix_keys": True,
    }
    file.write_text(json.dumps(given))
    device = device_pool()
    with controller(server.target, host_pool(device), device, file=file) as made:
        back_up(made, TOKENS, seed=1)
        assert made.storage_backend._namespace.spec.model == model
        assert prefetch(made, TOKENS)[0] == len(TOKENS)


def test_a_shared_store_is_not_cleared_from_an_engine(server, model):
    device = device_pool()
    with controller(server.target, host_pool(device), device, hybrid=True, model=model) as made:
        back_up(made, TOKENS, seed=1)
        with pytest.raises(NotImplementedError, match="kvstore-admin namespace drop"):
            made.clear_storage_backend()
        assert prefetch(made, TOKENS)[0] == len(TOKENS)


def _names(made):
    return made.get_hash_str(TOKENS, None, page_size=PAGE)


def _delete(made, name):
    deleted = made.storage_backend._namespace.delete(Chain(bytes.fromhex(name)))
    assert deleted.deleted_blocks == 1


def _counted(server):
    with urllib.request.urlopen(server.metrics_url) as reply:
        lines = reply.read().decode().splitlines()
    totals = {}
    for name in ("asked", "hit"):
        values = [line.split()[-1] for line in lines if line.startswith(f"kvstore_{name}_tokens_total")]
        totals[name] = sum(int(float(value)) for value in values)
    return totals
