"""The start-up probe finds every layout that is one, and refuses what is none."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from fake_layers import LAYOUTS, flash_025, layer

from inferscale.connector.layout import LayerCache, check_layout, flat_storage, probe_layout, write_kv
from inferscale.errors import UnsupportedLayout

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BLOCKS = 5


def whole_memory(cache: torch.Tensor) -> torch.Tensor:
    """Every byte behind the cache, padding too."""
    storage = cache.untyped_storage()
    return torch.frombuffer(bytearray(bytes(storage)), dtype=torch.uint8).clone()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("block", "heads", "dim"), [(4, 2, 6), (16, 1, 8), (2, 3, 10)])
def test_probe_reads_back_what_is_written(
    name: str, dtype: torch.dtype, block: int, heads: int, dim: int
) -> None:
    cache = LAYOUTS[name](BLOCKS, block, heads, dim, dtype)
    before = whole_memory(cache.cache)
    layout = probe_layout(cache, BLOCKS)
    check_layout(cache, layout)
    assert torch.equal(whole_memory(cache.cache), before), "the scratch block is restored bit for bit"
    slots = torch.randperm(BLOCKS * block, generator=torch.Generator().manual_seed(1))
    keys, values = (
        torch.randn(len(slots), heads, dim).to(dtype),
        torch.randn(len(slots), heads, dim).to(dtype),
    )
    write_kv(cache, keys, values, slots)
    found = flat_storage(cache.cache)[layout.element_index(slots)].view(-1, 2, heads, dim)
    assert torch.equal(found[:, 0], keys)
    assert torch.equal(found[:, 1], values)


def test_probe_keeps_nan_and_negative_zero_of_the_scratch_block() -> None:
    cache = flash_025(BLOCKS, 4, 2, 6, torch.float32)
    cache.cache[0].view(-1)[:4] = torch.tensor([float("nan"), -0.0, float("inf"), -float("inf")])
    before = whole_memory(cache.cache)
    check_layout(cache, probe_layout(cache, BLOCKS))
    assert torch.equal(whole_memory(cache.cache), before)


def test_large_blocks_need_several_digits() -> None:
    heads, dim, block = 8, 64, 128  # 131,072 elements: three digits to the base 255
    cache = torch.zeros(2, 2, block, heads, dim, dtype=torch.bfloat16)

    def update(
        layer: object, keys: torch.Tensor, values: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor
    ) -> None:
        kv[slots // block, 0, slots % block], kv[slots // block, 1, slots % block] = keys, values

    made = LayerCache(
        "l", SimpleNamespace(impl=SimpleNamespace(do_kv_cache_update=update)), cache, heads, dim
    )
    layout = probe_layout(made, 2)
    check_layout(made, layout)
    assert layout.offsets.unique().numel() == 2 * block * heads * dim


@pytest.mark.parametrize("name", LAYOUTS)
def test_check_catches_a_wrong_map(name: str) -> None:
    cache = LAYOUTS[name](BLOCKS, 4, 2, 6, torch.float32)
    layout = probe_layout(cache, BLOCKS)
    before = whole_memory(cache.cache)
    wrong = dataclasses.replace(layout, offsets=layout.offsets.flip(1))  # keys and values exchanged
    with pytest.raises(UnsupportedLayout, match="read back differ"):
        check_layout(cache, wrong)
    swapped = layout.offsets.clone()
    swapped[0, 0, 0, [0, 1]] = layout.offsets[0, 0, 0, [1, 0]]  # two elements only
    with pytest.raises(UnsupportedLayout, match="read back differ"):
        check_layout(cache, dataclasses.replace(layout, offsets=swapped))
    assert torch.equal(whole_memory(cache.cache), before)


def test_a_write_that_loses_elements_is_refused() -> None:
    def put(cache: torch.Tensor, b: int, o: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        cache[b, 0, o] = keys  # the values are not kept

    broken = layer(torch.randn(BLOCKS, 2, 4, 2, 6), 4, 2, 6, put)
    before = whole_memory(broken.cache)
    with pytest.raises(UnsupportedLayout, match=r"shape \(5, 2, 4, 2, 6\).*once each.*--attention-backend"):
        probe_layout(broken, BLOCKS)
    assert torch.equal(whole_memory(broken.cache), before)


def test_a_write_that_overlaps_itself_is_refused() -> None:
    def put(cache: torch.Tensor, b: int, o: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        cache[b, 0, o], cache[b, 0, o] = keys, values

    with pytest.raises(UnsupportedLayout, match="once each"):
        probe_layout(layer(torch.randn(BLOCKS, 2, 4, 2, 6), 4, 2, 6, put), BLOCKS)


def test_a_write_that_changes_values_is_refused() -> None:
    def put(cache: torch.Tensor, b: int, o: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        cache[b, 0, o], cache[b, 1, o] = keys, values * 0.5  # a scale, as quantized caches have it

    with pytest.raises(UnsupportedLayout, match="once each"):
        probe_layout(layer(torch.randn(BLOCKS, 2, 4, 2, 6), 4, 2, 6, put), BLOCKS)


def test_padding_inside_a_block_is_refused() -> None:
    def put(cache: torch.Tensor, b: int, o: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        cache[b, 0, o, :, :6], cache[b, 1, o, :, :6] = keys, values

    with pytest.raises(UnsupportedLayout):
        probe_layout(layer(torch.randn(BLOCKS, 2, 4, 2, 8), 4, 2, 6, put), BLOCKS)
    with pytest.raises(UnsupportedLayout, match="a block has"):
        probe_layout(layer(torch.randn(BLOCKS, 2, 4, 2, 7), 4, 2, 6, put), BLOCKS)


def test_padding_by_whole_slots_is_refused() -> None:
    def put(cache: torch.Tensor, b: int, o: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        cache[b, 0, o], cache[b, 1, o] = keys, values

    with pytest.raises(UnsupportedLayout, match="once each"):
        probe_layout(layer(torch.randn(BLOCKS, 2, 6, 2, 6), 4, 2, 6, put), BLOCKS)


def test_a_cache_without_a_dimension_of_blocks_is_refused() -> None:
    cache = flash_025(7, 4, 2, 6, torch.float32)
    with pytest.raises(UnsupportedLayout, match="no dimension holds the 5 blocks"):
        probe_layout(cache, BLOCKS)
