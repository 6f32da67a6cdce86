"""Formats of a row: sizes, what comes back, and which numbers survive quantization how well."""

from __future__ import annotations

import pytest
import torch

from inferscale.config import PoolDtype
from inferscale.pool.row_format import RowFormat, quantize
from inferscale.row_size import RowShape, group_size

MIXED = RowShape(((1, 2), (3, 4), (1, 64)))
FORMATS = ("auto", "int8", "fp8")


def stored(row_format: RowFormat, content: torch.Tensor) -> torch.Tensor:
    """Rows that hold this [n, elements of a token], written layer by layer."""
    data = torch.zeros((len(content), row_format.num_columns), dtype=row_format.storage_dtype)
    start = 0
    for index, (heads, dim) in enumerate(row_format.shape.layers):
        end = start + 2 * heads * dim
        row_format.store_layer(data, torch.arange(len(content)), index, content[:, start:end])
        start = end
    return data


@pytest.mark.parametrize(
    ("pool_dtype", "row_bytes"),
    [("auto", 2 * 156), ("int8", 192), ("fp8", 176)],  # 156 and 2 · 12 or 2 · 10 of scales, padded
)
def test_bytes_of_a_row(pool_dtype: PoolDtype, row_bytes: int) -> None:
    row_format = RowFormat(MIXED, torch.bfloat16, pool_dtype)
    assert row_format.row_bytes == row_bytes
    assert row_format.num_columns * row_format.storage_dtype.itemsize == row_bytes


def test_bytes_of_a_common_model() -> None:
    """Llama 3.1 8B: 131,072 in bfloat16."""
    shape = RowShape(((8, 128),) * 32)
    assert shape.row_bytes("auto", 2) == 131_072
    assert shape.row_bytes("int8", 2) == 65_536 + 2 * 2048
    assert shape.row_bytes("fp8", 2) == 65_536 + 2 * 512


def test_groups_divide_the_head() -> None:
    assert [group_size("int8", dim) for dim in (128, 96, 80, 64, 6)] == [32, 32, 16, 32, 2]
    assert [group_size("fp8", dim) for dim in (128, 80)] == [128, 80]
    assert group_size("auto", 128) == 0


@pytest.mark.parametrize("pool_dtype", FORMATS)
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_layers_come_back_each_for_itself(pool_dtype: PoolDtype, kv_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    content = torch.randn((5, MIXED.num_elements), generator=generator).to(kv_dtype)
    row_format = RowFormat(MIXED, kv_dtype, pool_dtype)
    data = stored(row_format, content)
    start = 0
    for index, (heads, dim) in enumerate(MIXED.layers):
        wanted = content[:, start : start + 2 * heads * dim].view(5, 2, heads, dim).float()
        found = row_format.read_layer(data, torch.arange(len(data)), index).float()
        start += 2 * heads * dim
        if pool_dtype == "auto":
            assert torch.equal(found, wanted)
            continue
        limit = wanted.abs().amax(-1, keepdim=True) / (100 if pool_dtype == "int8" else 14)
        assert bool(((found - wanted).abs() <= limit).all())
        assert not torch.equal(found, wanted)


@pytest.mark.parametrize("pool_dtype", FORMATS)
def test_layers_of_one_shape_are_decoded_at_once(pool_dtype: PoolDtype) -> None:
    shape = RowShape(((2, 64),) * 3)
    row_format = RowFormat(shape, torch.bfloat16, pool_dtype)
    data = stored(row_format, torch.randn((4, shape.num_elements)).to(torch.bfloat16))
    together = row_format.decode(data)
    assert together.shape == (4, 3, 2, 2, 64)
    for index in range(3):
        assert torch.equal(together[:, index], row_format.read_layer(data, torch.arange(len(data)), index))


@pytest.mark.parametrize("pool_dtype", ["int8", "fp8"])
def test_zeros_and_what_is_too_small_become_zeros(pool_dtype: PoolDtype) -> None:
    values = torch.tensor([[0.0] * 32, [1e-44] * 32])
    elements, scales = quantize(values, pool_dtype, 32)
    assert not bool(elements.float().any())
    assert not bool(scales[0].any())


def test_the_largest_is_kept_and_quantizing_again_changes_nothing() -> None:
    values = torch.linspace(-3, 5, 64).view(1, 64)
    for pool_dtype, step in (("int8", 5 / 127), ("fp8", 5 / 14)):
        elements, scales = quantize(values, pool_dtype, 64)  # type: ignore[arg-type]
        once = elements.float() * scales.float()
        assert abs(float(once.max()) - 5) <= 5 / 127
        assert float((once - values).abs().max()) <= step
        again, scales_again = quantize(once, pool_dtype, 64)  # type: ignore[arg-type]
        assert float((again.float() * scales_again.float() - once).abs().max()) <= 5 / 127 / 2


def test_an_outlier_costs_its_own_group_only() -> None:
    """A key dimension that is a hundred times the others, as Qwen2.5 has them."""
    values = torch.ones((1, 128))
    values[0, 5] = 300.0
    elements, scales = quantize(values, "int8", 32)
    found = (elements.view(4, 32).float() * scales.view(4, 1).float()).flatten()
    assert float((found[32:] - 1).abs().max()) < 0.01
    assert float((found[:32] - values[0, :32]).abs().max()) > 0.5


def test_rows_of_different_formats_have_different_names() -> None:
    names = {
        RowFormat(MIXED, dtype, pool_dtype).name  # type: ignore[arg-type]
        for dtype in (torch.bfloat16, torch.float16)
        for pool_dtype in FORMATS
    }
    assert len(names) == 6
