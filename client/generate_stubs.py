"""Makes the Python stubs in `client/kvstore_api/v1` from `proto/`, or checks that they are up to date.

The proto package is `kvstore.v1`, but in Python the name `kvstore` belongs to the server; so the generated modules live in
`kvstore_api.v1` and their imports of each other are rewritten to say so.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO_DIR = ROOT / "proto"
STUB_DIR = ROOT / "client" / "kvstore_api" / "v1"


def generate(out_dir: Path) -> dict[str, str]:
    """Run protoc into `out_dir` and return file name -> text of each stub."""
    includes = [f"--proto_path={PROTO_DIR}", f"--proto_path={Path(protoc.__file__).parent / '_proto'}"]
    outputs = [f"--python_out={out_dir}", f"--pyi_out={out_dir}", f"--grpc_python_out={out_dir}"]
    sources = sorted(str(path) for path in PROTO_DIR.rglob("*.proto"))
    status = protoc.main(["protoc", *includes, *outputs, *sources])
    if status != 0:
        sys.exit(f"protoc failed with status {status}")
    return {
        path.name: re.sub(r"from kvstore\.v1 import", "from kvstore_api.v1 import", path.read_text())
        for path in sorted((out_dir / "kvstore" / "v1").iterdir())
        if path.name != "types_pb2_grpc.py"  # no service in it
    }


def stale_files(stubs: dict[str, str]) -> list[str]:
    """Names of stubs that are missing, differ, or are no longer generated."""
    present = {path.name: path.read_text() for path in STUB_DIR.glob("*_pb2*")}
    return sorted(name for name in stubs.keys() | present.keys() if stubs.get(name) != present.get(name))


def main() -> None:
    """Write the stubs, or with --check exit 1 when they are stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the committed stubs are stale")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        stubs = generate(Path(scratch))
    stale = stale_files(stubs)
    if arguments.check:
        sys.exit(f"stale stubs: {', '.join(stale)}; run `make proto`" if stale else 0)
    for name in stale:
        if name in stubs:
            (STUB_DIR / name).write_text(stubs[name])
        else:
            (STUB_DIR / name).unlink()
    print(f"{len(stubs)} stubs, {len(stale)} changed")


if __name__ == "__main__":
    main()
