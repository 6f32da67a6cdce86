"""What the engine is told of deletions: with one that only notes its orders."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stand_ins import FRONT, Connector, Engine

from fakes import open_memory
from inferscale.catalog import ScopeEpoch
from inferscale.chat_plan import digest_of
from inferscale.encoder import Encoder
from inferscale.errors import EngineError
from inferscale.facts import Scope
from inferscale.memory import Memory
from inferscale.plan import Order
from inferscale.prompt import PromptBuilder
from inferscale.server import forgetting
from inferscale.server.encoding import Encoding
from inferscale.server.forgetting import Forgetting
from inferscale.server.metrics import Metrics
from inferscale.server.threads import Threads
from inferscale.windows import WindowPolicy
from test_prompt import CHATML, tokenizer_with

ANA = Scope("ana")


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    with open_memory(tmp_path) as memory:
        yield memory


class Parts:
    def __init__(self, memory: Memory) -> None:
        self.engine = Engine()
        self.connector = Connector()
        prompts = PromptBuilder(tokenizer_with(CHATML))
        encoder = Encoder(memory.catalog, prompts, "m", WindowPolicy(2, 9), 4000)
        threads, metrics = Threads(), Metrics()
        engine: Any = self.engine
        connector: Any = self.connector
        self.encoding = Encoding(FRONT, encoder, connector, engine, threads, metrics)
        self.forgetting = Forgetting(memory, engine, self.encoding, threads, metrics)
        self.close = threads.close


def test_epochs_go_before_keys_in_orders_of_bounded_size(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forgetting, "_ORDERED_AT_ONCE", 3)
    keys = [f"k{number}" for number in range(7)]
    epochs = [ScopeEpoch(Scope(f"user {number}"), number) for number in range(4)]
    told = tuple((digest_of(item.scope), item.epoch) for item in epochs)

    async def run() -> None:
        parts = Parts(memory)
        await parts.forgetting.forget((), ())
        assert parts.engine.orders == []
        await parts.forgetting.forget(keys[:2], epochs[:1])
        assert parts.engine.orders == [Order("forget", ("k0", "k1"), told[:1])]
        parts.engine.orders.clear()
        await parts.forgetting.forget(keys, epochs)
        assert parts.engine.orders == [
            Order("forget", epochs=told[:3]),
            Order("forget", epochs=told[3:]),
            Order("forget", ("k0", "k1", "k2")),
            Order("forget", ("k3", "k4", "k5")),
            Order("forget", ("k6",)),
        ]
        await parts.close()

    asyncio.run(run())


def test_earlier_turns_of_the_scope_go_too(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        parts = Parts(memory)
        monkeypatch.setattr(
            parts.encoding, "forget_turns", lambda scopes: [f"turn of {scope.user_id}" for scope in scopes]
        )
        await parts.forgetting.forget(["k"], [ScopeEpoch(ANA, 1)])
        [order] = parts.engine.orders
        assert order.keys == ("k", "turn of ana")
        await parts.close()

    asyncio.run(run())


def test_a_deletion_holds_although_the_engine_is_gone(
    memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        parts = Parts(memory)
        parts.engine.is_gone = True
        await parts.forgetting.forget(["k"], [ScopeEpoch(ANA, 1)])
        await parts.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    assert "was not told of a deletion" in caplog.text


def test_an_order_that_fails_once_the_caller_left_is_logged(
    memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        parts = Parts(memory)
        has_begun, can_end = asyncio.Event(), asyncio.Event()

        async def fails(given: Order) -> dict[str, Any]:
            has_begun.set()
            await can_end.wait()
            raise EngineError("gone")

        parts.engine.order = fails  # type: ignore[method-assign]
        task = asyncio.create_task(parts.forgetting.forget(["k"], ()))
        await has_begun.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        can_end.set()
        while not caplog.text:
            await asyncio.sleep(0)
        await parts.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(asyncio.wait_for(run(), 30))
    assert "was not told of a deletion" in caplog.text


def test_the_engine_is_told_although_the_caller_left(memory: Memory) -> None:
    async def run() -> None:
        parts = Parts(memory)
        order, has_begun, can_end = parts.engine.order, asyncio.Event(), asyncio.Event()

        async def slowly(given: Order) -> dict[str, Any]:
            has_begun.set()
            await can_end.wait()
            return await order(given)

        parts.engine.order = slowly  # type: ignore[method-assign]
        task = asyncio.create_task(parts.forgetting.forget(["k"], ()))
        await has_begun.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        can_end.set()
        while not parts.engine.orders:
            await asyncio.sleep(0)
        await parts.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_strays_go_at_the_start_and_where_another_process_wrote(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(forgetting, "_STRAYS_EVERY_S", 0.0)
    [kept, gone] = memory.add(["one", "two"], user_id="ana")
    memory.catalog.passes.record("m", ANA, [], [kept.id, gone.id], ["kept", "gone"])

    async def run() -> None:
        parts = Parts(memory)
        parts.connector.on_disk = ["kept", "gone", "of nobody", parts.encoding._encoder.anchor_key]
        looks: list[None] = []
        strays = parts.encoding.strays

        def look() -> list[str]:
            looks.append(None)
            return strays()

        parts.encoding.strays = look  # type: ignore[method-assign]
        parts.forgetting.watch_strays()
        while not parts.engine.orders:
            await asyncio.sleep(0)
        assert parts.engine.orders == [Order("forget", ("of nobody",))]
        memory.add("three", user_id="ana")  # this process tells the engine by itself
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(looks) == 1
        parts.connector.is_gone = True
        with open_memory(tmp_path) as other:
            other.delete(gone.id)
        while len(looks) < 2:
            await asyncio.sleep(0)
        while "could not be compared" not in caplog.text:
            await asyncio.sleep(0)
        parts.connector.is_gone = False  # it looks again, although nobody wrote
        while len(parts.engine.orders) < 2:
            await asyncio.sleep(0)
        assert set(parts.engine.orders[1].keys) == {"gone", "of nobody"}
        num_looks = len(looks)
        parts.engine.is_gone = True
        await parts.forgetting.forget(["kept"], ())
        parts.engine.is_gone = False
        while len(looks) == num_looks:  # the engine was not told: what it keeps on disk is compared
            await asyncio.sleep(0)
        parts.forgetting.close()
        await parts.close()

    asyncio.run(asyncio.wait_for(run(), 60))
