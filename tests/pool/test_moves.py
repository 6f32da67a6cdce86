"""Runs of a step against the obvious expansion, token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscale.pool.moves import LONGEST_OF_SEVERAL, MovesBuilder, single_run

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
    assert moves.num_tokens == len(expected)
    assert moves.num_runs == len(runs)
    assert moves.longest == max(len(rows) for rows, _ in runs)
    assert all(column.dtype == np.int32 for column in moves.expand(block_size))


@pytest.mark.parametrize(("start", "num_blocks"), [(0, 1), (12, 1), (40, 2)])
def test_a_run_outside_of_its_blocks_is_an_error(start: int, num_blocks: int) -> None:
    with pytest.raises(AssertionError, match="outside"):
        single_run(np.arange(20), start, list(range(num_blocks)), 16)


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("start", [0, 7, 33])
def test_long_runs_beside_others_are_cut_and_mean_the_same(block_size: int, start: int) -> None:
    lengths = [3, 2000, LONGEST_OF_SEVERAL, LONGEST_OF_SEVERAL + 1]
    builder, rows_of = MovesBuilder(block_size), iter(np.arange(5000, dtype=np.int32))
    expected = []
    for number, length in enumerate(lengths):
        rows = np.array([next(rows_of) for _ in range(length)], dtype=np.int32)
        block_ids = [1000 * number + i for i in range(-(-(start + length) // block_size))]
        builder.add(rows.tobytes(), start, block_ids)
        for i, row in enumerate(rows.tolist()):
            slot = block_ids[(start + i) // block_size] * block_size + (start + i) % block_size
            expected.append((row, slot, start + i))
    moves = builder.build()
    assert moves is not None
    assert moves.longest == LONGEST_OF_SEVERAL
    assert moves.num_runs == 1 + 4 + 1 + 2
    assert list(zip(*(column.tolist() for column in moves.expand(block_size)), strict=True)) == expected


def test_a_run_alone_is_not_cut() -> None:
    assert single_run(np.arange(5000), 3, list(range(400)), 16).num_runs == 1
