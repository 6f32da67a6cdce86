"""Attention layers whose paged caches are laid out as this or that backend does it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch

from inferscale.connector.layout import LayerCache

Put = Callable[[torch.Tensor, int, int, torch.Tensor, torch.Tensor], None]
"""Writes one token: (cache, block, offset in the block, keys [heads, dim], values [heads, dim])."""


def layer(
    cache: torch.Tensor, block_size: int, heads: int, dim: int, put: Put, name: str = "layers.0.attn"
) -> LayerCache:
    """A layer whose `impl.do_kv_cache_update` puts token by token."""

    def do_kv_cache_update(
        layer: object, keys: torch.Tensor, values: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        assert kv_cache is cache
        assert keys.is_contiguous()
        assert values.is_contiguous()
        assert keys.shape == values.shape == (len(slots), heads, dim)
        for index, slot in enumerate(slots.tolist()):
            put(kv_cache, slot // block_size, slot % block_size, keys[index], values[index])

    impl = SimpleNamespace(do_kv_cache_update=do_kv_cache_update)
    return LayerCache(name, SimpleNamespace(impl=impl), cache, heads, dim)


def flash_025(blocks: int, block: int, heads: int, dim: int, dtype: torch.dtype) -> LayerCache:
    """FlashAttention of 0.25: [blocks, 2, block, heads, dim]."""

    def put(cache: torch.Tensor, b: int, o: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        cache[b, 0, o], cache[b, 1, o] = keys, values

    return layer(torch.randn(blocks, 2, block, heads, dim).to(dtype), block, heads, dim, put)


def flash_025_hnd(blocks: int, block: int, heads: int, dim: int, dtype: torch.dtype) -> LayerCache:
    """The same shape over HND memory: heads lie outside of the tokens."""

    def put(cache: torch.Tensor, b: int, o: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        cache[b, 0, o], cache[b, 1, o] = keys, values

    cache = torch.randn(blocks, 2, heads, block, dim).to(dtype).permute(0, 1, 3, 2, 4)
    return layer(cache, block, heads, dim, put)


def flash_03x(blocks: int, block: int, heads: int, dim: int, dtype: torch.dtype) -> LayerCache:
    """FlashAttention of 0.3x: [blocks, heads, block, 2·dim]."""

    def put(cache: torch.Tensor, b: int, o: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        cache[b, :, o, :dim], cache[b, :, o, dim:] = keys, values

    return layer(torch.randn(blocks, heads, block, 2 * dim).to(dtype), block, heads, dim, put)


def kv_first(blocks: int, block: int, heads: int, dim: int, dtype: torch.dtype) -> LayerCache:
    """[2, blocks, block, heads, dim]: keys and values of a block are far apart."""

    def put(cache: torch.Tensor, b: int, o: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        cache[0, b, o], cache[1, b, o] = keys, values

    return layer(torch.randn(2, blocks, block, heads, dim).to(dtype), block, heads, dim, put)


def cpu_packed(blocks: int, block: int, heads: int, dim: int, dtype: torch.dtype) -> LayerCache:
    """The CPU backend: [blocks, heads, block, 2·dim] read as keys [dim, block] and values [block, dim]."""

    def put(cache: torch.Tensor, b: int, o: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        halves = cache.view(blocks, heads, block * 2, dim)
        halves[b, :, :block].view(heads, dim, block)[:, :, o] = keys
        halves[b, :, block:][:, o] = values

    return layer(torch.randn(blocks, heads, block, 2 * dim).to(dtype), block, heads, dim, put)


def shuffled(blocks: int, block: int, heads: int, dim: int, dtype: torch.dtype) -> LayerCache:
    """Any order inside the block."""
    generator = torch.Generator().manual_seed(7)
    size = block * 2 * heads * dim
    order = torch.randperm(size, generator=generator).view(block, 2, heads, dim)

    def put(cache: torch.Tensor, b: int, o: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        cache[b, order[o, 0]], cache[b, order[o, 1]] = keys, values

    return layer(torch.randn(blocks, size).to(dtype), block, heads, dim, put)


def padded_blocks(blocks: int, block: int, heads: int, dim: int, dtype: torch.dtype) -> LayerCache:
    """Blocks of a larger page: the stride from block to block is more than a block."""
    size = block * 2 * heads * dim
    memory = torch.randn(blocks * (size + 24) + 8).to(dtype)
    cache = memory.as_strided((blocks, 2, block, heads, dim), (size + 24, size // 2, heads * dim, dim, 1), 8)

    def put(cache: torch.Tensor, b: int, o: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        cache[b, 0, o], cache[b, 1, o] = keys, values

    return layer(cache, block, heads, dim, put)


def small_kernel_blocks(blocks: int, block: int, heads: int, dim: int, dtype: torch.dtype) -> LayerCache:
    """The scheduler's block is split into kernel blocks of half its size."""
    return flash_025(blocks * 2, block // 2, heads, dim, dtype)


LAYOUTS = {
    make.__name__: make
    for make in (
        flash_025,
        flash_025_hnd,
        flash_03x,
        kv_first,
        cpu_packed,
        shuffled,
        padded_blocks,
        small_kernel_blocks,
    )
}
