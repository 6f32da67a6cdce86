"""Triton kernels: inject, capture and zero, each one launch for everything a step has to move.

A *unit* is one token in one layer: its key heads and value heads, `num_kv_heads · head_dim` elements
each. A program handles `UNITS` neighbouring units, so the grid has one dimension and there is no limit
on the number of tokens. What differs from step to step comes in `table`, int32, filled by one copy:

    inject   [rows of n tokens | slots | deltas]        rows of the slab, slots of the paged cache
    capture  [slots of n tokens | rows]
    zero     [pages]

The slab is token-major: row · ROW + layer · 2 · HEADS · DIM + (0 keys, 1 values) · HEADS · DIM. Layer l's
paged cache begins `layer_offsets[l]` elements behind that of layer 0 (they may be separate allocations).
`ALIGN` elements divide every offset here, so that loads and stores are as wide as the machine allows.

Rotation: the angle delta · inv_freq is formed and reduced to [−π, π] in float64, its sine and cosine
and the rotation are float32, the result is rounded once; tokens with delta 0 keep their bits. The torch
reference is `kernels/reference.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

_TURN = tl.constexpr(6.283185307179586)
_PER_TURN = tl.constexpr(0.15915494309189535)


@triton.jit
def _units(n, UNITS: tl.constexpr, LAYERS: tl.constexpr):
    """(token, layer, mask) of this program's units: layers of a token are neighbours, as in the slab."""
    unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    return unit // LAYERS, unit % LAYERS, unit < n * LAYERS


@triton.jit
def _cache_offset(
    layer_offsets,
    layer,
    slot,
    mask,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """int64 [UNITS]: where each unit's first key element lies, from layer 0's cache."""
    start = tl.load(layer_offsets + layer, mask=mask, other=0)
    block = (slot // BLOCK_SIZE).to(tl.int64)
    offset = start + block * BLOCK_STRIDE + (slot % BLOCK_SIZE).to(tl.int64) * SLOT_STRIDE
    return tl.multiple_of(offset, ALIGN)


@triton.jit
def _rotate(first, second, cos, sin, is_moved):
    """A pair of key elements turned by an angle, in float32; as they are where nothing moves."""
    x, y = first.to(tl.float32), second.to(tl.float32)
    turned_x = tl.where(is_moved, (x * cos - y * sin).to(first.dtype), first)
    turned_y = tl.where(is_moved, (y * cos + x * sin).to(second.dtype), second)
    return turned_x, turned_y


@triton.jit(do_not_specialize=["n"])
def inject_kernel(
    slab,
    cache,
    layer_offsets,
    inv_freq,
    table,
    n,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    ALIGN: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Slab rows → keys rotated by delta → paged caches. BLOCK_*: powers of two that cover their sizes;
    BLOCK_REST: of the key elements that are not rotated, 0 where all are."""
    token, layer, mask = _units(n, UNITS, LAYERS)
    row = tl.load(table + token, mask=mask, other=0).to(tl.int64)
    slot = tl.load(table + n + token, mask=mask, other=0)
    delta = tl.load(table + 2 * n + token, mask=mask, other=0)
    unit_size: tl.constexpr = 2 * HEADS * DIM
    source = tl.multiple_of(row * (LAYERS * unit_size) + layer * unit_size, ALIGN)[:, None, None]
    target = _cache_offset(layer_offsets, layer, slot, mask, BLOCK_SIZE, BLOCK_STRIDE, SLOT_STRIDE, ALIGN)[
        :, None, None
    ]
    head = tl.arange(0, BLOCK_HEADS)[None, :, None]
    mask = mask[:, None, None] & (head < HEADS)

    dim = tl.arange(0, BLOCK_DIM)[None, None, :]
    value_mask = mask & (dim < DIM)
    values = tl.load(slab + source + (HEADS * DIM + head * DIM + dim), mask=value_mask)

    pair = tl.arange(0, BLOCK_PAIRS)
    turns = delta.to(tl.float64)[:, None] * tl.load(inv_freq + pair, mask=pair < PAIRS, other=0.0)[None, :]
    turns = turns * _PER_TURN
    angle = ((turns - tl.floor(turns + 0.5)) * _TURN).to(tl.float32)
    cos, sin = tl.cos(angle)[:, None, :], tl.sin(angle)[:, None, :]
    is_moved = (delta != 0)[:, None, None]
    if INTERLEAVED:
        flat = tl.arange(0, 2 * BLOCK_PAIRS)[None, None, :]
        flat_mask = mask & (flat < 2 * PAIRS)
        both = tl.load(slab + source + (head * DIM + flat), mask=flat_mask)
        first, second = tl.split(tl.reshape(both, (UNITS, BLOCK_HEADS, BLOCK_PAIRS, 2)))
        turned_x, turned_y = _rotate(first, second, cos, sin, is_moved)
        turned = tl.reshape(tl.join(turned_x, turned_y), (UNITS, BLOCK_HEADS, 2 * BLOCK_PAIRS))
        tl.store(cache + target + (head * HEAD_STRIDE + flat), turned, mask=flat_mask)
    else:
        pair_mask = mask & (pair < PAIRS)[None, None, :]
        pair = pair[None, None, :]
        first = tl.load(slab + source + (head * DIM + pair), mask=pair_mask)
        second = tl.load(slab + source + (head * DIM + PAIRS + pair), mask=pair_mask)
        turned_x, turned_y = _rotate(first, second, cos, sin, is_moved)
        tl.store(cache + target + (head * HEAD_STRIDE + pair), turned_x, mask=pair_mask)
        tl.store(cache + target + (head * HEAD_STRIDE + PAIRS + pair), turned_y, mask=pair_mask)
    if BLOCK_REST > 0:
        rest = 2 * PAIRS + tl.arange(0, BLOCK_REST)[None, None, :]
        rest_mask = mask & (rest < DIM)
        kept = tl.load(slab + source + (head * DIM + rest), mask=rest_mask)
        tl.store(cache + target + (head * HEAD_STRIDE + rest), kept, mask=rest_mask)
    tl.store(cache + target + (KV_STRIDE + head * HEAD_STRIDE + dim), values, mask=value_mask)


@triton.jit(do_not_specialize=["n"])
def capture_kernel(
    slab,
    cache,
    layer_offsets,
    table,
    n,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    ALIGN: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Paged caches → slab rows, bit for bit."""
    token, layer, mask = _units(n, UNITS, LAYERS)
    slot = tl.load(table + token, mask=mask, other=0)
    row = tl.load(table + n + token, mask=mask, other=0).to(tl.int64)
    unit_size: tl.constexpr = 2 * HEADS * DIM
    target = tl.multiple_of(row * (LAYERS * unit_size) + layer * unit_size, ALIGN)[:, None, None]
    source = _cache_offset(layer_offsets, layer, slot, mask, BLOCK_SIZE, BLOCK_STRIDE, SLOT_STRIDE, ALIGN)[
        :, None, None
    ]
    head = tl.arange(0, BLOCK_HEADS)[None, :, None]
    dim = tl.arange(0, BLOCK_DIM)[None, None, :]
    mask = mask[:, None, None] & (head < HEADS) & (dim < DIM)
    keys = tl.load(cache + source + (head * HEAD_STRIDE + dim), mask=mask)
    values = tl.load(cache + source + (KV_STRIDE + head * HEAD_STRIDE + dim), mask=mask)
    tl.store(slab + target + (head * DIM + dim), keys, mask=mask)
    tl.store(slab + target + (HEADS * DIM + head * DIM + dim), values, mask=mask)


@triton.jit(do_not_specialize=["n"])
def zero_kernel(slab, table, n, PAGE_ELEMENTS: tl.constexpr, BLOCK: tl.constexpr):
    """Zero pages of the slab. Program (p, c): chunk c of the page table[p]."""
    page = tl.load(table + tl.program_id(0)).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    zeros = (element * 0).to(slab.dtype.element_ty)
    tl.store(slab + page * PAGE_ELEMENTS + element, zeros, mask=element < PAGE_ELEMENTS)
