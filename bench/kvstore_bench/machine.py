"""What a result must be read with: the machine, the versions, and the commit that was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

_GIT_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a benchmark ran."""

    cpu: str
    cores: int  # that this process may use
    memory_bytes: int
    kernel: str
    filesystem: str  # of the scratch directory
    python: str
    grpcio: str
    numpy: str
    xxhash: str


def describe_machine(scratch: Path) -> Machine:
    """This machine, with `scratch` as the directory the data lies in."""
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        filesystem=_filesystem(scratch),
        python=platform.python_version(),
        grpcio=version("grpcio"),
        numpy=version("numpy"),
        xxhash=version("xxhash"),
    )


def describe_commit() -> str:
    """The commit of the checkout this code lies in, with "-dirty" if it was changed; "unknown" outside a checkout."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--match=", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return described.stdout.strip()


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _filesystem(directory: Path) -> str:
    """The type of the file system that holds `directory`: the longest mount point that is a parent of it."""
    resolved = directory.resolve()
    found = [(-1, -1, "unknown")]
    for position, line in enumerate(Path("/proc/self/mounts").read_text().splitlines()):
        _, mount_point, kind, *_ = line.split(" ")
        path = Path(mount_point.encode().decode("unicode_escape"))
        if resolved.is_relative_to(path):
            found.append((len(path.parts), position, kind))  # of two mounts on one point the later one counts
    return max(found)[2]
