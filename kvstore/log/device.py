"""The one door to the disk: production's is the file system, tests put a faulty one behind it.

Everything written to a data directory goes through here, but for two things. LMDB writes its own file, in a directory that
is made and removed for it: it is only ever a copy of what the segments say, never trusted after the machine stopped, and
rebuilt from them then. And the lock file says nothing that outlives its holder.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

_IOV_MAX = 1024  # Linux: more buffers in one call are refused
_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
SCRATCH_SUFFIX = ".new"  # of a file on its way to replace another


class Device(Protocol):
    """Files by descriptor. Writes are all or OSError; reads may be short, and the caller checks."""

    def create(self, path: Path, mode: int = 0o640) -> int:
        """Make a new file; never opens an existing one."""
        ...

    def open(self, path: Path) -> int:
        """Open an existing file for reading and writing; never truncates."""
        ...

    def close(self, descriptor: int) -> None:
        """Close it."""
        ...

    def read(self, descriptor: int, buffers: Sequence[memoryview], offset_bytes: int) -> int:
        """Fill the buffers from `offset_bytes` on; returns the bytes read, fewer at the end of the file."""
        ...

    def write(self, descriptor: int, buffers: Sequence[Buffer], offset_bytes: int) -> None:
        """Write all buffers one after the other."""
        ...

    def resize(self, descriptor: int, size_bytes: int) -> None:
        """Set the file's size; new space is a hole."""
        ...

    def map(self, descriptor: int, size_bytes: int) -> mmap.mmap:
        """Map the file's beginning, shared and writable."""
        ...

    def sync(self, descriptor: int) -> None:
        """Return when the file's data and size survive power loss."""
        ...

    def sync_directory(self, path: Path) -> None:
        """Return when the directory's entries survive power loss."""
        ...

    def make_directory(self, path: Path) -> None:
        """Make the directory, and those above it that are missing; nothing if it is there. Their names survive power loss."""
        ...

    def unlink(self, path: Path) -> None:
        """Remove the file; readers that hold it keep it."""
        ...

    def rename(self, path: Path, target: Path) -> None:
        """Give the file another name in its directory, in one step."""
        ...

    def replace(self, path: Path, data: bytes) -> None:
        """Make `data` the file's content, durably: whatever happens, there is the old content or the new one, whole."""
        ...

    def boot_id(self) -> bytes:
        """Changes whenever unsynced writes may have been lost: with every boot of the machine."""
        ...

    def allocated_bytes(self, descriptor: int) -> int:
        """What `du` counts for the file."""
        ...


class FileDevice:
    """The file system."""

    def create(self, path: Path, mode: int = 0o640) -> int:
        """Make a new file; FileExistsError if there is one."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)

    def open(self, path: Path) -> int:
        """Open an existing file."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def close(self, descriptor: int) -> None:
        """Close it."""
        os.close(descriptor)

    def read(self, descriptor: int, buffers: Sequence[memoryview], offset_bytes: int) -> int:
        """Fill the buffers; goes on after a read cut short by a signal."""
        total = sum(len(buffer) for buffer in buffers)
        done = os.preadv(descriptor, buffers, offset_bytes)
        while done < total:
            count = os.preadv(descriptor, _after(buffers, done), offset_bytes + done)
            if count == 0:
                break
            done += count
        return done

    def write(self, descriptor: int, buffers: Sequence[Buffer], offset_bytes: int) -> None:
        """Write all buffers; a full disk is OSError(ENOSPC), also when it takes a part."""
        for start in range(0, len(buffers), _IOV_MAX):
            views = [memoryview(buffer).cast("B") for buffer in buffers[start : start + _IOV_MAX]]
            total = sum(len(view) for view in views)
            done = os.pwritev(descriptor, views, offset_bytes)
            while done < total:
                count = os.pwritev(descriptor, _after(views, done), offset_bytes + done)
                if count == 0:
                    raise OSError(errno.ENOSPC, f"wrote {done} of {total} bytes")
                done += count
            offset_bytes += total

    def resize(self, descriptor: int, size_bytes: int) -> None:
        """Set the file's size."""
        os.ftruncate(descriptor, size_bytes)

    def map(self, descriptor: int, size_bytes: int) -> mmap.mmap:
        """Map the file's beginning."""
        return mmap.mmap(descriptor, size_bytes)

    def sync(self, descriptor: int) -> None:
        """fdatasync: also writes pages dirtied through a mapping."""
        os.fdatasync(descriptor)

    def sync_directory(self, path: Path) -> None:
        """A new or renamed entry is durable only once its directory is synced."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def make_directory(self, path: Path) -> None:
        """Each new one, and then the directory that has its name."""
        missing = [directory for directory in (path, *path.parents) if not directory.exists()]
        for directory in reversed(missing):
            directory.mkdir(exist_ok=True)
            self.sync_directory(directory.parent)

    def unlink(self, path: Path) -> None:
        """Remove the file."""
        path.unlink()

    def rename(self, path: Path, target: Path) -> None:
        """Rename it; a file that stood there is gone."""
        path.rename(target)

    def replace(self, path: Path, data: bytes) -> None:
        """Scratch file, write, fsync, rename, fsync of the directory. A scratch file that cannot be written is removed."""
        scratch = path.with_name(path.name + SCRATCH_SUFFIX)
        with contextlib.suppress(FileNotFoundError):
            self.unlink(scratch)  # left by a process that died
        descriptor = self.create(scratch, 0o600)  # the catalog holds a secret
        try:
            self.write(descriptor, [data], 0)
            self.sync(descriptor)  # or the new name could survive a power loss and the bytes not
        except OSError:
            with contextlib.suppress(OSError):
                self.unlink(scratch)
            raise
        finally:
            self.close(descriptor)
        self.rename(scratch, path)
        self.sync_directory(path.parent)

    def boot_id(self) -> bytes:
        """The kernel's; empty where it does not say, which reads as the same boot."""
        try:
            return _BOOT_ID_FILE.read_bytes().strip()
        except OSError:
            return b""

    def allocated_bytes(self, descriptor: int) -> int:
        """st_blocks, in 512-byte units whatever the file system's block size."""
        return os.fstat(descriptor).st_blocks * 512


def _after(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of the views after their first `done` bytes."""
    rest = []
    for view in views:
        if done < len(view):
            rest.append(view[done:])
        done = max(0, done - len(view))
    return rest
