"""Options that several commands of kvstore-bench have."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from kvstore_bench.errors import InputError

_SCRATCH_HELP = "Where the scratch directory is made, and removed at the end; the system's default if not given."

DataDir = Annotated[Path | None, typer.Option(metavar="DIR", help=_SCRATCH_HELP)]
# As it was called at first, too.
DataDirOrDir = Annotated[Path | None, typer.Option("--data-dir", "--dir", metavar="DIR", help=_SCRATCH_HELP)]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the result there as JSON as well.")
]


def check_writable(option: str, file: Path) -> None:
    """Found out before the work, not after it; the file itself appears only when there is a result. Raises: InputError."""
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise InputError(f"{option} {str(file)!r} cannot be written", "name a file in a directory that exists")


def check_directory(option: str, directory: Path) -> None:
    """Raises: InputError: it is none."""
    if not directory.is_dir():
        raise InputError(f"{option} {str(directory)!r} is no directory", "make it, or name another one")


def write_result(option: str, file: Path, text: str) -> None:
    """Raises: InputError: it cannot be written after all."""
    try:
        file.write_text(text, encoding="utf-8")  # as a page says of itself, whatever the locale is
    except OSError as error:
        raise InputError(
            f"{option} {str(file)!r} cannot be written: {error.strerror}", "name a file in a directory that exists"
        ) from None


def write_json(file: Path | None, result: object) -> None:
    """Write a result where --json says, if it does. Raises: InputError."""
    if file is not None:
        write_result("--json", file, json.dumps(result, indent=2) + "\n")
