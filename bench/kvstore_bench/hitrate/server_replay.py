"""A replay through a real server: another process, real files with real payloads, and the client that workers use.

Only its time is the workload's. What it does once a second of its own it does once a second of the wall clock, because nobody
tells a server to; so much more of the workload's time passes in between than in a real one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import numpy as np

from kvstore_api.v1 import admin_pb2, admin_pb2_grpc
from kvstore_bench.hitrate.prefix_hashes import PrefixHashes
from kvstore_bench.hitrate.replay import COUNTERS, Counts, Storage, run_replay
from kvstore_bench.hitrate.shared_clock import SharedClock
from kvstore_bench.processes import running_child
from kvstore_bench.workload import CALL_BUDGET_S, VerificationError, namespace_spec
from kvstore_client import ClientConfig, KVStoreClient

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from kvstore_bench.hitrate.settings import ReplaySettings
    from kvstore_bench.hitrate.workload import Workload
    from kvstore_client import NamespaceHandle


def replay_over_grpc(
    workload: Workload, settings: ReplaySettings, scratch: Path, advance: Callable[[int], None] = lambda requests: None
) -> tuple[NDArray[np.int64], Storage]:
    """Replay; returns hits, shape (requests,), and what the store did.

    Args:
        scratch: a directory for the server's data: the whole capacity.
        advance: told the requests done.
    Raises: VerificationError: a call failed. ProcessError: the server did not start, or ended.
    """
    clock = SharedClock.make(scratch / "clock")
    config = scratch / "kvstore.toml"
    config.write_text(_configuration(settings, scratch))
    options = ["--config", str(config), "--clock", str(scratch / "clock")]
    with (
        running_child("kvstore_bench.hitrate.server_child", options, scratch, "server") as child,
        KVStoreClient(ClientConfig(child.target, base_budget_s=CALL_BUDGET_S)) as client,
    ):
        handle = client.namespace(namespace_spec("hitrate", settings.block_bytes))
        return run_replay(workload, _Server(handle, child.target, clock, workload), settings, advance)


def _configuration(settings: ReplaySettings, scratch: Path) -> str:
    store = settings.store_config()
    return "\n".join(
        [
            "[server]",
            f'data_dir = "{scratch / "data"}"',
            'listen = "127.0.0.1:0"',
            'metrics_listen = ""',
            "[store]",
            f"capacity = {int(store.capacity)}",
            f"segment_size = {int(store.segment_size)}",
            f"lease_s = {store.lease_s}",
            f"lease_max_s = {store.lease_max_s}",
            *(
                f"[traffic_classes.{name}]\nttl_s = {config.ttl_s}\nshare = {config.share}"
                for name, config in settings.traffic_classes().items()
            ),
            "[log]",
            'level = "warning"\n',
        ]
    )


class _Server:
    def __init__(self, handle: NamespaceHandle, target: str, clock: SharedClock, workload: Workload) -> None:
        self._handle, self._target, self._clock, self._workload = handle, target, clock, workload
        self._hashes = PrefixHashes(workload.unique_blocks)
        longest = int(np.diff(workload.starts).max(initial=0))
        self._payload = memoryview(bytes(longest * handle.block_bytes))

    def advance(self, seconds: float) -> None:
        self._clock.advance(seconds)

    def tick(self) -> None:
        """It does so by itself."""

    def ask(self, request: int) -> int:
        chain, asked = self._hashes.chains(self._workload, request)
        traffic_class = self._workload.class_of(request)
        match = self._handle.match(asked, traffic_class)
        hit, failure = match.hit_length_blocks, match.failure
        if failure is None and hit < len(chain):
            blocks = self._payload[: (len(chain) - hit) * self._handle.block_bytes]
            failure = self._handle.put(chain, blocks, first_block=hit, traffic_class=traffic_class).failure
        if failure is not None:
            raise VerificationError(f"request {request}: {failure.reason}: {failure.detail}")
        return hit

    def counts(self) -> Counts:
        with grpc.insecure_channel(self._target) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]
            status = stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=CALL_BUDGET_S)
        counters = {counter.name: counter.value for counter in status.counters}
        return Counts(*(counters[name] for name in COUNTERS))

    def live_bytes(self) -> None:
        """Its housekeeping keeps another time than the workload, so that no moment says what a real one would hold."""
