"""The report of `kvstore-bench hitrate` in the terminal."""

from __future__ import annotations

from textwrap import fill
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvstore_bench.hitrate.report_tables import configuration_sheet, definitions, sheets, title
from kvstore_bench.report import circumstances, print_tables

if TYPE_CHECKING:
    from kvstore_bench.hitrate.report_tables import Sheet
    from kvstore_bench.hitrate.result import HitRateReport

_WIDTH = 100
_WIDEST_WORDS = 50
_WIDEST_VALUE = 76


def print_hitrate_report(report: HitRateReport) -> None:
    """The report as tables on stdout."""
    print_tables(
        "\n".join([title(report), *(fill(sentence, _WIDTH) for sentence in definitions(report))]),
        [_block(sheet) for sheet in (*sheets(report), configuration_sheet(report)) if sheet.rows],
        circumstances(report.kvstore_version, report.commit, report.seed, report.time, report.machine),
    )


def _block(sheet: Sheet) -> Group:
    """A table under its title, with its note."""
    table = _figures_table(sheet) if sheet.head else _facts_table(sheet)
    note = [Text(fill(sheet.note, _WIDTH), style="dim")] if sheet.note else []
    return Group(Text(f"\n{sheet.title}", style="bold"), table, *note)


def _figures_table(sheet: Sheet) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for position, name in enumerate(sheet.head):
        if sheet.wide and position == len(sheet.head) - 1:
            table.add_column(name, max_width=_WIDEST_WORDS)
        else:
            table.add_column(name, justify="right" if position else "left")
    for row in sheet.rows:
        table.add_row(*row)
    return table


def _facts_table(sheet: Sheet) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(max_width=_WIDEST_VALUE, overflow="fold")
    for row in sheet.rows:
        table.add_row(*row)
    return table
