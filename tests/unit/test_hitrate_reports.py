"""The report of kvstore-bench hitrate in the terminal."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import pytest

from hitrate_sample import HOSTILE, make_report, page
from kvstore_bench.hitrate.misses import CAUSES
from kvstore_bench.hitrate.report_tables import GENERATED_NOTE, of_the_way
from kvstore_bench.hitrate.report_text import print_hitrate_report
from kvstore_bench.hitrate.result import DEFINITION, DEFINITION_FULL_BLOCKS, StorageFacts


@pytest.fixture(scope="module")
def report():
    return make_report()


@pytest.fixture
def printed(capsys):
    """Prints a report; returns its lines."""

    def print_it(report):
        print_hitrate_report(report)
        return capsys.readouterr().out.splitlines()

    return print_it


def table(lines, title):
    """Rows of the table under a line that begins with `title`, by their first cell: each a dict from head to cell."""
    start = next(i for i, line in enumerate(lines) if line.startswith(title) and line.strip() != "")
    head = cells(lines[start + 1])
    assert set(lines[start + 2]) == {"─"}
    found = {}
    for line in lines[start + 3 :]:
        row = cells(line)
        if len(row) < len(head):
            break
        found[row[0]] = dict(zip(head, row, strict=False))
    return found


def configuration_column(lines, title):
    """Of a table with a column for each configuration: the first one, by the names of the rows."""
    start = lines.index(title)
    rows = (cells(line) for line in lines[start + 3 :])
    found = {}
    for row in rows:
        if len(row) < 2:
            break
        found[row[0]] = row[1]
    return found


def cells(line):
    return re.split(r"\s{2,}", line.strip())


def test_the_main_configuration_is_printed_with_all_it_must_be_read_with(report, printed):
    lines = printed(report)
    rows = configuration_column(lines, "Hit rate")
    assert rows == {
        "policy": "segment-hazard",
        "replay": "simulator",
        "capacity": "10 %",
        "TTL": "agent 3d, chatbot 7d",
        "own share": "none",
        "capacity, blocks": "400,000",
        "capacity, size": "42.7 GiB",
        "hit rate, %": "93.54",
        "agent": "94.54",
        "chatbot": "91.21",
        "hit rate of full blocks": "93.66",
        "ceiling: no limit, no TTLs": "96.51",
        "ceiling with these TTLs": "95.88",
        "LRU": "93.32",
        "FIFO": "91.44",
        "Belady": "95.77",
        "of the way from LRU to Belady, %": "9.0",
    }
    text = " ".join(lines)
    assert DEFINITION in text
    assert DEFINITION_FULL_BLOCKS in text
    assert "kvstore 0.1.0, commit 0123456789ab, seed 7, 2026-10-30T12:00:00Z" in lines
    assert 'ttl             {"agent": "3d", "chatbot": "7d"}' in lines


def test_the_workload_is_described(report, printed):
    lines = printed(report)
    start = lines.index("Workload")
    assert dict(cells(line) for line in lines[start + 1 : start + 7]) == {
        "requests": "812,345 in 28.0 days, after 14.0 days of warm-up",
        "input tokens": "41,234,567,890",
        "of them by class": "agent 70.0 %, chatbot 30.0 %",
        "unique blocks": "4,000,000 of 128 tokens, those of the warm-up included",
        "generator": "mixed",
        "seed": "7",
    }


def test_what_the_store_holds_and_writes_is_printed(report, printed):
    facts = StorageFacts(3 << 30, 5 << 40, 7 * 2**20, 9 * 2**30, 1.2345, 0.678)
    lines = printed(make_report([replace(report.results[0], storage=facts)]))
    assert configuration_column(lines, "Storage") == {
        "resident, mean": "3.0 GiB",
        "resident, most": "5.0 TiB",
        "put a day": "7.0 MiB",
        "written a day": "9.0 GiB",
        "write amplification (WA)": "1.234",
        "drive writes per day (DWPD)": "0.68",
    }


def test_missed_tokens_are_split_by_cause_and_class_and_explained_once(report, printed):
    main = report.results[0]
    shares = dict(zip(CAUSES, (0.011, 0.002, 0.003, 0.04, 0.005), strict=True))
    by_class = {"agent": {cause: share / 2 for cause, share in shares.items()}, "chatbot": dict.fromkeys(CAUSES, 0.02)}
    main = replace(main, missed=shares, missed_by_class=by_class)
    lines = printed(make_report([main, replace(main, replay="server")]))
    first, second = (
        table(lines, "Missed tokens, % of input tokens: simulator"),
        table(lines, "Missed tokens, % of input tokens: server"),
    )
    assert first["first seen"] == {"cause": "first seen", "all": "1.10", "agent": "0.55", "chatbot": "2.00"}
    assert second["evicted"] == {"cause": "evicted", "all": "4.00", "agent": "2.00", "chatbot": "2.00"}
    assert second["together"] == {"cause": "together", "all": "6.10", "agent": "3.05", "chatbot": "10.00"}
    text = re.sub(r"\s+", " ", " ".join(lines))
    for meaning in CAUSES.values():
        assert text.count(meaning) == 1


def test_every_sweep_is_a_table(report, printed):
    lines = printed(report)
    capacity = table(lines, "Capacity sweep")
    assert list(capacity) == ["1 %", "5 %", "10 %", "25 %", "50 %"]
    assert capacity["5 %"] == {
        "capacity": "5 %",
        "hit rate": "90.12",
        "agent": "91.12",
        "chatbot": "87.79",
        "LRU": "89.90",
        "FIFO": "87.23",
        "Belady": "94.02",
        "of the way": "5.3",
        "expired": "1.97",
        "evicted": "5.91",
        "WA": "1.23",
        "DWPD": "16.48",
    }
    ttl = table(lines, "TTL sweep")
    assert [row["chatbot"] for row in ttl.values()] == ["82.03", "86.82", "90.61", "92.74", "93.91"]
    assert {row["ceiling"] for row in ttl.values()} == {"95.88"}
    shares = table(lines, "Class-share sweep")
    assert {name: (row["agent"], row["chatbot"]) for name, row in shares.items()} == {
        "agent 0 %": ("94.55", "91.18"),
        "agent 25 %": ("94.71", "90.91"),
        "agent 50 %": ("94.98", "88.74"),
        "agent 75 %": ("95.02", "84.13"),
    }


def test_settings_that_differ_within_a_sweep_are_columns_and_the_others_are_said_once(report, printed):
    rows = [
        replace(row, policy=policy) for policy in ("lru", "fifo") for row in report.results if row.sweep == "capacity"
    ]
    lines = printed(make_report(rows))
    assert list(table(lines, "Capacity sweep")["fifo"])[:3] == ["policy", "capacity", "hit rate"]
    assert "all with: replay simulator; TTL agent 3d, chatbot 7d; own share none" in lines


def test_configurations_stand_side_by_side_under_what_tells_them_apart(report, printed):
    main = report.results[0]
    others = [replace(main, replay="engine", hit_rate=0.9), replace(main, replay="server", hit_rate=0.8)]
    lines = printed(make_report([main, *others]))
    assert cells(lines[lines.index("Hit rate") + 1]) == ["simulator", "engine", "server"]
    assert next(cells(line) for line in lines if line.startswith("hit rate, %")) == [
        "hit rate, %",
        "93.54",
        "90.00",
        "80.00",
    ]


def test_figures_that_are_not_known_are_dashes(report, printed):
    main = report.results[0]
    unknown = replace(
        main,
        capacity_share=0.0,
        lru=None,
        fifo=None,
        belady=None,
        hit_rate_by_class={"agent": 0.9, "chatbot": float("nan")},
        storage=replace(main.storage, resident_bytes_mean=None),
    )
    lines = printed(make_report([unknown, replace(unknown, sweep="capacity")], seed=None))
    rows = configuration_column(lines, "Hit rate")
    dashes = {name for name, cell in rows.items() if cell == "-"}
    assert dashes == {
        "capacity, blocks",
        "capacity, size",
        "chatbot",
        "LRU",
        "FIFO",
        "Belady",
        "of the way from LRU to Belady, %",
    }
    assert rows["capacity"] == "no limit"
    assert configuration_column(lines, "Storage")["resident, mean"] == "-"
    assert configuration_column(lines, "Storage")["drive writes per day (DWPD)"] == "-"
    swept = table(lines, "Capacity sweep")["no limit"]
    assert [swept[name] for name in ("chatbot", "LRU", "FIFO", "Belady", "of the way", "DWPD")] == ["-"] * 6
    assert not re.search(r"\b(nan|None)\b", "\n".join(lines))
    assert any("no seed" in line for line in lines)


@pytest.mark.parametrize(
    ("hit_rate", "lru", "belady", "way"),
    [
        (0.30, 0.28, 0.38, 0.2),
        (0.28, 0.28, 0.38, 0.0),
        (0.27, 0.28, 0.38, -0.1),
        (0.9632, 0.9630, 0.9635, None),  # as good as no way
        (0.5, 0.5, 0.5, None),
        (0.5, None, 0.6, None),
        (0.5, 0.4, None, None),
    ],
)
def test_the_way_from_lru_to_belady(report, hit_rate, lru, belady, way):
    found = of_the_way(replace(report.results[0], hit_rate=hit_rate, lru=lru, belady=belady))
    assert found == (None if way is None else pytest.approx(way))


@pytest.mark.parametrize(("origin", "is_said"), [({"generator": "mixed"}, True), ({"file": "log.jsonl"}, False)])
def test_only_a_generated_workload_is_said_to_show_consistency_alone(printed, origin, is_said):
    report = make_report([], origin=origin)
    assert (GENERATED_NOTE in " ".join(printed(report))) == is_said
    assert (GENERATED_NOTE in page(report).text) == is_said


def test_in_a_pipe_lines_are_short_and_hold_nothing_but_text(report, printed):
    lines = printed(report)
    tables = lines[: lines.index("Configuration")]
    assert max(map(len, tables)) <= 100
    assert not any(line != line.rstrip() for line in lines)
    assert "".join(lines).isprintable()


def test_a_report_without_results_still_says_what_was_asked(printed):
    report = make_report([])
    assert "Workload" in printed(report)
    assert "812,345 in 28.0 days" in page(report).text


def test_names_from_files_steer_no_terminal(printed):
    lines = printed(make_report(name=HOSTILE, origin={"file": HOSTILE, HOSTILE: {HOSTILE: HOSTILE}}))
    assert "".join(lines).isprintable()
    assert any(line.startswith("Hit rate: ") and "\\x1b[31m\\n" in line for line in lines)


def test_plots_are_loaded_only_when_they_are_wanted():
    code = "import sys, kvstore_bench.hitrate.report_text; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
