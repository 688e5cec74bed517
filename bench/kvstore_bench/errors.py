"""Wrong input of a command."""

from __future__ import annotations


class InputError(Exception):
    """What is wrong, naming option, file or key; a stable reason, and what to do. Exit code 2."""

    def __init__(self, message: str, fix: str, reason: str = "INVALID_ARGUMENT") -> None:
        super().__init__(message)
        self.fix = fix
        self.reason = reason
