"""A seeded workload of many days: agents and chats, merged in the order of time, their prompts as chains of block ids.

The parameters and their evidence are in `bench/workloads/*.toml`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore_bench.hitrate.agent_traffic import agent_session
from kvstore_bench.hitrate.chat_traffic import chat_conversation
from kvstore_bench.hitrate.generator_conversation import CLASSES
from kvstore_bench.hitrate.generator_parameters import GeneratorParameters, load_parameters, named_workloads
from kvstore_bench.hitrate.workload import Workload, WorkloadError
from kvstore_bench.units import DAY_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvstore_bench.hitrate.generator_conversation import Conversation

    Ints = NDArray[np.int64]
    Ids = NDArray[np.int32]

__all__ = ["GeneratorParameters", "generate", "load_parameters", "named_workloads"]

_IDS_MAX = 2**31 - 1
_PROGRESS_STEPS = 200


def _ignore(_: float) -> None:
    """Nobody looks."""


def generate(parameters: GeneratorParameters, seed: int, progress: Callable[[float], None] = _ignore) -> Workload:
    """Make the workload of a seed.

    The same parameters and seed give the same bytes everywhere.

    Args:
        parameters: as `load_parameters` gives them.
        seed: 0 or more.
        progress: is told the done share, from 0 to 1.

    Raises: WorkloadError: a negative seed, no traffic at all, or more blocks than 32-bit ids can name.
    """
    if seed < 0:
        raise WorkloadError(f"{parameters.name}: seed {seed} is negative")
    conversations = _conversations(parameters, seed, progress)
    if not conversations:
        raise WorkloadError(f"{parameters.name}: traffic.scale: leaves no agent.sessions and no chat.conversations")
    chains = _Chains(conversations, parameters.traffic.block_tokens, parameters.name)
    sizes = [len(conversation.time_s) for conversation in conversations]
    time_s = np.concatenate([conversation.time_s for conversation in conversations])
    order = np.argsort(time_s, kind="stable")
    starts = np.concatenate(([0], np.cumsum(chains.length[order])))
    return Workload(
        name=parameters.name,
        block_tokens=parameters.traffic.block_tokens,
        classes=CLASSES,
        time_s=time_s[order],
        class_id=np.repeat(np.array([one.class_id for one in conversations], np.uint8), sizes)[order],
        session=np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)[order],
        input_tokens=chains.input_tokens[order],
        starts=starts,
        blocks=chains.fill(starts, order, progress),
        asked_blocks=chains.asked[order].astype(np.int32),
        unique_blocks=chains.unique_blocks,
        measured_from_s=parameters.traffic.measured_from_days * DAY_S,
        origin={
            "generator": parameters.name,
            "seed": seed,
            "parameters_sha256": parameters.sha256,
            "parameters": parameters.flat(),
        },
    )


def _conversations(parameters: GeneratorParameters, seed: int, progress: Callable[[float], None]) -> list[Conversation]:
    scale = parameters.traffic.scale
    agents, chats = round(parameters.agent.sessions * scale), round(parameters.chat.conversations * scale)
    made, step = [], max((agents + chats) // _PROGRESS_STEPS, 1)
    for number in range(agents + chats):
        is_agent = number < agents
        whole = (
            agent_session(parameters, seed, number)
            if is_agent
            else chat_conversation(parameters, seed, number - agents)
        )
        if len((rest := whole.without_history()).time_s):
            made.append(rest)
        if not number % step:
            progress(0.5 * number / (agents + chats))
    return made


class _Chains:
    """Block ids of all requests, conversation behind conversation.

    A request's chain is what it keeps of its predecessor's and new ids behind it, up to where its answer's KV is stored; new ids
    are handed out in the order of requests, behind those of the shared prompts.
    """

    def __init__(self, conversations: Sequence[Conversation], block_tokens: int, name: str) -> None:
        self._conversations = conversations
        self._prompts, prompt_blocks = _prompt_chains(conversations, block_tokens)
        self._first = np.concatenate(([0], np.cumsum([len(one.time_s) for one in conversations])))
        self.input_tokens: Ints = np.concatenate([one.input_tokens for one in conversations])
        self.asked: Ints = self.input_tokens // block_tokens
        self.length: Ints = np.concatenate([one.stored_tokens for one in conversations]) // block_tokens
        self._kept: Ints = np.concatenate([one.kept_tokens for one in conversations]) // block_tokens
        new = self.length - self._kept
        assert (self._kept <= self.asked).all(), "a prompt keeps no more than it has"
        self._new_from: Ints = prompt_blocks + np.cumsum(new) - new
        self.unique_blocks = prompt_blocks + int(new.sum())
        if self.unique_blocks > _IDS_MAX:
            raise WorkloadError(
                f"{name}: traffic.scale: {self.unique_blocks:,} blocks, at most {_IDS_MAX:,} can be named"
            )

    def fill(self, starts: Ints, order: Ints, progress: Callable[[float], None]) -> Ids:
        """All chains, those of request `order[i]` from `starts[i]` on."""
        blocks: Ids = np.empty(int(starts[-1]), np.int32)
        target = np.empty(len(order), np.int64)
        target[order] = starts[:-1]
        step = max(len(self._conversations) // _PROGRESS_STEPS, 1)
        for number in range(len(self._conversations)):
            self._fill_one(number, target, blocks)
            if not number % step:
                progress(0.5 + 0.5 * number / len(self._conversations))
        progress(1.0)
        return blocks

    def _fill_one(self, number: int, target: Ints, blocks: Ids) -> None:
        part = slice(self._first[number], self._first[number + 1])
        chain: Ids = np.empty(int(self.length[part].max()), np.int32)
        shared = self._prompts[self._conversations[number].class_id, self._conversations[number].prompt.number]
        chain[: len(shared)] = shared
        columns = (self._kept[part], self.length[part], self._new_from[part], target[part])
        for kept, length, new_from, at in zip(*(column.tolist() for column in columns), strict=True):
            chain[kept:length] = np.arange(new_from, new_from + length - kept, dtype=np.int32)
            blocks[at : at + length] = chain[:length]


def _prompt_chains(conversations: Sequence[Conversation], block_tokens: int) -> tuple[dict[tuple[int, int], Ids], int]:
    """Chains of the shared prompts that are used, by class and number, and how many ids they take.

    The block in which a prompt ends belongs to the conversation; that in which its tool schemas end, to the prompt.
    """
    chains: dict[tuple[int, ...], Ids] = {}
    used = 0

    def more(key: tuple[int, ...], before: Ids, blocks: int) -> Ids:
        nonlocal used
        if key not in chains:
            new = blocks - len(before)
            chains[key] = np.concatenate((before, np.arange(used, used + new, dtype=np.int32)))
            used += new
        return chains[key]

    prompts: dict[tuple[int, int], Ids] = {}
    for one in conversations:
        prompt = one.prompt
        tools = more((one.class_id, prompt.tool_set), np.empty(0, np.int32), prompt.tool_tokens // block_tokens)
        prompts[one.class_id, prompt.number] = more(
            (one.class_id, prompt.tool_set, prompt.number), tools, prompt.tokens // block_tokens
        )
    return prompts, used
