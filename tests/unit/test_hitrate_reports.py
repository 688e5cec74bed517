"""The reports of kvstore-bench hitrate: figures in the terminal, plots, and a page that needs nothing else."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import zlib
from base64 import b64decode
from dataclasses import replace
from html.parser import HTMLParser

import matplotlib
import pytest

from kvstore_bench.hitrate.misses import CAUSES
from kvstore_bench.hitrate.plot_lines import capacity_panel, class_share_panel, ttl_panels
from kvstore_bench.hitrate.plots import plots, write_plots
from kvstore_bench.hitrate.report_html import html_report
from kvstore_bench.hitrate.report_tables import GENERATED_NOTE, configuration_sheet, of_the_way, origin_sheet, sheets
from kvstore_bench.hitrate.report_text import print_hitrate_report
from kvstore_bench.hitrate.result import (
    DEFINITION,
    DEFINITION_FULL_BLOCKS,
    HitRateReport,
    Result,
    StorageFacts,
    WorkloadFacts,
)
from kvstore_bench.machine import Machine

H, D = 3_600, 86_400
UNIQUE_BLOCKS, BLOCK_BYTES = 4_000_000, 114_688
AGENT, CHATBOT = 0.7, 0.3  # of input tokens
# By capacity, as shares of input tokens.
CAPACITIES = {
    0.01: (0.7120, 0.7101, 0.6502, 0.8310),
    0.05: (0.9012, 0.8990, 0.8723, 0.9402),
    0.1: (0.9354, 0.9332, 0.9144, 0.9577),
    0.25: (0.9531, 0.9528, 0.9466, 0.9612),
    0.5: (0.9583, 0.9583, 0.9560, 0.9613),
}
CHATBOT_TTLS = {H: 0.8203, D: 0.8682, 3 * D: 0.9061, 7 * D: 0.9274, 14 * D: 0.9391}
OWN_SHARES = {0.0: (0.9455, 0.9118), 0.25: (0.9471, 0.9091), 0.5: (0.9498, 0.8874), 0.75: (0.9502, 0.8413)}


def storage(capacity_bytes, hit_rate):
    put = 3.1e12 * (1 - hit_rate)
    return StorageFacts(
        resident_bytes_mean=0.91 * capacity_bytes,
        resident_bytes_max=round(0.97 * capacity_bytes),
        bytes_put_per_day=put,
        bytes_written_per_day=1.234 * put,
        write_amplification=1.234,
        capacity_writes_per_day=1.234 * put / capacity_bytes,
    )


def result(agent, chatbot, *, lru=None, fifo=None, belady=None, capacity_share=0.1, **other):
    """A result with these hit rates; misses beyond what is new to anybody are evictions and, for chats, expiries."""
    hit_rate = AGENT * agent + CHATBOT * chatbot
    by_class = {}
    for name, rate in (("agent", agent), ("chatbot", chatbot)):
        missed = 1 - rate
        new = min(missed, 0.02)
        parts = (new * 0.75, new * 0.2, (missed - new) * 0.25, (missed - new) * 0.75, new * 0.05)
        by_class[name] = dict(zip(CAUSES, parts, strict=True))
    missed = {cause: AGENT * by_class["agent"][cause] + CHATBOT * by_class["chatbot"][cause] for cause in CAUSES}
    blocks = int(capacity_share * UNIQUE_BLOCKS)
    made = Result(
        trace="mixed",
        sweep="",
        policy="segment-hazard",
        replay="simulator",
        capacity_share=capacity_share,
        capacity_blocks=blocks,
        capacity_bytes=blocks * BLOCK_BYTES,
        ttl={"agent": 3 * D, "chatbot": 7 * D},
        class_share={},
        hit_rate=hit_rate,
        hit_rate_of_full_blocks=hit_rate / 0.9987,
        hit_rate_by_class={"agent": agent, "chatbot": chatbot},
        ceiling=0.9651,
        ceiling_with_ttl=0.9588,
        lru=lru,
        fifo=fifo,
        belady=belady,
        missed=missed,
        missed_by_class=by_class,
        storage=storage(max(1, blocks) * BLOCK_BYTES, hit_rate),
        seconds=12.5,
    )
    return replace(made, **other)


def capacity_row(share, rates, **other):
    """A row whose overall rate is the first of `rates`: agents 1 point above it, chats as far below as that makes."""
    ours, lru, fifo, belady = rates
    agent = ours + 0.01
    chatbot = (ours - AGENT * agent) / CHATBOT
    return result(agent, chatbot, lru=lru, fifo=fifo, belady=belady, capacity_share=share, **other)


def all_results():
    main = capacity_row(0.1, CAPACITIES[0.1])
    return [
        main,
        *(capacity_row(share, rates, sweep="capacity") for share, rates in CAPACITIES.items()),
        *(
            result(0.9682, chatbot, sweep="ttl", ttl={"agent": 3 * D, "chatbot": ttl_s}, capacity_share=0)
            for ttl_s, chatbot in CHATBOT_TTLS.items()
        ),
        *(
            result(agent, chatbot, sweep="class-share", class_share={"agent": share})
            for share, (agent, chatbot) in OWN_SHARES.items()
        ),
    ]


def make_report(results=None, *, name="mixed", origin=None, **other):
    made = HitRateReport(
        benchmark="hitrate",
        definition=DEFINITION,
        kvstore_version="0.1.0",
        commit="0123456789ab",
        time="2026-10-30T12:00:00Z",
        seed=7,
        config={"workload": name, "capacity_share": 0.1, "ttl": {"agent": "3d", "chatbot": "7d"}},
        machine=Machine("A CPU", 2, 16 << 30, "6.1", "ext4", "3.11.9", "1.76.0", "2.3.4", "3.6.0"),
        workload=WorkloadFacts(
            name=name,
            requests=812_345,
            input_tokens=41_234_567_890,
            block_tokens=128,
            unique_blocks=UNIQUE_BLOCKS,
            days=28.0,
            warm_up_days=14.0,
            input_share_by_class={"agent": AGENT, "chatbot": CHATBOT},
            origin={"generator": "mixed", "seed": 7} if origin is None else origin,
        ),
        results=all_results() if results is None else results,
    )
    return replace(made, **other)


HARMLESS = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "strong", "div", "img"}
HARMLESS |= {"table", "thead", "tbody", "tr", "th", "td"}
HOSTILE = '"><script>alert(1)</script><img src=https://example.org/x>\x1b[31m\n $x_{ \u65e5 & \u202e'


@pytest.fixture(scope="module")
def report():
    return make_report()


@pytest.fixture(scope="module")
def pictures(report):
    return plots(report)


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
    assert plots(report) == {}
    assert "812,345 in 28.0 days" in page(report).text


def test_names_from_files_steer_no_terminal(printed):
    lines = printed(make_report(name=HOSTILE, origin={"file": HOSTILE, HOSTILE: {HOSTILE: HOSTILE}}))
    assert "".join(lines).isprintable()
    assert any(line.startswith("Hit rate: ") and "\\x1b[31m\\n" in line for line in lines)


# Plots


def png_size(content):
    """Width and height of a PNG, whose chunks are all checked."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    offset, kinds, packed = 8, [], b""
    while offset < len(content):
        (length,) = struct.unpack_from(">I", content, offset)
        chunk = content[offset + 4 : offset + 8 + length]
        assert struct.unpack_from(">I", content, offset + 8 + length) == (zlib.crc32(chunk),)
        kinds.append(chunk[:4])
        packed += chunk[4:] if chunk[:4] == b"IDAT" else b""
        offset += 12 + length
    assert (kinds[0], kinds[-1]) == (b"IHDR", b"IEND")
    width, height = struct.unpack_from(">II", content, 16)
    assert len(zlib.decompress(packed)) == height * (1 + 4 * width)
    return width, height


def test_every_plot_is_a_png(pictures, report, tmp_path):
    assert sorted(pictures) == [
        "hit-rate-over-capacity.png",
        "hit-rate-over-class-share.png",
        "hit-rate-over-ttl.png",
        "missed-tokens.png",
    ]
    for content in pictures.values():
        assert min(png_size(content)) > 300
    written = write_plots(make_report(report.results[:1]), tmp_path / "new" / "plots")
    assert [path.name for path in written] == ["missed-tokens.png"]
    assert written[0].read_bytes() == pictures["missed-tokens.png"]


def test_equal_reports_make_equal_plots_whatever_a_user_has_set(pictures):
    made = make_report()
    with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 20, "savefig.dpi": 30}):
        assert plots(replace(made, results=made.results[:1]))["missed-tokens.png"] == pictures["missed-tokens.png"]
        assert matplotlib.rcParams["font.size"] == 20


@pytest.mark.parametrize(
    ("sweep", "name"),
    [
        ("", "missed-tokens.png"),
        ("capacity", "hit-rate-over-capacity.png"),
        ("ttl", "hit-rate-over-ttl.png"),
        ("class-share", "hit-rate-over-class-share.png"),
    ],
)
def test_a_plot_is_made_only_of_figures_that_there_are(report, sweep, name):
    rows = [row for row in report.results if row.sweep == sweep]
    assert list(plots(make_report(rows))) == [name]
    too_few = [replace(rows[0], missed=dict.fromkeys(CAUSES, 0.0))]
    assert plots(make_report(too_few)) == {}


def test_names_from_files_are_drawn_as_they_are():
    made = make_report(name=HOSTILE + "x" * 500, commit="$\\frac{")
    assert len(plots(replace(made, results=made.results[:1]))) == 1


def test_the_capacity_plot_shows_ours_between_its_yardsticks(report):
    (panel,) = capacity_panel(report)
    lines = {line.label: line.points for line in panel.lines}
    for label, place in (("kvstore (segment-hazard)", 0), ("LRU", 1), ("FIFO", 2), ("Belady", 3)):
        assert lines[label] == [
            (pytest.approx(share * 100), pytest.approx(rates[place])) for share, rates in CAPACITIES.items()
        ]
    assert lines["ceiling"] == [(1.0, 0.9651), (50.0, 0.9651)]
    assert lines["ceiling with TTLs"] == [(1.0, 0.9588), (50.0, 0.9588)]
    assert [y for _, y in panel.differences[0].points] == pytest.approx([0.0019, 0.0022, 0.0022, 0.0003, 0.0])
    assert list(panel.ticks.values()) == ["1 %", "5 %", "10 %", "25 %", "50 %"]


def test_capacities_without_limit_or_yardsticks_leave_the_other_points(report):
    rows = [row for row in report.results if row.sweep == "capacity"]
    rows[1] = replace(rows[1], belady=None)
    (panel,) = capacity_panel(
        make_report([*rows, replace(rows[0], capacity_share=0.0, lru=None, fifo=None, belady=None)])
    )
    assert {line.label: len(line.points) for line in panel.lines if line.kind != "ceiling"} == {
        "kvstore (segment-hazard)": 5,
        "LRU": 5,
        "FIFO": 5,
        "Belady": 4,
    }


def ttl_row(agent_s, chatbot_s, **other):
    return result(0.95, 0.9, sweep="ttl", ttl={"agent": agent_s, "chatbot": chatbot_s}, **other)


@pytest.mark.parametrize(
    ("ttls", "panels"),
    [
        ([(3 * D, H), (3 * D, D), (3 * D, 7 * D)], {"TTL of chatbot (agent 3d)": ["1h", "1d", "7d"]}),
        ([(H, H), (D, D), (7 * D, 7 * D)], {"TTL of every class": ["1h", "1d", "7d"]}),
        (
            [(3 * D, H), (3 * D, 3 * D), (3 * D, 7 * D), (H, 7 * D), (7 * D, 7 * D)],
            {"TTL of chatbot (agent 3d)": ["1h", "3d", "7d"], "TTL of agent (chatbot 7d)": ["1h", "3d", "7d"]},
        ),
        ([(3 * D, 7 * D)], {}),
        ([], {}),
    ],
)
def test_ttls_that_change_together_or_one_by_one_are_told_apart(ttls, panels):
    found = ttl_panels(make_report([ttl_row(*pair) for pair in ttls]))
    assert {panel.title: [panel.ticks[x] for x in sorted(panel.ticks)] for panel in found} == panels


def test_the_ttl_and_share_plots_show_all_tokens_and_each_class(report):
    (ttl,) = ttl_panels(report)
    lines = {line.label: dict(line.points) for line in ttl.lines}
    assert lines["chatbot"] == CHATBOT_TTLS
    assert lines["agent"] == dict.fromkeys(CHATBOT_TTLS, 0.9682)
    assert lines["all classes"] == {
        ttl_s: pytest.approx(0.7 * 0.9682 + 0.3 * rate) for ttl_s, rate in CHATBOT_TTLS.items()
    }
    (share,) = class_share_panel(report)
    assert {line.label: [y for _, y in line.points] for line in share.lines if line.kind == "class"} == {
        "agent": [agent for agent, _ in OWN_SHARES.values()],
        "chatbot": [chatbot for _, chatbot in OWN_SHARES.values()],
    }


# The page


class Page(HTMLParser):
    """What is in a page: tags with attributes, cells, and all text outside of styles."""

    def __init__(self, source):
        super().__init__()
        self.tags, self.text, self.cells, self._inside = [], "", [], ""
        self.feed(source)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._inside = tag
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "td":
            self.cells[-1] += data
        if self._inside != "style":
            self.text += data


def page(report):
    return Page(html_report(report))


def test_the_page_says_what_the_terminal_says_and_shows_the_plots(report, pictures):
    shown = page(report)
    expected = [cell for sheet in (*sheets(report), configuration_sheet(report)) for row in sheet.rows for cell in row]
    assert shown.cells == expected
    for sentence in (DEFINITION, DEFINITION_FULL_BLOCKS, "commit 0123456789ab, seed 7", "A CPU, 2 cores", "93.54 %"):
        assert sentence in shown.text
    images = [
        attributes["src"].removeprefix("data:image/png;base64,") for tag, attributes in shown.tags if tag == "img"
    ]
    assert [b64decode(image, validate=True) for image in images] == list(pictures.values())


def test_a_generators_parameters_are_on_the_page(report):
    made = make_report([], origin={"generator": "mixed", "parameters": {"chat.conversations": 16000}})
    assert origin_sheet(made).rows == (("parameters: chat.conversations", "16000"),)
    assert page(made).cells[-2:] == ["parameters: chat.conversations", "16000"]


@pytest.mark.parametrize("name", ["mixed", HOSTILE])
def test_the_page_needs_and_runs_nothing_else_whatever_names_are(name):
    made = make_report(name=name, commit=name, origin={name: name, "many": {name: name}}, config={name: {name: [name]}})
    main = replace(made.results[0], policy=name, ttl={name: 60}, hit_rate_by_class={name: 0.5}, missed_by_class={})
    source = html_report(replace(made, results=[main]))
    shown = Page(source)
    tags = {tag for tag, _ in shown.tags}
    assert tags <= HARMLESS
    attributes = [(key, value) for _, several in shown.tags for key, value in several.items()]
    assert {key for key, _ in attributes} <= {
        "lang",
        "charset",
        "http-equiv",
        "content",
        "name",
        "class",
        "scope",
        "alt",
        "src",
    }
    assert all(value.startswith("data:image/png;base64,") for key, value in attributes if key == "src")
    style = source[source.index("<style>") : source.index("</style>")]
    assert not re.search(r"url\(|@import|https?:", style)
    if name == "mixed":
        assert not re.search(r"https?://", source)
    assert "\x1b" not in source
    assert "\u202e" not in source


def test_plots_are_loaded_only_when_they_are_wanted():
    code = "import sys, kvstore_bench.hitrate.report_text; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
