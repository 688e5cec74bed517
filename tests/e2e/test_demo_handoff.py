"""kvstore-bench demo-handoff: real processes hand real requests over; and what it says when something is wrong."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benches import short_conversations
from kvstore_bench import cli, demo_handoff
from kvstore_bench.demo_handoff_report import HandoffReport, HandoffRequest, Move
from kvstore_bench.machine import describe_machine

if TYPE_CHECKING:
    pass

PATIENCE_S = 280

pytestmark = pytest.mark.usefixtures("sigterm_afterwards")


def test_requests_move_through_three_workers_and_say_the_same(
    scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(demo_handoff, "conversations", short_conversations)
    file = tmp_path / "report.json"
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo-handoff", "--requests", "2", "--tokens", "32", "--data-dir", str(scratch), "--json", str(file)])
    printed = capfd.readouterr()
    assert ended.value.code == 0, printed
    report = json.loads(file.read_text())
    assert (report["passed"], report["answers_equal"], report["recomputed_tokens"]) == (True, True, 0)
    assert (report["moved_twice"], report["config"]["max_new_tokens"]) == (2, 32)
    assert report["commit"]
    token_bytes = report["worker"]["block_bytes"] // 128
    for request in report["requests"]:
        prefill, a, b = request["tokens_at"]
        assert (prefill, a + b) == (1, 31)
        assert a >= 7
        # Every token but the last has its KV, and all of it is in the store.
        first, second = request["moves"]
        assert first["kv_bytes"] == request["prompt_tokens"] * token_bytes
        assert second["kv_bytes"] == (request["prompt_tokens"] + a) * token_bytes
        assert min(first["hand_over_s"], first["take_over_s"], second["hand_over_s"], second["take_over_s"]) > 0
        assert request["answer"]
    for words in ("chat-1", "agent-1", "equal", "PASSED"):
        assert words in printed.out
    assert "SIGTERM: drain" in printed.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_every_process_and_removes_the_scratch_directory(scratch: Path, number: signal.Signals):
    process = subprocess.Popen(
        [sys.executable, "-m", "kvstore_bench.cli", "demo-handoff", "--data-dir", str(scratch)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline_s = time.monotonic() + PATIENCE_S
    children: list[int] = []
    while not children:
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
        children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []


def test_a_worker_that_dies_fails_the_demo_with_the_reason(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    real = demo_handoff.running_worker
    monkeypatch.setattr(
        demo_handoff, "running_worker", lambda role, log_path, *options: real(role, log_path, *options, "--no-such")
    )
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo-handoff", "--requests", "1", "--data-dir", str(scratch)])
    assert ended.value.code == 1
    err = capfd.readouterr().err
    assert "a worker ended with 2" in err
    assert "--no-such" in err


MOVE = Move(kv_bytes=1_000_000, ticket_bytes=5000, hand_over_s=0.5, take_over_s=0.25, recomputed_tokens=0)
REQUEST = HandoffRequest(
    title="chat",
    traffic_class="chatbot",
    prompt_tokens=300,
    tokens_at=[1, 20, 11],
    moves=[MOVE, MOVE],
    answers_equal=True,
    answer="yes",
)


@pytest.mark.parametrize(
    ("second", "code", "words"),
    [
        (REQUEST, 0, ["PASSED", "1 + 20 + 11", "2 of 2 requests", "1.0, 1.0 MB"]),
        (replace(REQUEST, tokens_at=[1, 31], moves=[MOVE]), 0, ["PASSED", "1 + 31", "1 of 2 requests"]),
        (replace(REQUEST, answers_equal=False), 1, ["FAILED", "DIFFERENT", "alone: 1 of 2"]),
        (replace(REQUEST, moves=[MOVE, replace(MOVE, recomputed_tokens=45)]), 1, ["FAILED", "computed twice: 45"]),
    ],
)
def test_exit_code_and_words_follow_the_outcome(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    second: HandoffRequest,
    code: int,
    words: list[str],
):
    outcome = HandoffReport("c0ffee", describe_machine(tmp_path), [REQUEST, second], 32, 3.0, 2.0, {"event": "ready"})
    monkeypatch.setattr(demo_handoff, "_run", lambda *_: outcome)
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo-handoff", "--json", str(tmp_path / "report.json")])
    assert ended.value.code == code
    assert json.loads((tmp_path / "report.json").read_text())["passed"] is (code == 0)
    printed = capsys.readouterr().out
    for word in words:
        assert word in printed


def test_a_drain_that_had_nothing_to_hand_over_shows_nothing(tmp_path: Path):
    finished = replace(REQUEST, tokens_at=[1, 31], moves=[MOVE])
    report: dict[str, Any] = HandoffReport("", describe_machine(tmp_path), [finished], 32, 3.0, 2.0, {}).to_json()
    assert report["passed"] is False


@pytest.mark.parametrize(
    ("args", "code", "named"),
    [
        (["--requests", "0"], 2, "--requests 0"),
        (["--requests", "5"], 2, "give 1 to 4"),
        (["--tokens", "15"], 2, "give 16 to 512"),
        (["--data-dir", "/nonexistent"], 2, "/nonexistent"),
        (["--json", "/nonexistent/report.json"], 2, "/nonexistent/report.json"),
    ],
)
def test_wrong_input_names_the_value_before_anything_is_started(
    capsys: pytest.CaptureFixture[str], args: list[str], code: int, named: str
):
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo-handoff", *args])
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (code, "")
    assert named in printed.err
