"""kvstore-bench hitrate: three ways to replay with one answer, and the command as its users type it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore_bench.hitrate.baselines import hit_share, unlimited
from kvstore_bench.hitrate.chains import ChainCollector
from kvstore_bench.hitrate.engine_replay import replay_in_engine
from kvstore_bench.hitrate.generator import generate, load_parameters, named_workloads
from kvstore_bench.hitrate.misses import CAUSES
from kvstore_bench.hitrate.server_replay import replay_over_grpc
from kvstore_bench.hitrate.settings import ReplaySettings
from kvstore_bench.hitrate.simulator import replay_in_simulator

if TYPE_CHECKING:
    from kvstore_bench.hitrate.workload import Workload

TTLS_S = {"agent": 3 * 86_400, "chatbot": 7 * 86_400}
BLOCK_BYTES = 8192
REQUESTS = 1000
DAY_S = 86_400


@pytest.fixture(scope="module")
def days_of_traffic() -> Workload:
    """The first requests of the small generated workload; some ten days."""
    whole = generate(load_parameters(named_workloads()["tiny"]), 1)
    end = int(whole.starts[REQUESTS])
    columns = ("time_s", "class_id", "session", "input_tokens", "asked_blocks")
    return replace(
        whole,
        **{name: getattr(whole, name)[:REQUESTS] for name in columns},
        starts=whole.starts[: REQUESTS + 1],
        blocks=whole.blocks[:end],
        unique_blocks=int(whole.blocks[:end].max()) + 1,
        measured_from_s=0.0,
    )


def settings(workload: Workload, share: float, **changes: object) -> ReplaySettings:
    present = len(np.unique(workload.blocks))
    capacity = int(share * present) * BLOCK_BYTES
    return replace(ReplaySettings(capacity, BLOCK_BYTES, capacity // 64, TTLS_S, tick_s=20.0), **changes)


@pytest.mark.parametrize(
    ("share", "class_shares"),
    [(0.1, {}), (0.25, {}), (0.1, {"chatbot": 0.3}), (3.0, {})],
    ids=["tight", "less-tight", "shares", "roomy"],
)
def test_simulator_and_engine_hit_the_same(days_of_traffic, tmp_path, share, class_shares):
    given = settings(days_of_traffic, share, class_shares=class_shares)
    simulated, simulated_storage = replay_in_simulator(days_of_traffic, given)
    hits, storage = replay_in_engine(days_of_traffic, given, tmp_path)
    assert hits.tolist() == simulated.tolist()
    for name in ("resident_bytes_mean", "resident_bytes_max", "seconds"):
        assert getattr(simulated_storage, name) == pytest.approx(getattr(storage, name)), name
    simulated_done, done = simulated_storage.done, storage.done
    assert simulated_done.bytes_put == done.bytes_put
    assert simulated_done.bytes_written == done.bytes_written
    if share > 1:
        assert hits.tolist() == unlimited(days_of_traffic, list(TTLS_S.values())).tolist()
        assert simulated_done.blocks_expired == done.blocks_expired
        assert done.blocks_expired > 0
        assert done.blocks_evicted == simulated_done.blocks_evicted == 0
    else:
        assert done.blocks_evicted > 0


def test_server_hits_what_the_engine_hits(days_of_traffic, tmp_path):
    given = settings(days_of_traffic, 0.25)
    for name in ("engine", "server"):
        (tmp_path / name).mkdir()
    hits, storage = replay_in_engine(days_of_traffic, given, tmp_path / "engine")
    told: list[int] = []
    over_grpc, server_storage = replay_over_grpc(days_of_traffic, given, tmp_path / "server", told.append)
    assert 100 * hit_share(days_of_traffic, over_grpc) == pytest.approx(100 * hit_share(days_of_traffic, hits), abs=0.1)
    assert server_storage.done.bytes_put == pytest.approx(storage.done.bytes_put, rel=0.02)
    assert told == list(range(1, REQUESTS + 1))


def test_every_replay_lets_answers_and_ttls_do_the_same(tmp_path):
    chains = ChainCollector(["agent", "chatbot"])
    for time_s, walk, class_id in (
        (0, "abc", 0),
        (3 * DAY_S - 2, "ab", 1),
        (3 * DAY_S + 5, "abc", 0),
        (11 * DAY_S, "ab", 0),
    ):
        chains.add(float(time_s), 128 * len(walk), [walk[: end + 1] for end in range(len(walk))], class_id=class_id)
    workload = chains.workload("walks", 128, {})
    # "c" expires after three days; "ab" lives on with the chat for seven, and with the agent's last use for three.
    expected = [0, 2, 2, 0]
    given = ReplaySettings(4 << 20, BLOCK_BYTES, 64 << 10, TTLS_S)
    for name in ("engine", "server"):
        (tmp_path / name).mkdir()
    assert unlimited(workload, list(TTLS_S.values())).tolist() == expected
    assert replay_in_simulator(workload, given)[0].tolist() == expected
    assert replay_in_engine(workload, given, tmp_path / "engine")[0].tolist() == expected
    assert replay_over_grpc(workload, given, tmp_path / "server")[0].tolist() == expected


def hitrate(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvstore_bench.cli", "hitrate", *args]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False)


def test_command_answers_with_tables_json_page_and_pictures(tmp_path):
    outputs = [
        "--json",
        str(tmp_path / "r.json"),
        "--html",
        str(tmp_path / "r.html"),
        "--plots",
        str(tmp_path / "plots"),
    ]
    ran = hitrate("--workload", "tiny", "--capacity-share", "0.25,0.5", "--ttl", "chatbot=3d", *outputs)
    assert ran.returncode == 0, ran.stderr
    assert "hit rate = hit tokens ÷ input tokens" in ran.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["seed"] == 1
    assert report["commit"]
    assert [result["capacity_share"] for result in report["results"]] == [0.25, 0.5]
    for result in report["results"]:
        assert result["trace"] == "tiny"
        assert result["ttl"] == {"agent": 3 * DAY_S, "chatbot": 3 * DAY_S}
        assert result["ceiling"] >= result["ceiling_with_ttl"] >= result["hit_rate"] > 0.9
        assert result["ceiling"] >= result["belady"] >= result["lru"] > result["fifo"]
        assert set(result["hit_rate_by_class"]) == {"agent", "chatbot"}
        assert set(result["missed"]) == set(CAUSES)
        assert result["hit_rate"] + sum(result["missed"].values()) == pytest.approx(1)
    assert (tmp_path / "r.html").read_text().startswith("<!DOCTYPE html>")
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["missed-tokens.png"]


def test_command_reads_a_log_of_ones_own_and_sweeps(tmp_path):
    log = tmp_path / "log.jsonl"
    lines = [{"timestamp": 60 * n, "class": "batch", "tokens": list(range(256 + 128 * (n % 3)))} for n in range(9)]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    args = ["--workload", str(log), "--capacity-share", "20", "--json", str(tmp_path / "r.json")]
    for options, said in (
        ([], "class 'batch' of the workload has no TTL"),
        (["--ttl", "batch=2h", "--sweep", "class-share"], "--sweep class-share needs two classes"),
    ):
        refused = hitrate(*args, *options)
        assert refused.returncode == 2
        assert said in refused.stderr
    ran = hitrate(*args, "--ttl", "batch=2h", "--sweep", "ttl", "--warm-up", "3m")
    assert ran.returncode == 0, ran.stderr
    results = json.loads((tmp_path / "r.json").read_text())["results"]
    assert [result["sweep"] for result in results] == [""] + ["ttl"] * 7
    assert results[0]["storage"]["bytes_put_per_day"] is not None
    assert {result["hit_rate"] for result in results} == {1.0}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--workload", "nothing"], "nothing is no file, and no workload of mixed"),
        (["--workload", "conversation"], "--traces DIR or KVSTORE_BENCH_TRACES"),
        (["--capacity-share", "0"], "--capacity-share '0' is no list of shares above 0"),
        (["--capacity-share", "0.1,x"], "--capacity-share '0.1,x' is no list"),
        (["--workload", "tiny", "--ttl", "chatbot=7w"], "--ttl chatbot is '7w'"),
        (["--workload", "tiny", "--ttl", "chat=7d"], "the workload has no class 'chat'"),
        (["--workload", "tiny", "--ttl", "7d"], "--ttl '7d' names no class"),
        (["--workload", "tiny", "--ttl", "agent=1d", "--ttl", "agent=2d"], "--ttl agent is given twice"),
        (["--workload", "tiny", "--ttl", "agent=0s"], "--ttl agent is 0 s"),
        (["--workload", "tiny", "--class-share", "agent=0.6", "--class-share", "chatbot=0.6"], "adds up to 1.2"),
        (["--workload", "tiny", "--class-share", "agent=2"], "--class-share agent is '2'"),
        (["--workload", "tiny", "--warm-up", "90d"], "--warm-up 90d leaves nothing to measure"),
        (["--workload", "tiny", "--block-bytes", "65MiB"], "--block-bytes 68157440 is out of range"),
        (["--workload", "tiny", "--capacity-share", "0.000001"], "--capacity-share 1e-06"),
        (["--sweep", "size"], "--sweep 'size' is unknown"),
        (["--replay", "paper"], "--replay 'paper' is unknown"),
        (["--seed", "-1"], "--seed -1 is out of range"),
        (["--block-tokens", "0"], "--block-tokens 0 is out of range"),
        (["--json", "/nowhere/x.json"], "--json '/nowhere/x.json' cannot be written"),
        (["--html", "/"], "--html '/' cannot be written"),
        (["--default-class", "Big One"], "--default-class 'Big One' is no name of a class"),
        (["--data-dir", "/nowhere"], "--data-dir '/nowhere' is no directory"),
        (["--plots", "/dev/null"], "--plots '/dev/null' is no directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_is_told_with_the_option_to_fix(args, said, capsys):
    from kvstore_bench.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["hitrate", *args])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert "fix: " in error
