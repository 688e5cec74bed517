"""A device that cannot change anything: for looking into the files of a store that is stopped."""

from __future__ import annotations

import errno
import mmap
import os
from typing import TYPE_CHECKING, NoReturn

from kvstore.log.device import FileDevice

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from typing_extensions import Buffer


class ReadOnlyDevice(FileDevice):
    """The file system, opened for reading; whatever would write raises OSError(EROFS)."""

    def open(self, path: Path) -> int:
        """Open an existing file for reading."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def map(self, descriptor: int, size_bytes: int) -> mmap.mmap:
        """A copy of the file's beginning: a bad sector under it is an error now, and not a signal when it is touched."""
        copy = mmap.mmap(-1, size_bytes)
        with memoryview(copy) as view:
            self.read(descriptor, [view], 0)
        return copy

    def create(self, path: Path, mode: int = 0o640) -> int:
        """Refused."""
        _refuse()

    def write(self, descriptor: int, buffers: Sequence[Buffer], offset_bytes: int) -> None:
        """Refused."""
        _refuse()

    def resize(self, descriptor: int, size_bytes: int) -> None:
        """Refused."""
        _refuse()

    def make_directory(self, path: Path) -> None:
        """Refused."""
        _refuse()

    def unlink(self, path: Path) -> None:
        """Refused."""
        _refuse()

    def rename(self, path: Path, target: Path) -> None:
        """Refused."""
        _refuse()

    def replace(self, path: Path, data: bytes) -> None:
        """Refused."""
        _refuse()


def _refuse() -> NoReturn:
    raise OSError(errno.EROFS, "this only looks")
