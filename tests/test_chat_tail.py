"""What `MemoryLLM.chat` recomputes, on an engine that notes its requests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fakes import open_memory
from inferscale.config import ConnectorConfig
from inferscale.errors import InvalidInput
from inferscale.facts import Scope
from inferscale.memory_llm import MemoryLLM
from inferscale.offline import Generation, GenerationRequest
from inferscale.tail import Tail
from test_prompt import CHATML, said, tokenizer_with, user

FACTS = [f"I like the number {chr(65 + n)}." for n in range(20)]  # equally long
QUESTION = "Do I like the number F?"


class NotingEngine:
    """Captures everything that it is asked to; `requests` are those of chats."""

    fingerprint = "m"
    max_model_len = 4096
    step_tokens = 2048

    def __init__(self, *_: Any) -> None:
        self.pool: set[str] = set()
        self.requests: list[GenerationRequest] = []
        self.residency = SimpleNamespace(
            resident=lambda keys: [key in self.pool for key in keys],
            stats=lambda: {"free_pages": 999, "page_size_tokens": 4},
        )

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        return [self._generate(request) for request in requests]

    def stream(self, requests: Any, **_: Any) -> Iterator[tuple[int, Generation]]:
        for place, request in enumerate(requests):
            yield place, self._generate(request)

    def _generate(self, request: GenerationRequest) -> Generation:
        captures = () if request.plan is None else request.plan.captures
        self.pool |= {span.key for span in captures}
        if not captures:
            self.requests.append(request)
        return Generation("yes", (1,), 0.1, 0.1, 0, {"captured": len(captures)}, "stop")

    def close(self) -> None:
        pass


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`made(**settings)` is a MemoryLLM with 20 facts in its pool."""
    monkeypatch.setattr("inferscale.memory_llm.OfflineEngine", NotingEngine)
    monkeypatch.setattr("inferscale.memory_llm._tokenizer", lambda *_: tokenizer_with(CHATML))
    with open_memory(tmp_path) as memory:

        def make(**settings: Any) -> MemoryLLM:
            llm = MemoryLLM("model", memory, connector=ConnectorConfig(), **settings)
            if not memory.catalog.count(Scope()):
                llm.add(FACTS, user_id="ana")
            llm.warm(user_id="ana")
            return llm

        yield make


def num_injected(llm: MemoryLLM, messages: Any = QUESTION, **options: Any) -> int:
    """Facts in the plan of a chat."""
    llm.chat(messages, user_id="ana", **options)
    engine: Any = llm.engine
    plan = engine.requests[-1].plan
    return 0 if plan is None else sum(segment.kind == "fact" for segment in plan.segments)


def test_a_tenth_by_default_where_nothing_was_said_before(made: Any) -> None:
    llm = made()
    assert num_injected(llm) == 20 - 2
    assert num_injected(llm, [*said("Hello", "Hi."), user(QUESTION)]) == 20
    assert num_injected(llm, mode="text") == 0
    for tail, num in ((0, 20), (7, 13), ("20%", 16), ("3,20%", 17), (Tail(1), 19), ("1 token", 19)):
        assert num_injected(llm, tail=tail) == num, tail
    assert num_injected(llm, [*said("Hello", "Hi."), user(QUESTION)], tail=4) == 16


def test_the_default_is_a_setting(made: Any) -> None:
    assert num_injected(made(tail=0)) == 20
    llm = made(tail="4")
    assert num_injected(llm) == 16
    assert num_injected(llm, [*said("Hello", "Hi."), user(QUESTION)]) == 20
    with pytest.raises(InvalidInput, match="tail is 'many'; allowed are"):
        made(tail="many")


def lines(llm: MemoryLLM, **options: Any) -> str:
    """Letters of the facts in the prompt of a chat, as they stand there."""
    llm.chat(QUESTION, user_id="ana", tail=0, **options)
    engine: Any = llm.engine
    prompt = tokenizer_with(CHATML).decode(list(engine.requests[-1].token_ids))
    return "".join(re.findall(r"number ([A-T])\.", prompt))


def test_the_order_is_a_setting_and_of_each_chat(made: Any) -> None:
    letters = "".join(fact[-2] for fact in FACTS)
    llm = made()
    assert lines(llm) == lines(llm, order="best-last") != letters
    assert lines(llm)[-1] == "F"
    assert lines(llm, order="chronological") == lines(llm, order="session") == letters
    assert lines(llm, order="chronological", mode="text") == letters
    told = made(order="chronological")
    assert lines(told) == letters
    assert lines(told, order="best-last")[-1] == "F"
    for ask in (lambda: made(order="best"), lambda: lines(llm, order="best")):
        with pytest.raises(InvalidInput, match="order is 'best'; allowed are best-last, chronological"):
            ask()


def test_facts_that_are_recomputed_are_encoded_for_the_next_chat(made: Any) -> None:
    llm = made()
    llm.engine.pool.clear()
    assert num_injected(llm, tail=5) == 0
    assert num_injected(llm, tail=0) == 20
