"""A disk that fails on demand, behind the interface that production uses."""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING

from kvstore.log.device import FileDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from typing_extensions import Buffer


class FaultyDevice(FileDevice):
    """The file system, until told otherwise. Counts down writes, so that each kind of write can be the one that fails."""

    def __init__(self) -> None:
        self.fail_write_after: int | None = None  # writes that still succeed; then `write_errno`
        self.partial_write = False  # the failing write puts half of its bytes on disk first
        self.write_errno = errno.ENOSPC
        self.fail_create = False
        self.fail_read = False
        self.fail_unlink: Callable[[Path], bool] = lambda path: False
        self.short_read_bytes = 0  # every read comes back so much too short
        self.stall_write_after: int | None = None  # the write after so many puts half of its bytes on disk and waits
        self.stalled, self.go_on = threading.Event(), threading.Event()
        self.sync_count = 0
        self.fail_sync = False

    def heal(self) -> None:
        self.__init__()  # type: ignore[misc]

    def create(self, path: Path) -> int:
        if self.fail_create:
            raise OSError(errno.ENOSPC, "injected: no space for a file")
        return super().create(path)

    def write(self, descriptor: int, buffers: Sequence[Buffer], offset_bytes: int) -> None:
        if self.stall_write_after is not None:
            self.stall_write_after -= 1
            if self.stall_write_after < 0:
                self.stall_write_after = None
                self._write_half(descriptor, buffers, offset_bytes)
                self.stalled.set()
                self.go_on.wait(60)
        if self.fail_write_after is not None:
            if self.fail_write_after == 0:
                if self.partial_write:
                    self._write_half(descriptor, buffers, offset_bytes)
                raise OSError(self.write_errno, "injected: write failed")
            self.fail_write_after -= 1
        super().write(descriptor, buffers, offset_bytes)

    def _write_half(self, descriptor: int, buffers: Sequence[Buffer], offset_bytes: int) -> None:
        data = b"".join(bytes(memoryview(buffer).cast("B")) for buffer in buffers)
        super().write(descriptor, [data[: len(data) // 2]], offset_bytes)

    def read(self, descriptor: int, buffers: Sequence[memoryview], offset_bytes: int) -> int:
        if self.fail_read:
            raise OSError(errno.EIO, "injected: read failed")
        total = sum(len(buffer) for buffer in buffers)
        wanted = max(0, total - self.short_read_bytes)
        cut = []
        for buffer in buffers:
            cut.append(buffer[:wanted])
            wanted -= len(cut[-1])
        return super().read(descriptor, cut, offset_bytes)

    def sync(self, descriptor: int) -> None:
        self.sync_count += 1
        if self.fail_sync:
            raise OSError(errno.EIO, "injected: sync failed")
        super().sync(descriptor)

    def unlink(self, path: Path) -> None:
        if self.fail_unlink(path):
            raise OSError(errno.EPERM, "injected: not permitted")
        super().unlink(path)
