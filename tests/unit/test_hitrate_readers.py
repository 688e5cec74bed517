"""Request logs and traces: what they say is taken as it is, and what is wrong with one is told with its line and field."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zstandard
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from kvstore_bench.hitrate.public_traces import read_mooncake, read_sessions
from kvstore_bench.hitrate.request_log import load_tokenizer, read_request_log
from kvstore_bench.hitrate.sources import SourceOptions, load_workload
from kvstore_bench.hitrate.workload import NO_SESSION, Workload, WorkloadError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 3, 9]},
    {"timestamp": 1500, "input_length": 1024, "output_length": 5, "hash_ids": [7, 3]},
]
SESSION = {
    "id": "a",
    "src": "a.json",
    "bs": 64,
    "tool": 100,
    "sys": 60,
    "models": ["m"],
    "reqs": [
        [0.0, 400, 9, 0, 0, 1.0, 0.0, "user", 0, [1, 6]],
        [2.0, 530, 9, 0, 0, 1.0, 0.0, "tool", 5, [50, 3]],
        [0.0, 256, 9, 1, 1.5, 1.0, 0.0, "user", 0, [90, 4]],
    ],
}
LOG = [
    {"timestamp": 1, "class": "chatbot", "session": "s", "tokens": [1, 2, 3, 4, 5]},
    {"timestamp": 2.5, "session": "s", "tokens": [1, 2, 3, 9, 5, 6]},
    {"timestamp": "1970-01-01T00:00:03Z", "block_hashes": ["x", 5], "input_tokens": 5},
]


def written(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def chains(workload: Workload) -> list[list[int]]:
    return [workload.chain(request).tolist() for request in range(workload.requests)]


def read_log(path: Path, **options: Any) -> Workload:
    return read_request_log(path, "log", **{"block_tokens": 2, "default_class": "agent", **options})


def test_mooncake_trace_keeps_the_last_block_with_the_tokens_it_has(tmp_path):
    workload = read_mooncake(written(tmp_path / "t.jsonl", MOONCAKE), "t", "chatbot")
    assert chains(workload) == [[0, 1, 2], [0, 1]]
    assert workload.time_s.tolist() == [0.0, 1.5]
    assert workload.tokens_of(0, 3) == 1100
    assert workload.asked_blocks.tolist() == [3, 2]
    assert workload.tokens_of(0, 2) == 1024
    assert set(workload.session.tolist()) == {NO_SESSION}


def test_sessions_share_prompts_of_equal_sizes_and_sub_agents_share_none(tmp_path):
    other = {**SESSION, "id": "b", "reqs": [[0.0, 400, 9, 0, 0, 1.0, 0.0, "user", 0, [1, 6]]]}
    differs = {**other, "id": "c", "sys": 61 + 64}
    path = written(tmp_path / "s.jsonl", [SESSION, other, differs])
    workload = read_sessions(path, "s", "agent", spread_s=0)
    # 160 tokens of schemas and prompt are 2 ids of 64, which is one block.
    first, second, third, sub, again = chains(workload)
    assert workload.time_s.tolist() == [0.0, 0.0, 0.0, 1.5, 2.0]
    assert len(first) == 3
    assert second[0] == first[0]
    assert second[1] != first[1]
    assert third[0] != first[0]
    assert again[:2] == first[:2]
    assert again[2] != first[2]
    assert not set(sub) & set(first + again)
    assert workload.session.tolist() == [0, 1, 2, 0, 0]
    assert workload.asked_blocks.tolist() == [len(chain) for chain in chains(workload)]


def test_session_starts_are_spread_and_the_same_each_time(tmp_path):
    path = written(tmp_path / "s.jsonl", [SESSION, {**SESSION, "id": "b"}])
    times = [read_sessions(path, "s", "agent").time_s.tolist() for _ in range(2)]
    assert times[0] == times[1]
    assert times[0][0] != times[0][-1]


def test_log_takes_token_ids_hashes_and_texts(tmp_path):
    workload = read_log(written(tmp_path / "log.jsonl", LOG))
    assert chains(workload) == [[0, 1], [0, 2, 3], [4, 5]]
    assert workload.classes == ("chatbot", "agent")
    assert workload.class_id.tolist() == [0, 1, 1]
    assert workload.session.tolist() == [0, 0, NO_SESSION]
    assert workload.input_tokens.tolist() == [5, 6, 5]
    assert workload.time_s.tolist() == [1.0, 2.5, 3.0]


def test_texts_are_told_apart_by_a_tokenizers_ids(tmp_path):
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    lines = [{"timestamp": 0, "text": text} for text in ("a b a b", "a b b", "a a")]
    path = written(tmp_path / "log.jsonl", lines)
    workload = read_log(path, tokenizer=load_tokenizer(tmp_path / "tokenizer.json"))
    assert chains(workload) == [[0, 1], [0], [2]]
    with pytest.raises(WorkloadError, match=r"line 1: text needs a tokenizer"):
        read_log(path)


def test_hashes_name_their_place_whether_they_cover_the_prefix_or_not(tmp_path):
    lines = [{"timestamp": 0, "block_hashes": hashes} for hashes in (["a", "z"], ["b", "z"], ["a", "z"])]
    assert chains(read_log(written(tmp_path / "log.jsonl", lines))) == [[0, 1], [2, 3], [0, 1]]


def test_salts_share_nothing(tmp_path):
    tokens, hashes = {"tokens": [1, 2]}, {"block_hashes": ["a"]}
    lines = [
        {"timestamp": 0, **what, **salt} for what in (tokens, hashes) for salt in ({}, {"salt": "x"}, {"salt": "y"})
    ]
    assert chains(read_log(written(tmp_path / "log.jsonl", lines))) == [[number] for number in range(6)]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_compressed_files_read_like_plain_ones_and_cut_ones_are_refused(tmp_path, suffix):
    data = "".join(json.dumps(line) + "\n" for line in LOG * 1000).encode()
    data = data.replace(b'"timestamp": 1,', b'"timestamp": 3,').replace(b'"timestamp": 2.5,', b'"timestamp": 3,')
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix]
    path = tmp_path / f"log.jsonl{suffix}"
    path.write_bytes(pack(data))
    assert read_log(path).requests == 3000
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(WorkloadError, match="cut short"):
        read_log(path)


def test_frames_one_behind_the_other_are_one_file(tmp_path):
    path = tmp_path / "log.jsonl.zst"
    path.write_bytes(b"".join(zstandard.compress(json.dumps(line).encode() + b"\n") for line in LOG))
    assert chains(read_log(path)) == chains(read_log(written(tmp_path / "log.jsonl", LOG)))


def changed(line: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {name: value for name, value in {**line, **fields}.items() if value is not ...}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "no JSON"),
        ("[1]\n", "no JSON object"),
        (changed(LOG[0], token=[1]), "unknown field 'token'"),
        (changed(LOG[0], tokens=...), "wanted is one of tokens, block_hashes, text"),
        (changed(LOG[0], text="a"), "tokens and text given"),
        (changed(LOG[0], input_tokens=5), "input_tokens is for block_hashes"),
        (changed(LOG[0], timestamp=...), "'timestamp' is missing"),
        (changed(LOG[0], timestamp=-1), "timestamp is -1"),
        (changed(LOG[0], timestamp=True), "timestamp is True"),
        (changed(LOG[0], timestamp=0.5), "timestamp is 0.500 s, 0.500 s before"),
        (changed(LOG[0], timestamp="yesterday"), "timestamp is 'yesterday'"),
        (changed(LOG[0], timestamp=float("nan")), "timestamp is nan"),
        (changed(LOG[0], timestamp=10**400), "timestamp is 1000"),
        (changed(LOG[0], timestamp=1_764_489_600_000), "these look like milliseconds"),
        (changed(LOG[0], salt="\ud800"), "salt is '.ud800', which is no valid Unicode"),
        (changed(LOG[0], **{"class": "A b"}), "class is 'A b', wanted are a small letter"),
        (
            changed(LOG[2], block_hashes=[1] * 65_537, input_tokens=131_074),
            "makes 65537 blocks, a chain has at most 65536",
        ),
        (changed(LOG[0], tokens=[1, 2, 2**32]), r"tokens\[2\] is 4294967296"),
        (changed(LOG[0], tokens=[-1]), r"tokens\[0\] is -1"),
        (changed(LOG[0], tokens=[1, 1.0]), r"tokens\[1\] is 1.0"),
        (changed(LOG[0], tokens=[True]), r"tokens\[0\] is True"),
        (changed(LOG[0], tokens={"a": 1}), "tokens is {'a': 1}, wanted is a list"),
        (changed(LOG[0], tokens=[0] * (2 * 65_537)), "makes 65537 blocks, a chain has at most 65536"),
        (changed(LOG[0], **{"class": 5}), "class is 5, wanted is a string"),
        (changed(LOG[0], session=5), "session is 5, wanted is a string"),
        (changed(LOG[2], block_hashes=[None, "x"]), r"block_hashes\[0\] is None"),
        (changed(LOG[2], block_hashes=["x"]), "block_hashes has 1 hashes, input_tokens 5 makes 2 full blocks"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 60 else "",
)
def test_bad_line_of_a_log_is_told_with_its_number_and_field(tmp_path, line, said):
    first = {**LOG[0], "timestamp": 1}
    with pytest.raises(WorkloadError, match=rf"log.jsonl, line 3: .*{said}"):
        read_log(written(tmp_path / "log.jsonl", [first, "\n", line]))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (changed(MOONCAKE[1], timestamp=-1), "timestamp is -1"),
        (changed(MOONCAKE[1], hash_ids=[7, 3, 9, 4]), "hash_ids has 4 ids, input_length 1024"),
        (changed(MOONCAKE[1], hash_ids=[7]), "hash_ids has 1 ids, input_length 1024"),
        (changed(MOONCAKE[1], hash_ids=[3, 7]), "hash_ids: block 3 stood behind another block before"),
        (changed(MOONCAKE[1], hash_ids=[7, 2**31]), r"hash_ids\[1\] is 2147483648"),
        (changed(MOONCAKE[1], output_length=...), "'output_length' is missing"),
        (changed(MOONCAKE[1], chat_id=4), "unknown field 'chat_id'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_line_of_a_mooncake_trace_is_told_with_its_number_and_field(tmp_path, line, said):
    with pytest.raises(WorkloadError, match=rf"line 2: .*{said}"):
        read_mooncake(written(tmp_path / "t.jsonl", [MOONCAKE[0], line]), "t", "chatbot")


def test_unsorted_mooncake_trace_is_refused(tmp_path):
    with pytest.raises(WorkloadError, match=r"line 2: timestamp is 0 s, less than 1.5 s"):
        read_mooncake(written(tmp_path / "t.jsonl", MOONCAKE[::-1]), "t", "chatbot")


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ([0.0, 400], "reqs[0]: it is no list of 10 entries"),
        ([0.0, 400, 9, 0, 0, 1.0, 0.0, "user", 1, [1, 6]], "reqs[0]: lcp is 1, the request before has 0 ids"),
        ([0.0, 400, 9, 0, 0, 1.0, 0.0, "user", 0, [1, 5]], "reqs[0]: runs make 5 ids, in is 400 tokens"),
        ([0.0, 400, 9, 0, 0, 1.0, 0.0, "user", 0, [1]], "reqs[0]: runs is no list of starts and lengths"),
        ([-1.0, 400, 9, 0, 0, 1.0, 0.0, "user", 0, [1, 6]], "reqs[0]: t is -1.0"),
        ([0.0, "400", 9, 0, 0, 1.0, 0.0, "user", 0, [1, 6]], "reqs[0]: in is '400'"),
    ],
)
def test_bad_request_of_a_session_is_told_with_its_place(tmp_path, request_, said):
    with pytest.raises(WorkloadError) as failed:
        read_sessions(written(tmp_path / "s.jsonl", [{**SESSION, "reqs": [request_]}]), "s", "agent")
    assert f"line 1: {said}" in str(failed.value)


def test_log_without_a_block_or_over_decades_is_refused(tmp_path):
    with pytest.raises(WorkloadError, match="no prompt fills a block of 2 tokens"):
        read_log(written(tmp_path / "log.jsonl", [{"timestamp": 0, "tokens": [1]}]))
    lines = [{"timestamp": time_s, "tokens": [1, 2]} for time_s in (0, 1e9)]
    with pytest.raises(WorkloadError, match="timestamps span 11,574 days; they are to be in seconds"):
        read_log(written(tmp_path / "log.jsonl", lines))
    with pytest.raises(WorkloadError, match="there is no request in it"):
        read_sessions(written(tmp_path / "s.jsonl", [{**SESSION, "reqs": []}]), "s", "agent")


def test_times_before_1970_count_like_others(tmp_path):
    lines = [{"timestamp": f"1969-12-31T00:0{minute}:00", "tokens": [1, 2]} for minute in range(3)]
    assert read_log(written(tmp_path / "log.jsonl", lines)).measured.all()


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_empty_log_is_refused(tmp_path, content):
    with pytest.raises(WorkloadError, match="there is no request in it"):
        read_log(written(tmp_path / "log.jsonl", [content]))


def test_file_is_read_as_what_its_first_line_is(tmp_path):
    options = SourceOptions(None, 1, 2, "agent", None)
    for name, lines, blocks in (("m", MOONCAKE, 512), ("s", [SESSION], 128), ("l", LOG, 2)):
        path = written(tmp_path / f"{name}.jsonl", lines)
        assert load_workload(str(path), path, options, lambda share: None).block_tokens == blocks


def test_what_is_no_workload_is_refused_with_the_names_there_are(tmp_path):
    options = SourceOptions(None, 1, 128, "agent", None)
    with pytest.raises(WorkloadError, match=r"no file, and no workload of mixed.*conversation"):
        load_workload("mixt", tmp_path / "mixt", options, lambda share: None)
    with pytest.raises(WorkloadError, match="--traces DIR or KVSTORE_BENCH_TRACES"):
        load_workload("conversation", tmp_path, options, lambda share: None)
    with pytest.raises(WorkloadError, match=r"holds no mooncake/conversation_trace\.jsonl\.zst"):
        load_workload("conversation", tmp_path, SourceOptions(tmp_path, 1, 128, "agent", None), lambda share: None)


def test_classes_are_numbered_as_they_come_and_limited(tmp_path):
    lines = [{"timestamp": 0, "class": f"c{number}", "tokens": [1, 2]} for number in range(14)]
    with pytest.raises(WorkloadError, match=r"line 14: class 'c13' is one more than the 13"):
        read_log(written(tmp_path / "log.jsonl", lines))
    assert np.unique(read_log(written(tmp_path / "log.jsonl", lines[:13])).class_id).size == 13
