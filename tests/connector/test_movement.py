"""Which path moves KV: the fused kernels only where they give what the portable path gives."""

from __future__ import annotations

import logging
import sys
from typing import Any

import numpy as np
import pytest
import torch
from fake_layers import LAYOUTS, flash_025, flash_03x

from inferscale.config import PoolDtype
from inferscale.connector.layout import LayerCache, flat_storage, probe_layout, write_kv
from inferscale.connector.movement import Caches, PortableMover, choose_mover
from inferscale.errors import UnsupportedLayout
from inferscale.kernels.fused import FusedMover
from inferscale.pool.moves import Moves, single_run
from inferscale.pool.row_format import RowFormat
from inferscale.pool.slab import Slab
from inferscale.rope import Rotary
from inferscale.row_size import RowShape

pytest.importorskip("triton")

BLOCKS, BLOCK, HEADS, DIM = 5, 4, 2, 16
IRREGULAR = ("cpu_packed", "shuffled")


def rotary() -> Rotary:
    return Rotary(1.0 / 100.0 ** (torch.arange(0, DIM, 2, dtype=torch.float64) / DIM), DIM, DIM, False)


def caches_of(layers: list[LayerCache]) -> Caches:
    layout = probe_layout(layers[0], BLOCKS)
    return Caches(layers, [layout] * len(layers))


def slab_of(layers: list[LayerCache], pool_dtype: PoolDtype = "auto") -> Slab:
    shape = RowShape(tuple((layer.num_kv_heads, layer.head_dim) for layer in layers))
    return Slab(6, 4, RowFormat(shape, layers[0].cache.dtype, pool_dtype), torch.device("cpu"))


def choose(layers: list[LayerCache], path: Any = "auto", *, interpret: bool = True) -> Any:
    slab = slab_of(layers)
    caches = caches_of(layers)
    return choose_mover(slab, caches, rotary(), BLOCK, 20, path, compile=False, interpret=interpret)


@pytest.mark.parametrize("name", LAYOUTS)
def test_regular_layouts_are_served_by_the_kernels_and_others_are_not(name: str) -> None:
    layers = [LAYOUTS[name](BLOCKS, BLOCK, HEADS, DIM, torch.bfloat16) for _ in range(2)]
    before = [layer.cache.clone() for layer in layers]
    mover = choose(layers)
    assert isinstance(mover, PortableMover if name in IRREGULAR else FusedMover)
    for layer, cache in zip(layers, before, strict=True):
        assert torch.equal(layer.cache, cache), "the scratch block is as it was"


@pytest.mark.parametrize("pool_dtype", ["auto", "int8", "fp8"])
def test_the_kernels_move_what_the_portable_path_moves(pool_dtype: PoolDtype) -> None:
    layers = [flash_03x(BLOCKS, BLOCK, HEADS, DIM, torch.float32) for _ in range(3)]
    slab, caches = slab_of(layers, pool_dtype), caches_of(layers)
    fused = choose_mover(slab, caches, rotary(), BLOCK, 20, "auto", compile=False, interpret=True)
    assert isinstance(fused, FusedMover)
    assert slab.data.eq(0).all(), "nothing of the check is left in the slab"
    rows = np.array([3, 4, 9, 23], dtype=np.int32)
    fused.capture(single_run(rows, 1, [1, 4], BLOCK))
    assert slab.origins[[3, 4, 9, 23]].tolist() == [1, 2, 3, 4]
    to = single_run(rows, 4 * 7 + 2, [0] * 7 + [2, 3], BLOCK)
    slab.origins[[3, 23]] = torch.tensor([30, 900], dtype=torch.int32)
    caches_before = [layer.cache.clone() for layer in layers]
    fused.inject(to)
    found = [layer.cache.clone() for layer in layers]
    for layer, cache in zip(layers, caches_before, strict=True):
        layer.cache.copy_(cache)
    PortableMover(slab, caches, rotary(), BLOCK, compile=False).inject(to)
    for layer, cache in zip(layers, found, strict=True):
        torch.testing.assert_close(layer.cache, cache, rtol=1e-5, atol=1e-5)
    fused.zero(np.array([2], dtype=np.int32))
    assert slab.data[8:12].eq(0).all()
    assert slab.data[3].ne(0).any()


@pytest.mark.parametrize("pool_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("dims", [(2, 16), (2, 16, 1, 32)], ids=["alike", "different"])
def test_quantized_layers_come_back(pool_dtype: PoolDtype, dims: tuple[int, ...]) -> None:
    """Through the pool and to another place: what was captured, to the precision of its format."""
    shapes = list(zip(dims[::2], dims[1::2], strict=True)) * 2
    layers = [flash_03x(BLOCKS, BLOCK, heads, dim, torch.float32) for heads, dim in shapes]
    layouts = [probe_layout(layer, BLOCKS) for layer in layers]
    slab = slab_of(layers, pool_dtype)
    turning = rotary() if len(set(shapes)) == 1 else Rotary(rotary().inv_freq, DIM, DIM, False)
    mover = PortableMover(slab, Caches(layers, layouts), turning, BLOCK, compile=False)
    written = []
    for layer in layers:
        keys = torch.randn((4, layer.num_kv_heads, layer.head_dim))
        values = torch.randn_like(keys)
        write_kv(layer, keys, values, torch.arange(8, 12))
        written.append((keys, values))
    rows = np.array([3, 4, 9, 23], dtype=np.int32)
    mover.capture(single_run(rows, 8, [0, 0, 2], BLOCK))
    mover.inject(single_run(rows, 8, [0, 0, 3], BLOCK))
    limit = 0.02 if pool_dtype == "int8" else 0.15
    for layer, layout, (keys, values) in zip(layers, layouts, written, strict=True):
        found = flat_storage(layer.cache)[layout.element_index(torch.arange(12, 16))]
        wanted = torch.stack((keys, values), dim=1).flatten(1)
        assert float((found - wanted).abs().max()) < limit
        assert not torch.equal(found, wanted)


@pytest.mark.parametrize("broken", ["inject", "capture"])
def test_kernels_that_give_something_else_are_not_trusted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    original = getattr(FusedMover, broken)

    def shifted(self: FusedMover, moves: Moves) -> None:
        rows, _, _ = moves.expand(BLOCK)
        original(self, single_run(np.roll(rows, 1), 0, [0], BLOCK))

    monkeypatch.setattr(FusedMover, broken, shifted)
    layers = [flash_025(BLOCKS, BLOCK, HEADS, DIM, torch.float32)]
    before = layers[0].cache.clone()
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose(layers), PortableMover)
    assert "differs from the portable path" in caplog.text
    assert torch.equal(layers[0].cache, before)
    with pytest.raises(UnsupportedLayout, match=r"injection_path is 'fused', but .* differs"):
        choose(layers, "fused")


@pytest.mark.parametrize("page", [1, 4, 16])
def test_zeroing_that_misses_is_not_trusted(monkeypatch: pytest.MonkeyPatch, page: int) -> None:
    layers = [flash_025(BLOCKS, BLOCK, HEADS, DIM, torch.float32)]
    shape = RowShape(((HEADS, DIM),))
    slab = Slab(3, page, RowFormat(shape, torch.float32), torch.device("cpu"))
    slab.data.normal_()
    before = slab.data.clone()

    def choose_again() -> Any:
        return choose_mover(
            slab, caches_of(layers), rotary(), BLOCK, 20, "auto", compile=False, interpret=True
        )

    assert isinstance(choose_again(), FusedMover)
    assert torch.equal(slab.data, before)
    monkeypatch.setattr(FusedMover, "zero", lambda self, pages: None)
    assert isinstance(choose_again(), PortableMover)
    assert torch.equal(slab.data, before)


def test_a_compiler_that_fails_is_no_reason_not_to_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(FusedMover, "capture", fails)
    layers = [flash_025(BLOCKS, BLOCK, HEADS, DIM, torch.float32)]
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose(layers), PortableMover)
    assert "no C compiler" in caplog.text
    with pytest.raises(UnsupportedLayout, match="no C compiler"):
        choose(layers, "fused")


def test_the_setting_decides() -> None:
    layers = [flash_025(BLOCKS, BLOCK, HEADS, DIM, torch.float32)]
    assert isinstance(choose(layers, "portable"), PortableMover)
    assert isinstance(choose(layers, "auto", interpret=False), PortableMover), "a CPU"
    with pytest.raises(UnsupportedLayout, match="need a CUDA GPU"):
        choose(layers, "fused", interpret=False)


def test_layers_that_differ_take_the_portable_path() -> None:
    layers = [
        flash_025(BLOCKS, BLOCK, HEADS, DIM, torch.float32),
        flash_025(BLOCKS, BLOCK, 2 * HEADS, DIM, torch.float32),
    ]
    layouts = [probe_layout(layer, BLOCKS) for layer in layers]
    mover = choose_mover(
        slab_of(layers), Caches(layers, layouts), rotary(), BLOCK, 20, "auto", compile=False, interpret=True
    )
    assert isinstance(mover, PortableMover)


def test_without_triton_the_portable_path_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    layers = [flash_025(BLOCKS, BLOCK, HEADS, DIM, torch.float32)]
    assert isinstance(choose(layers), PortableMover)
    with pytest.raises(UnsupportedLayout, match="Triton"):
        choose(layers, "fused")
