"""Child processes of the crash tests: what they had said when they were killed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def whole_lines(stdout: Iterable[str]) -> Iterator[str]:
    """The lines a child wrote to their end; the kill may fall inside the last one, which then says nothing."""
    return (line for line in stdout if line.endswith("\n"))
