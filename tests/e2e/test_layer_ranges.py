"""Some layers of a known model's blocks alone, from a real server."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvstore_client import ClientConfig, KVStoreClient, preset
from serving import running_server

PATIENT_S = 60
BLOCKS = 40  # more than 4 MiB of whole blocks


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running_server(tmp_path_factory.mktemp("data"), "--capacity", "1GiB") as server:
        yield server


@pytest.fixture
def client(server):
    with KVStoreClient(ClientConfig(target=server.target, base_budget_s=PATIENT_S)) as client:
        yield client


def put_blocks(namespace):
    """Random blocks, stored: their chain, and the bytes by block."""
    chain = namespace.chain(np.frombuffer(random.randbytes(BLOCKS * 512), dtype="<u4"))
    data = np.frombuffer(random.randbytes(BLOCKS * namespace.block_bytes), np.uint8).reshape(BLOCKS, -1)
    assert namespace.put(chain, data).stored == BLOCKS
    return chain, data


@pytest.mark.parametrize("layers", [(2, 2), (8, 8), (20, 20), (8, 14), (9, 39), (0, 39)])
@pytest.mark.parametrize("engine", ["vllm", "deepinfer"])
def test_the_layers_asked_for_come_alone_and_are_those_that_were_put(client, layers, engine):
    known = preset("deepseek-v4.1-flash", revision="r1", engine=engine)
    namespace = client.namespace(known.spec)
    chain, data = put_blocks(namespace)
    match = namespace.match(chain)
    assert match.hit_length_blocks == BLOCKS
    offset, size = known.layout.range_of(*layers)
    out = np.zeros((BLOCKS, size), np.uint8)
    result = namespace.get(chain, out, part=(offset, size), lease=match.lease)
    assert (result.leading_blocks, result.failure) == (BLOCKS, None)
    assert np.array_equal(out, data[:, offset : offset + size])


def test_a_block_fetched_layer_by_layer_is_the_whole_block_without_its_padding(client):
    known = preset("deepseek-v4.1-flash", revision="r2")
    namespace = client.namespace(known.spec)
    chain, data = put_blocks(namespace)
    fetched = []
    for part in known.layout.parts:
        out = np.zeros((BLOCKS, part.size_bytes), np.uint8)
        assert namespace.get(chain, out, part=(part.offset_bytes, part.size_bytes)).leading_blocks == BLOCKS
        fetched.append(out)
    places = [data[:, part.offset_bytes : part.end_bytes] for part in known.layout.parts]
    assert np.array_equal(np.hstack(fetched), np.hstack(places))
