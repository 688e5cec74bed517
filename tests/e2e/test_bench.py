"""kvstore-bench throughput, tiny: what is measured is not looked at here, what is reported is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import pytest

from benches import processes_about
from kvstore_bench import cli
from kvstore_bench.machine import describe_machine
from kvstore_bench.processes import Child
from kvstore_bench.report import percentile

if TYPE_CHECKING:
    pass

PATIENCE_S = 120
TINY = ("--blocks", "16", "--batch", "4", "--block-bytes", "5000", "--rounds", "2", "--memory-blocks", "64")
LINES = {"put", "get", "bare_stream", "bare_stream_per_batch", "pread"}


RATIOS = (("get", "bare_stream"), ("get", "bare_stream_per_batch"), ("get", "pread"), ("put", "bare_stream"))


def rates(result: dict[str, Any], line: str) -> list[float]:
    return result["lines"][line]["gb_per_s_rounds"]


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "kvstore_bench.cli", "throughput", *args]


def bench(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*args), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def test_a_run_reports_every_figure_and_what_it_must_be_read_with(scratch: Path, tmp_path: Path):
    file = tmp_path / "result.json"
    ran = bench(*TINY, "--seed", "7", "--data-dir", str(scratch), "--json", str(file))
    assert ran.returncode == 0, ran.stderr
    result = json.loads(file.read_text())
    assert result["benchmark"] == "throughput"
    assert result["seed"] == 7
    assert result["config"]["blocks"] == 16
    assert result["config"]["rounds"] == 2
    assert {"cpu", "cores", "memory_bytes", "kernel", "filesystem", "python", "grpcio"} <= result["machine"].keys()
    assert result["commit"]
    assert set(result["lines"]) == LINES
    for line, figures in result["lines"].items():
        assert figures["calls"] == (2 if line == "bare_stream" else 8)
        assert len(figures["gb_per_s_rounds"]) == 2
        assert min(figures["gb_per_s_rounds"]) > 0
        assert 0 < figures["call_ms_p50"] <= figures["call_ms_p99"] <= figures["call_ms_max"]
        assert (figures["server_cpu_us_per_block"] is None) == (line == "pread")
    assert result["ratios"] == {
        f"{line}_to_{yardstick}": pytest.approx(
            median(a / b for a, b in zip(rates(result, line), rates(result, yardstick), strict=True))
        )
        for line, yardstick in RATIOS
    }
    assert result["match"]["blocks"] == 16
    assert result["memory"]["blocks"] == 64
    # 5,000 bytes fill two pages, and every block has a row in its segment's table besides.
    assert result["bytes_written_per_byte_put"] > 2 * 4096 / 5000
    for words in ("warm pread", "match of 16 blocks", "server memory per stored block", result["commit"], "seed 7"):
        assert words in ran.stdout


def test_a_wrong_byte_fails_the_run_and_nothing_is_reported(scratch: Path, tmp_path: Path):
    file = tmp_path / "result.json"
    ran = bench(*TINY, "--flip-bit", "--data-dir", str(scratch), "--json", str(file))
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert "wrong bytes: 1 " in ran.stderr
    assert "at byte 4999 [VERIFICATION_FAILED]" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not file.exists()


def start_endless_run(scratch: Path) -> subprocess.Popen[bytes]:
    """A run that goes on until it is ended, with both of its servers there."""
    words = ("--blocks", "4", "--batch", "4", "--block-bytes", "64", "--rounds", "100000", "--memory-blocks", "0")
    process = subprocess.Popen(
        command(*words, "--data-dir", str(scratch)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline_s = time.monotonic() + PATIENCE_S
    while len(processes_about(scratch)) < 3:  # itself, the server, the bare stream
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return process


def test_a_server_that_dies_fails_the_run(scratch: Path):
    process = start_endless_run(scratch)
    (server,) = [pid for pid, words in processes_about(scratch).items() if "kvstore.cli.server" in words]
    os.kill(server, signal.SIGKILL)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (1, b"")
    assert b"nothing was measured" in err
    assert b"Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_servers_and_removes_the_scratch_directory(scratch: Path, number: signal.Signals):
    process = start_endless_run(scratch)
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--blocks", "100", "--batch", "64"], "--blocks 100"),
        (["--batch", "0"], "--batch 0"),
        (["--block-bytes", "0"], "--block-bytes 0"),
        (["--block-bytes", "67108865"], "--block-bytes 67108865"),
        (["--rounds", "-1"], "--rounds -1"),
        (["--memory-blocks", "-1"], "--memory-blocks -1"),
        (["--seed", "-1"], "--seed -1"),
        (["--seed", "one"], "'--seed'"),
        (["--data-dir", "/nonexistent"], "/nonexistent"),
        (["--json", "/nonexistent/result.json"], "/nonexistent/result.json"),
        (["--blocks", "1099511627776"], "GiB free"),
    ],
)
def test_wrong_input_names_the_value_before_anything_is_started(
    capsys: pytest.CaptureFixture[str], args: list[str], named: str
):
    with pytest.raises(SystemExit) as ended:
        cli.main(["throughput", *args])
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    assert named in printed.err


BUSY_CHILD = """
import os, sys, time
while time.process_time() < 0.3:
    pass
held = bytearray(os.urandom(32 << 20))
with open(sys.argv[1], "wb") as file:
    file.write(held)
    os.fsync(file.fileno())
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_child_is_read_as_the_kernel_counts_it(tmp_path: Path):
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY_CHILD, str(tmp_path / "written")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        child = Child(process, "", tmp_path / "log")
        assert 0.25 <= child.cpu_s() <= time.clock_gettime(time.CLOCK_BOOTTIME)
        assert child.memory().anon_bytes > 32 << 20
        assert 0 < child.memory().file_bytes < 32 << 20
        assert child.written_bytes() >= 32 << 20 or filesystem_of(tmp_path) == "tmpfs"
        process.communicate()


def filesystem_of(directory: Path) -> str:
    return describe_machine(directory).filesystem


POINT = {
    "blocks",
    "match1024_hit_us_p50",
    "match1024_miss_us_p50",
    "rss_anon_bytes_per_block",
    "index_bytes_written_per_block",
    "start_clean_s",
    "start_kill9_port_s",
    "start_kill9_ready_s",
    "reclaim_blocks_per_s",
}


def test_scale_reports_a_point_for_each_number_of_blocks(scratch: Path, tmp_path: Path):
    file = tmp_path / "scale.json"
    options = ("--points", "2000,5000", "--seed", "7", "--dir", str(scratch), "--json", str(file))
    ran = subprocess.run(
        [sys.executable, "-m", "kvstore_bench.cli", "scale", *options],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    result = json.loads(file.read_text())
    assert (result["benchmark"], result["seed"]) == ("scale", 7)
    assert result["commit"]
    assert {"cpu", "cores", "kernel", "filesystem"} <= result["machine"].keys()
    assert [point["blocks"] for point in result["points"]] == [2000, 5000]
    for point in result["points"]:
        assert point.keys() >= POINT
        assert 0 < point["match1024_miss_us_p50"] < point["match1024_hit_us_p50"]
        assert 0 < point["start_kill9_port_s"] <= point["start_kill9_ready_s"]
        assert point["start_clean_s"] > 0
        assert point["reclaim_blocks_per_s"] > 0
        # Every entry has 52 bytes; nothing can be written that is not handed over first.
        assert 52 < point["index_bytes_per_block"] < 400
        assert 52 < point["index_bytes_handed_per_block"] < 2000
    assert "2,000" in ran.stdout
    assert "5,000" in ran.stdout
    assert result["commit"] in ran.stdout


@pytest.mark.parametrize(("points", "words"), [("100", "1,258 or more"), ("2000,x", "no list of numbers")])
def test_scale_names_points_that_cannot_be(points: str, words: str):
    ran = subprocess.run(
        [sys.executable, "-m", "kvstore_bench.cli", "scale", "--points", points],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ran.returncode == 2
    assert words in ran.stderr


def test_percentiles_are_values_that_occurred():
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, share) for share in (0.0, 0.2, 0.5, 0.99, 1.0)] == [1.0, 1.0, 3.0, 5.0, 5.0]
    assert percentile(list(range(1, 101)), 0.99) == 99
    assert percentile([7.0], 0.5) == 7.0
