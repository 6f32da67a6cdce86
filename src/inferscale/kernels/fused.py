"""Fused movement of KV between the slab and the paged caches: one copy and one launch a step.

`FusedMover` knows one worker's slab and caches; it is made once the probe has found regular strides
(`geometry.geometry_of`), and is checked against the portable path at start-up before it is trusted
(connector/movement.py). With `interpret` the same kernels run in Triton's interpreter, on any device:
slow, and meant for tests.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from inferscale.errors import UnsupportedLayout
from inferscale.kernels.geometry import CacheGeometry
from inferscale.kernels.staging import Int32Array, Staging
from inferscale.pool.slab import Slab
from inferscale.rope import Rotary

_VECTOR_BYTES = 16
_ZERO_BLOCK = 8192


class Tuning(NamedTuple):
    """elements: that one program moves at least, in whole units; num_warps: of 32 threads each."""

    elements: int
    num_warps: int

    def units(self, unit_elements: int) -> int:
        """Tokens · layers of one program; a power of two."""
        return _power_of_two(max(1, self.elements // unit_elements))


INJECT = Tuning(elements=2048, num_warps=2)
CAPTURE = Tuning(elements=2048, num_warps=4)
"""Chosen on an H200; docs/log.md has the table."""


class FusedMover:
    """Moves KV of any number of tokens and all layers in one launch.

    slab: with one shape for all layers. caches: of the layers, in order, with one dtype, on one device.
    geometry: of every one of them. max_tokens: that a step usually moves at most; room for its table is made
    now. Raises UnsupportedLayout where the kernels cannot serve this cache, with the reason.
    """

    def __init__(
        self,
        slab: Slab,
        caches: Sequence[torch.Tensor],
        geometry: CacheGeometry,
        rotary: Rotary,
        max_tokens: int,
        *,
        interpret: bool = False,
        inject_tuning: Tuning = INJECT,
        capture_tuning: Tuning = CAPTURE,
    ) -> None:
        heads, dim = _shape(slab)
        self._slab = slab.data
        self._cache = caches[0]
        self._device = slab.data.device
        starts = _starts(caches)
        self._layer_offsets = torch.tensor(
            [start + geometry.origin for start in starts], dtype=torch.int64, device=self._device
        )
        self._inv_freq = rotary.inv_freq.to(device=self._device, dtype=torch.float64)
        self._num_layers = len(caches)
        self._page_elements = slab.page_size_tokens * slab.shape.num_elements
        self._staging = Staging(3 * max_tokens, self._device)
        self._inject_warps, self._capture_warps = inject_tuning.num_warps, capture_tuning.num_warps
        self._inject_units = inject_tuning.units(2 * heads * dim)
        self._capture_units = capture_tuning.units(2 * heads * dim)
        self._kernels = _load(interpret)
        strides = geometry.block_stride, geometry.slot_stride, geometry.kv_stride, geometry.head_stride
        offsets = [2 * heads * dim, *strides, *self._layer_offsets.tolist()]
        align = _alignment(slab.data.element_size(), offsets)
        self._common = {
            "LAYERS": len(caches),
            "HEADS": heads,
            "DIM": dim,
            "BLOCK_SIZE": geometry.block_size,
            "BLOCK_STRIDE": geometry.block_stride,
            "SLOT_STRIDE": geometry.slot_stride,
            "KV_STRIDE": geometry.kv_stride,
            "HEAD_STRIDE": geometry.head_stride,
            "ALIGN": align,
            "BLOCK_HEADS": _power_of_two(heads),
            "BLOCK_DIM": _power_of_two(dim),
        }
        rest = dim - rotary.rotary_dim
        self._rotation = {
            "PAIRS": rotary.rotary_dim // 2,
            "INTERLEAVED": rotary.interleaved,
            "BLOCK_PAIRS": _power_of_two(rotary.rotary_dim // 2),
            "BLOCK_REST": _power_of_two(rest) if rest else 0,
        }

    def inject(self, rows: Int32Array, slots: Int32Array, deltas: Int32Array) -> None:
        """Slab rows → rotated → paged caches. int32 [n] each: see `connector.messages.Injection`."""
        self.launch_inject(self._staging.put((rows, slots, deltas)), len(rows))

    def launch_inject(self, table: torch.Tensor, n: int) -> None:
        """The kernel alone. table: int32 on the device: n rows, n slots, n deltas."""
        grid = (_programs(n * self._num_layers, self._inject_units),)
        self._kernels.inject[grid](
            self._slab,
            self._cache,
            self._layer_offsets,
            self._inv_freq,
            table,
            n,
            UNITS=self._inject_units,
            num_warps=self._inject_warps,
            **self._common,
            **self._rotation,
        )

    def capture(self, slots: Int32Array, rows: Int32Array) -> None:
        """Paged caches → slab rows, bit for bit. int32 [n] each."""
        self.launch_capture(self._staging.put((slots, rows)), len(rows))

    def launch_capture(self, table: torch.Tensor, n: int) -> None:
        """The kernel alone. table: int32 on the device: n slots, n rows."""
        grid = (_programs(n * self._num_layers, self._capture_units),)
        self._kernels.capture[grid](
            self._slab,
            self._cache,
            self._layer_offsets,
            table,
            n,
            UNITS=self._capture_units,
            num_warps=self._capture_warps,
            **self._common,
        )

    def zero(self, pages: Int32Array) -> None:
        """Overwrite pages of the slab with zeros. int32 [n]."""
        table = self._staging.put((pages,))
        grid = (len(pages), _programs(self._page_elements, _ZERO_BLOCK))
        self._kernels.zero[grid](
            self._slab, table, len(pages), PAGE_ELEMENTS=self._page_elements, BLOCK=_ZERO_BLOCK, num_warps=8
        )


class _Kernels(NamedTuple):
    inject: Any
    capture: Any
    zero: Any


def _load(interpret: bool) -> _Kernels:
    try:
        import triton

        name = "inferscale.kernels.triton_kernels"
        if not interpret:
            module = importlib.import_module(name)
        else:  # a copy of the module whose decorators interpret
            spec = importlib.util.find_spec(name)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            with triton.knobs.runtime.scope():
                triton.knobs.runtime.interpret = True
                spec.loader.exec_module(module)
    except ImportError as error:
        raise UnsupportedLayout(f"Triton cannot be imported ({error})") from error
    return _Kernels(module.inject_kernel, module.capture_kernel, module.zero_kernel)


def _shape(slab: Slab) -> tuple[int, int]:
    if not slab.shape.is_uniform:
        raise UnsupportedLayout("the layers have key heads of different shapes")
    return slab.shape.layers[0]


def _starts(caches: Sequence[torch.Tensor]) -> list[int]:
    """Where each cache begins, in elements from the first one."""
    first, size = caches[0].data_ptr(), caches[0].element_size()
    distances = [cache.data_ptr() - first for cache in caches]
    if any(distance % size for distance in distances):
        raise UnsupportedLayout("the layers' caches are not aligned with each other")
    return [distance // size for distance in distances]


def _alignment(element_size: int, offsets: Sequence[int]) -> int:
    """The largest power of two, in elements and up to 16 bytes, that divides all of these."""
    common = math.gcd(_VECTOR_BYTES // element_size, *(abs(offset) for offset in offsets))
    return common & -common


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _programs(amount: int, share: int) -> int:
    return -(-amount // share)
