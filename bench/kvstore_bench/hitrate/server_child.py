"""A kvstore-server whose time is set by the process that replays; started by `server_replay.py`."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from kvstore.config import Setting, load_config
from kvstore.logs import configure_logs
from kvstore.server import serve
from kvstore_bench.hitrate.shared_clock import SharedClock


def _main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--config", "--clock", "--port-file"):
        parser.add_argument(name, type=Path, required=True)
    arguments = parser.parse_args()
    port_file = Setting(("server", "port_file"), str(arguments.port_file), "--port-file")
    config = load_config(arguments.config, [port_file], {}).config
    configure_logs(config.log)
    asyncio.run(serve(config, SharedClock(arguments.clock)))


if __name__ == "__main__":
    _main()
