"""What the demo shows while it runs, on stderr: a bar per request at a terminal, a line per request elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from types import TracebackType

_PIPE_WIDTH = 200


class DemoScreen:
    """A context manager; the bar is gone at the end, the lines stay."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        if not self._console.is_terminal:
            self._console.width = _PIPE_WIDTH
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[tokens]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            # Nothing is drawn while a node computes, but after each of its chunks: a thread would take its time.
            auto_refresh=False,
        )
        self._task = self._progress.add_task("", total=1, visible=False, tokens="")

    def __enter__(self) -> DemoScreen:
        self._progress.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._progress.update(self._task, visible=False)
        self._console.print(text)

    def begin(self, title: str) -> None:
        """A new bar."""
        self._progress.reset(self._task, description=title, total=1, visible=True, tokens="")
        self._progress.refresh()

    def advance(self, done_tokens: int, total_tokens: int) -> None:
        """Move the bar."""
        tokens = f"{done_tokens:,} of {total_tokens:,} prompt tokens"
        self._progress.update(self._task, completed=done_tokens, total=total_tokens, tokens=tokens)
        self._progress.refresh()

    def progress(self, text: str) -> None:
        """Show what is there, without a known end."""
        self._progress.update(self._task, visible=True, total=None, tokens=text)
        self._progress.refresh()
