"""Prefix hashes and namespace digests: one name for one thing, in every process, for ever.

The functions `reference_*` compute the names a second time, from the description alone and without the product's code; the
golden file was written with them.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_api.namespace import KvGroup, KvGroupKind, NamespaceSpec, ParallelDimension, ReplayMode
from kvstore_client.hashing import TokenIdError, prefix_hashes, prefix_seed

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "prefix_hashes.json").read_text())
NAMESPACE = bytes(range(32))
EDGE_IDS = (0, 255, 256, 65535, 65536, 2**31 - 1)


def reference_field(tag: int, value: bytes) -> bytes:
    return struct.pack("<HQ", tag, len(value)) + value


def reference_digest(spec: dict) -> str:
    """The digest of a namespace spec given as JSON."""

    def text(tag: int, value: str) -> bytes:
        return reference_field(tag, value.encode("utf-8"))

    def number(tag: int, value: int) -> bytes:
        return reference_field(tag, struct.pack("<Q", value))

    encoded = reference_field(0, b"kvstore/namespace/1")
    for tag, name in enumerate(("tenant", "model", "revision", "engine", "layout", "kv_dtype"), start=1):
        encoded += text(tag, spec[name])
    encoded += number(7, spec["block_tokens"]) + number(8, spec["block_bytes"])
    for name, rank, size in sorted(spec["parallel"]):
        if size > 1:
            encoded += reference_field(9, text(1, name) + number(2, rank) + number(3, size))
    for group in spec["groups"]:
        layers = b"".join(struct.pack("<I", layer) for layer in group["layers"])
        encoded += reference_field(
            10,
            text(1, group["name"])
            + number(2, group["kind"])
            + reference_field(3, layers)
            + number(4, group["window_tokens"])
            + number(5, group["replay_rule"])
            + number(6, group["replay_tokens"]),
        )
    for key, value in sorted(spec["labels"].items()):
        encoded += reference_field(11, text(1, key) + text(2, value))
    return hashlib.sha256(encoded).hexdigest()


def reference_seed(namespace: bytes, salt: bytes, adapter: bytes) -> bytes:
    """The hash before block 0."""
    hasher = hashlib.sha256()
    for tag, value in ((0, b"kvstore/prefix/1"), (1, namespace), (2, salt), (3, adapter)):
        hasher.update(reference_field(tag, value))
    return hasher.digest()


def reference_chain(seed: bytes, token_ids: list[int], block_tokens: int, extra_keys: dict[int, list[bytes]]) -> bytes:
    """All hashes of a chain, one after another."""
    chain, previous = b"", seed
    for block in range(len(token_ids) // block_tokens):
        hasher = hashlib.sha256(previous)
        for token in token_ids[block * block_tokens : (block + 1) * block_tokens]:
            hasher.update(struct.pack("<I", token))
        for key in extra_keys.get(block, []):
            hasher.update(reference_field(1, key))
        previous = hasher.digest()
        chain += previous
    return chain


def spec_from_json(spec: dict) -> NamespaceSpec:
    return NamespaceSpec(
        **{
            **spec,
            "parallel": tuple(ParallelDimension(*dimension) for dimension in spec["parallel"]),
            "groups": tuple(
                KvGroup(
                    group["name"],
                    KvGroupKind(group["kind"]),
                    tuple(group["layers"]),
                    group["window_tokens"],
                    ReplayMode(group["replay_rule"]),
                    group["replay_tokens"],
                )
                for group in spec["groups"]
            ),
        }
    )


def tokens_of(vector: dict) -> list[int]:
    """Token ids of a golden vector: a * i + b modulo m, so that the file stays small."""
    a, b, modulus = vector["tokens"]
    return [(a * i + b) % modulus for i in range(vector["token_count"])]


def extra_keys_of(vector: dict) -> dict[int, list[bytes]]:
    return {int(block): [bytes.fromhex(key) for key in keys] for block, keys in vector["extra_keys"].items()}


@pytest.mark.parametrize("vector", GOLDEN["namespaces"], ids=lambda vector: vector["name"])
def test_namespace_digest_of_every_golden_vector_is_unchanged(vector):
    assert spec_from_json(vector["spec"]).digest().hex() == vector["digest"]


@pytest.mark.parametrize("vector", GOLDEN["seeds"], ids=lambda vector: vector["name"])
def test_seed_of_every_golden_vector_is_unchanged(vector):
    namespace, salt, adapter = (bytes.fromhex(vector[name]) for name in ("namespace", "salt", "adapter"))
    assert prefix_seed(namespace, salt=salt, adapter=adapter).hex() == vector["seed"]


@pytest.mark.parametrize("vector", GOLDEN["chains"], ids=lambda vector: vector["name"])
def test_chain_of_every_golden_vector_is_unchanged(vector):
    chain = prefix_hashes(
        bytes.fromhex(vector["seed"]), tokens_of(vector), vector["block_tokens"], extra_keys_of(vector)
    )
    assert [prefix_hash.hex() for prefix_hash in chain] == vector["chain"]


def test_golden_file_agrees_with_the_reference():
    for vector in GOLDEN["namespaces"]:
        assert reference_digest(vector["spec"]) == vector["digest"]
    for vector in GOLDEN["seeds"]:
        arguments = (bytes.fromhex(vector[name]) for name in ("namespace", "salt", "adapter"))
        assert reference_seed(*arguments).hex() == vector["seed"]
    for vector in GOLDEN["chains"]:
        arguments = (bytes.fromhex(vector["seed"]), tokens_of(vector), vector["block_tokens"], extra_keys_of(vector))
        assert reference_chain(*arguments).hex() == "".join(vector["chain"])


@settings(deadline=None)
@given(
    namespace=st.binary(min_size=32, max_size=32),
    salt=st.binary(max_size=5000),
    adapter=st.binary(max_size=50),
    token_ids=st.lists(st.integers(0, 2**32 - 1) | st.sampled_from(EDGE_IDS), max_size=60),
    block_tokens=st.integers(1, 9),
    extra_keys=st.dictionaries(st.integers(0, 20), st.lists(st.binary(max_size=20), max_size=3), max_size=4),
)
def test_live_hashes_agree_with_the_reference(namespace, salt, adapter, token_ids, block_tokens, extra_keys):
    seed = prefix_seed(namespace, salt=salt, adapter=adapter)
    assert seed == reference_seed(namespace, salt, adapter)
    chain = prefix_hashes(seed, token_ids, block_tokens, extra_keys)
    assert chain.data == reference_chain(seed, token_ids, block_tokens, extra_keys)
    assert prefix_hashes(seed, np.array(token_ids, dtype=np.uint32), block_tokens, extra_keys) == chain


SHORT_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@settings(deadline=None)
@given(
    texts=st.lists(SHORT_TEXT, min_size=6, max_size=6),
    block_bytes=st.integers(1, 64 << 20),
    parallel=st.lists(
        st.tuples(SHORT_TEXT, st.integers(0, 7)).map(lambda pair: (pair[0], pair[1] // 2, pair[1] + 1)),
        max_size=3,
        unique_by=lambda dimension: dimension[0],
    ),
    layers=st.sets(st.integers(0, 300), max_size=12),
    window=st.integers(1, 4096),
    labels=st.dictionaries(SHORT_TEXT, st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=4),
)
def test_live_digests_agree_with_the_reference(texts, block_bytes, parallel, layers, window, labels):
    half = sorted(layers)[: len(layers) // 2]
    spec = {
        **dict(zip(("tenant", "model", "revision", "engine", "layout", "kv_dtype"), texts, strict=True)),
        "block_tokens": 128,
        "block_bytes": block_bytes,
        "parallel": parallel,
        "groups": [
            {"name": "full", "kind": 1, "layers": half, "window_tokens": 0, "replay_rule": 0, "replay_tokens": 0},
            {
                "name": "window",
                "kind": 2,
                "layers": sorted(layers.difference(half)),
                "window_tokens": window,
                "replay_rule": 1,
                "replay_tokens": window // 3,
            },
        ],
        "labels": labels,
    }
    product = spec_from_json(spec)
    product.validate()
    assert product.digest().hex() == reference_digest(spec)
    assert NamespaceSpec.from_proto(product.to_proto()).digest() == product.digest()


def test_any_change_of_one_token_id_changes_its_hash_and_all_after_it():
    block_tokens, blocks = 128, 3
    seen = {}
    for base in EDGE_IDS:
        for position in range(0, block_tokens * blocks, 37):
            for token in EDGE_IDS:
                token_ids = [base] * (block_tokens * blocks)
                token_ids[position] = token
                chain = prefix_hashes(NAMESPACE, token_ids, block_tokens)
                for block, prefix_hash in enumerate(chain):
                    prefix = tuple(token_ids[: (block + 1) * block_tokens])
                    assert seen.setdefault(prefix_hash, prefix) == prefix
    assert len(seen) == len(set(seen.values()))


@settings(deadline=None)
@given(
    token_ids=st.lists(st.sampled_from(EDGE_IDS), min_size=4, max_size=12),
    position=st.integers(0, 11),
    token=st.sampled_from(EDGE_IDS),
)
def test_two_token_lists_have_one_hash_only_when_they_are_equal(token_ids, position, token):
    changed = list(token_ids)
    changed[position % len(changed)] = token
    block_tokens = len(token_ids)
    same = prefix_hashes(NAMESPACE, token_ids, block_tokens) == prefix_hashes(NAMESPACE, changed, block_tokens)
    assert same == (changed == token_ids)


@pytest.mark.parametrize("token", [-1, -(2**63), 2**32, 2**32 + 65, 2**63, 2**64, 2**70])
@pytest.mark.parametrize("position", [0, 1, 3])
def test_token_id_outside_u32_is_refused_and_never_wrapped(token, position):
    token_ids = [65, 65, 65, 65]
    token_ids[position] = token
    with pytest.raises(TokenIdError, match="token id"):
        prefix_hashes(NAMESPACE, token_ids, 4)


def test_refused_token_id_is_named_with_its_position():
    with pytest.raises(TokenIdError, match=r"token id 4294967296 at position 2 is not in \[0, 2\*\*32\)"):
        prefix_hashes(NAMESPACE, [1, 2, 2**32, 4], 4)


@pytest.mark.parametrize(
    "token_ids",
    [
        [1.0, 2.0],
        [1, 2.5],
        ["1", "2"],
        [True, False],
        [None, 1],
        [[1, 2], [3, 4]],
        [[1], [2, 3]],
        np.array([1.0, 2.0]),
        np.array([[1, 2]]),
        np.array([1, -1]),
        np.array([2**32, 1]),
    ],
    ids=repr,
)
def test_what_is_no_flat_list_of_token_ids_is_refused(token_ids):
    with pytest.raises(TokenIdError):
        prefix_hashes(NAMESPACE, token_ids, 2)


@pytest.mark.parametrize("dtype", ["<u2", ">u2", "<i4", ">i4", "<u4", ">u4", "<i8", ">i8", "<u8"])
def test_type_and_byte_order_of_token_arrays_do_not_matter(dtype):
    token_ids = [0, 1, 255, 256, 32767, 3, 4, 5]
    assert prefix_hashes(NAMESPACE, np.array(token_ids, dtype=dtype), 4) == prefix_hashes(NAMESPACE, token_ids, 4)


def test_a_strided_token_array_hashes_as_its_values():
    token_ids = np.arange(16)
    assert prefix_hashes(NAMESPACE, token_ids[::2], 4) == prefix_hashes(NAMESPACE, [0, 2, 4, 6, 8, 10, 12, 14], 4)


def test_partial_last_block_has_no_name():
    lengths = [len(prefix_hashes(NAMESPACE, range(count))) for count in (0, 127, 128, 129, 255, 256, 257)]
    assert lengths == [0, 0, 1, 1, 1, 2, 2]


def test_longer_prompt_has_the_shorter_ones_chain_as_its_beginning():
    assert prefix_hashes(NAMESPACE, range(1024)).first(3) == prefix_hashes(NAMESPACE, range(400))


SEED_INPUTS = [(b"X", b""), (b"", b"X"), (b"ab", b"c"), (b"a", b"bc"), (b"abc", b""), (b"", b"abc"), (b"", b"")]
SEED_INPUTS += [(b"\x00", b""), (b"\x00\x00", b""), (b"", b"\x00"), (b"a\nb", b""), (b"a@b", b""), (b"a", b"@b")]


def test_salt_and_adapter_are_kept_apart():
    assert len({prefix_seed(NAMESPACE, salt=salt, adapter=adapter) for salt, adapter in SEED_INPUTS}) == len(
        SEED_INPUTS
    )


@settings(deadline=None)
@given(st.tuples(st.binary(max_size=4), st.binary(max_size=4)), st.tuples(st.binary(max_size=4), st.binary(max_size=4)))
def test_two_seeds_are_equal_only_for_equal_salts_and_adapters(one, other):
    first = prefix_seed(NAMESPACE, salt=one[0], adapter=one[1])
    assert (first == prefix_seed(NAMESPACE, salt=other[0], adapter=other[1])) == (one == other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({0: [b"ab", b"c"]}, {0: [b"a", b"bc"]}),
        ({0: [b"a", b"b"]}, {0: [b"b", b"a"]}),
        ({0: [b"a"]}, {1: [b"a"]}),
        ({0: [b""]}, {}),
        ({0: [b"", b""]}, {0: [b""]}),
    ],
)
def test_extra_keys_are_kept_apart(one, other):
    assert prefix_hashes(NAMESPACE, [1, 2, 3, 4], 2, one) != prefix_hashes(NAMESPACE, [1, 2, 3, 4], 2, other)


def test_extra_key_changes_its_block_and_all_after_it_but_none_before():
    plain = list(prefix_hashes(NAMESPACE, range(8), 2))
    keyed = list(prefix_hashes(NAMESPACE, range(8), 2, {2: [b"image"]}))
    assert [a == b for a, b in zip(plain, keyed, strict=True)] == [True, True, False, False]


def test_extra_key_cannot_pass_for_tokens():
    """What is hashed after the tokens must not look like a longer block of tokens."""
    key = b"".join(token.to_bytes(4, "little") for token in (3, 4))
    assert prefix_hashes(NAMESPACE, [1, 2], 2, {0: [key]}) != prefix_hashes(NAMESPACE, [1, 2, 3, 4], 4)


def test_absent_fields_equal_their_documented_defaults():
    assert prefix_seed(NAMESPACE) == prefix_seed(NAMESPACE, salt=b"", adapter=b"")
    assert prefix_hashes(NAMESPACE, range(256)) == prefix_hashes(NAMESPACE, range(256), 128, {})
    assert prefix_hashes(NAMESPACE, range(256), extra_keys={0: []}) == prefix_hashes(NAMESPACE, range(256))


@pytest.mark.parametrize("size", [0, 31, 33])
def test_wrong_size_of_digest_or_seed_is_refused(size):
    with pytest.raises(ValueError, match=f"{size} bytes"):
        prefix_seed(bytes(size))
    with pytest.raises(ValueError, match=f"{size} bytes"):
        prefix_hashes(bytes(size), [1, 2], 2)


def test_chain_over_the_limit_is_refused_before_it_is_hashed():
    with pytest.raises(ValueError, match="65537 blocks, the limit is 65536"):
        prefix_hashes(NAMESPACE, range(65537), 1)
    assert len(prefix_hashes(NAMESPACE, range(65536), 1)) == 65536


@pytest.mark.parametrize("block_tokens", [0, -1])
def test_block_without_tokens_is_refused(block_tokens):
    with pytest.raises(ValueError, match="block_tokens"):
        prefix_hashes(NAMESPACE, [1, 2], block_tokens)


PRINT_NAMES = """
from kvstore_api.namespace import NamespaceSpec
from kvstore_client.hashing import prefix_hashes, prefix_seed
spec = NamespaceSpec(model="m", revision="r", engine="e", layout="l", kv_dtype="bfloat16", block_bytes=1024,
                     labels={"b": "1", "a": "2", "c": "3"})
seed = prefix_seed(spec.digest(), salt=b"salt", adapter=b"adapter")
print(spec.digest().hex(), seed.hex(), prefix_hashes(seed, list(range(300)), extra_keys={1: [b"x"]}).data.hex())
"""


def test_names_are_equal_in_processes_with_other_hash_seeds():
    outputs = set()
    for hash_seed in (None, "1", "random"):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        if hash_seed is not None:
            environment["PYTHONHASHSEED"] = hash_seed
        run = subprocess.run(
            [sys.executable, "-c", PRINT_NAMES], env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        outputs.add(run.stdout)
    assert len(outputs) == 1
    assert len(outputs.pop()) > 64 * 3
