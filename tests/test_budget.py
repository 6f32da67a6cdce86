"""Dividing a GPU's memory: what vLLM gets, what the pool gets, what is refused."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from inferscale.budget import (
    LEAST_POOL_BYTES,
    MAX_UTILIZATION,
    Budget,
    DeviceMemory,
    MemoryBudget,
    ModelSize,
    default_reserve,
    plan_budget,
)
from inferscale.errors import PoolTooLarge

GIB = 2**30
H200 = DeviceMemory("cuda:0", int(140.4 * GIB), int(139.6 * GIB))
CONSUMER = DeviceMemory("cuda:0", int(23.6 * GIB), int(23.2 * GIB))
EIGHT = DeviceMemory("cuda:0", 8 * GIB, int(7.6 * GIB))
LLAMA_8B = ModelSize(15 * GIB, 2**17, 131072)
SMALL = ModelSize(2**28, 23040, 8192)


def left_for_cache(device: DeviceMemory, model: ModelSize, budget: Budget) -> int:
    """What vLLM's cache gets, by vLLM's own accounting, activations not counted."""
    requested = math.ceil(device.total_bytes * budget.gpu_memory_utilization)
    assert requested <= device.free_bytes, "vLLM would refuse to start"
    assert model.weight_bytes is not None
    return requested - model.weight_bytes


@pytest.mark.parametrize("device", [H200, CONSUMER, EIGHT])
@pytest.mark.parametrize("model", [LLAMA_8B, SMALL])
@pytest.mark.parametrize("pool_gib", [None, 1, 4, 60])
def test_what_is_accepted_fits_and_leaves_the_reserve(
    device: DeviceMemory, model: ModelSize, pool_gib: int | None
) -> None:
    pool = None if pool_gib is None else pool_gib * GIB
    try:
        budget = plan_budget([device], model, pool_bytes=pool)
    except PoolTooLarge:
        assert (pool or 0) + 15 * GIB > device.free_bytes - 2 * GIB
        return
    assert budget.pool_bytes == pool or pool is None
    taken = math.ceil(device.total_bytes * budget.gpu_memory_utilization) + budget.pool_bytes
    assert taken + default_reserve(device.total_bytes) <= device.free_bytes
    assert left_for_cache(device, model, budget) > 0
    assert 0 < budget.gpu_memory_utilization <= MAX_UTILIZATION


def test_a_large_pool_lowers_vllms_share() -> None:
    budget = plan_budget([H200], LLAMA_8B, pool_bytes=60 * GIB)
    assert budget.gpu_memory_utilization == pytest.approx((139.6 - 60 - 3.1) / 140.4, abs=1e-3)


def test_a_small_pool_changes_nothing_for_vllm() -> None:
    assert plan_budget([H200], LLAMA_8B, pool_bytes=GIB) == Budget(GIB, 0.92)


def test_the_default_pool_is_a_quarter_of_what_the_model_leaves() -> None:
    budget = plan_budget([H200], LLAMA_8B)
    left = H200.free_bytes - default_reserve(H200.total_bytes) - 15 * GIB
    assert left / 4 - LEAST_POOL_BYTES <= budget.pool_bytes <= left / 4
    assert left_for_cache(H200, LLAMA_8B, budget) > 2.9 * budget.pool_bytes


def test_the_default_pool_yields_to_one_longest_request() -> None:
    left = CONSUMER.free_bytes - default_reserve(CONSUMER.total_bytes) - 15 * GIB
    longest = LLAMA_8B._replace(max_tokens=45_000)  # 5.5 of about 6.8 GiB
    budget = plan_budget([CONSUMER], longest)
    assert budget.pool_bytes == pytest.approx(left - 45_000 * 2**17, abs=LEAST_POOL_BYTES)
    assert left_for_cache(CONSUMER, longest, budget) >= 45_000 * 2**17 - 2**24
    # One that cannot fit at all is vLLM's to refuse, or to shorten.
    assert plan_budget([CONSUMER], LLAMA_8B).pool_bytes == pytest.approx(left / 16, abs=LEAST_POOL_BYTES)


def test_a_model_of_unknown_size_gets_the_fixed_default() -> None:
    for model in (None, LLAMA_8B._replace(weight_bytes=None)):
        assert plan_budget([H200], model).pool_bytes == GIB
        assert plan_budget([H200], model, default_pool_bytes=2 * GIB).pool_bytes == 2 * GIB


def test_memory_that_others_hold_is_not_divided() -> None:
    shared = H200._replace(free_bytes=50 * GIB)
    budget = plan_budget([shared], LLAMA_8B, pool_bytes=10 * GIB)
    assert budget.gpu_memory_utilization == pytest.approx((50 - 10 - 3.1) / 140.4, abs=1e-3)


def test_a_given_share_is_respected_and_limits_the_default_pool() -> None:
    assert plan_budget([H200], LLAMA_8B, gpu_memory_utilization=0.5).gpu_memory_utilization == 0.5
    beside = plan_budget([H200], LLAMA_8B, gpu_memory_utilization=0.9).pool_bytes
    assert beside == pytest.approx((139.6 - 0.9 * 140.4 - 3.1) * GIB, abs=LEAST_POOL_BYTES)
    # A low share does not make the pool larger than it usually is.
    low = plan_budget([H200], LLAMA_8B, gpu_memory_utilization=0.3).pool_bytes
    assert low == plan_budget([H200], LLAMA_8B).pool_bytes


def test_a_given_pool_may_use_the_reserve_beside_a_given_share() -> None:
    """Both were chosen by the user; only what cannot be is refused."""
    pool = int(139.5 * GIB - 0.9 * 140.4 * GIB)
    assert plan_budget([H200], LLAMA_8B, pool_bytes=pool, gpu_memory_utilization=0.9) == Budget(pool, 0.9)
    with pytest.raises(PoolTooLarge, match=r"pool_size_bytes is \d+ \(13.\d GiB\).*0.9 gives vLLM 126.4 GiB"):
        plan_budget([H200], LLAMA_8B, pool_bytes=pool + GIB // 2, gpu_memory_utilization=0.9)


def test_a_given_cache_is_counted_instead_of_the_share() -> None:
    with_cache = {"cache_bytes": 20 * GIB}
    budget = plan_budget([CONSUMER], SMALL, pool_bytes=GIB, **with_cache)
    assert budget.pool_bytes == GIB
    with pytest.raises(PoolTooLarge, match=r"a cache of at least 20.0 GiB"):
        plan_budget([CONSUMER], SMALL, pool_bytes=4 * GIB, **with_cache)
    with pytest.raises(PoolTooLarge, match="together that is more than is free"):
        plan_budget([CONSUMER], SMALL, pool_bytes=4 * GIB, gpu_memory_utilization=0.1, cache_bytes=20 * GIB)


@pytest.mark.parametrize(
    ("device", "model", "settings", "message"),
    [
        (
            CONSUMER,
            LLAMA_8B,
            {"pool_bytes": 30 * GIB},
            r"30.0 GiB\) does not fit on cuda:0 \(23.2 GiB of 23.6",
        ),
        (CONSUMER, LLAMA_8B, {"pool_bytes": 30 * GIB}, r"weights of about 15.0 GiB \(an estimate\)"),
        (CONSUMER, LLAMA_8B, {"pool_bytes": 30 * GIB}, r"Set pool_size_bytes to at most 6\d{9},"),
        (CONSUMER, None, {"pool_bytes": 30 * GIB}, "vLLM has nothing left. Set pool_size_bytes to at most 2"),
        (EIGHT, LLAMA_8B, {}, "Take a smaller model or a larger GPU"),
        (EIGHT, SMALL, {"gpu_memory_utilization": 0.9}, r"leaves nothing for the pool .* lower it to 0.62"),
    ],
)
def test_refusals_say_what_is_there_and_what_to_do(
    device: DeviceMemory, model: ModelSize | None, settings: dict[str, int], message: str
) -> None:
    with pytest.raises(PoolTooLarge, match=message):
        plan_budget([device], model, **settings)  # type: ignore[arg-type]


def test_the_size_that_a_refusal_names_is_accepted() -> None:
    with pytest.raises(PoolTooLarge) as caught:
        plan_budget([CONSUMER], LLAMA_8B, pool_bytes=30 * GIB)
    named = int(str(caught.value).split("at most ")[1].split(",")[0])
    assert plan_budget([CONSUMER], LLAMA_8B, pool_bytes=named).pool_bytes == named


def test_a_longest_request_counts_in_full_only_where_it_was_given() -> None:
    plan_budget([CONSUMER], LLAMA_8B, pool_bytes=GIB)
    given = LLAMA_8B._replace(is_max_given=True)
    with pytest.raises(PoolTooLarge, match=r"a cache of at least 16.0 GiB"):
        plan_budget([CONSUMER], given, pool_bytes=GIB)
    plan_budget([CONSUMER], given._replace(max_tokens=30_000), pool_bytes=GIB)


def test_a_reserve_may_be_given() -> None:
    budget = plan_budget([H200], LLAMA_8B, pool_bytes=60 * GIB, reserve_bytes=10 * GIB)
    assert budget.gpu_memory_utilization == pytest.approx((139.6 - 60 - 10) / 140.4, abs=1e-3)
    assert default_reserve(H200.total_bytes, num_workers=2) > default_reserve(H200.total_bytes)


def test_the_report_is_one_plain_line() -> None:
    report = MemoryBudget(
        device="cuda:0",
        model_bytes=15 * GIB,
        cache_bytes=88 * GIB,
        cache_tokens=720_896,
        pool_bytes=30 * GIB,
        pool_tokens=245_760,
        page_size_tokens=16,
        free_bytes=500 * 2**20,
    )
    assert str(report) == (
        "Memory of cuda:0: model weights 15.0 GiB · vLLM's cache 88.0 GiB (720,896 tokens) · pool 30.0 GiB "
        "(245,760 tokens, about 7,680 facts of 30 tokens in pages of 16) · 500 MiB free"
    )


@pytest.mark.parametrize(("page", "facts"), [(8, 40), (16, 40), (30, 42), (32, 40), (64, 20), (1, 42)])
def test_facts_take_whole_pages(page: int, facts: int) -> None:
    budget = MemoryBudget("the CPU", None, 1, 1, 1, 1280 // page * page, page, 1)
    assert budget.pool_facts == facts
    assert "weights" not in str(budget)


def test_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, inferscale.budget, inferscale.model_size; "
        "print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
