"""Worker side with several KV cache groups: each on its slice of the rows, with its own rotary and blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fake_layers import LAYOUTS

from inferscale.config import ConnectorConfig
from inferscale.connector import movement
from inferscale.connector.averaging import mean_of_same_length
from inferscale.connector.layout import LayerCache, flat_storage
from inferscale.connector.messages import StepOrders
from inferscale.connector.movement import Caches, PortableMover, choose_mover
from inferscale.connector.worker import WorkerSide
from inferscale.errors import UnsupportedLayout
from inferscale.kernels.fused import FusedMover
from inferscale.pool.moves import GroupMoves, single_run
from inferscale.pool.row_format import RowFormat
from inferscale.pool.slab import Slab
from inferscale.rope import Rotary, relocate
from inferscale.row_size import RowShape

BLOCKS, HEADS = 12, 2
BLOCK_SIZES = [4, 8]
LOCAL, GLOBAL = 100.0, 10000.0
BASES = [LOCAL, LOCAL, LOCAL, GLOBAL, None]
"""Of the layers: three of the first group, two of the second, the last one without rotary embedding."""
NUM_FIRST = 3
ROWS = np.array([5, 6, 7, 40, 41, 42, 43, 0, 1, 2, 3, 9], dtype=np.int32)
CAPTURED, SERVED = 8, 96
"""Where the twelve tokens stand in a prompt."""


def rotary_of(base: float | None, dim: int) -> Rotary:
    inv_freq = torch.zeros(dim // 2, dtype=torch.float64)
    if base is not None:
        inv_freq = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return Rotary(inv_freq, dim, dim, False)


def by_layer(dim: int) -> Rotary:
    return Rotary(torch.stack([rotary_of(base, dim).inv_freq for base in BASES]), dim, dim, False)


def layers_of(name: str, dim: int, dtype: torch.dtype) -> list[LayerCache]:
    layers = []
    for index in range(len(BASES)):
        group = int(index >= NUM_FIRST)
        layer = LAYOUTS[name](BLOCKS, BLOCK_SIZES[group], HEADS, dim, dtype)
        layers.append(layer._replace(group=group))
        movement._write_random(layer, BLOCKS * BLOCK_SIZES[group], seed=index)
    return layers


def moves(start: int, first: list[int], second: list[int]) -> GroupMoves:
    """first, second: the blocks of the tokens in each group."""
    return tuple(
        single_run(ROWS, start, [0] * (start // size) + blocks, size)
        for size, blocks in zip(BLOCK_SIZES, (first, second), strict=True)
    )


def make_worker(layers: list[LayerCache], **settings: Any) -> WorkerSide:
    config = ConnectorConfig(
        **{"pool_size_bytes": 2**18, "page_size_tokens": 4, "compile_injection": False, **settings}
    )
    rotary = by_layer(layers[0].head_dim)
    return WorkerSide(config, layers, rotary, BLOCKS, BLOCK_SIZES, lambda: 2**40)


def read(side: WorkerSide, index: int, of_group: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [n, heads, dim] of a layer at the slots of moves."""
    layer, layout = side.layers[index], side._layouts[index]
    slots = torch.from_numpy(of_group.expand(BLOCK_SIZES[layer.group]).slots).to(torch.int64)
    rows = flat_storage(layer.cache)[layout.element_index(slots)]
    pairs = rows.view(len(slots), 2, layer.num_kv_heads, layer.head_dim).clone()
    return pairs[:, 0], pairs[:, 1]


FROM = moves(CAPTURED, [1, 2, 3], [4, 5])
TO = moves(SERVED, [7, 8, 9], [10, 1])
SECOND = moves(2 * CAPTURED, [4, 5, 6], [6, 7])


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_group_moves_its_layers(name: str, dtype: torch.dtype) -> None:
    side = make_worker(layers_of(name, 6, dtype))
    assert len(side.parts) == 2
    originals = [read(side, index, FROM[layer.group]) for index, layer in enumerate(side.layers)]
    others = [flat_storage(layer.cache).clone() for layer in side.layers]
    side.after_forward(StepOrders(step=1, capture=FROM))
    for layer, before in zip(side.layers, others, strict=True):
        assert torch.equal(flat_storage(layer.cache), before)
    side.before_forward(StepOrders(injection=TO))
    deltas = torch.full((len(ROWS),), SERVED - CAPTURED)
    for index, (keys, values) in enumerate(originals):
        found_keys, found_values = read(side, index, TO[side.layers[index].group])
        assert torch.equal(found_values, values)
        expected = relocate(keys, deltas, rotary_of(BASES[index], 6))
        assert torch.equal(found_keys, expected)
        assert torch.equal(found_keys, keys) == (BASES[index] is None), "only a layer without rotary keeps it"
        assert torch.equal(found_keys, relocate(keys, deltas, rotary_of(LOCAL, 6))) == (index < NUM_FIRST)


def test_a_group_may_be_left_out() -> None:
    """Its window sees nothing of a run, say."""
    side = make_worker(layers_of("flash_03x", 6, torch.float32))
    side.after_forward(StepOrders(step=1, capture=FROM))
    before = [flat_storage(layer.cache).clone() for layer in side.layers]
    side.before_forward(StepOrders(injection=(None, TO[1])))
    for layer, cache in zip(side.layers, before, strict=True):
        assert torch.equal(flat_storage(layer.cache), cache) == (layer.group == 0)


def test_a_failed_injection_names_the_blocks_of_all_groups() -> None:
    side = make_worker(layers_of("flash_03x", 6, torch.float32))

    def fails(*arguments: object) -> None:
        raise RuntimeError("no memory")

    side.layers[-1].layer.impl.do_kv_cache_update = fails
    side.before_forward(StepOrders(injection=TO))
    assert side.take_failed_blocks() == {7, 8, 9, 10, 1}


@pytest.mark.parametrize("pool_dtype", ["auto", "int8"])
def test_a_second_capture_leaves_the_mean_in_all_groups(pool_dtype: str) -> None:
    dim = 32
    side = make_worker(layers_of("cpu_packed", dim, torch.float32), pool_dtype=pool_dtype)
    side.averager._rows_per_piece = 5
    first = [read(side, index, FROM[layer.group]) for index, layer in enumerate(side.layers)]
    second = [read(side, index, SECOND[layer.group]) for index, layer in enumerate(side.layers)]
    side.after_forward(StepOrders(step=1, capture=FROM))
    side.after_forward(StepOrders(step=2, averaging=SECOND))
    report = side.take_report()
    assert report is not None
    assert report.failed_captures == set()
    assert side.slab.origins[torch.from_numpy(ROWS)].tolist() == list(range(16, 28))
    side.before_forward(StepOrders(injection=moves(2 * CAPTURED, [7, 8, 9], [10, 1])))
    tolerance = 0.03 if pool_dtype == "int8" else 1e-6
    for index, layer in enumerate(side.layers):
        keys, values = read(side, index, TO[layer.group])
        moved = relocate(first[index][0], torch.full((12,), CAPTURED), rotary_of(BASES[index], dim))
        mean = mean_of_same_length(moved, second[index][0])
        torch.testing.assert_close(keys, mean, atol=tolerance, rtol=tolerance)
        mean = mean_of_same_length(first[index][1], second[index][1])
        torch.testing.assert_close(values, mean, atol=tolerance, rtol=tolerance)


def test_groups_that_this_worker_does_not_have_are_refused() -> None:
    layers = [layer for layer in layers_of("flash_03x", 6, torch.float32) if layer.group == 0]
    with pytest.raises(UnsupportedLayout, match="2 groups of KV caches, of which this worker's layers use 1"):
        make_worker(layers)


@pytest.mark.parametrize("pool_dtype", ["auto", "int8", "fp8"])
def test_the_fused_kernels_serve_a_slice_of_the_rows(pool_dtype: Any) -> None:
    """They are checked against the portable path at start-up, here in Triton's interpreter."""
    pytest.importorskip("triton")
    dim = 32
    layers = layers_of("flash_03x", dim, torch.bfloat16)
    side = make_worker(layers, pool_dtype=pool_dtype, injection_path="portable")
    shape = RowShape(tuple((layer.num_kv_heads, layer.head_dim) for layer in layers))
    for part in side.parts:
        slab = Slab(16, 4, RowFormat(shape, torch.bfloat16, pool_dtype), torch.device("cpu"))
        mover = choose_mover(
            slab, part.caches, part.rotary, part.block_size, 96, "fused", compile=False, interpret=True
        )
        assert isinstance(mover, FusedMover)
        number = layers.index(part.caches.layers[0])
        assert part.caches.first == number == (0 if part.block_size == 4 else NUM_FIRST)
        mover.capture(FROM[number > 0])
        portable = PortableMover(slab, part.caches, part.rotary, part.block_size, compile=False)
        captured = slab.data.clone()
        assert bool(captured.any())
        slab.data.zero_()
        portable.capture(FROM[number > 0])
        assert torch.equal(slab.data, captured)
        assert isinstance(part.caches, Caches)


def test_memory_that_groups_share_counts_once() -> None:
    """vLLM gives one allocation to a layer of each group."""
    first = LAYOUTS["flash_03x"](BLOCKS, 4, HEADS, 6, torch.float32)
    layers = [first, first._replace(name="layers.1.attn", group=1)]
    config = ConnectorConfig(pool_size_bytes=2**14, page_size_tokens=4, compile_injection=False)
    side = WorkerSide(config, layers, rotary_of(LOCAL, 6), BLOCKS, [4, 4], lambda: 2**40)
    budget = side._describe(side.slab, 0)
    assert budget.cache_bytes == first.cache.untyped_storage().nbytes()
    assert budget.cache_tokens == BLOCKS * 4 // 2, "a token takes a slot in both"
