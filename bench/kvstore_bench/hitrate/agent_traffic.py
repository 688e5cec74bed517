"""Sessions of coding agents: long prompts that grow by a tool's answer every few seconds, compacted when the context is full."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore_bench.hitrate.generator_conversation import AGENT, Conversant, Conversation, kept_at_break
from kvstore_bench.hitrate.generator_draws import lognormal, two_lognormals, whole

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore_bench.hitrate.generator_parameters import Agent, GeneratorParameters

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

# What a request's uniforms are for.
_GAP = slice(0, 3)
_IS_USER = 3
_GROWTH = slice(4, 6)
_COMPACTED = slice(6, 8)
_BREAK = slice(8, 11)
_COLUMNS = 11


def agent_session(parameters: GeneratorParameters, seed: int, number: int) -> Conversation:
    """Session `number` of the agents."""
    agent, conversant = parameters.agent, Conversant(parameters, seed, AGENT, number)
    resumed = conversant.traits[4] < agent.resumed_share

    def requests_of(uniforms: Floats, is_first: bool) -> int:
        fresh = is_first and not resumed
        return int(whole(lognormal(agent.fresh_requests if fresh else agent.resumed_requests, uniforms), 1))

    time_s, rows = conversant.sit(agent.habit, _COLUMNS, requests_of, lambda rows: _gaps_s(agent, rows))
    prompt = conversant.shared_prompt(agent.prompt)
    first = agent.resumed_first_tokens if resumed else agent.fresh_first_tokens
    own_tokens = int(whole(lognormal(first, conversant.traits[5:7]), 1))
    exploring = 0 if resumed else agent.exploring_requests
    return Conversation(
        AGENT, prompt, time_s, *_prompts(agent, prompt.tokens, own_tokens, _growth(agent, rows, exploring), rows)
    )


def _gaps_s(agent: Agent, rows: Floats) -> Floats:
    by_user = rows[:, _IS_USER] < agent.user_share
    gaps = (two_lognormals(gap, rows[:, _GAP]) for gap in (agent.user_gap_s, agent.tool_gap_s))
    return np.where(by_user, *gaps)


def _growth(agent: Agent, rows: Floats, exploring: int) -> list[int]:
    """Tokens that a request adds: an agent reads much before it begins to work."""
    uniforms = rows[:, _GROWTH]
    parts = (agent.exploring_growth_tokens, uniforms[:exploring]), (agent.growth_tokens, uniforms[exploring:])
    growth: list[int] = whole(np.concatenate([lognormal(*part) for part in parts]), 1).tolist()
    return growth


def _prompts(agent: Agent, shared: int, own: int, growth: list[int], rows: Floats) -> tuple[Ints, Ints]:
    """Tokens of each request's prompt, and how many of them are the previous one's."""
    compacted = whole(lognormal(agent.compacted_tokens, rows[:, _COMPACTED]), 1).tolist()
    limit = agent.context_tokens if shared + own <= agent.context_tokens else agent.long_context_tokens
    room = max(limit - shared, 1)
    size, tokens, kept = shared + min(own, room), [shared + min(own, room)], [shared]
    for request in range(1, len(rows)):
        stays = kept_at_break(agent.breaks, shared, size, rows[request, _BREAK])
        kept.append(size if stays is None else stays)
        size += growth[request]
        if size > limit:
            size, kept[-1] = shared + min(compacted[request], room), shared
        tokens.append(size)
    return np.array(tokens, np.int64), np.array(kept, np.int64)
