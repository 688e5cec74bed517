"""A workload by its name or file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvstore_bench.hitrate.generator import generate, load_parameters, named_workloads
from kvstore_bench.hitrate.public_traces import PUBLIC_TRACES, find_trace, read_mooncake, read_sessions
from kvstore_bench.hitrate.record_file import read_records
from kvstore_bench.hitrate.request_log import load_tokenizer, read_request_log
from kvstore_bench.hitrate.workload import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvstore_bench.hitrate.workload import Workload

TRACES_VARIABLE: Final = "KVSTORE_BENCH_TRACES"


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """How to read it. `traces`: where public traces lie; the rest is for the user's own logs and for the generator."""

    traces: Path | None
    seed: int
    block_tokens: int
    default_class: str
    tokenizer: Path | None


def known_names() -> list[str]:
    """Names that need no file: of generated workloads, then of public traces."""
    return [*named_workloads(), *PUBLIC_TRACES]


def load_workload(name: str, path: Path, options: SourceOptions, advance: Callable[[float], None]) -> Workload:
    """Make or read a workload.

    Args:
        name: a known name, or that of a file.
        path: the same as a path.
        advance: told the share that is done.
    Raises: WorkloadError.
    """
    generated = named_workloads()
    if name in generated:
        return generate(load_parameters(generated[name]), options.seed, advance)
    if name in PUBLIC_TRACES:
        return _public_trace(name, options, advance)
    if not _is_file(path):
        raise WorkloadError(f"{name} is no file, and no workload of {', '.join(known_names())}")
    if path.suffix == ".toml":
        return generate(load_parameters(path), options.seed, advance)
    return _from_file(path, options, advance)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # too long a name
        return False


def _public_trace(name: str, options: SourceOptions, advance: Callable[[float], None]) -> Workload:
    if options.traces is None:
        raise WorkloadError(f"{name} is a public trace: say where it lies with --traces DIR or {TRACES_VARIABLE}")
    path, traffic_class = find_trace(name, options.traces), PUBLIC_TRACES[name].traffic_class
    read = read_sessions if name == "claude_code" else read_mooncake
    return read(path, name, traffic_class, advance)


def _from_file(path: Path, options: SourceOptions, advance: Callable[[float], None]) -> Workload:
    """Its first line says what kind of file it is."""
    first = next(read_records(path))
    if "hash_ids" in first.names():
        return read_mooncake(path, path.name, options.default_class, advance)
    if "reqs" in first.names():
        return read_sessions(path, path.name, options.default_class, advance)
    return read_request_log(
        path,
        path.name,
        block_tokens=options.block_tokens,
        default_class=options.default_class,
        tokenizer=load_tokenizer(options.tokenizer) if options.tokenizer is not None else None,
        advance=advance,
    )
