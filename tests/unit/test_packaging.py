"""What is installed with what, and who may import whom."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {
    "kvstore": ROOT / "kvstore",
    "kvstore_api": ROOT / "client" / "kvstore_api",
    "kvstore_client": ROOT / "client" / "kvstore_client",
    "kvstore_engine": ROOT / "engine_adapter" / "kvstore_engine",
    "kvstore_bench": ROOT / "bench" / "kvstore_bench",
}
ALLOWED = {
    "kvstore_api": set(),
    "kvstore_client": {"kvstore_api"},
    "kvstore_engine": {"kvstore_api", "kvstore_client"},
    "kvstore": {"kvstore_api"},
    "kvstore_bench": {"kvstore_api", "kvstore_client", "kvstore_engine"},
}
# To fill a real store with millions of blocks that have no payload, a benchmark has to reach below the wire.
BELOW_THE_WIRE = {"scale.py", "scale_child.py", "sparse_store.py"}
# So has one that replays traffic with the policy of the store itself.
BELOW_THE_WIRE_FOLDERS = {"hitrate"}


def imported_packages(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", sorted(SOURCES))
def test_every_folder_and_file_of_a_package_is_installed(package):
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for path in SOURCES[package].rglob("*"):
        if not path.is_file() or "__pycache__" in path.parts:
            continue
        name = ".".join((package, *path.parent.relative_to(SOURCES[package]).parts))
        assert any(fnmatchcase(name, pattern) for pattern in setup["packages"]["find"]["include"]), name
        data = [*setup["package-data"]["*"], *setup["package-data"].get(name, [])]
        assert any(fnmatchcase(path.name, pattern) for pattern in ("*.py", *data)), path


@pytest.mark.parametrize("package", sorted(SOURCES))
def test_imports_point_one_way(package):
    for path in SOURCES[package].rglob("*.py"):
        ours = imported_packages(path) & SOURCES.keys() - {package}
        if package == "kvstore_bench" and (path.name in BELOW_THE_WIRE or path.parent.name in BELOW_THE_WIRE_FOLDERS):
            ours.discard("kvstore")
        assert ours <= ALLOWED[package], f"{path} imports {ours - ALLOWED[package]}"


def test_the_store_knows_no_grpc_and_only_the_edge_is_async():
    edge = {
        "service",
        "admin_service",
        "rpc",
        "pool",
        "server",
        "status",
        "metrics",
        "messages",
        "cli",
        "listen",
        "assembly",
    }
    for path in SOURCES["kvstore"].rglob("*.py"):
        if path.relative_to(SOURCES["kvstore"]).parts[0].removesuffix(".py") not in edge:
            assert not imported_packages(path) & {"grpc", "asyncio", "kvstore_client"}, path


def test_the_base_install_is_the_client_alone():
    base = [line for line in metadata.requires("kvstore") or [] if "extra ==" not in line]
    names = {line.split(">")[0].split("<")[0].split(";")[0].strip() for line in base}
    assert names == {"grpcio", "protobuf", "googleapis-common-protos", "numpy", "xxhash"}


def test_importing_the_client_loads_nothing_of_the_server_and_starts_nothing():
    code = (
        "import sys, threading, kvstore_client\n"
        "heavy = {'lmdb', 'torch', 'pydantic', 'typer', 'prometheus_client', 'structlog', 'aiofiles', 'kvstore'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "assert threading.active_count() == 1\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("command", ["kvstore-server", "kvstore-admin", "kvstore-bench"])
def test_every_command_is_installed_and_tells_its_use(command):
    path = Path(sys.executable).parent / command
    done = subprocess.run([path, "--help"], capture_output=True, text=True, check=True, timeout=60)
    assert "Usage" in done.stdout


@pytest.mark.parametrize("missing", ["typer", "rich"])
@pytest.mark.parametrize(
    ("command", "extra"), [("kvstore-server", "server"), ("kvstore-admin", "server"), ("kvstore-bench", "bench")]
)
def test_a_command_without_its_extra_says_what_to_install(command, extra, missing):
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, function = scripts[command].split(":")
    code = f"import sys; sys.modules[{missing!r}] = None; from {module} import {function} as run; run()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == (
        f"error: {command} needs the packages of the {extra} extra ({missing} is missing) [MISSING_PACKAGES]\n"
        f"fix: pip install 'kvstore[{extra}]'\n"
    )
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize("command", ["kvstore-admin", "kvstore-bench"])
def test_an_interrupt_while_a_command_is_being_loaded_ends_it_without_a_traceback(command):
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, function = scripts[command].split(":")
    code = (
        "import os, signal, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'typer':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        f"from {module} import {function} as run\n"
        "run()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("command", ["ttft", "sliding-window", "demo", "demo-handoff"])
@pytest.mark.parametrize("missing", ["torch", "gguf"])
def test_a_measurement_with_a_model_says_which_of_its_packages_is_missing(command, missing):
    code = (
        "import importlib.util, sys\n"
        "from kvstore_bench import cli\n"
        f"sys.modules[{missing!r}] = None\n"
        "find_spec = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name: None if name == {missing!r} else find_spec(name)\n"
        f"cli.main([{command!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    error, fix = done.stderr.splitlines()
    assert f"needs {missing}" in error
    assert error.endswith("[CANNOT_RUN]")
    assert fix == "fix: pip install 'kvstore[engine,bench]'"
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize("command", ["kvstore-server", "kvstore-admin", "kvstore-bench"])
def test_the_declared_entry_point_runs_the_command(command):
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, function = scripts[command].split(":")
    code = f"import sys; from {module} import {function} as run; sys.argv = [{command!r}, '--version']; run()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"{command} {metadata.version('kvstore')}\n"


def test_every_dependency_is_explained():
    page = (ROOT / "docs" / "dependencies.md").read_text()
    for line in metadata.requires("kvstore") or []:
        name = line.split(">")[0].split("<")[0].split("=")[0].split(";")[0].split("[")[0].strip()
        if name != "kvstore":
            assert f"`{name}`" in page, f"{name} is not in docs/dependencies.md"


def test_no_page_waits_for_its_figures():
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("bench/*.md")]:
        assert "<!--" not in page.read_text(), page
