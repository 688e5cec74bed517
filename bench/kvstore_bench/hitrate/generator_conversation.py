"""What agents' sessions and chats have in common: sittings, spread over days, each with requests of which only times are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore_bench.hitrate.generator_draws import lognormal, pick_popular, return_gap_s, start_s, stream, whole
from kvstore_bench.units import DAY_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvstore_bench.hitrate.generator_parameters import (
        Breaks,
        GeneratorParameters,
        Habit,
        SharedPrompts,
        Traffic,
    )

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

AGENT, CHATBOT = 0, 1
CLASSES = ("agent", "chatbot")
# Second part of a stream's key; the first is the class.
_PROMPTS, _SITTINGS, _REQUESTS = 0, 1, 2
_SITTING_COLUMNS = 8
# Bounds what an odd parameter can ask for; far above what the given ones draw.
_SITTING_REQUESTS_MAX = 100_000


@dataclass(frozen=True, slots=True)
class SharedPrompt:
    """Tool schemas and, behind them, a system prompt."""

    number: int
    tool_set: int
    tool_tokens: int
    tokens: int  # of both


@dataclass(frozen=True, slots=True)
class Conversation:
    """Requests of one conversation.

    Attributes:
        time_s: shape (requests,), ascending.
        input_tokens: shape (requests,).
        stored_tokens: shape (requests,): of prompt and answer, those whose KV is stored then; see `stored_tokens`.
        kept_tokens: shape (requests,): how much of the prompt was the previous request's, and stored then; of the first one's,
            how much is the shared prompt's.
    """

    class_id: int
    prompt: SharedPrompt
    time_s: Floats
    input_tokens: Ints
    stored_tokens: Ints
    kept_tokens: Ints

    def without_history(self) -> Conversation:
        """The requests from time 0 on: the first of them finds no predecessor, and so has only the shared prompt to keep."""
        rest = slice(int(np.searchsorted(self.time_s, 0.0)), None)
        kept = self.kept_tokens[rest].copy()
        kept[:1] = self.prompt.tokens
        tokens = self.input_tokens[rest], self.stored_tokens[rest], kept
        return Conversation(self.class_id, self.prompt, self.time_s[rest], *tokens)


class Conversant:
    """Draws one conversation: the person, or agent, and its habits are drawn first, then sitting by sitting."""

    def __init__(self, parameters: GeneratorParameters, seed: int, class_id: int, number: int) -> None:
        self._parameters, self._seed, self._class_id = parameters, seed, class_id
        self._sittings = stream(seed, class_id, _SITTINGS, number)
        self._requests = stream(seed, class_id, _REQUESTS, number)
        self.traits = self._sittings.random(
            _SITTING_COLUMNS
        )  # 0 and 1 start, 2 habit, 3 prompt, others as a class likes

    def shared_prompt(self, shared: SharedPrompts) -> SharedPrompt:
        """The one that this conversation uses."""
        number = pick_popular(shared.prompts, shared.prompt_exponent, float(self.traits[3]))
        return _shared_prompt(shared, self._seed, self._class_id, number)

    def sit(
        self,
        habit: Habit,
        columns: int,
        requests_of: Callable[[Floats, bool], int],
        gaps_of: Callable[[Floats], Floats],
    ) -> tuple[Floats, Floats]:
        """All sittings up to the last day.

        Args:
            columns: uniforms drawn for each request.
            requests_of: how many requests a sitting has, from two uniforms and whether it is the first.
            gaps_of: seconds between requests and those before them, from their rows of uniforms.

        Returns: times of requests in seconds, and their uniforms, shape (requests, columns).
        """
        parameters, traffic = self._parameters, self._parameters.traffic
        times: list[Floats] = []
        rows: list[Floats] = []
        begin, end = start_s(parameters.starts, -traffic.history_days, traffic.days, self.traits), traffic.days * DAY_S
        returns = self.traits[2] < habit.returning_share
        probability = habit.returning_probability if returns else habit.other_probability
        while begin < end:
            draw = self._sittings.random(_SITTING_COLUMNS)
            row = self._requests.random((min(requests_of(draw[:2], not times), _SITTING_REQUESTS_MAX), columns))
            times.append(begin + np.concatenate(([0.0], np.cumsum(gaps_of(row[1:])))))
            rows.append(row)
            if draw[2] >= probability:
                break
            begin = times[-1][-1] + return_gap_s(parameters.returns, draw[3:7])
        time_s = np.floor(np.concatenate(times) * 1000) / 1000
        within = time_s < end
        return time_s[within], np.concatenate(rows)[within]


def _shared_prompt(shared: SharedPrompts, seed: int, class_id: int, number: int) -> SharedPrompt:
    uniforms = stream(seed, class_id, _PROMPTS, 0, number).random(3)
    tool_set = pick_popular(shared.tool_sets, shared.tool_set_exponent, float(uniforms[0]))
    of_tools = stream(seed, class_id, _PROMPTS, 1, tool_set).random(2)
    tool_tokens = int(whole(lognormal(shared.tool_tokens, of_tools), 1))
    return SharedPrompt(
        number, tool_set, tool_tokens, tool_tokens + int(whole(lognormal(shared.system_tokens, uniforms[1:]), 1))
    )


def stored_tokens(traffic: Traffic, prompt_tokens: int, answer_tokens: int) -> int:
    """Of a prompt and its answer, as many leading tokens as have KV in the store once the answer is made.

    An engine never computes the KV of an answer's last token: nothing comes behind it.
    """
    return prompt_tokens + answer_tokens - 1 if traffic.answers_stored else prompt_tokens


def kept_at_break(breaks: Breaks, prompt_tokens: int, context_tokens: int, uniforms: Floats) -> int | None:
    """Tokens that stay of a context when its next request breaks the prefix, None when it does not; from three uniforms."""
    if uniforms[0] >= breaks.probability:
        return None
    if uniforms[1] < breaks.from_start_share:
        return 0
    if uniforms[1] < breaks.from_start_share + breaks.behind_prompt_share:
        return prompt_tokens
    return prompt_tokens + int(uniforms[2] * (context_tokens - prompt_tokens))
