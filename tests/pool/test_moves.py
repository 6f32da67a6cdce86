"""Runs of a step against the obvious expansion, token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscale.pool.moves import MovesBuilder, single_run

RUNS = st.lists(
    st.tuples(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40), st.integers(0, 70)), max_size=5
)


@given(RUNS, st.sampled_from([1, 4, 16]))
def test_expanded_is_what_was_added(runs: list[tuple[list[int], int]], block_size: int) -> None:
    builder = MovesBuilder(block_size)
    expected: list[tuple[int, int, int]] = []
    for number, (rows, start) in enumerate(runs):
        block_ids = [1000 * number + i for i in range(-(-(start + len(rows)) // block_size) + 2)]
        builder.add(np.array(rows, dtype=np.int32).tobytes(), start, block_ids)
        for i, row in enumerate(rows):
            place = start + i
            slot = block_ids[place // block_size] * block_size + place % block_size
            expected.append((row, slot, place))
    moves = builder.build()
    if not runs:
        assert moves is None
        return
    assert moves is not None
    assert list(zip(*(column.tolist() for column in moves.expand(block_size)), strict=True)) == expected
    assert moves.num_runs == len(runs)
    assert moves.longest == max(len(rows) for rows, _ in runs)
    assert all(column.dtype == np.int32 for column in moves.expand(block_size))


@pytest.mark.parametrize(("start", "num_blocks"), [(0, 1), (12, 1), (40, 2)])
def test_a_run_outside_of_its_blocks_is_an_error(start: int, num_blocks: int) -> None:
    with pytest.raises(AssertionError, match="outside"):
        single_run(np.arange(20), start, list(range(num_blocks)), 16)
