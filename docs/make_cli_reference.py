"""Make docs/cli-reference.md from what the commands' --help says; with --check, only tell whether it is up to date.

The text is taken from the commands themselves and not from the printed help, whose layout differs between versions of typer.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvstore.cli import admin, server
from kvstore_bench import cli as bench

if TYPE_CHECKING:
    from collections.abc import Iterator

REFERENCE = Path(__file__).with_name("cli-reference.md")
COMMANDS = {"kvstore-server": server.app, "kvstore-admin": admin.app, "kvstore-bench": bench.app}
_HEAD = """# Command reference

Made from the commands' own help by `python docs/make_cli_reference.py`; do not edit. A test fails when it is out of date.
"""
_VERBATIM_MARK = "\b"  # typer's and click's mark for a paragraph that must not be wrapped


def reference() -> str:
    """The whole page."""
    sections = [_HEAD]
    for name, app in COMMANDS.items():
        sections.extend(_sections(name, typer.main.get_command(app), "##"))
    return "\n".join(sections)


# Commands and parameters are click's or typer's own classes, depending on the version of typer: hence Any.
def _sections(path: str, command: Any, heading: str) -> Iterator[str]:  # noqa: ANN401
    """The command's section, then those of the commands below it."""
    options = [param for param in command.params if param.param_type_name == "option" and not param.hidden]
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    below = getattr(command, "commands", {})
    usage = [path, *(_metavar(argument) for argument in arguments), *(["[options]"] if options else [])]
    if below:
        usage.append("COMMAND" if _needs_command(command) else "[COMMAND]")
    yield f"{heading} {path}\n\n```\n{' '.join(usage)}\n```\n\n{_help_text(command.help)}"
    if arguments:
        yield _table("argument", [(_metavar(argument), _meaning(argument)) for argument in arguments])
    if options:
        yield _table("option", [(_option_words(option), _meaning(option)) for option in options])
    for name, subcommand in below.items():
        yield from _sections(f"{path} {name}", subcommand, "###")


def _needs_command(group: Any) -> bool:  # noqa: ANN401
    return not group.invoke_without_command


def _help_text(text: str) -> str:
    """Paragraphs as Markdown, verbatim ones as code."""
    paragraphs = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith(_VERBATIM_MARK):
            paragraphs.append(f"```\n{paragraph.removeprefix(_VERBATIM_MARK).strip(chr(10))}\n```")
        else:
            paragraphs.append(" ".join(paragraph.split()).replace("<", "\\<"))
    return "\n\n".join(paragraphs) + "\n"


def _table(head: str, rows: list[tuple[str, str]]) -> str:
    lines = [f"| {head} | meaning |", "|---|---|"]
    lines += [f"| `{_cell(words)}` | {_cell(meaning)} |" for words, meaning in rows]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _option_words(option: Any) -> str:  # noqa: ANN401
    names = ", ".join(sorted(option.opts, key=len))
    return names if option.is_flag else f"{names} {_metavar(option)}"


def _metavar(param: Any) -> str:  # noqa: ANN401
    if param.metavar:
        return str(param.metavar)
    if isinstance(param.default, Enum):
        return "|".join(str(choice.value) for choice in type(param.default))
    return str(param.name).upper()


def _meaning(param: Any) -> str:  # noqa: ANN401
    meaning = param.help or ""
    default = param.default.value if isinstance(param.default, Enum) else param.default
    if default is None or param.required or param.is_flag:
        return str(meaning)
    return f"{meaning} Default: `{default}`."


def main() -> int:
    """Write the page, or check it. Returns: the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page is out of date")
    wanted = reference()
    if not parser.parse_args().check:
        REFERENCE.write_text(wanted)
        return 0
    if REFERENCE.exists() and REFERENCE.read_text() == wanted:
        return 0
    print(f"error: {REFERENCE.name} is out of date\nfix: python docs/make_cli_reference.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
