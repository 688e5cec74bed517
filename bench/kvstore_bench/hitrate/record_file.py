"""Lines of JSON from a file, plain or compressed; whatever is wrong with one is told with its number and field."""

from __future__ import annotations

import gzip
import io
import json
from typing import TYPE_CHECKING, Any, NoReturn

import zstandard

from kvstore_bench.hitrate.workload import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_READ_BYTES = 1 << 20
_SHOWN = 60  # characters of a bad value
_NUMBER_MAX = 1e15


class Record:
    """The object on one line. What is asked of it and is not there, or not so, is a `WorkloadError`."""

    def __init__(self, where: str, fields: dict[str, Any]) -> None:
        self._where, self._fields = where, fields

    def fail(self, problem: str) -> NoReturn:
        """Raise the error for this line."""
        raise WorkloadError(f"{self._where}: {problem}")

    def names(self) -> set[str]:
        """Names of the fields that are there."""
        return set(self._fields)

    def allow(self, *known: str) -> None:
        """Refuse fields that are none of these: one that is misspelt would be ignored otherwise."""
        for name in self._fields:
            if name not in known:
                self.fail(f"unknown field {name!r}; known are {', '.join(known)}")

    def number(self, name: str, *, at_least: float) -> float:
        """A finite number."""
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not at_least <= value <= _NUMBER_MAX:
            self.fail(f"{name} is {_shown(value)}, wanted is a number from {at_least:g} to {_NUMBER_MAX:g}")
        return float(value)

    def count(self, name: str, *, at_least: int = 0, at_most: int = 2**40) -> int:
        """A whole number."""
        value = self._get(name)
        if not _is_whole(value, at_least, at_most):
            self.fail(f"{name} is {_shown(value)}, wanted is a whole number from {at_least} to {at_most}")
        return int(value)

    def counts(self, name: str, *, at_most: int) -> list[int]:
        """A list of whole numbers from 0 on."""
        values = self.items(name)
        if not set(map(type, values)) <= {int} or (values and not 0 <= min(values) <= max(values) <= at_most):
            position, value = next((i, v) for i, v in enumerate(values) if not _is_whole(v, 0, at_most))
            self.fail(f"{name}[{position}] is {_shown(value)}, wanted is a whole number from 0 to {at_most}")
        return values

    def items(self, name: str) -> list[Any]:
        """A list of anything."""
        value = self._get(name)
        if not isinstance(value, list):
            self.fail(f"{name} is {_shown(value)}, wanted is a list")
        return value

    def is_text(self, name: str) -> bool:
        """Whether the field is a string."""
        return isinstance(self._get(name), str)

    def text(self, name: str) -> str:
        """A string."""
        value = self._get(name)
        if not isinstance(value, str):
            self.fail(f"{name} is {_shown(value)}, wanted is a string")
        try:
            value.encode()
        except UnicodeEncodeError:
            self.fail(f"{name} is {_shown(value)}, which is no valid Unicode")
        return value

    def _get(self, name: str) -> Any:  # noqa: ANN401
        if name not in self._fields:
            self.fail(f"field {name!r} is missing")
        return self._fields[name]


def _is_whole(value: object, at_least: int, at_most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and at_least <= value <= at_most


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def read_records(path: Path, advance: Callable[[float], None] = lambda share: None) -> Iterator[Record]:
    """The objects of a file of JSON lines, plain, `.gz` or `.zst`; empty lines are left out.

    Args: advance: told the share of the file that is read, now and then.
    Raises: WorkloadError: it cannot be read, is cut short, holds no line, or a line is no JSON object.
    """
    count = 0
    for number, line in enumerate(_lines(path, advance), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise WorkloadError(f"{where}: no JSON, the file may be cut short: {error}") from None
        if not isinstance(fields, dict):
            raise WorkloadError(f"{where}: {_shown(fields)} is no JSON object")
        count += 1
        yield Record(where, fields)
    if not count:
        raise WorkloadError(f"{path}: there is no request in it")


def _lines(path: Path, advance: Callable[[float], None]) -> Iterator[str]:
    try:
        with path.open("rb", buffering=0) as file, _decompressed(path, file) as lines:
            size_bytes = max(1, path.stat().st_size)
            for line in lines:
                advance(file.tell() / size_bytes)
                yield line
    except (EOFError, zstandard.ZstdError, gzip.BadGzipFile) as error:
        raise WorkloadError(f"{path}: it is damaged or cut short: {error}") from None
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path}: it is no UTF-8 text: {error}") from None
    except OSError as error:
        raise WorkloadError(f"{path}: it cannot be read: {error.strerror}") from None


def _decompressed(path: Path, file: io.FileIO) -> io.TextIOWrapper:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.GzipFile(fileobj=file), encoding="utf-8")
    raw: io.RawIOBase = _ZstdFile(file) if path.suffix == ".zst" else file
    return io.TextIOWrapper(io.BufferedReader(raw, _READ_BYTES), encoding="utf-8")


class _ZstdFile(io.RawIOBase):
    """Zstandard frames as one stream. Unlike the library's own reader it does not take a cut frame for the end."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._ready = memoryview(b"")
        self._is_inside = True  # an empty file is no frame either

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401  its type differs between versions of typeshed
        """Fill the buffer as far as a chunk reaches. Raises: EOFError: the file ends inside a frame."""
        while not self._ready:
            chunk = self._frame.unused_data if self._frame.eof else b""
            chunk = chunk or self._file.read(_READ_BYTES) or b""
            if not chunk:
                if self._is_inside:
                    raise EOFError("it ends inside a zstd frame")
                return 0
            if self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._ready = memoryview(self._frame.decompress(chunk))
            self._is_inside = not self._frame.eof
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
