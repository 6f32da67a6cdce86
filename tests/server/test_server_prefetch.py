"""When the server loads KV ahead of chats: with an engine that only notes its orders."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stand_ins import Connector, Engine

from fakes import open_memory
from inferscale.config import ConnectorConfig
from inferscale.encoder import Encoder
from inferscale.facts import Scope
from inferscale.memory import Memory
from inferscale.plan import Order
from inferscale.prompt import PromptBuilder
from inferscale.server import prefetch as prefetch_module
from inferscale.server.keys import OPERATOR
from inferscale.server.prefetch import SESSION_PAUSE_S, Prefetch
from inferscale.server.service import MemoryService
from inferscale.server.threads import Threads
from inferscale.server_config import ServerConfig
from inferscale.windows import WindowPolicy
from test_prompt import CHATML, tokenizer_with

ANA, BEN = Scope("ana"), Scope("ben")


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    with open_memory(tmp_path) as memory:
        yield memory


class Parts:
    """Two facts of Ana, one of Ben; all have KV below the pool."""

    def __init__(self, memory: Memory, **settings: Any) -> None:
        self.engine, self.connector, self.threads = Engine(), Connector(), Threads()
        self.facts = memory.add(["one", "two"], user_id="ana")
        memory.add("three", user_id="ben")
        self.prompts = PromptBuilder(tokenizer_with(CHATML))
        self.encoder = Encoder(memory.catalog, self.prompts, "m", WindowPolicy(2, 9), 4000)
        self.encoder.new_jobs(Scope())
        ids = [fact.id for fact in memory.catalog.facts(Scope())]
        self.key_of = self.encoder.keys(ids)
        self.connector.loadable = set(self.key_of.values())
        config = ConnectorConfig(**{"host_size_bytes": 1000, **settings})
        self.front: Any = SimpleNamespace(
            server=ServerConfig(),
            connector=config,
            max_model_len=4096,
            block_size=16,
            is_on_gpu=False,
            caches_prefixes=False,
            adapter=lambda name: None,
        )
        connector: Any = self.connector
        engine: Any = self.engine
        self.prefetch = Prefetch(self.front, self.encoder, connector, engine, self.threads)

    @property
    def loaded(self) -> list[tuple[str, ...]]:
        """The keys of each order so far."""
        assert all(order.op == "prefetch" for order in self.engine.orders)
        return [order.keys for order in self.engine.orders]

    def keys(self, *numbers: int) -> tuple[str, ...]:
        return tuple(self.key_of[self.facts[number].id] for number in numbers)

    async def done(self) -> None:
        while self.prefetch._running:
            await asyncio.gather(*self.prefetch._running.values())


def run(memory: Memory, talk: Callable[[Parts], Any], **settings: Any) -> None:
    async def whole() -> None:
        parts = Parts(memory, **settings)
        await talk(parts)
        await parts.prefetch.close()
        await parts.threads.close()

    asyncio.run(asyncio.wait_for(whole(), 60))


def test_the_newest_facts_where_a_user_begins(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [time.monotonic()]
    monkeypatch.setattr(prefetch_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def talk(parts: Parts) -> None:
        parts.prefetch.put(ANA)
        await parts.done()
        assert parts.loaded == [parts.keys(1, 0)]
        for _ in range(3):  # as long as pauses are short
            now[0] += SESSION_PAUSE_S
            parts.prefetch.put(ANA)
            await parts.done()
        assert len(parts.loaded) == 1
        parts.prefetch.put(BEN)
        await parts.done()
        assert len(parts.loaded) == 2
        now[0] += SESSION_PAUSE_S + 1
        parts.prefetch.put(ANA)
        await parts.done()
        assert parts.loaded[2:] == [parts.keys(1, 0)]

    run(memory, talk)


def test_what_a_search_found(memory: Memory) -> None:
    async def talk(parts: Parts) -> None:
        parts.prefetch.put(ANA, [parts.facts[0].id])
        await parts.done()
        assert parts.loaded == [parts.keys(0, 1)]  # it is the first request as well
        parts.prefetch.put(ANA, [parts.facts[1].id])
        await parts.done()
        assert parts.loaded[1:] == [parts.keys(1)]

    run(memory, talk)


def test_nothing_is_ordered_where_nothing_is_below(memory: Memory) -> None:
    async def talk(parts: Parts) -> None:
        parts.connector.loadable = set()
        parts.prefetch.put(ANA, [parts.facts[0].id])
        await parts.done()
        assert parts.loaded == []

    run(memory, talk)


def test_nothing_is_done_without_lower_tiers(memory: Memory) -> None:
    async def talk(parts: Parts) -> None:
        parts.prefetch.put(ANA, [parts.facts[0].id])
        assert not parts.prefetch._running

    run(memory, talk, host_size_bytes=0)


def test_one_at_a_time_for_a_scope_and_of_searches_the_last(memory: Memory) -> None:
    async def talk(parts: Parts) -> None:
        order, can_end = parts.engine.order, asyncio.Event()
        num_running = [0]

        async def slowly(given: Order) -> dict[str, Any]:
            num_running[0] += 1
            await can_end.wait()
            num_running[0] -= 1
            return await order(given)

        parts.engine.order = slowly  # type: ignore[method-assign]
        parts.prefetch.put(ANA)
        while not num_running[0]:
            await asyncio.sleep(0)
        for number in (0, 1, 0):
            parts.prefetch.put(ANA, [parts.facts[number].id])
        parts.prefetch.put(BEN)
        while num_running[0] < 2:  # another scope does not wait
            await asyncio.sleep(0)
        assert len(parts.prefetch._running) == 2
        can_end.set()
        await parts.done()
        of_ana = [keys for keys in parts.loaded if set(keys) <= set(parts.keys(0, 1))]
        assert of_ana == [parts.keys(1, 0), parts.keys(0)]

    run(memory, talk)


@pytest.mark.parametrize("part", ["engine", "connector"])
def test_errors_are_logged_and_the_next_one_runs(
    memory: Memory, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    async def talk(parts: Parts) -> None:
        getattr(parts, part).is_gone = True
        parts.prefetch.put(ANA, [parts.facts[0].id])
        await parts.done()
        assert "KV was not loaded ahead of a chat: gone" in caplog.text
        getattr(parts, part).is_gone = False
        parts.prefetch.put(ANA, [parts.facts[0].id])
        await parts.done()
        assert parts.loaded == [parts.keys(0)]

    with caplog.at_level(logging.WARNING):
        run(memory, talk)


def test_a_bug_is_logged_with_its_traceback(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    async def talk(parts: Parts) -> None:
        def fail(keys: Sequence[str]) -> list[bool]:
            raise ZeroDivisionError("a bug")

        parts.connector.below = fail  # type: ignore[method-assign]
        parts.prefetch.put(ANA)
        await parts.done()
        assert "ZeroDivisionError: a bug" in caplog.text

    run(memory, talk)


def test_so_many_scopes_are_known(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch_module, "MAX_SEEN", 2)

    async def talk(parts: Parts) -> None:
        for scope in (ANA, BEN, ANA, Scope("cy"), ANA):  # Ben is forgotten, Ana is not
            parts.prefetch.put(scope)
            await parts.done()
        assert len(parts.loaded) == 2
        parts.prefetch.put(BEN)
        await parts.done()
        assert len(parts.loaded) == 3
        assert len(parts.prefetch._seen) == 2

    run(memory, talk)


def test_what_runs_at_the_end_is_given_up(memory: Memory) -> None:
    async def talk(parts: Parts) -> None:
        has_begun = asyncio.Event()

        async def hangs(given: Order) -> dict[str, Any]:
            has_begun.set()
            await asyncio.Event().wait()
            raise AssertionError

        parts.engine.order = hangs  # type: ignore[method-assign]
        parts.prefetch.put(ANA)
        await has_begun.wait()
        parts.prefetch.put(ANA, [parts.facts[0].id])

    run(memory, talk)


def test_searches_and_chats_of_the_service(memory: Memory) -> None:
    async def talk(parts: Parts) -> None:
        def asked() -> list[tuple[Scope, list[str]]]:
            found, put[:] = list(put), []
            return found

        put: list[tuple[Scope, list[str]]] = []
        service = MemoryService(parts.front, memory, parts.encoder, parts.connector, parts.engine)  # type: ignore[arg-type]
        service._prefetch.put = lambda scope, fact_ids=(): put.append((scope, list(fact_ids)))  # type: ignore[method-assign]
        hits = await service.search(OPERATOR, ANA, "one", 1)
        assert asked() == [(ANA, [hits[0][0].fact.id])]
        draft = parts.prompts.draft([{"role": "user", "content": "one?"}])
        await service.prepare(draft, OPERATOR, ANA, 1, "inject", None, 16)
        assert asked() == [(ANA, [])]
        await service.prepare(draft, OPERATOR, ANA, 1, "text", None, 16)
        service.injects = False
        await service.search(OPERATOR, ANA, "one", 1)
        assert asked() == []
        await service.gate.close()
        await service._threads.close()

    run(memory, talk)
