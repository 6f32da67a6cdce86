"""Portable gather: equal to `rope.relocate`, bit for bit where nothing moves, compiled or not."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from inferscale.config import PoolDtype
from inferscale.kernels.reference import compile_gather, make_gather
from inferscale.pool.row_format import RowFormat
from inferscale.rope import Rotary, delta_cos_sin, relocate
from inferscale.row_size import RowShape

ROWS, LAYERS, HEADS, DIM = 50, 3, 2, 12


def rotary(part: int, interleaved: bool) -> Rotary:
    return Rotary(
        1.0 / 1000.0 ** (torch.arange(0, part, 2, dtype=torch.float64) / part), DIM, part, interleaved
    )


def pool_of(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(ROWS, LAYERS, 2, HEADS, DIM, generator=torch.Generator().manual_seed(3)).to(dtype)


def format_of(dtype: torch.dtype, pool_dtype: PoolDtype = "auto") -> RowFormat:
    return RowFormat(RowShape(((HEADS, DIM),) * LAYERS), dtype, pool_dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
@pytest.mark.parametrize("part", [DIM, 8, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", [0, 1, 7, 64])
def test_gather_equals_relocate(interleaved: bool, part: int, dtype: torch.dtype, n: int) -> None:
    rope, pool = rotary(part, interleaved), pool_of(dtype)
    generator = torch.Generator().manual_seed(n)
    rows = torch.randint(0, ROWS, (n,), generator=generator)
    deltas = torch.randint(-3, 4, (n,), generator=generator) * 1000
    cos, sin = delta_cos_sin(deltas, rope)
    keys, values = make_gather(rope, format_of(pool.dtype))(pool.flatten(1), rows, cos, sin, deltas != 0)
    picked = pool[rows].transpose(0, 1)
    assert keys.shape == values.shape == (LAYERS, n, HEADS, DIM)
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert torch.equal(bits(values), bits(picked[:, :, 1]))
    assert torch.equal(bits(keys), bits(relocate(picked[:, :, 0], deltas, rope)))
    assert torch.equal(bits(keys[..., part:]), bits(picked[:, :, 0, :, part:])), (
        "behind rotary_dim nothing moves"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -0.0])
def test_rows_that_do_not_move_keep_their_bits(dtype: torch.dtype, value: float) -> None:
    rope, pool = rotary(DIM, False), pool_of(dtype)
    pool[4] = value
    rows, deltas = torch.tensor([4, 5, 4]), torch.tensor([0, 9, 0])
    keys, values = make_gather(rope, format_of(pool.dtype))(
        pool.flatten(1), rows, *delta_cos_sin(deltas, rope), deltas != 0
    )
    for index in (0, 2):
        assert torch.equal(bits(keys[:, index]), bits(pool[4][:, 0]))
        assert torch.equal(bits(values[:, index]), bits(pool[4][:, 1]))
    assert torch.isfinite(keys[:, 1]).all(), "a neighbour is not touched by it"
    if value == 0:
        assert math.copysign(1, keys[0, 0, 0, 0]) == -1


def test_the_pool_is_left_alone() -> None:
    rope, pool = rotary(DIM, False), pool_of(torch.float32)
    before = pool.clone()
    deltas = torch.tensor([5, 6])
    make_gather(rope, format_of(pool.dtype))(
        pool.flatten(1), torch.tensor([1, 2]), *delta_cos_sin(deltas, rope), deltas != 0
    )
    assert torch.equal(pool, before)


def test_there_and_back_again() -> None:
    rope, pool = rotary(DIM, False), pool_of(torch.float32)
    rows, deltas = torch.arange(ROWS), torch.arange(ROWS)
    gather = make_gather(rope, format_of(pool.dtype))
    moved = gather(pool.flatten(1), rows, *delta_cos_sin(deltas, rope), deltas != 0)
    there = torch.stack((moved.keys, moved.values), dim=2).transpose(0, 1).contiguous()
    back = gather(there.flatten(1), rows, *delta_cos_sin(-deltas, rope), deltas != 0)
    torch.testing.assert_close(back.keys, pool[:, :, 0].transpose(0, 1), rtol=0, atol=2e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pool_dtype", ["auto", "int8", "fp8"])
def test_compiled_equals_eager_and_no_request_pays_for_a_compilation(pool_dtype: PoolDtype) -> None:
    rope, row_format = rotary(DIM, False), format_of(torch.float32, pool_dtype)
    pool = torch.zeros((ROWS, row_format.num_columns), dtype=row_format.storage_dtype)
    for layer in range(LAYERS):
        row_format.store_layer(pool, torch.arange(ROWS), layer, pool_of(torch.float32)[:, layer].flatten(1))
    eager = make_gather(rope, row_format)
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
        compiled = compile_gather(eager, pool, rope)
        if compiled is eager:
            pytest.skip("torch.compile does not work here")
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for n in (1, 2, 5, 64, 333):
            rows = torch.arange(n) % ROWS
            deltas = torch.arange(n) % 3 - 1
            cos, sin = delta_cos_sin(deltas, rope)
            one = eager(pool, rows, cos, sin, deltas != 0)
            other = compiled(pool, rows, cos, sin, deltas != 0)
            torch.testing.assert_close(other.keys, one.keys, rtol=0, atol=1e-6)
            assert torch.equal(bits(other.values), bits(one.values))
            still = deltas == 0
            assert torch.equal(bits(other.keys[:, still]), bits(one.keys[:, still]))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before, (
            "compiled again for some length"
        )


def test_without_a_compiler_the_plain_function_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler(function: object, **_: object) -> object:
        def fails(*_: object) -> None:
            raise RuntimeError("no g++")

        return fails

    monkeypatch.setattr(torch, "compile", no_compiler)
    gather = make_gather(rotary(DIM, False), format_of(torch.float32))
    assert compile_gather(gather, pool_of(torch.float32).flatten(1), rotary(DIM, False)) is gather
    assert "no g++" in caplog.text
