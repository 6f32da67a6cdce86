"""Start-up probe: where in a paged cache the key and value of a slot lie, whatever the backend.

Backends lay blocks out differently (FlashAttention 0.25: `[blocks, 2, block, heads, dim]`; later
`[blocks, heads, block, 2·dim]`; the CPU backend packs keys transposed inside a block, and on AMX
machines differently again), but all of them write through `impl.do_kv_cache_update`. So the probe
writes numbered elements to a scratch block that way, reads the raw block, and derives an index
map; the block is restored. Reading is then a gather through that map, and needs no knowledge of
the layout. vLLM: vllm/v1/attention/backends/{cpu_attn,flash_attn}.py, `do_kv_cache_update`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from inferscale.errors import UnsupportedLayout

_BASE = 255
"""Digits are 1…255, exact in float32, float16 and bfloat16; 0 marks an untouched element."""


class LayerCache(NamedTuple):
    """One attention layer and its paged cache on this worker. group: number of its KV cache group."""

    name: str
    layer: Any
    cache: torch.Tensor
    num_kv_heads: int
    head_dim: int
    group: int = 0


@dataclass(frozen=True)
class BlockLayout:
    """Index map of a paged cache.

    block_size: slots in one block of the tensor. block_stride: storage elements from one block to
    the next. offsets: int64 [block_size, 2, num_kv_heads, head_dim], storage offset of each key
    (index 0) and value (1) element from the start of its block.
    """

    block_size: int
    block_stride: int
    offsets: torch.Tensor

    def element_index(self, slots: torch.Tensor) -> torch.Tensor:
        """Storage offsets of whole rows; slots int64 [n] → int64 [n, 2 · num_kv_heads · head_dim]."""
        start = (slots // self.block_size) * self.block_stride
        return start.unsqueeze(1) + self.offsets[slots % self.block_size].flatten(1)


def write_kv(layer: LayerCache, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """The portable write, vLLM's own. keys, values [n, num_kv_heads, head_dim], slots int64 [n]."""
    layer.layer.impl.do_kv_cache_update(layer.layer, keys, values, layer.cache, slots)


def flat_storage(cache: torch.Tensor) -> torch.Tensor:
    """The cache as one flat view, so that storage offsets of the layout index it."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(cache.shape, cache.stride(), strict=True))
    return cache.as_strided((extent,), (1,), cache.storage_offset())


def probe_layout(layer: LayerCache, num_blocks: int) -> BlockLayout:
    """Derive the layout of one layer's cache by writing to block 0 and reading it back.

    Block 0 is vLLM's null block, which no request ever owns (vllm/v1/core/block_pool.py); it is
    restored. Raises UnsupportedLayout when the map is not one element per written element.
    """
    cache = layer.cache
    per_slot = 2 * layer.num_kv_heads * layer.head_dim
    dim = _block_dim(layer, num_blocks)
    block = cache.select(dim, 0)
    if block.numel() % per_slot or cache.stride(dim) < 0:
        raise UnsupportedLayout(_explain(layer, f"a block has {block.numel()} elements, a slot {per_slot}"))
    block_size = block.numel() // per_slot
    saved = block.clone()
    try:
        numbers = _write_numbers(layer, block, block_size)
    finally:
        block.copy_(saved)
    storage = _storage_offsets(block)
    expected = block_size * per_slot
    order = torch.argsort(numbers)
    if not torch.equal(numbers[order], torch.arange(expected, device=numbers.device)):
        raise UnsupportedLayout(_explain(layer, "written elements do not come back once each"))
    offsets = storage.to(order.device)[order].view(2, block_size, layer.num_kv_heads, layer.head_dim)
    return BlockLayout(block_size, cache.stride(dim), offsets.transpose(0, 1).contiguous())


def check_layout(layer: LayerCache, layout: BlockLayout) -> None:
    """Write random keys and values to block 0 of `layer` and read them back through `layout`."""
    generator = torch.Generator().manual_seed(0)
    shape = (layout.block_size, layer.num_kv_heads, layer.head_dim)
    device, dtype = layer.cache.device, layer.cache.dtype
    keys = torch.randn(shape, generator=generator).to(device=device, dtype=dtype)
    values = torch.randn(shape, generator=generator).to(device=device, dtype=dtype)
    slots = torch.arange(layout.block_size, device=device, dtype=torch.int64)
    flat = flat_storage(layer.cache)
    index = layout.element_index(slots)
    saved = flat[index]
    write_kv(layer, keys, values, slots)
    found = flat[index].view(layout.block_size, 2, layer.num_kv_heads, layer.head_dim)
    flat[index] = saved
    if not torch.equal(found, torch.stack((keys, values), dim=1)):
        raise UnsupportedLayout(_explain(layer, "keys and values read back differ from those written"))


def _write_numbers(layer: LayerCache, block: torch.Tensor, block_size: int) -> torch.Tensor:
    """Write each element's number in base-255 digits, a digit a round; int64 [elements of the block]."""
    count = 2 * block_size * layer.num_kv_heads * layer.head_dim
    device = block.device
    numbers = torch.arange(count, device=device)
    slots = torch.arange(block_size, device=device, dtype=torch.int64)
    found = torch.zeros(count, dtype=torch.int64, device=device)
    weight = 1
    while weight < count:
        digits = ((numbers // weight) % _BASE + 1).to(block.dtype)
        keys, values = digits.view(2, block_size, layer.num_kv_heads, layer.head_dim)
        block.zero_()
        write_kv(layer, keys.contiguous(), values.contiguous(), slots)
        found += (block.reshape(-1).to(torch.int64) - 1) * weight
        weight *= _BASE
    return found


def _storage_offsets(block: torch.Tensor) -> torch.Tensor:
    """Storage offset of every element of a block, in logical order, from the block's start."""
    offsets = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(block.shape, block.stride(), strict=True):
        offsets = (offsets.unsqueeze(-1) + torch.arange(size, dtype=torch.int64) * stride).flatten()
    return offsets


def _block_dim(layer: LayerCache, num_blocks: int) -> int:
    """Which dimension counts blocks. A block may be split into smaller kernel blocks."""
    shape = layer.cache.shape
    for dim in range(min(2, len(shape))):
        if shape[dim] >= num_blocks and shape[dim] % num_blocks == 0:
            return dim
    raise UnsupportedLayout(_explain(layer, f"no dimension holds the {num_blocks} blocks"))


def _explain(layer: LayerCache, what: str) -> str:
    return (
        f"The paged KV cache of layer {layer.name} has shape {tuple(layer.cache.shape)} and dtype "
        f"{layer.cache.dtype}: {what}. InferScale cannot inject into it; start vLLM without the connector, "
        "or with another attention backend (--attention-backend)."
    )
