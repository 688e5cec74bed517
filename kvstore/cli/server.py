"""`kvstore-server`: run a server, or show the configuration it would run with."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from kvstore.allocator import keep_freed_buffers
from kvstore.cli.admin_errors import CommandError
from kvstore.cli.output import OutputFormat, print_error, printable, whole_output
from kvstore.cli.server_fsck import check_directory
from kvstore.clock import SystemClock
from kvstore.config import Key, LoadedConfig, Setting, load_config
from kvstore.errors import KvStoreError
from kvstore.logs import configure_logs
from kvstore.server import StartError, serve, version


class LogFormat(StrEnum):
    """How the log is written."""

    JSON = "json"
    CONSOLE = "console"


class Output(StrEnum):
    """How a result is written."""

    TABLE = "table"
    JSON = "json"


app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=False,
    context_settings={"max_content_width": 100},
)
config_app = typer.Typer(help="Look at the configuration.", no_args_is_help=True)
app.add_typer(config_app, name="config")

ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="TOML file; see deploy/kvstore.toml for every key.")
]


def _print_version(wanted: bool) -> None:
    if wanted:
        with whole_output():
            print(f"kvstore-server {version()}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def run(
    context: typer.Context,
    config: ConfigOption = None,
    data_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Data directory; made when absent. Default: /var/lib/kvstore.")
    ] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="gRPC address: host:port or unix:/path; port 0 takes any.")
    ] = None,
    capacity: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Cap for the data directory, e.g. 10GiB.")
    ] = None,
    metrics_listen: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address of the Prometheus metrics; empty for none.")
    ] = None,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Allow addresses beyond this machine, without any authentication.")
    ] = False,
    port_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the bound addresses there once the server serves.")
    ] = None,
    log_format: Annotated[LogFormat | None, typer.Option(help="How the log on stderr is written.")] = None,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Keep the KV blocks of prompt prefixes and serve them over gRPC, until SIGTERM or SIGINT.

    Settings come from defaults, the configuration file, KVSTORE_<SECTION>__<KEY> in the environment and these flags; later
    ones win. Exit codes: 0 ended in order, 1 error, 2 usage.

    Example: kvstore-server --data-dir /data/kvstore --capacity 100GiB
    """
    flags: list[tuple[Key, str, object]] = [
        (("server", "data_dir"), "--data-dir", data_dir),
        (("server", "listen"), "--listen", listen),
        (("store", "capacity"), "--capacity", capacity),
        (("server", "metrics_listen"), "--metrics-listen", metrics_listen),
        (("server", "allow_remote"), "--allow-remote", allow_remote or None),
        (("server", "port_file"), "--port-file", port_file),
        (("log", "format"), "--log-format", log_format and log_format.value),
    ]
    settings = [Setting(key, value, f"flag {flag}") for key, flag, value in flags if value is not None]
    context.obj = (config, settings)
    if context.invoked_subcommand is None:
        _serve(_load(config, settings))


@config_app.command("show")
def show(
    context: typer.Context,
    config: ConfigOption = None,
    output: Annotated[
        Output, typer.Option("--output", "-o", help="Table for people, JSON for scripts.")
    ] = Output.TABLE,
) -> None:
    """Print every key, its value and where it came from. Takes the server's flags before `config`.

    In JSON, values are numbers, booleans and strings; sizes are in bytes. Exit codes: as of the server, and 141 when
    whoever read the output went away.

    Example: kvstore-server --capacity 1TiB config show --config kvstore.toml
    """
    file, settings = context.obj
    loaded = _load(config or file, settings)
    with whole_output():
        if output is Output.JSON:
            rows = [{"key": s.name, "value": s.plain, "origin": s.origin} for s in loaded.settings]
            print(json.dumps(rows, indent=2))
        else:
            _print_table(loaded)


@app.command("fsck")
def fsck(
    context: typer.Context,
    data_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Data directory to check. Default: as the server's.")
    ] = None,
    output: Annotated[
        OutputFormat, typer.Option("--output", "-o", help="Table for people, JSON for scripts.")
    ] = OutputFormat.TABLE,
) -> None:
    """Check a data directory that no server runs on, and say what the next start does about each thing that is wrong.

    Catalog, segment headers, rows, payload checksums, and the index against the rows both ways. Blocks that have expired, were
    deleted or dropped are not read. Nothing is changed. Progress goes to stderr, the result to stdout.

    \b
    Exit codes:
        0  clean
        1  error: the directory cannot be read
        2  wrong usage
        4  not a data directory of kvstore
        5  a server runs on it; it is named
        6  written in another format version
        9  damage found

    Example: kvstore-server fsck --data-dir /data/kvstore
    """
    if data_dir is None:
        file, settings = context.obj
        directory = _load(file, settings).config.server.data_dir
    else:
        directory = Path(data_dir)
    check_directory(directory, SystemClock(), output)


def _print_table(loaded: LoadedConfig) -> None:
    key_width = max(len(setting.name) for setting in loaded.settings)
    value_width = max(len(setting.text) for setting in loaded.settings)
    for setting in loaded.settings:
        print(printable(f"{setting.name:<{key_width}}  {setting.text or '-':<{value_width}}  {setting.origin}"))


def _load(path: Path | None, flags: list[Setting]) -> LoadedConfig:
    try:
        return load_config(path, flags, os.environ)
    except KvStoreError as error:
        _fail(error.reason, error)


def _serve(loaded: LoadedConfig) -> None:
    configure_logs(loaded.config.log)
    keep_freed_buffers()
    try:
        asyncio.run(serve(loaded.config, SystemClock()))
    except (KvStoreError, StartError) as error:
        _fail(error.reason, error)


def _fail(reason: str, error: Exception) -> NoReturn:
    print(f"error: {error} [{reason}]", file=sys.stderr)
    raise typer.Exit(1)


def main() -> None:
    """Run the process's command line."""
    try:
        app()
    except CommandError as error:
        print_error(error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
