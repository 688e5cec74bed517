"""`kvstore-server fsck`: check a data directory that no server runs on."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from kvstore.cli.admin_errors import CommandError, ExitCode
from kvstore.cli.admin_values import format_bytes
from kvstore.cli.output import Cell, Facts, Listing, OutputFormat, Result, Section, Sentence, emit
from kvstore.cli.progress import progress_show
from kvstore.errors import DataDirLockedError, FormatVersionError, KvStoreError, NotADataDirError
from kvstore.fsck import FsckReport, fsck

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from kvstore.clock import Clock
    from kvstore.fsck import Finding

_ROWS_SHOWN = 50  # in a table; JSON has 10,000
_FIXES: dict[type[KvStoreError], tuple[ExitCode, str]] = {
    NotADataDirError: (ExitCode.NOT_FOUND, "name the directory that kvstore-server was given as --data-dir"),
    DataDirLockedError: (ExitCode.UNAVAILABLE, "stop that server; `kvstore-admin verify` checks while one runs"),
    FormatVersionError: (ExitCode.OTHER_FORMAT, "use the version of kvstore that wrote it"),
}
_OTHER_FIX = (ExitCode.ERROR, "check that the directory can be read")


@dataclass
class Check(FsckReport, Result):
    """What a check has found, as a command's result."""

    def sections(self) -> Iterable[Section]:
        """The result for people's eyes."""
        yield Facts(
            [
                ("data directory", self.data_dir),
                ("store", self.store_id or "-"),
                ("segments", f"{self.segments:,}, of which {self.retired_segments:,} wait to be removed"),
                ("checked", f"{self.blocks_checked:,} blocks, {format_bytes(self.bytes_read)}"),
                ("index", f"{self.index or '-'}; {self.index_entries:,} entries"),
                ("left for the next start to file", self.unfiled_blocks),
                ("result", "clean" if self.clean else self._findings()),
            ]
        )
        if self.findings:
            rows: list[Sequence[Cell]] = [_cells(finding) for finding in self.findings[:_ROWS_SHOWN]]
            yield Listing(("finding", "file", "slot", "what", "the next start"), rows)
        if self.finding_count > _ROWS_SHOWN:
            yield Sentence(f"and {self.finding_count - _ROWS_SHOWN:,} more; -o json shows up to 10,000")
        if self.leftovers:
            left: list[Sequence[Cell]] = [(leftover.file, leftover.bytes) for leftover in self.leftovers]
            yield Listing(("not used by the store", "bytes"), left)

    def complaint(self) -> CommandError | None:
        """That something is wrong."""
        if self.clean:
            return None
        return CommandError(
            f"{self._findings()} in {self.data_dir}",
            reason="CORRUPTION_FOUND",
            exit_code=ExitCode.CORRUPTION,
            fix="nothing was changed; see what the next start does about each, and check the disk",
        )

    def _findings(self) -> str:
        return f"{self.finding_count:,} {'finding' if self.finding_count == 1 else 'findings'}"


def check_directory(data_dir: Path, clock: Clock, output: OutputFormat) -> None:
    """Check and print. Raises: CommandError: it cannot be looked at, or something is wrong."""
    try:
        with progress_show("fsck") as show:
            report = fsck(data_dir, clock.now_s(), show.update)
    except KvStoreError as error:
        code, fix = next((known for kind, known in _FIXES.items() if isinstance(error, kind)), _OTHER_FIX)
        raise CommandError(str(error), reason=error.reason, exit_code=code, fix=fix) from error
    result = Check(**{field.name: getattr(report, field.name) for field in fields(report)})
    emit(result, output)
    complaint = result.complaint()
    if complaint is not None:
        raise complaint


def _cells(finding: Finding) -> Sequence[Cell]:
    slot = "-" if finding.slot is None else str(finding.slot)
    return (finding.kind, finding.file, slot, finding.detail, finding.next_start)
