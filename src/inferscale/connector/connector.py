"""The façade that vLLM loads; its methods only forward calls to the scheduler or the worker side.

    --kv-transfer-config '{"kv_connector": "InferScaleConnector", "kv_role": "kv_both",
                           "kv_connector_module_path": "inferscale.connector"}'

An exception in a scheduler-side hook ends the engine, so each of them has a broad `except` that
degrades: nothing is matched, the prompt is prefilled, the error is logged and counted. Where vLLM
already counts on our tokens, the request is failed instead (`failed_blocks`): never a wrong answer.
The worker side treats its copies likewise (`worker.py`), the residency server its questions.
Interface: vllm/distributed/kv_transfer/kv_connector/v1/base.py.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from inferscale.config import ConnectorConfig, connector_config
from inferscale.connector import compat
from inferscale.connector.disk_formats import remove_unused
from inferscale.connector.loaded_rotary import model_rotary
from inferscale.connector.messages import StepOrders, StepReport
from inferscale.connector.scheduler import SchedulerSide
from inferscale.connector.tiers_at_start import open_tiering
from inferscale.connector.worker import WorkerSide
from inferscale.encryption import find_key
from inferscale.errors import InvalidConfig, UnsupportedLayout
from inferscale.plan import WIRE_KEY
from inferscale.pool.disk import DiskStore
from inferscale.pool.places import open_place
from inferscale.pool.row_format import RowFormat
from inferscale.pool.sealing import Sealing
from inferscale.pool.segment_file import SegmentFile, format_name
from inferscale.pool.shared_store import SharedStore
from inferscale.pool.slab import num_pages
from inferscale.pool.table import PageTable
from inferscale.runtime.engine_log import share_engine_log
from inferscale.runtime.folder_lock import FolderLock
from inferscale.runtime.refusal import recorded
from inferscale.runtime.residency import ResidencyServer
from inferscale.runtime.secret import load_secret, open_runtime_dir

logger = logging.getLogger(__name__)


def _without_pool(config: ConnectorConfig) -> ConnectorConfig:
    """With one page of the pool, which nothing enters, and nothing below."""
    return replace(
        config, pool_size_bytes=1, pool_dtype="auto", host_size_bytes=0, disk_size_bytes=0, cold_location=None
    )


class StepMetadata(KVConnectorMetadata):
    """Our orders in vLLM's envelope."""

    def __init__(self, orders: StepOrders) -> None:
        self.orders = orders


class WorkerReport(KVConnectorWorkerMetadata):
    """Our report in vLLM's envelope; ranks are merged by `aggregate`."""

    def __init__(self, report: StepReport) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        return WorkerReport(self.report.merge(other.report))


class InferScaleConnector(KVConnectorBase_V1, SupportsHMA):
    """Memory for vLLM: captures KV of segments, injects them into later prompts.

    SupportsHMA: vLLM's hybrid KV cache manager stays on (`groups`).
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self.config = connector_config(transfer.kv_connector_extra_config, str(transfer.engine_id))
        self.scheduler: SchedulerSide | None = None
        self.worker: WorkerSide | None = None
        self._server: ResidencyServer | None = None
        self._lock: FolderLock | None = None
        assert self.config.runtime_dir is not None
        self._runtime_dir = open_runtime_dir(self.config.runtime_dir)
        share_engine_log()
        warning = compat.release_warning()
        if warning is not None and role == KVConnectorRole.SCHEDULER:
            logger.warning("%s", warning)
        with recorded(self._runtime_dir):
            if self._is_off:
                self.config = _without_pool(self.config)
            compat.refuse_pool_dtype(vllm_config, self.config.pool_dtype)
            self._cache = (compat.no_cache if self._is_off else compat.cache_shape)(
                vllm_config, kv_cache_config
            )
            self._format = RowFormat(self._cache.token, self._cache.dtype, self.config.pool_dtype)
            if role == KVConnectorRole.SCHEDULER:
                self._start_scheduler()

    def _start_scheduler(self) -> None:
        pages = num_pages(self.config.size_bytes, self.config.page_size_tokens, self._format.row_bytes)
        if self._is_off:
            pages = 1
        if pages == 0:
            page = self.config.page_size_tokens * self._format.row_bytes
            raise InvalidConfig(
                f"pool_size_bytes is {self.config.size_bytes}; one page of {self.config.page_size_tokens} "
                f"tokens of this model needs {page} bytes. Set pool_size_bytes to at least {64 * page}."
            )
        self._lock = FolderLock(self._runtime_dir)
        try:
            self._serve(pages)
        except BaseException:
            self._lock.release()
            raise

    def _serve(self, pages: int) -> None:
        table = PageTable(pages, self.config.page_size_tokens, self.config.max_share)
        model = compat.model_fingerprint(self._vllm_config)
        store, steps_at_once = self._store(model, 0), compat.steps_at_once(self._vllm_config)
        self.scheduler = SchedulerSide(
            table,
            groups=self._cache.groups,
            row_bytes=self._format.row_bytes,
            model=model,
            secret=load_secret(self._runtime_dir),
            tiering=open_tiering(
                self.config, table, store, self._num_ranks, steps_at_once, self._shared_store(model, 0)
            ),
        )
        if self.config.disk_bytes:
            remove_unused(store.folder.parent)
        self._server = ResidencyServer(self._runtime_dir, self.scheduler.answer)

    @property
    def _is_off(self) -> bool:
        """Whether nothing is captured or injected: there is no worker side, and no page to speak of."""
        return self.config.injection_path == "none"

    @property
    def _num_ranks(self) -> int:
        return int(self._vllm_config.parallel_config.tensor_parallel_size)

    def _store(self, model: str, rank: int) -> DiskStore:
        """The segments of one rank on disk; of use only where there is room for any."""
        folder = Path(self.config.disk_dir or ".")
        sealing = self._sealing() if self.config.disk_bytes else None
        name = self._format_name(model, sealing)
        return DiskStore(folder, name, rank, self._format.row_bytes, sealing)

    def _shared_store(self, model: str, rank: int) -> SharedStore | None:
        """The segments of one rank that servers share; None where they do not."""
        if self.config.cold_location is None:
            return None
        sealing = self._sealing()
        file = SegmentFile(self._format.row_bytes, sealing)
        place = open_place(self.config.cold_location)
        return SharedStore(place, self._format_name(model, sealing), rank, file)

    def _sealing(self) -> Sealing | None:
        key = find_key(self.config.encryption_key_file)
        return None if key is None else Sealing(key)

    def _format_name(self, model: str, sealing: Sealing | None) -> str:
        return format_name(
            f"{model}/{self._format.name}{self._cache.order}",
            self._format.row_bytes,
            self._num_ranks,
            sealing,
        )

    # scheduler side ---------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self.scheduler is not None
        try:
            return self.scheduler.num_matched_tokens(request, num_computed_tokens), False
        except Exception:  # noqa: BLE001 — an exception here would end the engine
            self._count_error(
                "Request %s: its plan could not be matched; its prompt is prefilled.", request.request_id
            )
            return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self.scheduler is not None
        if self._is_off:  # blocks that nobody knows are captured by nobody
            return
        try:
            self.scheduler.claim(request, blocks, num_external_tokens)
        except Exception:  # noqa: BLE001 — an exception here would end the engine
            if num_external_tokens:
                self.scheduler.fail_claim(request.request_id, blocks)
                self._count_error(
                    "Request %s fails: vLLM counts on %d tokens of the pool that could not be claimed.",
                    request.request_id,
                    num_external_tokens,
                )
            else:
                self._count_error(
                    "Request %s: its blocks could not be noted; its prompt is prefilled.", request.request_id
                )

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        assert self.scheduler is not None
        try:
            return StepMetadata(self.scheduler.build_orders(scheduler_output))
        except Exception:  # noqa: BLE001 — an exception here would end the engine
            self._count_error(
                "The orders of a step could not be built: requests that claimed memory in it fail, and those "
                "that are running capture nothing more."
            )
            return StepMetadata(self.scheduler.fail_open_claims(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        assert self.scheduler is not None
        try:
            report = connector_output.kv_connector_worker_meta
            if report is not None:
                self.scheduler.complete(report.report)
        except Exception:  # noqa: BLE001 — an exception here would end the engine
            self._count_error(
                "A report of the workers could not be read: segments captured in its steps stay text."
            )

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self.scheduler is not None
        try:
            outcome = self.scheduler.finish(request)
            return False, None if outcome is None else {WIRE_KEY: outcome}
        except Exception:  # noqa: BLE001 — an exception here would end the engine
            self._count_error("Request %s is finished, but has no outcome.", request.request_id)
            return False, None

    def reset_cache(self) -> bool:
        assert self.scheduler is not None
        try:
            self.scheduler.reset()
            return True
        except Exception:  # noqa: BLE001 — an exception here would end the engine
            self._count_error("The pool could not be emptied; vLLM is told that its reset failed.")
            return False

    def shutdown(self) -> None:
        if self.worker is not None:
            self.worker.close()
        if self.scheduler is not None and self.scheduler.tiering is not None:
            self.scheduler.tiering.close()
        server, self._server = self._server, None
        lock, self._lock = self._lock, None
        try:
            try:
                if server is not None:
                    server.close()
            finally:
                if lock is not None:
                    lock.release()
        except Exception:  # noqa: BLE001 — the engine has more to shut down
            self._count_error("The runtime folder could not be left in order; its socket file may remain.")

    def _count_error(self, message: str, *arguments: object) -> None:
        assert self.scheduler is not None
        self.scheduler.counters.internal_errors += 1
        logger.exception("InferScale, internal error. " + message, *arguments)

    # worker side ------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._is_off:
            return
        with recorded(self._runtime_dir):
            self._start_worker(kv_caches)

    def _start_worker(self, kv_caches: dict[str, torch.Tensor]) -> None:
        layers = compat.layer_caches(self._vllm_config, kv_caches, self._cache.layers)
        self.worker = WorkerSide(
            self.config,
            layers,
            model_rotary(self._vllm_config, layers),
            self._cache.num_blocks,
            [group.block_size for group in self._cache.groups],
            lambda: compat.free_bytes_per_worker(self._vllm_config, layers[0].cache.device),
            self._opened_store() if self.config.disk_bytes else None,
            self._shared_store(compat.model_fingerprint(self._vllm_config), compat.worker_rank())
            if self.config.cold_location is not None
            else None,
        )
        compat.watch_weights(layers, self.worker.note_new_weights)
        # Both sides count pages by this size: orders must not name rows that a worker does not have.
        size = self.worker.slab.format.row_bytes
        if size != self._format.row_bytes:
            raise UnsupportedLayout(
                f"One token takes {size} bytes in the layers of this worker, but {self._format.row_bytes} by "
                "vLLM's cache configuration; InferScale needs the same layers on both sides."
            )

    def _opened_store(self) -> DiskStore:
        store = self._store(compat.model_fingerprint(self._vllm_config), compat.worker_rank())
        store.open()
        return store

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._is_off:
            return
        assert self.worker is not None
        self.worker.before_forward(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: all layers are injected before the forward pass, on its stream."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing to do: capture happens once, after the forward pass."""

    def wait_for_save(self) -> None:
        if self._is_off:
            return
        assert self.worker is not None
        self.worker.after_forward(self._orders())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self.worker is None else self.worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        report = None if self.worker is None else self.worker.take_report()
        return None if report is None else WorkerReport(report)

    def _orders(self) -> StepOrders:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.orders
