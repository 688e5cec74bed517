"""Tickets: what is written is read, and nothing else is."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest

from kvstore_engine.hook import RequestContext
from kvstore_engine.ticket import PausedRequest, Ticket, TicketError, read_ticket, state_name, write_ticket

REQUEST = PausedRequest(
    prompt=(0, 1, 65536, 2**32 - 1) * 40,
    output=(7, 8),
    computed_tokens=161,
    saved_blocks=1,
    context=RequestContext(b"salt\0@/\n", b"lora", {0: [b"image", b""], 3: []}, "agent"),
    sampling={"max_new_tokens": 12, "temperature": 0.5, "ignore_eos": False, "stop": "§"},
    sampler_state=bytes(range(256)),
    eos_ids=(0, 2),
)
TICKET = Ticket(bytes(range(32)), REQUEST, 1, {"tail": 1000, "window": 5}, 4096)
EMPTY = Ticket(bytes(32), PausedRequest((5,)))


@pytest.mark.parametrize("ticket", [TICKET, EMPTY])
def test_what_is_written_is_read(ticket: Ticket):
    assert read_ticket(write_ticket(ticket)) == ticket
    # Any buffer will do, and the same ticket is the same bytes.
    assert read_ticket(memoryview(write_ticket(ticket))) == ticket  # type: ignore[arg-type]
    assert write_ticket(ticket) == write_ticket(read_ticket(write_ticket(ticket)))


def test_its_version_stands_in_front_and_its_size_is_known():
    written = write_ticket(TICKET)
    assert written.startswith(b"kvstore-handover/1\n{")
    assert TICKET.kv_bytes == 4096 + 1005


@pytest.mark.parametrize("ticket", [TICKET, EMPTY])
def test_a_ticket_that_is_cut_or_altered_anywhere_is_refused(ticket: Ticket):
    written = write_ticket(ticket)
    positions = {*range(0, len(written), 7), *range(25), *range(len(written) - 70, len(written))}
    for position in positions:
        altered = bytearray(written)
        altered[position] ^= 1
        for spoiled in (written[:position], bytes(altered), written[:position] + written[position + 1 :]):
            with pytest.raises(TicketError) as refused:
                read_ticket(spoiled)
            assert refused.value.reason in {"DAMAGED_TICKET", "UNKNOWN_TICKET_VERSION"}
    with pytest.raises(TicketError):
        read_ticket(written + b"\n")


def forged(change: dict[str, Any], *, without: str = "", body: bytes | None = None, version: bytes = b"1") -> bytes:
    """A ticket with a right digest, written by somebody who can write tickets."""
    written = write_ticket(TICKET)
    fields = {**json.loads(written.split(b"\n")[1]), **change}
    fields.pop(without, None)
    signed = b"kvstore-handover/" + version + b"\n" + (json.dumps(fields).encode() if body is None else body)
    return signed + b"\n" + hashlib.sha256(signed).hexdigest().encode()


def test_a_forged_digest_alone_is_no_reason_to_refuse():
    assert read_ticket(forged({})) == TICKET


@pytest.mark.parametrize("data", ["text", None, 7, [b"a"]])
def test_what_is_no_bytes_is_no_ticket(data: Any):
    with pytest.raises(TicketError, match="a ticket is bytes"):
        read_ticket(data)


@pytest.mark.parametrize("version", [b"", b"0", b"2", b"1 ", b"01", b"one", b"\xff"])
def test_a_ticket_of_another_version_is_refused(version: bytes):
    with pytest.raises(TicketError, match="this engine reads version 1") as refused:
        read_ticket(forged({}, version=version))
    assert refused.value.reason == "UNKNOWN_TICKET_VERSION"


@pytest.mark.parametrize("name", sorted(json.loads(write_ticket(TICKET).split(b"\n")[1])))
@pytest.mark.parametrize(
    "value", [None, True, -1, 1 << 64, 1.5, "☃", "AAA=", [], [None], {}, {"x": 1}, [1, "a"]], ids=repr
)
def test_a_field_of_the_wrong_kind_is_refused(name: str, value: object):
    """Whatever is accepted after all is a value of that field's kind."""
    data = forged({name: value})
    fitting = {
        "traffic_class": (None, "☃", "AAA="),
        "sampling": ({}, {"x": 1}),
        "extra_keys": ({},),
        "states": ({},),
        "eos_ids": ([],),
        "salt": ("AAA=",),
        "adapter": ("AAA=",),
        "sampler_state": ("AAA=",),
    }
    if any(value is right or value == right for right in fitting.get(name, ()) if type(value) is type(right)):
        assert read_ticket(data)
        return
    with pytest.raises(TicketError) as refused:
        read_ticket(data)
    assert refused.value.reason == "INVALID_TICKET"
    assert name in str(refused.value)


@pytest.mark.parametrize("name", sorted(json.loads(write_ticket(TICKET).split(b"\n")[1])))
def test_a_field_that_is_missing_is_named(name: str):
    with pytest.raises(TicketError, match=f"{name} is missing"):
        read_ticket(forged({}, without=name))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"surprise": 1}, "surprise is no field"),
        ({"computed_tokens": 162}, "leaves no token to compute"),
        ({"saved_blocks": 2}, "saved_blocks is 2"),
        ({"stored_blocks": 2}, "stored_blocks is 2"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": "AAAAAAA="}, "no whole tokens"),
        ({"namespace": "g" * 64}, "is no digest"),
        ({"namespace": "00" * 31}, "is no digest"),
        ({"extra_keys": {"-1": []}}, "extra_keys"),
        ({"extra_keys": {"9" * 5000: []}}, "extra_keys"),
        ({"extra_keys": {"1": [1]}}, "extra_keys"),
        ({"states": {"tail": {"name": state_name(REQUEST, "window"), "bytes": 1}}}, "another request"),
        ({"states": {"tail": {"name": state_name(REQUEST, "tail")}}}, "no name and bytes"),
        ({"states": {"tail": {"name": state_name(REQUEST, "tail"), "bytes": -1}}}, "states"),
        ({"salt": "not base64!"}, "salt is no base64"),
    ],
)
def test_a_ticket_that_no_request_can_have_is_refused(change: dict[str, Any], words: str):
    with pytest.raises(TicketError, match=words) as refused:
        read_ticket(forged(change))
    assert refused.value.reason == "INVALID_TICKET"


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"1", b"{", b"\xff", b"[" * 100_000, b'{"a":NaN}', b"9" * 5000],
    ids=lambda body: repr(body[:9]),
)
def test_a_ticket_without_an_object_is_refused(body: bytes):
    with pytest.raises(TicketError) as refused:
        read_ticket(forged({}, body=body))
    assert refused.value.reason == "INVALID_TICKET"


def test_a_refusal_says_nothing_of_tokens_or_salt():
    secret = "c2VjcmV0IHNhbHQ="
    with pytest.raises(TicketError) as refused:
        read_ticket(forged({"salt": secret + "!", "prompt": secret}))
    assert "c2Vj" not in str(refused.value)


@pytest.mark.parametrize("tokens", [(-1,), (2**32,)])
def test_tokens_are_never_wrapped(tokens: tuple[int, ...]):
    with pytest.raises(ValueError, match="not in"):
        write_ticket(replace(TICKET, request=replace(REQUEST, prompt=tokens)))


def context_with(**changes: Any) -> RequestContext:
    return replace(REQUEST.context, **changes)


@pytest.mark.parametrize(
    "other",
    [
        replace(REQUEST, prompt=(*REQUEST.prompt[:150], 9, *REQUEST.prompt[151:])),
        replace(REQUEST, output=(6, 8)),
        replace(REQUEST, computed_tokens=160),
        replace(REQUEST, computed_tokens=100),
        replace(REQUEST, context=context_with(extra_keys={1: [b"image"]})),
        replace(REQUEST, context=context_with(extra_keys={1: [b""]})),
        replace(REQUEST, context=context_with(extra_keys={1: [b"im", b"age"]})),
    ],
)
def test_whatever_a_tail_depends_on_beside_its_hash_is_in_its_name(other: PausedRequest):
    names = {state_name(request, kind) for request in (REQUEST, other) for kind in ("tail", "window")}
    assert len(names) == 4
    assert max(len(name) for name in names) <= 256
    # What stands behind the exact token, and what the hash tells already, is not.
    same = replace(REQUEST, output=(7, 9), context=context_with(salt=b"x", extra_keys={0: [b"i"]}))
    assert state_name(same, "tail") == state_name(REQUEST, "tail")
