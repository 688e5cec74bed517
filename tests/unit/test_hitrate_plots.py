"""Pictures of kvstore-bench hitrate, and its page, which needs nothing else."""

from __future__ import annotations

import re
import struct
import zlib
from base64 import b64decode
from dataclasses import replace

import matplotlib
import pytest

from hitrate_sample import (
    CAPACITIES,
    CHATBOT_TTLS,
    HOSTILE,
    OWN_SHARES,
    D,
    H,
    Page,
    capacity_row,
    make_report,
    page,
    result,
)
from kvstore_bench.hitrate.misses import CAUSES
from kvstore_bench.hitrate.plot_lines import capacity_panel, class_share_panel, ttl_panels
from kvstore_bench.hitrate.plots import plots, write_plots
from kvstore_bench.hitrate.report_html import html_report
from kvstore_bench.hitrate.report_tables import configuration_sheet, origin_sheet, sheets
from kvstore_bench.hitrate.result import DEFINITION, DEFINITION_FULL_BLOCKS

HARMLESS = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "strong", "div", "img"}
HARMLESS |= {"table", "thead", "tbody", "tr", "th", "td"}


@pytest.fixture(scope="module")
def report():
    return make_report()


@pytest.fixture(scope="module")
def pictures(report):
    return plots(report)


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


def test_a_plot_is_made_only_of_figures_that_there_are(report):
    main, *swept = report.results
    rows = [row for row in swept if row.sweep in ("ttl", "class-share")]
    assert list(plots(make_report(rows))) == ["hit-rate-over-ttl.png", "hit-rate-over-class-share.png"]
    one_of_each = [replace(main, sweep=sweep) for sweep in ("capacity", "ttl", "class-share")]
    nothing_missed = replace(main, missed=dict.fromkeys(CAUSES, 0.0))
    assert plots(make_report([nothing_missed, *one_of_each])) == {}


def test_a_class_without_tokens_has_neither_a_bar_nor_a_line(report):
    main = report.results[0]
    nothing = dict.fromkeys(CAUSES, float("nan"))
    idle = replace(main, missed_by_class={**main.missed_by_class, "idle": nothing})
    assert plots(make_report([idle])) == plots(make_report([main]))
    rows = [ttl_row(3 * D, ttl_s, hit_rate_by_class={"agent": 0.9, "chatbot": float("nan")}) for ttl_s in (H, D)]
    (panel,) = ttl_panels(make_report(rows))
    assert [line.label for line in panel.lines] == ["all classes", "agent"]


def test_names_are_drawn_as_they_are_wherever_they_stand():
    name = "$x_{$ \u65e5"  # no formula, although it looks like one, and with a character that the font has not
    rows = [
        *(capacity_row(0.1, CAPACITIES[0.1], policy=policy) for policy in (name, "lru")),
        *(capacity_row(share, CAPACITIES[0.1], policy=name, sweep="capacity") for share in (0.1, 0.2)),
        *(
            result(0.9, 0.8, sweep="ttl", ttl={name: ttl_s, "b": other_s})
            for ttl_s, other_s in ((H, H), (D, H), (H, D))
        ),
        *(result(0.9, 0.8, sweep="class-share", class_share={name: share}) for share in (0.1, 0.2)),
    ]
    rates = {name: 0.9, "b": 0.8}
    rows = [replace(row, hit_rate_by_class=rates, missed_by_class=dict.fromkeys(rates, row.missed)) for row in rows]
    made = make_report(rows, name=HOSTILE + "x" * 500, commit=name)
    assert len(plots(replace(made, workload=replace(made.workload, input_share_by_class=rates)))) == 4


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
    assert list(share.ticks.values()) == ["agent 0 %", "agent 25 %", "agent 50 %", "agent 75 %"]
    assert {line.label: [y for _, y in line.points] for line in share.lines if line.kind == "class"} == {
        "agent": [agent for agent, _ in OWN_SHARES.values()],
        "chatbot": [chatbot for _, chatbot in OWN_SHARES.values()],
    }


def test_the_page_says_what_the_terminal_says_and_shows_the_plots(report, pictures):
    report = replace(report, results=[row for row in report.results if row.sweep in ("", "capacity")])
    shown = page(report)
    expected = [cell for sheet in (*sheets(report), configuration_sheet(report)) for row in sheet.rows for cell in row]
    assert shown.cells == expected
    for sentence in (DEFINITION, DEFINITION_FULL_BLOCKS, "commit 0123456789ab, seed 7", "A CPU, 2 cores", "93.54 %"):
        assert sentence in shown.text
    images = [
        attributes["src"].removeprefix("data:image/png;base64,") for tag, attributes in shown.tags if tag == "img"
    ]
    assert [b64decode(image, validate=True) for image in images] == [
        pictures["hit-rate-over-capacity.png"],
        pictures["missed-tokens.png"],
    ]


def test_a_generators_parameters_are_on_the_page(report):
    made = make_report([], origin={"generator": "mixed", "parameters": {"chat.conversations": 16000}})
    assert origin_sheet(made).rows == (("parameters: chat.conversations", "16000"),)
    assert page(made).cells[-2:] == ["parameters: chat.conversations", "16000"]


@pytest.mark.parametrize("name", ["mixed", HOSTILE])
def test_the_page_needs_and_runs_nothing_else_whatever_names_are(name):
    made = make_report(name=name, commit=name, origin={name: name, "many": {name: name}}, config={name: {name: [name]}})
    main = replace(made.results[0], policy=name, ttl={name: 60}, hit_rate_by_class={name: 0.5}, missed_by_class={})
    source = html_report(replace(made, results=[main, replace(main, sweep="capacity")]))
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
