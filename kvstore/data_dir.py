"""The data directory: what lies in it, who holds it, how much it takes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from typing import TYPE_CHECKING

from kvstore.catalog import CATALOG_FILE, Catalog
from kvstore.clock_file import CLOCK_FILE
from kvstore.errors import ConfigError, CorruptDataDirError, DataDirLockedError, NotADataDirError
from kvstore.index import INDEX_FILES
from kvstore.log.device import SCRATCH_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.log.device import Device

LOCK_FILE = "LOCK"
SEGMENTS_DIR = "segments"
INDEX_DIR = "index"
_CATALOG_SCRATCH = CATALOG_FILE + SCRATCH_SUFFIX
_EXPECTED = {CATALOG_FILE, _CATALOG_SCRATCH, LOCK_FILE, CLOCK_FILE, SEGMENTS_DIR, INDEX_DIR, "lost+found"}


class DataDir:
    """A locked data directory."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.segments = path / SEGMENTS_DIR
        self.index = path / INDEX_DIR
        self._lock: int | None = lock

    @classmethod
    def open(cls, path: Path, device: Device) -> DataDir:
        """Create what is missing and take the lock.

        Raises: DataDirLockedError, ConfigError (it is something else's directory, or cannot be used). Nothing is changed then.
        """
        try:
            device.make_directory(path)
            strangers = sorted(entry.name for entry in path.iterdir() if entry.name not in _EXPECTED)
            if strangers and not (path / CATALOG_FILE).exists():
                raise ConfigError(
                    f"data_dir {path} holds other files ({', '.join(strangers[:3])}{', …' if len(strangers) > 3 else ''}); "
                    "name an empty directory or one that kvstore made"
                )
            lock = _lock(path / LOCK_FILE)
            device.make_directory(path / SEGMENTS_DIR)
        except OSError as error:
            raise ConfigError(f"data_dir {path} cannot be used: {error.strerror or error}") from error
        return cls(path, lock)

    def load_catalog(self, device: Device) -> Catalog:
        """The catalog, new if the directory is. Raises: CorruptDataDirError: it is gone although segments are there."""
        with contextlib.suppress(FileNotFoundError):
            device.unlink(self.path / _CATALOG_SCRATCH)  # of a process that died while it replaced the catalog
        if (self.path / CATALOG_FILE).exists():
            return Catalog.load(self.path)
        orphans = len(list(self.segments.iterdir()))
        if orphans:
            raise CorruptDataDirError(
                f"{self.path / CATALOG_FILE} is missing but {orphans} segment files are there, and without it nobody knows whose "
                "blocks they hold; restore it from a backup, or move the files away to start empty"
            )
        catalog = Catalog.new()
        catalog.save(self.path, device)
        return catalog

    def small_files_bytes(self) -> int:
        """What `du` counts for everything but segment files and the index's files."""
        files = [self.path / name for name in (CATALOG_FILE, LOCK_FILE, CLOCK_FILE)]
        entries = [self.path, self.segments, self.index, *files]
        return sum(entry.stat().st_blocks * 512 for entry in entries if entry.exists())

    def close(self) -> None:
        """Give the lock back."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


@contextlib.contextmanager
def held_still(path: Path) -> Iterator[None]:
    """Hold the lock of a directory without changing a byte in it; one that no server ever locked is held by nobody.

    Raises: DataDirLockedError; NotADataDirError; ConfigError: it cannot be read.
    """
    try:
        names = {entry.name for entry in path.iterdir()}
        if not names & {CATALOG_FILE, SEGMENTS_DIR}:
            raise NotADataDirError(f"{path} is no data directory of kvstore: there is no {CATALOG_FILE} in it")
        descriptor = os.open(path / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC) if LOCK_FILE in names else None
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotADataDirError(f"{path} is no data directory of kvstore: {error.strerror}") from error
    except OSError as error:
        raise ConfigError(f"data_dir {path} cannot be read: {error.strerror or error}") from error
    if descriptor is None:
        yield
        return
    _flock(descriptor, path / LOCK_FILE)
    try:
        yield
    finally:
        os.close(descriptor)


def leftovers(path: Path) -> list[Path]:
    """Files in a data directory that the store does not use: what was set aside, half-written or put there by others."""
    known = {CATALOG_FILE, LOCK_FILE, CLOCK_FILE, SEGMENTS_DIR, INDEX_DIR, "lost+found"}
    found = [entry for entry in path.iterdir() if entry.name not in known]
    for directory, is_known in ((SEGMENTS_DIR, _is_segment), (INDEX_DIR, _is_index_file)):
        if (path / directory).is_dir():
            found += [entry for entry in (path / directory).iterdir() if not is_known(entry)]
    return sorted(found)


def _is_segment(path: Path) -> bool:
    return path.suffix == ".seg"


def _is_index_file(path: Path) -> bool:
    return path.name in INDEX_FILES


def _lock(path: Path) -> int:
    """Take the lock and note who holds it, for the message the next one gets."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    _flock(descriptor, path)
    with contextlib.suppress(OSError):  # a full disk has no room for the note, and it is only a note
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
    return descriptor


def _flock(descriptor: int, path: Path) -> None:
    """Lock it. Raises: DataDirLockedError: somebody has; names them and closes it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = "another process"
        with contextlib.suppress(ValueError, KeyError, TypeError):
            note = json.loads(os.pread(descriptor, 4096, 0))
            holder = f"process {note['pid']} on {note['host']}"
        os.close(descriptor)
        raise DataDirLockedError(
            f"data_dir {path.parent} is held by {holder}; stop it, or give this server a directory of its own"
        ) from None
