"""Quotas hold whatever way a fact comes, and what is refused leaves nothing behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fakes import WordEmbedder
from inferscale.config import MemoryConfig
from inferscale.errors import InvalidConfig, QuotaExceeded
from inferscale.memory import Memory
from inferscale.server.http import answer_to
from inferscale.server_config import ServerConfig

pytestmark = pytest.mark.usefixtures("both_databases")


def limited(folder: Path, facts: int | None = None, size: int | None = None) -> Memory:
    config = MemoryConfig(folder, max_facts_per_user=facts, max_bytes_per_user=size)
    return Memory(config, embedder=WordEmbedder())


def test_more_facts_than_allowed_are_refused_whole(tmp_path: Path) -> None:
    with limited(tmp_path, facts=3) as memory:
        memory.add(["one", "two"], user_id="ana")
        with pytest.raises(QuotaExceeded, match="would hold 4 facts; allowed are 3 facts"):
            memory.add(["three", "four"], user_id="ana")
        assert memory.count(user_id="ana") == 2
        [fact] = memory.add("three", user_id="ana", agent_id="helper", run_id="7")
        with pytest.raises(QuotaExceeded):
            memory.add("four", user_id="ana", agent_id="other")
        memory.delete(fact.id)
        memory.add("four", user_id="ana")


def test_each_user_agent_and_run_has_its_own(tmp_path: Path) -> None:
    with limited(tmp_path, facts=1) as memory:
        memory.add("one", user_id="ana", agent_id="helper")
        memory.add("one", user_id="bob", agent_id="helper")
        memory.add("one", agent_id="helper")
        memory.add("one", run_id="7")
        for owner in ({"agent_id": "helper", "run_id": "8"}, {"run_id": "7"}, {"user_id": "bob"}):
            with pytest.raises(QuotaExceeded):
                memory.add("two", **owner)
        memory.add("one", agent_id="another", run_id="7")


def test_bytes_are_those_of_texts_and_metadata(tmp_path: Path) -> None:
    with limited(tmp_path, size=100) as memory:
        [fact] = memory.add("ä" * 40, user_id="ana", metadata={"n": 1})  # 80 and 8 bytes
        with pytest.raises(QuotaExceeded, match="would hold 101 bytes; allowed are 100 bytes"):
            memory.add("x" * 11, user_id="ana")
        with pytest.raises(QuotaExceeded):
            memory.update(fact.id, text="ä" * 60)
        assert memory.get(fact.id).text == "ä" * 40
        memory.update(fact.id, text="ä" * 20)
        memory.add("x" * 11, user_id="ana")


def test_a_limit_that_was_lowered_lets_facts_shrink(tmp_path: Path) -> None:
    with limited(tmp_path) as memory:
        facts = memory.add(["a long text", "another"], user_id="ana")
    with limited(tmp_path, facts=1, size=5) as memory:
        memory.update(facts[0].id, text="short")
        memory.delete(facts[1].id)
        assert [fact.text for fact in memory.get_all(user_id="ana")] == ["short"]


def test_adds_at_the_same_time_do_not_pass_together(tmp_path: Path) -> None:
    with limited(tmp_path, facts=5) as memory:

        def add(number: int) -> bool:
            try:
                memory.add(f"fact {number}", user_id="ana")
            except QuotaExceeded:
                return False
            return True

        with ThreadPoolExecutor(8) as threads:
            assert sum(threads.map(add, range(16))) == 5
        assert memory.count(user_id="ana") == 5


def test_the_api_answers_as_openai_does() -> None:
    status, body = answer_to(QuotaExceeded("too much"))
    assert status == 429
    assert body["error"] == {
        "message": "too much",
        "type": "insufficient_quota",
        "param": None,
        "code": "insufficient_quota",
    }


def test_the_server_has_the_same_settings(tmp_path: Path) -> None:
    memory = ServerConfig(max_facts_per_user=7, max_bytes_per_user=8).memory
    assert (memory.max_facts_per_user, memory.max_bytes_per_user) == (7, 8)
    for config in (ServerConfig, MemoryConfig):
        with pytest.raises(InvalidConfig, match="max_facts_per_user is 0"):
            config(max_facts_per_user=0)
