"""What `kvstore-bench scale` has to see in a process of its own: `python -m kvstore_bench.scale_child WHAT DIRECTORY BLOCKS`.

Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvstore.index import BlockIndex, row_keys
from kvstore.log import format as fmt
from kvstore.log.device import FileDevice
from kvstore.types import BlockAddr, SegmentId
from kvstore_bench.processes import own_io, own_memory
from kvstore_bench.sparse_store import BLOCK_BYTES, open_store

if TYPE_CHECKING:
    from numpy.typing import NDArray

# A group commit of the server holds 32 MiB of payload at most.
_GROUP_BLOCKS = (32 << 20) // BLOCK_BYTES
_ROWS_AT_A_TIME = 256


def memory(directory: Path, blocks: int) -> dict[str, float]:
    """The process's own memory with the store open, and every table looked at once."""
    store = open_store(directory, blocks)
    live = store.status().live.blocks
    anon = own_memory().anon_bytes
    store.close()
    return {"anon_bytes": anon, "live_blocks": live}


def index(directory: Path, blocks: int) -> dict[str, float]:
    """The same commits to an index alone, in the same groups: rows stand in the order in which they were committed."""
    written = 0
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix="index-") as scratch:
        again = BlockIndex(Path(scratch) / "index", "0" * 32, blocks * BLOCK_BYTES, FileDevice())
        before = own_io()
        for path in sorted((directory / "segments").iterdir()):
            segment_id, rows = _rows_of(path)
            keys = row_keys(rows)
            for start in range(0, len(keys), _GROUP_BLOCKS):
                group = keys[start : start + _GROUP_BLOCKS]
                again.commit({key: BlockAddr(segment_id, start + slot) for slot, key in enumerate(group)})
            written += len(keys)
        again.close()
        after = own_io()
        size = again.used_bytes()
    return {
        "blocks": written,
        "file_bytes": size,
        "kernel_bytes": after["write_bytes"] - before["write_bytes"],
        "handed_bytes": after["wchar"] - before["wchar"],
    }


def _rows_of(path: Path) -> tuple[SegmentId, NDArray[np.void]]:
    with path.open("rb") as file:
        header = fmt.SegmentHeader.decode(file.read(fmt.HEADER_BYTES), path.name)
        file.seek(fmt.Layout(header.row_capacity).row_offset(0))
        parts: list[NDArray[np.void]] = []
        while not parts or parts[-1]["magic"][-1]:
            parts.append(np.frombuffer(file.read(_ROWS_AT_A_TIME * fmt.ROW_BYTES), dtype=fmt.ROW_DTYPE))
    rows = np.concatenate(parts)
    return header.segment_id, rows[rows["magic"] == fmt.ROW_MAGIC]


_MEASUREMENTS = {"memory": memory, "index": index}

if __name__ == "__main__":
    print(json.dumps(_MEASUREMENTS[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))))
