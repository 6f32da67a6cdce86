"""One case of moving KV: slab, paged caches of a layout, orders, and what must come out.

Used by the tests of the kernels, on the CPU through Triton's interpreter and on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from inferscale.config import PoolDtype
from inferscale.kernels.fused import FusedMover
from inferscale.kernels.geometry import CacheGeometry, geometry_of
from inferscale.kernels.reference import make_gather
from inferscale.pool.moves import Moves, MovesBuilder
from inferscale.pool.row_format import RowFormat
from inferscale.pool.slab import Slab
from inferscale.rope import Rotary, delta_cos_sin
from inferscale.row_size import RowShape

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
    would; the caches are poisoned with NaN. moves: several runs of different lengths; block_size: of
    vLLM's block lists, twice that of the cache where the blocks are split."""

    slab: Slab
    caches: list[torch.Tensor]
    logical: list[torch.Tensor]
    geometry: CacheGeometry
    rotary: Rotary
    moves: Moves
    block_size: int

    @property
    def deltas(self) -> np.ndarray:
        """Of every token, in the order of `moves.expand`."""
        expanded = self.moves.expand(self.block_size)
        return expanded.positions - self.slab.origins.cpu().numpy()[expanded.rows]

    def mover(self, *, interpret: bool, max_tokens: int = 64) -> FusedMover:
        return FusedMover(
            self.slab,
            self.caches,
            self.geometry,
            self.rotary,
            self.block_size,
            max_tokens,
            interpret=interpret,
        )

    def expected(self) -> list[torch.Tensor]:
        """Per layer the whole logical cache after injection, by the portable path."""
        device = self.slab.data.device
        deltas = torch.from_numpy(self.deltas.astype(np.int64))
        expanded = self.moves.expand(self.block_size)
        rows = torch.from_numpy(expanded.rows.astype(np.int64)).to(device)
        slots = torch.from_numpy(expanded.slots.astype(np.int64)).to(device)
        cos, sin = (part.to(device) for part in delta_cos_sin(deltas, self.rotary))
        gather = make_gather(self.rotary, self.slab.format)
        gathered = gather(self.slab.data, rows, cos, sin, (deltas != 0).to(device))
        result = []
        for layer, logical in enumerate(self.logical):
            after = read(logical)
            after[slots, 0], after[slots, 1] = gathered.keys[layer], gathered.values[layer]
            result.append(after)
        return result


def fill(slab: Slab, content: torch.Tensor) -> None:
    """Every row. content: [rows, elements of a token]."""
    rows, start = torch.arange(len(content), device=content.device), 0
    for layer, (heads, dim) in enumerate(slab.shape.layers):
        end = start + 2 * heads * dim
        slab.format.store_layer(slab.data, rows, layer, content[:, start:end])
        start = end


def read(logical: torch.Tensor) -> torch.Tensor:
    """A copy [slots, 2, heads, dim]."""
    blocks, block, _, heads, dim = logical.shape
    return logical.reshape(blocks * block, 2, heads, dim).clone()


def make(
    layout: str,
    sizes: Sizes,
    dtype: torch.dtype,
    *,
    interleaved: bool,
    seed: int,
    device: str = "cpu",
    pool_dtype: PoolDtype = "auto",
    by_layer: bool = False,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    caches, logical = paged_caches(layout, sizes, dtype, device)
    pages = -(-2 * sizes.tokens // sizes.page) + 1
    shape = RowShape(((sizes.heads, sizes.dim),) * sizes.layers)
    slab = Slab(pages, sizes.page, RowFormat(shape, dtype, pool_dtype), torch.device(device))
    content = torch.randn((len(slab.data), shape.num_elements), generator=generator)
    fill(slab, content.to(slab.data.device, dtype))
    part = sizes.dim if sizes.rotary is None else sizes.rotary
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, part, 2, dtype=torch.float64) / part)
    if by_layer:  # the last layer has no rotary embedding
        inv_freq = torch.stack([inv_freq / (1 + layer) for layer in range(sizes.layers - 1)] + [0 * inv_freq])
    slab.origins.copy_(torch.from_numpy(rng.integers(0, 20000, len(slab.data))))
    block_size = sizes.block * (2 if seed % 2 else 1)
    moves = random_runs(rng, sizes, block_size, len(slab.data), seed)
    expanded = moves.expand(block_size)
    for index in rng.permutation(sizes.tokens)[: sizes.tokens // 3]:  # some that do not move
        slab.origins[int(expanded.rows[index])] = int(expanded.positions[index])
    return Case(
        slab,
        caches,
        logical,
        geometry_for(layout, sizes),
        Rotary(inv_freq, sizes.dim, part, interleaved),
        moves,
        block_size,
    )


def random_runs(
    rng: np.random.Generator, sizes: Sizes, block_size: int, num_rows: int, seed_of_runs: int
) -> Moves:
    """`sizes.tokens` tokens in one run or up to three, each in blocks and at places of its own."""
    rows = rng.permutation(num_rows)[: sizes.tokens].astype(np.int32)
    blocks = rng.permutation(sizes.blocks * sizes.block // block_size).tolist()
    builder = MovesBuilder(block_size)
    num_runs = min(3, sizes.tokens)
    if seed_of_runs % 3 == 0:
        num_runs = 1
    while num_runs > 1 and num_runs * (-(-sizes.tokens // num_runs // block_size) + 1) > len(blocks):
        num_runs -= 1
    for part in np.array_split(rows, num_runs):
        spare = len(blocks) - -(-len(part) // block_size)
        offset = int(rng.integers(0, block_size)) if spare > 0 else 0
        first = int(rng.integers(0, 400))
        own = [blocks.pop() for _ in range(-(-(offset + len(part)) // block_size))]
        # The blocks in front of the run are named too, and must not be looked at.
        builder.add(part.tobytes(), first * block_size + offset, [10**6] * first + own)
    moves = builder.build()
    assert moves is not None
    return moves


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
    case.mover(interpret=interpret).inject(case.moves)
    moved = torch.zeros(len(expected[0]), dtype=torch.bool)
    slots = case.moves.expand(case.block_size).slots
    moved[torch.from_numpy(slots[case.deltas != 0].astype(np.int64))] = True
    for logical, wanted in zip(case.logical, expected, strict=True):
        found = read(logical).cpu()
        wanted = wanted.cpu()
        if case.slab.format.is_quantized and interpret:  # its casts cut bits off
            assert_close(found, wanted, ulps=ulps)
            continue
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
    expected_data, origins = case.slab.data.clone(), case.slab.origins.cpu().clone()
    case.mover(interpret=interpret).capture(case.moves)
    expanded = case.moves.expand(case.block_size)
    rows, slots, positions = (torch.from_numpy(column.astype(np.int64)) for column in expanded)
    origins[rows] = positions.to(torch.int32)
    assert torch.equal(case.slab.origins.cpu(), origins)
    for layer, logical in enumerate(case.logical):
        captured = read(logical)[slots.to(logical.device)].flatten(1)
        case.slab.format.store_layer(expected_data, rows.to(logical.device), layer, captured)
    assert torch.equal(bits(case.slab.data), bits(expected_data))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
