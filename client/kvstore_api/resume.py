"""How an engine resumes after a match: where the hit ends, and from which token on it computes.

FULL groups are in the blocks. Window and state groups are not, so a hit that ends at token H leaves their layers empty.
There are two ways to fill them, and a plan takes one of them for all groups:

    load      Each window and state group has the rule SNAPSHOT and a state object alive at H. The engine loads them all
              and computes from H on.
    replay    The engine computes the span [R, H) again through all layers, with empty windows at R, and goes on behind H.
              The span is the longest that a window group asks for:
                  BOUNDED     its window, or `replay_tokens` if that is more
                  EXACT       the windows of all window layers of the model added up, those of other groups too, or
                              `replay_tokens` if that is more; rounded up to whole blocks
                  SNAPSHOT    as EXACT

Why not some groups by loading and others by replay: whoever computes the token R needs every window before R and every
recurrent state at R, and what was saved at H is of no use there. So a group whose state object could be loaded is
replayed with the others; and a recurrent state, which no span rebuilds, rules a replay out. A STATE group therefore
never resumes without the rule SNAPSHOT, nor beside a window group with another rule.

Why added up: a window layer that reads W tokens back passes what is wrong at token t on to t + W, and each window layer
above it does so again. Behind the sum, all of them compute what a cold run computes. Full layers pass nothing on:
before H they read the blocks.

A hit no longer than the span is not adopted: there would be nothing left of it. Of all legal plans the one is chosen
that leaves least to compute, which is the one with the greatest R (R = H where states are loaded); of two with the same
R, the one with the longer hit. A missing state object never makes a plan BOUNDED: only a group whose rule says so does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore_api.namespace import KvGroupKind, ReplayMode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from kvstore_api.namespace import KvGroup, NamespaceSpec


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """How an engine resumes after a match: load the blocks of [0, hit_tokens), compute from `replay_start_token` on.

    `mode` says what else. NONE: nothing. SNAPSHOT: load the state objects of all window and state groups at
    `hit_tokens`; nothing is replayed. BOUNDED and EXACT: replay [replay_start_token, hit_tokens) and load no state; the
    rule of the group that asks for most.
    """

    hit_tokens: int = 0
    replay_start_token: int = 0
    mode: ReplayMode = ReplayMode.NONE


def resume_plan(spec: NamespaceSpec, hit_blocks: int, has_state: Callable[[int, str], bool]) -> ResumePlan:
    """The plan that leaves least to compute, for a hit of at most `hit_blocks` blocks.

    Args:
        spec: the namespace's.
        hit_blocks: blocks present from the start of the chain without a gap.
        has_state: whether a state object of that name (the group's) is alive at the end of that many blocks. Asked from
            the longest hit down, and only where the answer can matter.
    """
    groups = [group for group in spec.groups if group.kind is not KvGroupKind.FULL]
    if not groups:
        return ResumePlan(hit_blocks * spec.block_tokens, hit_blocks * spec.block_tokens)
    replayed = _replayed(spec, groups, hit_blocks)
    if all(group.replay_rule is ReplayMode.SNAPSHOT for group in groups):
        # A state object at or before the replay's first token spares nothing.
        ends = range(hit_blocks, replayed.replay_start_token // spec.block_tokens, -1)
        hit_tokens = _first_with_states(ends, [group.name for group in groups], has_state) * spec.block_tokens
        if hit_tokens:
            return ResumePlan(hit_tokens, hit_tokens, ReplayMode.SNAPSHOT)
    return replayed


_MISS = ResumePlan()


def _first_with_states(ends: range, names: Sequence[str], has_state: Callable[[int, str], bool]) -> int:
    """The first of those ends that has a state object of every name; 0 if none has."""
    first, *others = names
    for blocks in ends:
        if has_state(blocks, first) and all(has_state(blocks, name) for name in others):
            return blocks
    return 0


def is_safe(spec: NamespaceSpec, plan: ResumePlan, states: Collection[str]) -> bool:
    """Whether every KV group has what it needs when an engine follows `plan`, with these groups' states loaded at the hit's end.

    For whoever follows a plan that somebody else made.
    """
    groups = [group for group in spec.groups if group.kind is not KvGroupKind.FULL]
    if plan.replay_start_token == plan.hit_tokens:
        return all(group.name in states for group in groups)
    replay = _replay(spec, groups)
    return not groups or (replay is not None and plan.hit_tokens - plan.replay_start_token >= replay[0])


def _replayed(spec: NamespaceSpec, groups: Sequence[KvGroup], hit_blocks: int) -> ResumePlan:
    """The best plan that loads no state: the span is the same wherever the hit ends, so the longest hit is the best."""
    replay = _replay(spec, groups)
    if replay is None:
        return _MISS
    span, mode = replay
    hit_tokens = hit_blocks * spec.block_tokens
    return ResumePlan(hit_tokens, hit_tokens - span, mode) if hit_tokens > span else _MISS


def _replay(spec: NamespaceSpec, groups: Sequence[KvGroup]) -> tuple[int, ReplayMode] | None:
    """Tokens to replay when no state is loaded, and by which rule; None where a recurrent state rules that out."""
    if any(group.kind is KvGroupKind.STATE for group in groups):
        return None
    exact_tokens = sum(group.window_tokens * len(group.layers) for group in groups)
    return max((_replay_span(group, exact_tokens, spec.block_tokens) for group in groups), default=(0, ReplayMode.NONE))


def _replay_span(group: KvGroup, exact_tokens: int, block_tokens: int) -> tuple[int, ReplayMode]:
    """Tokens that one window group asks to replay, and by which rule."""
    bounded = max(group.window_tokens, group.replay_tokens)
    if group.replay_rule is ReplayMode.BOUNDED:
        return bounded, ReplayMode.BOUNDED
    return -(-max(exact_tokens, bounded) // block_tokens) * block_tokens, ReplayMode.EXACT
