"""What a row of the pool consists of, and how many bytes it takes. Arithmetic only: no torch."""

from __future__ import annotations

from dataclasses import dataclass

from inferscale.config import PoolDtype

_INT8_GROUP = 32
_ROW_ALIGNMENT = 16
_SCALE_BYTES = 2


@dataclass(frozen=True)
class RowShape:
    """What one token consists of: `(num_kv_heads, head_dim)` per layer, in layer order."""

    layers: tuple[tuple[int, int], ...]

    @property
    def num_elements(self) -> int:
        return sum(2 * heads * dim for heads, dim in self.layers)

    @property
    def is_uniform(self) -> bool:
        return len(set(self.layers)) == 1

    def num_scales(self, pool_dtype: PoolDtype) -> int:
        if pool_dtype == "auto":
            return 0
        return sum(2 * heads * (dim // group_size(pool_dtype, dim)) for heads, dim in self.layers)

    def row_bytes(self, pool_dtype: PoolDtype, kv_bytes: int) -> int:
        """Of one token. kv_bytes: of an element of vLLM's cache."""
        if pool_dtype == "auto":
            return self.num_elements * kv_bytes
        size = self.num_elements + _SCALE_BYTES * self.num_scales(pool_dtype)
        return -(-size // _ROW_ALIGNMENT) * _ROW_ALIGNMENT


def group_size(pool_dtype: PoolDtype, head_dim: int) -> int:
    """Neighbouring dimensions of a head that share a scale; 0 where there are no scales."""
    if pool_dtype == "auto":
        return 0
    if pool_dtype == "fp8":
        return head_dim
    return min(_INT8_GROUP, head_dim & -head_dim)
