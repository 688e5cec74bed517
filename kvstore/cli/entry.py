"""Where the installed commands begin: the base install has them too, but not the packages they need."""

from __future__ import annotations

import importlib
import sys


def server() -> None:
    """Run `kvstore-server`."""
    _run("kvstore-server", "kvstore.cli.server")


def admin() -> None:
    """Run `kvstore-admin`."""
    _run("kvstore-admin", "kvstore.cli.admin")


def _run(command: str, module_name: str) -> None:
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing.startswith("kvstore"):
            raise
        print(
            f"error: {command} needs the packages of the server extra ({missing} is missing) [MISSING_PACKAGES]\n"
            "fix: pip install 'kvstore[server]'",
            file=sys.stderr,
        )
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    module.main()
