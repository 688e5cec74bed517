"""The demo's conversations: multi-turn chats and tool-using agents over documents that ship with Python.

Each prompt has over 2,000 tokens. A later turn is the whole history once more, with the model's own answers in it, plus
something new: what chat and agent front ends send, and why a prefix cache pays.
"""

from __future__ import annotations

import difflib
import glob
import inspect
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Message = dict[str, str]  # "role" and "content"

_TOOLS: tuple[Callable[..., object], ...] = (
    os.walk,
    shutil.copytree,
    shutil.move,
    shutil.make_archive,
    glob.glob,
    subprocess.run,
    json.dumps,
    difflib.unified_diff,
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """What one user or agent says over time. The model's answers come in between."""

    name: str
    traffic_class: str
    system: str  # "" for the model's own default
    turns: tuple[str, ...]

    def messages(self, turn: int, answers: Sequence[str]) -> list[Message]:
        """The prompt of a turn, counted from 0, given the model's answers to the turns before it."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for index, text in enumerate(self.turns[: turn + 1]):
            messages.append({"role": "user", "content": text})
            if index < turn:
                messages.append({"role": "assistant", "content": answers[index]})
        return messages


# Requests in the order in which they arrive, as (conversation, turn). Conversations are interleaved as in real traffic,
# and the first few requests have a bit of everything.
SCHEDULE = (
    ("chat-1", 0),
    ("agent-1", 0),
    ("chat-1", 1),
    ("agent-2", 0),
    ("chat-2", 0),
    ("agent-1", 1),
    ("chat-2", 1),
    ("agent-2", 1),
)


def conversations() -> dict[str, Conversation]:
    """All conversations of `SCHEDULE` by name. The two agents share one long system prompt."""
    agent = _agent_system()
    return {
        conversation.name: conversation
        for conversation in (
            Conversation(
                "chat-1",
                "chatbot",
                "",
                (
                    f"{_excerpt('compound', 9_000)}\n\nThis is from the Python reference. What is a compound statement? "
                    "Answer in one or two sentences.",
                    f"Thank you. Here is another section:\n\n{_excerpt('with', 2_600)}\n\n"
                    "What happens when the body of a with statement raises an exception?",
                ),
            ),
            Conversation(
                "chat-2",
                "chatbot",
                "You are a patient teacher of Python. You answer briefly.",
                (
                    f"{_excerpt('execmodel', 9_200)}\n\nI have read this chapter. What is a namespace, in your own words?",
                    f"And how do exceptions fit in?\n\n{_excerpt('exceptions', 1_800)}\n\nSummarise this section for me.",
                ),
            ),
            Conversation(
                "agent-1",
                "agent",
                agent,
                (
                    "Task: back up the directory 'reports' and list what was copied. Which tool do you call first, and why?",
                    f"Result of the tool:\n\n{_source(shutil.copytree, 2_400)}\n\nGo on: what is the next step?",
                ),
            ),
            Conversation(
                "agent-2",
                "agent",
                agent,
                (
                    "Task: find all files named '*.tmp' below the working directory. Which tool do you call, with which "
                    "arguments?",
                    f"Result of the tool:\n\n{_source(subprocess.run, 2_400)}\n\nGo on: what is the next step?",
                ),
            ),
        )
    }


def _agent_system() -> str:
    """A system prompt as agent frameworks make them: instructions, then a JSON schema for each tool."""
    tools = [
        {"name": tool.__name__, "signature": _signature(tool), "description": _documentation(tool)} for tool in _TOOLS
    ]
    return (
        "You are a careful assistant that works on files by calling tools. Call one tool at a time, as JSON with its name "
        f"and arguments, and wait for the result. These are the tools:\n\n{json.dumps(tools, indent=1)}"
    )


def _signature(tool: Callable[..., object]) -> str:
    """Without the addresses of functions that are defaults: they differ from process to process."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(tool)))


def _documentation(tool: Callable[..., object]) -> str:
    return _cut(inspect.getdoc(tool) or "", 1_000)


def _source(tool: Callable[..., object], max_chars: int) -> str:
    return _cut(inspect.getsource(tool), max_chars)


def _excerpt(topic: str, max_chars: int) -> str:
    """The beginning of a section of the Python reference."""
    return _cut(topics[topic], max_chars)


def _cut(text: str, max_chars: int) -> str:
    """At most `max_chars` characters, and whole lines only."""
    if len(text) <= max_chars:
        return text
    return text[: text.rindex("\n", 0, max_chars)]
