"""Worker side: owns the slab, carries out the scheduler side's orders, decides nothing.

A step: inject, zero freed pages, load, (forward pass,) capture, average, save, report. All work is put on the
engine's own stream (or thread, on a CPU), in step order; that order is what makes it safe to give pages away
in the step that reads them. Only copies from and to lower tiers run beside it (`pool.lower`). To inject the
later layers beside the forward pass, on a stream of its own, gains nothing: both live on the memory's
bandwidth (docs/log.md).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np
import torch

from inferscale.budget import MemoryBudget
from inferscale.config import ConnectorConfig
from inferscale.connector.averaging import Averager
from inferscale.connector.layout import BlockLayout, LayerCache, check_layout, probe_layout
from inferscale.connector.messages import StepOrders, StepReport
from inferscale.connector.movement import Caches, Part, choose_mover
from inferscale.errors import PoolTooLarge, UnsupportedLayout
from inferscale.kernels.staging import Staging
from inferscale.pool.disk import DiskStore
from inferscale.pool.lower import LowerTiers
from inferscale.pool.moves import GroupMoves, Int32Array
from inferscale.pool.row_format import RowFormat
from inferscale.pool.shared_store import SharedStore
from inferscale.pool.slab import Slab, num_pages
from inferscale.rope import Rotary
from inferscale.row_size import RowShape

logger = logging.getLogger(__name__)


_DOUBTED_STEPS = 4
"""Behind a failed capture: more than are ordered before the scheduler side hears of it."""


class _OtherWeights(Exception):
    """The model's weights are not those that the orders of a step are for."""


class WorkerSide:
    """The pool of one worker.

    layers: by KV cache group, in the order that rows have them; all caches on one device with one dtype.
    num_blocks: of vLLM's scheduler; block_sizes: of its groups. free_bytes: asked once, after vLLM took its
    memory. Raises UnsupportedLayout and PoolTooLarge.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        layers: list[LayerCache],
        rotary: Rotary,
        num_blocks: int,
        block_sizes: Sequence[int],
        free_bytes: Callable[[], int],
        disk: DiskStore | None = None,
        cold: SharedStore | None = None,
    ) -> None:
        self.config = config
        self.layers = layers
        self.rotary = rotary
        self.device = layers[0].cache.device
        self.dtype = layers[0].cache.dtype
        self.block_sizes = block_sizes
        self.failed_blocks: set[int] = set()
        self._report = StepReport()
        self._failed_step = -_DOUBTED_STEPS  # the last one whose capture failed
        self._weights = self._told_weights = 0  # how often the model has got other ones
        self._cache_tokens = num_blocks * max(block_sizes)
        self._layouts = self._probe(num_blocks)
        self.slab = self._allocate(free_bytes())
        self.parts = self._divide()
        self.mover = self.parts[0].mover
        """For what any of them does."""
        self.averager = Averager(self.slab, self.parts)
        has_tiers = disk is not None or cold is not None or config.host_bytes > 0
        self.lower = LowerTiers(self.slab, disk, self._note_origins, cold) if has_tiers else None

    def _divide(self) -> list[Part]:
        """The layers of each KV cache group, with what moves them."""
        parts: list[Part] = []
        staging = Staging.for_cache(self._cache_tokens, self.device) if self.device.type == "cuda" else None
        start = 0
        for group, members in groupby(self.layers, key=lambda layer: layer.group):
            layers = list(members)
            end = start + len(layers)
            caches, rotary = (
                Caches(layers, self._layouts[start:end], start),
                self.rotary.of_layers(start, end),
            )
            mover = choose_mover(
                self.slab,
                caches,
                rotary,
                self.block_sizes[group],
                self._cache_tokens,
                self.config.injection_path,
                compile=self.config.compile_injection,
                staging=staging,
            )
            parts.append(Part(caches, rotary, self.block_sizes[group], mover))
            start = end
        if len(parts) != len(self.block_sizes):
            raise UnsupportedLayout(
                f"vLLM keeps {len(self.block_sizes)} groups of KV caches, of which this worker's layers use "
                f"{len(parts)}; InferScale needs the same on both sides."
            )
        return parts

    def _note_origins(self, rows: Int32Array, positions: Int32Array) -> None:
        for part in self.parts:
            part.mover.note_origins(rows, positions)

    def _probe(self, num_blocks: int) -> list[BlockLayout]:
        """Probe each distinct kind of cache once, then verify it on every layer."""
        known: dict[tuple[object, ...], BlockLayout] = {}
        layouts = []
        for layer in self.layers:
            if layer.cache.dtype != self.dtype or layer.cache.device != self.device:
                raise UnsupportedLayout(
                    "The layers' KV caches differ in dtype or device; InferScale needs one of each."
                )
            kind = (layer.cache.shape, layer.cache.stride(), layer.num_kv_heads, layer.head_dim)
            if kind not in known:
                layout = probe_layout(layer, num_blocks)
                known[kind] = BlockLayout(
                    layout.block_size, layout.block_stride, layout.offsets.to(self.device)
                )
            check_layout(layer, known[kind])
            layouts.append(known[kind])
        return layouts

    def _allocate(self, free_bytes: int) -> Slab:
        shape = RowShape(tuple((layer.num_kv_heads, layer.head_dim) for layer in self.layers))
        row_format = RowFormat(shape, self.dtype, self.config.pool_dtype)
        pages = num_pages(self.config.size_bytes, self.config.page_size_tokens, row_format.row_bytes)
        needed = pages * self.config.page_size_tokens * row_format.row_bytes
        if needed > free_bytes:
            raise PoolTooLarge(
                f"pool_size_bytes is {self.config.size_bytes} ({self.config.size_bytes / 2**30:.2f} GiB), "
                f"but only {free_bytes} bytes ({free_bytes / 2**30:.2f} GiB) are free on {self.device} "
                f"after vLLM took its share. Set pool_size_bytes to at most {int(free_bytes * 0.9)}, or give "
                "vLLM less (--gpu-memory-utilization on a GPU, VLLM_CPU_KVCACHE_SPACE on a CPU)."
            )
        slab = Slab(pages, self.config.page_size_tokens, row_format, self.device)
        logger.info("%s", self._describe(slab, free_bytes - needed))
        return slab

    def _describe(self, slab: Slab, free_bytes: int) -> MemoryBudget:
        """How this worker's memory is divided. What torch holds besides caches and pool is the model."""
        storages = [layer.cache.untyped_storage() for layer in self.layers]  # which groups share
        cache_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        pool_bytes = slab.data.nbytes
        is_cuda = self.device.type == "cuda"
        held_bytes = torch.cuda.memory_allocated(self.device) if is_cuda else 0
        return MemoryBudget(
            device=str(self.device),
            model_bytes=held_bytes - cache_bytes - pool_bytes if is_cuda else None,
            cache_bytes=cache_bytes,
            cache_tokens=self._cache_tokens // len(self.block_sizes),
            pool_bytes=pool_bytes,
            pool_tokens=len(slab.data),
            page_size_tokens=slab.page_size_tokens,
            free_bytes=free_bytes,
        )

    # one step ---------------------------------------------------------------------------------

    def note_new_weights(self) -> None:
        """The model has got other weights: what the pool holds is no longer what it would compute."""
        self._weights += 1

    def before_forward(self, orders: StepOrders) -> None:
        """Inject and zero freed pages. An error marks the blocks as failed; vLLM fails the requests."""
        self.failed_blocks.update(orders.failed_blocks)
        if orders.injection and orders.weights != self._weights:
            logger.warning("The model has got other weights; requests that were to inject KV of before fail")
            self._fail(orders.injection)
        elif orders.injection:
            try:
                for part, moves in zip(self.parts, orders.injection, strict=True):
                    if moves is not None:
                        part.mover.inject(moves)
            except Exception:  # a wrong answer is worse than a failed request
                logger.exception("Injection failed; the requests it was for fail")
                self._fail(orders.injection)
        if orders.zero_pages is not None:
            self.mover.zero(orders.zero_pages)
        if orders.tiers is not None and self.lower is not None:
            self.lower.drop(orders.tiers.drops)
            self.lower.load(orders.tiers.loads)

    def _fail(self, injection: GroupMoves) -> None:
        for part, moves in zip(self.parts, injection, strict=True):
            if moves is not None:
                slots = moves.expand(part.block_size).slots
                self.failed_blocks.update(np.unique(slots // part.block_size).tolist())

    def after_forward(self, orders: StepOrders) -> None:
        """Capture, copy what was captured to lower tiers, and note the step for the report."""
        if orders.step == 0:
            return
        saves = [] if orders.tiers is None else orders.tiers.saves
        if orders.capture or orders.averaging:
            try:
                if orders.weights != self._weights:
                    raise _OtherWeights("the keys name those of before")
                for part, moves in zip(self.parts, orders.capture, strict=False):  # () is nothing
                    if moves is not None:
                        part.mover.capture(moves)
                if orders.averaging:
                    self.averager.average(orders.averaging)
            except Exception:  # captured KV is a cache: losing it costs time only
                logger.exception("Capture failed; the segments stay text")
                self._report.failed_captures.add(orders.step)
                self._failed_step = orders.step
        # What one step captures can be the rest of what another one began, and that may just have failed.
        if saves and orders.step < self._failed_step + _DOUBTED_STEPS:
            self._report.tiers.not_saved += [answer for save in saves for answer in save.answers()]
            saves = []
        if self.lower is not None:
            self.lower.save(saves)
        self._report.done.add(orders.step)

    def take_report(self) -> StepReport | None:
        answers = None if self.lower is None else self.lower.take_answers()
        if answers is not None:
            self._report.tiers = self._report.tiers.merge(answers)
        if not self._report.done and not self._report.tiers and self._told_weights == self._weights:
            return None
        self._report.weights = self._told_weights = self._weights
        report, self._report = self._report, StepReport()
        return report

    def close(self) -> None:
        """Finish what is being written to disk."""
        if self.lower is not None:
            self.lower.close()

    def take_failed_blocks(self) -> set[int]:
        failed, self.failed_blocks = self.failed_blocks, set()
        return failed
