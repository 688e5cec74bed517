"""What is wrong with the input of a plan."""

from __future__ import annotations

from kvstore_bench.storage import StorageInputError


class PlanInputError(StorageInputError):
    """Wrong input of `kvstore-bench plan`; names the option, file or key. Exit code 2."""
