"""Tickets: a request that left one engine, as bytes that another engine goes on from.

    kvstore-handover/1 ⏎  a JSON object ⏎  SHA-256 of everything before it, in hex

A ticket holds all of a request but its KV, which lies in the store under names that follow from the tokens. It holds the prompt
and the salt: it is as secret as the request itself. The digest finds damage; it keeps nobody from writing a ticket, who could
as well send a request. What a written one can reach is what such a request can: KV is looked up by tokens, salt and adapter.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np

from kvstore_api import encoding
from kvstore_api.limits import BLOCK_TOKENS, HASH_BYTES
from kvstore_engine.hook import RequestContext

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TICKET_VERSION: Final = 1
_MAGIC: Final = b"kvstore-handover/"
_STATE_DOMAIN: Final = b"kvstore/handover-state/1"
_BLOCK_NUMBER: Final = re.compile(r"[0-9]{1,9}", re.ASCII)

# Reasons of a `TicketError`, to switch on.
DAMAGED: Final = "DAMAGED_TICKET"  # truncated, altered, or no ticket at all
UNKNOWN_VERSION: Final = "UNKNOWN_TICKET_VERSION"
INVALID: Final = "INVALID_TICKET"  # undamaged, but it says what no request can be
FOREIGN: Final = "FOREIGN_TICKET"  # of another namespace: another model, layout, tenant

Scalar = int | float | bool | str


class TicketError(ValueError):
    """A ticket that no request can be resumed from. `reason` is stable; the text never contains tokens or the salt."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{detail} [{reason}]")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class PausedRequest:
    """A request between two steps: all that another engine needs to go on with it, but its KV.

    Attributes:
        prompt, output: its tokens, each in [0, 2**32). The last of the output has no KV yet.
        computed_tokens: leading tokens of both whose KV exists; fewer than there are tokens.
        saved_blocks: leading blocks that are kept for the request's own traffic class.
        sampling: the parameters of sampling, by the names the engine gives them.
        sampler_state: where the sampler's random numbers are; empty if it draws none.
        eos_ids: tokens that end the request.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...] = ()
    computed_tokens: int = 0
    saved_blocks: int = 0
    context: RequestContext = field(default_factory=RequestContext)
    sampling: Mapping[str, Scalar] = field(default_factory=dict)
    sampler_state: bytes = b""
    eos_ids: tuple[int, ...] = ()

    @property
    def computed(self) -> tuple[int, ...]:
        """The tokens whose KV exists."""
        return (self.prompt + self.output)[: self.computed_tokens]


@dataclass(frozen=True, slots=True)
class Ticket:
    """A ticket that has been read.

    Attributes:
        namespace: the 32-byte digest of where the KV is; an engine of another namespace refuses the ticket.
        stored_blocks: leading blocks that the store had confirmed when the ticket was written.
        states: kind -> bytes of the state objects it had confirmed; their names are `state_name`s.
        block_bytes: bytes of a block.
    """

    namespace: bytes
    request: PausedRequest
    stored_blocks: int = 0
    states: Mapping[str, int] = field(default_factory=dict)
    block_bytes: int = 0

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV that wait in the store for whoever takes the request over."""
        return self.stored_blocks * self.block_bytes + sum(self.states.values())


def state_name(request: PausedRequest, kind: str) -> str:
    """The name of a state object at the exact token where the request stands.

    It stands beside the hash of the last full block, which tells all tokens before; the rest of what the state depends on is in
    the name: the tokens after that block and the open block's extra keys.
    """
    full_blocks = request.computed_tokens // BLOCK_TOKENS
    tail = np.asarray(request.computed[full_blocks * BLOCK_TOKENS :], dtype="<u4").tobytes()
    keys = (request.context.extra_keys or {}).get(full_blocks, ())
    fields = (_STATE_DOMAIN, tail, *keys)
    digest = hashlib.sha256(b"".join(encoding.field(min(tag, 2), value) for tag, value in enumerate(fields)))
    return f"handover/{kind}/{request.computed_tokens}/{digest.hexdigest()}"


def write_ticket(ticket: Ticket) -> bytes:
    """A ticket's bytes. Raises: TypeError, ValueError: the request has values that no request can have."""
    request, context = ticket.request, ticket.request.context
    fields = {
        "namespace": ticket.namespace.hex(),
        "prompt": _tokens_text(request.prompt),
        "output": _tokens_text(request.output),
        "computed_tokens": request.computed_tokens,
        "saved_blocks": request.saved_blocks,
        "salt": _text(context.salt),
        "adapter": _text(context.adapter),
        "extra_keys": {str(block): [_text(key) for key in keys] for block, keys in (context.extra_keys or {}).items()},
        "traffic_class": context.traffic_class,
        "sampling": dict(request.sampling),
        "sampler_state": _text(request.sampler_state),
        "eos_ids": sorted(request.eos_ids),
        "stored_blocks": ticket.stored_blocks,
        "block_bytes": ticket.block_bytes,
        "states": {
            kind: {"name": state_name(request, kind), "bytes": size} for kind, size in sorted(ticket.states.items())
        },
    }
    body = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    signed = _MAGIC + str(TICKET_VERSION).encode() + b"\n" + body
    return signed + b"\n" + hashlib.sha256(signed).hexdigest().encode()


def read_ticket(data: bytes) -> Ticket:
    """Read a ticket, strictly. Raises: TicketError: DAMAGED, UNKNOWN_VERSION or INVALID."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TicketError(DAMAGED, f"a ticket is bytes, this is of type {type(data).__name__}")
    head, _, rest = bytes(data).partition(b"\n")
    if not head.startswith(_MAGIC):
        raise TicketError(DAMAGED, f"{len(data)} bytes that do not begin as a ticket does")
    if head != _MAGIC + str(TICKET_VERSION).encode():
        version = head[len(_MAGIC) : len(_MAGIC) + 20].decode(errors="replace")
        raise TicketError(
            UNKNOWN_VERSION, f"the ticket has version {version!r}, this engine reads version {TICKET_VERSION}"
        )
    body, _, digest = rest.rpartition(b"\n")
    if hashlib.sha256(head + b"\n" + body).hexdigest().encode() != digest:
        raise TicketError(DAMAGED, f"a ticket of {len(data)} bytes is not what was written")
    try:
        values = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise TicketError(INVALID, f"the ticket holds no JSON: {type(error).__name__}") from None
    return _ticket(_Fields(values))


def _ticket(fields: _Fields) -> Ticket:
    request = PausedRequest(
        prompt=fields.tokens("prompt"),
        output=fields.tokens("output"),
        computed_tokens=fields.number("computed_tokens"),
        saved_blocks=fields.number("saved_blocks"),
        context=RequestContext(
            fields.data("salt"), fields.data("adapter"), fields.extra_keys() or None, fields.traffic_class()
        ),
        sampling=fields.sampling(),
        sampler_state=fields.data("sampler_state"),
        eos_ids=fields.eos_ids(),
    )
    _check(request)
    ticket = Ticket(
        namespace=fields.namespace(),
        request=request,
        stored_blocks=fields.number("stored_blocks"),
        states=fields.states(request),
        block_bytes=fields.number("block_bytes"),
    )
    if ticket.stored_blocks > request.computed_tokens // BLOCK_TOKENS:
        _refuse("stored_blocks", f"is {ticket.stored_blocks}, of {request.computed_tokens} computed tokens")
    fields.check_all_read()
    return ticket


def _check(request: PausedRequest) -> None:
    if not request.prompt:
        _refuse("prompt", "is empty")
    if request.computed_tokens >= len(request.prompt) + len(request.output):
        _refuse("computed_tokens", f"is {request.computed_tokens}, which leaves no token to compute")
    if request.saved_blocks > request.computed_tokens // BLOCK_TOKENS:
        _refuse("saved_blocks", f"is {request.saved_blocks}, of {request.computed_tokens} computed tokens")


class _Fields:
    """The ticket's JSON object, read field by field; every one must be there, and no other."""

    def __init__(self, values: object) -> None:
        if not isinstance(values, dict):
            raise TicketError(INVALID, "the ticket is no JSON object")
        self._values: dict[str, Any] = values

    def check_all_read(self) -> None:
        """Raises: TicketError: there are fields that nobody asked for."""
        if self._values:
            _refuse(sorted(self._values)[0][:40], "is no field of a ticket")

    def number(self, name: str) -> int:
        """A count."""
        return _number(name, self._take(name))

    def data(self, name: str) -> bytes:
        """Bytes."""
        return _data(name, self._take(name))

    def namespace(self) -> bytes:
        """A digest."""
        value = self._take("namespace")
        if not isinstance(value, str) or len(value) != 2 * HASH_BYTES:
            _refuse("namespace", "is no digest")
        try:
            return bytes.fromhex(value)
        except ValueError:
            _refuse("namespace", "is no digest")

    def tokens(self, name: str) -> tuple[int, ...]:
        """Token ids."""
        data = self.data(name)
        if len(data) % 4:
            _refuse(name, f"has {len(data)} bytes, no whole tokens")
        return tuple(np.frombuffer(data, dtype="<u4").tolist())

    def extra_keys(self) -> dict[int, list[bytes]]:
        """Block -> keys."""
        name = "extra_keys"
        keys = {}
        for block, values in self._object(name).items():
            if not _BLOCK_NUMBER.fullmatch(block) or not isinstance(values, list):
                _refuse(name, "is no list of keys for each block")
            keys[int(block)] = [_data(name, value) for value in values]
        return keys

    def traffic_class(self) -> str | None:
        """A name, or none."""
        value = self._take("traffic_class")
        if value is not None and not isinstance(value, str):
            _refuse("traffic_class", "is no name")
        return value

    def sampling(self) -> dict[str, Scalar]:
        """Parameters; what they mean is the engine's to check."""
        values = self._object("sampling")
        if not all(isinstance(value, int | float | str) for value in values.values()):
            _refuse("sampling", "has a parameter that is no number, truth or text")
        return values

    def eos_ids(self) -> tuple[int, ...]:
        """Token ids."""
        values = self._take("eos_ids")
        if not isinstance(values, list):
            _refuse("eos_ids", "is no list")
        return tuple(_number("eos_ids", value) for value in values)

    def states(self, request: PausedRequest) -> dict[str, int]:
        """Kind -> bytes. A name that is not the request's own would lead to another one's KV."""
        sizes = {}
        for kind, state in self._object("states").items():
            if not isinstance(state, dict) or state.keys() != {"name", "bytes"}:
                _refuse("states", "has one that is no name and bytes")
            if state["name"] != state_name(request, kind):
                _refuse("states", "names the state of another request")
            sizes[kind] = _number("states", state["bytes"])
        return sizes

    def _object(self, name: str) -> dict[str, Any]:
        value = self._take(name)
        if not isinstance(value, dict):
            _refuse(name, "is no JSON object")
        return value

    def _take(self, name: str) -> object:
        if name not in self._values:
            _refuse(name, "is missing")
        return self._values.pop(name)


def _number(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        _refuse(name, "is no count")
    return value


def _data(name: str, value: object) -> bytes:
    if not isinstance(value, str):
        _refuse(name, "is no base64 text")
    try:
        return base64.b64decode(value.encode("ascii"), validate=True)
    except (binascii.Error, ValueError):
        _refuse(name, "is no base64 text")


def _refuse(name: str, detail: str) -> NoReturn:
    raise TicketError(INVALID, f"the ticket's {name} {detail}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _tokens_text(tokens: Sequence[int]) -> str:
    ids = np.asarray(tokens, dtype=np.int64)
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < 1 << 32:
        raise ValueError("a token id is not in [0, 2**32)")
    return _text(ids.astype("<u4").tobytes())
