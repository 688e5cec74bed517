"""Sessions of coding agents: long prompts that grow by a tool's answer every few seconds, compacted when the context is full."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore_bench.hitrate.generator_conversation import AGENT, Conversant, Conversation, kept_at_break, stored_tokens
from kvstore_bench.hitrate.generator_draws import lognormal, two_lognormals, whole

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore_bench.hitrate.generator_parameters import Agent, GeneratorParameters

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

# What a request's uniforms are for.
_GAP = slice(0, 3)
_IS_USER = 3
_READING = slice(4, 6)
_COMPACTED = slice(6, 8)
_BREAK = slice(8, 11)
_OUTPUT = slice(11, 13)
_COLUMNS = 13


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
    reading = _reading(agent, rows, exploring)
    return Conversation(AGENT, prompt, time_s, *_prompts(parameters, prompt.tokens, own_tokens, reading, rows))


def _gaps_s(agent: Agent, rows: Floats) -> Floats:
    by_user = rows[:, _IS_USER] < agent.user_share
    gaps = (two_lognormals(gap, rows[:, _GAP]) for gap in (agent.user_gap_s, agent.tool_gap_s))
    return np.where(by_user, *gaps)


def _reading(agent: Agent, rows: Floats, exploring: int) -> list[int]:
    """Tokens that a request adds behind the answer before: an agent reads much before it begins to work."""
    uniforms = rows[:, _READING]
    parts = (agent.exploring_reading_tokens, uniforms[:exploring]), (agent.reading_tokens, uniforms[exploring:])
    reading: list[int] = whole(np.concatenate([lognormal(*part) for part in parts]), 1).tolist()
    return reading


def _prompts(
    parameters: GeneratorParameters, shared: int, own: int, reading: list[int], rows: Floats
) -> tuple[Ints, Ints, Ints]:
    """Tokens of each request's prompt, those stored then, and how many of the prompt's were stored with the one before."""
    agent, traffic = parameters.agent, parameters.traffic
    answers = whole(lognormal(agent.output_tokens, rows[:, _OUTPUT]), 1).tolist()
    compacted = whole(lognormal(agent.compacted_tokens, rows[:, _COMPACTED]), 1).tolist()
    limit = agent.context_tokens if shared + own <= agent.context_tokens else agent.long_context_tokens
    room = max(limit - shared, 1)
    tokens, kept = [shared + min(own, room)], [shared]
    stored = [stored_tokens(traffic, tokens[0], answers[0])]
    for request in range(1, len(rows)):
        context = tokens[-1] + answers[request - 1]
        stays = kept_at_break(agent.breaks, shared, context, rows[request, _BREAK])
        kept.append(stored[-1] if stays is None else min(stays, stored[-1]))
        tokens.append(context + reading[request])
        if tokens[-1] > limit:
            tokens[-1], kept[-1] = shared + min(compacted[request], room), shared
        stored.append(stored_tokens(traffic, tokens[-1], answers[request]))
    return np.array(tokens, np.int64), np.array(stored, np.int64), np.array(kept, np.int64)
