"""From what a prefix cache has loaded to where a request goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore_client import ReplayMode
from kvstore_engine.hook import LoadedPrefix
from kvstore_engine.identity import WINDOW_GROUP
from kvstore_engine.kv_pool import BLOCK_TOKENS

if TYPE_CHECKING:
    from kvstore_engine.kv_pool import KVPool
    from kvstore_engine.request import Request


def lent_views(request: Request, pool: KVPool) -> list[memoryview]:
    """The memory of the prompt's complete blocks, which a load may fill."""
    return [pool.block_view(block_id) for block_id in request.block_ids[: len(request.prompt) // BLOCK_TOKENS]]


def resume(request: Request, pool: KVPool, prefix: LoadedPrefix) -> None:
    """Let the request go on from `prefix`; whatever it was to go on from before is void.

    Blocks that were lent and are not in the hit stay the request's own and are computed like the rest. A window state that
    cannot be one of this pool makes it a miss.

    Raises: RuntimeError: the cache breaks its contract: it claims blocks that it was not lent, or window layers would be
        left without KV that they need.
    """
    if prefix.mode is ReplayMode.SNAPSHOT and not _has_state(pool, prefix):
        prefix = LoadedPrefix()
    hit_tokens, start = prefix.hit_blocks * BLOCK_TOKENS, prefix.replay_start_token
    snapshot = prefix.mode is ReplayMode.SNAPSHOT
    _check(request, pool, prefix)
    request.hit_tokens = hit_tokens
    request.saved_blocks = prefix.hit_blocks
    # The last token is computed in any case: its logits choose the first new token.
    request.resume_token = request.computed_tokens = min(start, len(request.known_tokens) - 1)
    request.window_start = max(0, hit_tokens - pool.window_tokens) if snapshot else start
    request.saved_state_token = hit_tokens if snapshot else 0
    if snapshot and pool.window_layers:
        pool.load_window_state(request.block_ids, hit_tokens, prefix.states[WINDOW_GROUP])


def _has_state(pool: KVPool, prefix: LoadedPrefix) -> bool:
    wanted = pool.window_state_bytes(prefix.hit_blocks * BLOCK_TOKENS)
    return not wanted or len(prefix.states.get(WINDOW_GROUP, b"")) == wanted


def _check(request: Request, pool: KVPool, prefix: LoadedPrefix) -> None:
    known = len(request.known_tokens)
    lent, hit_tokens = known // BLOCK_TOKENS, prefix.hit_blocks * BLOCK_TOKENS
    if not 0 <= prefix.hit_blocks <= lent:
        raise RuntimeError(f"prefix cache claims {prefix.hit_blocks} blocks, it was lent {lent}")
    start = prefix.replay_start_token
    if not 0 <= start <= hit_tokens:
        raise RuntimeError(f"prefix cache wants token {start} computed next, {prefix.hit_blocks} blocks were loaded")
    if prefix.mode is ReplayMode.SNAPSHOT and pool.window_layers and start == hit_tokens:
        return  # even if that is the whole prompt: its last token's window is in the state
    if start and start > hit_tokens - pool.window_tokens:
        raise RuntimeError(
            f"prefix cache wants token {start} computed next behind {prefix.hit_blocks} blocks, with a window of "
            f"{pool.window_tokens} tokens empty"
        )
    if start >= known:
        raise RuntimeError(f"prefix cache claims all {prefix.hit_blocks} blocks, and leaves no token to compute")
