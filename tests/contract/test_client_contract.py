"""What every shape of the client promises over a real server: bytes come back as they were put, or they do not come back."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvstore_client import (
    Chain,
    ClientClosedError,
    ClientConfig,
    KVStoreConfigError,
    NamespaceSpec,
    ParallelDimension,
)
from serving import running_server

SPEC = NamespaceSpec(model="m", revision="r", engine="e", layout="l", kv_dtype="bfloat16", block_bytes=114_688)
SMALL = replace(SPEC, block_bytes=1000)
PATIENT_S = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running_server(tmp_path_factory.mktemp("data"), "--capacity", "2GiB") as server:
        yield server


@pytest.fixture
def client(server, door):
    with door(ClientConfig(target=server.target, base_budget_s=PATIENT_S)) as client:
        yield client


def new_tokens(blocks: int) -> np.ndarray:
    """Token ids that no other test has."""
    return np.frombuffer(random.randbytes(blocks * 512), dtype="<u4")


@pytest.mark.parametrize("block_bytes", [1, 100, 114_688, 1 << 20, (1 << 20) + 1, 2_949_120])
@pytest.mark.parametrize("blocks", [1, 9])
def test_every_block_size_comes_back_byte_for_byte(client, block_bytes, blocks):
    namespace = client.namespace(replace(SPEC, block_bytes=block_bytes))
    chain, data = namespace.chain(new_tokens(blocks)), random.randbytes(block_bytes * blocks)
    report = namespace.put(chain, data)
    assert (report.stored, report.failure) == (blocks, None)
    assert namespace.put(chain, data).exists == blocks
    match = namespace.match(chain)
    assert (match.hit_length_blocks, match.plan.hit_tokens) == (blocks, 128 * blocks)
    for lease in (match.lease, b"", b"a token of nobody"):
        out = bytearray(block_bytes * blocks)
        assert namespace.get(chain, out, lease=lease).leading_blocks == blocks
        assert out == data


@pytest.mark.parametrize("blocks", [36, 37, 1000])
def test_any_number_of_blocks_goes_both_ways(client, blocks):
    """36 blocks of 112 KiB are just under 4 MiB, 37 just over."""
    namespace = client.namespace(SPEC)
    chain, data = (
        namespace.chain(new_tokens(blocks)),
        np.frombuffer(random.randbytes(blocks * SPEC.block_bytes), np.uint8),
    )
    assert namespace.put(chain, data).stored == blocks
    out = np.zeros_like(data)
    assert namespace.get(chain, out).leading_blocks == blocks
    assert np.array_equal(out, data)


def test_tensors_go_in_and_come_out(client):
    namespace = client.namespace(SPEC)
    pool = torch.randn((6, SPEC.block_bytes // 2)).to(torch.bfloat16)
    chain = namespace.chain(new_tokens(3))
    assert namespace.put(chain, [pool[4], pool[0], pool[2]]).stored == 3
    out = torch.zeros((6, SPEC.block_bytes // 2), dtype=torch.bfloat16)
    assert namespace.get(chain, [out[5], out[1], out[3]]).leading_blocks == 3
    assert torch.equal(out[[5, 1, 3]], pool[[4, 0, 2]])
    assert not out[[0, 2, 4]].any()


def test_ranges_of_a_chain_are_put_and_got_by_themselves(client):
    namespace = client.namespace(replace(SPEC, block_bytes=1000))
    chain, data = namespace.chain(new_tokens(8)), random.randbytes(8000)
    assert namespace.put(chain, data[:3000]).stored == 3
    assert namespace.match(chain).hit_length_blocks == 3
    assert namespace.put(chain, data[3000:], first_block=3).stored == 5
    out = bytearray(3000)
    assert namespace.get(chain, out, first_block=2, block_count=3).leading_blocks == 3
    assert out == data[2000:5000]
    assert namespace.delete(chain, first_block=4, block_count=1).deleted_blocks == 1
    assert namespace.match(chain).hit_length_blocks == 4
    statuses = namespace.get(chain, bytearray(8000)).statuses
    assert list(statuses) == ["OK"] * 4 + ["NOT_FOUND"] + ["OK"] * 3


def test_state_objects_stand_beside_their_prefix(client):
    namespace = client.namespace(SPEC)
    chain, other = namespace.chain(new_tokens(2)), namespace.chain(new_tokens(2))
    data = random.randbytes(1_415_040)
    assert namespace.get_state(chain[1], "window", max_bytes=2 << 20).reason == "NOT_FOUND"
    assert namespace.put_state(chain[1], "window", data, traffic_class="handoff").stored == 1
    assert namespace.put_state(chain[1], "window", data, traffic_class="handoff").exists == 1
    assert namespace.get_state(chain[1], "window", max_bytes=2 << 20).data == data
    assert namespace.get_state(chain[1], "window", max_bytes=1 << 20).reason == "TOO_LARGE"
    for prefix_hash, name in ((chain[0], "window"), (other[1], "window"), (chain[1], "tail")):
        assert namespace.get_state(prefix_hash, name, max_bytes=2 << 20).reason == "NOT_FOUND"


def test_a_delete_takes_the_state_objects_beside_its_blocks_along_and_counts_blocks_alone(client):
    namespace = client.namespace(SMALL)
    chain = namespace.chain(new_tokens(3))
    assert namespace.put(chain, random.randbytes(3000)).stored == 3
    for prefix_hash in chain:
        for name in ("window", "tail"):
            assert namespace.put_state(prefix_hash, name, b"state").stored == 1
    assert namespace.delete(chain, first_block=1, block_count=1).deleted_blocks == 1
    for block, data in ((0, b"state"), (1, None), (2, b"state")):
        for name in ("window", "tail"):
            assert namespace.get_state(chain[block], name, max_bytes=100).data == data, (block, name)


def test_other_salt_adapter_or_spec_never_hits(client):
    tokens, data = new_tokens(4), random.randbytes(4 * SPEC.block_bytes)
    namespace = client.namespace(SPEC)
    assert namespace.put(namespace.chain(tokens, salt=b"A"), data).stored == 4
    assert namespace.match(namespace.chain(tokens, salt=b"A")).hit_length_blocks == 4
    others = [
        (SPEC, {"salt": b"B"}),
        (SPEC, {}),
        (SPEC, {"adapter": b"A"}),
        (SPEC, {"salt": b"A", "extra_keys": {0: [b"image"]}}),
        (replace(SPEC, kv_dtype="fp8_e4m3"), {"salt": b"A"}),
        (replace(SPEC, revision="other weights"), {"salt": b"A"}),
        (replace(SPEC, tenant="another"), {"salt": b"A"}),
        (replace(SPEC, parallel=(ParallelDimension("tp", 0, 4),)), {"salt": b"A"}),
    ]
    for spec, more in others:
        elsewhere = client.namespace(spec)
        chain = elsewhere.chain(tokens, **more)
        assert elsewhere.match(chain).hit_length_blocks == 0
        assert set(elsewhere.get(chain, bytearray(len(data))).statuses) == {"NOT_FOUND"}
    # Not even with the other namespace's own chain.
    elsewhere = client.namespace(replace(SPEC, revision="other weights"))
    assert elsewhere.match(namespace.chain(tokens, salt=b"A")).hit_length_blocks == 0


def test_unknown_traffic_class_is_raised_by_name(client):
    namespace = client.namespace(SPEC)
    chain = namespace.chain(new_tokens(1))
    for call in (
        lambda: namespace.match(chain, "chatbots"),
        lambda: namespace.put(chain, bytes(SPEC.block_bytes), traffic_class="chatbots"),
        lambda: namespace.put_state(chain[0], "tail", b"x", traffic_class="chatbots"),
    ):
        with pytest.raises(KVStoreConfigError, match="chatbots") as raised:
            call()
        assert raised.value.reason == "UNKNOWN_TRAFFIC_CLASS"


def test_many_threads_share_one_client_and_each_gets_its_own_bytes(client):
    namespace, wrong, run = client.namespace(replace(SPEC, block_bytes=30_000)), [], random.getrandbits(64)

    def work(seed: int) -> None:
        source = random.Random(run + seed)
        for _ in range(15):
            blocks = source.randint(1, 40)
            tokens = np.frombuffer(source.randbytes(blocks * 512), dtype="<u4")
            chain, data = namespace.chain(tokens), source.randbytes(blocks * 30_000)
            out = bytearray(len(data))
            stored = namespace.put(chain, data).stored
            got = namespace.get(chain, out, lease=namespace.match(chain).lease).leading_blocks
            if (stored, got) != (blocks, blocks) or out != data:
                wrong.append((seed, blocks, stored, got))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert client.stats().failures == {}


def test_identical_puts_at_once_are_stored_or_exist(client):
    namespace, reports = client.namespace(SPEC), []
    chain, data = namespace.chain(new_tokens(4)), random.randbytes(4 * SPEC.block_bytes)
    threads = [threading.Thread(target=lambda: reports.append(namespace.put(chain, data))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [report.stored + report.exists for report in reports] == [4] * 16
    assert sum(report.stored for report in reports) == 4


@pytest.mark.parametrize("size", [1, 114_688, (1 << 20) + 1])
def test_state_object_of_any_size_comes_back_byte_for_byte(client, size):
    namespace, data = client.namespace(SMALL), random.randbytes(size)
    (prefix_hash,) = namespace.chain(new_tokens(1))
    assert namespace.put_state(prefix_hash, "tail", data).stored == 1
    assert namespace.get_state(prefix_hash, "tail", max_bytes=size).data == data
    assert namespace.get_state(prefix_hash, "tail", max_bytes=64 << 20).data == data


@pytest.mark.parametrize("stored", [[], [0], [0, 1, 2, 3], [1, 2, 3, 4], [0, 1, 3, 4], [4], [0, 1, 2, 3, 4]], ids=str)
def test_hit_is_the_leading_part_and_a_get_brings_whatever_is_there(client, stored):
    namespace, blocks = client.namespace(SMALL), 5
    chain = namespace.chain(new_tokens(blocks))
    data = [random.randbytes(SMALL.block_bytes) for _ in range(blocks)]
    for position in stored:
        assert namespace.put(chain, data[position], first_block=position).stored == 1
    leading = next((position for position in range(blocks) if position not in stored), blocks)
    match = namespace.match(chain)
    assert (match.hit_length_blocks, match.failure) == (leading, None)
    out = [bytearray(SMALL.block_bytes) for _ in range(blocks)]
    result = namespace.get(chain, out, lease=match.lease)
    assert list(result.statuses) == ["OK" if position in stored else "NOT_FOUND" for position in range(blocks)]
    assert [out[position] for position in stored] == [data[position] for position in stored]
    assert namespace.match(Chain(b"")).hit_length_blocks == 0


# Names of other users are strange: separators, ends of text, other scripts, a page of text.
IDENTITIES = {
    "nothing": {},
    "salt A": {"salt": b"A"},
    "salt B": {"salt": b"B"},
    "adapter A": {"adapter": b"A"},
    "salt and adapter": {"salt": b"A", "adapter": b"A"},
    "extra key A": {"extra_keys": {0: [b"A"]}},
    "two extra keys": {"extra_keys": {0: [b"A", b"A"]}},
    "joined extra keys": {"extra_keys": {0: [b"AA"]}},
    "at": {"salt": b"A@B"},
    "slash": {"salt": b"../A/B"},
    "NUL": {"salt": b"A\x00"},
    "newline": {"salt": b"A\n"},
    "4 KB": {"salt": b"A" * 4096},
    "no ASCII": {"salt": "ключ 鍵".encode()},
}


def test_salt_adapter_and_extra_keys_separate_every_call(client, server):
    namespace, tokens, size = client.namespace(SMALL), new_tokens(3), 3 * SMALL.block_bytes
    chains = {name: namespace.chain(tokens, **identity) for name, identity in IDENTITIES.items()}
    data = {name: random.randbytes(size) for name in chains}
    for name, chain in chains.items():  # nothing of those before is seen, nor does it exist for a put
        assert namespace.match(chain).hit_length_blocks == 0, name
        assert set(namespace.get(chain, bytearray(size)).statuses) == {"NOT_FOUND"}, name
        assert namespace.delete(chain).deleted_blocks == 0, name
        assert namespace.get_state(chain[2], "tail", max_bytes=size).reason == "NOT_FOUND", name
        assert namespace.put(chain, data[name]).stored == 3, name
        assert namespace.put_state(chain[2], "tail", data[name]).stored == 1, name
    gone: set[str] = set()
    for deleted in (None, *chains):  # a delete takes away its own blocks, and no others
        if deleted is not None:
            assert namespace.delete(chains[deleted]).deleted_blocks == 3, deleted
            gone.add(deleted)
        for name, chain in chains.items():
            out = bytearray(size)
            hits = 0 if name in gone else 3
            assert namespace.match(chain).hit_length_blocks == hits, name
            assert namespace.get(chain, out).ok_blocks == hits, name
            assert out == (bytes(size) if name in gone else data[name]), name
            if name not in gone:
                assert namespace.get_state(chain[2], "tail", max_bytes=size).data == data[name], name
            else:
                assert namespace.get_state(chain[2], "tail", max_bytes=size).reason == "NOT_FOUND", name
    assert "AAAA" not in server.log()


def test_mistakes_are_raised_and_change_nothing(client):
    namespace = client.namespace(SMALL)
    chain, data = namespace.chain(new_tokens(3)), random.randbytes(3000)
    assert namespace.put(chain, data).stored == 3
    before = client.stats()
    mistakes = [
        (ValueError, lambda: namespace.put(chain, bytes(999))),
        (ValueError, lambda: namespace.put(chain, [bytes(1000), bytes(999)])),
        (ValueError, lambda: namespace.put(chain, bytes(2000), first_block=2)),
        (TypeError, lambda: namespace.put(chain, "text")),
        (TypeError, lambda: namespace.put(chain.data, bytes(1000))),
        (ValueError, lambda: namespace.get(chain, bytearray(2999))),
        (ValueError, lambda: namespace.get(chain, bytes(3000))),
        (ValueError, lambda: namespace.get(chain, bytearray(30), part=(991, 10))),
        (ValueError, lambda: namespace.delete(chain, first_block=3)),
        (ValueError, lambda: namespace.delete(chain, first_block=-1, block_count=1)),
        (TypeError, lambda: namespace.match(chain, lease_s="1")),
        (ValueError, lambda: namespace.match(chain, budget_s=float("nan"))),
        (ValueError, lambda: namespace.put_state(chain[0][:31], "tail", b"x")),
        (ValueError, lambda: namespace.get_state(chain[0], "tail", max_bytes=0)),
    ]
    for error, make in mistakes:
        with pytest.raises(error):
            make()
    assert client.stats() == before
    out = bytearray(3000)
    assert namespace.get(chain, out).leading_blocks == 3
    assert out == data


def test_closed_client_says_so_and_others_go_on(client, server, door):
    closed = door(ClientConfig(target=server.target, base_budget_s=PATIENT_S))
    namespace = closed.namespace(SMALL)
    chain = namespace.chain(new_tokens(1))
    assert namespace.put(chain, bytes(1000)).stored == 1
    closed.close()
    closed.close()
    for make in (
        lambda: namespace.register(),
        lambda: namespace.match(chain),
        lambda: namespace.get(chain, bytearray(1000)),
        lambda: namespace.put(chain, bytes(1000)),
        lambda: namespace.delete(chain),
        lambda: namespace.get_state(chain[0], "tail", max_bytes=1),
        lambda: namespace.put_state(chain[0], "tail", b"x"),
        closed.stats,
    ):
        with pytest.raises(ClientClosedError):
            make()
    assert client.namespace(SMALL).match(chain).hit_length_blocks == 1


@pytest.mark.parametrize(
    ("block_bytes", "part"),
    [
        (1, (0, 1)),
        (1000, (0, 1)),
        (1000, (999, 1)),
        (1000, (0, 1000)),
        (114_688, (22_784, 45_568)),
        (2_949_120, (7, 100)),
        (2_949_120, (1, 2_000_001)),
    ],
)
def test_part_of_each_block_comes_back_byte_for_byte(client, block_bytes, part):
    namespace, blocks, (offset, size) = client.namespace(replace(SPEC, block_bytes=block_bytes)), 5, part
    chain = namespace.chain(new_tokens(blocks))
    data = [random.randbytes(block_bytes) for _ in range(blocks)]
    assert namespace.put(chain, data).stored == blocks
    assert namespace.delete(chain, first_block=2, block_count=1).deleted_blocks == 1
    out = [bytearray(size) for _ in range(blocks)]
    result = namespace.get(chain, out, part=part, lease=namespace.match(chain).lease)
    assert list(result.statuses) == ["OK", "OK", "NOT_FOUND", "OK", "OK"]
    for position in (0, 1, 3, 4):
        assert out[position] == data[position][offset : offset + size]
