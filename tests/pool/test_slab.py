"""What zeroing touches, and how many pages there are."""

from __future__ import annotations

import pytest
import torch

from inferscale.config import PoolDtype
from inferscale.pool.row_format import RowFormat
from inferscale.pool.slab import Slab, num_pages
from inferscale.row_size import RowShape


def test_num_pages_rounds_down() -> None:
    assert num_pages(1000, 4, 100) == 2
    assert num_pages(399, 4, 100) == 0


@pytest.mark.parametrize("pool_dtype", ["auto", "int8", "fp8"])
def test_zero_pages_touches_these_pages_only(pool_dtype: PoolDtype) -> None:
    row_format = RowFormat(RowShape(((1, 2),)), torch.bfloat16, pool_dtype)
    slab = Slab(5, 3, row_format, torch.device("cpu"))
    slab.data.fill_(1)
    slab.zero_pages([3, 1])
    rows = slab.data.sum(dim=1).tolist()
    assert [row == 0 for row in rows] == [row // 3 in (1, 3) for row in range(15)]
