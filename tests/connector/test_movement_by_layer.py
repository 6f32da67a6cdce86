"""Layers whose rotary embeddings differ: each is turned by its own frequencies, one without any is not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_layers import flash_03x

from inferscale.connector.averaging import Averager
from inferscale.connector.layout import LayerCache, flat_storage, probe_layout
from inferscale.connector.movement import Caches, Part, PortableMover, _write_random
from inferscale.pool.moves import single_run
from inferscale.pool.row_format import RowFormat
from inferscale.pool.slab import Slab
from inferscale.rope import Rotary, relocate
from inferscale.row_size import RowShape

BLOCKS, BLOCK, DIM, TOKENS = 5, 4, 16, 8
CAPTURED_AT, INJECTED_AT = 2 * BLOCK, 9 * BLOCK
BY_LAYER = torch.stack(
    [1.0 / base ** (torch.arange(0, DIM, 2, dtype=torch.float64) / DIM) for base in (100, 900)]
)
ROTARY = Rotary(torch.cat((BY_LAYER, torch.zeros(1, DIM // 2, dtype=torch.float64))), DIM, DIM, False)

every_shape = pytest.mark.parametrize("heads", [(2, 2, 2), (2, 1, 2)], ids=["alike", "different"])


def made(heads: tuple[int, ...]) -> tuple[Slab, Caches, PortableMover]:
    layers = [flash_03x(BLOCKS, BLOCK, number, DIM, torch.float32) for number in heads]
    shape = RowShape(tuple((number, DIM) for number in heads))
    slab = Slab(6, 4, RowFormat(shape, torch.float32), torch.device("cpu"))
    caches = Caches(layers, [probe_layout(layer, BLOCKS) for layer in layers])
    for number, layer in enumerate(layers):
        _write_random(layer, BLOCKS * BLOCK, number)
    return slab, caches, PortableMover(slab, caches, ROTARY, BLOCK, compile=False)


def keys_at(caches: Caches, index: int, block: int) -> torch.Tensor:
    """Of TOKENS tokens from a block on, [n, heads, dim]."""
    layer: LayerCache = caches.layers[index]
    slots = torch.arange(block * BLOCK, block * BLOCK + TOKENS)
    rows = flat_storage(layer.cache)[caches.layouts[index].element_index(slots)]
    return rows.view(TOKENS, 2, layer.num_kv_heads, DIM)[:, 0].clone()


@every_shape
def test_injection(heads: tuple[int, ...]) -> None:
    _, caches, mover = made(heads)
    rows = np.arange(TOKENS, dtype=np.int32)
    captured = [keys_at(caches, index, 1) for index in range(3)]
    mover.capture(single_run(rows, CAPTURED_AT, [0, 0, 1, 2], BLOCK))
    mover.inject(single_run(rows, INJECTED_AT, [0] * 9 + [3, 4], BLOCK))
    deltas = torch.full((TOKENS,), INJECTED_AT - CAPTURED_AT)
    for index, keys in enumerate(captured):
        found = keys_at(caches, index, 3)
        torch.testing.assert_close(found, relocate(keys, deltas, ROTARY.of_layer(index)), atol=1e-6, rtol=0)
        assert torch.equal(found, keys) == (index == 2)


@every_shape
def test_mean_of_two_captures(heads: tuple[int, ...]) -> None:
    slab, caches, mover = made(heads)
    rows = np.arange(TOKENS, dtype=np.int32)
    mover.capture(single_run(rows, CAPTURED_AT, [0, 0, 1, 2], BLOCK))
    averager = Averager(slab, [Part(caches, ROTARY, BLOCK, mover)])
    averager.average([single_run(rows, INJECTED_AT, [0] * 9 + [3, 4], BLOCK)])
    deltas = torch.full((TOKENS,), INJECTED_AT - CAPTURED_AT)
    for index in range(3):
        moved = relocate(keys_at(caches, index, 1), deltas, ROTARY.of_layer(index))
        wanted = (moved + keys_at(caches, index, 3)) / 2
        found = slab.format.read_layer(slab.data, torch.arange(TOKENS), index)[:, 0]
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
