"""kvstore-bench hitrate: what hit rate so much SSD and these TTLs give."""

from __future__ import annotations

import signal
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from kvstore.config import CLASS_NAME, DEFAULT_TRAFFIC_CLASSES
from kvstore.traffic import MAX_TTL_S
from kvstore_api.limits import MAX_BLOCK_BYTES
from kvstore_bench.errors import InputError
from kvstore_bench.hitrate.options import parse_by_class, parse_shares, parsed
from kvstore_bench.hitrate.report_text import print_hitrate_report
from kvstore_bench.hitrate.result import DEFINITION, HitRateReport
from kvstore_bench.hitrate.sources import TRACES_VARIABLE, SourceOptions, load_workload
from kvstore_bench.hitrate.study import POLICY, REPLAYS, SWEEPS, Configuration, Study, sweep_configurations
from kvstore_bench.hitrate.workload import Workload, WorkloadError
from kvstore_bench.machine import describe_commit, describe_machine
from kvstore_bench.options import DataDir, JsonFile, check_directory, check_writable, write_json, write_result
from kvstore_bench.processes import interrupt
from kvstore_bench.report import utc_now
from kvstore_bench.units import DAY_S, parse_bytes, parse_duration, parse_share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_REDRAW_S: Final = 0.1
BYTES_PER_TOKEN: Final = 896  # the reference layout's: 112 KiB per 128 tokens


def hitrate(
    workload: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE", help="A workload by name, a parameter file, a public trace or a request log."
        ),
    ] = "mixed",
    capacity_share: Annotated[
        str,
        typer.Option(
            metavar="SHARE,…", help="Capacity as a share of the workload's unique blocks; several: a row each."
        ),
    ] = "0.1",
    ttl: Annotated[
        list[str] | None,
        typer.Option(metavar="CLASS=TIME", help="Time to live of a class, e.g. chatbot=7d; repeat for more."),
    ] = None,
    class_share: Annotated[
        list[str] | None, typer.Option(metavar="CLASS=SHARE", help="Share of the capacity that is a class's own.")
    ] = None,
    sweep: Annotated[
        list[str] | None, typer.Option(metavar="|".join(SWEEPS), help="Also run a sweep; repeat for more.")
    ] = None,
    replay: Annotated[
        str,
        typer.Option(
            metavar="|".join(REPLAYS), help="What replays: a fast model, the store itself, or a server over gRPC."
        ),
    ] = "simulator",
    warm_up: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Time from the begin on that is not counted; the workload's own if not given."
        ),
    ] = None,
    block_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes of a block; 896 per token if not given. The server needs real disk."),
    ] = None,
    traces: Annotated[
        Path | None, typer.Option(metavar="DIR", envvar=TRACES_VARIABLE, help="Where public traces lie.")
    ] = None,
    block_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of a block of a request log.")] = 128,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FILE", help="tokenizer.json for a request log with texts.")
    ] = None,
    default_class: Annotated[
        str, typer.Option(metavar="CLASS", help="Class of requests in a file that name none.")
    ] = "agent",
    seed: Annotated[int, typer.Option(metavar="N", help="Of a generated workload, 0 or more.")] = 1,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a report with pictures there.")
    ] = None,
    plots: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the pictures there as PNG files.")] = None,
    data_dir: DataDir = None,
    json_file: JsonFile = None,
) -> None:
    """What hit rate so much SSD and these TTLs give, beside LRU, FIFO, Belady's optimum and no limit at all.

    \b
    Workloads:
      mixed, mixed-r2, mixed-r3, tiny   generated: agents and chats over many days
      conversation, synthetic, claude_code   public traces, found with --traces
      FILE.toml   parameters for the generator
      FILE.jsonl, .gz, .zst   a request log, or a public trace

    Example: kvstore-bench hitrate --capacity-share 0.05,0.1 --ttl chatbot=3d --sweep capacity --html report.html
    """
    asked = _Asked(capacity_share, ttl or [], class_share or [], sweep or [], replay, warm_up, block_bytes)
    outputs = _Outputs(json_file, html_file, plots)
    options = SourceOptions(traces, seed, block_tokens, default_class, tokenizer)
    _check_choices(asked, options)
    if data_dir is not None:
        check_directory("--data-dir", data_dir)
    outputs.check()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, interrupt)
    try:
        with _screen() as report:
            made = _run(workload, options, asked, data_dir, report)
    except WorkloadError as error:
        raise InputError(str(error), "docs/hit-rate.md says what a workload can be", "BAD_WORKLOAD") from None
    outputs.write(made)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The options that say what is run; texts as they were given."""

    capacity_share: str
    ttl: Sequence[str]
    class_share: Sequence[str]
    sweep: Sequence[str]
    replay: str
    warm_up: str | None
    block_bytes: str | None


def _run(
    name: str, options: SourceOptions, asked: _Asked, data_dir: Path | None, report: Callable[[str, float], None]
) -> HitRateReport:
    workload = load_workload(name, Path(name), options, lambda share: report("reading the workload", share))
    return _make_report(_with_warm_up(workload, asked.warm_up), asked, options.seed, data_dir, report)


def _make_report(
    workload: Workload, asked: _Asked, seed: int, data_dir: Path | None, report: Callable[[str, float], None]
) -> HitRateReport:
    configurations = _configurations(workload, asked)
    block_bytes = _block_bytes(workload, asked.block_bytes)
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=data_dir) as scratch:
        study = Study(workload, asked.replay, Path(scratch), block_bytes)
        for configuration in configurations:
            if not configuration.sweep:
                study.settings(configuration)  # too small a capacity is told before the work
        configurations = [c for c in configurations if study.fits(c)]
        rows = len(configurations)
        results = [study.run(c, _row_report(report, number, rows)) for number, c in enumerate(configurations)]
        machine = describe_machine(Path(scratch))
    return HitRateReport(
        benchmark="hitrate",
        definition=DEFINITION,
        kvstore_version=version("kvstore"),
        commit=describe_commit(),
        time=utc_now(),
        seed=seed if "generator" in workload.origin else None,
        config=_config_facts(asked, block_bytes, configurations[0]),
        machine=machine,
        workload=study.facts(),
        results=results,
    )


def _row_report(report: Callable[[str, float], None], number: int, rows: int) -> Callable[[str, float], None]:
    """Tells how far all rows are by how far one is."""
    return lambda what, share: report(f"{number + 1} of {rows}: {what}", (number + share) / rows)


def _config_facts(asked: _Asked, block_bytes: int, base: Configuration) -> dict[str, object]:
    """What the results have in common, and what the first of them assumes."""
    return {
        "replay": asked.replay,
        "policy": POLICY,
        "block_bytes": block_bytes,
        "capacity_share": asked.capacity_share,
        "ttl": dict(base.ttls_s),
        "class_share": dict(base.class_shares),
        "sweeps": list(asked.sweep),
        "warm_up": asked.warm_up,
    }


def _configurations(workload: Workload, asked: _Asked) -> list[Configuration]:
    """Those asked for, then those of the sweeps, which change the first of them."""
    given = {**_default_ttls_s(), **parse_by_class("--ttl", asked.ttl, workload.classes, parse_duration)}
    missing = [name for name in workload.classes if name not in given]
    if missing:
        raise InputError(f"class {missing[0]!r} of the workload has no TTL", f"give --ttl {missing[0]}=3d")
    ttls_s = {name: int(given[name]) for name in workload.classes}
    for name, ttl_s in ttls_s.items():
        if not 1 <= ttl_s <= MAX_TTL_S:
            raise InputError(f"--ttl {name} is {ttl_s} s", f"give 1s to {MAX_TTL_S // DAY_S}d")
    class_shares = parse_by_class("--class-share", asked.class_share, workload.classes, parse_share)
    if sum(class_shares.values()) > 1:
        raise InputError(
            f"--class-share adds up to {sum(class_shares.values()):g}", "let the shares add up to 1 at most"
        )
    asked_for = [
        Configuration(share, ttls_s, class_shares) for share in parse_shares("--capacity-share", asked.capacity_share)
    ]
    swept = [c for sweep in asked.sweep for c in sweep_configurations(sweep, asked_for[0], workload.classes)]
    return [*asked_for, *swept]


def _default_ttls_s() -> dict[str, float]:
    return {name: traffic_class.ttl_s for name, traffic_class in DEFAULT_TRAFFIC_CLASSES.items()}


def _block_bytes(workload: Workload, text: str | None) -> int:
    size = BYTES_PER_TOKEN * workload.block_tokens if text is None else int(parsed("--block-bytes", text, parse_bytes))
    if not 1 <= size <= MAX_BLOCK_BYTES:
        raise InputError(f"--block-bytes {size} is out of range", f"give 1 to {MAX_BLOCK_BYTES}")
    return size


def _with_warm_up(workload: Workload, text: str | None) -> Workload:
    if text is None:
        return workload
    measured_from_s = float(workload.time_s[0]) + parsed("--warm-up", text, parse_duration)
    if measured_from_s > workload.time_s[-1]:
        lasts_h = (workload.time_s[-1] - workload.time_s[0]) / 3600
        raise InputError(f"--warm-up {text} leaves nothing to measure", f"the workload lasts {lasts_h:.1f} h")
    return replace(workload, measured_from_s=measured_from_s)


def _check_choices(asked: _Asked, options: SourceOptions) -> None:
    parse_shares("--capacity-share", asked.capacity_share)  # before a workload is made for nothing
    if asked.replay not in REPLAYS:
        raise InputError(f"--replay {asked.replay!r} is unknown", f"give one of {', '.join(REPLAYS)}")
    for sweep in asked.sweep:
        if sweep not in SWEEPS:
            raise InputError(f"--sweep {sweep!r} is unknown", f"give one of {', '.join(SWEEPS)}")
    if options.seed < 0:
        raise InputError(f"--seed {options.seed} is out of range", "give 0 or more")
    if not 1 <= options.block_tokens <= 65_536:
        raise InputError(f"--block-tokens {options.block_tokens} is out of range", "give 1 to 65,536")
    if not CLASS_NAME.fullmatch(options.default_class):
        fix = "give a small letter and then small letters, digits, _ and -, 32 at most"
        raise InputError(f"--default-class {options.default_class!r} is no name of a class", fix)


@dataclass(frozen=True, slots=True)
class _Outputs:
    """Where the report goes, beside the terminal."""

    json_file: Path | None
    html_file: Path | None
    plots: Path | None

    def check(self) -> None:
        """Found out before the work, not after it."""
        for option, file in (("--json", self.json_file), ("--html", self.html_file)):
            if file is not None:
                check_writable(option, file)
        if (self.html_file or self.plots) and find_spec("matplotlib") is None:
            fix = "pip install 'kvstore[bench]'"
            raise InputError("pictures need the package matplotlib, which is missing", fix, "MISSING_PACKAGES")
        if self.json_file is not None and self.json_file == self.html_file:
            raise InputError(f"--json and --html are both {str(self.json_file)!r}", "name two files")
        if self.plots is not None and self.plots.exists():
            check_directory("--plots", self.plots)

    def write(self, report: HitRateReport) -> None:
        """All of it."""
        print_hitrate_report(report)
        write_json(self.json_file, report.to_json())
        if self.html_file is not None:
            from kvstore_bench.hitrate.report_html import html_report

            write_result("--html", self.html_file, html_report(report))
        if self.plots is not None:
            from kvstore_bench.hitrate.plots import write_plots

            try:
                write_plots(report, self.plots)
            except OSError as error:
                problem = f"--plots {str(self.plots)!r} cannot be written: {error.strerror}"
                raise InputError(problem, "name a directory that can be made, or is there") from None


@contextmanager
def _screen() -> Iterator[Callable[[str, float], None]]:
    """A bar on stderr, drawn anew when something is told, a few times a second at most."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as progress:
        task = progress.add_task("starting", total=1.0)
        drawn_s = 0.0

        def report(what: str, share: float) -> None:
            nonlocal drawn_s
            progress.update(task, description=what, completed=share)
            if time.monotonic() - drawn_s > _REDRAW_S:
                progress.refresh()
                drawn_s = time.monotonic()

        yield report
