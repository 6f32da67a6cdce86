"""One case of moving KV: slab, paged caches of a layout, orders, and what must come out.

Used by the tests of the kernels, on the CPU through Triton's interpreter and on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from inferscale.kernels.fused import FusedMover
from inferscale.kernels.geometry import CacheGeometry, geometry_of
from inferscale.kernels.reference import make_gather
from inferscale.pool.slab import RowShape, Slab
from inferscale.rope import Rotary, delta_cos_sin

LAYOUTS = ("nhd", "hnd", "packed", "one_tensor")


class Sizes(NamedTuple):
    layers: int = 3
    heads: int = 2
    dim: int = 64
    rotary: int | None = None
    block: int = 16
    page: int = 8
    blocks: int = 9
    tokens: int = 37


@dataclass
class Case:
    """logical: per layer a view [slots, 2, heads, dim] over its cache, so that tests read what a backend
    would; the caches are poisoned with NaN."""

    slab: Slab
    caches: list[torch.Tensor]
    logical: list[torch.Tensor]
    geometry: CacheGeometry
    rotary: Rotary
    rows: np.ndarray
    slots: np.ndarray
    deltas: np.ndarray

    def mover(self, *, interpret: bool, max_tokens: int = 64) -> FusedMover:
        return FusedMover(self.slab, self.caches, self.geometry, self.rotary, max_tokens, interpret=interpret)

    def expected(self) -> list[torch.Tensor]:
        """Per layer the whole logical cache after injection, by the portable path."""
        device = self.slab.data.device
        deltas = torch.from_numpy(self.deltas.astype(np.int64))
        rows = torch.from_numpy(self.rows.astype(np.int64)).to(device)
        slots = torch.from_numpy(self.slots.astype(np.int64)).to(device)
        cos, sin = (part.to(device) for part in delta_cos_sin(deltas, self.rotary))
        gathered = make_gather(self.rotary)(self.slab.uniform(), rows, cos, sin, (deltas != 0).to(device))
        result = []
        for layer, logical in enumerate(self.logical):
            after = read(logical)
            after[slots, 0], after[slots, 1] = gathered.keys[layer], gathered.values[layer]
            result.append(after)
        return result


def read(logical: torch.Tensor) -> torch.Tensor:
    """A copy [slots, 2, heads, dim]."""
    blocks, block, _, heads, dim = logical.shape
    return logical.reshape(blocks * block, 2, heads, dim).clone()


def make(
    layout: str, sizes: Sizes, dtype: torch.dtype, *, interleaved: bool, seed: int, device: str = "cpu"
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    caches, logical = paged_caches(layout, sizes, dtype, device)
    num_slots = sizes.blocks * sizes.block
    pages = -(-2 * sizes.tokens // sizes.page) + 1
    shape = RowShape(((sizes.heads, sizes.dim),) * sizes.layers)
    slab = Slab(pages, sizes.page, shape, dtype, torch.device(device))
    slab.data.copy_(torch.randn(slab.data.shape, generator=generator).to(dtype))
    part = sizes.dim if sizes.rotary is None else sizes.rotary
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, part, 2, dtype=torch.float64) / part)
    deltas = rng.integers(-20000, 20000, sizes.tokens)
    deltas[rng.random(sizes.tokens) < 0.3] = 0
    return Case(
        slab,
        caches,
        logical,
        geometry_for(layout, sizes),
        Rotary(inv_freq, sizes.dim, part, interleaved),
        rng.permutation(pages * sizes.page)[: sizes.tokens].astype(np.int32),
        rng.permutation(num_slots)[: sizes.tokens].astype(np.int32),
        deltas.astype(np.int32),
    )


def paged_caches(
    layout: str, sizes: Sizes, dtype: torch.dtype, device: str
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Caches full of NaN, and their logical views [blocks, block, 2, heads, dim]."""
    layers, heads, dim, _, block, _, blocks, _ = sizes
    caches, logical = [], []
    whole = None
    if layout == "one_tensor":  # all layers in one allocation, as vLLM's uniform layout has it
        whole = torch.full((blocks, layers, 2, block, heads, dim), float("nan"), dtype=dtype, device=device)
    for layer in range(layers):
        if whole is not None:
            cache = whole[:, layer]
            view = cache.permute(0, 2, 1, 3, 4)
        elif layout == "nhd":
            cache = torch.full((blocks, 2, block, heads, dim), float("nan"), dtype=dtype, device=device)
            view = cache.permute(0, 2, 1, 3, 4)
        elif layout == "hnd":
            memory = torch.full((blocks, 2, heads, block, dim), float("nan"), dtype=dtype, device=device)
            cache = memory.permute(0, 1, 3, 2, 4)
            view = cache.permute(0, 2, 1, 3, 4)
        else:
            assert layout == "packed"
            cache = torch.full((blocks, heads, block, 2 * dim), float("nan"), dtype=dtype, device=device)
            view = cache.view(blocks, heads, block, 2, dim).permute(0, 2, 3, 1, 4)
        caches.append(cache)
        logical.append(view)
    return caches, logical


def geometry_for(layout: str, sizes: Sizes) -> CacheGeometry:
    """Through the map of places that the probe would find."""
    caches, logical = paged_caches(layout, sizes._replace(layers=sizes.layers), torch.float32, "cpu")
    view = logical[0][0]  # [block, 2, heads, dim]
    places = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(view.shape, view.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(size) * stride
    geometry = geometry_of(places, caches[0].stride(0))
    assert geometry is not None
    return geometry


def assert_close(found: torch.Tensor, expected: torch.Tensor, *, ulps: float) -> None:
    """Equal NaNs, and elsewhere within `ulps` units in the last place of the dtype (of numbers near 4)."""
    assert torch.equal(found.isnan(), expected.isnan())
    eps = torch.finfo(found.dtype).eps
    difference = (found.double() - expected.double()).abs().nan_to_num()
    limit = ulps * eps * expected.double().abs().nan_to_num().clamp(min=1.0)
    assert bool((difference <= limit).all()), float((difference / limit).max())


def check_injection(case: Case, *, interpret: bool, ulps: float) -> None:
    """Values, unmoved keys and untouched slots bit for bit; moved keys to a rounding."""
    expected = case.expected()
    case.mover(interpret=interpret).inject(case.rows, case.slots, case.deltas)
    moved = torch.zeros(len(expected[0]), dtype=torch.bool)
    moved[torch.from_numpy(case.slots[case.deltas != 0].astype(np.int64))] = True
    for logical, wanted in zip(case.logical, expected, strict=True):
        found = read(logical).cpu()
        wanted = wanted.cpu()
        assert torch.equal(bits(found[:, 1]), bits(wanted[:, 1]))
        assert torch.equal(bits(found[~moved]), bits(wanted[~moved]))
        part = case.rotary.rotary_dim
        assert torch.equal(bits(found[moved][..., part:]), bits(wanted[moved][..., part:]))
        assert_close(found[moved], wanted[moved], ulps=ulps)


def check_capture(case: Case, *, interpret: bool) -> None:
    """Every captured row bit for bit, every other row of the slab untouched."""
    generator = torch.Generator().manual_seed(7)
    for logical in case.logical:
        logical.copy_(torch.randn(logical.shape, generator=generator).to(logical.dtype))
    before = case.slab.uniform().clone()
    case.mover(interpret=interpret).capture(case.slots, case.rows)
    rows = torch.from_numpy(case.rows.astype(np.int64))
    slots = torch.from_numpy(case.slots.astype(np.int64))
    for layer, logical in enumerate(case.logical):
        wanted = before[:, layer].cpu()
        wanted[rows] = read(logical).cpu()[slots]
        assert torch.equal(bits(case.slab.uniform()[:, layer].cpu()), bits(wanted))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
