"""Models and a store for the tests with vLLM; each is made once."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of vLLM and of torch about themselves
    import vllm.v1.worker.gpu_model_runner  # noqa: F401

from models import make

from serving import running_server


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    return make("smollm2", tmp_path_factory.mktemp("models") / "smollm2")


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory):
    return make("hybrid", tmp_path_factory.mktemp("models") / "hybrid")


@pytest.fixture
def store(tmp_path):
    with running_server(tmp_path / "store", "--capacity", "4GiB") as server:
        yield server
