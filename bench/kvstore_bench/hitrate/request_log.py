"""Reader of a request log of the user's own: JSON lines, a request each, in the order of their times.

    {"timestamp": 12.5, "class": "chatbot", "session": "c1", "tokens": [15496, 995]}
    {"timestamp": "2026-11-30T08:15:00Z", "block_hashes": ["9f1c", "03ab"], "input_tokens": 300}
    {"timestamp": 14, "text": "You are a helpful assistant. …"}

`timestamp` is seconds from any zero, or a time in ISO 8601. One of `tokens` (ids), `block_hashes` (strings or numbers, one per full
block; it does not matter whether a hash covers the blocks before it) and `text` (with a tokenizer) says what was asked. All else is
optional: `class`, `session`, `salt` (requests with different salts share nothing), and `input_tokens` beside `block_hashes`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore.config import CLASS_NAME
from kvstore.traffic import MAX_TRAFFIC_CLASSES
from kvstore_api.limits import MAX_CHAIN_BLOCKS
from kvstore_bench.hitrate.chains import ChainCollector
from kvstore_bench.hitrate.public_traces import file_origin
from kvstore_bench.hitrate.record_file import read_records
from kvstore_bench.hitrate.workload import NO_SESSION, WorkloadError
from kvstore_client.hashing import prefix_hashes, prefix_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from pathlib import Path

    from kvstore_bench.hitrate.record_file import Record
    from kvstore_bench.hitrate.workload import Workload

_FIELDS: Final = ("timestamp", "class", "session", "salt", "tokens", "block_hashes", "text", "input_tokens")
_WHAT: Final = ("tokens", "block_hashes", "text")
_TOKEN_MAX: Final = 2**32 - 1
_SECONDS_MAX: Final = 1e11  # of the year 5138
# Any namespace will do: what counts is which blocks are equal.
_NAMESPACE: Final = bytes(32)


def read_request_log(
    path: Path,
    name: str,
    *,
    block_tokens: int,
    default_class: str,
    tokenizer: Callable[[str], Sequence[int]] | None = None,
    advance: Callable[[float], None] = lambda share: None,
) -> Workload:
    """The log's requests.

    Args:
        default_class: of requests that name none.
        tokenizer: makes token ids of a request's text.
    Raises: WorkloadError: names file, line and field.
    """
    log = _RequestLog(block_tokens, default_class, tokenizer)
    for record in read_records(path, advance):
        log.add(record)
    return log.workload(name, file_origin(path))


class _RequestLog:
    def __init__(self, block_tokens: int, default_class: str, tokenizer: Callable[[str], Sequence[int]] | None) -> None:
        self._block_tokens, self._default_class, self._tokenizer = block_tokens, default_class, tokenizer
        self._classes: dict[str, int] = {}
        self._sessions: dict[str, int] = {}
        self._behind: dict[tuple[object, Hashable], int] = {}  # numbers of block hashes behind what is before them
        self._requests: list[tuple[float, int, Sequence[Hashable], int, int]] = []
        self._previous_s = -float("inf")

    def add(self, record: Record) -> None:
        """A line."""
        record.allow(*_FIELDS)
        time_s = self._time_s(record)
        tokens, names = self._asked(record)
        self._requests.append((time_s, tokens, names, self._class(record), self._session(record)))

    def workload(self, name: str, origin: dict[str, object]) -> Workload:
        """All of them."""
        chains = ChainCollector(list(self._classes))
        for time_s, tokens, names, class_id, session in self._requests:
            chains.add(time_s, tokens, names, class_id=class_id, session=session)
        return chains.workload(name, self._block_tokens, origin)

    def _time_s(self, record: Record) -> float:
        time_s = _time_s(record)
        if time_s < self._previous_s:
            record.fail(f"timestamp is {time_s:.3f} s, {self._previous_s - time_s:.3f} s before the request above it")
        self._previous_s = time_s
        return time_s

    def _class(self, record: Record) -> int:
        name = record.text("class") if "class" in record.names() else self._default_class
        if not CLASS_NAME.fullmatch(name):
            record.fail(
                f"class is {name!r}, wanted are a small letter and then small letters, digits, _ and -, 32 at most"
            )
        number = self._classes.setdefault(name, len(self._classes))
        if number >= MAX_TRAFFIC_CLASSES:
            record.fail(f"class {name!r} is one more than the {MAX_TRAFFIC_CLASSES} that a store can have")
        return number

    def _session(self, record: Record) -> int:
        if "session" not in record.names():
            return NO_SESSION
        return self._sessions.setdefault(record.text("session"), len(self._sessions))

    def _asked(self, record: Record) -> tuple[int, Sequence[Hashable]]:
        """Input tokens, and a name for each full block."""
        given = [name for name in _WHAT if name in record.names()]
        if len(given) != 1:
            record.fail(f"{' and '.join(given) or 'nothing'} given, wanted is one of {', '.join(_WHAT)}")
        if given[0] == "block_hashes":
            return self._asked_hashes(record)
        if "input_tokens" in record.names():
            record.fail(f"input_tokens is for block_hashes; {given[0]} says how many there are")
        tokens = record.counts("tokens", at_most=_TOKEN_MAX) if given[0] == "tokens" else self._tokens_of_text(record)
        salt = record.text("salt").encode() if "salt" in record.names() else b""
        self._check_length(record, given[0], len(tokens) // self._block_tokens)
        return len(tokens), list(
            prefix_hashes(prefix_seed(_NAMESPACE, salt=salt), np.array(tokens, dtype=np.uint32), self._block_tokens)
        )

    def _check_length(self, record: Record, field: str, blocks: int) -> None:
        if blocks > MAX_CHAIN_BLOCKS:
            record.fail(f"{field} makes {blocks} blocks, a chain has at most {MAX_CHAIN_BLOCKS}")

    def _tokens_of_text(self, record: Record) -> Sequence[int]:
        if self._tokenizer is None:
            record.fail("text needs a tokenizer; give --tokenizer FILE")
        return self._tokenizer(record.text("text"))

    def _asked_hashes(self, record: Record) -> tuple[int, Sequence[Hashable]]:
        hashes = record.items("block_hashes")
        tokens = len(hashes) * self._block_tokens
        if "input_tokens" in record.names():
            tokens = record.count("input_tokens")
        if tokens // self._block_tokens != len(hashes):
            full = f"input_tokens {tokens} makes {tokens // self._block_tokens} full blocks"
            record.fail(f"block_hashes has {len(hashes)} hashes, {full}")
        self._check_length(record, "block_hashes", len(hashes))
        before: object = record.text("salt") if "salt" in record.names() else ""
        numbers: list[Hashable] = []
        for position, block_hash in enumerate(hashes):
            if isinstance(block_hash, bool) or not isinstance(block_hash, str | int):
                record.fail(f"block_hashes[{position}] is {block_hash!r:.60}, wanted is a string or a whole number")
            before = self._behind.setdefault((before, block_hash), len(self._behind))
            numbers.append(before)
        return tokens, numbers


def _time_s(record: Record) -> float:
    if not record.is_text("timestamp"):
        time_s = record.number("timestamp", at_least=0)
        if time_s > _SECONDS_MAX:
            record.fail(f"timestamp is {time_s:g}, wanted are seconds; these look like milliseconds")
        return time_s
    text = record.text("timestamp")
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        record.fail(f"timestamp is {text!r:.60}, wanted are seconds or a time in ISO 8601")
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def load_tokenizer(path: Path) -> Callable[[str], Sequence[int]]:
    """The tokenizer in a `tokenizer.json`. Raises: WorkloadError: it is none, or the package is missing."""
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise WorkloadError("--tokenizer needs the package tokenizers: pip install tokenizers") from None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no type of its own for it
        raise WorkloadError(f"{path}: this is no tokenizer: {error}") from None
    return lambda text: tokenizer.encode(text).ids
