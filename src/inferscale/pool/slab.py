"""The bytes of the pool: one slab, token-major, so that a token's KV of all layers is contiguous.

Row `page · page_size_tokens + offset` holds one token: for every layer its keys (as rotated at
capture), then its values; `origins` holds the position it was captured at, so that a move to position p
rotates by p − origin. The slab knows nothing of segments; rows come from the page table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class RowShape:
    """What one token occupies: `(num_kv_heads, head_dim)` per layer, in layer order."""

    layers: tuple[tuple[int, int], ...]

    @property
    def num_elements(self) -> int:
        return sum(2 * heads * dim for heads, dim in self.layers)

    @property
    def is_uniform(self) -> bool:
        return len(set(self.layers)) == 1


def num_pages(pool_size_bytes: int, page_size_tokens: int, token_size_bytes: int) -> int:
    """Whole pages in a pool of this size; 0 when not even one fits."""
    return pool_size_bytes // (page_size_tokens * token_size_bytes)


class Slab:
    """data: [rows, elements of a token], with a view per layer. origins: int32 [rows]."""

    def __init__(
        self, pages: int, page_size_tokens: int, shape: RowShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.page_size_tokens = page_size_tokens
        self.shape = shape
        self.data = torch.zeros((pages * page_size_tokens, shape.num_elements), dtype=dtype, device=device)
        self.origins = torch.zeros(len(self.data), dtype=torch.int32, device=device)
        self._columns: list[tuple[int, int]] = []
        start = 0
        for heads, dim in shape.layers:
            self._columns.append((start, start + 2 * heads * dim))
            start += 2 * heads * dim

    def layer(self, index: int) -> torch.Tensor:
        """View [rows, 2 · num_kv_heads · head_dim] of one layer: keys, then values."""
        start, end = self._columns[index]
        return self.data[:, start:end]

    def uniform(self) -> torch.Tensor:
        """View [rows, layers, 2, num_kv_heads, head_dim]; only where all layers have one shape."""
        assert self.shape.is_uniform
        heads, dim = self.shape.layers[0]
        return self.data.view(-1, len(self.shape.layers), 2, heads, dim)

    def zero_pages(self, pages: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Overwrite freed pages, so that nothing of a forgotten fact remains in memory."""
        rows = torch.as_tensor(pages).to(torch.int64).unsqueeze(1) * self.page_size_tokens
        rows = (rows + torch.arange(self.page_size_tokens)).flatten()
        self.data.index_fill_(0, rows.to(self.data.device), 0)
