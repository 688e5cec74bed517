"""Fixtures of more than one folder."""

from __future__ import annotations

import pytest

from doors import DOORS, opened


@pytest.fixture(scope="module", params=DOORS)
def door(request):
    """How to make a client, in each of its shapes in turn; see doors.py."""
    with opened(request.param) as make:
        yield make
