"""Fetching a prefix, on a loading thread: is it worth it, what does the store have, what does the engine need, bring it."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from kvstore_api.resume import ResumePlan, is_safe, resume_plan
from kvstore_client import Failure, ReplayMode
from kvstore_engine.hook import LoadedPrefix
from kvstore_engine.loading import CANCELLED, MISS
from kvstore_engine.store_steps import no_state

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore_client import BlockLayout, Chain, MatchResult, NamespaceHandle
    from kvstore_engine.benefit import BenefitRule
    from kvstore_engine.hook import RequestContext
    from kvstore_engine.loading import Load
    from kvstore_engine.store_steps import StoreSteps

NOT_STORED: Final = "NOT_STORED"
NOT_WORTH_IT: Final = "NOT_WORTH_IT"  # computing is expected to be faster
WRONG_SIZE: Final = "WRONG_SIZE"  # of a KV group's state
REPLACED: Final = "REPLACED"  # put anew while its parts were loaded
BAD_PLAN: Final = "BAD_PLAN"  # the store's resume plan would leave a KV group without what it needs


class PrefixFetcher:
    """Takes the steps of a load. Any thread may call anything."""

    def __init__(
        self,
        namespace: NamespaceHandle,
        steps: StoreSteps,
        benefit: BenefitRule,
        *,
        layout: BlockLayout | None,
        state_bytes: int,
        state_size: Callable[[str, int], int] | None,
    ) -> None:
        """Args: as `PrefixCache`."""
        self._namespace = namespace
        self._steps = steps
        self._benefit = benefit
        self._state_bytes = state_bytes
        self._state_size = state_size
        self._parts = _ranges(layout, namespace.block_bytes)
        self._part_of_layer = _parts_of_layers(layout)

    def part_of(self, layer: int) -> int:
        """Which part of a block holds a layer's KV; -1 for one that is in none. Without a layout all are in the first."""
        return self._part_of_layer.get(layer, -1) if self._part_of_layer else 0

    def fetch(self, load: Load, prompt: Sequence[int], context: RequestContext) -> tuple[LoadedPrefix, int, str]:
        """The steps of a load. Returns: what is there, blocks hit, and why they are fewer than asked for, or ""."""
        asked_blocks = len(load.views)
        if not self._is_worth(asked_blocks * self._namespace.block_tokens, asked_blocks):
            return MISS, 0, NOT_WORTH_IT
        # Asking for no more than can be used makes the store's plan one for the very hit that is taken.
        chain = self._steps.chain("look-up", prompt, asked_blocks, context)
        if isinstance(chain, Failure):
            return MISS, 0, chain.reason
        match = self._look_up(chain, context)
        promised, end = self._promise(chain, match, asked_blocks)
        if not promised.hit_blocks:
            return MISS, 0, end
        if not self._is_worth(promised.replay_start_token, promised.hit_blocks):
            return MISS, promised.hit_blocks, NOT_WORTH_IT
        load.promise(promised)
        if load.given_up:
            return MISS, promised.hit_blocks, CANCELLED
        loaded_blocks, gap = self._load_timed(load, chain.first(promised.hit_blocks), match.lease)
        loaded = promised if not gap else self._steps.shortened(loaded_blocks)
        return loaded, promised.hit_blocks, gap or end

    def _look_up(self, chain: Chain, context: RequestContext) -> MatchResult:
        began = time.monotonic()
        match = self._steps.look_up(chain, context.traffic_class)
        if match.failure is None:
            self._benefit.note_look_up(time.monotonic() - began)
        return match

    def _is_worth(self, saved_tokens: int, blocks: int) -> bool:
        return self._benefit.is_worth(saved_tokens, blocks * self._namespace.block_bytes)

    def _promise(self, chain: Chain, match: MatchResult, asked_blocks: int) -> tuple[LoadedPrefix, str]:
        """What a match lets the engine go on from, with the states for it; and what ended the hit there, "" if nothing did."""
        if match.failure is not None:
            return MISS, match.failure.reason
        plan, spec = match.plan, self._namespace.spec
        if not plan.hit_tokens:
            return MISS, NOT_STORED
        states = self._fetch_states(chain, plan)
        if not is_safe(spec, plan, states.keys()):
            if plan.mode is not ReplayMode.SNAPSHOT:
                return MISS, BAD_PLAN
            plan, states = resume_plan(spec, plan.hit_tokens // spec.block_tokens, no_state), {}
        hit_blocks = plan.hit_tokens // spec.block_tokens
        prefix = LoadedPrefix(hit_blocks, plan.replay_start_token, plan.mode, states)
        return prefix, "" if hit_blocks == asked_blocks else NOT_STORED

    def _fetch_states(self, chain: Chain, plan: ResumePlan) -> dict[str, bytearray]:
        """The states that a plan goes on from; fewer, if some do not come."""
        if plan.mode is not ReplayMode.SNAPSHOT:
            return {}
        states = {}
        for group in self._namespace.spec.groups:
            if group.replay_rule is ReplayMode.SNAPSHOT:
                state = self._steps.fetch_state(
                    chain[plan.hit_tokens // self._namespace.block_tokens - 1], group.name, self._state_bytes
                )
                if state is None or not self._has_right_size(group.name, plan.hit_tokens, len(state)):
                    break
                states[group.name] = state
        return states

    def _has_right_size(self, group: str, tokens: int, size_bytes: int) -> bool:
        """A state of another size is none: somebody else's, under this engine's name. It is replayed as if it were missing."""
        wanted = self._state_size(group, tokens) if self._state_size is not None else size_bytes
        if size_bytes == wanted:
            return True
        detail = f"the state of group {group!r} at token {tokens} has {size_bytes} bytes, the engine's have {wanted}"
        self._steps.note("state", Failure(WRONG_SIZE, detail))
        return False

    def _load_timed(self, load: Load, chain: Chain, lease: bytes) -> tuple[int, str]:
        began = time.monotonic()
        if len(self._parts) == 1:
            loaded_blocks, gap, _ = self._steps.load_blocks(chain, load.views[: len(chain)], lease)
            if not gap:
                load.part_there()
            size_bytes = loaded_blocks * self._namespace.block_bytes
        else:
            loaded_blocks, gap, size_bytes = self._load_parts(load, chain, lease)
        self._benefit.note_load(size_bytes, time.monotonic() - began)
        return loaded_blocks, gap

    def _load_parts(self, load: Load, chain: Chain, lease: bytes) -> tuple[int, str, int]:
        """One part of all blocks after the other, in one budget. A block of which a part is missing does not count.

        Nor does one whose parts are of two: it was deleted and put again between the calls.
        Returns: valid blocks, why the next one is not, and the bytes that came, of whole blocks or not: how fast the store is.
        """
        end_s = time.monotonic() + self._namespace.budget_s(len(chain) * self._namespace.block_bytes)
        valid, gap, wholes, size_bytes = len(chain), "", None, 0
        for part in self._parts:
            if load.given_up:
                return 0, CANCELLED, size_bytes
            views = _parts_of(load.views[:valid], part)
            loaded = self._steps.load_blocks(chain.first(valid), views, lease, part, end_s - time.monotonic())
            size_bytes += loaded.blocks * part[1]
            wholes = wholes or loaded.whole_checksums
            same = _equal_from_the_start(wholes, loaded.whole_checksums[: loaded.blocks])
            gap = gap or (loaded.gap if same == loaded.blocks else REPLACED)
            valid = same
            if not valid:
                break
            if not gap:
                load.part_there()
        return valid, gap, size_bytes


def _parts_of(views: Sequence[memoryview], part: tuple[int, int]) -> list[memoryview]:
    offset, size = part
    return [view[offset : offset + size] for view in views]


def _equal_from_the_start(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading items of `other` are those of `one`."""
    for index, (first, second) in enumerate(zip(one, other, strict=False)):
        if first != second:
            return index
    return len(other)


def _ranges(layout: BlockLayout | None, block_bytes: int) -> list[tuple[int, int]]:
    """Where the parts of a block begin and their bytes; padding belongs to the part before it, so that all bytes come."""
    cuts = [0, *(part.offset_bytes for part in layout.parts[1:])] if layout is not None else [0]
    return [(start, end - start) for start, end in pairwise([*cuts, block_bytes])]


def _parts_of_layers(layout: BlockLayout | None) -> dict[int, int]:
    if layout is None:
        return {}
    return {layer: number for number, part in enumerate(layout.parts) for layer in part.layers}
