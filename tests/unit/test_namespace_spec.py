"""Namespace specs: whatever makes bytes another model's, dtype's or rank's makes another namespace."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise

import pytest

from kvstore_api.limits import MAX_SPEC_BYTES
from kvstore_api.namespace import (
    KvGroup,
    KvGroupKind,
    NamespaceSpec,
    NamespaceSpecError,
    ParallelDimension,
    ReplayMode,
)
from kvstore_api.v1 import types_pb2

FULL = KvGroup("full", KvGroupKind.FULL, (0, 2, 4))
WINDOW = KvGroup("swa", KvGroupKind.SLIDING_WINDOW, (1, 3), window_tokens=128, replay_rule=ReplayMode.BOUNDED)
STATE = KvGroup("ssm", KvGroupKind.STATE, (5, 6), replay_rule=ReplayMode.SNAPSHOT)
SPEC = NamespaceSpec(
    tenant="acme",
    model="llama",
    revision="0123abcd",
    engine="vllm",
    layout="paged/1",
    kv_dtype="bfloat16",
    block_bytes=114_688,
    parallel=(ParallelDimension("tp", 0, 2),),
    groups=(FULL, WINDOW),
    labels={"rope": "yarn"},
)

# One change or more for every field: whoever adds a field to the spec has to add it here and to the digest.
CHANGES = {
    "tenant": ["acme2", "Acme", "acme "],
    "model": ["llama-2"],
    "revision": ["0123abce"],
    "engine": ["sglang"],
    "layout": ["paged/2"],
    "kv_dtype": ["fp8_e4m3", "float16"],
    "block_bytes": [114_687, 57_344],
    "parallel": [
        (),
        (ParallelDimension("tp", 1, 2),),
        (ParallelDimension("tp", 0, 4),),
        (ParallelDimension("pp", 0, 2),),
        (ParallelDimension("tp", 0, 2), ParallelDimension("pp", 0, 2)),
    ],
    "groups": [
        (),
        (FULL,),
        (WINDOW, FULL),
        (replace(FULL, name="all"), WINDOW),
        (replace(FULL, layers=(0, 2)), WINDOW),
        (FULL, replace(WINDOW, window_tokens=129)),
        (FULL, replace(WINDOW, replay_rule=ReplayMode.EXACT)),
        (FULL, replace(WINDOW, replay_tokens=160)),
        (FULL, KvGroup("swa", KvGroupKind.STATE, (1, 3), replay_rule=ReplayMode.BOUNDED)),
    ],
    "labels": [{}, {"rope": "linear"}, {"rope2": "yarn"}, {"rope": "yarn", "x": ""}],
}


def variants() -> list[NamespaceSpec]:
    return [replace(SPEC, **{name: value}) for name, values in CHANGES.items() for value in values]


def test_every_field_of_the_spec_is_tried():
    assert {field.name for field in fields(NamespaceSpec)} - {"block_tokens"} == set(CHANGES)


def test_every_difference_makes_another_digest():
    specs = [SPEC, *variants()]
    for spec in specs:
        spec.validate()
    assert len({spec.digest() for spec in specs}) == len(specs)


def test_a_spec_of_64_kib_is_taken_and_one_byte_more_refused():
    labels = {f"label{number:02}": "v" * 4096 for number in range(15)}
    room = MAX_SPEC_BYTES - replace(SPEC, labels=labels | {"last": "v" * 2000}).to_proto().ByteSize()
    fits = replace(SPEC, labels=labels | {"last": "v" * (2000 + room)})
    assert fits.to_proto().ByteSize() == MAX_SPEC_BYTES == 65_536
    fits.validate()
    with pytest.raises(NamespaceSpecError, match="the spec has 65537 bytes, at most 65536 are allowed"):
        replace(fits, labels=fits.labels | {"last": "v" * (2001 + room)}).validate()


def test_block_tokens_are_part_of_the_digest_too():
    assert replace(SPEC, block_tokens=64).digest() != SPEC.digest()


def test_text_moved_from_one_field_to_the_next_makes_another_digest():
    names = ("tenant", "model", "revision", "engine", "layout", "kv_dtype")
    for left, right in pairwise(names):
        one = replace(SPEC, **{left: "ab", right: "c"})
        other = replace(SPEC, **{left: "a", right: "bc"})
        assert one.digest() != other.digest()


def test_swapped_texts_make_another_digest():
    assert replace(SPEC, model="a", revision="b").digest() != replace(SPEC, model="b", revision="a").digest()


def test_label_text_moved_between_key_and_value_makes_another_digest():
    assert replace(SPEC, labels={"ab": "c"}).digest() != replace(SPEC, labels={"a": "bc"}).digest()
    assert replace(SPEC, labels={"a": "b", "c": "d"}).digest() != replace(SPEC, labels={"a": "d", "c": "b"}).digest()


def test_order_of_labels_and_dimensions_does_not_matter():
    tp, pp = ParallelDimension("tp", 0, 2), ParallelDimension("pp", 1, 3)
    one = replace(SPEC, parallel=(tp, pp), labels={"a": "1", "b": "2"})
    other = replace(SPEC, parallel=(pp, tp), labels={"b": "2", "a": "1"})
    assert one.digest() == other.digest()


def test_dimension_of_one_rank_equals_no_dimension():
    assert replace(SPEC, parallel=(ParallelDimension("tp", 0, 1),)).digest() == replace(SPEC, parallel=()).digest()


def test_absent_optional_fields_equal_their_documented_defaults():
    required = {"model": "m", "revision": "r", "engine": "e", "layout": "l", "kv_dtype": "d", "block_bytes": 1}
    explicit = NamespaceSpec(**required, tenant="default", block_tokens=128, parallel=(), groups=(), labels={})
    assert NamespaceSpec(**required).digest() == explicit.digest()


def test_wire_form_brings_back_the_same_spec():
    for spec in [SPEC, *variants(), replace(SPEC, groups=(FULL, WINDOW, STATE))]:
        message = types_pb2.NamespaceSpec.FromString(spec.to_proto().SerializeToString())
        assert NamespaceSpec.from_proto(message) == spec
        assert NamespaceSpec.from_proto(message).digest() == spec.digest()


@pytest.mark.parametrize("name", ["tenant", "model", "revision", "engine", "layout", "kv_dtype"])
@pytest.mark.parametrize(("value", "message"), [("", "is empty"), ("x" * 4097, "has 4097 bytes, at most 4096")])
def test_missing_or_endless_text_is_refused_by_name(name, value, message):
    with pytest.raises(NamespaceSpecError, match=f"{name} {message}"):
        replace(SPEC, **{name: value}).validate()


@pytest.mark.parametrize("block_bytes", [0, -1, (64 << 20) + 1])
def test_block_size_out_of_range_is_refused_with_the_number(block_bytes):
    with pytest.raises(NamespaceSpecError, match=f"block_bytes is {block_bytes}, allowed are 1 to 67108864"):
        replace(SPEC, block_bytes=block_bytes).validate()


@pytest.mark.parametrize("block_bytes", [1, 64 << 20])
def test_block_sizes_at_the_limits_are_taken(block_bytes):
    replace(SPEC, block_bytes=block_bytes).validate()


@pytest.mark.parametrize("block_tokens", [16, 64, 127, 129, 256])
def test_other_block_length_is_refused_with_both_numbers(block_tokens):
    with pytest.raises(NamespaceSpecError, match=f"block_tokens is {block_tokens}, .* 128 tokens"):
        replace(SPEC, block_tokens=block_tokens).validate()


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ((ParallelDimension("tp", 2, 2),), "tp has rank 2 of 2"),
        ((ParallelDimension("tp", -1, 2),), "tp: rank is -1"),
        ((ParallelDimension("tp", 0, 0),), "tp: size is 0"),
        ((ParallelDimension("", 0, 2),), "name is empty"),
        ((ParallelDimension("tp", 0, 2), ParallelDimension("tp", 1, 2)), "given twice"),
    ],
)
def test_impossible_rank_is_refused(parallel, message):
    with pytest.raises(NamespaceSpecError, match=message):
        replace(SPEC, parallel=parallel).validate()


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ((FULL, replace(FULL, layers=(7,))), "name is given twice"),
        ((FULL, replace(FULL, name="all", layers=(2,))), "layer 2 is in 'full' and in 'all', both FULL"),
        ((WINDOW, replace(WINDOW, name="swa2", layers=(3,))), "layer 3 is in 'swa' and in 'swa2', both SLIDING_WINDOW"),
        ((replace(FULL, layers=(2, 0)),), "'full': layers must be ascending"),
        ((replace(FULL, layers=(2, 2)),), "'full': layers must be ascending"),
        ((replace(WINDOW, window_tokens=0),), "'swa': window_tokens is 0"),
        ((replace(WINDOW, replay_rule=ReplayMode.NONE),), "'swa': replay_rule is missing"),
        ((replace(FULL, window_tokens=128),), "'full': window_tokens is 128"),
        ((replace(FULL, replay_rule=ReplayMode.EXACT),), "'full': a FULL group is not replayed"),
        ((replace(FULL, replay_tokens=1),), "'full': a FULL group is not replayed"),
        ((replace(FULL, name=""),), "name is empty"),
    ],
)
def test_contradictory_group_is_refused_by_name(groups, message):
    with pytest.raises(NamespaceSpecError, match=message):
        replace(SPEC, groups=groups).validate()


def test_a_layer_may_have_compressed_kv_and_a_window():
    replace(SPEC, groups=(FULL, replace(WINDOW, layers=(1, 2, 3)))).validate()


def test_label_without_key_and_endless_label_are_refused():
    with pytest.raises(NamespaceSpecError, match="key is empty"):
        replace(SPEC, labels={"": "x"}).validate()
    with pytest.raises(NamespaceSpecError, match="label 'x' has 4097 bytes, at most 4096"):
        replace(SPEC, labels={"x": "y" * 4097}).validate()


def test_wire_form_with_a_label_given_twice_is_refused():
    message = SPEC.to_proto()
    message.labels.add(key="rope", value="other")
    with pytest.raises(NamespaceSpecError, match="given twice"):
        NamespaceSpec.from_proto(message)


@pytest.mark.parametrize(("field", "value"), [("kind", 0), ("kind", 17), ("replay_rule", 17)])
def test_wire_form_with_an_unknown_kind_or_rule_is_refused_by_group(field, value):
    message = SPEC.to_proto()
    setattr(message.groups[0], field, value)
    with pytest.raises(NamespaceSpecError, match="'full'"):
        NamespaceSpec.from_proto(message)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "\ud800"}, "model"),
        ({"tenant": None}, "tenant"),
        ({"kv_dtype": b"bf16"}, "kv_dtype"),
        ({"block_bytes": 114688.0}, "block_bytes"),
        ({"block_bytes": "114688"}, "block_bytes"),
        ({"block_bytes": True}, "block_bytes"),
        ({"labels": {"a": 1}}, "'a'"),
        ({"labels": ()}, r"^labels is \(\), wanted is a dict"),
        ({"labels": None}, "^labels is None, wanted is a dict"),
        ({"parallel": None}, "^parallel is None, wanted is a tuple of ParallelDimension"),
        ({"parallel": (("tp", 0, 2),)}, "^parallel is .*, wanted is a tuple of ParallelDimension"),
        ({"groups": None}, "^groups is None, wanted is a tuple of KvGroup"),
        ({"groups": ("full",)}, "^groups is .*, wanted is a tuple of KvGroup"),
        ({"parallel": (ParallelDimension("tp", 0, 2**32),)}, "tp: size"),
        ({"groups": (KvGroup("full", KvGroupKind.FULL, (-1,)),)}, "layer"),
        ({"groups": (KvGroup("w", KvGroupKind.SLIDING_WINDOW, (1,), 2**32, ReplayMode.EXACT),)}, "window_tokens"),
    ],
)
def test_values_of_the_wrong_kind_are_refused_by_name(changes, named):
    with pytest.raises(NamespaceSpecError, match=named):
        replace(SPEC, **changes).validate()
