"""Walks an index file from end to end, in a process of its own: `python -m kvstore.index_check [--readonly] DIRECTORY`.

LMDB trusts its pages. Following a damaged one can end in a signal, which no handler in the server could survive, so a file that
was not closed in order is walked here first. Exits with 0 when it is whole. With --readonly it makes and changes no file, and
leaves the list of free pages unseen, which only a write reads.
"""

from __future__ import annotations

import sys
from pathlib import Path

import lmdb

from kvstore.errors import StorageError
from kvstore.index import ENTRY_BYTES, open_environment

READONLY_FLAG = "--readonly"


def check(directory: Path, *, readonly: bool = False) -> str | None:
    """What is wrong, or None; may also end the process."""
    try:
        env = open_environment(directory, map_size_bytes=0, readonly=readonly)
        blocks = env.open_db(b"blocks", create=False)
        with env.begin(db=blocks) as txn:
            entries = 0
            for key, value in txn.cursor():
                if (len(key), len(value)) != ENTRY_BYTES:
                    return f"an entry of {len(key)} and {len(value)} bytes"
                entries += 1
            if entries != txn.stat(blocks)["entries"]:
                return f"{entries} entries, it says {txn.stat(blocks)['entries']}"
        if readonly:
            return None
        with env.begin(write=True, db=blocks) as txn:
            # A write looks at the list of free pages; nothing of it is kept.
            txn.put(bytes(ENTRY_BYTES[0]), bytes(ENTRY_BYTES[1]))
            txn.abort()
    except (lmdb.Error, StorageError, OSError) as error:
        return str(error)
    return None


if __name__ == "__main__":
    sys.exit(check(Path(sys.argv[-1]), readonly=READONLY_FLAG in sys.argv[1:-1]))
