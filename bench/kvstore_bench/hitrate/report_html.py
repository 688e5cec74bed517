"""The report of `kvstore-bench hitrate` as one HTML file that needs no other: plots and styles are in it, scripts are not."""

from __future__ import annotations

from base64 import b64encode
from html import escape
from typing import TYPE_CHECKING, Final

from kvstore_bench.hitrate.plots import DESCRIPTIONS, plots
from kvstore_bench.hitrate.report_tables import (
    configuration_sheet,
    definitions,
    main_results,
    origin_sheet,
    settings,
    sheets,
    title,
)
from kvstore_bench.hitrate.report_words import percent
from kvstore_bench.report import circumstances, plain

if TYPE_CHECKING:
    from kvstore_bench.hitrate.report_tables import Sheet
    from kvstore_bench.hitrate.result import HitRateReport

# Even if something got past the escapes, nothing is loaded and nothing runs.
_POLICY: Final = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_CSS: Final = """
:root { color-scheme: light dark; --line: #d0d0d0; --soft: #5a5a5a; --text: #1a1a1a; --page: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --line: #444; --soft: #a8a8a8; --text: #e6e6e6; --page: #161616; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  color: var(--text); background: var(--page); }
h1 { font-size: 1.6rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; overflow-wrap: anywhere; }
.lead { font-size: 1.15rem; } .note { color: var(--soft); font-size: .9rem; margin: .3rem 0; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .2rem .8rem .2rem 0; text-align: right; vertical-align: top; white-space: pre; }
th { border-bottom: 1px solid var(--line); font-weight: 600; }
tbody tr + tr > * { border-top: 1px solid color-mix(in srgb, var(--line) 45%, transparent); }
th:first-child, td:first-child, .words { text-align: left; }
.words { white-space: normal; overflow-wrap: anywhere; min-width: 14rem; }
img { max-width: 100%; height: auto; background: #fff; border: 1px solid var(--line); border-radius: 4px; margin: .5rem 0; }
@page { margin: 1.5cm; }
@media print { :root { --text: #000; --page: #fff; --soft: #444; --line: #bbb; color-scheme: light; }
  body { max-width: none; margin: 0; font-size: 10pt; } .table { overflow: visible; } table { font-size: 7.5pt; }
  th, td:not(:first-child) { white-space: pre-wrap; padding-right: .5rem; }
  h2 { break-after: avoid; } img, tr { break-inside: avoid; } }
"""


def html_report(report: HitRateReport) -> str:
    """The page: definition, figures, plots, and what they must be read with. The same for the same report."""
    more = [sheet for sheet in (configuration_sheet(report), origin_sheet(report)) if sheet.rows]
    body = [
        f"<h1>{escape(title(report))}</h1>",
        _lead(report),
        *(f'<p class="note">{escape(sentence)}</p>' for sentence in definitions(report)),
        *_pictures(report),
        *map(_table, sheets(report)),
        *map(_table, more),
        "<h2>Measured with</h2>",
        *(f'<p class="note">{escape(plain(line))}</p>' for line in _circumstances(report).splitlines()),
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title(report))}</title>",
            f"<style>{_CSS}</style>",
            "</head>",
            "<body>",
            *body,
            "</body>",
            "</html>\n",
        ]
    )


def _circumstances(report: HitRateReport) -> str:
    return circumstances(report.kvstore_version, report.commit, report.seed, report.time, report.machine)


def _lead(report: HitRateReport) -> str:
    """The first answer, before all tables."""
    main = main_results(report)
    if not main:
        return ""
    said = settings(main[0])
    capacity = f"{said['capacity']} of the unique blocks" if main[0].capacity_share else "no limit of capacity"
    return (
        f'<p class="lead"><strong>{percent(main[0].hit_rate)} %</strong> of input tokens hit, with {escape(capacity)} '
        f"and TTLs of {escape(said['TTL'])}.</p>"
    )


def _table(sheet: Sheet) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in sheet.head)
    rows = "".join(f"<tr>{_cells(sheet, row)}</tr>\n" for row in sheet.rows)
    note = f'<p class="note">{escape(sheet.note)}</p>' if sheet.note else ""
    return (
        f'<h2>{escape(sheet.title)}</h2>\n<div class="table"><table>\n'
        f"{f'<thead><tr>{head}</tr></thead>' if head else ''}<tbody>\n{rows}</tbody></table></div>{note}"
    )


def _cells(sheet: Sheet, row: tuple[str, ...]) -> str:
    """Figures stand to the right, words to the left."""
    has_words = sheet.wide or not sheet.head
    last = len(row) - 1
    return "".join(
        f'<td class="words">{escape(cell)}</td>' if has_words and place == last else f"<td>{escape(cell)}</td>"
        for place, cell in enumerate(row)
    )


def _pictures(report: HitRateReport) -> list[str]:
    return [
        f'<h2>{escape(DESCRIPTIONS[name])}</h2>\n<img alt="{escape(DESCRIPTIONS[name])}: figures are in the tables" '
        f'src="data:image/png;base64,{b64encode(content).decode("ascii")}">'
        for name, content in plots(report).items()
    ]
