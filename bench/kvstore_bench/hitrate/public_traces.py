"""Readers of public request traces. The files are not part of the project; docs/hit-rate.md says where each comes from."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvstore_bench.hitrate.chains import BrokenNamesError, ChainCollector
from kvstore_bench.hitrate.record_file import read_records
from kvstore_bench.hitrate.workload import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from kvstore_bench.hitrate.record_file import Record
    from kvstore_bench.hitrate.workload import Workload

MOONCAKE_BLOCK_TOKENS: Final = 512
SESSION_ID_TOKENS: Final = 64
BLOCK_TOKENS: Final = 128
# Start times of the sessions are not published. They are drawn evenly from so long a stretch, in the order of the file.
SESSIONS_SPREAD_S: Final = 6 * 3600.0
SESSIONS_SEED: Final = 1
_ID_MAX: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PublicTrace:
    """One that is known by name. `files`: where it may lie in the directory of traces."""

    files: tuple[str, ...]
    traffic_class: str


PUBLIC_TRACES: Final = {
    "conversation": PublicTrace(
        ("mooncake/conversation_trace.jsonl.zst", "mooncake/conversation_trace.jsonl", "conversation_trace.jsonl"),
        "chatbot",
    ),
    "synthetic": PublicTrace(
        ("mooncake/synthetic_trace.jsonl.zst", "mooncake/synthetic_trace.jsonl", "synthetic_trace.jsonl"), "agent"
    ),
    "claude_code": PublicTrace(
        ("claude_code/cc_sessions_compact.jsonl.zst", "cc_sessions_compact.jsonl.zst", "cc_sessions_compact.jsonl"),
        "agent",
    ),
}


def find_trace(name: str, directory: Path) -> Path:
    """The file of a public trace. Raises: WorkloadError: it is not there."""
    files = PUBLIC_TRACES[name].files
    for file in files:
        if (directory / file).is_file():
            return directory / file
    raise WorkloadError(f"{directory} holds no {' and no '.join(files)}; docs/hit-rate.md says where it comes from")


def read_mooncake(
    path: Path, name: str, traffic_class: str, advance: Callable[[float], None] = lambda share: None
) -> Workload:
    """A trace of the Mooncake project (FAST'25): an id for each 512 tokens, and one for what is left at a prompt's end.

    The last block is taken as it is, with the tokens that it has: so are the hit rates that are published for these traces.
    Raises: WorkloadError: names file, line and field.
    """
    chains = ChainCollector([traffic_class])
    previous_s = 0.0
    for record in read_records(path, advance):
        record.allow("timestamp", "input_length", "output_length", "hash_ids")
        time_s = record.number("timestamp", at_least=0) / 1000
        if time_s < previous_s:
            record.fail(f"timestamp is {time_s:g} s, less than {previous_s:g} s on the line before")
        previous_s = time_s
        input_tokens = record.count("input_length", at_least=1)
        record.count("output_length")
        ids = record.counts("hash_ids", at_most=_ID_MAX)
        if not input_tokens // MOONCAKE_BLOCK_TOKENS <= len(ids) <= -(-input_tokens // MOONCAKE_BLOCK_TOKENS):
            record.fail(f"hash_ids has {len(ids)} ids, input_length {input_tokens} makes blocks of 512 tokens")
        try:
            chains.add(time_s, input_tokens, ids)
        except BrokenNamesError as error:
            record.fail(f"hash_ids: {error}")
    return chains.workload(name, MOONCAKE_BLOCK_TOKENS, file_origin(path))


def read_sessions(
    path: Path,
    name: str,
    traffic_class: str,
    advance: Callable[[float], None] = lambda share: None,
    *,
    spread_s: float = SESSIONS_SPREAD_S,
    seed: int = SESSIONS_SEED,
) -> Workload:
    """Coding-agent sessions of kv-cache-tester in their compact form: ids of 64 tokens, of which two make a block.

    Sessions with equal sizes of tool schemas and system prompt share the blocks of these; sub-agents share none.
    Args: spread_s: sessions start at times drawn evenly from so many seconds.
    Raises: WorkloadError: names file, line and field.
    """
    sessions = list(read_records(path, advance))
    begins_s = np.random.default_rng(seed).uniform(0, spread_s, len(sessions))
    chains = ChainCollector([traffic_class])
    prompts: dict[tuple[int, int], int] = {}
    for number, record in enumerate(sessions):
        _Session(record, number, prompts).add_to(chains, float(begins_s[number]))
    origin = {**file_origin(path), "sessions_spread_s": spread_s, "sessions_seed": seed}
    return chains.workload(name, BLOCK_TOKENS, origin)


# Seconds since the session's start, input tokens, whether a sub-agent asks, ids kept of the request before, runs behind them.
_Request = tuple[float, int, bool, int, "list[NDArray[np.int64]]"]


class _Session:
    """One line: a conversation, request by request, each told by how it differs from the one before."""

    def __init__(self, record: Record, number: int, prompts: dict[tuple[int, int], int]) -> None:
        record.allow("id", "src", "bs", "tool", "sys", "models", "reqs")
        self._record, self._number = record, number
        if record.count("bs", at_least=1) != SESSION_ID_TOKENS:
            record.fail(f"bs is {record.count('bs')}, wanted are {SESSION_ID_TOKENS} tokens an id")
        sizes = record.count("tool"), record.count("sys")
        self._prompt = prompts.setdefault(sizes, len(prompts))
        self._prompt_ids = sum(sizes) // SESSION_ID_TOKENS

    def add_to(self, chains: ChainCollector, begin_s: float) -> None:
        """Its requests, from `begin_s` on."""
        ids = np.zeros(0, dtype=np.int64)
        blocks, was_sub = np.zeros(0, dtype=np.int32), False
        for position, request in enumerate(self._record.items("reqs")):
            seconds, tokens, is_sub, kept, runs = self._parse(position, request, len(ids))
            ids = np.concatenate([ids[:kept], *runs])
            if len(ids) != tokens // SESSION_ID_TOKENS:
                self._fail(position, f"runs make {len(ids)} ids, in is {tokens} tokens")
            behind = blocks[: kept // 2 if is_sub == was_sub else 0]
            names = self._names(ids, len(behind), is_sub=is_sub)
            try:
                blocks = chains.add(begin_s + seconds, tokens, names, behind=behind, session=self._number)
            except BrokenNamesError as error:
                self._fail(position, str(error))
            was_sub = is_sub

    def _parse(self, position: int, request: Any, ids: int) -> _Request:  # noqa: ANN401
        if not isinstance(request, list) or len(request) != 10:
            self._fail(position, "it is no list of 10 entries")
        seconds, tokens, _, sub, begin_s, _, _, _, kept, runs = request
        for what, value in (("t", seconds), ("in", tokens), ("sub", sub), ("t0", begin_s), ("lcp", kept)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**40:
                self._fail(position, f"{what} is {value!r}, wanted is a number from 0 on")
        if not isinstance(kept, int) or kept > ids:
            self._fail(position, f"lcp is {kept}, the request before has {ids} ids")
        if not isinstance(runs, list) or len(runs) % 2 or not all(type(n) is int and 0 <= n <= _ID_MAX for n in runs):
            self._fail(position, "runs is no list of starts and lengths")
        ranges = [np.arange(first, first + count) for first, count in zip(runs[::2], runs[1::2], strict=True)]
        return (begin_s if sub else 0) + seconds, int(tokens), sub > 0, kept, ranges

    def _names(self, ids: NDArray[np.int64], first_block: int, *, is_sub: bool) -> list[int]:
        """A block is named by the second of its two ids, which names all before it as well."""
        second = np.arange(2 * first_block + 1, len(ids), 2)
        own = (self._number + 1) << 32 | ids[second]
        shared = -(self._prompt << 32 | second) - 1
        names: list[int] = np.where(second < (0 if is_sub else self._prompt_ids), shared, own).tolist()
        return names

    def _fail(self, position: int, problem: str) -> None:
        self._record.fail(f"reqs[{position}]: {problem}")


def file_origin(path: Path) -> dict[str, object]:
    """What a report says of the file."""
    digest = sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except OSError as error:
        raise WorkloadError(f"{path}: it cannot be read: {error.strerror}") from None
    return {"file": path.name, "sha256": digest.hexdigest()}
