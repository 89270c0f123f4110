"""The class that vLLM makes, once in the scheduler's process and once in the worker's. Dispatch only."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.client import EngineClient, Pages
from kvtier.types import Layout
from kvtier_vllm import weights
from kvtier_vllm.checks import refuse_unserved, require_recompute
from kvtier_vllm.event_source import Endpoints, endpoints_of
from kvtier_vllm.identity import weights_identity
from kvtier_vllm.layout import block_rows, kv_dtype, layer_order, layout_of
from kvtier_vllm.metadata import Handshake, StepOrders, StepReport
from kvtier_vllm.scheduler import SchedulerSide
from kvtier_vllm.settings import Settings
from kvtier_vllm.worker import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

Verify = Literal["off", "sample", "all"]

logger = logging.getLogger("vllm.kvtier")


class KVTierConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Keeps prompt KV in the node's `kvtier serve` and loads it back instead of computing it again.

    Raises `ConfigError` at start for an engine whose KV it cannot keep right. A node that is missing or
    fails later costs a miss, never a request.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.settings = Settings.parse(self._kv_transfer_config.kv_connector_extra_config)
        refuse_unserved(vllm_config, kv_cache_config)
        require_recompute(vllm_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        engine_id = str(self._kv_transfer_config.engine_id)
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                self.settings,
                weights_identity(vllm_config, self.settings.revision),
                engine_id,
                kv_cache_config.num_blocks,
                self._make_client,
                loads=self._kv_transfer_config.is_kv_consumer,
                saves=self._kv_transfer_config.is_kv_producer,
                events=_followed_events(vllm_config),
            )
        else:
            weights.install_hooks()
            self._worker = WorkerSide(self.settings, engine_id)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: a save that was dropped is a later miss."""
        return False

    @property
    def scheduler(self) -> SchedulerSide:
        """The scheduler's side, where this is one."""
        assert self._scheduler is not None
        return self._scheduler

    @property
    def worker(self) -> WorkerSide:
        """The worker's side, where this is one."""
        assert self._worker is not None
        return self._worker

    def shutdown(self) -> None:
        """End threads and calls; bounded."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    def _make_client(self, layout: Layout) -> EngineClient:
        settings = self.settings
        return EngineClient(
            settings.socket_path,
            layout,
            description=f"vllm {vllm.__version__} {self._role.name.lower()}",
            lookup_timeout_s=settings.lookup_timeout_s,
            call_timeout_s=settings.call_timeout_s,
            load_floor_s=settings.load_floor_s,
            verify_loads=cast(Verify, settings.verify_loads) or None,
        )

    # -- worker ----------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Check the engine's KV memory against its layout and begin to serve it."""
        group = self._kv_cache_config.kv_cache_groups[0]
        names = layer_order(group.layer_names)
        handshake = self._describe(names, group.kv_cache_spec, kv_caches)
        rows = block_rows(kv_caches, names, self._kv_cache_config.num_blocks, handshake.layout)
        self.worker.serve(rows, handshake, self._make_client, Pages.from_tensors)

    def _describe(self, names: list[str], spec: Any, kv_caches: dict[str, torch.Tensor]) -> Handshake:
        layers = self._vllm_config.compilation_config.static_forward_context
        backends = [layers[name].get_attn_backend().get_name() for name in names]
        cache_dtype = self._vllm_config.cache_config.cache_dtype
        on_cpu = kv_caches[names[0]].device.type == "cpu"
        layout = layout_of(
            spec,
            cache_dtype,
            names,
            engine_layout=self._kv_cache_config.kv_cache_layout,
            backends=backends,
            cpu_isa=_cpu_isa(layers[names[0]]) if on_cpu else None,
            engine_version=vllm.__version__,
        )
        return Handshake(layout, kv_dtype(cache_dtype, spec))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """The layout, for the scheduler's side."""
        return self.worker.handshake

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """First call of a step."""
        assert isinstance(kv_connector_metadata, StepOrders)
        self.worker.begin_step(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads have started with the step."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: a step never depends on one that is under way."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved whole, after the step."""

    def wait_for_save(self) -> None:
        """Note the saves."""
        self.worker.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose saves, and whose loads, have ended."""
        sent, loaded = self.worker.take_finished()
        return sent or None, loaded or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks to compute."""
        return self.worker.take_invalid_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """News for the scheduler's side."""
        return self.worker.take_report()

    # -- scheduler -------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """The engine's own cache."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler.bind(kv_cache_manager)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """The worker's layout."""
        (handshake,) = metadata.values()
        if isinstance(handshake, Handshake):
            self.scheduler.shake_hands(handshake)
        else:
            logger.error(
                "kvtier is off: another connector of the MultiConnector answers the scheduler in its place. "
                "Put KVTierConnector first in its list"
            )

    def on_new_request(self, request: Request) -> None:
        """Start its lookup."""
        try:
            self.scheduler.on_new_request(request)
        except Exception:
            self._forget(request)

    def _forget(self, request: Request) -> None:
        """An exception here would end the engine; without an offer nothing is lost but time."""
        logger.exception("kvtier: a request is not cached because of an internal error")
        self.scheduler.forget(request.request_id)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Offer what can be loaded."""
        try:
            return self.scheduler.matched_tokens(request, num_computed_tokens)
        except Exception:
            self._forget(request)
            return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The offer was taken, or not."""
        block_ids = blocks.get_block_ids()[0] if num_external_tokens else []
        self.scheduler.after_alloc(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Orders for the worker."""
        return self.scheduler.step_orders(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """News from the worker."""
        report = connector_output.kv_connector_worker_meta
        assert report is None or isinstance(report, StepReport)
        self.scheduler.report(report, connector_output.finished_sending or ())

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        """Retain its blocks while they are being saved."""
        return self.scheduler.finished(request), None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        """As `request_finished`: there is one group."""
        return self.scheduler.finished(request), None

    def has_pending_block_frees(self) -> bool:
        """Whether saves will give blocks back soon."""
        return self.scheduler.has_pending_block_frees()

    def reset_cache(self) -> bool:
        """Start a new generation."""
        return self.scheduler.reset_cache()


def _followed_events(vllm_config: VllmConfig) -> Endpoints | None:
    events = endpoints_of(vllm_config)
    if isinstance(events, str):
        logger.warning("kvtier: the node is not told what the engine's own memory has: %s", events)
        return None
    return events


def _cpu_isa(layer: Any) -> str:
    """What decides how vLLM's CPU kernels pack a block: the kernel, and the instructions it was built for."""
    return f"{getattr(layer, 'isa', 'plain')}-{torch.backends.cpu.get_cpu_capability()}"
