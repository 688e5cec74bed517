"""Fixtures for tests of kvstore-bench's commands."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from benches import processes_about

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A --data-dir; whatever the outcome, nothing stays in it and no process works there."""
    directory = tmp_path / "scratch"
    directory.mkdir()
    yield directory
    assert list(directory.iterdir()) == []
    assert processes_about(directory) == {}


@pytest.fixture
def sigterm_afterwards() -> Iterator[None]:
    """A command changes what SIGTERM does; here it runs inside of pytest."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)
