"""Errors cross the wire as a status and a stable reason, by one table."""

from __future__ import annotations

import base64
import pkgutil
from importlib import import_module
from urllib.parse import quote

import grpc
import pytest
from google.rpc import error_details_pb2

import kvstore
from kvstore.errors import InvalidArgumentError, KvStoreError, NamespaceNotFoundError, OverloadedError
from kvstore.status import STATUS_CODES, rich_status, status_code


def every_error() -> set[type[KvStoreError]]:
    """All subclasses, wherever in the package they are defined."""
    for module in pkgutil.walk_packages(kvstore.__path__, "kvstore."):
        import_module(module.name)
    found, todo = set(), [KvStoreError]
    while todo:
        kind = todo.pop()
        if kind.__module__.startswith("kvstore.") and kind not in found:
            found.add(kind)
            todo += kind.__subclasses__()
    return found


def test_every_error_is_in_the_table():
    assert every_error() - set(STATUS_CODES) == set()


def test_every_error_has_a_reason_of_its_own():
    reasons = [kind.reason for kind in every_error()]
    assert sorted(reasons) == sorted(set(reasons))
    assert all(reason == reason.upper() and reason.replace("_", "").isalpha() for reason in reasons)


def test_retryable_errors_are_those_a_client_may_see_pass():
    retryable = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL}
    for kind in every_error():
        if kind.retryable:
            assert STATUS_CODES[kind] in retryable, kind


def test_a_subclass_that_the_table_does_not_know_has_its_parents_status():
    class Novel(NamespaceNotFoundError):
        reason = "NOVEL"

    assert status_code(Novel("x")) is grpc.StatusCode.NOT_FOUND
    Novel.__module__ = "tests"  # out of sight of `every_error`


@pytest.mark.parametrize("kind", [InvalidArgumentError, OverloadedError])
def test_the_status_carries_reason_domain_and_message(kind):
    status = rich_status(kind("64 of 64"))
    info = error_details_pb2.ErrorInfo()
    assert len(status.details) == 1
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == (kind.reason, "kvstore")
    assert status.message == "64 of 64"
    assert status.code == STATUS_CODES[kind].value[0]


MESSAGES = {
    "letters": "x",
    "three bytes a character": "层",
    "four bytes a character": "🧱",
    "percent signs": "%",
    "line feeds": "\n",
    "mixed": "a层",
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_long_message_is_cut_to_what_trailers_carry(kind):
    text = MESSAGES[kind] * 100_000
    status = rich_status(InvalidArgumentError(text))
    assert status.message.endswith("…")
    assert text.startswith(status.message[:-1])
    on_the_wire = len(quote(status.message, safe="")) + len(base64.b64encode(status.SerializeToString()))
    assert on_the_wire < 6000
    assert len(quote(status.message, safe="")) > 1800  # not cut more than it has to be


@pytest.mark.parametrize("text", ["", "x" * 2048, "层" * (2048 // 9), "64 of 64", "…"])
def test_a_message_that_fits_is_left_alone(text):
    assert rich_status(InvalidArgumentError(text)).message == text


def test_a_message_with_half_a_character_can_be_sent():
    assert rich_status(InvalidArgumentError("cannot read /data/\udcff")).message == "cannot read /data/?"
