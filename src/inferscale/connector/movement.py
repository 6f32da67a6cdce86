"""How a worker moves KV: the contract, the portable path, and the choice between it and the fused kernels.

The portable path works through vLLM's own write and the probed index map, so it is right for every
layout and device; the fused one (`kernels.fused`) is one launch a step. Which one runs is decided at
start-up: the fused one only where the probe finds regular strides, and only once it has moved random
KV through a scratch block as the portable path does.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from inferscale.config import InjectionPath
from inferscale.connector.layout import BlockLayout, LayerCache, flat_storage, write_kv
from inferscale.errors import UnsupportedLayout
from inferscale.kernels.fused import FusedMover
from inferscale.kernels.geometry import geometry_of
from inferscale.kernels.reference import GatherFunction, compile_gather, make_gather, turn
from inferscale.kernels.staging import Staging
from inferscale.pool.moves import Int32Array, Moves, MovesBuilder
from inferscale.pool.slab import Slab
from inferscale.rope import CosSin, Rotary, delta_cos_sin

logger = logging.getLogger(__name__)

SCRATCH_BYTES = 256 * 2**20
"""Upper bound of the temporary memory of one portable gather; larger steps are cut into pieces."""

_CHECK_SHIFTS = (0, 1, -7, 1000, -20000)


class Mover(Protocol):
    """Moves KV of all layers between slab rows and the paged caches.

    Work is put on the current stream (or done at once, on a CPU); the caller orders it.
    """

    def inject(self, moves: Moves) -> None:
        """Slab → keys rotated to their place in the prompt → paged caches."""
        ...

    def capture(self, moves: Moves) -> None:
        """Paged caches → slab, in the format of its rows; these remember the position."""
        ...

    def zero(self, pages: Int32Array) -> None:
        """Overwrite pages of the slab with zeros; int32 [n]."""
        ...

    def note_origins(self, rows: Int32Array, positions: Int32Array) -> None:
        """Rows [n] of the slab were written by somebody else: captured at these positions [n]."""
        ...


class Caches(NamedTuple):
    """Layers of one KV cache group, and the probed layout of each. first: where the first of them stands
    among the layers of the pool's rows; the others follow it."""

    layers: Sequence[LayerCache]
    layouts: Sequence[BlockLayout]
    first: int = 0

    def is_all_of(self, slab: Slab) -> bool:
        """Whether rows hold nothing else."""
        return len(self.layers) == len(slab.shape.layers)


class Part(NamedTuple):
    """What one KV cache group is moved with. block_size: vLLM's."""

    caches: Caches
    rotary: Rotary
    block_size: int
    mover: Mover


class PortableMover:
    """Plain torch and vLLM's own write. block_size: vLLM's. compile: the rotation, with torch.compile."""

    def __init__(self, slab: Slab, caches: Caches, rotary: Rotary, block_size: int, *, compile: bool) -> None:
        self._slab = slab
        self._block_size = block_size
        # The slab's origins, on the host: looking them up on a device would wait for it.
        self._origins = slab.origins.cpu().numpy()
        self._caches = caches
        self._rotary = rotary
        self._device = slab.data.device
        self._gathers_all = slab.shape.is_uniform and caches.is_all_of(slab)
        self._gather = self._prepare_gather(compile)
        self._rows_per_piece = max(64, SCRATCH_BYTES // (slab.shape.num_elements * 4 * 3))

    def _prepare_gather(self, compile: bool) -> GatherFunction:
        gather = make_gather(self._rotary, self._slab.format)
        if not compile or not self._gathers_all:
            return gather
        with torch.inference_mode():
            return compile_gather(gather, self._slab.data, self._rotary)

    @torch.inference_mode()
    def inject(self, moves: Moves) -> None:
        rows, slots, positions = moves.expand(self._block_size)
        deltas = positions - self._origins[rows]
        for start in range(0, len(rows), self._rows_per_piece):
            piece = slice(start, start + self._rows_per_piece)
            self._inject_piece(rows[piece], slots[piece], deltas[piece])

    def _inject_piece(self, rows: Int32Array, slots: Int32Array, deltas: Int32Array) -> None:
        moves = torch.from_numpy(deltas).to(torch.int64)
        turn_by = CosSin(*(part.to(self._device) for part in delta_cos_sin(moves, self._rotary)))
        is_moved = (moves != 0).to(self._device)
        row_index, slot_index = self._to_device(rows), self._to_device(slots)
        if self._gathers_all:
            gathered = self._gather(self._slab.data, row_index, *turn_by, is_moved)
            for layer, keys, values in zip(self._caches.layers, *gathered, strict=True):
                write_kv(layer, keys, values, slot_index)
            return
        row_format, first = self._slab.format, self._caches.first
        for index, layer in enumerate(self._caches.layers):
            decoded = row_format.read_layer(self._slab.data, row_index, first + index).unsqueeze(1)
            cos_sin = turn_by.of_layer(index)
            keys, values = turn(decoded, *cos_sin, is_moved, self._rotary, row_format.kv_dtype)
            write_kv(layer, keys[0], values[0], slot_index)

    @torch.inference_mode()
    def capture(self, moves: Moves) -> None:
        rows, slots, positions = moves.expand(self._block_size)
        self._origins[rows] = positions
        slot_index, row_index = self._to_device(slots), self._to_device(rows)
        self._slab.origins[row_index] = torch.from_numpy(positions).to(self._device)
        indices: dict[int, torch.Tensor] = {}
        layers, layouts, first = self._caches
        for index, (layer, layout) in enumerate(zip(layers, layouts, strict=True), first):
            if id(layout) not in indices:
                indices = {id(layout): layout.element_index(slot_index)}
            captured = flat_storage(layer.cache)[indices[id(layout)]]
            self._slab.format.store_layer(self._slab.data, row_index, index, captured)

    def zero(self, pages: Int32Array) -> None:
        self._slab.zero_pages(pages)

    def note_origins(self, rows: Int32Array, positions: Int32Array) -> None:
        self._origins[rows] = positions

    def _to_device(self, numbers: Int32Array) -> torch.Tensor:
        return torch.from_numpy(numbers).to(self._device, torch.int64, non_blocking=True)


def choose_mover(
    slab: Slab,
    caches: Caches,
    rotary: Rotary,
    block_size: int,
    max_tokens: int,
    path: InjectionPath,
    *,
    compile: bool,
    interpret: bool = False,
    staging: Staging | None = None,
) -> Mover:
    """The fused kernels where they can run and give what the portable path gives, else that one.

    block_size, max_tokens: of vLLM's paged cache. Raises UnsupportedLayout where
    `path` asks for the fused kernels and they cannot serve. interpret, staging: as in FusedMover; the former
    for tests.
    """
    if path != "portable" and (slab.data.is_cuda or interpret or path == "fused"):
        try:
            return _fused(slab, caches, rotary, block_size, max_tokens, interpret, staging)
        except Exception as error:  # compilers fail in many ways; the portable path is always right
            if path == "fused":
                raise UnsupportedLayout(
                    f"injection_path is 'fused', but {error}. Set it to 'auto' or 'portable'."
                ) from error
            expected = isinstance(error, UnsupportedLayout)
            logger.warning(
                "Injection takes the portable path, which is slower: %s.", error, exc_info=not expected
            )
    return PortableMover(slab, caches, rotary, block_size, compile=compile)


def _fused(
    slab: Slab,
    caches: Caches,
    rotary: Rotary,
    block_size: int,
    max_tokens: int,
    interpret: bool,
    staging: Staging | None,
) -> FusedMover:
    if not slab.data.is_cuda and not interpret:
        raise UnsupportedLayout("the fused kernels need a CUDA GPU")
    first = caches.layouts[0]
    if any(layout is not first for layout in caches.layouts):
        raise UnsupportedLayout("the layers' caches are laid out differently")
    geometry = geometry_of(first.offsets, first.block_stride)
    if geometry is None:
        raise UnsupportedLayout("the paged cache has no regular strides")
    tensors = [layer.cache for layer in caches.layers]
    mover = FusedMover(
        slab,
        tensors,
        geometry,
        rotary,
        block_size,
        max_tokens,
        first_layer=caches.first,
        staging=staging,
        interpret=interpret,
    )
    _check(mover, slab, caches, rotary, block_size)
    return mover


@torch.inference_mode()
def _check(mover: FusedMover, slab: Slab, caches: Caches, rotary: Rotary, block_size: int) -> None:
    """Capture and inject random KV through block 0, vLLM's null block, and compare with the portable path.

    The block and the slab are as before afterwards. Raises UnsupportedLayout for a difference.
    """
    layout = caches.layouts[0]
    n = min(layout.block_size, len(slab.data))
    num_saved = max(n, slab.page_size_tokens)
    index = layout.element_index(torch.arange(layout.block_size, device=slab.data.device))
    saved = [flat_storage(layer.cache)[index] for layer in caches.layers]
    saved_rows, saved_origins = slab.data[:num_saved].clone(), slab.origins[:num_saved].clone()

    def read() -> list[torch.Tensor]:
        return [flat_storage(layer.cache)[index][:n].clone() for layer in caches.layers]

    def portable() -> PortableMover:
        return PortableMover(slab, caches, rotary, block_size, compile=False)

    rows = np.arange(n, dtype=np.int32)
    shifts = torch.tensor([_CHECK_SHIFTS[i % len(_CHECK_SHIFTS)] for i in range(n)])
    eps = torch.finfo(slab.format.kv_dtype).eps
    try:
        for num_runs in (1, 3):  # steps of one run have a kernel of their own
            for number, layer in enumerate(caches.layers):
                _write_random(layer, n, number + 1000 * num_runs)
            forwards, backwards = _runs(rows, num_runs, block_size), _runs(rows[::-1], num_runs, block_size)
            mover.capture(forwards)
            captured, origins = slab.data[:n].clone(), slab.origins[:n].cpu()
            portable().capture(forwards)
            if not torch.equal(captured, slab.data[:n]) or origins.tolist() != rows.tolist():
                raise UnsupportedLayout("capture differs from the portable path")
            slab.origins[:n] = (n - 1 - torch.from_numpy(rows) + shifts).to(slab.origins)
            portable().inject(backwards)
            wanted = read()
            for layer in caches.layers:
                flat_storage(layer.cache)[index] = float("nan")
            mover.inject(backwards)
            for found, expected in zip(read(), wanted, strict=True):
                if not torch.allclose(found.float(), expected.float(), rtol=2 * eps, atol=2 * eps):
                    raise UnsupportedLayout("injection differs from the portable path")
        slab.data[:num_saved] = 1
        mover.zero(np.zeros(1, dtype=np.int32))
        rest = slab.data[slab.page_size_tokens : num_saved]
        if bool(slab.data[: slab.page_size_tokens].any()) or not bool((rest == 1).all()):
            raise UnsupportedLayout("zeroing a page does not zero that page alone")
    finally:
        slab.data[:num_saved], slab.origins[:num_saved] = saved_rows, saved_origins
        for layer, block in zip(caches.layers, saved, strict=True):
            flat_storage(layer.cache)[index] = block


def _runs(rows: Int32Array, num_runs: int, block_size: int) -> Moves:
    """Rows for the first slots of block 0, in so many runs."""
    builder = MovesBuilder(block_size)
    start = 0
    for part in np.array_split(rows, num_runs):
        if len(part):
            builder.add(part.tobytes(), start, [0])
            start += len(part)
        else:  # fewer rows than runs: the first one again
            builder.add(rows[:1].tobytes(), 0, [0])
    moves = builder.build()
    assert moves is not None
    return moves


def _write_random(layer: LayerCache, n: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (
        torch.randn((n, layer.num_kv_heads, layer.head_dim), generator=generator).to(layer.cache)
        for _ in range(2)
    )
    write_kv(layer, keys, values, torch.arange(n, device=layer.cache.device))
