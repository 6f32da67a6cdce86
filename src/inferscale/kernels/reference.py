"""Portable injection: gather pool rows and rotate their keys to the serving position.

Plain torch, for any device; the reference that hand-written kernels are checked against. The
rotation is that of Chunked RoPE (`rope.rotate`): by serving position − capture position, in
float32, rounded once; rows that do not move are copied bit for bit. `compile_gather` returns the
same function compiled by torch.compile, which fuses the passes over memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from inferscale.pool.row_format import RowFormat
from inferscale.rope import Rotary, rotate

logger = logging.getLogger(__name__)


class KeysValues(NamedTuple):
    """keys, values: [layers, n, num_kv_heads, head_dim], contiguous."""

    keys: torch.Tensor
    values: torch.Tensor


GatherFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], KeysValues]


def turn(
    picked: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    is_moved: torch.Tensor,
    rotary: Rotary,
    dtype: torch.dtype,
) -> KeysValues:
    """Tokens [n, layers, 2, num_kv_heads, head_dim] with their keys rotated, in `dtype`.

    cos, sin: as of `CosSin`. is_moved: bool [n]; other tokens keep their bits (x·1 − y·0 could
    change the sign of a zero).
    """
    keys, values = picked.transpose(0, 1).unbind(2)
    turned = torch.where(is_moved[:, None, None], rotate(keys, cos, sin, rotary), keys)
    return KeysValues(turned.to(dtype).contiguous(), values.to(dtype).contiguous())


def make_gather(rotary: Rotary, row_format: RowFormat) -> GatherFunction:
    """A function `(pool, rows, cos, sin, is_moved)` that gathers rows with their keys rotated.

    pool: [rows, num_columns] of a slab whose layers have one shape. rows: int64 [n]. The others as in
    `turn`, which gives the result.
    """

    def gather(
        pool: torch.Tensor, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_moved: torch.Tensor
    ) -> KeysValues:
        picked = row_format.decode(pool.index_select(0, rows))
        return turn(picked, cos, sin, is_moved, rotary, row_format.kv_dtype)

    return gather


def compile_gather(gather: GatherFunction, pool: torch.Tensor, rotary: Rotary) -> GatherFunction:
    """`gather` compiled for this pool, or `gather` itself where no compiler works.

    Compiles now, for any number of rows, so that no request pays for it.
    """
    compiled: GatherFunction = torch.compile(gather, dynamic=True)
    try:
        for n in (5, 64):
            rows = torch.arange(n, device=pool.device) % pool.shape[0]
            # Two tensors: a guard on `cos is sin` would make the first request compile again.
            cos, sin = (part.to(pool.device) for part in rotary.cos_sin(torch.zeros(n, dtype=torch.int64)))
            moved = torch.zeros(n, dtype=torch.bool, device=pool.device)
            compiled(pool, rows, cos, sin, moved)
    except Exception as error:  # noqa: BLE001 — torch.compile fails in many ways; the plain function is always right
        logger.warning("Injection runs uncompiled, which is slower: torch.compile failed: %s", error)
        return gather

    def any_length(
        pool: torch.Tensor, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_moved: torch.Tensor
    ) -> KeysValues:
        # torch.compile makes a program of its own for length 1, however dynamic the length is.
        return (gather if len(rows) == 1 else compiled)(pool, rows, cos, sin, is_moved)

    return any_length
