"""kvstore-bench storage: the figures, and what wrong input is told."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvstore.cli.admin_values import parse_duration
from kvstore_bench import cli
from kvstore_bench.storage import StorageConfig, estimate
from kvstore_client import model_kv_layout
from kvstore_client.presets import preset_config

V41 = "deepseek-v4.1-flash"
WINDOWED = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 256,
    "sliding_window_pattern": 4,
    "dtype": "float16",
}


def run(*args):
    """The exit code of the command."""
    with pytest.raises(SystemExit) as raised:
        cli.main(["storage", *map(str, args)])
    return raised.value.code


def figures(tmp_path, *args):
    file = tmp_path / "storage.json"
    assert run(*args, "--json", file) == 0
    return json.loads(file.read_text())


def test_v41_flash_would_store_twelve_times_the_block_or_a_share_by_snapshots(tmp_path, capsys):
    report = figures(tmp_path, "--model", V41, "--snapshot-every", 1280, "--tokens-per-day", "1e9", "--ttl", "36h")
    found = report["figures"]
    assert found["full"] == {
        "bytes_per_block": 114_688,
        "bytes_per_million_tokens": 896e6,
        "resident_bytes": 896 * 1e9 * 1.5,
    }
    assert found["window_every_token"]["bytes_per_block"] == 20 * 128 * 528
    assert found["share_saved_every_token"] == pytest.approx(1_351_680 / (1_351_680 + 114_688))
    assert found["window_snapshots"]["bytes_per_block"] == pytest.approx(141_504)
    assert found["share_saved_snapshots"] == pytest.approx(141_504 / (141_504 + 114_688))
    assert (found["snapshot_bytes"], found["padding_bytes_per_block"]) == (1_415_040, 768)
    assert report["config"]["ttl_s"] == 129_600
    assert {"benchmark", "kvstore_version", "commit", "time"} <= report.keys()
    printed = capsys.readouterr().out
    for words in ("114,688", "1,351,680", "92.2%", "141,504", "55.2%", "resident TiB", "1.222", "lower bound"):
        assert words in printed


def test_by_default_about_half_of_the_bytes_are_saved(tmp_path):
    found = figures(tmp_path, "--model", V41)["figures"]
    assert 0.4 < found["share_saved_snapshots"] < 0.6
    assert found["full"]["resident_bytes"] is None


def test_any_config_json_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(WINDOWED))
    found = figures(tmp_path, "--config", tmp_path / "config.json", "--kv-dtype", "float32")["figures"]
    per_layer_and_token = 2 * 2 * 8 * 4
    assert (found["full_layers"], found["window_layers"]) == ([3], [0, 1, 2])
    assert found["full"]["bytes_per_block"] == 128 * per_layer_and_token
    assert found["snapshot_bytes"] == 3 * 256 * per_layer_and_token


def test_a_model_without_windows_saves_nothing(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({**WINDOWED, "sliding_window": None}))
    found = figures(tmp_path, "--config", tmp_path / "config.json")["figures"]
    assert (found["share_saved_every_token"], found["share_saved_snapshots"]) == (0, 0)
    assert "no layer has a window" in capsys.readouterr().out


def test_rarer_snapshots_take_less_and_a_longer_ttl_keeps_more():
    kv = model_kv_layout(preset_config(V41))
    before, rarer, longer = (
        estimate(kv, StorageConfig(V41, "fp4", "vllm", every, 1e9, ttl_s))
        for every, ttl_s in ((1000, 86_400), (2000, 86_400), (1000, 172_800))
    )
    assert rarer.window_snapshots.bytes_per_block * 2 == before.window_snapshots.bytes_per_block
    assert rarer.full == before.full
    assert longer.full.resident_bytes == 2 * before.full.resident_bytes


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("36h", 129_600), ("1d12h", 129_600), ("2d1h1m1s", 176_461)]
)
def test_a_ttl_is_written_as_for_kvstore_admin(text, seconds, tmp_path):
    assert parse_duration(text, "--ttl") == seconds
    assert figures(tmp_path, "--model", V41, "--tokens-per-day", "1e9", "--ttl", text)["config"]["ttl_s"] == seconds


PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()


@pytest.mark.parametrize("snapshot_every", [655, 1832])
@pytest.mark.parametrize("model", [V41, "SmolLM2"])
def test_the_page_on_models_shows_what_the_command_computes(model, snapshot_every, tmp_path):
    _, v41_part, smollm2_part = re.split(r"`kvstore-bench storage|\nSmolLM2", PAGE)
    part, args = v41_part, ("--model", V41)
    if model != V41:
        (text,) = re.findall(r"```json\n(.*?)```", smollm2_part, re.S)
        (tmp_path / "config.json").write_text(text)
        part, args = smollm2_part, ("--config", tmp_path / "config.json")
    found = figures(tmp_path, *args, "--snapshot-every", snapshot_every)["figures"]
    for title, kv, share in (
        ("full-attention KV: stored", found["full"], None),
        ("window KV, of every token", found["window_every_token"], found["share_saved_every_token"]),
        (
            f"window KV, a snapshot every {snapshot_every:,} tokens",
            found["window_snapshots"],
            found["share_saved_snapshots"],
        ),
    ):
        saved = "" if share is None else f"{share:.1%} "
        row = f"| {title} | {kv['bytes_per_block']:,.0f} | {kv['bytes_per_million_tokens'] / 1e6:,.1f} | {saved}|"
        assert row in part


@pytest.mark.parametrize(
    ("args", "reason", "words"),
    [
        ((), "INVALID_ARGUMENT", "neither --model nor --config"),
        (("--model", V41, "--config", "c.json"), "INVALID_ARGUMENT", "both --model and --config"),
        (("--model", "deepseek-v4"), "UNKNOWN_MODEL", "did you mean 'deepseek-v4.1-flash'"),
        (("--config", "absent.json"), "INVALID_ARGUMENT", "'absent.json' cannot be read: No such file"),
        (("--config", "broken.json"), "INVALID_MODEL_CONFIG", "'broken.json' is no JSON"),
        (("--config", "list.json"), "INVALID_MODEL_CONFIG", "config is a list"),
        (("--config", "empty.json"), "INVALID_MODEL_CONFIG", "num_hidden_layers is missing"),
        (("--model", V41, "--kv-dtype", "bfloat16"), "INVALID_ARGUMENT", "wanted is one of fp4, fp8"),
        (("--model", V41, "--engine", "mine"), "INVALID_ARGUMENT", "engine is 'mine'"),
        (("--model", V41, "--snapshot-every", "0"), "INVALID_ARGUMENT", "--snapshot-every 0"),
        (("--model", V41, "--ttl", "3d"), "INVALID_ARGUMENT", "belong together"),
        (("--model", V41, "--tokens-per-day", "1e9"), "INVALID_ARGUMENT", "belong together"),
        (("--model", V41, "--tokens-per-day", "nan", "--ttl", "3d"), "INVALID_ARGUMENT", "--tokens-per-day nan"),
        (("--model", V41, "--tokens-per-day", "-1", "--ttl", "3d"), "INVALID_ARGUMENT", "--tokens-per-day -1"),
        (("--model", V41, "--tokens-per-day", "1e9", "--ttl", "0d"), "INVALID_ARGUMENT", "--ttl '0d'"),
        (("--model", V41, "--tokens-per-day", "1e9", "--ttl", "soon"), "INVALID_ARGUMENT", "--ttl 'soon'"),
        (("--model", V41, "--tokens-per-day", "1e300", "--ttl", "3d"), "INVALID_ARGUMENT", "--tokens-per-day 1e+300"),
        (("--model", V41, "--tokens-per-day", "1e9", "--ttl", ""), "INVALID_ARGUMENT", "--ttl ''"),
        (("--model", V41, "--tokens-per-day", "1e9", "--ttl", "1h2d"), "INVALID_ARGUMENT", "--ttl '1h2d'"),
        (("--config", "deep.json"), "INVALID_MODEL_CONFIG", "num_hidden_layers is 30000000000"),
        (("--config", "wide.json"), "INVALID_MODEL_CONFIG", "head_dim is 1000000000"),
        (("--model", V41, "--json", "no/such/dir.json"), "INVALID_ARGUMENT", "cannot be written: No such file"),
    ],
)
def test_wrong_input_is_told_with_a_reason_and_a_fix(args, reason, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "deep.json").write_text(json.dumps({**WINDOWED, "num_hidden_layers": 30 * 10**9}))
    (tmp_path / "wide.json").write_text(json.dumps({**WINDOWED, "head_dim": 10**400}))
    assert run(*args) == 2
    printed = capsys.readouterr()
    error, fix = printed.err.splitlines()
    assert error.startswith("error: ")
    assert error.endswith(f"[{reason}]")
    assert words in error
    assert fix.startswith("fix: ")
    assert printed.out == ""
