"""kill -9 in the middle of puts: what the child said was stored is there afterwards, whole."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from children import whole_lines
from kvstore.clock import SystemClock
from kvstore_api.results import PutStatus
from stores import chain_of, get, open_store, payload, put, spec

CHILD = """
import sys
from pathlib import Path
from stores import chain_of, open_store, put, spec
from kvstore.clock import SystemClock
store = open_store(Path(sys.argv[1]), SystemClock(), capacity=64 << 20)
namespace = store.register_namespace(spec(20_000))
for conversation in range(int(sys.argv[2]), 10_000):
    chain = chain_of(namespace, conversation, 5)
    for block in range(5):
        (result,) = put(store, namespace, chain, [block])
        print(conversation, block, result.status.name, flush=True)
"""


@pytest.mark.parametrize("seed", range(4))
def test_what_was_acknowledged_survives_kill(tmp_path, seed):
    rng = random.Random(seed)
    acknowledged: dict[int, int] = {}  # conversation -> blocks
    first = 0
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path), str(first)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
        )
        kill_after = rng.randrange(1, 60)
        with child:
            assert child.stdout is not None
            for count, line in enumerate(whole_lines(child.stdout)):
                conversation, block, status = line.split()
                if status in ("STORED", "EXISTS"):
                    acknowledged[int(conversation)] = int(block) + 1
                if count == kill_after:
                    child.send_signal(signal.SIGKILL)
                    # What it had printed until then was acknowledged as well.
        assert child.returncode == -signal.SIGKILL
        first = max(acknowledged)

    store = open_store(tmp_path, SystemClock(), capacity=64 << 20)
    namespace = store.register_namespace(spec(20_000))
    for conversation, block_count in acknowledged.items():
        chain = chain_of(namespace, conversation, 5)
        assert store.match(namespace, chain).hit_length_blocks >= block_count, f"seed {seed}"
        found, _ = get(store, namespace, chain)
        assert all(data == payload(chain[block], 20_000) for block, data in found.items())
    torn = chain_of(namespace, first, 5)
    assert {result.status for result in put(store, namespace, torn)} <= {PutStatus.STORED, PutStatus.EXISTS}
    store.close()
