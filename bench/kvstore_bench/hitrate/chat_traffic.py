"""Conversations of people with a chatbot: short turns, sittings of a few, and returns over days with a heavy tail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore_bench.hitrate.generator_conversation import CHATBOT, Conversant, Conversation, kept_at_break, stored_tokens
from kvstore_bench.hitrate.generator_draws import lognormal, whole

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore_bench.hitrate.generator_parameters import Chat, GeneratorParameters

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

# What a request's uniforms are for.
_GAP = slice(0, 2)
_USER = slice(2, 4)
_IS_ATTACHED = 4
_ATTACHMENT = slice(5, 7)
_OUTPUT = slice(7, 9)
_BREAK = slice(9, 12)
_COLUMNS = 12


def chat_conversation(parameters: GeneratorParameters, seed: int, number: int) -> Conversation:
    """Conversation `number` with the chatbot."""
    chat, conversant = parameters.chat, Conversant(parameters, seed, CHATBOT, number)

    def requests_of(uniforms: Floats, is_first: bool) -> int:
        del is_first  # sittings are alike
        return 1 + int(whole(lognormal(chat.further_turns, uniforms), 0))

    time_s, rows = conversant.sit(chat.habit, _COLUMNS, requests_of, lambda rows: lognormal(chat.gap_s, rows[:, _GAP]))
    prompt = conversant.shared_prompt(chat.prompt)
    return Conversation(CHATBOT, prompt, time_s, *_prompts(parameters, prompt.tokens, rows))


def _questions(chat: Chat, rows: Floats) -> list[int]:
    attached = np.where(
        rows[:, _IS_ATTACHED] < chat.attachment_share, lognormal(chat.attachment_tokens, rows[:, _ATTACHMENT]), 0
    )
    questions: list[int] = (whole(lognormal(chat.user_tokens, rows[:, _USER]), 1) + whole(attached, 0)).tolist()
    return questions


def _prompts(parameters: GeneratorParameters, shared: int, rows: Floats) -> tuple[Ints, Ints, Ints]:
    """Tokens of each request's prompt, those stored then, and how many of the prompt's were stored with the one before."""
    chat = parameters.chat
    answers = whole(lognormal(chat.output_tokens, rows[:, _OUTPUT]), 1).tolist()
    room, context = max(chat.context_tokens - shared, 1), shared
    tokens, stored, kept = [], [shared], []
    for request, question in enumerate(_questions(chat, rows)):
        stays = kept_at_break(chat.breaks, shared, context, rows[request, _BREAK]) if request else None
        kept.append(stored[-1] if stays is None else min(stays, stored[-1]))
        size = context + question
        if size - shared > room:
            # The oldest half of what fits is dropped: all behind the shared prompt moves, and is new.
            size, kept[-1] = shared + max(room // 2, 1), min(kept[-1], shared)
        tokens.append(size)
        stored.append(stored_tokens(parameters.traffic, size, answers[request]))
        context = size + answers[request]
    return np.array(tokens, np.int64), np.array(stored[1:], np.int64), np.array(kept, np.int64)
