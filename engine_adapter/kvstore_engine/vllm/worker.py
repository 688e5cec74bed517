"""The half in each of vLLM's workers: moves blocks between the store and this worker's memory.

Loads run on threads of their own into memory that vLLM has set aside for the request, which waits meanwhile while others compute.
Saves are copied out at the end of the step that computed them, and stored behind the engine, from a queue of bounded size.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from kvstore_client import Chain, KVStoreClient, PutReport, PutStatus
from kvstore_client.results import CORRUPT, DEADLINE, NOT_FOUND
from kvstore_engine.prefix_cache import CHECK_BUDGET_S, QUEUE_FULL, SKIPPED
from kvstore_engine.saving import Pending, SaveQueue
from kvstore_engine.store_steps import StoreSteps, failure_of
from kvstore_engine.vllm.identity import check_identity, worker_namespace
from kvstore_engine.vllm.messages import PASSING, QUEUE_S, WINDOW_GONE, Transfer, WorkerIdentity, WorkerReport
from kvstore_engine.vllm.metrics import KVStoreStats
from kvstore_engine.vllm.placement import Placement

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvstore_client import NamespaceHandle
    from kvstore_engine.plug_settings import PlugSettings
    from kvstore_engine.vllm.messages import Gap, StepMetadata, WorkerPlace

LOAD_THREADS: Final = 4
# Bytes that a load brings before it copies them to their places: so much memory for each load under way.
PIECE_BYTES: Final = 32 << 20
FLUSH_S: Final = 5.0
# How long a step that computes nothing waits for a load.
IDLE_S: Final = 0.001

LOADER_BUSY: Final = "LOADER_BUSY"
# Why a block is not there that a look-up had promised. Any other reason says nothing about what is stored.
ABSENT: Final = frozenset({NOT_FOUND, "EXPIRED", CORRUPT, "IO_ERROR"})

_LOGGER = logging.getLogger("kvstore_engine.vllm")


@dataclass(frozen=True, slots=True)
class _SaveJob:
    """Blocks to store: `pieces` has shape (blocks, block_bytes)."""

    request_id: str
    chain: Chain
    first_block: int
    pieces: torch.Tensor
    traffic_class: str
    size_bytes: int
    pending: Pending = field(default_factory=Pending)


class _Loaded(NamedTuple):
    """What came of a load."""

    transfer: Transfer
    valid_blocks: int = 0
    size_bytes: int = 0
    took_s: float = 0.0
    gap: str = ""  # why the next block is not valid

    @property
    def asked_blocks(self) -> int:
        return len(self.transfer.engine_blocks[0])


class _Ready(NamedTuple):
    """What exists once vLLM has its KV memory."""

    placement: Placement
    namespace: NamespaceHandle
    steps: StoreSteps
    spec: bytes


class WorkerHalf:
    """Called by one of vLLM's workers, on its thread."""

    def __init__(self, settings: PlugSettings, config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        """Raises: KVStoreConfigError: the model's identity is not known, or its KV is of a kind that is not stored."""
        self._settings = settings
        self._config = config
        self._kv_cache_config = kv_cache_config
        self._revision = check_identity(config, settings)
        self._client = KVStoreClient(settings.client)
        self._threads = ThreadPoolExecutor(LOAD_THREADS, thread_name_prefix="kvstore-load")
        self._saves: SaveQueue[_SaveJob] = SaveQueue(settings.max_pending_save_bytes, self._store, self._drop)
        self._stats = KVStoreStats()
        self._changed = threading.Condition()  # guards the next four
        self._done: list[_Loaded] = []
        self._under_way = 0
        self._gaps: dict[str, Gap] = {}
        self._given_up: set[str] = set()
        self._idle = self._has_failed = False
        self._report: WorkerReport | None = None
        self._invalid: set[int] = set()
        self._ready: _Ready | None = None

    def place(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """vLLM has its KV memory. Raises: KVStoreConfigError, NamespaceSpecError: what is to be set differently, named."""
        placement = Placement(self._kv_cache_config, kv_caches)
        spec = worker_namespace(self._config, self._settings, self._revision, placement)
        namespace = self._client.namespace(spec)
        steps = StoreSteps(namespace)
        steps.register(CHECK_BUDGET_S)
        self._ready = _Ready(placement, namespace, steps, spec.to_proto().SerializeToString())
        # At a level that shows: vLLM configures the logging of its own modules only, and this line is how to see that it works.
        _LOGGER.warning(
            "kvstore at %s: namespace %s, model %s, revision %s, blocks of %d bytes",
            self._settings.client.target,
            bytes(namespace.digest).hex()[:16],
            spec.model,
            spec.revision,
            spec.block_bytes,
        )

    def identity(self) -> WorkerIdentity | None:
        """What the scheduler has to know."""
        return WorkerIdentity(self._ready.spec) if self._ready is not None else None

    def flush(self, timeout_s: float) -> bool:
        """Wait until all saves so far are done, at most for `timeout_s`. Returns: whether they are."""
        return self._saves.flush(timeout_s)

    def close(self) -> None:
        """Store what can be stored in a few seconds, and end the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._saves.stop(FLUSH_S)
        self._client.close()

    # Loads

    def start_loads(self, metadata: StepMetadata, place: WorkerPlace) -> None:
        """Begin what the scheduler wants. Returns at once."""
        self._idle = metadata.is_idle
        with self._changed:
            self._under_way += len(metadata.loads)
        for transfer in metadata.loads:
            self._threads.submit(self._load, transfer, place, time.monotonic())

    def _load(self, transfer: Transfer, place: WorkerPlace, asked_s: float) -> None:
        """On a thread."""
        began_s, loaded = time.monotonic(), _Loaded(transfer)
        try:
            valid, size_bytes, gap = self._bring(transfer, place, asked_s)
            loaded = _Loaded(transfer, valid, size_bytes, time.monotonic() - began_s, gap)
        except Exception as error:  # a bug; vLLM would wait for this request for ever
            loaded = _Loaded(transfer, gap=failure_of(error).reason)
            _LOGGER.exception("a load failed")
        finally:
            if loaded.gap:
                self._stats.count_miss(loaded.gap)
            with self._changed:
                self._done.append(loaded)
                self._under_way -= 1
                self._changed.notify_all()

    def _bring(self, transfer: Transfer, place: WorkerPlace, asked_s: float) -> tuple[int, int, str]:
        """The steps of a load.

        Returns: blocks that are valid, from the first asked for on, the bytes that came, and why not all did.
        """
        assert self._ready is not None
        placement, namespace, steps, _ = self._ready
        chain, lease = Chain(transfer.chains[place]), transfer.leases.get(place, b"")
        count, began_s = len(transfer.engine_blocks[0]), time.monotonic()
        if began_s - asked_s > QUEUE_S:
            return 0, 0, LOADER_BUSY
        end_s = began_s + namespace.budget_s(count * placement.block_bytes)
        per_piece = max(1, PIECE_BYTES // placement.block_bytes)
        staging = torch.empty((min(count, per_piece), placement.block_bytes), dtype=torch.uint8)
        size_bytes = 0
        for blocks, windows in self._pieces(transfer, per_piece):
            size = placement.block_bytes if windows else placement.full_bytes
            views = [_bytes_of(staging[row])[:size] for row in range(len(blocks))]
            if time.monotonic() >= end_s:
                return blocks.start, size_bytes, DEADLINE
            loaded = steps.load_blocks(
                chain.first(transfer.first_block + blocks.stop),
                views,
                lease,
                None if windows else (0, size),
                end_s - time.monotonic(),
                first_block=transfer.first_block + blocks.start,
            )
            size_bytes += loaded.blocks * size
            if loaded.blocks:
                there = range(blocks.start, blocks.start + loaded.blocks)
                placement.copy_in(transfer.engine_blocks, there, staging[: loaded.blocks], windows=windows)
            if loaded.blocks < len(blocks):
                return blocks.start + loaded.blocks, size_bytes, loaded.gap
        return count, size_bytes, ""

    def _pieces(self, transfer: Transfer, per_piece: int) -> Iterator[tuple[range, bool]]:
        """Ranges of blocks, numbered within those asked for, and whether layers with a window are needed of them."""
        assert self._ready is not None
        placement, count, start = self._ready.placement, len(transfer.engine_blocks[0]), 0
        needed = [placement.needs_windows(transfer.engine_blocks, block) for block in range(count)]
        while start < count:
            end = start + 1
            while end < min(count, start + per_piece) and needed[end] == needed[start]:
                end += 1
            yield range(start, end), needed[start] or placement.full_bytes == placement.block_bytes
            start = end

    def finished_loads(self) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended since the last time, and those of them that did not get all."""
        with self._changed:
            if self._idle and self._under_way:  # a step that computes nothing would only take the time of the loads
                self._changed.wait_for(lambda: self._done, IDLE_S)
            done, self._done = self._done, []
            report = WorkerReport(gaps=self._gaps, given_up=self._given_up)
            self._gaps, self._given_up = {}, set()
        for loaded in done:
            request_id = loaded.transfer.request_id
            report.loaded_blocks[request_id] = loaded.valid_blocks
            report.load_bytes += loaded.size_bytes
            report.load_s += loaded.took_s
            self._stats.add("loaded_blocks", loaded.valid_blocks)
            self._stats.add("loaded_bytes", loaded.size_bytes)
            self._stats.add("load_seconds", loaded.took_s)
            if loaded.valid_blocks < loaded.asked_blocks:
                report.failed.add(request_id)
                if loaded.gap in ABSENT:
                    report.absent.add(request_id)
                self._invalid |= _blocks_from(loaded.transfer, loaded.valid_blocks)
        self._report = report
        return set(report.loaded_blocks), set(report.failed)

    def invalid_blocks(self) -> set[int]:
        """The engine's blocks that loads were to bring and did not, since the last time."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def report(self) -> WorkerReport | None:
        """What the scheduler is told of the loads that have just been reported, of none as well, and of saves.

        vLLM hands on nothing of a step that computes nothing and has nothing to say. But the scheduler times each step by when it
        hears of it.
        """
        report, self._report = self._report, None
        return report

    # Saves

    def start_saves(self, metadata: StepMetadata, place: WorkerPlace, *, has_failed: bool = False) -> None:
        """Copy out what this step has computed. Waits for the copy, and not for the store.

        Nothing is saved of a step that `has_failed`, nor of a later one: nobody knows what the engine's memory holds.
        """
        self._has_failed = self._has_failed or has_failed
        for transfer in [] if self._has_failed else metadata.saves:
            began_s = time.monotonic()
            self._save(transfer, place)
            self._stats.add("copy_seconds", time.monotonic() - began_s)

    def _save(self, transfer: Transfer, place: WorkerPlace) -> None:
        assert self._ready is not None
        placement, _, steps, _ = self._ready
        count, refusal = len(transfer.engine_blocks[0]), steps.refusal("write")
        taken = whole = 0
        if not refusal:
            whole = next((n for n in range(count) if not placement.is_whole(transfer.engine_blocks, n)), count)
            taken = self._saves.reserve(whole, placement.block_bytes)
        end = transfer.first_block + taken
        if taken < count:
            reason = refusal or (WINDOW_GONE if taken == whole else QUEUE_FULL)
            self._note_gap(transfer.request_id, (end, transfer.first_block + count, reason))
        if not taken:
            return
        pieces = torch.empty((taken, placement.block_bytes), dtype=torch.uint8)
        placement.copy_out(transfer.engine_blocks, range(taken), pieces)
        chain = Chain(transfer.chains[place]).first(end)
        job = _SaveJob(transfer.request_id, chain, transfer.first_block, pieces, transfer.traffic_class, pieces.nbytes)
        self._saves.offer(job)

    def _note_gap(self, request_id: str, gap: Gap) -> None:
        with self._changed:
            self._gaps[request_id] = min(gap, self._gaps.get(request_id, gap))

    def _store(self, job: _SaveJob) -> None:
        """On the saving thread."""
        assert self._ready is not None
        began_s = time.monotonic()
        views = [_bytes_of(row) for row in job.pieces]
        try:
            report = PutReport(self._ready.steps.put_blocks(job.chain, job.first_block, views, job.traffic_class))
        except Exception as error:  # a bug; the thread goes on
            self._ready.steps.note("save", failure_of(error))
            report = PutReport([])
        self._note_unsaved(job, report)
        self._stats.add("stored_blocks", report.stored)
        self._stats.add("exists_blocks", report.exists)
        self._stats.add("saved_bytes", (report.stored + report.exists) * self._ready.placement.block_bytes)
        self._stats.add("save_seconds", time.monotonic() - began_s)

    def _note_unsaved(self, job: _SaveJob, report: PutReport) -> None:
        """What lies behind a block that is not stored can never be hit: the scheduler has to know."""
        rejected = {n: result.reason for n, result in enumerate(report.results) if result.status is PutStatus.REJECTED}
        first = min(rejected, default=len(report.results))
        if rejected.get(first) in PASSING:
            self._note_gap(job.request_id, (job.first_block + first, len(job.chain), rejected[first]))
        elif first < len(job.pieces):
            for reason in rejected.values():
                self._stats.count_unsaved(reason, 1)
            self._stats.count_unsaved(SKIPPED, len(job.pieces) - len(report.results))
            with self._changed:
                self._given_up.add(job.request_id)

    def _drop(self, job: _SaveJob) -> None:
        self._stats.count_unsaved("CLIENT_CLOSED", len(job.pieces))

    def stats(self) -> KVStoreStats | None:
        """What was counted since the last time."""
        return self._stats.taken()


def _blocks_from(transfer: Transfer, valid_blocks: int) -> set[int]:
    return {number for ids in transfer.engine_blocks for block in ids[valid_blocks:] for number in block if number}


def _bytes_of(row: torch.Tensor) -> memoryview:
    view: Any = row.numpy()
    return memoryview(view)
