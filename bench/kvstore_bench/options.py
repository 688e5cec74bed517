"""Options that several commands of kvstore-bench have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_SCRATCH_HELP = "Where the scratch directory is made, and removed at the end; the system's default if not given."

DataDir = Annotated[Path | None, typer.Option(metavar="DIR", help=_SCRATCH_HELP)]
# As it was called at first, too.
DataDirOrDir = Annotated[Path | None, typer.Option("--data-dir", "--dir", metavar="DIR", help=_SCRATCH_HELP)]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the result there as JSON as well.")
]
