"""kvstore-admin: the operators' command. One file per noun beside this one; `output.py` prints what they return."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.cli import admin_block, admin_namespace, admin_quota, admin_ttl
from kvstore.cli.admin_client import Session
from kvstore.cli.admin_errors import CommandError, ExitCode
from kvstore.cli.admin_evict import evict
from kvstore.cli.admin_status import status
from kvstore.cli.admin_values import check_address, parse_duration
from kvstore.cli.admin_verify import verify
from kvstore.cli.output import OutputFormat, Result, emit, print_error, whole_output

if TYPE_CHECKING:
    from collections.abc import Sequence

_HELP = """Look after a kvstore server.

JSON on stdout (-o json) is for scripts and stays stable; tables may change. Errors go to stderr. What evicts or drops
says what it would do, and does it with --yes. The options below may also stand after the command.

\b
Exit codes:
    0  done
    1  error
    2  wrong usage
    4  not found: what was named is not there, or nothing matched
    5  unavailable: no server, no answer in time, or it is too busy
    9  corruption found
  130  interrupted
  141  whoever read the output went away

Example: kvstore-admin --server 127.0.0.1:7420 status
"""

_TAKES_VALUE = ("--server", "--output", "-o", "--timeout")


def _show(result: Result, output: OutputFormat, **_: object) -> None:
    emit(result, output)
    complaint = result.complaint()
    if complaint is not None:
        raise complaint


# Plain help: the reference in docs/ is made of it, and it reads the same in a terminal and in a log.
app = typer.Typer(
    name="kvstore-admin",
    help=_HELP,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    result_callback=_show,
)
app.command("status")(status)
app.add_typer(admin_namespace.app, name="namespace")
app.add_typer(admin_ttl.app, name="ttl")
app.add_typer(admin_quota.app, name="quota")
app.command("evict")(evict)
app.add_typer(admin_block.app, name="block")
app.command("verify")(verify)


def _print_version(wanted: bool) -> None:
    if wanted:
        with whole_output():
            print(f"kvstore-admin {version('kvstore')}")
        raise typer.Exit


@app.callback()
def global_options(
    ctx: typer.Context,
    server: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the server listens; unix:/PATH for a socket.")
    ] = "127.0.0.1:7420",
    output: Annotated[OutputFormat, typer.Option("--output", "-o", help="What to print.")] = OutputFormat.TABLE,
    timeout: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="How long to wait for the answer; 10s unless said, 10m for evict and drop, no limit for verify.",
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    ctx.obj = Session(
        server=check_address(server),
        timeout_s=None if timeout is None else parse_duration(timeout, "--timeout"),
        output_format=output,
    )


def globals_first(args: Sequence[str]) -> list[str]:
    """`args` with the global options moved to the front, so that they may stand after the command as well."""
    moved: list[str] = []
    rest: list[str] = []
    remaining = list(args)
    while remaining:
        arg = remaining.pop(0)
        if arg == "--":
            rest += [arg, *remaining]
            break
        if arg in _TAKES_VALUE and remaining:
            moved += [arg, remaining.pop(0)]
        elif arg.startswith(tuple(f"{name}=" for name in _TAKES_VALUE if name.startswith("--"))):
            moved.append(arg)
        else:
            rest.append(arg)
    return moved + rest


def main(args: Sequence[str] | None = None) -> None:
    """Run a command line, the process's own unless one is given, and exit."""
    try:
        app(args=globals_first(sys.argv[1:] if args is None else args), prog_name="kvstore-admin")
    except CommandError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)


if __name__ == "__main__":
    main()
