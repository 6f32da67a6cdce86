"""The slab's views and what zeroing touches."""

from __future__ import annotations

import torch

from inferscale.pool.slab import RowShape, Slab, num_pages


def test_num_pages_rounds_down() -> None:
    assert num_pages(1000, 4, 100) == 2
    assert num_pages(399, 4, 100) == 0


def test_layers_are_columns_and_do_not_overlap() -> None:
    shape = RowShape(((1, 2), (3, 4), (1, 2)))
    assert shape.num_elements == 4 + 24 + 4
    assert not shape.is_uniform
    slab = Slab(2, 3, shape, torch.float32, torch.device("cpu"))
    for index in range(3):
        slab.layer(index)[:] = index + 1
    assert slab.data[0].tolist() == [1.0] * 4 + [2.0] * 24 + [3.0] * 4
    assert slab.layer(1).shape == (6, 24)


def test_uniform_view_is_layers_then_keys_then_values() -> None:
    slab = Slab(2, 2, RowShape(((2, 3),) * 2), torch.float32, torch.device("cpu"))
    slab.layer(1)[3] = torch.arange(12.0)
    view = slab.uniform()
    assert view.shape == (4, 2, 2, 2, 3)
    assert view[3, 1, 0].flatten().tolist() == list(range(6))
    assert view[3, 1, 1].flatten().tolist() == list(range(6, 12))
    assert view.data_ptr() == slab.data.data_ptr()


def test_zero_pages_touches_these_pages_only() -> None:
    slab = Slab(5, 3, RowShape(((1, 2),)), torch.bfloat16, torch.device("cpu"))
    slab.data.fill_(1)
    slab.zero_pages([3, 1])
    rows = slab.data.sum(dim=1).tolist()
    assert [row == 0 for row in rows] == [row // 3 in (1, 3) for row in range(15)]
