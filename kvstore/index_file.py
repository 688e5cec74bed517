"""Opening the index's LMDB file. Imports little: `index_check` starts a process for it, at every start after a crash."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import lmdb

from kvstore.errors import StorageError

if TYPE_CHECKING:
    from pathlib import Path

_MAX_READERS = 1022
_LOCK_FILE_BYTES = 16_384  # its header and the places of some 250 readers


def open_environment(directory: Path, map_size_bytes: int, *, readonly: bool = False) -> lmdb.Environment:
    """The LMDB environment; a map size of 0 takes the file's. Raises: lmdb.Error, StorageError: the file is cut short.

    With `readonly` no file is made, changed or locked; nobody else may have it open then.
    """
    if not readonly:
        directory.mkdir(exist_ok=True)
        _allocate_lock_file(directory / "lock.mdb")
    env = lmdb.open(
        str(directory),
        map_size=map_size_bytes,
        max_dbs=4,
        max_readers=_MAX_READERS,
        # Not synced at each commit: after power loss the index is rebuilt from the log.
        sync=False,
        metasync=False,
        readahead=False,
        mode=0o640,
        readonly=readonly,
        create=not readonly,
        lock=not readonly,
    )
    # Reading a mapped page behind the end of a file cut short would be a signal, not an error.
    needed = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    size = (directory / "data.mdb").stat().st_size
    if size < needed:
        env.close()
        raise StorageError(f"{size} bytes, its pages reach to {needed}")
    return env


def _allocate_lock_file(path: Path) -> None:
    """LMDB maps the file and writes to it: filling a hole of it on a full disk would be a signal. Raises: StorageError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        os.posix_fallocate(descriptor, 0, _LOCK_FILE_BYTES)
    except OSError as error:
        raise StorageError(f"{path.name} needs {_LOCK_FILE_BYTES} bytes on the disk: {error}") from error
    finally:
        os.close(descriptor)
