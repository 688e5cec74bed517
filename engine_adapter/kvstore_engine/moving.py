"""The thin engine's requests as tickets see them."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from kvstore_engine.kv_pool import BLOCK_TOKENS
from kvstore_engine.resuming import resume
from kvstore_engine.sampling import SamplingParams
from kvstore_engine.ticket import INVALID, PausedRequest, TicketError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore_engine.hook import LoadedPrefix
    from kvstore_engine.kv_pool import KVPool
    from kvstore_engine.request import Request
    from kvstore_engine.ticket import Scalar


def pause(request: Request, computed_tokens: int) -> PausedRequest:
    """What of a request goes into its ticket, as it is between two steps, with the KV of so many tokens."""
    return PausedRequest(
        prompt=request.prompt,
        output=tuple(request.output),
        computed_tokens=computed_tokens,
        saved_blocks=min(request.saved_blocks, computed_tokens // BLOCK_TOKENS),
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


def resume_handed_over(request: Request, pool: KVPool, prefix: LoadedPrefix, paused: PausedRequest) -> None:
    """Let a request go on from what of its KV was loaded: at the exact token if that is all of it.

    Raises: RuntimeError: as `resume`.
    """
    end = paused.computed_tokens
    if prefix.replay_start_token == end:
        pool.load_states(request.block_ids, end, prefix.states)
        request.computed_tokens = end
        request.hit_tokens = request.resume_token = end
        request.window_start = max(0, end - pool.window_tokens)
        # The window at the end of the last complete block is there in part only, that at the next one's end will be whole.
        request.saved_state_token = end // BLOCK_TOKENS * BLOCK_TOKENS
    else:
        resume(request, pool, prefix)
    request.recomputed_tokens = end - request.computed_tokens
    # Others are saved at the end: the engine before had them stored for the hand-over only.
    request.saved_blocks = min(prefix.hit_blocks, paused.saved_blocks)


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
