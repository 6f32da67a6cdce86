"""vLLM's KV cache groups: layers that share one list of blocks a request, and how far back these see.

Layers with a window or with chunks give blocks back while a request runs: where a token is not seen any more,
the group's list has the null block. Pure; vllm/v1/core/single_type_kv_cache_manager.py decides
alike (`get_num_skipped_tokens`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

NULL_BLOCK = 0
"""Of no request; vllm/v1/core/block_pool.py."""


class CacheGroup(NamedTuple):
    """block_size: tokens of a block. window: tokens that a token sees, itself included. chunk: tokens of a
    chunk, of which a token sees those before it in its own. Both 0 where all are seen."""

    block_size: int
    window: int = 0
    chunk: int = 0

    @property
    def sees_all(self) -> bool:
        """Whether it keeps its blocks for as long as the request runs."""
        return not self.window and not self.chunk

    def held_from(self, num_computed: int) -> int:
        """The first token whose block is kept where so many are computed: what the next one sees, in whole
        blocks. At a multiple of the block size."""
        if self.window:
            first = max(0, num_computed - self.window + 1)
        elif self.chunk:
            first = num_computed // self.chunk * self.chunk
        else:
            return 0
        return first // self.block_size * self.block_size

    def holds(self, block_ids: Sequence[int], start: int, end: int) -> bool:
        """Whether a request has a block for each of the tokens `[start, end)`."""
        first, last = start // self.block_size, -(-end // self.block_size)
        return last <= len(block_ids) and (self.sees_all or NULL_BLOCK not in block_ids[first:last])


def held_from(groups: Sequence[CacheGroup], num_computed: int) -> int:
    """The first token whose blocks all groups keep."""
    return max(group.held_from(num_computed) for group in groups)
