"""The half in vLLM's scheduler: looks prefixes up, and says what the workers are to load and save.

Nothing here waits for the store. A look-up runs on a thread, and vLLM is told to ask again until it has ended. For each request
the store is asked once before it is computed; once more if vLLM has preempted it; and never again after a load that failed.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvstore_api.limits import BLOCK_TOKENS
from kvstore_api.v1 import types_pb2
from kvstore_client import Chain, KVStoreClient, NamespaceSpec
from kvstore_engine.store_steps import StoreSteps
from kvstore_engine.vllm.identity import media_have_names
from kvstore_engine.vllm.messages import LOOK_UP_BUSY, PASSING, QUEUE_S, StepMetadata, Transfer, WorkerReport
from kvstore_engine.vllm.metrics import KVStoreStats
from kvstore_engine.vllm.placement import stored_groups
from kvstore_engine.vllm.requests import Adapters, Chains, has_name, traffic_class
from kvstore_engine.vllm.tracked import AGAIN_S, Answer, Tracked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvstore_client import NamespaceHandle
    from kvstore_engine.plug_settings import PlugSettings
    from kvstore_engine.vllm.messages import WorkerPlace

LOOK_UP_THREADS: Final = 4
# How long an answer is taken for true. What it names may be gone later, which a load would find out, at the price of a miss.
ANSWER_KEEPS_S: Final = 5.0
# How long a step that computes nothing waits for a look-up.
IDLE_S: Final = 0.001

# A request's KV depends on weights that cannot be told from others.
NO_NAME: Final = "NO_NAME"

_LOGGER = logging.getLogger("kvstore_engine.vllm")


class SchedulerHalf:
    """Called by vLLM's scheduler, on its thread."""

    def __init__(
        self,
        settings: PlugSettings,
        config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args: clock: in seconds, by which look-ups grow old and saves are tried again."""
        self._settings = settings
        self._clock = clock
        transfer = config.kv_transfer_config
        assert transfer is not None
        self._media_have_names = media_have_names(config)
        self._loads_wanted, self._saves_wanted = transfer.is_kv_consumer, transfer.is_kv_producer
        self._groups = stored_groups(kv_cache_config)
        self._block_sizes = [BLOCK_TOKENS // group.ratio for group in self._groups]
        self._client = KVStoreClient(settings.client)
        self._benefit = settings.benefit()
        self._threads = ThreadPoolExecutor(LOOK_UP_THREADS, thread_name_prefix="kvstore-look-up")
        self._namespaces: dict[WorkerPlace, NamespaceHandle] = {}
        self._steps: dict[WorkerPlace, StoreSteps] = {}
        self._block_bytes = 0
        self._requests: dict[str, Tracked] = {}
        self._loads: list[Transfer] = []
        # Steps under way: when begun, how many tokens. vLLM has few at once.
        self._running: deque[tuple[float, int]] = deque(maxlen=8)
        self._last_output_s = 0.0
        self._stats = KVStoreStats()
        self._manager: KVCacheManager | None = None
        self._has_tried_again = False  # in this step: one request does, or with many of them it would take seconds
        self._weights = b""
        self._adapters = Adapters()

    def bind(self, manager: KVCacheManager) -> None:
        """vLLM's manager, which knows where a request's blocks are."""
        self._manager = manager

    def meet_workers(self, namespaces: Mapping[WorkerPlace, bytes]) -> None:
        """The workers have said what their KV is. Without them there is no hit and no save."""
        for place, data in namespaces.items():
            spec = NamespaceSpec.from_proto(types_pb2.NamespaceSpec.FromString(data))
            handle = self._client.namespace(spec)
            self._namespaces[place], self._steps[place] = handle, StoreSteps(handle)
        self._block_bytes = sum(handle.block_bytes for handle in self._namespaces.values())

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def reset(self) -> None:
        """What was computed before is not to be used any more, in this process: its weights may have been replaced.

        Nobody can tell other processes which weights these are now. So nothing is shared with them any more.
        """
        _LOGGER.warning(
            "vLLM was told to forget what connectors have, as after a change of weights: this process shares nothing any more with "
            "what it stored before, nor with other processes; restart it to share again"
        )
        self._weights = os.urandom(16)
        self._requests.clear()

    # Before a request is computed

    def matched_tokens(self, request: Request, local_tokens: int) -> int | None:
        """Tokens that can be loaded beyond those that vLLM has itself; None: ask again."""
        tracked = self._tracked(request)
        if tracked is None or tracked.load_failed:
            return 0
        tracked.local_tokens = local_tokens
        usable: int = (request.num_tokens - 1) // BLOCK_TOKENS
        self._ask_if_needed(tracked)
        if usable * BLOCK_TOKENS <= local_tokens:
            return 0  # the answer only tells from where on to save
        answer = self._answer(tracked)
        if answer is None:
            return None
        if not tracked.may_load:
            return 0
        hit_tokens: int = min(answer.hit_blocks, usable) * BLOCK_TOKENS
        is_first = self._count(tracked, answer)
        gain = hit_tokens - local_tokens
        if gain <= 0:
            return 0
        if not self._benefit.is_worth(gain, gain * self._block_bytes // BLOCK_TOKENS):
            self._stats.add("not_worth_it_tokens", gain if is_first else 0)
            return 0
        return gain

    def allocated(self, request: Request, block_ids: Sequence[Sequence[int]], external_tokens: int) -> None:
        """vLLM has made room for what was matched."""
        tracked = self._requests.get(request.request_id)
        if not external_tokens or tracked is None or tracked.chains is None:
            return
        answer = self._answer(tracked)
        end_tokens = tracked.local_tokens + external_tokens
        first, end = tracked.local_tokens // BLOCK_TOKENS, -(-end_tokens // BLOCK_TOKENS)
        tracked.load_first = first
        self._loads.append(
            Transfer(
                request_id=request.request_id,
                chains=tracked.chains.first(end),
                leases=answer.leases if answer is not None else {},
                first_block=first,
                engine_blocks=self._blocks_of(block_ids, first, end, tracked.local_tokens, end_tokens),
                traffic_class=traffic_class(request, self._settings.traffic_class),
            )
        )
        tracked.look_up = None  # if vLLM preempts the request, what is stored then is another question

    def _tracked(self, request: Request) -> Tracked | None:
        tracked = self._requests.get(request.request_id)
        if tracked is None and self._namespaces and has_name(request, media_have_names=self._media_have_names):
            may_load = self._loads_wanted and not request.skip_reading_prefix_cache
            tracked = self._requests[request.request_id] = Tracked(request, may_load=may_load)
        return tracked

    def _ask_if_needed(self, tracked: Tracked) -> None:
        look_up = tracked.look_up
        if look_up is not None and (not look_up.done() or self._clock() - look_up.result().at_s < ANSWER_KEEPS_S):
            return
        self._ask(tracked, is_use=tracked.may_load)

    def _ask(self, tracked: Tracked, *, is_use: bool) -> None:
        """Look all full blocks up, that of a last token too: it is computed again, but need not be saved again."""
        tracked.begun_s = self._clock()
        tracked.look_up = self._threads.submit(self._look_up, tracked, tracked.request.num_tokens, is_use)

    def _answer(self, tracked: Tracked) -> Answer | None:
        """What the look-up has found, once it has ended; it is given up when it has not begun in `QUEUE_S`."""
        look_up = tracked.look_up
        if look_up is None:
            return Answer(trouble=LOOK_UP_BUSY)
        if not look_up.done():
            if self._clock() - tracked.begun_s > QUEUE_S and look_up.cancel():
                tracked.look_up = None
                self._stats.count_miss(LOOK_UP_BUSY)
                tracked.load_failed = True  # it goes on at once, and is not asked for again
                return Answer(trouble=LOOK_UP_BUSY)
            return None
        return look_up.result()

    def _look_up(self, tracked: Tracked, tokens: int, is_use: bool) -> Answer:
        """On a thread. The hit of a request is the shortest of its workers' hits."""
        try:
            answer = self._asked(tracked, tokens // BLOCK_TOKENS, is_use=is_use)
        except Exception as error:  # a bug; neither the engine nor the thread may end by it
            answer = self._missed(type(error).__name__, is_use=is_use)
        return replace(answer, usable_blocks=(tokens - 1) // BLOCK_TOKENS, at_s=self._clock())

    def _asked(self, tracked: Tracked, full_blocks: int, *, is_use: bool) -> Answer:
        request = tracked.request
        if tracked.chains is None:
            adapter = self._adapters.identity_of(request)
            if adapter is None:
                return self._missed(NO_NAME, is_use=is_use)
            digests = {place: bytes(handle.digest) for place, handle in self._namespaces.items()}
            tracked.chains = Chains.of(request, digests, adapter, self._weights)
        if full_blocks < 1:
            return Answer()
        refusal = next((steps.refusal("lookup") for steps in self._steps.values()), "")
        if refusal:  # neither hashing nor asking is worth it
            return self._missed(refusal, is_use=is_use)
        began_s = time.monotonic()
        tracked.chains.grow(request, full_blocks)
        hit = full_blocks
        leases: dict[WorkerPlace, bytes] = {}
        for place, data in tracked.chains.first(full_blocks).items():
            kept_for = traffic_class(request, self._settings.traffic_class)
            match = self._steps[place].look_up(Chain(data), kept_for, peek=not is_use)
            if match.failure is not None:
                return self._missed(match.failure.reason, is_use=is_use)
            hit, leases[place] = min(hit, match.hit_length_blocks), match.lease
        self._benefit.note_look_up(time.monotonic() - began_s)
        return Answer(hit, leases)

    def _missed(self, reason: str, *, is_use: bool) -> Answer:
        if is_use:
            self._stats.count_miss(reason)
        return Answer(trouble=reason)

    def _count(self, tracked: Tracked, answer: Answer) -> bool:
        """Count a request's hit, once. Returns: whether this was the time."""
        if tracked.saved_blocks is None and not answer.trouble:
            tracked.saved_blocks = answer.hit_blocks
        if tracked.counted:
            return False
        tracked.counted = True
        self._stats.add("asked_tokens", answer.usable_blocks * BLOCK_TOKENS)
        self._stats.add("hit_tokens", min(answer.hit_blocks, answer.usable_blocks) * BLOCK_TOKENS)
        return True

    # With each step

    def step(self, output: SchedulerOutput) -> StepMetadata:
        """What the workers are to begin in this step."""
        self._running.append((time.monotonic(), output.total_num_scheduled_tokens))
        metadata = StepMetadata(self._loads, [], is_idle=not output.total_num_scheduled_tokens)
        self._loads = []
        self._has_tried_again = False
        if metadata.is_idle:
            self._let_look_ups_go_on()
        computed = {data.req_id: data.num_computed_tokens for data in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, tokens in computed.items():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                metadata.saves += self._to_save(tracked, tokens + output.num_scheduled_tokens.get(request_id, 0))
        return metadata

    def _let_look_ups_go_on(self) -> None:
        """vLLM has nothing to compute, and asking again and again would only take the look-ups' time."""
        pending = [t.look_up for t in self._requests.values() if t.look_up is not None and not t.look_up.done()]
        if pending:
            wait(pending, IDLE_S, FIRST_COMPLETED)

    def _to_save(self, tracked: Tracked, computed_tokens: int) -> list[Transfer]:
        """The blocks that are full and computed at the end of a step in which so many tokens are computed."""
        if tracked.saved_blocks is None:
            self._learn_what_is_stored(tracked)
        request, chains, first = tracked.request, tracked.chains, tracked.saved_blocks
        # Only tokens that are known have names; drafts and what is sampled in steps under way are not.
        end = tracked.full_blocks = min(computed_tokens, request.num_tokens) // BLOCK_TOKENS
        if first is None or chains is None or end <= first or self._manager is None or not self._saves_wanted:
            return []
        if tracked.look_up is not None and not tracked.look_up.done():
            return []  # it may be hashing
        if tracked.gap:
            if self._has_tried_again or not tracked.is_due(self._clock()):
                return []
            self._has_tried_again = True
            tracked.gap = ""
        chains.grow(request, end)
        block_ids = self._manager.get_block_ids(request.request_id)
        engine_blocks = self._blocks_of(block_ids, first, end, 0, end * BLOCK_TOKENS)
        tracked.saved_blocks = end
        kept_for = traffic_class(request, self._settings.traffic_class)
        return [Transfer(request.request_id, chains.first(end), {}, first, engine_blocks, kept_for)]

    def _learn_what_is_stored(self, tracked: Tracked) -> None:
        if tracked.look_up is not None and not tracked.look_up.done():
            return
        answer = tracked.look_up.result() if tracked.look_up is not None else Answer(trouble=LOOK_UP_BUSY)
        self._count(tracked, answer)
        tracked.gap = answer.trouble
        is_due = self._clock() - answer.at_s > AGAIN_S
        if answer.trouble in PASSING and is_due and self._saves_wanted:
            self._ask(tracked, is_use=False)

    def _blocks_of(
        self, block_ids: Sequence[Sequence[int]], first: int, end: int, from_token: int, to_token: int
    ) -> list[list[list[int]]]:
        """The engine's blocks of blocks [first, end) for each stored group; those outside of the tokens are not touched."""
        groups = []
        for group, size in zip(self._groups, self._block_sizes, strict=True):
            ids, blocks = block_ids[group.index], []
            for block in range(first, end):
                numbers = range(block * group.ratio, (block + 1) * group.ratio)
                blocks.append([ids[n] if n < len(ids) and from_token <= n * size < to_token else 0 for n in numbers])
            groups.append(blocks)
        return groups

    # After a step

    def learn(self, output: KVConnectorOutput) -> None:
        """What the workers report."""
        self._note_speed()
        report = output.kv_connector_worker_meta
        if not isinstance(report, WorkerReport):
            return
        if report.load_bytes:
            self._benefit.note_load(report.load_bytes, report.load_s)
        self._learn_of_loads(report)
        self._learn_of_saves(report)

    def _learn_of_loads(self, report: WorkerReport) -> None:
        for request_id in report.failed & self._requests.keys():
            tracked = self._requests[request_id]
            tracked.load_failed = True  # vLLM would ask for the same again, and again
            if request_id in report.absent:  # it is saved anew once it is computed
                valid_blocks = tracked.load_first + report.loaded_blocks[request_id]
                tracked.saved_blocks = min(valid_blocks, tracked.saved_blocks or 0)

    def _learn_of_saves(self, report: WorkerReport) -> None:
        """What lies behind a block that is not saved can be hit only if that block is saved after all."""
        for request_id, (first, end, reason) in report.gaps.items():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                tracked.note_gap(first, reason, self._clock())
            else:  # it has ended
                self._stats.count_unsaved(reason, end - first)
        for request_id in report.given_up & self._requests.keys():
            self._requests[request_id].give_up()

    def _note_speed(self) -> None:
        """The time of a step is that from its begin, or from the end of the one before, to its end."""
        if not self._running:
            return
        begun_s, tokens = self._running.popleft()
        now_s = time.monotonic()
        self._benefit.note_prefill(tokens, now_s - max(begun_s, self._last_output_s))
        self._last_output_s = now_s

    def forget(self, request: Request) -> None:
        """The request has ended."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return
        if tracked.look_up is not None:
            tracked.look_up.cancel()
        if self._saves_wanted and tracked.unsaved_blocks:
            self._stats.count_unsaved(tracked.gap, tracked.unsaved_blocks)

    def stats(self) -> KVStoreStats | None:
        """What was counted since the last time."""
        return self._stats.taken()
