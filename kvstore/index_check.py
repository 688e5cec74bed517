"""Walks an index file from end to end, in a process of its own: `python -m kvstore.index_check DIRECTORY KEY_BYTES VALUE_BYTES`.

LMDB trusts its pages. Following a damaged one can end in a signal, which no handler in the server could survive, so a file that
was not closed in order is walked here first. Exits with 0 when it is whole.
"""

from __future__ import annotations

import sys
from pathlib import Path

import lmdb

from kvstore.errors import StorageError
from kvstore.index_file import open_environment


def check(directory: Path, entry_bytes: tuple[int, int]) -> str | None:
    """What is wrong, or None; may also end the process. Args: entry_bytes: of each key and value."""
    try:
        env = open_environment(directory, map_size_bytes=0)
        blocks = env.open_db(b"blocks", create=False)
        with env.begin(db=blocks) as txn:
            entries = 0
            for key, value in txn.cursor():
                if (len(key), len(value)) != entry_bytes:
                    return f"an entry of {len(key)} and {len(value)} bytes"
                entries += 1
            if entries != txn.stat(blocks)["entries"]:
                return f"{entries} entries, it says {txn.stat(blocks)['entries']}"
        with env.begin(write=True, db=blocks) as txn:
            # A write looks at the list of free pages; nothing of it is kept.
            txn.put(bytes(entry_bytes[0]), bytes(entry_bytes[1]))
            txn.abort()
    except (lmdb.Error, StorageError, OSError) as error:
        return str(error)
    return None


if __name__ == "__main__":
    sys.exit(check(Path(sys.argv[1]), (int(sys.argv[2]), int(sys.argv[3]))))
