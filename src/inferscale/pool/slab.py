"""The bytes of the pool: one slab, token-major, so that a token's KV of all layers is contiguous.

Row `page · page_size_tokens + offset` holds one token: for every layer its keys (as rotated at
capture), then its values, in one of the formats of `pool.row_format`. `origins` holds the position it
was captured at, so that a move to position p rotates by p − origin. The slab knows nothing of segments;
rows come from the page table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from inferscale.pool.row_format import RowFormat
from inferscale.row_size import RowShape


def num_pages(pool_size_bytes: int, page_size_tokens: int, token_size_bytes: int) -> int:
    """Whole pages in a pool of this size; 0 when not even one fits."""
    return pool_size_bytes // (page_size_tokens * token_size_bytes)


class Slab:
    """data: [rows, columns of the format], in its storage dtype. origins: int32 [rows]."""

    def __init__(
        self, pages: int, page_size_tokens: int, row_format: RowFormat, device: torch.device
    ) -> None:
        self.page_size_tokens = page_size_tokens
        self.format = row_format
        self.data = torch.zeros(
            (pages * page_size_tokens, row_format.num_columns),
            dtype=row_format.storage_dtype,
            device=device,
        )
        self.origins = torch.zeros(len(self.data), dtype=torch.int32, device=device)

    @property
    def shape(self) -> RowShape:
        return self.format.shape

    def zero_pages(self, pages: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Overwrite freed pages, so that nothing of a forgotten fact remains in memory."""
        rows = torch.as_tensor(pages).to(torch.int64).unsqueeze(1) * self.page_size_tokens
        rows = (rows + torch.arange(self.page_size_tokens)).flatten()
        self.data.index_fill_(0, rows.to(self.data.device), 0)
