"""Worker side: owns the slab, carries out the scheduler side's orders, decides nothing.

A step: zero freed pages, inject before the forward pass, capture after it, report. All work is
put on the engine's own stream (or thread, on a CPU), in step order; that order is what makes it
safe to reuse pages once a step is reported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch

from inferscale.config import ConnectorConfig
from inferscale.connector.layout import (
    BlockLayout,
    LayerCache,
    check_layout,
    flat_storage,
    probe_layout,
    write_kv,
)
from inferscale.connector.messages import CaptureOrder, Injection, IntArray, StepOrders, StepReport
from inferscale.errors import PoolTooLarge, UnsupportedLayout
from inferscale.kernels.reference import GatherFunction, KeysValues, compile_gather, make_gather
from inferscale.pool.slab import RowShape, Slab, num_pages
from inferscale.rope import Rotary, delta_cos_sin

logger = logging.getLogger(__name__)

SCRATCH_BYTES = 256 * 2**20
"""Upper bound of the temporary memory of one gather; larger steps are cut into pieces."""


class WorkerSide:
    """The pool of one worker.

    layers: in model order, all caches on one device with one dtype. num_blocks, block_size: of
    vLLM's scheduler. free_bytes: asked once, after vLLM took its memory. Raises UnsupportedLayout
    and PoolTooLarge.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        layers: list[LayerCache],
        rotary: Rotary,
        num_blocks: int,
        block_size: int,
        free_bytes: Callable[[], int],
    ) -> None:
        self.config = config
        self.layers = layers
        self.rotary = rotary
        self.device = layers[0].cache.device
        self.dtype = layers[0].cache.dtype
        self.block_size = block_size
        self.failed_blocks: set[int] = set()
        self._report = StepReport()
        self._layouts = self._probe(num_blocks)
        self.slab = self._allocate(free_bytes())
        self._gather = self._prepare_gather()
        self._rows_per_piece = max(64, SCRATCH_BYTES // (self.slab.shape.num_elements * 4 * 3))

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
        token_bytes = shape.num_elements * self.dtype.itemsize
        pages = num_pages(self.config.size_bytes, self.config.page_size_tokens, token_bytes)
        needed = pages * self.config.page_size_tokens * token_bytes
        if needed > free_bytes:
            raise PoolTooLarge(
                f"pool_size_bytes is {self.config.size_bytes} ({self.config.size_bytes / 2**30:.2f} GiB), "
                f"but only {free_bytes} bytes ({free_bytes / 2**30:.2f} GiB) are free on {self.device} "
                f"after vLLM took its share. Set pool_size_bytes to at most {int(free_bytes * 0.9)}, or give "
                "vLLM less (--gpu-memory-utilization on a GPU, VLLM_CPU_KVCACHE_SPACE on a CPU)."
            )
        slab = Slab(pages, self.config.page_size_tokens, shape, self.dtype, self.device)
        logger.info(
            "KV pool: %.2f GiB on %s, %d tokens (%d bytes each)",
            needed / 2**30,
            self.device,
            pages * self.config.page_size_tokens,
            token_bytes,
        )
        return slab

    def _prepare_gather(self) -> GatherFunction:
        gather = make_gather(self.rotary)
        if not self.config.compile_injection or not self.slab.shape.is_uniform:
            return gather
        with torch.inference_mode():
            return compile_gather(gather, self.slab.uniform(), self.rotary.rotary_dim // 2)

    # one step ---------------------------------------------------------------------------------

    def before_forward(self, orders: StepOrders) -> None:
        """Zero freed pages and inject. An error marks the blocks as failed; vLLM fails the requests."""
        self.failed_blocks.update(orders.failed_blocks)
        if orders.zero_pages:
            self.slab.zero_pages(orders.zero_pages)
        if orders.injection is None:
            return
        try:
            self.inject(orders.injection)
        except Exception:  # a wrong answer is worse than a failed request
            logger.exception("Injection failed; the requests it was for fail")
            self.failed_blocks.update(int(b) for b in np.unique(orders.injection.slots // self.block_size))

    def after_forward(self, orders: StepOrders) -> None:
        """Capture, and note the step for the report."""
        if orders.step == 0:
            return
        if orders.capture is not None:
            try:
                self.capture(orders.capture)
            except Exception:  # captured KV is a cache: losing it costs time only
                logger.exception("Capture failed; the segments stay text")
                self._report.failed_captures.add(orders.step)
        self._report.done.add(orders.step)

    def take_report(self) -> StepReport | None:
        if not self._report.done:
            return None
        report, self._report = self._report, StepReport()
        return report

    def take_failed_blocks(self) -> set[int]:
        failed, self.failed_blocks = self.failed_blocks, set()
        return failed

    # moving KV --------------------------------------------------------------------------------

    @torch.inference_mode()
    def inject(self, order: Injection) -> None:
        """Pool rows → rotated → paged cache, for all layers."""
        for start in range(0, len(order.rows), self._rows_per_piece):
            piece = slice(start, start + self._rows_per_piece)
            cos, sin = delta_cos_sin(torch.from_numpy(order.deltas[piece]), self.rotary)
            rows, slots = self._to_device(order.rows[piece]), self._to_device(order.slots[piece])
            moved = self._to_device(order.deltas[piece]) != 0
            cos, sin = cos.to(self.device), sin.to(self.device)
            if self.slab.shape.is_uniform:
                gathered = self._gather(self.slab.uniform(), rows, cos, sin, moved)
                for layer, keys, values in zip(self.layers, gathered.keys, gathered.values, strict=True):
                    write_kv(layer, keys, values, slots)
                continue
            for index, layer in enumerate(self.layers):
                keys, values = self._gather_layer(index, rows, cos, sin, moved)
                write_kv(layer, keys[0], values[0], slots)

    def _gather_layer(
        self, index: int, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, moved: torch.Tensor
    ) -> KeysValues:
        heads, dim = self.slab.shape.layers[index]
        pool = self.slab.layer(index)[rows].view(-1, 1, 2, heads, dim)
        every = torch.arange(len(rows), device=self.device)
        return self._gather(pool, every, cos, sin, moved)

    @torch.inference_mode()
    def capture(self, order: CaptureOrder) -> None:
        """Paged cache → pool rows, bit for bit, for all layers."""
        slots, rows = self._to_device(order.slots), self._to_device(order.rows)
        indices: dict[int, torch.Tensor] = {}
        for index, (layer, layout) in enumerate(zip(self.layers, self._layouts, strict=True)):
            if id(layout) not in indices:
                indices = {id(layout): layout.element_index(slots)}
            self.slab.layer(index)[rows] = flat_storage(layer.cache)[indices[id(layout)]]

    def _to_device(self, numbers: IntArray) -> torch.Tensor:
        return torch.from_numpy(numbers).to(self.device, non_blocking=True)
