"""Injection beside the forward pass: only in a mode that asks for its layers, and never read too early."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_layers import flash_025

from inferscale.config import ConnectorConfig
from inferscale.connector import layerwise, movement
from inferscale.connector import worker as worker_module
from inferscale.connector.compat import forward_mode
from inferscale.connector.layout import LayerCache
from inferscale.connector.messages import StepOrders
from inferscale.connector.worker import WorkerSide
from inferscale.pool.moves import Moves, single_run
from inferscale.rope import Rotary

pytest.importorskip("triton")

BLOCKS, BLOCK, HEADS, DIM, LAYERS = 6, 4, 2, 16, 5
NAMES = [f"layers.{i}" for i in range(LAYERS)]


def rotary() -> Rotary:
    return Rotary(1.0 / 100.0 ** (torch.arange(0, DIM, 2, dtype=torch.float64) / DIM), DIM, DIM, False)


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> WorkerSide:
    """A worker with the kernels in the interpreter: there, what overlaps is injected only when waited for."""
    monkeypatch.setattr(layerwise, "LEAST_TOKENS", 6)

    def choose(*arguments: Any, **settings: Any) -> Any:
        return movement.choose_mover(*arguments, **settings, interpret=True)

    monkeypatch.setattr(worker_module, "choose_mover", choose)
    layers = [
        LayerCache(name, layer.layer, layer.cache, HEADS, DIM)
        for name in NAMES
        for layer in [flash_025(BLOCKS, BLOCK, HEADS, DIM, torch.float32)]
    ]
    config = ConnectorConfig(pool_size_bytes=2**16, page_size_tokens=4)
    side = WorkerSide(config, layers, rotary(), BLOCKS, BLOCK, lambda: 2**40)
    side.slab.data.normal_()
    side.slab.origins.fill_(3)
    return side


def moves(num_tokens: int = 8) -> Moves:
    return single_run(np.arange(num_tokens), 0, [2, 3], BLOCK)


def written(side: WorkerSide) -> list[bool]:
    """Which layers hold what was injected: their block 2 is not what it was filled with."""
    return [bool((layer.cache[2] != 7.0).any()) for layer in side.layers]


def step(
    side: WorkerSide, injection: Moves, mode: str | None, reach: list[str] = NAMES, zero: Any = None
) -> tuple[list[bool], set[int]]:
    """(what was written before the first layer asked, blocks that failed) of one step."""
    for layer in side.layers:
        layer.cache.fill_(7.0)
    orders = StepOrders(injection=injection, zero_pages=zero)
    side.before_forward(orders, mode)
    before = written(side)
    for name in reach:
        side.layer_reached(name)
        if name in NAMES[1:]:
            assert all(written(side)), "the second layer is read"
    side.after_forward(orders)
    return before, side.take_failed_blocks()


def test_it_overlaps_once_the_mode_has_asked_for_its_layers(side: WorkerSide) -> None:
    assert step(side, moves(), "piecewise") == ([True] * LAYERS, set()), "not known yet"
    before, failed = step(side, moves(), "piecewise")
    assert (before, failed) == ([True] + [False] * (LAYERS - 1), set())
    assert all(written(side))
    assert step(side, moves(), "other") == ([True] * LAYERS, set()), "another mode"
    assert step(side, moves(), None) == ([True] * LAYERS, set()), "no mode"
    assert step(side, moves(5), "piecewise") == ([True] * LAYERS, set()), "too few tokens"


def test_the_result_is_that_of_one_launch(side: WorkerSide) -> None:
    step(side, moves(), "piecewise")
    at_once = [layer.cache.clone() for layer in side.layers]
    step(side, moves(), "piecewise")
    for layer, cache in zip(side.layers, at_once, strict=True):
        assert torch.equal(layer.cache, cache)


def test_a_mode_that_does_not_ask_is_never_trusted(side: WorkerSide) -> None:
    for _ in range(3):
        assert step(side, moves(), "full", reach=[]) == ([True] * LAYERS, set())


def test_whichever_later_layer_asks_first_makes_the_pass_wait(side: WorkerSide) -> None:
    """The order of the layers in a pass is not relied on."""
    step(side, moves(), "piecewise")
    backwards = NAMES[::-1]
    before, failed = step(side, moves(), "piecewise", reach=backwards)
    assert (before, failed) == ([True] + [False] * (LAYERS - 1), set())
    assert all(written(side))


@pytest.mark.parametrize("missing", range(LAYERS))
def test_a_mode_in_which_one_layer_does_not_ask_is_not_trusted(side: WorkerSide, missing: int) -> None:
    reach = NAMES[:missing] + NAMES[missing + 1 :]
    for _ in range(3):
        assert step(side, moves(), "piecewise", reach=reach) == ([True] * LAYERS, set())


def test_a_pass_that_raised_is_settled_before_the_next(side: WorkerSide) -> None:
    step(side, moves(), "piecewise")
    side.before_forward(StepOrders(injection=moves()), "piecewise")  # and no more of this step
    for layer in side.layers:
        layer.cache.fill_(7.0)
    side.before_forward(StepOrders(injection=moves(4)), "piecewise")
    assert all(written(side))


def test_a_pass_that_did_not_wait_fails_its_requests_and_is_the_last(
    side: WorkerSide, caplog: pytest.LogCaptureFixture
) -> None:
    step(side, moves(), "piecewise")
    with caplog.at_level(logging.ERROR):
        before, failed = step(side, moves(), "piecewise", reach=[])
    assert before == [True] + [False] * (LAYERS - 1)
    assert failed == {2, 3}
    assert "did not wait for its layers" in caplog.text
    assert step(side, moves(), "piecewise") == ([True] * LAYERS, set())


def test_zeroing_waits_for_what_still_reads(side: WorkerSide) -> None:
    step(side, moves(), "piecewise")
    expected = [layer.cache.clone() for layer in side.layers]
    before, failed = step(side, moves(), "piecewise", zero=np.array([0, 1], dtype=np.int32))
    assert (before, failed) == ([True] * LAYERS, set())
    assert side.slab.data[:8].eq(0).all()
    for layer, cache in zip(side.layers, expected, strict=True):
        assert torch.equal(layer.cache, cache)


def test_the_mode_is_read_from_vllms_forward_context() -> None:
    assert forward_mode(SimpleNamespace(attn_metadata=None, cudagraph_runtime_mode=2)) is None
    assert forward_mode(SimpleNamespace(attn_metadata={}, cudagraph_runtime_mode=2)) == "2"
    assert forward_mode(None) is None
