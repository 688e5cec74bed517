"""Progress of long commands on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from kvstore.cli.output import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

_LINE_INTERVAL_S = 10.0


class ProgressShow(Protocol):
    """What shows how far a command is."""

    def update(self, share: float, text: str) -> None:
        """Show that so much is done, 0 to 1, and the numbers behind it."""
        ...

    def note(self, text: str) -> None:
        """Show something that was found, for good."""
        ...


@contextmanager
def progress_show(title: str) -> Iterator[ProgressShow]:
    """A show on stderr; without a terminal the last update is printed as the context ends, whatever ends it."""
    if sys.stderr.isatty():
        console = Console(stderr=True, markup=False, emoji=False, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        with Progress(*columns, TextColumn("{task.fields[text]}"), console=console, transient=True) as bar:
            yield _Bar(bar, title)
        return
    lines = _Lines(title)
    try:
        yield lines
    finally:
        lines.finish()


class _Bar:
    def __init__(self, bar: Progress, title: str) -> None:
        self._bar = bar
        self._task = bar.add_task(title, total=1.0, text="")

    def update(self, share: float, text: str) -> None:
        self._bar.update(self._task, completed=share, text=text)

    def note(self, text: str) -> None:
        self._bar.console.print(printable(text), soft_wrap=True)


class _Lines:
    def __init__(self, title: str) -> None:
        self._title = title
        self._text = self._printed = ""
        self._next_s = time.monotonic() + _LINE_INTERVAL_S

    def update(self, share: float, text: str) -> None:
        self._text = f"{self._title}: {share:.0%}, {text}"
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _LINE_INTERVAL_S
            self.finish()

    def note(self, text: str) -> None:
        print(printable(text), file=sys.stderr, flush=True)

    def finish(self) -> None:
        """Print the last update, unless it is printed."""
        if self._text != self._printed:
            self._printed = self._text
            self.note(self._text)
