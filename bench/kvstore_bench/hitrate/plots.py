"""Pictures of a hit-rate report, as PNG. Equal reports make equal bytes."""

from __future__ import annotations

from io import BytesIO
from math import log10
from textwrap import fill, wrap
from typing import TYPE_CHECKING, Final

from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kvstore_bench.hitrate.misses import BROKEN, CAUSES, EVICTED, EXPIRED, FIRST_SEEN, TAIL
from kvstore_bench.hitrate.plot_lines import Line, Panel, capacity_panel, class_share_panel, ttl_panels
from kvstore_bench.hitrate.report_tables import constant, labels, main_results
from kvstore_bench.report import plain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

    from kvstore_bench.hitrate.result import HitRateReport, Result

CAPACITY_PNG: Final = "hit-rate-over-capacity.png"
TTL_PNG: Final = "hit-rate-over-ttl.png"
CLASS_SHARE_PNG: Final = "hit-rate-over-class-share.png"
MISSED_PNG: Final = "missed-tokens.png"
DESCRIPTIONS: Final = {
    CAPACITY_PNG: "Hit rate over capacity",
    TTL_PNG: "Hit rate over TTL",
    CLASS_SHARE_PNG: "Hit rate over class shares",
    MISSED_PNG: "Missed tokens by cause",
}
# Okabe and Ito's palette, which people with any colour vision tell apart.
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PURPLE = (
    *("#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"),
)
_GREY = "#666666"
Look = tuple[str, str, "str | tuple[int, tuple[int, int]]"]  # colour, marker, dashes
_LOOKS: Final[dict[str, list[Look]]] = {
    "ours": [(BLUE, "o", "-"), (SKY, "P", "-"), (PURPLE, "X", "-"), (BLACK, "h", "-")],
    "LRU": [(ORANGE, "s", "--")],
    "FIFO": [(RED, "v", ":")],
    "Belady": [(GREEN, "^", "-.")],
    "class": [(ORANGE, "s", "--"), (GREEN, "^", "-."), (PURPLE, "D", ":"), (RED, "v", "--"), (SKY, "P", "-.")],
    "ceiling": [(_GREY, "", "-"), (_GREY, "", (0, (1, 2)))],
}
_CAUSE_COLOURS: Final = {FIRST_SEEN: SKY, BROKEN: BLUE, EXPIRED: YELLOW, EVICTED: RED, TAIL: "#BBBBBB"}
_ON_DARK = {BLUE, RED}
_STYLE: Final = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 6,
}
_HEIGHT_IN, _DIFFERENCES_IN, _PANEL_IN, _DPI = 4.6, 1.5, 7.6, 120
_LONGEST_NAME, _LONGEST_LABEL = 80, 28
_TITLE_CHARACTERS_AN_INCH, _SMALL_CHARACTERS_AN_INCH = 9, 18
_LEAST_TICK_GAP = 0.08  # of the axis
_TICK_CHARACTERS = 75  # of a panel's width
_MOST_BAR_PANELS = 3


def write_plots(report: HitRateReport, directory: Path) -> list[Path]:
    """Write the plots as files; returns their paths. `directory` is made if need be. Raises: OSError."""
    pictures = plots(report)
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / name for name in pictures]
    for path, content in zip(paths, pictures.values(), strict=True):
        path.write_bytes(content)
    return paths


def plots(report: HitRateReport) -> dict[str, bytes]:
    """PNGs by file name; only of what the report has figures for."""
    wanted: dict[str, list[Panel]] = {
        CAPACITY_PNG: capacity_panel(report),
        TTL_PNG: ttl_panels(report),
        CLASS_SHARE_PNG: class_share_panel(report),
    }
    # A user's own defaults would change the pictures.
    with style.context(["default", _STYLE]):
        pictures = {name: _lines_png(report, name, panels) for name, panels in wanted.items() if panels}
        bars = [result for result in main_results(report) if sum(result.missed.values()) > 0]
        if bars:
            pictures[MISSED_PNG] = _missed_png(report, bars[:_MOST_BAR_PANELS])
    return pictures


def _lines_png(report: HitRateReport, name: str, panels: Sequence[Panel]) -> bytes:
    has_more = any(panel.differences for panel in panels)
    size_in = (_PANEL_IN * max(1.0, 0.75 * len(panels)), _HEIGHT_IN + has_more * _DIFFERENCES_IN)
    figure = Figure(figsize=size_in, dpi=_DPI, layout="constrained")
    heights = [_HEIGHT_IN, _DIFFERENCES_IN] if has_more else [1]
    rows = figure.subplots(len(heights), len(panels), sharex="col", sharey="row", squeeze=False, height_ratios=heights)
    for axes, panel in zip(rows[0], panels, strict=True):
        _legend(axes, panel.lines, _draw_lines(axes, panel.lines))
        if len(panels) > 1:
            axes.set_title(_words(panel.title, 48), fontsize=10, loc="left", parse_math=False)
    for axes, panel in zip(rows[-1], panels, strict=True):
        if panel.differences:
            _draw_differences(axes, panel)
        _draw_x_axis(axes, panel)
    rows[0][0].set_ylabel("hit rate, % of input tokens")
    return _png(figure, report, DESCRIPTIONS[name], panels[0].results)


def _draw_x_axis(axes: Axes, panel: Panel) -> None:
    if panel.is_log:
        axes.set_xscale("log")
    ticks = _apart(panel.ticks) if panel.is_log else panel.ticks
    axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    names = [_words(name, _LONGEST_LABEL) for name in ticks.values()]
    axes.set_xticklabels(names, parse_math=False)
    if max(map(len, names)) * len(names) > _TICK_CHARACTERS:
        for text in axes.get_xticklabels():
            text.set(rotation=25, horizontalalignment="right", rotation_mode="anchor")
    axes.set_xlabel(_words(panel.x_label, 80), parse_math=False)


def _draw_lines(axes: Axes, lines: Sequence[Line]) -> list[Line2D]:
    used: dict[str, int] = {}
    drawn = []
    for line in lines:
        looks = _LOOKS[line.kind]
        drawn.append(_draw_line(axes, line, looks[used.get(line.kind, 0) % len(looks)]))
        used[line.kind] = used.get(line.kind, 0) + 1
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    return drawn


def _draw_line(axes: Axes, line: Line, look: Look) -> Line2D:
    colour, marker, dashes = look
    xs, ys = zip(*sorted(line.points), strict=True)
    # What is beside ours lies on it, and is thinner: where they are equal both are seen.
    is_ours = line.kind == "ours"
    return axes.plot(
        xs,
        [y * 100 for y in ys],
        color=colour,
        marker=marker,
        markersize=8 if is_ours else 5,
        linestyle=dashes,
        linewidth=2.8 if is_ours else 1.5 if marker else 1.2,
        zorder=2 if is_ours else 3,
    )[0]


def _draw_differences(axes: Axes, panel: Panel) -> None:
    """Points above LRU, which are too few to be seen beside the others."""
    _draw_lines(axes, panel.differences)
    axes.axhline(0, color=ORANGE, linewidth=1.5, linestyle="--")
    if len(panel.differences) == 1:
        for x, y in panel.differences[0].points:
            axes.annotate(f"{y * 100:+.2f}", (x, y * 100), (0, 7), textcoords="offset points", ha="center", fontsize=8)
    axes.margins(y=0.35)
    axes.set_ylabel("above LRU,\npoints")


def _legend(axes: Axes, lines: Sequence[Line], drawn: Sequence[Line2D]) -> None:
    """Beside the lines, in the order in which they end: nothing is hidden, and what is higher stands higher."""
    ordered = sorted(range(len(lines)), key=lambda i: -max(lines[i].points)[1])
    names = [_words(lines[i].label, _LONGEST_LABEL) for i in ordered]
    legend = axes.legend([drawn[i] for i in ordered], names, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _apart(ticks: Mapping[float, str]) -> dict[float, str]:
    """Ticks of a logarithmic axis but for those whose names would overlap the one before."""
    positions = sorted(ticks)
    width = log10(positions[-1] / positions[0]) or 1.0
    kept: dict[float, str] = {}
    for x in positions:
        if not kept or log10(x / max(kept)) / width > _LEAST_TICK_GAP:
            kept[x] = ticks[x]
    return kept


def _missed_png(report: HitRateReport, results: Sequence[Result]) -> bytes:
    bars = [_rows(result) for result in results]
    size_in = (_PANEL_IN * max(1.0, 0.7 * len(results)), 1.9 + 0.5 * max(map(len, bars)))
    figure = Figure(figsize=size_in, dpi=_DPI, layout="constrained")
    several = figure.subplots(1, len(results), sharey=True, sharex=True, squeeze=False)[0]
    most = max(sum(missed.values()) for rows in bars for missed in rows.values()) * 100
    for axes, rows, label in zip(several, bars, labels(results), strict=True):
        _draw_bars(axes, rows, most)
        if len(results) > 1:
            axes.set_title(_words(label, 40), fontsize=10, loc="left", parse_math=False)
    several[0].invert_yaxis()
    several[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)
    return _png(figure, report, DESCRIPTIONS[MISSED_PNG], results)


def _rows(result: Result) -> dict[str, Mapping[str, float]]:
    """All tokens, then each class's, by their names; a class without tokens has no shares (NaN) and no bar."""
    of_classes = {plain(name): missed for name, missed in result.missed_by_class.items() if sum(missed.values()) >= 0}
    return {"all": result.missed, **of_classes}


def _draw_bars(axes: Axes, rows: Mapping[str, Mapping[str, float]], most: float) -> None:
    """A bar of parts for each row. `most`: per cent of the longest bar, for all panels."""
    ends = [0.0] * len(rows)
    for cause in CAUSES:
        widths = [missed[cause] * 100 for missed in rows.values()]
        colour = _CAUSE_COLOURS[cause]
        bars = axes.barh(
            range(len(rows)),
            widths,
            left=ends,
            height=0.62,
            color=colour,
            edgecolor="white",
            label=cause.replace("_", " "),
        )
        inside = [f"{width:.2f}" if width > 0.09 * most else "" for width in widths]
        axes.bar_label(bars, inside, label_type="center", fontsize=8, color="white" if colour in _ON_DARK else "black")
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for row, end in enumerate(ends):
        axes.text(end + 0.01 * most, row, f"{end:.2f}", va="center", fontsize=9, fontweight="bold")
    axes.set_yticks(range(len(rows)), [_words(name, _LONGEST_LABEL) for name in rows], parse_math=False)
    axes.set_xlim(0, most * 1.12)
    axes.set_xlabel("missed tokens, % of the class's input tokens")
    axes.grid(visible=False, axis="y")


def _png(figure: Figure, report: HitRateReport, what: str, results: Sequence[Result]) -> bytes:
    width_in, height_in = figure.get_size_inches()
    head = f"{what}: {_words(plain(report.workload.name), _LONGEST_NAME)}"
    head = fill(head, int(width_in * _TITLE_CHARACTERS_AN_INCH))
    figure.suptitle(head, x=0.01, ha="left", fontsize=12, fontweight="bold", parse_math=False)
    seed = "" if report.seed is None else f", seed {report.seed}"
    made_by = f"kvstore {report.kvstore_version}, commit {report.commit}{seed}"
    small = [*wrap(_words(constant(results), 400), int(width_in * _SMALL_CHARACTERS_AN_INCH)), _words(made_by, 100)]
    figure.text(0.01, 0.06 / height_in, "\n".join(small), fontsize=7, color=_GREY, va="bottom", parse_math=False)
    foot = (0.12 + 0.12 * len(small)) / height_in
    figure.set_layout_engine("constrained", rect=(0, foot, 1, 1 - foot))
    file = BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})  # which would name matplotlib's version
    return file.getvalue()


def _words(text: str, longest: int) -> str:
    """What can be drawn of a text: the font has no sign for every character, and there is not room for everything."""
    known = _known_characters()
    drawn = "".join(c if c == "\n" or ord(c) in known else "\N{WHITE SQUARE}" for c in text)
    return drawn if len(drawn) <= longest else f"{drawn[: longest - 1]}…"


def _known_characters() -> Mapping[int, object]:
    return get_font(findfont("DejaVu Sans")).get_charmap()
