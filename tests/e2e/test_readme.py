"""The README's commands, as written: server in one terminal, admin and client in another."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "README.md").read_text().split("## From an empty directory to the first hit")[1].split("\n## ")[0]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", SECTION, re.S)


def in_use(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.skipif(in_use(7420) or in_use(7421), reason="the default ports, which the README uses, are taken")
def test_the_readmes_first_hit(tmp_path):
    server_block, client_block = blocks("sh")
    program, awaited = blocks("python")
    (tmp_path / "first_hit.py").write_text(program + awaited)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    # Installing is what made the environment this runs in.
    (server_command,) = [line for line in server_block.splitlines() if not line.startswith("pip install")]
    server = subprocess.Popen(["bash", "-c", f"exec {server_command}"], cwd=tmp_path, env=environment)
    try:
        while server.poll() is None:
            if (
                subprocess.run(
                    ["kvstore-admin", "status"], env=environment, capture_output=True, check=False
                ).returncode
                == 0
            ):
                break
            time.sleep(0.2)
        done = subprocess.run(
            ["bash", "-e", "-c", client_block],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert "7 stored, 0 were there, 0 rejected" in done.stdout
        assert "7 of 7 blocks hit, verified in place" in done.stdout
        assert "\n7 blocks hit\n" in done.stdout
        assert "my-model" in done.stdout
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0
