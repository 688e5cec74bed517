"""How fast blocks go in and come out through a real server, beside what a bare stream and a bare file read do.

Everything that is compared runs in the same rounds, one after another, because the speed of a shared machine changes from
minute to minute. A line's figure is the median over the rounds; a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import grpc
import numpy as np

from kvstore_api.limits import MAX_FRAME_DATA_BYTES
from kvstore_api.v1 import admin_pb2, admin_pb2_grpc
from kvstore_bench.bare_stream import BareStream
from kvstore_bench.memory import MemoryGrowth, measure_memory, memory_disk_bytes
from kvstore_bench.processes import Child, running_child, running_store
from kvstore_bench.workload import (
    CALL_BUDGET_S,
    CHAIN_BLOCKS,
    Batch,
    Payload,
    VerificationError,
    namespace_spec,
    round_batches,
)
from kvstore_client import ClientConfig, KVStoreClient, PutStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvstore_api.chain import Chain

PUT, GET, PREAD = "put", "get", "pread"
BARE_STREAM, BARE_BATCHES = "bare_stream", "bare_stream_per_batch"
LINES = (PUT, GET, BARE_STREAM, BARE_BATCHES, PREAD)

_LEASE_S = 60.0
_MATCHES_PER_ROUND = 50
_PAGE_BYTES = 4096
_STORE_DISK_BYTES_MIN = 256 << 20
_ADMIN_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class ThroughputConfig:
    """What to measure. `blocks` is a multiple of `batch_blocks`."""

    blocks: int
    batch_blocks: int
    block_bytes: int
    rounds: int
    memory_blocks: int  # small blocks stored to see the server's memory grow; 0 leaves that out
    seed: int
    flip_bit: bool = False  # expect a wrong bit, to see that the verification notices

    @property
    def batch_count(self) -> int:
        """Batches in a round."""
        return self.blocks // self.batch_blocks

    @property
    def batch_bytes(self) -> int:
        """Bytes in a batch."""
        return self.batch_blocks * self.block_bytes

    @property
    def round_bytes(self) -> int:
        """Bytes in a round."""
        return self.blocks * self.block_bytes

    @property
    def disk_bytes(self) -> int:
        """Room on disk the run needs: the store, the file for pread, and the store of small blocks."""
        return self.store_disk_bytes + self.round_bytes + memory_disk_bytes(self.memory_blocks)

    @property
    def store_disk_bytes(self) -> int:
        """Room for all rounds' blocks in whole pages, with a quarter more so that nothing is ever evicted."""
        block_disk_bytes = -(-self.block_bytes // _PAGE_BYTES) * _PAGE_BYTES
        return (self.rounds + 1) * self.blocks * block_disk_bytes * 5 // 4 + _STORE_DISK_BYTES_MIN


@dataclass(frozen=True, slots=True)
class Sample:
    """One line in one round: each call's time, and the processor time that both sides spent meanwhile."""

    call_s: Sequence[float]
    client_cpu_s: float
    server_cpu_s: float


@dataclass(slots=True)
class Measurements:
    """What was measured, as it was measured; `report.py` makes figures of it."""

    lines: dict[str, list[Sample]] = field(default_factory=lambda: {line: [] for line in LINES})
    match_s: list[float] = field(default_factory=list)
    match_blocks: int = 0
    put_bytes: int = 0
    written_bytes: int = 0  # to segments, by the server's own counter
    kernel_written_bytes: int = 0  # by the server altogether, by the kernel's
    memory: MemoryGrowth | None = None


def run(config: ThroughputConfig, scratch: Path, advance: Callable[[str], None]) -> Measurements:
    """Measure everything, on servers of its own under `scratch`. `advance` is told each step as it begins.

    Raises:
        VerificationError: an answer was wrong or missing.
        ProcessError: a server did not start, or died.
        grpc.RpcError: the bare stream or the status call failed.
    """
    measurements = Measurements()
    advance("preparing")
    payload = Payload(config.seed, config.batch_count, config.batch_bytes)
    with ExitStack() as stack:
        store = stack.enter_context(running_store(scratch, "throughput", config.store_disk_bytes))
        bare = stack.enter_context(running_child("kvstore_bench.bare_stream", (), scratch, "bare"))
        rounds = stack.enter_context(_Rounds(config, payload, store, bare, scratch))
        try:
            _run_rounds(rounds, config.rounds, measurements, advance)
            measurements.written_bytes = _bytes_written(store.target)
        except (VerificationError, grpc.RpcError):
            store.check_alive()
            bare.check_alive()
            raise
        measurements.put_bytes = (config.rounds + 1) * config.round_bytes
        measurements.kernel_written_bytes = store.written_bytes()
    if config.memory_blocks:
        advance("memory per block")
        measurements.memory = measure_memory(config.memory_blocks, config.seed, scratch)
    return measurements


def _run_rounds(rounds: _Rounds, count: int, into: Measurements, advance: Callable[[str], None]) -> None:
    """The first round warms everything up, and does not count."""
    advance("warming up")
    rounds.run(0, Measurements())
    for round_number in range(1, count + 1):
        advance(f"round {round_number} of {count}")
        rounds.run(round_number, into)


def step_count(config: ThroughputConfig) -> int:
    """How often `run` calls `advance`."""
    return config.rounds + 2 + bool(config.memory_blocks)


class _Rounds:
    """The clients, buffers and files that all rounds use."""

    def __init__(self, config: ThroughputConfig, payload: Payload, store: Child, bare: Child, scratch: Path) -> None:
        self._config = config
        self._payload = payload
        self._store = store
        self._bare = bare
        self._client = KVStoreClient(ClientConfig(target=store.target))
        self._handle = self._client.namespace(namespace_spec("throughput", config.block_bytes))
        self._stream = BareStream(bare.target)
        # One buffer for all lines, as an engine reads into memory that it has; a bare frame has to fit as well.
        self._buffer = memoryview(bytearray(max(config.batch_bytes, MAX_FRAME_DATA_BYTES)))
        self._out = self._buffer[: config.batch_bytes]
        self._file = os.open(scratch / "pread.bin", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        _write_all(self._file, payload.data)

    def __enter__(self) -> _Rounds:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._stream.close()
        os.close(self._file)

    def run(self, round_number: int, into: Measurements) -> None:
        """One round: put, match, the reading lines in turned order, and then the check of every byte."""
        batches = self._batches(round_number)
        into.lines[PUT].append(_time([partial(self._put, batch) for batch in batches], self._store))
        leases = {batch.chain: self._match_all(batch.chain) for batch in batches if not batch.first_block}
        gets = [partial(self._get, batch, leases[batch.chain]) for batch in batches]
        self._time_matches(batches[0].chain.first(CHAIN_BLOCKS), into)
        readers: list[tuple[str, Sequence[Callable[[], None]], Child | None]] = [
            (GET, gets, self._store),
            (BARE_STREAM, [partial(self._bare_fetch, self._config.round_bytes)], self._bare),
            (BARE_BATCHES, [partial(self._bare_fetch, self._config.batch_bytes)] * len(batches), self._bare),
            (PREAD, [partial(self._pread, batch) for batch in batches], None),
        ]
        turn = round_number % len(readers)
        for line, calls, server in readers[turn:] + readers[:turn]:
            into.lines[line].append(_time(calls, server))
        for get, batch in zip(gets, batches, strict=True):
            get()
            self._check_bytes(batch)

    def _batches(self, round_number: int) -> list[Batch]:
        config = self._config
        return round_batches(self._handle, self._payload, config.seed, round_number, config.blocks, config.batch_blocks)

    def _put(self, batch: Batch) -> None:
        report = self._handle.put(batch.chain, batch.payload, first_block=batch.first_block, budget_s=CALL_BUDGET_S)
        if report.stored != self._config.batch_blocks:
            first_bad = next((result for result in report.results if result.status is not PutStatus.STORED), None)
            raise VerificationError(
                f"put stored {report.stored} of {self._config.batch_blocks} blocks: {report.failure or first_bad}"
            )

    def _match_all(self, chain: Chain) -> bytes:
        """The lease for a whole chain that was just put."""
        match = self._handle.match(chain, lease_s=_LEASE_S, budget_s=CALL_BUDGET_S)
        if match.hit_length_blocks != len(chain):
            raise VerificationError(
                f"match found {match.hit_length_blocks} of the {len(chain)} blocks just put: {match.failure}"
            )
        return match.lease

    def _time_matches(self, chain: Chain, into: Measurements) -> None:
        into.match_blocks = len(chain)
        sample = _time([partial(self._match_all, chain)] * _MATCHES_PER_ROUND, self._store)
        into.match_s.extend(sample.call_s)

    def _get(self, batch: Batch, lease: bytes) -> None:
        blocks = self._config.batch_blocks
        result = self._handle.get(
            batch.chain,
            self._out,
            first_block=batch.first_block,
            block_count=blocks,
            lease=lease,
            budget_s=CALL_BUDGET_S,
        )
        if result.leading_blocks != blocks:
            status = result.failure or result.statuses[result.leading_blocks]
            raise VerificationError(f"get brought {result.leading_blocks} of {blocks} blocks, and then {status}")

    def _bare_fetch(self, size_bytes: int) -> None:
        received = self._stream.fetch(size_bytes, self._buffer)
        if received != size_bytes:
            raise VerificationError(f"the bare stream brought {received} of {size_bytes} bytes")

    def _pread(self, batch: Batch) -> None:
        """Block by block, as a store that keeps blocks in files has to."""
        size = self._config.block_bytes
        for position in range(0, self._config.batch_bytes, size):
            read = os.preadv(self._file, [self._out[position : position + size]], batch.payload_offset + position)
            if read != size:
                raise VerificationError(f"pread brought {read} of {size} bytes")

    def _check_bytes(self, batch: Batch) -> None:
        """Every byte of a batch that was just got. Raises: VerificationError."""
        expected = np.frombuffer(batch.payload, np.uint8)
        if self._config.flip_bit:
            expected = expected.copy()
            expected[-1] ^= 1
        wrong = np.flatnonzero(expected != np.frombuffer(self._out, np.uint8))
        if wrong.size:
            block, offset = divmod(int(wrong[0]), self._config.block_bytes)
            raise VerificationError(
                f"get brought wrong bytes: {wrong.size} of the batch at block {batch.first_block}, the first one "
                f"in block {batch.first_block + block} at byte {offset}"
            )


def _time(calls: Sequence[Callable[[], object]], server: Child | None) -> Sample:
    """Make the calls one after another."""
    call_s: list[float] = []
    server_cpu_before_s = server.cpu_s() if server else 0.0
    client_cpu_before_s = time.process_time()
    for call in calls:
        start_s = time.perf_counter()
        call()
        call_s.append(time.perf_counter() - start_s)
    client_cpu_s = time.process_time() - client_cpu_before_s
    return Sample(call_s, client_cpu_s, server.cpu_s() - server_cpu_before_s if server else 0.0)


def _bytes_written(target: str) -> int:
    with grpc.insecure_channel(target) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]
        status: admin_pb2.GetStatusResponse = stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=_ADMIN_TIMEOUT_S)
    return next(counter.value for counter in status.counters if counter.name == "bytes_written")


def _write_all(file: int, data: memoryview) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(file, data[written:], written)
