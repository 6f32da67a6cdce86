"""How the pool keeps one token: bit for bit, or with a byte for each element.

A row of a quantized pool, in bytes, padded to 16 of them:

    elements, 1 byte: layer · (keys │ values) · head · dimension  │  scales, bfloat16, in the same order

Each token has scales of its own: one for every key head and every value head (`fp8`, E4M3), or one for every
32 dimensions of these (`int8`; a few key dimensions of some models are a hundred times the others, which
E4M3's exponent covers and whole numbers do not). Scales that several tokens of a page shared would save
1 % of the bytes, and a page that is captured in two steps would have to be quantized twice. A row names
nothing outside itself, so it moves to host memory and disk as it is.

Elements are quantized against the scale as it is stored, and read as `element · scale` in float32; the
rotation works on that, and the result is rounded to the dtype of vLLM's cache once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inferscale.config import PoolDtype
from inferscale.row_size import RowShape, group_size

_INT8_MAX, _FP8_MAX = 127.0, 448.0


@dataclass(frozen=True)
class RowFormat:
    """kv_dtype: of vLLM's cache. pool_dtype: `auto` keeps it, `int8` and `fp8` take a byte an element."""

    shape: RowShape
    kv_dtype: torch.dtype
    pool_dtype: PoolDtype = "auto"

    @property
    def is_quantized(self) -> bool:
        return self.pool_dtype != "auto"

    @property
    def storage_dtype(self) -> torch.dtype:
        return torch.uint8 if self.is_quantized else self.kv_dtype

    @property
    def row_bytes(self) -> int:
        return self.shape.row_bytes(self.pool_dtype, self.kv_dtype.itemsize)

    @property
    def num_columns(self) -> int:
        """Of a row, in elements of `storage_dtype`."""
        return self.row_bytes // self.storage_dtype.itemsize

    @property
    def name(self) -> str:
        """For what is kept on disk: rows of different names cannot be read as each other."""
        return f"{self.pool_dtype}-{str(self.kv_dtype).removeprefix('torch.')}"

    @property
    def element_dtype(self) -> torch.dtype:
        """Of an element as it is computed with; the bytes of int8 and of E4M3 are stored as uint8."""
        return _element_dtype(self.pool_dtype) if self.is_quantized else self.kv_dtype

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, num_columns] → [n, layers, 2, heads, dim]: where quantized in float32, else a view.

        Only where all layers have one shape. No branch depends on values: it compiles.
        """
        assert self.shape.is_uniform
        heads, dim = self.shape.layers[0]
        elements = rows[:, : self.shape.num_elements]
        if self.is_quantized:
            scales = self._scales(rows)[:, : self.shape.num_scales(self.pool_dtype)]
            elements = self._times(elements, scales, dim)
        return elements.view(len(rows), len(self.shape.layers), 2, heads, dim)

    def read_layer(self, slab: torch.Tensor, rows: torch.Tensor, index: int) -> torch.Tensor:
        """One layer of tokens, [n, 2, heads, dim], where quantized in float32. slab: [rows, num_columns];
        rows: int64 [n]."""
        heads, dim = self.shape.layers[index]
        start, first_scale = self._starts(index)
        elements = slab[:, start : start + 2 * heads * dim][rows]
        if self.is_quantized:
            last_scale = first_scale + 2 * heads * dim // group_size(self.pool_dtype, dim)
            elements = self._times(elements, self._scales(slab)[:, first_scale:last_scale][rows], dim)
        return elements.reshape(len(rows), 2, heads, dim)

    def _times(self, elements: torch.Tensor, scales: torch.Tensor, dim: int) -> torch.Tensor:
        """Elements as they are stored, [n, m], times their scales [n, …], in float32 [n, …, group]."""
        numbers = elements.view(_element_dtype(self.pool_dtype)).to(torch.float32)
        groups = numbers.view(len(elements), -1, group_size(self.pool_dtype, dim))
        return groups * scales.to(torch.float32).unsqueeze(-1)

    def store_layer(
        self, slab: torch.Tensor, rows: torch.Tensor, index: int, keys_values: torch.Tensor
    ) -> None:
        """Write one layer of tokens. slab: [rows, num_columns]; rows: int64 [n]; keys_values: [n, 2 · heads ·
        dim] in kv_dtype. Where not quantized, bit for bit."""
        start, first_scale = self._starts(index)
        end = start + keys_values.shape[1]
        if not self.is_quantized:
            slab[:, start:end][rows] = keys_values
            return
        elements, scales = quantize(
            keys_values, self.pool_dtype, group_size(self.pool_dtype, self.shape.layers[index][1])
        )
        slab[:, start:end][rows] = elements.view(torch.uint8)
        self._scales(slab)[:, first_scale : first_scale + scales.shape[1]][rows] = scales

    def _scales(self, rows: torch.Tensor) -> torch.Tensor:
        """View [n, …] in bfloat16 of the part of rows that holds the scales, padding included."""
        return rows[:, self.shape.num_elements :].view(torch.bfloat16)

    def _starts(self, index: int) -> tuple[int, int]:
        """Where a layer's elements and scales begin among those of a row."""
        before = RowShape(self.shape.layers[:index])
        return before.num_elements, before.num_scales(self.pool_dtype)


def quantize(values: torch.Tensor, pool_dtype: PoolDtype, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements [n, m], int8 or E4M3, and scales bfloat16 [n, m / group], of values [n, m].

    A group of zeros, or of values so small that their scale is 0, becomes zeros.
    """
    most = _INT8_MAX if pool_dtype == "int8" else _FP8_MAX
    groups = values.to(torch.float32).view(len(values), -1, group)
    scales = (groups.abs().amax(dim=-1) / most).to(torch.bfloat16)
    divisor = scales.to(torch.float32).unsqueeze(-1)
    scaled = torch.where(divisor > 0, groups / divisor, 0.0).clamp(-most, most)
    if pool_dtype == "int8":
        scaled = torch.floor(scaled + 0.5)
    return scaled.to(_element_dtype(pool_dtype)).view(values.shape), scales


def _element_dtype(pool_dtype: PoolDtype) -> torch.dtype:
    return torch.int8 if pool_dtype == "int8" else torch.float8_e4m3fn
