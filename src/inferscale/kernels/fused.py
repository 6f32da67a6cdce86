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
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from inferscale.errors import UnsupportedLayout
from inferscale.kernels.geometry import CacheGeometry
from inferscale.kernels.staging import Staging
from inferscale.pool.moves import Int32Array, Moves
from inferscale.pool.slab import Slab
from inferscale.rope import Rotary
from inferscale.row_size import RowShape, group_size

_VECTOR_BYTES = 16
_ZERO_BLOCK = 8192
_SCALE_BYTES = 2


class Tuning(NamedTuple):
    """elements: that one program moves at least, in whole units; num_warps: of 32 threads each."""

    elements: int
    num_warps: int

    def units(self, unit_elements: int) -> int:
        """Tokens · layers of one program; a power of two."""
        return _power_of_two(max(1, self.elements // unit_elements))


INJECT = Tuning(elements=2048, num_warps=1)
CAPTURE = Tuning(elements=2048, num_warps=1)
"""Chosen on an H200; docs/log.md has the table."""


class FusedMover:
    """Moves KV of any number of tokens and all its layers in one launch.

    caches: of the layers, in order, with one shape and dtype, on one device. first_layer: where the first of
    them stands among the layers of the slab's rows; the others follow. geometry: of every one of them.
    block_size, max_tokens: of vLLM's paged cache. staging: shared with others on the same stream. Raises
    UnsupportedLayout where the kernels cannot serve this cache, with the reason.
    """

    def __init__(
        self,
        slab: Slab,
        caches: Sequence[torch.Tensor],
        geometry: CacheGeometry,
        rotary: Rotary,
        block_size: int,
        max_tokens: int,
        *,
        first_layer: int = 0,
        staging: Staging | None = None,
        interpret: bool = False,
        inject_tuning: Tuning = INJECT,
        capture_tuning: Tuning = CAPTURE,
    ) -> None:
        layers = slice(first_layer, first_layer + len(caches))
        heads, dim = _shape(slab, layers)
        self._device = slab.data.device
        starts = _starts(caches)
        self._layer_offsets = torch.tensor(
            [start + geometry.origin for start in starts], dtype=torch.int64, device=self._device
        )
        self._inv_freq = rotary.inv_freq.to(device=self._device, dtype=torch.float64).contiguous()
        self._num_layers = len(caches)
        self._staging = staging or Staging.for_cache(max_tokens, self._device)
        elements, scales = _views(slab)
        tensors = {
            "slab": elements[:, RowShape(slab.shape.layers[:first_layer]).num_elements :],
            "scales": scales,
            "origins": slab.origins,
            "cache": caches[0],
            "layer_offsets": self._layer_offsets,
        }
        element_size = caches[0].element_size()
        shape = _shape_constants(slab, layers, element_size, geometry, self._layer_offsets, block_size)
        group = group_size(slab.format.pool_dtype, dim)
        rotation = _rotation_constants(rotary, dim, group)
        self._inject_units = inject_tuning.units(2 * heads * dim)
        self._capture_units = capture_tuning.units(2 * heads * dim)
        module = _load(interpret)
        self._inject = _Pair(
            module.inject_kernel,
            {**tensors, "inv_freq": self._inv_freq},
            {**shape, **rotation, **_grid("DIM", dim, group), "UNITS": self._inject_units},
            inject_tuning.num_warps,
        )
        self._capture = _Pair(
            module.capture_kernel,
            tensors,
            {**shape, **_grid("DIM", dim, group), "UNITS": self._capture_units},
            capture_tuning.num_warps,
        )
        page_elements = slab.page_size_tokens * slab.format.num_columns
        self._zero_blocks = _programs(page_elements, _ZERO_BLOCK)
        self._zero = _Launch(
            module.zero_kernel,
            {"slab": slab.data},
            {"PAGE_ELEMENTS": page_elements, "BLOCK": _ZERO_BLOCK},
            num_warps=8,
        )

    def inject(self, moves: Moves) -> None:
        """Slab rows → keys rotated to their place in the prompt → paged caches."""
        self.launch_inject(self.stage(moves), moves)

    def capture(self, moves: Moves) -> None:
        """Paged caches → slab rows, in their format; they remember the position."""
        self.launch_capture(self.stage(moves), moves)

    def zero(self, pages: Int32Array) -> None:
        """Overwrite pages of the slab with zeros. int32 [n]."""
        self._zero((len(pages), self._zero_blocks, 1), self._staging.put(pages))

    def note_origins(self, rows: Int32Array, positions: Int32Array) -> None:
        """Nothing to note: the kernels read the slab's own."""

    def stage(self, moves: Moves) -> torch.Tensor:
        """Start the copy of a table to the device; the copy is good until the current stream has used it."""
        return self._staging.put(np.frombuffer(moves.table, dtype=np.int32))

    def launch_inject(self, table: torch.Tensor, moves: Moves) -> None:
        """The kernel alone, on a table that was staged."""
        programs = _programs(moves.longest * self._num_layers, self._inject_units)
        self._inject(programs, moves, table)

    def launch_capture(self, table: torch.Tensor, moves: Moves) -> None:
        """The kernel alone, on a table that was staged."""
        programs = _programs(moves.longest * self._num_layers, self._capture_units)
        self._capture(programs, moves, table)


class _Launch:
    """A kernel with all its arguments but those that differ from step to step.

    Triton's own call looks at every argument again, which takes longer than all else the host does for
    a step. The first call goes that way and compiles; later ones start what it compiled.
    """

    def __init__(
        self, kernel: Any, tensors: Mapping[str, torch.Tensor], constants: Mapping[str, int], num_warps: int
    ) -> None:
        self._kernel = kernel
        self._tensors = tensors
        self._constants = constants
        self._num_warps = num_warps
        self._compiled: Any = None
        self._before: tuple[int, ...] = ()
        self._behind: tuple[int, ...] = ()

    def __call__(self, grid: tuple[int, int, int], table: torch.Tensor, *numbers: int) -> None:
        """table and numbers: as the kernel takes them, one behind the other."""
        if self._compiled is not None:
            self._compiled[grid](*self._before, table.data_ptr(), *numbers, *self._behind)
            return
        compiled = self._kernel[grid](
            *self._tensors.values(), table, *numbers, **self._constants, num_warps=self._num_warps
        )
        if compiled is None:  # interpreted
            return
        names = list(self._kernel.arg_names)
        assert names[: len(self._tensors)] == list(self._tensors)
        self._before = tuple(tensor.data_ptr() for tensor in self._tensors.values())
        self._behind = tuple(self._constants[name] for name in names[len(self._tensors) + 1 + len(numbers) :])
        self._compiled = compiled


class _Pair:
    """A kernel for steps of one run and one for steps of several."""

    def __init__(
        self, kernel: Any, tensors: Mapping[str, torch.Tensor], constants: Mapping[str, int], num_warps: int
    ) -> None:
        self._one = _Launch(kernel, tensors, {**constants, "ONE_RUN": True}, num_warps)
        self._several = _Launch(kernel, tensors, {**constants, "ONE_RUN": False}, num_warps)

    def __call__(self, programs: int, moves: Moves, table: torch.Tensor) -> None:
        """programs: for the longest run."""
        launch = self._one if moves.num_runs == 1 else self._several
        launch((programs, moves.num_runs, 1), table, moves.longest, moves.first_start)


def _load(interpret: bool) -> Any:
    """The module of the kernels; with `interpret`, a copy of it whose decorators interpret."""
    try:
        import triton

        name = "inferscale.kernels.triton_kernels"
        if not interpret:
            return importlib.import_module(name)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        with triton.knobs.runtime.scope():
            triton.knobs.runtime.interpret = True
            spec.loader.exec_module(module)
    except ImportError as error:
        raise UnsupportedLayout(f"Triton cannot be imported ({error})") from error
    return module


def _shape(slab: Slab, layers: slice) -> tuple[int, int]:
    shape = RowShape(slab.shape.layers[layers])
    if not shape.is_uniform:
        raise UnsupportedLayout("the layers have key heads of different shapes")
    return shape.layers[0]


def _shape_constants(
    slab: Slab,
    layers: slice,
    element_size: int,
    geometry: CacheGeometry,
    layer_offsets: torch.Tensor,
    block_size: int,
) -> dict[str, int]:
    """What both kernels know of slab and caches. element_size: bytes of an element of these."""
    heads, dim = _shape(slab, layers)
    before = RowShape(slab.shape.layers[: layers.start])
    elements, scales = _views(slab)
    pool_dtype = slab.format.pool_dtype
    group = group_size(pool_dtype, dim)
    strides = geometry.block_stride, geometry.slot_stride, geometry.kv_stride, geometry.head_stride
    return {
        "LAYERS": len(layer_offsets),
        "HEADS": heads,
        "DIM": dim,
        "ROW": elements.shape[1],
        "GROUP": group,
        "SCALE_ROW": scales.shape[1],
        "SCALES_AT": slab.shape.num_elements // _SCALE_BYTES + before.num_scales(pool_dtype) if group else 0,
        "PROMPT_BLOCK": block_size,
        "BLOCK_SIZE": geometry.block_size,
        "BLOCK_STRIDE": geometry.block_stride,
        "SLOT_STRIDE": geometry.slot_stride,
        "KV_STRIDE": geometry.kv_stride,
        "HEAD_STRIDE": geometry.head_stride,
        "ALIGN": _alignment(
            element_size, [2 * heads * dim, before.num_elements, *strides, *layer_offsets.tolist()]
        ),
        "BLOCK_HEADS": _power_of_two(heads),
    }


def _rotation_constants(rotary: Rotary, dim: int, group: int) -> dict[str, int]:
    """How `inject_kernel` takes a key apart: what is rotated together, and what is not rotated."""
    part = rotary.rotary_dim if rotary.interleaved else rotary.rotary_dim // 2
    return {
        "PAIRS": rotary.rotary_dim // 2,
        "INTERLEAVED": rotary.interleaved,
        "LAYER_PAIRS": rotary.rotary_dim // 2 if rotary.is_by_layer else 0,
        **_grid("PAIR", part, group),
        **_grid("REST", dim - rotary.rotary_dim, group),
    }


def _grid(name: str, size: int, group: int) -> dict[str, int]:
    """`size` neighbouring dimensions as groups and lanes, powers of two; lanes that share a scale where the
    size is a whole number of such groups."""
    if not size:
        groups, lanes = 1, 0
    elif group and group < size and size % group == 0:
        groups, lanes = _power_of_two(size // group), group
    else:
        groups, lanes = 1, _power_of_two(size)
    return {f"{name}_GROUPS": groups, f"{name}_LANES": lanes}


def _views(slab: Slab) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as elements, and as the bits of the scales that stand behind these; [rows, …] both."""
    if not slab.format.is_quantized:
        return slab.data, slab.data
    return slab.data.view(slab.format.element_dtype), slab.data.view(torch.int16)


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
