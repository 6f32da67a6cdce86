"""Worker side over fake layers: capture and injection through every layout, pieces, failures."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from fake_layers import LAYOUTS, flash_025

from inferscale.config import ConnectorConfig
from inferscale.connector import movement
from inferscale.connector.averaging import mean_of_same_length
from inferscale.connector.layout import LayerCache, flat_storage
from inferscale.connector.messages import StepOrders
from inferscale.connector.worker import WorkerSide
from inferscale.errors import PoolTooLarge, UnsupportedLayout
from inferscale.pool.moves import Moves, single_run
from inferscale.pool.tiers import Save, TierOrders
from inferscale.rope import Rotary, relocate

BLOCKS, BLOCK, HEADS, DIM = 9, 4, 2, 6
SLOTS = BLOCKS * BLOCK
LAST = np.arange(SLOTS - 12, SLOTS)
FIRST = np.arange(BLOCK, BLOCK + 12)


def rotary(dim: int = DIM, *, part: int | None = None, interleaved: bool = False) -> Rotary:
    part = dim if part is None else part
    return Rotary(
        1.0 / 100.0 ** (torch.arange(0, part, 2, dtype=torch.float64) / part), dim, part, interleaved
    )


def make_worker(layers: list[LayerCache], *, free: int = 2**40, **settings: Any) -> WorkerSide:
    config = ConnectorConfig(
        **{"pool_size_bytes": 2**16, "page_size_tokens": 4, "compile_injection": False, **settings}
    )
    return WorkerSide(config, layers, rotary(layers[0].head_dim), BLOCKS, [BLOCK], lambda: free)


def portable(side: WorkerSide) -> movement.PortableMover:
    assert isinstance(side.mover, movement.PortableMover)
    return side.mover


def read(side: WorkerSide, index: int, slots: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [n, heads, dim] that layer `index` holds at slots."""
    layer, layout = side.layers[index], side._layouts[index]
    rows = flat_storage(layer.cache)[layout.element_index(torch.from_numpy(slots))]
    pairs = rows.view(len(slots), 2, layer.num_kv_heads, layer.head_dim)
    return pairs[:, 0], pairs[:, 1]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


START = 100 * BLOCK
"""Where injected tokens stand in their prompt."""


def order(rows: np.ndarray) -> tuple[Moves, Moves]:
    """Capture of the slots LAST into rows, and injection from there into the slots FIRST."""
    last, first = [6, 7, 8], [1, 2, 3]
    return single_run(rows, 0, last, BLOCK), single_run(rows, START, [0] * 100 + first, BLOCK)


def set_deltas(side: WorkerSide, rows: np.ndarray, deltas: Any) -> None:
    """As if the rows had been captured where injecting them turns them by these."""
    positions = START + torch.arange(len(rows))
    side.slab.origins[torch.from_numpy(rows)] = (positions - torch.as_tensor(deltas)).to(torch.int32)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_capture_then_injection_keeps_or_relocates(name: str, dtype: torch.dtype) -> None:
    side = make_worker([LAYOUTS[name](BLOCKS, BLOCK, HEADS, DIM, dtype) for _ in range(3)])
    rows = np.array([5, 6, 7, 40, 41, 42, 43, 0, 1, 2, 3, 9])
    deltas = np.array([0, 0, 0, 17, 17, 17, 17, -300, -300, -300, -300, 0])
    originals = [tuple(part.clone() for part in read(side, index, LAST)) for index in range(3)]
    others = [read(side, index, np.arange(BLOCK + 12, SLOTS - 12))[0].clone() for index in range(3)]
    capture, injection = order(rows)
    side.mover.capture(capture)
    set_deltas(side, rows, deltas)
    side.mover.inject(injection)
    for index, (keys, values) in enumerate(originals):
        found_keys, found_values = read(side, index, FIRST)
        assert torch.equal(bits(found_values), bits(values))
        expected = relocate(keys, torch.from_numpy(deltas), side.rotary)
        assert torch.equal(bits(found_keys), bits(expected))
        assert torch.equal(bits(found_keys[:3]), bits(keys[:3])), "delta 0 is bit-identical"
        assert not torch.equal(found_keys[3:7], keys[3:7])
        assert torch.equal(bits(read(side, index, LAST)[0]), bits(keys)), "the source is left alone"
        assert torch.equal(read(side, index, np.arange(BLOCK + 12, SLOTS - 12))[0], others[index])


def test_layers_of_different_shapes_and_layouts() -> None:
    layers = [
        LAYOUTS["flash_025"](BLOCKS, BLOCK, 2, DIM, torch.float32),
        LAYOUTS["cpu_packed"](BLOCKS, BLOCK, 3, DIM, torch.float32),
        LAYOUTS["shuffled"](BLOCKS, BLOCK, 1, DIM, torch.float32),
    ]
    side = make_worker(layers, compile_injection=True)
    assert not side.slab.shape.is_uniform
    originals = [tuple(part.clone() for part in read(side, index, LAST)) for index in range(3)]
    rows = np.arange(3, 15)
    capture, injection = order(rows)
    side.mover.capture(capture)
    set_deltas(side, rows, 9)
    side.mover.inject(injection)
    for index, (keys, values) in enumerate(originals):
        found_keys, found_values = read(side, index, FIRST)
        assert torch.equal(bits(found_values), bits(values))
        torch.testing.assert_close(
            found_keys, relocate(keys, torch.full((12,), 9), side.rotary), rtol=0, atol=1e-6
        )


def test_alternating_layouts_do_not_mix_their_index_maps() -> None:
    names = ["flash_025", "cpu_packed", "flash_025", "kv_first", "cpu_packed"]
    side = make_worker([LAYOUTS[name](BLOCKS, BLOCK, HEADS, DIM, torch.float32) for name in names])
    originals = [read(side, index, LAST)[0].clone() for index in range(5)]
    capture, injection = order(np.arange(12))
    side.mover.capture(capture)
    set_deltas(side, np.arange(12), 0)
    side.mover.inject(injection)
    for index in range(5):
        assert torch.equal(read(side, index, FIRST)[0], originals[index])


@pytest.mark.parametrize("rows_per_piece", [1, 5, 12, 100])
def test_a_step_in_pieces(rows_per_piece: int) -> None:
    side = make_worker([flash_025(BLOCKS, BLOCK, HEADS, DIM, torch.float32)])
    portable(side)._rows_per_piece = rows_per_piece
    keys = read(side, 0, LAST)[0].clone()
    deltas = np.arange(12) * 3
    capture, injection = order(np.arange(20, 32))
    side.mover.capture(capture)
    set_deltas(side, np.arange(20, 32), deltas)
    side.mover.inject(injection)
    assert torch.equal(read(side, 0, FIRST)[0], relocate(keys, torch.from_numpy(deltas), side.rotary))


def test_the_scratch_bound_sets_the_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(movement, "SCRATCH_BYTES", 1)
    assert portable(make_worker([flash_025(BLOCKS, BLOCK, HEADS, DIM, torch.float32)]))._rows_per_piece == 64
    monkeypatch.setattr(movement, "SCRATCH_BYTES", 24 * 4 * 3 * 1000)
    assert (
        portable(make_worker([flash_025(BLOCKS, BLOCK, HEADS, DIM, torch.float32)]))._rows_per_piece == 1000
    )


# one step -------------------------------------------------------------------------------------


def test_a_step_zeroes_then_injects_then_captures_and_reports() -> None:
    side = make_worker([flash_025(BLOCKS, BLOCK, HEADS, DIM, torch.float32)])
    capture, injection = order(np.arange(12))
    side.slab.data.fill_(1)
    side.before_forward(StepOrders(step=3, capture=(capture,), zero_pages=np.array([0, 5], dtype=np.int32)))
    assert side.slab.data[:4].eq(0).all()
    assert side.slab.data[4:20].eq(1).all()
    assert side.slab.data[20:24].eq(0).all()
    assert side.take_report() is None
    side.after_forward(StepOrders(step=3, capture=(capture,)))
    report = side.take_report()
    assert report is not None
    assert (report.done, report.failed_captures) == ({3}, set())
    assert side.take_report() is None
    set_deltas(side, np.arange(12), 0)
    side.before_forward(StepOrders(step=4, injection=(injection,)))
    side.after_forward(StepOrders(step=4, injection=(injection,)))
    assert torch.equal(read(side, 0, FIRST)[0], read(side, 0, LAST)[0])
    assert side.take_failed_blocks() == set()


def test_a_step_without_work_reports_nothing() -> None:
    side = make_worker([flash_025(BLOCKS, BLOCK, HEADS, DIM, torch.float32)])
    side.before_forward(StepOrders(zero_pages=np.array([1], dtype=np.int32)))
    side.after_forward(StepOrders(zero_pages=np.array([1], dtype=np.int32)))
    assert side.take_report() is None


def test_a_failed_write_marks_every_block_of_the_step() -> None:
    side = make_worker([flash_025(BLOCKS, BLOCK, HEADS, DIM, torch.float32)])

    def fails(*_: Any) -> None:
        raise RuntimeError("no")

    side.layers[0].layer.impl.do_kv_cache_update = fails
    _, injection = order(np.arange(9))
    side.before_forward(StepOrders(step=1, injection=(injection,), failed_blocks=[7]))
    side.after_forward(StepOrders(step=1, injection=(injection,)))
    assert side.take_failed_blocks() == {1, 2, 3, 7}
    assert side.take_failed_blocks() == set()
    report = side.take_report()
    assert report is not None
    assert report.done == {1}, "the scheduler side waits for its captures"


def test_a_failed_capture_is_reported_and_does_not_raise() -> None:
    side = make_worker([flash_025(BLOCKS, BLOCK, HEADS, DIM, torch.float32)])
    outside = single_run(np.array([0]), 0, [10**6], BLOCK)
    side.after_forward(StepOrders(step=8, capture=(outside,)))
    report = side.take_report()
    assert report is not None
    assert (report.done, report.failed_captures) == ({8}, {8})


def test_nothing_is_saved_right_behind_a_failed_capture() -> None:
    """The next step may capture the rest of what failed, before the scheduler side has heard of it: its save
    would keep rows that nobody has written."""
    side = make_worker([flash_025(BLOCKS, BLOCK, HEADS, DIM, torch.float32)], host_size_bytes=2**16)
    assert side.lower is not None
    rows = np.arange(12)
    save = Save("ab" * 16, rows.astype(np.int32).tobytes(), 0, ("host",), 1)
    side.after_forward(StepOrders(step=8, capture=(single_run(np.array([0]), 0, [10**6], BLOCK),)))
    rest = StepOrders(step=9, capture=(order(rows)[0],), tiers=TierOrders(saves=[save]))
    side.after_forward(rest)
    report = side.take_report()
    assert report is not None
    assert (report.done, report.failed_captures) == ({8, 9}, {8})
    assert report.tiers.not_saved == save.answers()
    rest.step = 20
    side.after_forward(rest)
    side.lower._writer.submit(lambda: None).result()
    report = side.take_report()
    assert report is not None
    assert report.tiers.saved == save.answers()
    side.close()


# start-up -------------------------------------------------------------------------------------


def test_a_pool_that_does_not_fit_says_how_much_is_free_and_what_to_set() -> None:
    with pytest.raises(PoolTooLarge) as caught:
        make_worker(
            [flash_025(BLOCKS, BLOCK, HEADS, DIM, torch.float32)], free=3 * 2**20, pool_size_bytes="4MiB"
        )
    message = str(caught.value)
    assert "pool_size_bytes is 4194304 (0.00 GiB)" in message
    assert "3145728 bytes" in message
    assert f"Set pool_size_bytes to at most {int(3 * 2**20 * 0.9)}" in message
    assert "--gpu-memory-utilization" in message


def test_the_pool_takes_whole_pages() -> None:
    side = make_worker([flash_025(BLOCKS, BLOCK, HEADS, DIM, torch.float32)], pool_size_bytes=5000)
    assert side.slab.data.shape == (5000 // (4 * 96) * 4, 24)


def test_layers_of_different_dtypes_are_refused() -> None:
    layers = [
        flash_025(BLOCKS, BLOCK, HEADS, DIM, torch.float32),
        flash_025(BLOCKS, BLOCK, HEADS, DIM, torch.bfloat16),
    ]
    with pytest.raises(UnsupportedLayout, match="dtype"):
        make_worker(layers)


def test_every_layer_is_checked_and_not_only_the_first_of_its_kind() -> None:
    good = flash_025(BLOCKS, BLOCK, HEADS, DIM, torch.float32)
    bad = flash_025(BLOCKS, BLOCK, HEADS, DIM, torch.float32)

    def exchanged(
        layer: Any, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: Any
    ) -> None:
        for index, slot in enumerate(slots.tolist()):
            cache[slot // BLOCK, 1, slot % BLOCK], cache[slot // BLOCK, 0, slot % BLOCK] = (
                keys[index],
                values[index],
            )

    bad.layer.impl.do_kv_cache_update = exchanged
    with pytest.raises(UnsupportedLayout, match="read back differ"):
        make_worker([good, bad])


def test_the_compiled_path_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without running a compiler: what `_prepare_gather` gets is what injection uses."""
    used: list[int] = []

    def fake_compile(gather: Any, pool: torch.Tensor, turning: Rotary) -> Any:
        assert pool.shape[1:] == (2 * HEADS * DIM,)
        assert turning.rotary_dim == DIM
        return lambda *args: used.append(len(args[1])) or gather(*args)

    monkeypatch.setattr(movement, "compile_gather", fake_compile)
    side = make_worker([flash_025(BLOCKS, BLOCK, HEADS, DIM, torch.float32)], compile_injection=True)
    _, injection = order(np.arange(9))
    side.mover.inject(injection)
    assert used == [9]


def test_the_start_says_how_memory_is_divided(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="inferscale"):
        side = make_worker([flash_025(BLOCKS, BLOCK, HEADS, DIM, torch.float32)])
    (line,) = [r.getMessage() for r in caplog.records if "pool" in r.getMessage()]
    assert f"{SLOTS} tokens" in line
    assert f"{len(side.slab.data)} tokens" in line
    assert "facts of 30 tokens" in line


@pytest.mark.parametrize("pool_dtype", ["auto", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_second_capture_leaves_the_mean_of_both(name: str, dtype: torch.dtype, pool_dtype: str) -> None:
    dim = 32 if pool_dtype == "int8" else DIM
    layers = [LAYOUTS[name](BLOCKS, BLOCK, HEADS, dim, dtype) for _ in range(3)]
    side = make_worker(layers, pool_size_bytes=2**18, pool_dtype=pool_dtype)
    side.averager._rows_per_piece = 5  # several pieces, the last one short
    rows = np.array([5, 6, 7, 40, 41, 42, 43, 0, 1, 2, 3, 9])
    for number, layer in enumerate(layers):
        movement._write_random(layer, SLOTS, seed=number)
    at_first, at_second = 40 * BLOCK, 2 * BLOCK
    side.after_forward(StepOrders(step=1, capture=(single_run(rows, at_first, [0] * 40 + [1, 2, 3], BLOCK),)))
    side.after_forward(
        StepOrders(step=2, averaging=(single_run(rows, at_second, [0] * 2 + [6, 7, 8], BLOCK),))
    )
    report = side.take_report()
    assert report is not None
    assert report.failed_captures == set()
    assert side.slab.origins[torch.from_numpy(rows)].tolist() == list(range(at_second, at_second + 12))
    expected = []
    for index in range(3):
        (first, values), (second, others) = read(side, index, FIRST), read(side, index, LAST)
        moved = relocate(first.float(), torch.full((12,), at_second - at_first), side.rotary)
        expected.append((halfway(moved, second.float()), halfway(values.float(), others.float())))
    # Injected at the place of the second capture, where nothing turns.
    side.before_forward(StepOrders(injection=(single_run(rows, at_second, [0] * 2 + [1, 2, 3], BLOCK),)))
    tolerance = 0.03 if pool_dtype == "int8" else 1e-6 if dtype == torch.float32 else 0.01
    for index in range(3):
        for found, wanted in zip(read(side, index, FIRST), expected[index], strict=True):
            torch.testing.assert_close(found.float(), wanted, atol=tolerance, rtol=tolerance)


def halfway(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    length = (torch.linalg.vector_norm(first, dim=-1) + torch.linalg.vector_norm(second, dim=-1)) / 2
    return torch.nn.functional.normalize(first + second, dim=-1) * length[..., None]


def test_opposite_vectors_have_a_mean_without_a_direction() -> None:
    first = torch.tensor([[1.0, 0.0], [3.0, 4.0], [0.0, 0.0]])
    second = torch.tensor([[-1.0, 0.0], [4.0, 3.0], [0.0, 0.0]])
    found = mean_of_same_length(first, second)
    assert found[0].tolist() == [0.0, 0.0]
    torch.testing.assert_close(found[1], torch.tensor([12.5**0.5, 12.5**0.5]))
    assert found[2].tolist() == [0.0, 0.0]


def test_a_failed_mean_is_reported() -> None:
    side = make_worker([flash_025(BLOCKS, BLOCK, HEADS, DIM, torch.float32)])
    side.after_forward(StepOrders(step=1, averaging=(single_run(np.array([10**9]), 0, [0], BLOCK),)))
    report = side.take_report()
    assert report is not None
    assert report.failed_captures == {1}


def test_orders_from_before_other_weights_are_not_carried_out(caplog: pytest.LogCaptureFixture) -> None:
    """What they name is KV of the weights before: nothing is written, and nothing captured."""
    side = make_worker([LAYOUTS["flash_025"](BLOCKS, BLOCK, HEADS, DIM, torch.float32)])
    capture, injection = order(np.arange(3, 15))
    before = read(side, 0, FIRST)[0].clone()
    side.note_new_weights()
    report = side.take_report()
    assert report is not None
    assert report.weights == 1
    orders = StepOrders(step=1, injection=(injection,), capture=(capture,))
    side.before_forward(orders)
    side.after_forward(orders)
    assert torch.equal(read(side, 0, FIRST)[0], before)
    assert side.take_failed_blocks() == {1, 2, 3}
    report = side.take_report()
    assert report is not None
    assert (report.done, report.failed_captures, report.weights) == ({1}, {1}, 1)
    assert side.take_report() is None
    orders = StepOrders(step=2, injection=(injection,), capture=(capture,), weights=1)
    side.before_forward(orders)
    side.after_forward(orders)
    assert side.take_failed_blocks() == set()
    report = side.take_report()
    assert report is not None
    assert (report.done, report.failed_captures) == ({2}, set())
