"""kvstore-admin in tests: running it, and filling a real server for it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.cli import admin
from kvstore_client import ClientConfig, KVStoreClient, NamespaceSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvstore_api.chain import Chain
    from kvstore_client import NamespaceHandle
    from serving import RunningServer

BLOCK_BYTES = 4096
PATIENCE_S = 30
BUDGET_S = 30.0


@dataclass(frozen=True)
class Ran:
    """What a run of kvstore-admin did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run(server: RunningServer, *args: str) -> Ran:
    """kvstore-admin in this process: `main` and all that is below it."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        admin.main(["--server", server.target, *args])
    return Ran(int(ended.value.code or 0), out.getvalue(), err.getvalue())


def ok_json(server: RunningServer, *args: str) -> Any:
    """The JSON of a command that must succeed and say nothing else."""
    ran = run(server, *args, "-o", "json")
    assert (ran.code, ran.err) == (0, "")
    return ran.json


def spec(model: str) -> NamespaceSpec:
    return NamespaceSpec(
        model=model, revision="r1", engine="test", layout="opaque/1", kv_dtype="uint8", block_bytes=BLOCK_BYTES
    )


@dataclass(frozen=True)
class Filled:
    """Blocks that were put."""

    handle: NamespaceHandle
    chain: Chain

    @property
    def digest(self) -> str:
        return self.handle.digest.hex()

    def hits(self) -> int:
        """Blocks that are there now, without counting as a use."""
        match = self.handle.match(self.chain, peek=True, budget_s=BUDGET_S)
        assert match.failure is None
        return match.hit_length_blocks


@contextlib.contextmanager
def connected(server: RunningServer) -> Iterator[KVStoreClient]:
    with KVStoreClient(ClientConfig(target=server.target)) as client:
        yield client


def block_bytes(chain: Chain, block: int) -> bytes:
    """Bytes that no other block has."""
    return hashlib.shake_256(chain[block]).digest(BLOCK_BYTES)


def fill(client: KVStoreClient, model: str, blocks: int, traffic_class: str = "") -> Filled:
    handle = client.namespace(spec(model))
    chain = handle.chain(range(128 * blocks))
    data = b"".join(block_bytes(chain, block) for block in range(blocks))
    report = handle.put(chain, data, traffic_class=traffic_class, budget_s=BUDGET_S)
    assert report.stored == blocks, report
    return Filled(handle, chain)


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for real time to pass on the server's clock."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.05)


def flip_a_byte_of(data: bytes, directory: Path) -> None:
    """Find a block's bytes wherever the store keeps them, and damage one."""
    for path in directory.rglob("*"):
        position = path.read_bytes().find(data) if path.is_file() else -1
        if position >= 0:
            with path.open("r+b") as file:
                file.seek(position + len(data) // 2)
                file.write(bytes([data[len(data) // 2] ^ 1]))
            return
    raise AssertionError("the block is in no file")


def as_process(target: str, *args: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvstore.cli.admin", "--server", target, *args]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, text=True)
