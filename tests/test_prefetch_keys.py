"""Which KV is loaded ahead of requests, and that MemoryLLM orders it; the engine is a stand-in."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fakes import ANA, open_memory
from inferscale import prefetch_keys
from inferscale.chat_plan import digest_of
from inferscale.encoder import Encoder
from inferscale.errors import InvalidInput
from inferscale.facts import Scope
from inferscale.memory import Memory
from inferscale.memory_llm import MemoryLLM
from inferscale.plan import Order
from inferscale.prefetch_keys import prefetch_order
from inferscale.prompt import PromptBuilder
from inferscale.windows import WindowPolicy
from test_prompt import CHATML, tokenizer_with


class Residency:
    """Says that all lies below but `there`."""

    def __init__(self) -> None:
        self.there: set[str] = set()

    def below(self, keys: Sequence[str]) -> list[bool]:
        return [key not in self.there for key in keys]


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    with open_memory(tmp_path) as memory:
        yield memory


@pytest.fixture
def encoder(memory: Memory) -> Encoder:
    return Encoder(memory.catalog, PromptBuilder(tokenizer_with(CHATML)), "m", WindowPolicy(2, 9), 4000)


def told(epoch: int = 0) -> tuple[tuple[str, int], ...]:
    return ((digest_of(ANA), epoch),)


def order(encoder: Encoder, residency: Any, *fact_ids: str, with_newest: bool = False) -> Order | None:
    return prefetch_order(encoder, residency, ANA, fact_ids, with_newest=with_newest)


def test_given_facts_then_blocks_then_the_newest(
    memory: Memory, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch_keys, "NUM_NEWEST", 2)
    facts = memory.add(["one", "two", "three", "four"], user_id="ana")
    block = memory.set_block("house", "Red.", user_id="ana").fact
    memory.add("of another", user_id="ben")
    encoder.new_jobs(Scope())  # of all
    later = memory.add("not encoded yet", user_id="ana")
    one, two, three, four = (encoder.keys([fact.id])[fact.id] for fact in facts)
    key = encoder.keys([block.id])[block.id]
    residency = Residency()
    assert order(encoder, residency, with_newest=True) == Order("prefetch", (key, four), told())
    assert memory.catalog.newest_ids(ANA, 3) == [later[0].id, facts[3].id, facts[2].id]
    assert order(encoder, residency, facts[1].id, facts[0].id) == Order("prefetch", (two, one), told())
    found = order(encoder, residency, facts[3].id, facts[2].id, with_newest=True)
    assert found == Order("prefetch", (four, three, key), told())  # each once
    residency.there = {key, four}
    assert order(encoder, residency, facts[2].id, facts[3].id) == Order("prefetch", (three,), told())
    assert order(encoder, residency, with_newest=True) is None
    assert order(encoder, residency, "unknown") is None


def test_what_has_expired_is_not_loaded(
    memory: Memory, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.add("goes", user_id="ana", expires_at=time.time() + 9)
    [stays] = memory.add("stays", user_id="ana")
    encoder.new_jobs(ANA)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 100)
    assert memory.catalog.newest_ids(ANA, 9) == [stays.id]


def test_an_order_is_older_than_a_deletion_that_comes_meanwhile(memory: Memory, encoder: Encoder) -> None:
    """The connector then loads nothing: it was told of the deletion's epoch."""
    gone, kept = memory.add(["one", "two"], user_id="ana")
    encoder.new_jobs(ANA)
    key = encoder.keys([kept.id])[kept.id]

    class Slow(Residency):
        def below(self, keys: Sequence[str]) -> list[bool]:
            memory.delete(gone.id)
            return super().below(keys)

    found = order(encoder, Slow(), with_newest=True)
    assert found is not None
    assert key in found.keys
    assert found.epochs == told(0)
    assert memory.catalog.epoch(ANA) == 1


def test_memory_llm_says_how_many_came(memory: Memory, encoder: Encoder) -> None:
    orders: list[Order] = []

    def carry_out(given: Order) -> dict[str, Any]:
        orders.append(given)
        return {"resident": 1}

    residency = Residency()
    llm = MemoryLLM.__new__(MemoryLLM)  # without an engine
    llm.encoder, llm._lock = encoder, threading.RLock()
    llm.engine = SimpleNamespace(order=carry_out, residency=residency)  # type: ignore[assignment]
    assert llm.prefetch(user_id="ana") == 0
    facts = memory.add(["one", "two"], user_id="ana")
    encoder.new_jobs(ANA)
    assert llm.prefetch(user_id="ana") == 1
    keys = encoder.keys([fact.id for fact in facts])
    assert orders == [Order("prefetch", (keys[facts[1].id], keys[facts[0].id]), told())]
    residency.there = set(keys.values())
    assert llm.prefetch(user_id="ana") == 0
    assert len(orders) == 1
    with pytest.raises(InvalidInput, match="no scope was given"):
        llm.prefetch()
