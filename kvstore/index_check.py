"""Opens an index file in a process of its own: `python -m kvstore.index_check [--readonly] DIRECTORY KEY_BYTES VALUE_BYTES`.

LMDB trusts its pages. Following a damaged one can end in a signal, which no handler in the server could survive, so a file that
was not closed in order is opened here first. Exits with 0 when LMDB has nothing against it, and prints the size of a page and
what the main tree says of the tree of blocks, whose pages `index_pages` looks through. With --readonly it makes and changes no
file, and leaves the list of free pages unseen, which only a write reads.
"""

from __future__ import annotations

import sys
from pathlib import Path

import lmdb

from kvstore.errors import StorageError
from kvstore.index_file import open_environment

READONLY_FLAG = "--readonly"


def check(directory: Path, entry_bytes: tuple[int, int], *, readonly: bool) -> str | None:
    """What is wrong, or None; may also end the process. Args: entry_bytes: of each key and value."""
    try:
        env = open_environment(directory, map_size_bytes=0, readonly=readonly)
        blocks, main = env.open_db(b"blocks", create=False), env.open_db(None)
        with env.begin() as txn:
            tree = txn.get(b"blocks", db=main) or b""
        if not readonly:
            with env.begin(write=True, db=blocks) as txn:
                # A write looks at the list of free pages; nothing of it is kept.
                txn.put(bytes(entry_bytes[0]), bytes(entry_bytes[1]))
                txn.abort()
    except (lmdb.Error, StorageError, OSError) as error:
        return str(error)
    print(env.stat()["psize"], tree.hex())
    return None


if __name__ == "__main__":
    key_bytes, value_bytes = int(sys.argv[-2]), int(sys.argv[-1])
    sys.exit(check(Path(sys.argv[-3]), (key_bytes, value_bytes), readonly=READONLY_FLAG in sys.argv[1:-3]))
