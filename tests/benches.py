"""What tests of kvstore-bench's commands share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore_bench.demo_prompts import conversations

if TYPE_CHECKING:
    from kvstore_bench.demo_prompts import Conversation


def processes_about(directory: Path) -> dict[int, str]:
    """Command lines that name `directory`, by process id."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue  # it has ended meanwhile
        if str(directory).encode() in words:
            found[int(path.parent.name)] = words.decode()
    return found


def short_conversations() -> dict[str, Conversation]:
    """The demos', cut: what is tested with them does not get better with length, only slower."""
    return {
        name: replace(talk, system=talk.system[:900], turns=tuple(turn[-900:] for turn in talk.turns))
        for name, talk in conversations().items()
    }
