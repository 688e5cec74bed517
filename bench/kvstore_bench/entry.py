"""Where the installed command begins: the base install has it too, but not the packages it needs."""

from __future__ import annotations

import importlib
import sys


def main() -> None:
    """Run `kvstore-bench`."""
    try:
        module = importlib.import_module("kvstore_bench.cli")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing.startswith("kvstore"):
            raise
        print(
            f"error: kvstore-bench needs the packages of the bench extra ({missing} is missing) [MISSING_PACKAGES]\n"
            "fix: pip install 'kvstore[bench]'",
            file=sys.stderr,
        )
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    module.main()
