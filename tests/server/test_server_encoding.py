"""Which encode passes the server asks for, and how one runs: with an engine that only notes them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stand_ins import FRONT, Connector, Engine

from fakes import open_memory
from inferscale.encoder import Encoder
from inferscale.facts import Scope
from inferscale.memory import Memory
from inferscale.prompt import PromptBuilder
from inferscale.server import gate
from inferscale.server.encoding import Encoding
from inferscale.server.metrics import Metrics
from inferscale.server.threads import Threads
from inferscale.windows import WindowPolicy
from test_prompt import CHATML, tokenizer_with

ANA = Scope("ana")


class Parts:
    """An `Encoding` of a memory, in a running loop."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.engine = Engine()
        self.connector = Connector()
        self.threads = Threads()
        self.use_model("m")

    def use_model(self, model: str, mixed: int = 0) -> None:
        prompts = PromptBuilder(tokenizer_with(CHATML))
        self.encoder = Encoder(self.memory.catalog, prompts, model, WindowPolicy(2, 9, mixed), 4000)
        given: Any = (FRONT, self.encoder, self.connector, self.engine, self.threads, Metrics())
        self.encoding = Encoding(*given)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    with open_memory(tmp_path) as memory:
        yield memory


def with_parts(memory: Memory, test: Callable[[Parts], Awaitable[None]]) -> Parts:
    async def run() -> Parts:
        parts = Parts(memory)
        try:
            await test(parts)
        finally:
            await parts.encoding.gate.close()
            await parts.threads.close()
        return parts

    return asyncio.run(run())


def test_new_facts_are_encoded_whole_where_nobody_chats(memory: Memory) -> None:
    facts = memory.add([f"fact {number} of many words here" for number in range(9)], user_id="ana")

    async def test(parts: Parts) -> None:
        parts.encoding.put_new(ANA, facts[:3])
        parts.encoding.put_new(ANA, facts[3:])
        await parts.encoding.gate.drained()
        assert len(parts.engine.ran) == 1
        parts.encoding.put_new(ANA, facts)
        await parts.encoding.gate.drained()
        assert len(parts.engine.ran) == 1, "nothing is new"

    with_parts(memory, test)


def test_after_a_change_of_model_what_is_used_is_encoded_and_not_all(memory: Memory) -> None:
    facts = memory.add([f"fact {number} of many words" for number in range(90)], user_id="ana")

    async def test(parts: Parts) -> None:
        parts.encoder.new_jobs(ANA)  # by the model before
        parts.use_model("another")
        new = memory.add("one fact more", user_id="ana")
        parts.encoding.put_new(ANA, new)
        await parts.encoding.gate.drained()
        assert len(parts.engine.ran) == 1
        parts.encoding.put_missing(ANA, {facts[0].id, facts[50].id})
        await parts.encoding.gate.drained()
        assert len(parts.engine.ran) == 3
        assert len(parts.encoder.keys(fact.id for fact in [*facts, *new])) < 30
        assert parts.encoder.keys([new[0].id, facts[0].id, facts[50].id]).keys() == {
            new[0].id, facts[0].id, facts[50].id,
        }  # fmt: skip

    with_parts(memory, test)


def test_a_pass_runs_in_parts_of_whole_blocks_beside_chats(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "HOLD_S", 0.0)
    memory.add([f"fact {number} " + "of many words here " * 9 for number in range(9)], user_id="ana")

    async def test(parts: Parts) -> None:
        [job] = parts.encoder.new_jobs(ANA)
        with parts.encoding.gate.chatting():
            await parts.encoding._encode((job,))
        *before, last = parts.engine.ran
        assert last == len(job.token_ids)
        assert before == [end for end in range(128, last, 128) if end > job.captures[0].end]
        assert len(before) > 1

    with_parts(memory, test)


def test_a_pass_ends_where_its_facts_were_deleted_between_two_parts(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "HOLD_S", 0.0)
    facts = memory.add([f"fact {number} " + "of many words here " * 9 for number in range(9)], user_id="ana")

    async def test(parts: Parts) -> None:
        [job] = parts.encoder.new_jobs(ANA)
        run = parts.engine.run

        async def run_and_delete(*given: Any) -> dict[str, Any]:
            memory.delete(facts[8].id)
            return await run(*given)

        parts.engine.run = run_and_delete  # type: ignore[method-assign]
        with parts.encoding.gate.chatting():
            await parts.encoding._encode((job,))
        [num_tokens] = parts.engine.ran
        assert num_tokens < len(job.token_ids)

    with_parts(memory, test)


@pytest.mark.parametrize("chats", [False, True])
def test_the_directions_of_mixed_passes_run_one_after_the_other(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, chats: bool
) -> None:
    """Also where four passes run at once, and where each runs in parts."""
    monkeypatch.setattr(gate, "HOLD_S", 0.0)
    facts = memory.add([f"fact {number} " + "of many words here " * 9 for number in range(24)], user_id="ana")

    async def test(parts: Parts) -> None:
        parts.use_model("m", mixed=8)
        run, half, num_running = parts.engine.run, set(), [0]
        order: list[int] = []

        async def slowly(token_ids: Any, plan: Any) -> dict[str, Any]:
            spans = [span for span in plan.captures if span.part]
            assert all(span.key in half for span in spans if span.part == 2)
            num_running.append(num_running[-1] + 1)
            for _ in range(3 if order else 9):
                await asyncio.sleep(0)
            half.update(span.key for span in spans if span.part == 1)
            num_running.append(num_running[-1] - 1)
            order.extend({span.part for span in spans})
            return await run(token_ids, plan)

        parts.engine.run = slowly  # type: ignore[method-assign]
        encoded = parts.encoding._metrics.encoded
        before = encoded._value.get()
        parts.encoding.put_new(ANA, facts)
        if chats:
            with parts.encoding.gate.chatting():
                await parts.encoding.gate.drained()
        else:
            await parts.encoding.gate.drained()
        assert (len(parts.engine.ran) > 6, max(num_running) > 1) == (chats, not chats)
        assert len(half) == encoded._value.get() - before == 24
        assert sorted(set(order)) == [1, 2]

    with_parts(memory, test)


def test_what_mixed_passes_replace_leaves_the_pool(memory: Memory) -> None:
    facts = memory.add(["one", "two", "three"], user_id="ana")

    async def test(parts: Parts) -> None:
        parts.use_model("m", mixed=8)
        parts.encoding.put_new(ANA, facts)
        await parts.encoding.gate.drained()
        keys = parts.encoder.keys(fact.id for fact in facts)
        parts.connector.there = {*keys.values(), parts.encoder.anchor_key}
        assert parts.engine.orders == []
        more = await parts.threads.run(lambda: memory.add([f"more {n}" for n in range(5)], user_id="ana"))
        parts.encoding.put_new(ANA, more)
        await parts.encoding.gate.drained()
        [order] = parts.engine.orders
        assert (order.op, set(order.keys), order.epochs) == ("forget", set(keys.values()), ())

    with_parts(memory, test)


def test_what_mixed_passes_do_not_capture_whole_is_not_replaced(memory: Memory) -> None:
    facts = memory.add(["one", "two", "three"], user_id="ana")

    async def test(parts: Parts) -> None:
        parts.use_model("m", mixed=8)
        parts.encoding.put_new(ANA, facts)
        await parts.encoding.gate.drained()
        keys = parts.encoder.keys(fact.id for fact in facts)
        parts.connector.there = {*keys.values(), parts.encoder.anchor_key}
        more = await parts.threads.run(lambda: memory.add([f"more {n}" for n in range(5)], user_id="ana"))
        parts.engine.loses = 1
        parts.encoding.put_new(ANA, more)
        await parts.encoding.gate.drained()
        assert parts.engine.orders == []
        assert parts.encoder.keys(fact.id for fact in facts) == keys
        parts.engine.loses = 0
        parts.encoding.put_all(ANA)
        await parts.encoding.gate.drained()
        [order] = parts.engine.orders
        assert set(order.keys) == set(keys.values())

    with_parts(memory, test)


@pytest.mark.parametrize("mixed", [0, 8])
def test_facts_whose_passes_a_deletion_has_overtaken_are_planned_again(memory: Memory, mixed: int) -> None:
    facts = memory.add([f"fact {number} of many words here" for number in range(60)], user_id="ana")

    async def test(parts: Parts) -> None:
        parts.use_model("m", mixed=mixed)
        run, deleted = parts.engine.run, False

        async def run_and_delete(token_ids: Any, plan: Any) -> dict[str, Any]:
            nonlocal deleted
            if not deleted:
                deleted = True
                forgotten.update(await parts.threads.run(lambda: memory.catalog.delete(facts[50].id).keys))
            keys = {span.key for span in plan.captures if span.part != 1}
            parts.connector.there |= keys - forgotten
            return await run(token_ids, plan)

        forgotten: set[str] = set()
        parts.engine.run = run_and_delete  # type: ignore[method-assign]
        parts.encoding.put_new(ANA, facts)
        await parts.encoding.gate.drained()
        keys = parts.encoder.keys(fact.id for fact in facts)
        assert len(keys) == 59
        assert set(keys.values()) <= parts.connector.there

    with_parts(memory, test)


@pytest.mark.parametrize(("loses", "counted"), [(0, 3), (1, 0)])
def test_facts_count_as_encoded_once_all_of_their_pass_is_captured(
    memory: Memory, loses: int, counted: int
) -> None:
    facts = memory.add(["one", "two", "three"], user_id="ana")

    async def test(parts: Parts) -> None:
        encoded = parts.encoding._metrics.encoded
        before = encoded._value.get()
        parts.engine.loses = loses
        parts.encoding.put_new(ANA, facts)
        await parts.encoding.gate.drained()
        assert encoded._value.get() - before == counted

    with_parts(memory, test)


def test_what_several_chats_missed_is_encoded_in_one_go(memory: Memory) -> None:
    facts = memory.add(["one", "two", "three"], user_id="ana")

    async def test(parts: Parts) -> None:
        parts.encoder.new_jobs(ANA)  # recorded, and the pool has lost it
        with parts.encoding.gate.chatting():
            parts.encoding.put_missing(ANA, {facts[0].id})
            parts.encoding.put_missing(ANA, {facts[2].id})
        await parts.encoding.gate.drained()
        assert len(parts.engine.ran) == 1
        assert parts.encoding._missing == {}

    with_parts(memory, test)


def test_a_head_that_the_pool_lacks_is_encoded_for_the_next_chat(memory: Memory) -> None:
    async def test(parts: Parts) -> None:
        ask = parts.encoding.ask_resident
        assert (await parts.threads.run(ask, (1, 2), "head", ["a"])).keys == set(), "an empty pool"
        parts.connector.there = {"a"}
        found = await parts.threads.run(ask, (1, 2), "head", ["a"])
        assert found.keys == set()
        assert found.reason == "the system text is being encoded"
        await parts.encoding.gate.drained()
        assert parts.engine.ran == [2]
        parts.connector.there = {"a", "head"}
        assert (await parts.threads.run(ask, (1, 2), "head", ["a", "b"])).keys == {"a", "head"}
        assert parts.engine.ran == [2]

    with_parts(memory, test)


def test_a_connector_that_does_not_answer_costs_injection_only(
    memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    [fact] = memory.add("one", user_id="ana")

    async def test(parts: Parts) -> None:
        [job] = parts.encoder.new_jobs(ANA)
        parts.connector.there = {span.key for span in job.captures}
        assert await parts.threads.run(parts.encoding.injectable, [fact]) == {fact.id}
        parts.connector.is_gone = True
        assert await parts.threads.run(parts.encoding.injectable, [fact]) == set()
        found = await parts.threads.run(parts.encoding.ask_resident, (1, 2), "head", ["a"])
        assert found.keys == set()
        assert found.reason is not None

    with caplog.at_level(logging.WARNING):
        with_parts(memory, test)
    assert len(caplog.records) == 2
