"""Fixtures of the tests with SGLang's parts."""

from __future__ import annotations

import re

import pytest

from serving import running_server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A store for a file of tests; each test keeps its pages apart by `model`."""
    with running_server(tmp_path_factory.mktemp("data")) as running:
        yield running


@pytest.fixture
def model(request):
    """A model's name that no other test uses."""
    return re.sub(r"\W+", "-", request.node.name)
