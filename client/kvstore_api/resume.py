"""How an engine resumes after a match: which end of the hit is legal in every KV group, and what must be replayed.

FULL groups are in the blocks. Window and state groups are not, so a hit that ends at token H leaves their layers empty and the
engine computes the span [replay start, H) again before it goes on:

    bounded    the last W tokens                            (W = window, or the span the namespace asks for)
    exact      W x (number of window layers) tokens, rounded up to whole blocks
    snapshot   nothing, if a state object is alive at H; else as bounded for windows, and no hit at all for recurrent state

A hit no longer than the span is not adopted: there would be nothing left of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore_api.namespace import KvGroupKind, ReplayMode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from kvstore_api.namespace import KvGroup, NamespaceSpec


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """How an engine resumes after a match: load [0, hit_tokens), compute from `replay_start_token` on as `mode` says."""

    hit_tokens: int = 0
    replay_start_token: int = 0
    mode: ReplayMode = ReplayMode.NONE


def resume_plan(spec: NamespaceSpec, hit_blocks: int, has_state: Callable[[int, str], bool]) -> ResumePlan:
    """The plan with the longest legal hit of at most `hit_blocks` blocks.

    Args:
        spec: the namespace's.
        hit_blocks: blocks present from the start of the chain without a gap.
        has_state: whether a state object of that name (the group's) is alive at the end of that many blocks.
    """
    for blocks in range(hit_blocks, 0, -1):
        spans = [_replay_span(spec, group, blocks, has_state) for group in spec.groups]
        if None in spans:
            continue  # a recurrent state is missing here; a shorter hit may have one
        span, mode = max(((tokens, mode) for tokens, mode in filter(None, spans)), default=(0, ReplayMode.NONE))
        hit_tokens = blocks * spec.block_tokens
        if hit_tokens > span:
            return ResumePlan(hit_tokens, hit_tokens - span, mode)
    return _MISS


_MISS = ResumePlan(0, 0, ReplayMode.NONE)


def _replay_span(
    spec: NamespaceSpec, group: KvGroup, blocks: int, has_state: Callable[[int, str], bool]
) -> tuple[int, ReplayMode] | None:
    """Tokens to replay for one group and why, or None when the group cannot resume at that end."""
    if group.kind is KvGroupKind.FULL:
        return 0, ReplayMode.NONE
    if group.replay_rule is ReplayMode.SNAPSHOT and has_state(blocks, group.name):
        return 0, ReplayMode.SNAPSHOT
    if group.kind is KvGroupKind.STATE:
        return None
    bounded = max(group.window_tokens, group.replay_tokens)
    if group.replay_rule is ReplayMode.EXACT:
        exact = max(group.window_tokens * len(group.layers), bounded)
        return -(-exact // spec.block_tokens) * spec.block_tokens, ReplayMode.EXACT
    return bounded, ReplayMode.BOUNDED


def is_safe(spec: NamespaceSpec, plan: ResumePlan, states: Collection[str]) -> bool:
    """Whether every KV group has what it needs when an engine follows the plan, with these groups' states at the hit's end.

    For whoever follows a plan that somebody else made.
    """
    replayed = plan.hit_tokens - plan.replay_start_token
    for group in spec.groups:
        if group.kind is KvGroupKind.FULL or (not replayed and group.name in states):
            continue
        if group.kind is KvGroupKind.STATE or replayed < _own_span(spec, group):
            return False
    return True


def _own_span(spec: NamespaceSpec, group: KvGroup) -> int:
    """Tokens that a window group must replay if it has no state."""
    bounded = max(group.window_tokens, group.replay_tokens)
    if group.replay_rule is ReplayMode.BOUNDED:
        return bounded
    exact = max(group.window_tokens * len(group.layers), bounded)
    return -(-exact // spec.block_tokens) * spec.block_tokens
