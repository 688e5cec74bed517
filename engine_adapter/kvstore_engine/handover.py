"""Handing a request over: its KV into the store and out again, at the exact token.

    engine A                        store                         engine B
    hand over ── complete blocks ─▶ kept for class `handoff` ───▶ take over: verified, straight into its pool
              ── unfinished tail ─▶ a state object           ───▶
              ── ticket ────────────────────────────────────────▶ tokens, sampling, salt …

Whatever the store did not take, or no longer has, is computed again: the ticket is valid without any of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvstore_client import PrefixHash, PutStatus, prefix_seed
from kvstore_engine.hook import LoadedPrefix
from kvstore_engine.store_steps import HANDOFF_CLASS
from kvstore_engine.ticket import FOREIGN, PausedRequest, Ticket, TicketError, read_ticket, state_name, write_ticket

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstore_client import Chain, NamespaceHandle, PutResult
    from kvstore_engine.store_steps import StoreSteps


@runtime_checkable
class HandoverHook(Protocol):
    """A prefix cache that hands requests over, as the engine sees it."""

    def hand_over(
        self,
        request: PausedRequest,
        views: Sequence[memoryview],
        states: Mapping[str, bytearray],
        *,
        patience_s: float = 0.0,
    ) -> bytes:
        """Store a request's KV and write its ticket. Returns when the store has confirmed it, or did not in its time.

        Args:
            views: the bytes of all its complete blocks, from the first on.
            states: kind -> what else is needed at the exact token: the unfinished tail, the window layers' KV.
            patience_s: what each call to the store may take beyond its usual time.
        """
        ...

    def open_ticket(self, ticket: bytes) -> Ticket:
        """Read a ticket. Raises: TicketError: it is damaged, or of another namespace."""
        ...

    def take_over(self, ticket: Ticket, views: Sequence[memoryview], state_sizes: Mapping[str, int]) -> LoadedPrefix:
        """Bring a request's KV.

        Args:
            views: writable memory of all its complete blocks, lent until the return.
            state_sizes: kind -> bytes of what else is needed at the exact token.
        Returns: what is there. If that is everything, `replay_start_token` is the ticket's `computed_tokens` and `states` has
            all kinds asked for; else it is from where to compute, and `states` is empty.
        """
        ...


class Handover:
    """Moves requests through one namespace."""

    def __init__(self, namespace: NamespaceHandle, steps: StoreSteps) -> None:
        self._namespace = namespace
        self._steps = steps

    def hand_over(
        self,
        request: PausedRequest,
        views: Sequence[memoryview],
        states: Mapping[str, bytearray],
        patience_s: float,
    ) -> bytes:
        """See `HandoverHook.hand_over`."""
        chain = self._chain(request)
        saved, stored = self._store_blocks(request, chain, views, patience_s)
        stored_states = {}
        if stored == len(views):
            beside = self._last_hash(request, chain)
            for kind, state in states.items():
                if state and self._put_state(request, beside, kind, state, patience_s):
                    stored_states[kind] = len(state)
        return write_ticket(
            Ticket(
                namespace=self._namespace.digest,
                request=replace(request, saved_blocks=saved),
                stored_blocks=stored,
                states=stored_states,
                block_bytes=self._namespace.block_bytes,
            )
        )

    def open_ticket(self, ticket: bytes) -> Ticket:
        """See `HandoverHook.open_ticket`."""
        opened = read_ticket(ticket)
        if opened.namespace != self._namespace.digest:
            raise TicketError(
                FOREIGN,
                f"the ticket is of namespace {opened.namespace.hex()[:16]}, this engine's is "
                f"{self._namespace.digest.hex()[:16]}: another model, KV layout or tenant",
            )
        return opened

    def take_over(self, ticket: Ticket, views: Sequence[memoryview], state_sizes: Mapping[str, int]) -> LoadedPrefix:
        """See `HandoverHook.take_over`."""
        request = ticket.request
        chain = self._chain(request)
        blocks = self._steps.load_blocks(chain, views, b"").blocks if views else 0
        wanted = {kind: size for kind, size in state_sizes.items() if size}
        if blocks == len(views):
            states = self._fetch_states(request, self._last_hash(request, chain), wanted)
            if wanted and len(states) == len(wanted):
                return LoadedPrefix(blocks, request.computed_tokens, states=states)
        # No window KV and no tail: what full blocks alone can be gone on from.
        return self._steps.shortened(blocks)

    def _store_blocks(
        self, request: PausedRequest, chain: Chain, views: Sequence[memoryview], patience_s: float
    ) -> tuple[int, int]:
        """Returns: leading blocks confirmed for the request's own class, and for the hand-over.

        They are put for the request's own class, as they would be at its end, so that its next turn hits them in an hour. A put of
        the last one for `handoff` is a use of all before it too: they all live for that class's time at least.
        """
        if not views:
            return 0, 0
        # A peek: the hit rate is about prompts, not about hand-overs.
        match = self._steps.look_up(chain, None, peek=True, patience_s=patience_s)
        if match.failure is not None:
            return 0, 0
        saved = min(match.hit_length_blocks, request.saved_blocks)
        saved += _confirmed(
            self._steps.put_blocks(chain, saved, views[saved:], request.context.traffic_class, patience_s=patience_s)
        )
        stored = saved
        if saved < len(views):  # the class may be full, or over its share
            stored += _confirmed(
                self._steps.put_blocks(chain, saved, views[saved:], HANDOFF_CLASS, patience_s=patience_s)
            )
        if stored == saved > 0:
            self._steps.put_blocks(chain, stored - 1, views[stored - 1 : stored], HANDOFF_CLASS, patience_s=patience_s)
        return saved, stored

    def _put_state(
        self, request: PausedRequest, beside: PrefixHash, kind: str, state: bytearray, patience_s: float
    ) -> bool:
        name = state_name(request, kind)
        report = self._steps.put_state(beside, name, memoryview(state), patience_s=patience_s)
        return _confirmed(report.results) == 1

    def _fetch_states(
        self, request: PausedRequest, beside: PrefixHash, wanted: Mapping[str, int]
    ) -> dict[str, bytearray]:
        states = {}
        for kind, size in wanted.items():
            state = self._steps.fetch_state(beside, state_name(request, kind), size)
            if state is None or len(state) != size:
                break
            states[kind] = state
        return states

    def _chain(self, request: PausedRequest) -> Chain:
        context = request.context
        return self._namespace.chain(
            request.computed, salt=context.salt, adapter=context.adapter, extra_keys=context.extra_keys
        )

    def _last_hash(self, request: PausedRequest, chain: Chain) -> PrefixHash:
        """What the states stand beside: the hash of the last full block, or that before block 0."""
        if len(chain):
            return chain[len(chain) - 1]
        context = request.context
        return PrefixHash(prefix_seed(self._namespace.digest, salt=context.salt, adapter=context.adapter))


def _confirmed(results: Sequence[PutResult]) -> int:
    """Leading blocks that are there."""
    for index, result in enumerate(results):
        if result.status is PutStatus.REJECTED:
            return index
    return len(results)
