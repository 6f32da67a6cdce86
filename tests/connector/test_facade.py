"""The façade: whatever fails inside a hook, nothing leaves it, and no request answers from garbage."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from symbolic_engine import SymbolicEngine, key_of

from inferscale.config import ConnectorConfig, connector_config, default_runtime_dir
from inferscale.connector.messages import StepReport
from inferscale.errors import InvalidConfig
from inferscale.plan import Order, Segment
from inferscale.runtime.folder_lock import LOCK_NAME

Make = Callable[..., SymbolicEngine]

FACT = list(range(100, 130))
OTHER = list(range(200, 217))
QUESTION = [7, 8, 9]


class Broken(Exception):
    """What the patched methods raise."""


def broken(*_: Any, **__: Any) -> Any:
    raise Broken


@pytest.fixture
def engine(make_engine: Make, runner: str, depth: int) -> SymbolicEngine:
    engine = make_engine(runner=runner, depth=depth)
    engine.encode("encode", [3] + FACT + OTHER, (1, 31), (31, 48))
    engine.run()
    return engine


def errors(engine: SymbolicEngine) -> int:
    return engine.side.counters.internal_errors


def check_nothing_left(engine: SymbolicEngine) -> None:
    engine.side.counters.internal_errors = 0
    engine.check_idle()


def test_matching_fails(engine: SymbolicEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferscale.connector.scheduler.locate", broken)
    engine.chat("c", FACT + QUESTION, FACT)
    engine.run()
    assert engine.finish_reasons["c"] == "length"
    assert errors(engine) == 1
    check_nothing_left(engine)


def test_reading_params_fails(engine: SymbolicEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferscale.connector.scheduler.from_wire", broken)
    engine.chat("c", FACT + QUESTION, FACT)
    engine.run()
    assert engine.finish_reasons["c"] == "length"
    assert errors(engine) >= 1
    check_nothing_left(engine)


@pytest.mark.parametrize("step", ["truncated", "touch", "_count_use", "_publish"])
def test_claiming_fails_after_vllm_counts_on_our_tokens(
    engine: SymbolicEngine, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    side = engine.side
    with monkeypatch.context() as patch:
        if step == "truncated":
            patch.setattr("inferscale.connector.locate.Run.truncated", broken)
        elif step == "touch":
            patch.setattr(side.table, "touch", broken)
        else:
            patch.setattr(side, step, broken)
        engine.chat("c", FACT + OTHER + QUESTION, FACT, OTHER)
        engine.step()
    engine.run()
    assert engine.finish_reasons["c"] == "error", "a request whose KV is missing must not answer"
    assert errors(engine) >= 1
    check_nothing_left(engine)


def test_a_claim_that_vllm_does_not_schedule_fails(
    engine: SymbolicEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its KV would have no place to go, and vLLM counts on it."""
    monkeypatch.setattr("inferscale.connector.scheduler.allocated", lambda output, ids: iter(()))
    engine.chat("c", FACT + QUESTION, FACT)
    engine.add("plain", [1, 2, 3])
    engine.run()
    assert engine.finish_reasons["c"] == "error"
    assert engine.finish_reasons["plain"] == "length"
    check_nothing_left(engine)


@pytest.mark.parametrize(
    "method",
    ["_build_injection", "_follow_blocks", "_build_captures", "_take_broken_blocks", "take_freed_pages"],
)
def test_building_orders_fails(engine: SymbolicEngine, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Whenever it fails: what was claimed in this step is failed, and what it captures is given up."""
    side = engine.side
    owner = side.table if method == "take_freed_pages" else side
    calls: list[int] = []

    original = getattr(owner, method)

    def once(*args: Any) -> Any:
        calls.append(1)
        return broken() if len(calls) == 1 else original(*args)

    engine.chat("c", FACT + QUESTION, FACT, max_tokens=3)
    engine.encode("e", [4, 5] + list(range(600, 610)), (2, 12))
    engine.add("plain", [1, 2, 3])
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, once)
        output = engine.step()
    assert set(output.num_scheduled_tokens) == {"c", "e", "plain"}
    orders = output.kv_connector_metadata.orders
    assert orders.step == 0
    assert orders.injection == ()
    assert orders.capture == ()
    assert len(orders.failed_blocks) == 3
    engine.run()
    assert engine.finish_reasons == {"encode": "length", "c": "error", "e": "length", "plain": "length"}
    assert errors(engine) == 1
    check_nothing_left(engine)
    engine.chat("c2", FACT + QUESTION, FACT)
    engine.run()
    assert engine.outcomes["c2"]["injected_tokens"] == 30, (
        "the prefix cache holds nothing of the failed request"
    )


def test_a_request_whose_blocks_were_missed_captures_nothing_more(
    make_engine: Make, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error in `_follow_blocks` the block lists of open requests may have a hole."""
    engine = make_engine(runner=runner, max_batched_tokens=16)
    engine.encode("e", [3] + FACT + OTHER, (1, 31), (31, 48))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.side, "_follow_blocks", broken)
        engine.step()
    engine.run()
    assert engine.side.counters.captures == 0
    assert errors(engine) == 1
    check_nothing_left(engine)


def test_prefix_cache_blocks_in_front_of_a_broken_claim_are_not_failed(
    engine: SymbolicEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.chat("good", FACT + [1], FACT, max_tokens=40)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.side.table, "touch", broken)
        engine.chat("bad", FACT + OTHER + QUESTION, FACT, OTHER)
        engine.step()
    engine.run()
    assert engine.finish_reasons["bad"] == "error"
    assert engine.finish_reasons["good"] == "length", "it shares the first block with the broken request"
    check_nothing_left(engine)


def test_completing_fails(engine: SymbolicEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.side, "complete", broken)
    engine.encode("c", [4, 5] + list(range(600, 610)), (2, 12))
    engine.run()
    assert engine.finish_reasons["c"] == "length"
    assert errors(engine) == 1


def test_finishing_fails(engine: SymbolicEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferscale.connector.scheduler.outcome_of", broken)
    engine.chat("c", FACT + QUESTION, FACT)
    engine.run()
    assert engine.outcomes["c"] is None
    assert errors(engine) >= 1


def test_an_order_fails(engine: SymbolicEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine.side.table, "drop", broken)
        engine.order("f", Order("forget", (key_of(FACT),)))
        engine.step()
    engine.run()
    assert engine.finish_reasons["f"] == "length"
    assert "answer" not in (engine.outcomes["f"] or {}), "the front end must not take it for done"
    check_nothing_left(engine)


def test_the_worker_cannot_inject(engine: SymbolicEngine) -> None:
    """Blocks that the worker reports as failed end the request, and leave vLLM's prefix cache."""
    engine.chat("c", FACT + QUESTION, FACT)
    output = engine.schedule()
    blocks = engine.scheduler.kv_cache_manager.get_block_ids("c")[0]
    output.kv_connector_metadata.orders.injection = ()
    engine.worker.failed_blocks.update(blocks[:2])
    engine.drain()
    engine.run()
    assert engine.finish_reasons["c"] == "error"
    engine.check_idle()
    engine.chat("again", FACT + QUESTION, FACT)
    engine.run()
    assert engine.outcomes["again"]["cached_tokens"] == 0
    assert engine.outcomes["again"]["injected_tokens"] == 30


def test_resetting_fails(engine: SymbolicEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.side.table, "clear", broken)
    assert engine.connector.reset_cache() is False
    assert errors(engine) == 1
    check_nothing_left(engine)


def test_shutting_down_fails(engine: SymbolicEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(engine.runtime_dir) / "run"
    with monkeypatch.context() as patch:
        patch.setattr(engine.connector._server, "close", broken)
        engine.connector.shutdown()
    assert errors(engine) == 1
    assert not (folder / LOCK_NAME).exists(), "the next engine must be able to use the folder"
    engine.connector.shutdown()
    assert errors(engine) == 1


def test_each_failure_says_what_becomes_of_the_request(
    engine: SymbolicEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("inferscale"), "propagate", True)
    with monkeypatch.context() as patch:
        patch.setattr("inferscale.connector.scheduler.locate", broken)
        engine.chat("matching", OTHER + QUESTION, OTHER)
        engine.run()
    with monkeypatch.context() as patch:
        patch.setattr(engine.side.table, "touch", broken)
        engine.chat("claiming", FACT + QUESTION, FACT)
        engine.run()
    with monkeypatch.context() as patch:
        patch.setattr(engine.side, "_build_injection", broken)
        engine.chat("building", FACT + QUESTION, FACT)
        engine.step()
    engine.run()
    messages = [r.getMessage() for r in caplog.records if r.name == "inferscale.connector.connector"]
    assert len(messages) == 3
    assert "matching: its plan could not be matched; its prompt is prefilled." in messages[0]
    assert "claiming fails: vLLM counts on 30 tokens" in messages[1]
    assert "requests that claimed memory in it fail" in messages[2]


def test_hooks_survive_nonsense(engine: SymbolicEngine) -> None:
    connector = engine.connector

    class Request:
        request_id = "r"

    assert connector.get_num_new_matched_tokens(Request(), 0) == (0, False)
    connector.update_state_after_alloc(Request(), None, 0)
    connector.update_connector_output(None)
    assert connector.request_finished(Request(), []) == (False, None)
    assert errors(engine) == 2


def test_ids_outside_int32_in_a_prompt(engine: SymbolicEngine) -> None:
    request = engine.add("c", [1, 2**31, 3], engine.plan(segments=(Segment("k", (3,)),)))
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert errors(engine) == 1


def test_reports_of_ranks_are_merged() -> None:
    merged = StepReport({1}, set()).merge(StepReport({1, 2}, {1})).merge(StepReport({1}, set()))
    assert (merged.done, merged.failed_captures) == ({1, 2}, {1})


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"runtime_dir": None}, "runtime_dir .* is null; give the path of a folder, or leave it out"),
        ({"runtime_dir": 5}, "runtime_dir is 5"),
        ({"page_size_tokens": "16"}, "page_size_tokens is '16'"),
        ({"compile_injection": "false"}, "compile_injection is 'false'"),
        ({"pool_size_bytes": None}, "pool_size_bytes is None"),
        ({"pool_size": 1}, "kv_connector_extra_config has unknown settings pool_size"),
    ],
)
def test_settings_of_vllms_flag_that_are_wrong_are_refused(settings: dict[str, Any], match: str) -> None:
    transfer = SimpleNamespace(kv_connector_extra_config=settings, engine_id="e")
    with pytest.raises(InvalidConfig, match=match):
        connector_config(transfer.kv_connector_extra_config, transfer.engine_id)


def test_settings_that_are_left_out_have_defaults() -> None:
    config = connector_config(None, "e")
    assert config == ConnectorConfig(runtime_dir=default_runtime_dir("e"))


def test_a_pool_below_one_page_says_what_to_set(make_engine: Make) -> None:
    with pytest.raises(InvalidConfig, match=r"pool_size_bytes is 255; .* 256 bytes. Set .* at least 16384"):
        make_engine(pool_size_bytes=255)


def test_without_injection_there_is_one_page_and_nothing_below(
    make_engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a model keeps, it is not looked at."""
    monkeypatch.setattr("inferscale.connector.compat.cache_shape", broken)
    engine = make_engine(
        injection_path="none",
        pool_dtype="int8",
        host_size_bytes=2**20,
        disk_size_bytes=2**20,
        disk_dir=str(tmp_path),
        cold_location=str(tmp_path / "shared"),
    )
    assert engine.side.table.num_pages == 1
    assert engine.side.tiering is None
    connector = engine.connector
    connector.register_kv_caches({})
    connector.start_load_kv(None)
    connector.wait_for_save()
    assert connector.get_block_ids_with_load_errors() == set()
    assert connector.build_connector_worker_meta() is None
    connector.update_state_after_alloc(None, None, 0)
