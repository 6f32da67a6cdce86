"""What MemoryLLM tells its engine of core blocks and of what has expired; the engine is a stand-in."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fakes import ANA, open_memory
from inferscale.chat_plan import digest_of
from inferscale.facts import Scope
from inferscale.memory_llm import MemoryLLM
from inferscale.plan import Order


def test_orders_to_forget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[Order] = []
    encoded: list[tuple[Scope, set[str]]] = []
    with open_memory(tmp_path) as memory:
        llm = MemoryLLM.__new__(MemoryLLM)  # without an engine
        llm.memory, llm._lock = memory, threading.RLock()
        llm.engine = SimpleNamespace(order=orders.append)  # type: ignore[assignment]
        llm.runner = SimpleNamespace(  # type: ignore[assignment]
            encode_new=lambda scope, only: encoded.append((scope, only))
        )

        block = llm.set_block("house", "Red.", user_id="ana")
        assert (orders, encoded) == ([], [(ANA, {block.id})])
        memory.catalog.passes.record("m", ANA, [], [block.id], ["k"])
        llm.set_block("house", "Blue.", user_id="ana")
        assert orders == [Order("forget", ("k",), ((digest_of(ANA), 1),))]
        assert [found.text for found in llm.get_blocks(user_id="ana")] == ["Blue."]
        llm.delete_block("house", user_id="ana")
        assert orders[1] == Order("forget", (), ((digest_of(ANA), 2),))

        memory.add("goes", user_id="ana", expires_at=time.time() + 9)
        memory.add("stays", user_id="ana")
        assert len(llm.search("goes", user_id="ana")) == 2
        assert len(orders) == 2
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 9)
        found = llm.search("goes", user_id="ana", filters={"speaker": None})
        assert [hit.fact.text for hit in found] == ["stays"]
        assert orders[2:] == [Order("forget", (), ((digest_of(ANA), 3),))]
