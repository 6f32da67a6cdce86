"""What a step moves between slab rows and the paged cache: runs of tokens, packed as the kernels read them.

A run is a contiguous piece of one request's prompt: its tokens `[start, start + n)`, the slab row of each
and the cache blocks that hold them. All runs of a step are one table of int32, which travels as bytes
from the scheduler side to every worker and from there to the device in one copy:

    4 numbers a run:  rows at │ n │ start │ blocks at      places are counted from behind these numbers
    then the data:    n rows │ blocks, from the one that holds token `start`

Pure: neither torch nor vLLM.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]

HEADER = 4
"""Numbers of a run in front of the data."""

LONGEST_OF_SEVERAL = 512
"""Tokens of the longest run where there are several."""
MAX_RUNS = 65_535
"""Of one launch (CUDA's limit of the grid's second dimension)."""


class Expanded(NamedTuple):
    """Every token of all runs; int32 [n] each. slots: block · block size + offset in the block."""

    rows: Int32Array
    slots: Int32Array
    positions: Int32Array


class Moves(NamedTuple):
    """Runs of one step. table: see above; longest: tokens of the longest run; first_start: of the first;
    num_tokens: of all."""

    table: bytes
    num_runs: int
    longest: int
    first_start: int
    num_tokens: int

    def expand(self, block_size: int) -> Expanded:
        """The same token by token."""
        numbers = np.frombuffer(self.table, dtype=np.int32)
        data = numbers[HEADER * self.num_runs :]
        rows, slots, positions = [], [], []
        for index in range(self.num_runs):
            rows_at, n, start, blocks_at = numbers[HEADER * index : HEADER * (index + 1)].tolist()
            run_positions = np.arange(start, start + n, dtype=np.int32)
            blocks = data[blocks_at + run_positions // block_size - start // block_size]
            rows.append(data[rows_at : rows_at + n])
            slots.append(blocks * block_size + run_positions % block_size)
            positions.append(run_positions)
        return Expanded(*(np.concatenate(column) for column in (rows, slots, positions)))


GroupMoves = tuple[Moves | None, ...]
"""Of each KV cache group of vLLM, in their order; () is nothing at all."""


class MovesBuilder:
    """Collects the runs of a step."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._headers: list[int] = []
        self._parts: list[bytes] = []
        self._size = 0
        self._longest = 0
        self._num_tokens = 0

    def add(self, packed_rows: bytes, start: int, block_ids: Sequence[int]) -> None:
        """A run. packed_rows: int32 [n] as bytes; block_ids: the request's, from its first token on."""
        n = len(packed_rows) // 4
        first, last = start // self._block_size, -(-(start + n) // self._block_size)
        blocks = block_ids[first:last]
        assert n > 0 and len(blocks) == last - first, "a run lies outside of its request's blocks"
        self._headers += (self._size, n, start, self._size + n)
        self._parts += (packed_rows, struct.pack(f"{len(blocks)}i", *blocks))
        self._size += n + len(blocks)
        self._num_tokens += n
        if n > self._longest:
            self._longest = n

    def build(self) -> Moves | None:
        """None without a run.

        Where there are several, long ones are cut: the kernels' grid is as wide as the longest of them.
        """
        if not self._headers:
            return None
        if len(self._headers) > HEADER and self._longest > LONGEST_OF_SEVERAL:
            self._cut_long_runs()
        num_runs = len(self._headers) // HEADER
        assert num_runs <= MAX_RUNS, f"{num_runs} runs in one step; a launch takes {MAX_RUNS}"
        head = struct.pack(f"{len(self._headers)}i", *self._headers)
        table = b"".join([head, *self._parts])
        return Moves(table, num_runs, self._longest, self._headers[2], self._num_tokens)

    def _cut_long_runs(self) -> None:
        cut: list[int] = []
        for at in range(0, len(self._headers), HEADER):
            rows_at, n, start, blocks_at = self._headers[at : at + HEADER]
            for done in range(0, n, LONGEST_OF_SEVERAL):
                num_blocks = (start + done) // self._block_size - start // self._block_size
                cut += (
                    rows_at + done,
                    min(LONGEST_OF_SEVERAL, n - done),
                    start + done,
                    blocks_at + num_blocks,
                )
        self._headers, self._longest = cut, LONGEST_OF_SEVERAL


def build_groups(builders: Sequence[MovesBuilder]) -> GroupMoves:
    """builders: of each group."""
    moves = tuple([builder.build() for builder in builders])
    return moves if any(moves) else ()


def single_run(rows: Int32Array, start: int, block_ids: Sequence[int], block_size: int) -> Moves:
    """The moves of one run. rows: int32 [n]."""
    builder = MovesBuilder(block_size)
    builder.add(rows.astype(np.int32).tobytes(), start, block_ids)
    moves = builder.build()
    assert moves is not None
    return moves
