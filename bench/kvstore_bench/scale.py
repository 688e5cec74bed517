"""What grows with the number of blocks stored, and what does not: the same measurements at 10 thousand to 10 million blocks.

Directories are made by the real put path; only payloads are holes. Everything runs warm, in the page cache.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from kvstore.allocator import keep_freed_buffers
from kvstore.log import format as fmt
from kvstore_bench.processes import ProcessError, child_environment
from kvstore_bench.server_start import Start, started_server
from kvstore_bench.sparse_store import (
    BLOCK_BYTES,
    PROMPT_BLOCKS,
    Conversations,
    fill,
    open_store,
    scale_namespace,
    store_config,
)
from kvstore_bench.workload import CALL_BUDGET_S, CHAIN_BLOCKS, VerificationError, namespace_spec
from kvstore_client import ClientConfig, KVStoreClient

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvstore.store import LocalStore
    from kvstore.types import Namespace
    from kvstore_api.chain import Chain

MIN_BLOCKS = 2 * PROMPT_BLOCKS + CHAIN_BLOCKS
# So many chains are matched at every point, however much is stored: what differs then is the store and not the work.
_SAME_CHAINS = 4
_MATCH_CHAINS = 200
_MATCH_PASSES_MIN = 3
_MATCHES_MIN = 600
_LEASE_S = 0.001  # so that no lease of a measured match holds up what is reclaimed later
_STARTS = 3
_RECLAIM_SEGMENTS = 16
_DELETED_SHARE = 0.6
_OPEN_SEGMENT_BLOCKS = 64
_DISK_BYTES_PER_BLOCK = 400  # tables, index, and the index made again
_DISK_BYTES_MIN = 256 << 20
_STEPS_PER_POINT = 6
# Numbers of conversations that are never stored.
_STRANGERS = 1 << 40


@dataclass(frozen=True, slots=True)
class ScaleConfig:
    """What to measure."""

    points: Sequence[int]
    seed: int
    block_bytes: int = BLOCK_BYTES
    chain_blocks: int = CHAIN_BLOCKS
    prompt_blocks: int = PROMPT_BLOCKS

    @property
    def disk_bytes(self) -> int:
        """Room on disk the run needs; the points come one after another."""
        return max(self.points) * _DISK_BYTES_PER_BLOCK + _DISK_BYTES_MIN


@dataclass(frozen=True, slots=True)
class ScalePoint:
    """The figures at one number of blocks. Times of matches are medians over different chains, 1,024 blocks asked for each."""

    blocks: int
    fill_us_per_block: float
    match1024_hit_us_p50: float  # all blocks there, the first 117 of them the shared prompt; few chains
    match_chains: int  # different chains that are matched in turn for the next three
    match1024_hit_many_us_p50: float  # all blocks there, the first 117 of them the shared prompt
    match1024_hit_unshared_us_p50: float | None  # all blocks there, none shared; None: no such chain is stored
    match1024_miss_us_p50: float  # no block there
    match1024_prompt_us_p50: float  # the shared prompt there, nothing behind it
    rss_anon_bytes_per_block: float
    index_bytes_per_block: float  # size of the index file
    index_bytes_written_per_block: float  # that the kernel has to bring to the disk for it
    index_bytes_handed_per_block: float  # that LMDB hands to the kernel
    start_clean_s: float
    start_kill9_port_s: float
    start_kill9_ready_s: float
    reclaim_blocks_per_s: float


def step_count(config: ScaleConfig) -> int:
    """How often `run` calls `advance`."""
    return len(config.points) * _STEPS_PER_POINT


def run(config: ScaleConfig, scratch: Path, advance: Callable[[str], None]) -> list[ScalePoint]:
    """Measure each point on a directory of its own under `scratch`.

    Raises:
        VerificationError: a block was not stored, or not found, or found though it was never stored.
        ProcessError: a server did not start, or died.
    """
    empty_anon_bytes = _in_child("memory", scratch / "empty", min(config.points))["anon_bytes"]
    points = []
    for blocks in config.points:
        directory = scratch / "store"
        points.append(_Point(directory, Conversations(config.seed, blocks), advance).measure(empty_anon_bytes))
        shutil.rmtree(directory)
    return points


class _Point:
    """One number of blocks."""

    def __init__(self, directory: Path, conversations: Conversations, advance: Callable[[str], None]) -> None:
        self._directory, self._conversations = directory, conversations
        self._blocks = conversations.total_blocks
        self._advance = advance

    def _step(self, what: str) -> None:
        self._advance(f"{self._blocks:,} blocks: {what}")

    def measure(self, empty_anon_bytes: float) -> ScalePoint:
        self._step("filling")
        fill_s = self._fill()
        self._step("matching")
        hit_us, many_us, unshared_us, miss_us, prompt_us, chains = self._match()
        self._step("memory")
        memory = _in_child("memory", self._directory, self._blocks)
        self._check(memory["live_blocks"])
        self._step("index")
        index = _in_child("index", self._directory, self._blocks)
        self._check(index["blocks"])
        self._step("starting")
        clean_s, port_s, ready_s = self._start()
        self._step("reclaiming")
        return ScalePoint(
            blocks=self._blocks,
            fill_us_per_block=fill_s / self._blocks * 1e6,
            match1024_hit_us_p50=hit_us,
            match_chains=chains,
            match1024_hit_many_us_p50=many_us,
            match1024_hit_unshared_us_p50=unshared_us,
            match1024_miss_us_p50=miss_us,
            match1024_prompt_us_p50=prompt_us,
            rss_anon_bytes_per_block=(memory["anon_bytes"] - empty_anon_bytes) / self._blocks,
            index_bytes_per_block=index["file_bytes"] / self._blocks,
            index_bytes_written_per_block=index["kernel_bytes"] / self._blocks,
            index_bytes_handed_per_block=index["handed_bytes"] / self._blocks,
            start_clean_s=clean_s,
            start_kill9_port_s=port_s,
            start_kill9_ready_s=ready_s,
            reclaim_blocks_per_s=self._reclaim(),
        )

    def _check(self, counted: float) -> None:
        if counted != self._blocks:
            raise VerificationError(f"{self._blocks} blocks were stored, {counted:.0f} are there")

    def _fill(self) -> float:
        store = open_store(self._directory, self._blocks)
        try:
            start_s = time.perf_counter()
            fill(store, self._conversations, lambda _: None)
            return time.perf_counter() - start_s
        finally:
            store.close()

    def _match(self) -> tuple[float, float, float | None, float, float, int]:
        whole = self._conversations.whole()
        chosen = random.Random(self._conversations.seed).sample(whole, min(_MATCH_CHAINS, len(whole)))
        shared = [number for number in chosen if self._conversations.shares_prompt(number)]
        unshared = [number for number in chosen if not self._conversations.shares_prompt(number)]
        # A chain's number modulo four tells whether it begins with the prompt.
        strangers = [_STRANGERS + 4 * number for number in range(len(chosen))]
        store = open_store(self._directory, self._blocks)
        try:
            matcher = _Matcher(store, scale_namespace(store), self._conversations)
            hit_us = matcher.p50_us(shared[:_SAME_CHAINS], CHAIN_BLOCKS)
            many_us = matcher.p50_us(shared, CHAIN_BLOCKS)
            unshared_us = matcher.p50_us(unshared, CHAIN_BLOCKS) if unshared else None
            prompt_us = matcher.p50_us(strangers, PROMPT_BLOCKS)
            miss_us = matcher.p50_us([number + 1 for number in strangers], 0)
        finally:
            store.close()
        return hit_us, many_us, unshared_us, miss_us, prompt_us, len(chosen)

    def _start(self) -> tuple[float, float, float]:
        """After clean stops and after kills in turn; medians. Every killed server leaves a segment that it was filling."""
        clean, killed = [], []
        for _ in range(_STARTS):
            with self._server() as start:
                clean.append(start)
                _put_some(start.target, len(clean))
                start.process.kill()
                start.process.wait()
            with self._server() as start:
                killed.append(start)
        return (
            median(start.ready_s for start in clean),
            median(start.port_s for start in killed),
            median(start.ready_s for start in killed),
        )

    def _server(self) -> contextlib.AbstractContextManager[Start]:
        capacity = store_config(self._blocks).capacity
        return started_server(self._directory, capacity, self._directory.with_name("server.log"))

    def _reclaim(self) -> float:
        """Three chains of five are deleted among those that fill a few segments, and what is left in these is moved together.

        Blocks a second, those moved and those dropped.
        """
        keep_freed_buffers()  # as the server does
        store = open_store(self._directory, self._blocks)
        try:
            namespace = scale_namespace(store)
            before = _blocks_by_segment(self._directory)
            self._delete(store, namespace)
            start_s = time.perf_counter()
            reclaimed = -1
            while (now := store.counters.snapshot()["segments_reclaimed"]) != reclaimed:
                reclaimed = now
                store.sweep()
            took_s = time.perf_counter() - start_s
            after = _blocks_by_segment(self._directory)
        finally:
            store.close()
        return sum(blocks for name, blocks in before.items() if name not in after) / took_s

    def _delete(self, store: LocalStore, namespace: Namespace) -> None:
        per_segment = store_config(self._blocks).segment_size // BLOCK_BYTES
        left = min(self._blocks, _RECLAIM_SEGMENTS * per_segment)
        for number, first, end in self._conversations.stored():
            left -= end - first
            if left < 0:
                break
            if number % 5 < _DELETED_SHARE * 5:
                store.delete(namespace, self._conversations.chain(number), first, end - first)


class _Matcher:
    def __init__(self, store: LocalStore, namespace: Namespace, conversations: Conversations) -> None:
        self._store, self._namespace, self._conversations = store, namespace, conversations

    def p50_us(self, numbers: Sequence[int], expected_blocks: int) -> float:
        """Match each conversation in turn, once to warm up, and then as often as gives enough times."""
        chains = [self._conversations.chain(number) for number in numbers]
        for chain in chains:
            self._match(chain, expected_blocks)
        passes = max(_MATCH_PASSES_MIN, -(-_MATCHES_MIN // len(chains)))
        return median(self._match(chain, expected_blocks) for _ in range(passes) for chain in chains)

    def _match(self, chain: Chain, expected_blocks: int) -> float:
        start_s = time.perf_counter()
        match = self._store.match(self._namespace, chain, lease_s=_LEASE_S)
        took_s = time.perf_counter() - start_s
        if match.hit_length_blocks != expected_blocks:
            raise VerificationError(f"match found {match.hit_length_blocks} blocks, there are {expected_blocks}")
        return took_s * 1e6


def _put_some(target: str, number: int) -> None:
    """A few blocks through the server, so that it has a segment open."""
    with KVStoreClient(ClientConfig(target=target)) as client:
        handle = client.namespace(namespace_spec("open segment", BLOCK_BYTES))
        chain = handle.chain([number] * (_OPEN_SEGMENT_BLOCKS * 128))
        report = handle.put(chain, bytes(len(chain) * BLOCK_BYTES), budget_s=CALL_BUDGET_S)
        if report.stored != len(chain):
            raise VerificationError(f"put stored {report.stored} of {len(chain)} blocks: {report.failure}")


def _blocks_by_segment(directory: Path) -> dict[str, int]:
    """How many payloads each segment file of the directory reaches over; one that only waits for a lease is not counted."""
    found = {}
    for path in (directory / "segments").glob("*.seg"):
        with path.open("rb") as file:
            page = file.read(fmt.HEADER_BYTES)
            size = file.seek(0, 2)
        header = fmt.SegmentHeader.decode(page, path.name)
        if int.from_bytes(page[fmt.STATE_OFFSET : fmt.STATE_OFFSET + 4], "little") != fmt.STATE_RETIRED:
            found[path.name] = (size - fmt.Layout(header.row_capacity).payload_offset) // BLOCK_BYTES
    return found


def _in_child(what: str, directory: Path, blocks: int) -> dict[str, float]:
    command = [sys.executable, "-m", "kvstore_bench.scale_child", what, str(directory), str(blocks)]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), check=False)
    if done.returncode:
        raise ProcessError(f"measuring {what} ended with {done.returncode}:\n{done.stderr.strip()[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout)
    return result
