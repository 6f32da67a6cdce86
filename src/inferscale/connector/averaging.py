"""A segment as the mean of two captures, whose passes had the same facts in opposite directions.

KV of a fact is what the fact says and what stood before it. In a prompt other facts stand before it than in
its encode pass; the mean of two passes keeps what both agree on and halves the rest (docs/quality.md has what
that gains). Where they disagree the mean is shorter than either, and attention to it weaker than to the facts
of a prompt: each head's key and value gets the mean of both lengths again. Keys are turned to one position
first, in float32, and the result is rounded to the dtype of vLLM's cache; a pool of bytes rounds the first
capture and the result as well. Plain torch, for any device and layout: it runs while facts are encoded, once
for each.
"""

from __future__ import annotations

import torch

from inferscale.connector.layout import flat_storage
from inferscale.connector.movement import SCRATCH_BYTES, Caches, Mover
from inferscale.kernels.reference import turn
from inferscale.pool.moves import Int32Array, Moves
from inferscale.pool.slab import Slab
from inferscale.rope import Rotary, delta_cos_sin


class Averager:
    """Of one worker. mover: told where the rows stand now. block_size: vLLM's."""

    def __init__(self, slab: Slab, caches: Caches, rotary: Rotary, block_size: int, mover: Mover) -> None:
        self._slab = slab
        self._caches = caches
        self._rotary = rotary
        self._block_size = block_size
        self._mover = mover
        self._rows_per_piece = max(64, SCRATCH_BYTES // (slab.shape.num_elements * 4 * 3))

    @torch.inference_mode()
    def average(self, moves: Moves) -> None:
        """Rows hold a first capture; afterwards its mean with the paged caches, at the position there."""
        rows, slots, positions = moves.expand(self._block_size)
        for start in range(0, len(rows), self._rows_per_piece):
            piece = slice(start, start + self._rows_per_piece)
            self._average_piece(rows[piece], slots[piece], positions[piece])
        self._mover.note_origins(rows, positions)

    def _average_piece(self, rows: Int32Array, slots: Int32Array, positions: Int32Array) -> None:
        slab, row_format = self._slab, self._slab.format
        row_index, slot_index, places = (
            torch.from_numpy(numbers).to(slab.data.device, torch.int64)
            for numbers in (rows, slots, positions)
        )
        deltas = (places - slab.origins[row_index]).cpu()
        cos, sin = (part.to(slab.data.device) for part in delta_cos_sin(deltas, self._rotary))
        is_moved = (deltas != 0).to(slab.data.device)
        picked = slab.data[row_index]
        layouts = {id(layout): layout for layout in self._caches.layouts}  # few kinds, each shared by layers
        indices = {key: layout.element_index(slot_index) for key, layout in layouts.items()}
        for index, (layer, layout) in enumerate(zip(*self._caches, strict=True)):
            first = row_format.decode_layer(picked, index).to(torch.float32).unsqueeze(1)
            keys, values = turn(first, cos, sin, is_moved, self._rotary, torch.float32)
            second = flat_storage(layer.cache)[indices[id(layout)]].to(torch.float32)
            both = torch.stack((keys[0], values[0]), dim=1)
            mean = mean_of_same_length(both, second.view(both.shape)).flatten(1)
            row_format.store_layer(slab.data, row_index, index, mean.to(row_format.kv_dtype))
        slab.origins[row_index] = places.to(torch.int32)


def mean_of_same_length(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Vectors in the direction of the mean, as long as the two are on average: float32 [..., dim] each."""
    mean = (first + second) / 2
    length = (first.norm(dim=-1, keepdim=True) + second.norm(dim=-1, keepdim=True)) / 2
    own = mean.norm(dim=-1, keepdim=True)
    return mean * torch.where(own > 0, length / own, 1.0)
