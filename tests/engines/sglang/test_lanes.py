"""The order in which a batch's pages are called for, and where it ends."""

from __future__ import annotations

import threading
import time

import pytest

import hicaches  # noqa: F401 - the plug's package needs SGLang
from kvstore_engine.sglang.lanes import WIDTH, Lane, Run

FOR_EVER = float("inf")


@pytest.fixture
def lane():
    lane = Lane("test")
    yield lane
    lane.close()


@pytest.mark.parametrize("failing", [set(), {0}, {3}, {3, 4}, {19}, {2, 19}])
def test_pages_up_to_the_first_failure_count_and_few_behind_it_are_asked_for(lane, failing):
    asked = []

    def call(page, _):
        asked.append(page)
        return page not in failing

    run = lane.leading(20, call, FOR_EVER)
    assert run.pages == min(failing, default=20)
    assert sorted(asked) == list(range(run.asked))
    assert run.asked <= min(20, run.pages + WIDTH)


def test_calls_run_at_once_up_to_the_width(lane):
    meeting = threading.Barrier(WIDTH)
    assert lane.leading(WIDTH, lambda *_: meeting.wait(30) >= 0, FOR_EVER) == Run(WIDTH, WIDTH)


def test_no_page_is_begun_after_the_end(lane):
    assert lane.leading(20, lambda *_: True, time.monotonic()) == Run(0, 0)


def test_a_call_that_raises_fails_the_batch_when_no_other_is_under_way(lane):
    begun, ended = threading.Event(), threading.Event()

    def call(page, _):
        if page == 0:
            assert begun.wait(30)
            raise KeyError("a bug")
        begun.set()
        time.sleep(0.2)
        ended.set()
        return True

    with pytest.raises(KeyError, match="a bug"):
        lane.leading(2, call, FOR_EVER)
    assert ended.is_set()
