"""What vLLM calls: `KVConnectorBase_V1` with `SupportsHMA`, handed on to the half that belongs to the caller's process."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvstore_engine.plug_settings import PlugSettings
from kvstore_engine.vllm.messages import StepMetadata, WorkerIdentity
from kvstore_engine.vllm.metrics import KVStorePromMetrics, KVStoreStats
from kvstore_engine.vllm.scheduler import SchedulerHalf
from kvstore_engine.vllm.worker import WorkerHalf

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorWorkerMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats, PromMetric, PromMetricT
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvstore_engine.vllm.messages import WorkerPlace


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """A store's blocks for vLLM. Its settings are the `kv_connector_extra_config`: see `PlugSettings`."""

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Raises: KVStoreConfigError: a setting is wrong, the model's identity is unknown, or its KV is of an unknown kind."""
        super().__init__(vllm_config, role, kv_cache_config)
        settings = PlugSettings.read(self._kv_transfer_config.kv_connector_extra_config or {})
        self._several_groups = len(kv_cache_config.kv_cache_groups) > 1
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._handled: BaseException | None = None  # that the caller was handling when the step began
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(settings, vllm_config, kv_cache_config)
        else:
            self._worker = WorkerHalf(settings, vllm_config, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that does not happen is a later miss, and no more."""
        return False

    def shutdown(self) -> None:
        """vLLM ends."""
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.close()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Of both halves; vLLM adds them up."""
        half = self._scheduler or self._worker
        return half.stats() if half is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Counts as they come from another process."""
        return KVStoreStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVStorePromMetrics:
        """Where vLLM puts them."""
        return KVStorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # In the scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Who knows where blocks are."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._at_scheduler.bind(kv_cache_manager)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[WorkerPlace, KVConnectorHandshakeMetadata]) -> None:
        """What the workers say at the start."""
        identities = {place: data for place, data in metadata.items() if isinstance(data, WorkerIdentity)}
        self._at_scheduler.meet_workers({place: data.namespace for place, data in identities.items()})

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded, always beside the engine's work; None: ask again."""
        tokens = self._at_scheduler.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """There is room for them."""
        self._at_scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What the workers are to begin."""
        return self._at_scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What came of it."""
        self._at_scheduler.learn(connector_output)

    def reset_cache(self) -> bool:
        """vLLM was told to forget what connectors have, as after a change of weights."""
        self._at_scheduler.reset()
        return True

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Nothing of its memory is needed any more: saves are copies."""
        del block_ids
        self._at_scheduler.forget(request)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same with several KV groups."""
        del block_ids
        return self.request_finished(request, [])

    @property
    def _at_scheduler(self) -> SchedulerHalf:
        assert self._scheduler is not None
        return self._scheduler

    # In a worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """vLLM has its KV memory."""
        self._at_worker.place(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """For the scheduler."""
        return self._at_worker.identity()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        self._handled = sys.exc_info()[1]

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ANN401
        """Begin this step's loads."""
        del forward_context, kwargs
        self._at_worker.start_loads(self._step, self._place)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No step waits for a load."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Blocks are saved whole, at the end of a step."""

    def wait_for_save(self) -> None:
        """The step has been computed; or has failed, since vLLM calls this while its exception is on the way, too."""
        has_failed = sys.exc_info()[1] is not self._handled
        self._at_worker.start_saves(self._step, self._place, has_failed=has_failed)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that have ended. With one KV group vLLM keeps the blocks that are valid; with several it starts anew."""
        del finished_req_ids
        finished, failed = self._at_worker.finished_loads()
        return KVConnectorTransferResults(
            finished_recving=finished, failed_recving=failed if self._several_groups else set()
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that loads did not bring."""
        invalid = self._at_worker.invalid_blocks()
        return set() if self._several_groups else invalid

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """For the scheduler."""
        return self._at_worker.report()

    @property
    def _at_worker(self) -> WorkerHalf:
        assert self._worker is not None
        return self._worker

    @property
    def _step(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata

    @property
    def _place(self) -> WorkerPlace:
        return get_pp_group().rank_in_group, get_tp_group().rank_in_group
