"""What a command of kvstore-admin, or `kvstore-server fsck`, can end with."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes that scripts may rely on; they stand in `--help` and in docs/cli-reference.md."""

    OK = 0
    ERROR = 1
    USAGE = 2
    NOT_FOUND = 4
    UNAVAILABLE = 5
    OTHER_FORMAT = 6  # fsck only
    CORRUPTION = 9
    INTERRUPTED = 130
    BROKEN_PIPE = 141


class CommandError(Exception):
    """A command's failure: what is wrong, its stable reason, the exit code, and what to do about it."""

    def __init__(self, message: str, *, reason: str, exit_code: ExitCode, fix: str) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.exit_code = exit_code
        self.fix = fix


def usage_error(message: str, fix: str) -> CommandError:
    """A wrong word on the command line, found before anything was asked of the server."""
    return CommandError(message, reason="INVALID_ARGUMENT", exit_code=ExitCode.USAGE, fix=fix)
