"""The server's own tail and order, of chats that name none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_server_prefetch import ANA, Parts, run

from fakes import open_memory
from inferscale.chat_plan import PreparedChat
from inferscale.config import DEFAULT_TAIL
from inferscale.errors import InvalidConfig
from inferscale.server import chat
from inferscale.server.ask import take_ask
from inferscale.server.keys import OPERATOR
from inferscale.server.service import MemoryService
from inferscale.server_config import ServerConfig
from inferscale.tail import NO_TAIL, Tail

QUESTION = [{"role": "user", "content": "one?"}]
TALK = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi."}, *QUESTION]


def chats(
    folder: Path, *asked: tuple[list[dict[str, Any]], Tail | None], **settings: Any
) -> list[tuple[PreparedChat, set[str]]]:
    """Chats about two encoded facts, and the facts that are to be encoded for the next ones. settings: of the
    server."""
    found: list[tuple[PreparedChat, set[str]]] = []

    async def talk(parts: Parts) -> None:
        put: list[set[str]] = []
        parts.front.server = ServerConfig(**settings)
        head = parts.encoder.head_key(parts.prompts.head_ids())
        parts.connector.there = {head, *parts.keys(0, 1)}
        service = MemoryService(parts.front, memory, parts.encoder, parts.connector, parts.engine)  # type: ignore[arg-type]
        service._encoding.put_missing = lambda scope, fact_ids: put.append(set(fact_ids))  # type: ignore[method-assign]
        for messages, tail in asked:
            draft = parts.prompts.draft(messages)
            prepared = await service.prepare(draft, OPERATOR, ANA, 2, "inject", tail, 16)
            found.append((prepared, put.pop() if put else set()))
        parts.connector.there.discard(parts.keys(0)[0])
        prepared = await service.prepare(
            parts.prompts.draft(QUESTION), OPERATOR, ANA, 2, "inject", Tail(1), 16
        )
        assert put.pop() == {parts.facts[0].id}, "recomputed now, and injected from the next chat on"
        assert prepared.plan is not None
        await service.gate.close()
        await service._threads.close()

    with open_memory(folder) as memory:
        run(memory, talk)
    return found


def num_facts(chat: tuple[PreparedChat, set[str]]) -> int:
    """That are injected."""
    assert chat[1] == set()
    assert chat[0].plan is not None
    return sum(segment.kind == "fact" for segment in chat[0].plan.segments)


def test_it_holds_where_nothing_was_said_before(tmp_path: Path) -> None:
    found = chats(tmp_path, (QUESTION, None), (TALK, None), (QUESTION, NO_TAIL), (TALK, Tail(1)))
    assert [num_facts(one) for one in found] == [1, 2, 2, 1]


def test_it_is_a_setting(tmp_path: Path) -> None:
    (chat,) = chats(tmp_path, (QUESTION, None), tail=0)
    assert num_facts(chat) == 2
    assert ServerConfig().tail == DEFAULT_TAIL
    for bad in ("x", -1, None, True, "5;10%"):
        with pytest.raises(InvalidConfig, match=r"server.tail is .*; allowed are a whole number of facts"):
            ServerConfig(tail=bad)  # type: ignore[arg-type]


def texts(chat: tuple[PreparedChat, set[str]]) -> list[str]:
    return [candidate.fact.text for candidate in chat[0].choice.front]


def test_the_order_is_a_setting(tmp_path: Path) -> None:
    (best_last,) = chats(tmp_path / "one", (QUESTION, NO_TAIL))
    (in_time,) = chats(tmp_path / "two", (QUESTION, NO_TAIL), order="chronological")
    assert texts(in_time) == texts(best_last)[::-1]
    with pytest.raises(InvalidConfig, match=r"server.order is 'best'; allowed are best-last, chronological"):
        ServerConfig(order="best")  # type: ignore[arg-type]


def test_the_order_of_a_chat_is_in_its_messages(tmp_path: Path) -> None:
    async def talk(parts: Parts) -> None:
        service = MemoryService(parts.front, memory, parts.encoder, parts.connector, parts.engine)  # type: ignore[arg-type]
        service.front.accepts_ids = False  # type: ignore[misc]
        lines: dict[str, list[int]] = {}
        for order in ("best-last", "chronological"):
            asked = {"user_id": "ana", "mode": "text", "tail": 0, "order": order}
            body: dict[str, Any] = {"messages": [dict(QUESTION[0])], "memory": asked, "max_tokens": 8}
            ask = take_ask(body, parts.front.server)
            assert ask is not None
            await chat.begin(service, OPERATOR, body, ask)
            written = str(body["messages"])
            lines[order] = [written.index(fact.text) for fact in parts.facts]
        assert lines["chronological"] == sorted(lines["chronological"]) != lines["best-last"]
        await service.gate.close()
        await service._threads.close()

    with open_memory(tmp_path) as memory:
        run(memory, talk)
