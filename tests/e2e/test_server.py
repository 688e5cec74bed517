"""Every call of a real server, spoken to as any client in any language would, with good input and bad."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from google.protobuf import duration_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvstore.server import version
from kvstore_api.checksum import block_checksum
from kvstore_api.limits import MAX_CHAIN_BLOCKS, MAX_FRAME_DATA_BYTES, MAX_MESSAGE_BYTES
from kvstore_api.namespace import KvGroup, KvGroupKind, NamespaceSpec, ReplayMode
from kvstore_api.v1 import admin_pb2, types_pb2
from kvstore_api.v1 import block_store_pb2 as pb
from kvstore_client.hashing import prefix_hashes, prefix_seed
from serving import RunningServer, running_server
from third_party import (
    EXISTS,
    REFERENCE_BLOCK_BYTES,
    REJECTED,
    STORED,
    UNKNOWN,
    Client,
    block_of,
    connected,
    frame_of,
    header,
    make_chain,
    make_spec,
    put_messages,
    refused,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("data")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[Client]:
    with connected(server) as client:
        yield client


@pytest.fixture(scope="module")
def small(client: Client) -> bytes:
    """A namespace of 1,000-byte blocks."""
    return client.register(make_spec(1000, "small"))


# Both ways


@pytest.mark.parametrize("count", [1, 36, 37, 1000])
def test_reference_blocks_pass_both_ways_with_default_options(client, count):
    namespace = client.register(make_spec(REFERENCE_BLOCK_BYTES))
    chain = make_chain(f"both ways {count}", count)
    results = client.put_blocks(namespace, chain, REFERENCE_BLOCK_BYTES)
    assert [(result.block, result.status) for result in results] == [(block, STORED) for block in range(count)]
    match = client.match(namespace, chain)
    assert match.hit_length_blocks == count
    assert match.plan == types_pb2.ResumePlan(hit_tokens=count * 128, replay_start_token=count * 128)
    assert match.lease_expiry.seconds > 0
    for lease in (b"", match.lease, b"forged"):
        found, misses = client.get(namespace, chain, lease=lease)
        assert misses == {}
        assert found == {block: block_of(chain[block], REFERENCE_BLOCK_BYTES) for block in range(count)}


def test_a_second_put_finds_the_blocks(client, small):
    chain = make_chain("second put", 3)
    assert {result.status for result in client.put_blocks(small, chain, 1000)} == {STORED}
    assert {result.status for result in client.put_blocks(small, chain, 1000)} == {EXISTS}


@pytest.mark.parametrize(
    "size", [1, 4096, MAX_FRAME_DATA_BYTES, MAX_FRAME_DATA_BYTES + 1, 3 * MAX_FRAME_DATA_BYTES - 7]
)
def test_blocks_of_any_size_pass_both_ways(client, size):
    namespace = client.register(make_spec(size))
    chain = make_chain(f"size {size}", 5)
    assert {result.status for result in client.put_blocks(namespace, chain, size)} == {STORED}
    found, misses = client.get(namespace, chain, first=1)
    assert misses == {}
    assert found == {block: block_of(chain[block], size) for block in range(1, 5)}


@pytest.mark.parametrize("size", [5000, REFERENCE_BLOCK_BYTES, 2 * MAX_FRAME_DATA_BYTES + 5])
@pytest.mark.parametrize("leased", [False, True])
def test_a_part_of_each_block_comes_as_if_blocks_consisted_of_it(client, size, leased):
    namespace = client.register(make_spec(size, "parts"))
    chain = make_chain(f"parts {size}", 60 if size < MAX_FRAME_DATA_BYTES else 4)
    client.put_blocks(namespace, chain[:-1], size)
    lease = client.match(namespace, chain).lease if leased else b""
    for offset, part in [(0, 1), (1000, 2500), (size - 7, 0), (size - 7, 7), (3, size - 3), (0, size)]:
        found, misses = client.get(namespace, chain, 1, lease, part_offset_bytes=offset, part_bytes=part)
        end = offset + part if part else size
        assert found == {block: block_of(chain[block], size)[offset:end] for block in range(1, len(chain) - 1)}
        assert misses == {len(chain) - 1: "NOT_FOUND"}


def test_a_put_of_a_later_part_joins_the_earlier_one(client, small):
    chain = make_chain("parts", 10)
    client.put_blocks(small, chain[:4], 1000)
    assert client.match(small, chain).hit_length_blocks == 4
    results = client.put_blocks(small, chain, 1000, first=4)
    assert [(result.block, result.status) for result in results] == [(block, STORED) for block in range(4, 10)]
    assert client.match(small, chain).hit_length_blocks == 10


def test_what_is_not_there_is_a_miss_and_no_error(client, small):
    chain = make_chain("misses", 6)
    client.put(header(small, chain), frame_of(chain, [0, 1, 4], 1000))
    match = client.match(small, chain)
    assert match.hit_length_blocks == 2
    found, misses = client.get(small, chain)
    assert sorted(found) == [0, 1, 4]
    assert misses == {2: "NOT_FOUND", 3: "NOT_FOUND", 5: "NOT_FOUND"}
    nothing = client.match(small, make_chain("never seen", 3))
    assert (nothing.hit_length_blocks, nothing.lease) == (0, b"")
    assert not nothing.HasField("lease_expiry")


def test_deleted_blocks_are_misses(client, small):
    chain = make_chain("deleted", 5)
    client.put_blocks(small, chain, 1000)
    request = pb.DeleteBlocksRequest(namespace=small, chain=b"".join(chain), first_block=3, block_count=2)
    assert client.blocks.DeleteBlocks(request).deleted_blocks == 2
    assert client.blocks.DeleteBlocks(request).deleted_blocks == 0
    assert client.match(small, chain).hit_length_blocks == 3
    assert sorted(client.get(small, chain)[1]) == [3, 4]


def test_a_window_group_gets_a_resume_plan(client):
    groups = (
        KvGroup("full", KvGroupKind.FULL, (0,)),
        KvGroup("swa", KvGroupKind.SLIDING_WINDOW, (1,), window_tokens=128, replay_rule=ReplayMode.BOUNDED),
    )
    namespace = client.register(make_spec(1000, "window", groups=groups))
    chain = make_chain("window", 4)
    client.put_blocks(namespace, chain, 1000)
    plan = client.match(namespace, chain).plan
    assert (plan.hit_tokens, plan.replay_start_token, plan.mode) == (512, 384, types_pb2.REPLAY_MODE_BOUNDED)


def group_of(name: str, layer: int, kind: KvGroupKind, rule: ReplayMode, **fields: int) -> KvGroup:
    return KvGroup(name, kind, (layer,), replay_rule=rule, **fields)


def with_states(client: Client, name: str, groups: tuple[KvGroup, ...], blocks: int) -> tuple[bytes, list[bytes]]:
    """A namespace with these groups beside a full one, and a chain of so many stored blocks."""
    namespace = client.register(make_spec(1000, name, groups=(KvGroup("full", KvGroupKind.FULL, (0,)), *groups)))
    chain = make_chain(name, blocks + 2)
    client.put_blocks(namespace, chain[:blocks], 1000)
    return namespace, chain


def save(client: Client, namespace: bytes, prefix_hash: bytes, name: str) -> None:
    messages = state_messages(namespace, prefix_hash, name, block_of(prefix_hash, 3000))
    assert client.blocks.PutState(iter(messages)).result.status == STORED


@pytest.mark.parametrize(
    ("full", "first", "second", "end"),
    [(3, {3}, {3}, 3), (3, {3}, {2}, 0), (3, {1, 3}, {1, 2}, 1), (2, {3}, {3}, 0), (5, {1, 2, 4}, {2, 3, 5}, 2)],
)
def test_a_hit_ends_where_every_state_group_has_its_state(client, full, first, second, end):
    states = [group_of(name, layer, KvGroupKind.STATE, ReplayMode.SNAPSHOT) for layer, name in [(1, "a"), (2, "b")]]
    namespace, chain = with_states(client, f"ends {full} {first} {second}", tuple(states), full)
    for name, ends in [("a", first), ("b", second)]:
        for blocks in ends:
            save(client, namespace, chain[blocks - 1], name)
    match = client.match(namespace, chain)
    expected = types_pb2.ResumePlan(
        hit_tokens=end * 128, replay_start_token=end * 128, mode=types_pb2.REPLAY_MODE_SNAPSHOT if end else 0
    )
    assert (match.hit_length_blocks, match.plan, bool(match.lease)) == (end, expected, bool(end))
    assert len(client.get(namespace, chain[:full], lease=match.lease)[0]) == full
    if end:
        assert get_state(client, namespace, chain[end - 1], "a") == block_of(chain[end - 1], 3000)


@pytest.mark.parametrize(
    ("rule", "start", "mode"),
    [
        (ReplayMode.BOUNDED, 512 - 131, types_pb2.REPLAY_MODE_BOUNDED),
        (ReplayMode.EXACT, 512 - 256, types_pb2.REPLAY_MODE_EXACT),
        (ReplayMode.SNAPSHOT, 512 - 256, types_pb2.REPLAY_MODE_EXACT),
    ],
)
def test_the_span_that_a_namespace_asks_for_is_in_the_plan(client, rule, start, mode):
    """As speculative decoding does, which needs a few tokens more than a window."""
    swa = group_of("swa", 1, KvGroupKind.SLIDING_WINDOW, rule, window_tokens=128, replay_tokens=131)
    namespace, chain = with_states(client, f"span {rule}", (swa,), 4)
    plan = types_pb2.ResumePlan(hit_tokens=512, replay_start_token=start, mode=mode)
    assert client.match(namespace, chain).plan == plan
    assert client.match(namespace, chain[:1]).hit_length_blocks == 0, "there would be nothing left of it"


def test_prefixes_that_end_in_the_same_tokens_keep_separate_snapshots(client):
    swa = group_of("swa", 1, KvGroupKind.SLIDING_WINDOW, ReplayMode.SNAPSHOT, window_tokens=128)
    namespace = client.register(make_spec(1000, "same end", groups=(KvGroup("full", KvGroupKind.FULL, (0,)), swa)))
    last = list(range(128))
    chains = [list(prefix_hashes(prefix_seed(namespace), [first] * 128 + last)) for first in (1, 2)]
    assert chains[0][1] != chains[1][1]
    for chain in chains:
        client.put_blocks(namespace, chain, 1000)
    save(client, namespace, chains[0][1], "swa")
    modes = [client.match(namespace, chain).plan.mode for chain in chains]
    assert modes == [types_pb2.REPLAY_MODE_SNAPSHOT, types_pb2.REPLAY_MODE_EXACT]
    assert get_state(client, namespace, chains[1][1], "swa") is None
    save(client, namespace, chains[1][1], "swa")
    states = [get_state(client, namespace, chain[1], "swa") for chain in chains]
    assert states == [block_of(chain[1], 3000) for chain in chains]


def test_many_thousand_blocks_in_one_call(client):
    namespace = client.register(make_spec(1, "tiny"))
    chain = make_chain("tiny", 8192)
    assert {result.status for result in client.put_blocks(namespace, chain, 1)} == {STORED}
    assert client.match(namespace, chain).hit_length_blocks == 8192
    assert len(client.get(namespace, chain)[0]) == 8192


def test_the_longest_chain_is_answered_in_one_message_each(client, small):
    chain = make_chain("longest", MAX_CHAIN_BLOCKS)
    results = client.put(header(small, chain), frame_of(chain, [7], 1000))
    assert len(results) == MAX_CHAIN_BLOCKS
    assert results[7].status == STORED
    assert {(r.status, r.reason) for r in results if r.block != 7} == {(REJECTED, "MISSING")}
    assert results[0].detail
    found, misses = client.get(small, chain)
    assert list(found) == [7]
    assert len(misses) == MAX_CHAIN_BLOCKS - 1


# State objects


def state_messages(
    namespace: bytes,
    prefix_hash: bytes,
    name: str,
    data: bytes,
    *,
    step: int = MAX_FRAME_DATA_BYTES,
    changed: dict[str, object] | None = None,
) -> list[pb.PutStateRequest]:
    head = {
        "namespace": namespace,
        "prefix_hash": prefix_hash,
        "name": name,
        "size_bytes": len(data),
        "checksum": block_checksum(data, prefix_hash),
    }
    return [
        pb.PutStateRequest(header=pb.PutStateHeader(**{**head, **(changed or {})})),
        *(pb.PutStateRequest(offset_bytes=at, data=data[at : at + step]) for at in range(0, len(data), step)),
    ]


def get_state(client: Client, namespace: bytes, prefix_hash: bytes, name: str) -> bytes | None:
    request = pb.GetStateRequest(namespace=namespace, prefix_hash=prefix_hash, name=name)
    frames = list(client.blocks.GetState(request))
    if not frames[0].found:
        assert frames == [pb.GetStateResponse()]
        return None
    data = bytearray()
    for frame in frames:
        assert frame.offset_bytes == len(data)
        assert len(frame.data) <= MAX_FRAME_DATA_BYTES
        data += frame.data
    assert frames[0].size_bytes == len(data)
    assert frames[0].checksum == block_checksum(data, prefix_hash)
    return bytes(data)


@pytest.mark.parametrize("size", [1, 1_415_040, 9_000_000])
def test_state_objects_pass_both_ways_and_never_change(client, small, size):
    (prefix_hash,) = make_chain(f"state {size}", 1)
    data = block_of(prefix_hash, size)
    assert get_state(client, small, prefix_hash, "swa") is None
    messages = state_messages(small, prefix_hash, "swa", data, changed={"traffic_class": "handoff"})
    assert client.blocks.PutState(iter(messages)).result.status == STORED
    assert client.blocks.PutState(iter(messages)).result.status == EXISTS
    assert get_state(client, small, prefix_hash, "swa") == data
    assert get_state(client, small, prefix_hash, "other") is None


def test_a_state_object_with_a_wrong_checksum_is_rejected(client, small):
    (prefix_hash,) = make_chain("state checksum", 1)
    result = client.blocks.PutState(
        iter(state_messages(small, prefix_hash, "swa", b"data", changed={"checksum": 1}))
    ).result
    assert (result.status, result.reason) == (REJECTED, "BAD_CHECKSUM")
    assert get_state(client, small, prefix_hash, "swa") is None


@pytest.mark.parametrize(
    ("fields", "kept", "words"),
    [
        ({"size_bytes": 0}, 9, "size_bytes is 0"),
        ({"size_bytes": (64 << 20) + 1}, 9, f"size_bytes is {(64 << 20) + 1}"),
        ({"size_bytes": 11}, 9, "ended after 10 of 11 bytes"),
        ({"size_bytes": 9}, 9, "ends at byte 10"),
        ({"name": ""}, 9, "name has 0 bytes"),
        ({"name": "n" * 257}, 9, "name has 257 bytes"),
        ({"prefix_hash": b"short"}, 9, "prefix_hash has 5 bytes, not 32"),
        ({}, 1, "ended after 0 of 10 bytes"),
        ({}, 2, "ended after 4 of 10 bytes"),
    ],
)
def test_a_broken_state_put_is_refused(client, small, fields, kept, words):
    (prefix_hash,) = make_chain("broken state", 1)
    messages = state_messages(small, prefix_hash, "swa", b"0123456789", step=4, changed=fields)
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", words):
        client.blocks.PutState(iter(messages[:kept]))
    assert get_state(client, small, prefix_hash, "swa") is None


def test_state_frames_out_of_order_are_refused(client, small):
    (prefix_hash,) = make_chain("state order", 1)
    head, *frames = state_messages(small, prefix_hash, "swa", b"0123456789", step=4)
    for messages in ([head, frames[1]], [head, frames[0], frames[0]], [head, frames[0], head], [frames[0]], []):
        with refused(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT"):
            client.blocks.PutState(iter(messages))


# Bad input


def test_a_wrong_sized_or_damaged_block_is_rejected_alone(client, small):
    chain = make_chain("one bad", 5)
    good = frame_of(chain, range(5), 1000)
    short = good.data[:1999] + good.data[2000:]  # block 1 has lost a byte
    results = client.put(
        header(small, chain),
        pb.PutBlocksRequest(
            blocks=range(5),
            checksums=[*good.checksums[:3], good.checksums[3] ^ 1, good.checksums[4]],
            sizes=[1000, 999, 1000, 1000, 1000],
            data=short,
        ),
    )
    assert [(result.block, result.status, result.reason) for result in results] == [
        (0, STORED, ""),
        (1, REJECTED, "WRONG_SIZE"),
        (2, STORED, ""),
        (3, REJECTED, "BAD_CHECKSUM"),
        (4, STORED, ""),
    ]
    assert "999" in results[1].detail
    assert "1000" in results[1].detail
    found, misses = client.get(small, chain)
    assert sorted(found) == [0, 2, 4]
    assert sorted(misses) == [1, 3]


def test_a_wrong_sized_block_in_parts_is_rejected_alone(client):
    size = MAX_FRAME_DATA_BYTES + 100
    namespace = client.register(make_spec(size, "wrong parts"))
    chain = make_chain("wrong parts", 2)
    head, *frames = put_messages(namespace, chain, size)
    wrong = [
        pb.PutBlocksRequest(blocks=[0], checksums=[9], sizes=[size + 5], data=bytes(MAX_FRAME_DATA_BYTES)),
        pb.PutBlocksRequest(
            blocks=[0], checksums=[9], sizes=[size + 5], offset_bytes=MAX_FRAME_DATA_BYTES, data=bytes(105)
        ),
    ]
    results = client.put(head, *wrong, *frames[2:])
    assert [(result.status, result.reason) for result in results] == [(REJECTED, "WRONG_SIZE"), (STORED, "")]


def test_blocks_that_are_announced_and_not_brought_are_missing(client, small):
    chain = make_chain("not brought", 4)
    results = client.put(header(small, chain, first=1), frame_of(chain, [2], 1000))
    assert [(result.block, result.reason) for result in results] == [(1, "MISSING"), (2, ""), (3, "MISSING")]


BROKEN_PUTS: dict[str, tuple[Callable[[bytes, list[bytes]], list[pb.PutBlocksRequest]], str]] = {
    "nothing": (lambda namespace, chain: [], "ended without a header"),
    "no header": (lambda namespace, chain: [frame_of(chain, [0], 1000)], "first message of a put has no header"),
    "second header": (
        lambda namespace, chain: [header(namespace, chain), header(namespace, chain)],
        "a second header",
    ),
    "header with data": (
        lambda namespace, chain: [pb.PutBlocksRequest(header=header(namespace, chain).header, blocks=[0], data=b"x")],
        "holds only the header",
    ),
    "no blocks": (lambda namespace, chain: [header(namespace, chain, block_count=0)], "block_count is 0"),
    "range beyond chain": (
        lambda namespace, chain: [header(namespace, chain, first=1, block_count=3)],
        "blocks 1 to 3 are meant, but the chain has 3 blocks",
    ),
    "block beyond range": (
        lambda namespace, chain: [
            header(namespace, chain, block_count=2),
            frame_of(chain, [0], 1000),
            frame_of(chain, [2], 1000),
        ],
        "block 2, the header announced 0 to 1",
    ),
    "descending": (
        lambda namespace, chain: [header(namespace, chain), frame_of(chain, [0], 1000), frame_of(chain, [2, 1], 1000)],
        "block 1 where 3 or a later one must follow",
    ),
    "sizes do not add up": (
        lambda namespace, chain: [
            header(namespace, chain),
            frame_of(chain, [0], 1000),
            frame_of(chain, [1, 2], 1000, data=b"x" * 1999),
        ],
        "has 1999 bytes, its 2 blocks add up to 2000",
    ),
    "cut off": (
        lambda namespace, chain: [
            header(namespace, chain),
            frame_of(chain, [0], 1000),
            frame_of(chain, [1], 1000, data=b"x" * 999),
        ],
        "ended inside block 1, of which 999 of 1000 bytes",
    ),
    "empty frame": (lambda namespace, chain: [header(namespace, chain), pb.PutBlocksRequest()], "names no blocks"),
}


@pytest.mark.parametrize("case", BROKEN_PUTS)
def test_a_broken_put_is_refused_with_its_numbers(client, small, case):
    messages, words = BROKEN_PUTS[case]
    chain = make_chain(f"broken {case}", 3)
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", words):
        client.put(*messages(small, chain))
    assert set(client.get(small, chain)[0]) <= {0}


def test_what_was_stored_before_a_broken_frame_stays(client):
    size = MAX_FRAME_DATA_BYTES
    namespace = client.register(make_spec(size, "before broken"))
    chain = make_chain("before broken", 40)
    head, *frames = put_messages(namespace, chain, size)
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", "add up to"):
        client.put(head, *frames[:39], pb.PutBlocksRequest(blocks=[39], checksums=[1], sizes=[9], data=b"eightbyt" * 2))
    found, _ = client.get(namespace, chain)
    # Groups that were complete are stored; the rest left nothing.
    assert found
    assert found == {block: block_of(chain[block], size) for block in range(len(found))}
    assert len(found) < 39 or len(found) % 8 == 7


BAD_CALLS: dict[str, tuple[Callable[[Client, bytes, list[bytes]], object], grpc.StatusCode, str, str]] = {
    "match: unknown namespace": (
        lambda client, namespace, chain: client.match(UNKNOWN, chain),
        grpc.StatusCode.NOT_FOUND,
        "NAMESPACE_NOT_FOUND",
        "0000000000000000",
    ),
    "get: unknown namespace": (
        lambda client, namespace, chain: client.get(UNKNOWN, chain),
        grpc.StatusCode.NOT_FOUND,
        "NAMESPACE_NOT_FOUND",
        "0000000000000000",
    ),
    "put: unknown namespace": (
        lambda client, namespace, chain: client.put_blocks(UNKNOWN, chain, 1000),
        grpc.StatusCode.NOT_FOUND,
        "NAMESPACE_NOT_FOUND",
        "0000000000000000",
    ),
    "get state: unknown namespace": (
        lambda client, namespace, chain: get_state(client, UNKNOWN, chain[0], "swa"),
        grpc.StatusCode.NOT_FOUND,
        "NAMESPACE_NOT_FOUND",
        "0000000000000000",
    ),
    "match: short namespace": (
        lambda client, namespace, chain: client.match(b"short", chain),
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
        "namespace has 5 bytes",
    ),
    "match: bad hash length": (
        lambda client, namespace, chain: client.match(namespace, [*chain, b"short"]),
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
        "chain has 101 bytes, which is no multiple of 32",
    ),
    "get: bad hash length": (
        lambda client, namespace, chain: client.get(namespace, [*chain, b"short"]),
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
        "chain has 101 bytes",
    ),
    "put: bad hash length": (
        lambda client, namespace, chain: client.put(header(namespace, [*chain, b"short"])),
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
        "chain has 101 bytes",
    ),
    "match: over-long chain": (
        lambda client, namespace, chain: client.match(namespace, [bytes(32)] * (MAX_CHAIN_BLOCKS + 1)),
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
        "chain has 65537 blocks, the limit is 65536",
    ),
    "match: unknown class": (
        lambda client, namespace, chain: client.match(namespace, chain, traffic_class="agnet"),
        grpc.StatusCode.INVALID_ARGUMENT,
        "UNKNOWN_TRAFFIC_CLASS",
        "agnet",
    ),
    "match: unknown class with a long name beyond ASCII": (
        lambda client, namespace, chain: client.match(namespace, chain, traffic_class="层🧱" * 1500),
        grpc.StatusCode.INVALID_ARGUMENT,
        "UNKNOWN_TRAFFIC_CLASS",
        "层🧱" * 30,
    ),
    "find blocks: long text beyond ASCII": (
        lambda client, namespace, chain: client.admin.FindBlocks(
            admin_pb2.FindBlocksRequest(prefix_hash_hex="🧱" * 3000)
        ),
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
        "🧱" * 60,
    ),
    "put: unknown class": (
        lambda client, namespace, chain: client.put(header(namespace, chain, traffic_class="agnet")),
        grpc.StatusCode.INVALID_ARGUMENT,
        "UNKNOWN_TRAFFIC_CLASS",
        "agent, chatbot, handoff",
    ),
    "put state: unknown class": (
        lambda client, namespace, chain: client.blocks.PutState(
            iter(state_messages(namespace, chain[0], "swa", b"x", changed={"traffic_class": "agnet"}))
        ),
        grpc.StatusCode.INVALID_ARGUMENT,
        "UNKNOWN_TRAFFIC_CLASS",
        "agnet",
    ),
    "match: negative lease": (
        lambda client, namespace, chain: client.match(namespace, chain, lease=duration_pb2.Duration(seconds=-1)),
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
        "lease is -1 s",
    ),
    "get: no blocks": (
        lambda client, namespace, chain: list(
            client.blocks.GetBlocks(pb.GetBlocksRequest(namespace=namespace, chain=b"".join(chain)))
        ),
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
        "",
    ),
    "get: beyond the chain": (
        lambda client, namespace, chain: list(
            client.blocks.GetBlocks(
                pb.GetBlocksRequest(namespace=namespace, chain=b"".join(chain), first_block=1, block_count=3)
            )
        ),
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
        "3 blocks",
    ),
    "get: a range that overflows": (
        lambda client, namespace, chain: list(
            client.blocks.GetBlocks(
                pb.GetBlocksRequest(
                    namespace=namespace, chain=b"".join(chain), first_block=2**32 - 1, block_count=2**32 - 1
                )
            )
        ),
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
        "3 blocks",
    ),
    **{
        f"get: part {part}": (
            lambda client, namespace, chain, part=part: client.get(
                namespace, chain, part_offset_bytes=part[0], part_bytes=part[1]
            ),
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_ARGUMENT",
            f"from byte {part[0]} on is asked for, but blocks have 1000 bytes",
        )
        for part in [(1000, 0), (1000, 1), (0, 1001), (999, 2), (2**64 - 1, 2**64 - 1)]
    },
    "register: incomplete spec": (
        lambda client, namespace, chain: client.blocks.RegisterNamespace(
            pb.RegisterNamespaceRequest(spec=types_pb2.NamespaceSpec(model="m"))
        ),
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
        "tenant",
    ),
    "register: unknown rule": (
        lambda client, namespace, chain: client.blocks.RegisterNamespace(
            pb.RegisterNamespaceRequest(spec=types_pb2.NamespaceSpec(groups=[types_pb2.KvGroup(name="g")]))
        ),
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
        "'g'",
    ),
    "register: another digest": (
        lambda client, namespace, chain: client.blocks.RegisterNamespace(
            pb.RegisterNamespaceRequest(spec=make_spec(1000).to_proto(), namespace=UNKNOWN)
        ),
        grpc.StatusCode.FAILED_PRECONDITION,
        "NAMESPACE_MISMATCH",
        "0000000000000000",
    ),
    "evict: no condition": (
        lambda client, namespace, chain: client.admin.Evict(admin_pb2.EvictRequest()),
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
        "evict",
    ),
    "evict: impossible share": (
        lambda client, namespace, chain: client.admin.Evict(admin_pb2.EvictRequest(down_to_share=1.5)),
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
        "1.5",
    ),
    "evict: unknown class": (
        lambda client, namespace, chain: client.admin.Evict(admin_pb2.EvictRequest(traffic_class="agnet")),
        grpc.StatusCode.INVALID_ARGUMENT,
        "UNKNOWN_TRAFFIC_CLASS",
        "agnet",
    ),
    "ttl: unknown class": (
        lambda client, namespace, chain: client.admin.SetTrafficClassTtl(
            admin_pb2.SetTrafficClassTtlRequest(traffic_class="agnet", ttl=duration_pb2.Duration(seconds=5))
        ),
        grpc.StatusCode.INVALID_ARGUMENT,
        "UNKNOWN_TRAFFIC_CLASS",
        "agnet",
    ),
    "ttl: nothing": (
        lambda client, namespace, chain: client.admin.SetTrafficClassTtl(
            admin_pb2.SetTrafficClassTtlRequest(traffic_class="agent")
        ),
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
        "ttl is 0",
    ),
    "ttl: half a second": (
        lambda client, namespace, chain: client.admin.SetTrafficClassTtl(
            admin_pb2.SetTrafficClassTtlRequest(traffic_class="agent", ttl=duration_pb2.Duration(nanos=500_000_000))
        ),
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
        "whole seconds",
    ),
    **{
        f"list namespaces: token {token!r}": (
            lambda client, namespace, chain, token=token: client.admin.ListNamespaces(
                admin_pb2.ListNamespacesRequest(page_token=token)
            ),
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_ARGUMENT",
            "page_token",
        )
        for token in ("x", "-1", "0", "1.0", " 1", "\u0661", "4294967296", "9" * 80)
    },
    **{
        f"list quotas: token {token!r}": (
            lambda client, namespace, chain, token=token: client.admin.ListQuotas(
                admin_pb2.ListQuotasRequest(page_token=token)
            ),
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_ARGUMENT",
            "page_token",
        )
        for token in ("x", "/", "class", "tenant/", "/name", "Class/agent", "klass/agent", "x" * 80)
    },
    "register: a spec of more than 64 KiB": (
        lambda client, namespace, chain: client.register(
            make_spec(1000, labels={f"label {number}": "v" * 4096 for number in range(17)})
        ),
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
        "at most 65536",
    ),
    "namespace: no such": (
        lambda client, namespace, chain: client.admin.GetNamespace(
            admin_pb2.GetNamespaceRequest(namespace_hex="0" * 64)
        ),
        grpc.StatusCode.NOT_FOUND,
        "NAMESPACE_NOT_FOUND",
        "0" * 64,
    ),
    "find blocks: too few digits": (
        lambda client, namespace, chain: client.admin.FindBlocks(admin_pb2.FindBlocksRequest(prefix_hash_hex="abc")),
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
        "abc",
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_input_has_a_clear_error_that_names_the_value(client, small, case):
    call, code, reason, words = BAD_CALLS[case]
    with refused(code, reason, words):
        call(client, small, make_chain("bad calls", 3))


@pytest.mark.parametrize(
    "method", ["RegisterNamespace", "MatchPrefix", "GetBlocks", "PutBlocks", "GetState", "PutState"]
)
def test_bytes_that_are_no_message_are_refused(client, method):
    path = f"/kvstore.v1.BlockStore/{method}"
    garbage = b"\xff" * 50
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", "is no kvstore.v1."):
        if method.startswith("Get"):
            list(client.channel.unary_stream(path)(garbage))
        elif method.startswith("Put"):
            client.channel.stream_unary(path)(iter([garbage]))
        else:
            client.channel.unary_unary(path)(garbage)


def test_a_message_over_4_mib_is_refused_and_the_server_goes_on(client, small):
    with pytest.raises(grpc.RpcError) as caught:
        client.put(header(small, make_chain("too large", 1)), pb.PutBlocksRequest(data=bytes(MAX_MESSAGE_BYTES)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert client.match(small, make_chain("too large", 1)).hit_length_blocks == 0


def test_a_frame_over_1_mib_is_refused(client, small):
    chain = make_chain("large frame", 1100)
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", "has 1100000 bytes of block data"):
        client.put(header(small, chain), frame_of(chain, range(1100), 1000))


# Admin, health, reflection


def test_status_says_what_the_server_is(client, server):
    status = client.admin.GetStatus(admin_pb2.GetStatusRequest())
    assert status.version == version()
    assert re.fullmatch("[0-9a-f]+", status.store_id)
    assert Path(status.data_dir).is_dir()
    assert status.capacity_bytes == 10 << 30
    assert 0 < status.used_bytes <= status.capacity_bytes
    assert 0 < status.start_time.seconds <= time.time()
    assert [usage.traffic_class.name for usage in status.classes] == ["agent", "chatbot", "handoff"]
    assert status.durability == "memory"


def test_operators_see_and_change_what_there_is(tmp_path):
    with running_server(tmp_path / "data") as server, connected(server) as client:
        namespace = client.register(make_spec(1000))
        chain = make_chain("operators", 6)
        client.put(header(namespace, chain, traffic_class="chatbot"), frame_of(chain, range(6), 1000))
        (listed,) = client.admin.ListNamespaces(admin_pb2.ListNamespacesRequest()).namespaces
        assert (listed.namespace, listed.live.blocks, listed.live.bytes) == (namespace, 6, 6000)
        assert NamespaceSpec.from_proto(listed.spec) == make_spec(1000)
        shown = client.admin.GetNamespace(admin_pb2.GetNamespaceRequest(namespace_hex=namespace.hex()[:8])).namespace
        assert shown == listed
        (found,) = client.admin.FindBlocks(admin_pb2.FindBlocksRequest(prefix_hash_hex=chain[2].hex())).blocks
        assert (found.prefix_hash, found.block, found.size_bytes, found.state) == (chain[2], 2, 1000, "live")
        assert found.checksum == block_checksum(block_of(chain[2], 1000), chain[2])
        assert [use.traffic_class for use in found.uses] == ["chatbot"]
        changed = client.admin.SetTrafficClassTtl(
            admin_pb2.SetTrafficClassTtlRequest(traffic_class="chatbot", ttl=duration_pb2.Duration(seconds=60))
        )
        assert (changed.before.ttl.seconds, changed.after.ttl.seconds) == (604_800, 60)
        classes = client.admin.ListTrafficClasses(admin_pb2.ListTrafficClassesRequest()).classes
        assert {c.traffic_class.name: c.traffic_class.ttl.seconds for c in classes}["chatbot"] == 60
        assert {c.traffic_class.name: c.usage.blocks for c in classes}["chatbot"] == 6
        request = admin_pb2.EvictRequest(traffic_class="chatbot", dry_run=True)
        assert client.admin.Evict(request).blocks == 6
        assert client.match(namespace, chain).hit_length_blocks == 6
        request.dry_run = False
        assert client.admin.Evict(request).bytes == 6000
        assert client.match(namespace, chain).hit_length_blocks == 0
        drop = admin_pb2.DropNamespaceRequest(namespace_hex=namespace.hex(), dry_run=True)
        assert client.admin.DropNamespace(drop).namespace.namespace == namespace
        drop.dry_run = False
        client.admin.DropNamespace(drop)
        with refused(grpc.StatusCode.NOT_FOUND, "NAMESPACE_NOT_FOUND"):
            client.match(namespace, chain)


def namespace_pages(client: Client) -> Iterator[list[admin_pb2.NamespaceInfo]]:
    token = None
    while token != "":
        answer = client.admin.ListNamespaces(admin_pb2.ListNamespacesRequest(page_token=token))
        assert answer.ByteSize() < (1 << 20) + 1000
        yield list(answer.namespaces)
        token = answer.next_page_token


def test_more_namespaces_than_fit_in_a_message_come_in_pages(tmp_path):
    labels = {f"label {number}": "v" * 4096 for number in range(15)}
    with running_server(tmp_path / "data") as server, connected(server) as client:
        assert list(namespace_pages(client)) == [[]]
        digests = [client.register(make_spec(1000, f"model {number}", labels=labels)) for number in range(80)]
        pages = list(namespace_pages(client))
        assert [info.namespace for page in pages for info in page] == digests
        assert [len(page) for page in pages] == [16, 16, 16, 16, 16]
        pages_while_one_goes = namespace_pages(client)
        seen = next(pages_while_one_goes)
        for gone in (seen[-1], pages[1][0]):  # the one that the token names, and the one after it
            client.admin.DropNamespace(admin_pb2.DropNamespaceRequest(namespace_hex=gone.namespace.hex()))
        seen += [info for page in pages_while_one_goes for info in page]
        assert [info.namespace for info in seen] == [*digests[:16], *digests[17:]]


def quota_pages(client: Client) -> Iterator[list[admin_pb2.QuotaUsage]]:
    token = None
    while token != "":
        answer = client.admin.ListQuotas(admin_pb2.ListQuotasRequest(page_token=token))
        assert answer.ByteSize() < (1 << 20) + 10_000
        yield list(answer.quotas)
        token = answer.next_page_token


def test_more_tenants_than_fit_in_a_message_come_in_pages(tmp_path):
    names = [f"{number:04} {'n' * 4000}" for number in range(1100)]
    config = tmp_path / "kvstore.toml"
    config.write_text("".join(f'[tenants."{name}"]\nshare = 0.0005\n' for name in names))
    with running_server(tmp_path / "data", "--config", str(config)) as server, connected(server) as client:
        pages = list(quota_pages(client))
        assert [quota.tenant for page in pages for quota in page][3:] == names
        assert [quota.traffic_class for quota in pages[0][:3]] == ["agent", "chatbot", "handoff"]
        assert len(pages) == 5
        pages_while_one_comes = quota_pages(client)
        seen = next(pages_while_one_comes)
        early, late = "0000 early", "9999 late"  # the one before what was seen, the other after it
        for tenant in (early, late):
            client.register(make_spec(1000, tenant=tenant))
        seen += [quota for page in pages_while_one_comes for quota in page]
        assert [quota.tenant for quota in seen][3:] == [*names, late]


def test_health_knows_the_services(client):
    health = health_pb2_grpc.HealthStub(client.channel)
    for name in ("", "kvstore.v1.BlockStore", "kvstore.v1.Admin"):
        status = health.Check(health_pb2.HealthCheckRequest(service=name)).status
        assert status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(health_pb2.HealthCheckRequest(service="kvstore.v1.Nothing"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_reflection_lists_and_describes_the_services(client):
    stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="kvstore.v1.BlockStore"),
    ]
    listed, described = stub.ServerReflectionInfo(iter(requests))
    names = {service.name for service in listed.list_services_response.service}
    assert {"kvstore.v1.BlockStore", "kvstore.v1.Admin", "grpc.health.v1.Health"} <= names
    assert any(b"PutBlocks" in file for file in described.file_descriptor_response.file_descriptor_proto)
