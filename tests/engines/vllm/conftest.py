"""Models and a store for the tests with vLLM; each is made once."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of vLLM and of torch about themselves
    import vllm.v1.worker.gpu_model_runner  # noqa: F401

from engine import FORKS, PRELOADED, environment
from models import make

from serving import running_server

os.environ.update(environment())
FORKS.set_forkserver_preload(list(PRELOADED))


def made(kind):
    @pytest.fixture(scope="session", name=kind)
    def model(tmp_path_factory):
        return make(kind, tmp_path_factory.mktemp("models") / kind)

    return model


smollm2, hybrid, small, seeing = map(made, ("smollm2", "hybrid", "small", "seeing"))


@pytest.fixture
def store(tmp_path):
    with running_server(tmp_path / "store", "--capacity", "4GiB") as server:
        yield server


def pytest_collection_modifyitems(items):
    """Two processes share the tests: one has those of SmolLM2, which take longer than all others, and makes that model."""
    for item in items:
        is_smollm2 = "smollm2" in item.nodeid or "smollm2" in item.fixturenames
        item.add_marker(pytest.mark.xdist_group("smollm2" if is_smollm2 else "hybrid"))
