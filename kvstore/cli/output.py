"""How results leave kvstore-admin: JSON as the contract, tables for eyes, everything else on stderr.

JSON keys are the field names of the result classes. Bytes are integers, times RFC 3339 in UTC, digests hex, checksums
16 hex digits (a u64 does not survive a JSON reader that thinks in doubles).
"""

from __future__ import annotations

import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from io import TextIOWrapper
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvstore.cli.admin_errors import CommandError, ExitCode

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp

# Enough of a digest to tell two apart by eye, and twice what the commands need to find it again.
_SHORT_DIGEST_DIGITS = 16
# Nothing is ever folded or cut for a reader that is no terminal.
_PIPE_WIDTH = 100_000

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None


class OutputFormat(Enum):
    """What a command prints on stdout."""

    TABLE = "table"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Digest:
    """A cell that may be shortened on a terminal, and nowhere else."""

    hex: str


Cell = str | int | Digest


@dataclass(frozen=True, slots=True)
class Sentence:
    """One line."""

    text: str


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values, one pair a line."""

    pairs: Sequence[tuple[str, Cell]]


@dataclass(frozen=True, slots=True)
class Listing:
    """Rows under column heads; integers are set to the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


Section = Sentence | Facts | Listing


class Result(ABC):
    """What a command returns: a frozen dataclass that also knows how it reads as tables."""

    @abstractmethod
    def sections(self) -> Iterable[Section]:
        """The result for people's eyes."""

    def complaint(self) -> CommandError | None:
        """The error to end with after the result has been printed, if its content is one."""
        return None


def emit(result: Result, output_format: OutputFormat) -> None:
    """Print a result on stdout, whole; see `whole_output` for what can go wrong."""
    with whole_output():
        if output_format is OutputFormat.JSON:
            print(json.dumps(to_json(result), indent=2))
        else:
            _print_tables(result.sections())


@contextmanager
def whole_output() -> Iterator[None]:
    """Around what prints on stdout. A reader that went away ends the program quietly.

    Raises: CommandError: stdout cannot be written.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        # A name outside the terminal's character set must not keep the rest from being shown.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
        if sys.stdout is not None:  # which it is when the caller closed it
            sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        raise SystemExit(ExitCode.BROKEN_PIPE) from None
    except OSError as error:
        _discard_output()
        raise CommandError(
            f"cannot write to stdout: {error.strerror}",
            reason="OUTPUT_FAILED",
            exit_code=ExitCode.ERROR,
            fix="make room, or send the output elsewhere",
        ) from None


def print_error(error: CommandError) -> None:
    """The error and its fix on stderr."""
    print(f"error: {printable(error.message)} [{error.reason}]\nfix: {printable(error.fix)}", file=sys.stderr)


def to_json(value: object) -> Json:
    """A result as JSON: see the module's docstring.

    Raises: TypeError: a field's type has no JSON form, which is a bug of the command.
    """
    match value:
        case Enum():
            return value.name.lower()
        case None | bool() | int() | float() | str():
            return value
        case bytes():
            return value.hex()
        case datetime():
            return format_time(value)
        case Mapping():
            return {str(key): to_json(item) for key, item in value.items()}
        case Sequence():
            return [to_json(item) for item in value]
    if is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    raise TypeError(f"{type(value).__name__} has no JSON form")


def time_of(timestamp: Timestamp) -> datetime:
    """A timestamp of the wire."""
    return timestamp.ToDatetime(tzinfo=UTC)


def format_time(time: datetime) -> str:
    """RFC 3339 in UTC with milliseconds."""
    return time.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def printable(text: str) -> str:
    """`text` with control characters escaped: names come from clients and must not steer the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _print_tables(sections: Iterable[Section]) -> None:
    console = _console()
    with console.capture() as captured:
        for position, section in enumerate(sections):
            if position:
                console.print()
            if isinstance(section, Sentence):
                console.print(printable(section.text), soft_wrap=True)
            else:
                console.print(_table(section, shorten=console.is_terminal))
    # Tables are filled up to their full width, which nobody wants in a file.
    for line in captured.get().splitlines():
        print(line.rstrip())


def _console() -> Console:
    """A console that takes no markup from data and shows colour to a terminal only, whatever the environment says."""
    terminal = sys.stdout.isatty()
    return Console(
        file=sys.stdout,
        force_terminal=terminal,
        color_system="auto" if terminal else None,
        width=None if terminal else _PIPE_WIDTH,
        markup=False,
        emoji=False,
        highlight=False,
    )


def _table(section: Facts | Listing, *, shorten: bool) -> Table:
    if isinstance(section, Facts):
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in section.pairs:
            table.add_row(name, _cell(value, shorten=False))
        return table
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for position, column in enumerate(section.columns):
        numbers = all(isinstance(row[position], int) for row in section.rows)
        table.add_column(column, justify="right" if numbers and section.rows else "left", overflow="fold")
    for row in section.rows:
        table.add_row(*(_cell(cell, shorten=shorten) for cell in row))
    return table


def _cell(value: Cell, *, shorten: bool) -> str:
    if isinstance(value, Digest):
        return value.hex[:_SHORT_DIGEST_DIGITS] if shorten else value.hex
    return f"{value:,}" if isinstance(value, int) else printable(value)


def _discard_output() -> None:
    # The interpreter flushes stdout once more at its end; into /dev/null that cannot fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
