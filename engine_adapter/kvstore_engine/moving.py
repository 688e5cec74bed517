"""The thin engine's requests as tickets see them."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from kvstore_engine.sampling import SamplingParams
from kvstore_engine.ticket import INVALID, PausedRequest, TicketError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore_engine.engine import Request
    from kvstore_engine.ticket import Scalar


def pause(request: Request) -> PausedRequest:
    """What of a request goes into its ticket, as it is between two steps."""
    return PausedRequest(
        prompt=request.prompt,
        output=tuple(request.output),
        computed_tokens=request.computed_tokens,
        saved_blocks=request.saved_blocks,
        context=request.context,
        sampling=asdict(request.params),
        sampler_state=request.sampler.state,
        eos_ids=tuple(request.eos_ids),
    )


def restore(request: Request, paused: PausedRequest) -> None:
    """Bring a new request to where a paused one was, but for its KV.

    Raises: TicketError: INVALID: the paused one had ended, or its sampler had no such state.
    """
    if len(paused.output) >= request.params.max_new_tokens:
        raise TicketError(INVALID, f"the ticket's output has {len(paused.output)} tokens, no more are wanted")
    try:
        request.sampler.restore(paused.sampler_state)
    except ValueError as error:
        raise TicketError(INVALID, f"the ticket's sampler_state: {error}") from None
    request.output = list(paused.output)
    request.eos_ids = frozenset(paused.eos_ids)


def sampling_params(values: Mapping[str, Scalar]) -> SamplingParams:
    """The parameters in a ticket. Raises: TicketError: INVALID: they are not those of this engine, or impossible."""
    known = {parameter.name: type(parameter.default) for parameter in fields(SamplingParams)}
    if values.keys() != known.keys():
        odd = sorted(values.keys() ^ known.keys())[0]
        raise TicketError(INVALID, f"the ticket's sampling parameter {odd[:40]!r} is unknown or missing")
    for name, wanted in known.items():
        if type(values[name]) not in ({float, int} if wanted is float else {wanted}):
            raise TicketError(INVALID, f"the ticket's sampling parameter {name} is no {wanted.__name__}")
    try:
        return SamplingParams(**values)  # type: ignore[arg-type]  # checked above
    except ValueError as error:
        raise TicketError(INVALID, f"the ticket's sampling parameters: {error}") from None
