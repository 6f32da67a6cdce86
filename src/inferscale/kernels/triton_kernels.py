"""Triton kernels: inject, capture and zero, each one launch for everything a step has to move.

A *unit* is one token in one layer: its key heads and value heads, `num_kv_heads · head_dim` elements
each. Program (p, r) handles `UNITS` neighbouring units of run r; what the runs are is read from `table`,
the int32 numbers of `pool.moves`. For `zero`, `table` is a list of pages.

The slab is token-major: row · ROW + layer · 2 · HEADS · DIM + (0 keys, 1 values) · HEADS · DIM. Layer l's
paged cache begins `layer_offsets[l]` elements behind that of layer 0 (they may be separate allocations).
`ALIGN` elements divide every offset here, so that loads and stores are as wide as the machine allows.

Rotation: by delta, the token's place in the prompt minus that at its capture. The angle delta · inv_freq is
formed and reduced to [−π, π] in float64, its sine and cosine and the rotation are float32, the result is
rounded once; tokens with delta 0 keep their bits. The torch reference is `kernels/reference.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

_TURN = tl.constexpr(6.283185307179586)
_PER_TURN = tl.constexpr(0.15915494309189535)


@triton.jit
def _unit(
    table,
    n,
    start,
    LAYERS: tl.constexpr,
    UNITS: tl.constexpr,
    PROMPT_BLOCK: tl.constexpr,
    ONE_RUN: tl.constexpr,
):
    """(layer, slab row, slot, position, mask) of this program's units: layers of a token are neighbours,
    as in the slab. PROMPT_BLOCK: tokens of a block in vLLM's block lists. ONE_RUN: n and start are those of
    the only run, so that its header need not be read first; else they mean nothing."""
    data = table + 4 * tl.num_programs(1)
    if ONE_RUN:
        rows_at = 0
        blocks_at = n
    else:
        header = table + 4 * tl.program_id(1)
        rows_at = tl.load(header)
        n = tl.load(header + 1)
        start = tl.load(header + 2)
        blocks_at = tl.load(header + 3)
    unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    token = unit // LAYERS
    mask = token < n
    row = tl.load(data + rows_at + token, mask=mask, other=0)
    position = start + token
    block_at = blocks_at + position // PROMPT_BLOCK - start // PROMPT_BLOCK
    block = tl.load(data + block_at, mask=mask, other=0)
    slot = block * PROMPT_BLOCK + position % PROMPT_BLOCK
    return unit % LAYERS, row, slot, position, mask


@triton.jit
def _slab_offset(row, layer, ROW: tl.constexpr, UNIT_SIZE: tl.constexpr, ALIGN: tl.constexpr):
    """int64 [UNITS]: where each unit's first key element lies in the slab."""
    return tl.multiple_of(row.to(tl.int64) * ROW + layer * UNIT_SIZE, ALIGN)


@triton.jit
def _scale_offset(
    row, layer, UNIT_SIZE: tl.constexpr, GROUP: tl.constexpr, SCALE_ROW: tl.constexpr, AT: tl.constexpr
):
    """int64 [UNITS]: where the first key scale of each unit lies, counted in scales."""
    offset = row.to(tl.int64) * SCALE_ROW
    if GROUP > 0:
        offset += AT + layer * (UNIT_SIZE // GROUP)
    return offset


@triton.jit
def _grid(GROUPS: tl.constexpr, LANES: tl.constexpr):
    """int32 [1, 1, GROUPS, LANES]: 0, 1, 2, …"""
    return (tl.arange(0, GROUPS)[:, None] * LANES + tl.arange(0, LANES)[None, :])[None, None, :, :]


@triton.jit
def _read(
    slab,
    source,
    scales,
    scale_source,
    head,
    START: tl.constexpr,
    SIZE: tl.constexpr,
    mask,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Dimensions [START, START + SIZE) of each unit's heads, [UNITS, heads, GROUPS, LANES]; where the slab is
    quantized, times their scales, in float32. mask: [UNITS, heads, 1, 1]."""
    dim = _grid(GROUPS, LANES)
    elements = mask & (dim < SIZE)
    found = tl.load(slab + source + (head * DIM + START + dim), mask=elements)
    if GROUP > 0:
        if GROUP == DIM:
            bits = tl.load(scales + scale_source + head, mask=mask)
        elif LANES == GROUP and START % GROUP == 0 and SIZE % GROUP == 0:  # one scale for all lanes
            number = tl.arange(0, GROUPS)[None, None, :, None]
            place = head * (DIM // GROUP) + START // GROUP + number
            bits = tl.load(scales + scale_source + place, mask=mask & (number < SIZE // GROUP))
        else:
            place = head * (DIM // GROUP) + (START + dim) // GROUP
            bits = tl.load(scales + scale_source + place, mask=elements)
        found = found.to(tl.float32) * (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return found


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
def _angle(delta, layer, inv_freq, pair, PAIRS: tl.constexpr, LAYER_PAIRS: tl.constexpr):
    """delta · inv_freq in float64, reduced to [−π, π], in float32. LAYER_PAIRS: from one layer's frequencies
    to those of the next, 0 where they share them."""
    at = pair
    if LAYER_PAIRS > 0:
        at = layer * LAYER_PAIRS + pair
    turns = delta.to(tl.float64) * tl.load(inv_freq + at, mask=pair < PAIRS, other=0.0)
    turns = turns * _PER_TURN
    return ((turns - tl.floor(turns + 0.5)) * _TURN).to(tl.float32)


@triton.jit
def _rotate(first, second, cos, sin, is_moved):
    """A pair of key elements turned by an angle, in float32; as they are where nothing moves."""
    x, y = first.to(tl.float32), second.to(tl.float32)
    turned_x = tl.where(is_moved, (x * cos - y * sin).to(first.dtype), first)
    turned_y = tl.where(is_moved, (y * cos + x * sin).to(second.dtype), second)
    return turned_x, turned_y


@triton.jit(do_not_specialize=["n", "start"])
def inject_kernel(
    slab,
    scales,
    origins,
    cache,
    layer_offsets,
    inv_freq,
    table,
    n,
    start,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROW: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROW: tl.constexpr,
    SCALES_AT: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LAYER_PAIRS: tl.constexpr,
    PROMPT_BLOCK: tl.constexpr,
    ONE_RUN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    ALIGN: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    DIM_GROUPS: tl.constexpr,
    DIM_LANES: tl.constexpr,
    PAIR_GROUPS: tl.constexpr,
    PAIR_LANES: tl.constexpr,
    REST_GROUPS: tl.constexpr,
    REST_LANES: tl.constexpr,
):
    """Slab rows → keys rotated to their position → paged caches.

    BLOCK_HEADS: a power of two that covers the heads. DIM, PAIR and REST: likewise of a head's dimensions,
    of the first of each pair (of both where these are neighbours), and of the key elements that are not
    rotated, as GROUPS · LANES; a group is what shares a scale, where these can be divided so. REST_LANES is 0
    where all are rotated.
    """
    layer, row, slot, position, mask = _unit(table, n, start, LAYERS, UNITS, PROMPT_BLOCK, ONE_RUN)
    delta = position - tl.load(origins + row, mask=mask, other=0)
    source = _slab_offset(row, layer, ROW, 2 * HEADS * DIM, ALIGN)[:, None, None, None]
    scale_source = _scale_offset(row, layer, 2 * HEADS * DIM, GROUP, SCALE_ROW, SCALES_AT)[
        :, None, None, None
    ]
    target = _cache_offset(layer_offsets, layer, slot, mask, BLOCK_SIZE, BLOCK_STRIDE, SLOT_STRIDE, ALIGN)[
        :, None, None, None
    ]
    # Strides can exceed int32: a cache may keep all keys before all values.
    head = tl.arange(0, BLOCK_HEADS).to(tl.int64)[None, :, None, None]
    mask = mask[:, None, None, None] & (head < HEADS)

    dim = _grid(DIM_GROUPS, DIM_LANES)
    values = _read(
        slab, source, scales, scale_source, HEADS + head, 0, DIM, mask, DIM, GROUP, DIM_GROUPS, DIM_LANES
    )

    pair = _grid(PAIR_GROUPS, PAIR_LANES)
    if INTERLEAVED:
        pair = tl.arange(0, PAIR_GROUPS * PAIR_LANES // 2)[None, None, :]
        angle = _angle(delta[:, None, None], layer[:, None, None], inv_freq, pair, PAIRS, LAYER_PAIRS)
        is_moved = (delta != 0)[:, None, None]
        flat = _grid(PAIR_GROUPS, PAIR_LANES)
        both = _read(
            slab, source, scales, scale_source, head, 0, 2 * PAIRS, mask, DIM, GROUP, PAIR_GROUPS, PAIR_LANES
        )
        first, second = tl.split(tl.reshape(both, (UNITS, BLOCK_HEADS, PAIR_GROUPS * PAIR_LANES // 2, 2)))
        turned_x, turned_y = _rotate(first, second, tl.cos(angle), tl.sin(angle), is_moved)
        turned = tl.reshape(tl.join(turned_x, turned_y), (UNITS, BLOCK_HEADS, PAIR_GROUPS, PAIR_LANES))
        tl.store(cache + target + (head * HEAD_STRIDE + flat), turned, mask=mask & (flat < 2 * PAIRS))
    else:
        angle = _angle(
            delta[:, None, None, None], layer[:, None, None, None], inv_freq, pair, PAIRS, LAYER_PAIRS
        )
        is_moved = (delta != 0)[:, None, None, None]
        first = _read(
            slab, source, scales, scale_source, head, 0, PAIRS, mask, DIM, GROUP, PAIR_GROUPS, PAIR_LANES
        )
        second = _read(
            slab, source, scales, scale_source, head, PAIRS, PAIRS, mask, DIM, GROUP, PAIR_GROUPS, PAIR_LANES
        )
        turned_x, turned_y = _rotate(first, second, tl.cos(angle), tl.sin(angle), is_moved)
        pair_mask = mask & (pair < PAIRS)
        tl.store(cache + target + (head * HEAD_STRIDE + pair), turned_x, mask=pair_mask)
        tl.store(cache + target + (head * HEAD_STRIDE + PAIRS + pair), turned_y, mask=pair_mask)
    if REST_LANES > 0:
        rest = _grid(REST_GROUPS, REST_LANES)
        kept = _read(
            slab,
            source,
            scales,
            scale_source,
            head,
            2 * PAIRS,
            DIM - 2 * PAIRS,
            mask,
            DIM,
            GROUP,
            REST_GROUPS,
            REST_LANES,
        )
        rest_mask = mask & (rest < DIM - 2 * PAIRS)
        tl.store(cache + target + (head * HEAD_STRIDE + 2 * PAIRS + rest), kept, mask=rest_mask)
    tl.store(cache + target + (KV_STRIDE + head * HEAD_STRIDE + dim), values, mask=mask & (dim < DIM))


@triton.jit
def _larger(x, y):
    return tl.maximum(x, y)


@triton.jit
def _quantized(x, scale, most, slab):
    """x / scale, rounded as torch rounds it, in the slab's type."""
    scaled = tl.where(scale > 0, tl.div_rn(x, tl.where(scale > 0, scale, 1.0)), 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -most), most)
    if slab.dtype.element_ty == tl.int8:
        nearest = tl.floor(scaled + 0.5)
    else:
        # Of E4M3, even ones first: 3 bits of fraction, and steps of 2⁻⁹ below 2⁻⁶.
        bits = scaled.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        small = (tl.abs(scaled) + 16384.0) - 16384.0
        small = tl.where(scaled < 0, -small, small)
        nearest = tl.where(tl.abs(scaled) < 0.015625, small, bits.to(tl.float32, bitcast=True))
    return nearest.to(slab.dtype.element_ty)


@triton.jit
def _write(slab, target, scales, scale_target, head, dim, x, mask, DIM: tl.constexpr, GROUP: tl.constexpr):
    """Quantize x [UNITS, BLOCK_HEADS, groups, lanes] as `pool.row_format.quantize` does, and store it.

    mask: [UNITS, BLOCK_HEADS, 1, 1]."""
    elements = mask & (dim < DIM)
    x = tl.where(elements, x.to(tl.float32), 0.0)
    most = 127.0 if slab.dtype.element_ty == tl.int8 else 448.0
    scale = tl.div_rn(tl.reduce(tl.abs(x), 3, _larger), most)[:, :, :, None]
    # Rounded to bfloat16 by hand: a cast does it otherwise where the kernel is interpreted.
    bits = scale.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    number = tl.arange(0, x.shape[2])[None, None, :, None]
    scale_mask = mask & (number < DIM // GROUP)
    tl.store(scales + scale_target + (head * (DIM // GROUP) + number), bits.to(tl.int16), mask=scale_mask)
    stored = (bits << 16).to(tl.float32, bitcast=True)
    tl.store(slab + target + (head * DIM + dim), _quantized(x, stored, most, slab), mask=elements)


@triton.jit(do_not_specialize=["n", "start"])
def capture_kernel(
    slab,
    scales,
    origins,
    cache,
    layer_offsets,
    table,
    n,
    start,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROW: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROW: tl.constexpr,
    SCALES_AT: tl.constexpr,
    PROMPT_BLOCK: tl.constexpr,
    ONE_RUN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    ALIGN: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    DIM_GROUPS: tl.constexpr,
    DIM_LANES: tl.constexpr,
):
    """Paged caches → slab rows in their format; `origins` of the rows become their positions.

    DIM_GROUPS · DIM_LANES: as in `inject_kernel`; a group of dimensions is always a whole number of lanes.
    """
    layer, row, slot, position, mask = _unit(table, n, start, LAYERS, UNITS, PROMPT_BLOCK, ONE_RUN)
    tl.store(origins + row, position, mask=mask & (layer == 0))
    target = _slab_offset(row, layer, ROW, 2 * HEADS * DIM, ALIGN)[:, None, None, None]
    source = _cache_offset(layer_offsets, layer, slot, mask, BLOCK_SIZE, BLOCK_STRIDE, SLOT_STRIDE, ALIGN)[
        :, None, None, None
    ]
    # Strides can exceed int32: a cache may keep all keys before all values.
    head = tl.arange(0, BLOCK_HEADS).to(tl.int64)[None, :, None, None]
    dim = _grid(DIM_GROUPS, DIM_LANES)
    mask = mask[:, None, None, None] & (head < HEADS)
    elements = mask & (dim < DIM)
    keys = tl.load(cache + source + (head * HEAD_STRIDE + dim), mask=elements)
    values = tl.load(cache + source + (KV_STRIDE + head * HEAD_STRIDE + dim), mask=elements)
    if GROUP > 0:
        scale_target = _scale_offset(row, layer, 2 * HEADS * DIM, GROUP, SCALE_ROW, SCALES_AT)
        scale_target = scale_target[:, None, None, None]
        _write(slab, target, scales, scale_target, head, dim, keys, mask, DIM, GROUP)
        _write(slab, target, scales, scale_target, HEADS + head, dim, values, mask, DIM, GROUP)
    else:
        tl.store(slab + target + (head * DIM + dim), keys, mask=elements)
        tl.store(slab + target + (HEADS * DIM + head * DIM + dim), values, mask=elements)


@triton.jit
def zero_kernel(slab, table, PAGE_ELEMENTS: tl.constexpr, BLOCK: tl.constexpr):
    """Zero pages of the slab. Program (p, c): chunk c of the page table[p]."""
    page = tl.load(table + tl.program_id(0)).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    zeros = (element * 0).to(slab.dtype.element_ty)
    tl.store(slab + page * PAGE_ELEMENTS + element, zeros, mask=element < PAGE_ELEMENTS)
