"""A segment as the mean of two captures, whose passes had the same facts in opposite orders.

KV of a fact is what the fact says and what stood before it. In a prompt other facts stand before it than in
its encode pass; the mean of two passes keeps what both agree on and halves the rest (docs/quality.md has what
that gains). Keys are turned to one position first, in float32, and the mean is rounded to the dtype of
vLLM's cache; a pool of bytes rounds the first capture and the mean as well. Plain torch, for any device and
layout: it runs while facts are encoded, once for each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inferscale.connector.layout import flat_storage
from inferscale.connector.movement import SCRATCH_BYTES, Part
from inferscale.kernels.reference import turn
from inferscale.pool.moves import GroupMoves, Int32Array
from inferscale.pool.slab import Slab
from inferscale.rope import CosSin, delta_cos_sin


class Averager:
    """Of one worker. parts: of each KV cache group; their movers are told where the rows stand now."""

    def __init__(self, slab: Slab, parts: Sequence[Part]) -> None:
        self._slab = slab
        self._parts = parts
        self._rows_per_piece = max(64, SCRATCH_BYTES // (slab.shape.num_elements * 4 * 3))

    @torch.inference_mode()
    def average(self, moves: GroupMoves) -> None:
        """Rows hold a first capture; afterwards its mean with the paged caches, at the position there. All
        groups move the same tokens."""
        for part, of_group in zip(self._parts, moves, strict=True):
            assert of_group is not None
            rows, slots, positions = of_group.expand(part.block_size)
            for start in range(0, len(rows), self._rows_per_piece):
                piece = slice(start, start + self._rows_per_piece)
                self._average_piece(part, rows[piece], slots[piece], positions[piece])
        # Now only: all groups are turned from where the first capture stood.
        origins = self._slab.origins
        origins[torch.from_numpy(rows).to(origins.device, torch.int64)] = torch.from_numpy(positions).to(
            origins
        )
        for part in self._parts:
            part.mover.note_origins(rows, positions)

    def _average_piece(self, part: Part, rows: Int32Array, slots: Int32Array, positions: Int32Array) -> None:
        (layers, layouts, first_layer), rotary = part.caches, part.rotary
        slab, row_format = self._slab, self._slab.format
        row_index, slot_index, places = (
            torch.from_numpy(numbers).to(slab.data.device, torch.int64)
            for numbers in (rows, slots, positions)
        )
        deltas = (places - slab.origins[row_index]).cpu()
        turn_by = CosSin(*(part.to(slab.data.device) for part in delta_cos_sin(deltas, rotary)))
        is_moved = (deltas != 0).to(slab.data.device)
        kinds = {id(layout): layout for layout in layouts}  # few, each shared by layers
        indices = {key: layout.element_index(slot_index) for key, layout in kinds.items()}
        for index, (layer, layout) in enumerate(zip(layers, layouts, strict=True)):
            at = first_layer + index
            first = row_format.read_layer(slab.data, row_index, at).to(torch.float32).unsqueeze(1)
            keys, values = turn(first, *turn_by.of_layer(index), is_moved, rotary, torch.float32)
            second = flat_storage(layer.cache)[indices[id(layout)]].to(torch.float32)
            mean = (torch.stack((keys[0], values[0]), dim=1).flatten(1) + second) / 2
            row_format.store_layer(slab.data, row_index, at, mean.to(row_format.kv_dtype))
