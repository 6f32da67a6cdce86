"""Where a slot's keys and values lie in a paged cache, as a handful of strides.

FlashAttention's layouts are regular: in `[blocks, 2, block, heads, dim]` (0.25, NHD), its HND order
and the packed `[blocks, heads, block, 2·dim]` of later versions alike, the place of an element is a sum
of its indices times strides. The probe (connector/layout.py) finds every element's place by experiment;
from that map the strides are read here, so the kernels know no layout by name. A map that is not
such a sum (the CPU backend's) has no geometry, and the portable path serves it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class CacheGeometry(NamedTuple):
    """Strides of a paged cache in elements; dimensions of a head are neighbours.

    Key element (block b, offset o, head h, dim d) lies at `b · block_stride + o · slot_stride +
    h · head_stride + d + origin`, its value `kv_stride` further.
    """

    block_size: int
    block_stride: int
    slot_stride: int
    kv_stride: int
    head_stride: int
    origin: int = 0


def geometry_of(offsets: torch.Tensor, block_stride: int) -> CacheGeometry | None:
    """Strides of a probed layout, or None where the layout is not regular.

    offsets: int64 [block_size, 2, num_kv_heads, head_dim], the place of every key (index 0) and value (1)
    element from the start of its block.
    """
    places = offsets.cpu()
    block_size, _, num_heads, head_dim = places.shape

    def stride(index: tuple[int, int, int, int]) -> int:
        return int(places[index] - places[0, 0, 0, 0])

    geometry = CacheGeometry(
        block_size,
        block_stride,
        slot_stride=stride((1, 0, 0, 0)) if block_size > 1 else 0,
        kv_stride=stride((0, 1, 0, 0)),
        head_stride=stride((0, 0, 1, 0)) if num_heads > 1 else 0,
        origin=int(places[0, 0, 0, 0]),
    )
    expected = geometry.origin + (
        torch.arange(block_size).view(-1, 1, 1, 1) * geometry.slot_stride
        + torch.arange(2).view(1, -1, 1, 1) * geometry.kv_stride
        + torch.arange(num_heads).view(1, 1, -1, 1) * geometry.head_stride
        + torch.arange(head_dim)
    )
    return geometry if torch.equal(places, expected) else None
