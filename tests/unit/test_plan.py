"""kvstore-bench plan: the formulas, the reference deployment, and what wrong input is told."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvstore_bench import cli, units
from kvstore_bench.plan.compare import compare
from kvstore_bench.plan.config import REFERENCE, load_plan
from kvstore_bench.plan.model import make_plan
from kvstore_client.model_kv import model_kv_layout
from kvstore_client.presets import preset_config

PAGE = (Path(__file__).parents[2] / "docs" / "capacity-plan.md").read_text()
PIB, TIB, GIB = 2**50, 2**40, 2**30
DAY_S = 86_400

# 1,000 tokens a second, a quarter of them new: small numbers that can be checked by hand.
SMALL = """
name = "small"
[load]
tokens_per_day = "86.4M"
hit_rate = "75%"
peak_factor = 2
[kv]
bytes_per_token = "1kB"
[classes.agent]
share = 1
ttl = "1d"
reuse_span = "12h"
[store]
copies = 2
fill = 0.5
write_amplification = 1.5
[drive]
size = "10GB"
read = "1MB/s"
write = "1MB/s"
writes_per_day = 1
utilisation = 0.5
[nic]
speed = "16Mbps"
utilisation = 0.5
[window]
bytes_per_token = 1000
snapshot_bytes = "1kB"
snapshot_every_tokens = 4
[prefill]
tokens_per_second = 100
utilisation = 0.5
peak_factor = 2
"""


@pytest.fixture
def small(tmp_path):
    """The small deployment with some keys changed."""
    file = tmp_path / "small.toml"
    file.write_text(SMALL)
    return lambda **changes: load_plan(
        file, [(tuple(key.split("__")), value, "--set") for key, value in changes.items()]
    )


def run(*args):
    """The exit code of the command."""
    with pytest.raises(SystemExit) as raised:
        cli.main(["plan", *map(str, args)])
    return raised.value.code


def report(tmp_path, *args):
    file = tmp_path / "plan.json"
    assert run(*args, "--json", file) == 0
    return json.loads(file.read_text())


def test_a_small_plan_is_what_it_is_by_hand(small):
    found = make_plan(small())
    assert found.missed_tokens_per_day == found.written_tokens_per_day == 21.6e6
    assert found.resident_bytes == pytest.approx(21.6e6 * 1000 * 1.5)
    assert found.ssd_bytes == pytest.approx(32.4e9 * 2 / 0.5)
    flows = found.bandwidth
    assert (flows.read.average, flows.written.average) == pytest.approx((750_000, 250_000))
    assert (flows.read.peak, flows.written.peak) == pytest.approx((1_500_000, 500_000))
    assert (flows.drive_written.average, flows.drive_written.peak) == pytest.approx((750_000, 1_500_000))
    drives = found.drives
    assert drives.by == {"capacity": 13, "reads and writes": 6, "endurance": 7}
    assert (drives.by_reads, drives.by_writes, drives.count, drives.binding) == (3, 3, 13, "capacity")
    assert drives.written_bytes_per_day == pytest.approx(64.8e9)
    assert drives.writes_per_day == drives.rating_used == pytest.approx(64.8 / 130)
    assert (found.nics.by_out, found.nics.by_in, found.nics.count) == (2, 1, 2)
    assert found.window_every_token.share == 0.5
    assert found.window_every_token.ssd_bytes == pytest.approx(129.6e9)
    assert (found.window_snapshots.bytes_per_token, found.window_snapshots.share) == (250, 0.2)
    assert found.window_snapshots.average_written == pytest.approx(62_500)
    assert (found.prefill.average_instances, found.prefill.peak_instances) == (5, 10)


@pytest.mark.parametrize(
    ("changes", "binding", "count"),
    [
        ({"drive__size": "20GB"}, "capacity", 7),
        ({"drive__size": "100GB"}, "reads and writes", 6),
        ({"drive__writes_per_day": "0.3"}, "endurance", 22),
    ],
)
def test_the_need_that_asks_for_most_drives_binds(small, changes, binding, count):
    drives = make_plan(small(**changes)).drives
    assert (drives.binding, drives.count, max(drives.by.values())) == (binding, count, count)
    assert drives.rating_used <= 1


def test_stored_answers_are_written_and_kept_but_not_prefilled(small):
    found = make_plan(small(load__output_share="0.25"))
    assert (found.missed_tokens_per_day, found.written_tokens_per_day) == (21.6e6, 43.2e6)
    assert found.resident_bytes == pytest.approx(64.8e9)
    assert found.prefill.average_instances == 5


def test_one_more_token_a_second_than_instances_can_take_is_one_more_instance(small):
    for rate, count in ((50, 1), (50.001, 2), (100, 2), (0.001, 1)):
        found = make_plan(small(), measured_tokens_per_s=rate).prefill
        assert (found.measured_tokens_per_s, found.measured_instances) == (rate, count)


def test_a_class_without_a_hit_rate_makes_up_for_those_that_have_one(small):
    chat = {"classes__agent__share": "0.6", "classes__chat__share": "0.4", "classes__chat__ttl": "2d"}
    found = make_plan(small(**chat, classes__chat__hit_rate="0.6")).classes
    assert found["agent"].hit_rate == pytest.approx((0.75 - 0.4 * 0.6) / 0.6)
    assert found["chat"].missed_tokens_per_day == pytest.approx(86.4e6 * 0.4 * 0.4)
    assert sum(item.missed_tokens_per_day for item in found.values()) == pytest.approx(21.6e6)
    assert {item.hit_rate for item in make_plan(small(**chat)).classes.values()} == {0.75}
    assert found["chat"].mean_life_s == 2 * DAY_S


def test_the_reference_is_computed_from_its_published_load():
    config = load_plan(None, [])
    found = make_plan(config)
    assert found.bytes_per_token == 896
    assert found.missed_tokens_per_day == pytest.approx(6.2e12)
    assert (
        found.bandwidth.read.average / TIB
        == pytest.approx(148.8e12 * 896 / DAY_S / TIB)
        == pytest.approx(1.403, abs=1e-3)
    )
    assert found.bandwidth.written.average / GIB == pytest.approx(59.88, abs=0.01)
    assert found.bandwidth.read.peak / TIB == pytest.approx(10, abs=0.01)
    by_class = {name: item.resident_bytes / PIB for name, item in found.classes.items()}
    assert by_class == pytest.approx({"agent": 4.34e12 * 896 * 3.25 / PIB, "chatbot": 1.86e12 * 896 * 9 / PIB})
    kv = model_kv_layout(preset_config("deepseek-v4.1-flash"))
    assert config.kv.block_bytes == kv.block_bytes
    assert config.window.bytes_per_token * 128 == kv.window_block_bytes
    assert config.window.snapshot_bytes == kv.snapshot_bytes
    assert found.window_snapshots.share == pytest.approx(0.463, abs=1e-3)


def test_published_figures_and_arithmetic_differ_where_they_do():
    config = load_plan(None, [])
    ratios = {line.what: line.ratio for line in compare(config, make_plan(config))}
    assert ratios["read, average"] == pytest.approx(10 * TIB / (148.8e12 * 896 / DAY_S))
    assert ratios["written, average"] == pytest.approx(850 * GIB / (6.2e12 * 896 / DAY_S))
    assert ratios["read : written"] == pytest.approx((10 * 1024 / 850) / 24)
    assert ratios["resident, all for 3 d"] == pytest.approx(100 * PIB / (6.2e12 * 896 * 3))
    assert ratios["resident, all for 7 d"] == pytest.approx(100 * PIB / (6.2e12 * 896 * 7))
    twice = load_plan(None, [(("store", "copies"), "2", "--set")])
    ratios_twice = {line.what: line.ratio for line in compare(twice, make_plan(twice))}
    for what in ("written, average", "written, peak", "SSD of this plan"):
        assert ratios_twice[what] == pytest.approx(ratios[what] / 2)
    assert ratios_twice["read : written"] == pytest.approx(2 * ratios["read : written"])


def test_a_shorter_ttl_is_weighed_against_the_tokens_it_loses():
    config = load_plan(None, [])
    (line,) = [line for line in compare(config, make_plan(config)) if "TTL" in line.what]
    assert line.computed == "775 B to 1.55 T tokens a day"
    assert "12% to 25% more to prefill" in line.says  # 0.775 and 1.55 of 6.2
    # 0.5 points of all input are 1.667 of chat's; lives of 5 and not 9 days.
    change = (46.5e12 * 0.3 / 0.3) * 896 / 0.95 * ((0.04 + 0.005 / 0.3) * 5 - 0.04 * 9) / PIB
    assert f"{change:.2f} PiB" in line.says


@pytest.mark.parametrize(
    "option",
    [("--tokens-per-day", "1B"), ("--hit-rate", "0.9"), ("--bytes-per-token", "900"), ("--set", "kv.block_bytes=1MB")],
)
def test_another_load_is_not_compared_with_what_is_published(option, tmp_path, capsys):
    assert report(tmp_path, *option)["published"] == []
    assert "published" not in capsys.readouterr().out
    assert (
        len(report(tmp_path, "--peak-factor", "3", "--share", "agent=0.5", "--share", "chatbot=0.5")["published"]) > 5
    )


def test_the_windows_of_the_reference_are_not_added_to_another_models_kv(tmp_path):
    assert report(tmp_path, "--block-bytes", "1MB")["figures"]["window_snapshots"] is None
    own = report(tmp_path, "--bytes-per-token", "8kB", "--set", "window.bytes_per_token=2kB")["figures"]
    assert own["window_every_token"]["share"] == 0.2


def test_the_json_has_all_inputs_and_outputs(tmp_path, capsys):
    args = (
        "--tokens-per-day",
        "2B",
        "--hit-rate",
        "90%",
        "--block-bytes",
        "64KiB",
        "--block-tokens",
        "64",
        "--ttl",
        "chatbot=36h",
    )
    found = report(tmp_path, *args, "--prefill-speed", "5k", "--missed-tokens-per-s", "8001")
    assert {"benchmark", "kvstore_version", "commit", "time"} < found.keys()
    config = found["config"]
    assert (config["load"]["tokens_per_day"], config["load"]["hit_rate"]) == (2e9, 0.9)
    assert config["kv"] == {"bytes_per_token": None, "block_bytes": 65_536, "block_tokens": 64}
    assert config["classes"]["chatbot"]["ttl"] == 36 * 3600
    assert found["figures"]["bytes_per_token"] == 1024
    assert found["figures"]["prefill"]["measured_instances"] == 3
    assert found["figures"]["classes"]["agent"]["missed_tokens_per_day"] == pytest.approx(1.4e8)
    printed = capsys.readouterr().out
    for words in (
        "2 B input tokens a day, 90.0% hit, 1,024 B per token",
        "as measured",
        "binds",
        "write amplification (1.1)",
    ):
        assert words in printed


def test_the_page_shows_the_reference_as_the_command_computes_it(capsys):
    config = load_plan(None, [])
    for line in compare(config, make_plan(config)):
        ratio = "-" if line.ratio is None else f"{line.ratio:.2f}"
        assert f"| {line.what} | {line.published} | {line.computed} | {ratio} |" in PAGE
    assert run() == 0
    tables = capsys.readouterr().out.split("\n\n")
    for title in ("SSD by class", "bandwidth", "hardware", "window KV", "prefill"):
        (table,) = [table for table in tables if table.startswith(title)]
        assert table in PAGE, title


def test_the_page_names_every_key_of_the_reference():
    for line in REFERENCE.read_text().splitlines():
        if key := re.match(r"\w+(?= = )", line):
            assert f"`{key[0]}`" in PAGE or f".{key[0]}`" in PAGE, key[0]


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_size, "112KiB", 114_688),
        (units.parse_size, "15.36 TB", 15.36e12),
        (units.parse_size, "1.5PiB", 1.5 * PIB),
        (units.parse_bytes, 896, 896),
        (units.parse_rate, "10TiB/s", 10 * TIB),
        (units.parse_rate, "7GB/s", 7e9),
        (units.parse_line_rate, "400Gbps", 50e9),
        (units.parse_count, "155T", 155e12),
        (units.parse_count, 2.5e9, 2.5e9),
        (units.parse_share, "96%", 0.96),
        (units.parse_share, 1, 1),
        (units.parse_duration, "1d12h", 129_600),
        (units.parse_duration, "0s", 0),
    ],
)
def test_quantities_are_read_with_their_units(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        *((units.parse_size, text) for text in ("15", 15, "15T", "15tb", "15KB", "-1TB", "1,5TB", "TB")),
        *((units.parse_size, text) for text in ("", "1GB/s", "1e40GB", True, None)),
        *((units.parse_bytes, text) for text in ("896b", -1, float("nan"), float("inf"), [1])),
        *((units.parse_rate, text) for text in ("7GB", "7Gbps", "7 GB / s")),
        *((units.parse_line_rate, text) for text in ("400GB/s", "400GBps", "400Gib", "400")),
        *((units.parse_count, text) for text in ("155X", "155TB", "-5", "1e999", "\N{ARABIC-INDIC DIGIT ONE}")),
        *((units.parse_share, text) for text in ("1.5", "101%", "-0.1", 96, "nan")),
        *((units.parse_whole, text) for text in ("1.5", "two", True)),
        *((units.parse_duration, text) for text in ("", "3", 3, "1h2d", "-1d", "1.5d", "3 d")),
    ],
)
def test_quantities_without_a_clear_meaning_are_refused(parse, text):
    with pytest.raises(ValueError, match="wanted is"):
        parse(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (114_688, "112 KiB"),
        (1.5 * PIB, "1.50 PiB"),
        (99.99 * GIB, "100 GiB"),
        (9.999 * GIB, "10.0 GiB"),
        (5000 * 2**60, "5,000 EiB"),
    ],
)
def test_sizes_are_written_in_binary_units(size, text):
    assert units.format_size(size) == text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--hit-rate", "1.5"), "--hit-rate (load.hit_rate) is '1.5', wanted is a share from 0 to 1"),
        (("--hit-rate", "-0.1"), "--hit-rate (load.hit_rate) is '-0.1'"),
        (("--tokens-per-day", "0"), "--tokens-per-day (load.tokens_per_day) is '0': input should be greater than 0"),
        (("--peak-factor", "0.5"), "--peak-factor (load.peak_factor) is '0.5'"),
        (("--block-bytes", "112KB"), "--block-bytes (kv.block_bytes) is '112KB'"),
        (("--block-bytes", "1kB", "--bytes-per-token", "8"), "kv: give bytes_per_token or block_bytes"),
        (("--block-tokens", "64", "--bytes-per-token", "8"), "kv: block_tokens belongs to block_bytes"),
        (("--share", "agent=0.5"), "agent 0.5, chatbot 0.3) add up to 0.8, wanted is 1"),
        (("--share", "agent"), "--share 'agent' has no name or no value"),
        (("--share", "agent=0.5", "--share", "agent=0.7"), "--share gives 'agent' twice"),
        (("--share", "Agent!=0"), "classes: 'Agent!' is no name"),
        (("--share", "batch=0"), "classes.batch.ttl is missing"),
        (("--ttl", "agent=3"), "--ttl (classes.agent.ttl) is '3', wanted is a duration"),
        (("--ttl", "agent=0s"), "--ttl (classes.agent.ttl) is '0s'"),
        (("--ttl", "batch=3d"), "classes.batch.share is missing"),
        (("--class-hit-rate", "chatbot=0.01"), "chatbot 0.01 the whole cannot have load.hit_rate 0.96"),
        (
            ("--class-hit-rate", "agent=0.9", "--class-hit-rate", "chatbot=0.95"),
            "hit rates of agent 0.9, chatbot 0.95 the whole cannot",
        ),
        (("--set", "load.hitrate=0.9"), "--set (load.hitrate) is unknown"),
        (("--set", "load=3"), "--set (load) is '3', wanted is a table"),
        (("--set", "drive.size.raw=3TB"), "--set: size is no table"),
        (("--set", "store.copies=0"), "--set (store.copies) is '0'"),
        (("--set", "store.fill=0"), "--set (store.fill) is '0'"),
        (("--set", "published.ttl_cut.class=batch"), "published.ttl_cut.class 'batch' is none of the classes"),
        (("--missed-tokens-per-s", "-1"), "--missed-tokens-per-s is '-1'"),
        (("--config", "absent.toml"), "--config 'absent.toml' cannot be read: No such file"),
        (("--config", "broken.toml"), "--config 'broken.toml' is no TOML"),
        (("--config", "empty.toml"), "empty.toml: name is missing; load is missing"),
        (("--config", "bare.toml", "--missed-tokens-per-s", "1"), "--missed-tokens-per-s needs a prefill speed"),
        (
            ("--config", "odd.toml"),
            "odd.toml: drive.colour is unknown; nic.speed is '1GB/s', wanted is bits per second",
        ),
        (("--json", "no/such/plan.json"), "--json 'no/such/plan.json' cannot be written"),
    ],
)
def test_wrong_input_is_told_with_its_option_or_key(args, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("broken.toml").write_text("[load")
    Path("empty.toml").write_text("")
    Path("bare.toml").write_text(SMALL.split("[prefill]")[0])
    Path("odd.toml").write_text(
        SMALL.replace('speed = "16Mbps"', 'speed = "1GB/s"').replace("[nic]", 'colour = "red"\n[nic]')
    )
    assert run(*args) == 2
    printed = capsys.readouterr()
    error, fix = printed.err.splitlines()
    assert words in error
    assert error.startswith("error: ")
    assert error.endswith("[INVALID_ARGUMENT]")
    assert fix.startswith("fix: ")
    assert printed.out == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"load__hit_rate": "0"},
        {"load__hit_rate": "1"},
        {"classes__agent__ttl": "1s", "classes__agent__reuse_span": "0s"},
    ],
)
def test_extremes_need_at_least_one_drive_and_port(small, changes):
    found = make_plan(small(**changes))
    assert found.drives.count >= 1
    assert found.nics.count >= 1


def test_a_file_without_window_prefill_or_published_is_planned_without_them(tmp_path, capsys):
    (tmp_path / "bare.toml").write_text(SMALL.split("[window]")[0])
    figures = report(tmp_path, "--config", tmp_path / "bare.toml")["figures"]
    assert figures["prefill"] is figures["window_snapshots"] is None
    printed = capsys.readouterr().out
    assert "prefill" not in printed
    assert "window" not in printed
