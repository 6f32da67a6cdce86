"""A pool of int8 or E4M3 injects what its rows say, against a reference whose KV is quantized likewise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from harness.mixes import Author, Part, Stored, expected_parts, ids_of, segments_of
from harness.reference import KV, Injected, largest_difference
from inferscale.config import PoolDtype
from inferscale.pool.row_format import quantize
from inferscale.row_size import group_size
from inferscale.windows import sliding

pytestmark = pytest.mark.engine

LENGTHS = [5, 17, 40, 33, 1, 64]


@pytest.mark.parametrize("pool_dtype", ["int8", "fp8"])
def test_a_quantized_pool_injects_its_rows(author: Callable[..., Author], pool_dtype: PoolDtype) -> None:
    """Relocated. A number next to the border of two steps may be rounded otherwise than in the reference, so
    the bound is a share of what quantization changes."""
    a = author("llama", pool_dtype=pool_dtype)
    head = a.store_texts([31])[0]
    facts = a.store_facts(LENGTHS, sliding(3, 3))
    prompts: list[list[Part]] = [[head, *a.shuffled(facts), a.text(30)], [*facts[::-1], a.text(9)]]
    engine = a.engine
    requests = [
        engine.request(ids_of(p), engine.plan(f"scope {i}", segments=segments_of(p)))
        for i, p in enumerate(prompts)
    ]
    for parts, answer in zip(prompts, engine.generate(requests), strict=True):
        num_injected = sum(len(part.ids) for part in parts if isinstance(part, Stored))
        assert answer.outcome is not None
        assert answer.outcome["injected_tokens"] == num_injected
        change = a.difference(parts, answer, num_injected)
        expected = [
            part._replace(kv=quantized(part.kv, pool_dtype)) if isinstance(part, Injected) else part
            for part in expected_parts(parts, num_injected)
        ]
        difference = largest_difference(answer.logits, a.reference.logits_of(expected))
        assert difference < 0.2 * change
    assert change > 100 * a.baseline([40, 80])


def quantized(kv: KV, pool_dtype: PoolDtype) -> KV:
    """What comes back of it."""

    def through(numbers: torch.Tensor) -> torch.Tensor:
        layers, heads, n, dim = numbers.shape
        rows = numbers.permute(0, 2, 1, 3).reshape(layers * n, heads * dim)
        elements, scales = quantize(rows, pool_dtype, group_size(pool_dtype, dim))
        back = elements.float().view(layers * n, scales.shape[1], -1) * scales.float().unsqueeze(-1)
        return back.view(layers, n, heads, dim).permute(0, 2, 1, 3).contiguous()

    return KV(through(kv.keys), through(kv.values))
