"""Core blocks: one of a name and scope, in front of every chat, apart from all other facts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes import ANA, ids, open_memory
from inferscale.errors import EmptyText, InvalidInput, UnknownFact, UnknownScope
from inferscale.facts import Scope
from inferscale.filters import read_filter
from inferscale.memory import Memory
from inferscale.planner import Candidate, choose
from inferscale.tail import Tail
from test_chat_plan import Chats

pytestmark = pytest.mark.usefixtures("both_databases")


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    with open_memory(tmp_path) as opened:
        yield opened


def test_a_block_from_its_setting_to_its_deletion(memory: Memory) -> None:
    first = memory.set_block("profile", "Ana is a baker.", user_id="ana")
    assert (first.fact.block, first.fact.text, first.keys, first.epochs) == (
        "profile",
        "Ana is a baker.",
        (),
        (),
    )
    assert memory.set_block("profile", "Ana is a baker.", user_id="ana") == first
    memory.catalog.passes.record("m", ANA, [], [first.fact.id], ["k"])
    second = memory.set_block("profile", "Ana is a smith.", user_id="ana")
    assert second.fact.id == first.fact.id
    assert (second.keys, [item.epoch for item in second.epochs]) == (("k",), [1])
    memory.set_block("house", "Red.", user_id="ana")
    assert [block.text for block in memory.get_blocks(user_id="ana")] == ["Red.", "Ana is a smith."]
    assert [event.event for event in memory.history(first.fact.id)] == ["ADD", "UPDATE"]
    deleted = memory.delete_block("profile", user_id="ana")
    assert deleted.fact.text == "Ana is a smith."
    assert [block.block for block in memory.get_blocks(user_id="ana")] == ["house"]
    with pytest.raises(UnknownFact):
        memory.delete_block("profile", user_id="ana")
    with pytest.raises(UnknownFact):
        memory.delete_block("house", user_id="ben")
    assert memory.get_blocks(user_id="ben") == []


def test_a_scope_covers_blocks_as_it_covers_facts(memory: Memory) -> None:
    memory.set_block("a", "of ana", user_id="ana")
    memory.set_block("a", "of ana and bot", user_id="ana", agent_id="bot")
    memory.set_block("a", "of ben", user_id="ben")
    assert [block.text for block in memory.get_blocks(user_id="ana")] == ["of ana", "of ana and bot"]
    assert [block.text for block in memory.get_blocks(user_id="ana", agent_id="bot")] == ["of ana and bot"]
    memory.delete_all(user_id="ana")
    assert memory.get_blocks(user_id="ana") == []
    assert [block.text for block in memory.get_blocks(user_id="ben")] == ["of ben"]


def test_blocks_are_no_facts_of_a_search_or_list(memory: Memory) -> None:
    with pytest.raises(UnknownScope):
        memory.search("baker", user_id="ana")
    memory.set_block("profile", "ana is a baker", user_id="ana")
    assert memory.search("baker", user_id="ana") == []
    [fact] = memory.add("the baker sells bread", user_id="ana")
    memory.set_block("profile", "ana was a baker", user_id="ana")
    assert [hit.fact for hit in memory.search("baker", user_id="ana")] == [fact]
    assert memory.get_all(user_id="ana") == [fact]
    assert memory.page(user_id="ana").facts == [fact]
    assert memory.count(user_id="ana") == 1


def test_blocks_are_nobodys_neighbours(memory: Memory) -> None:
    block = memory.set_block("profile", "ana is a baker", user_id="ana").fact
    [fact] = memory.add("one", user_id="ana")
    assert memory.catalog.neighbours_before(fact, 9) == []
    assert ids(memory.catalog.facts(ANA)) == [fact.id]
    assert ids(memory.catalog.unencoded("m", ANA)) == [block.id, fact.id]


@pytest.mark.parametrize("name", ["", " ", "a b", "a/b", ".", "..", "-a", "é", "x" * 65, None, 7])
def test_names(memory: Memory, name: str) -> None:
    with pytest.raises(InvalidInput, match="name of a core block"):
        memory.set_block(name, "text", user_id="ana")
    with pytest.raises(InvalidInput, match="name of a core block"):
        memory.delete_block(name, user_id="ana")


def test_texts_are_checked_as_those_of_facts(memory: Memory) -> None:
    with pytest.raises(EmptyText):
        memory.set_block("a", " ", user_id="ana")
    with pytest.raises(InvalidInput):
        memory.set_block("a", "x")
    assert memory.set_block("a", "x\0y", user_id="ana").fact.text == "xy"
    assert memory.catalog.blocks(Scope("ana")).blocks[0].text == "xy"


def candidate(memory: Memory, text: str, num_tokens: int, key: str | None) -> Candidate:
    return Candidate(memory.add(text, user_id="x")[0], num_tokens, key)


def test_blocks_stand_first_in_front_and_tail(memory: Memory) -> None:
    best, worst = candidate(memory, "best", 5, "k1"), candidate(memory, "worst", 5, "k2")
    one, two = candidate(memory, "one", 5, "k3"), candidate(memory, "two", 5, None)
    choice = choose([best, worst], tail=Tail(1), budget_tokens=100, blocks=[one, two])
    assert choice == ((one, worst), (two, best), (two,), 0, 0, (two,))
    as_text = choose([best], tail=Tail(0), budget_tokens=100, needs_residency=False, blocks=[one, two])
    assert as_text.front == (one, two, best)
    small = choose([best, worst], tail=Tail(0), budget_tokens=12, blocks=[one])
    assert (small.front, small.num_left_out) == ((one, best), 1)
    tiny = choose([best], tail=Tail(0), budget_tokens=3, blocks=[one])
    assert (tiny.front, tiny.num_left_out) == ((), 2)


# --- in chats ------------------------------------------------------------------------------------


@pytest.fixture
def chats(memory: Memory) -> Chats:
    memory.add(["My sister lives in Oslo.", "My dog is called Rex.", "I play chess."], user_id="ana")
    memory.set_block("persona", "You are brief.", user_id="ana")
    memory.set_block("house", "Ana's house is red.", user_id="ana")
    return Chats(memory)


QUESTION = [{"role": "user", "content": "Where does my sister live?"}]


def front(chats: Chats, **options: Any) -> list[str]:
    return [item.fact.text for item in chats.prepare(QUESTION, ANA, **options).choice.front]


def test_blocks_open_every_chat_and_count_in_no_top_k(chats: Chats) -> None:
    unencoded = chats.prepare(QUESTION, ANA, top_k=1)
    assert [item.fact.block for item in unencoded.choice.missing] == ["house", "persona", None]
    chats.encode_facts(ANA)
    prepared = chats.prepare(QUESTION, ANA, top_k=1)
    assert front(chats, top_k=1) == ["Ana's house is red.", "You are brief.", "My sister lives in Oslo."]
    assert prepared.plan is not None
    assert [segment.kind for segment in prepared.plan.segments] == ["text", "fact", "fact", "fact"]
    assert prepared.num_missing_tokens == 0
    assert front(chats, top_k=0) == ["Ana's house is red.", "You are brief."]
    assert front(chats, top_k=1, mode="text")[:2] == ["Ana's house is red.", "You are brief."]
    assert chats.prepare(QUESTION, ANA, mode="none").blocks == ()
    assert [block.block for block in prepared.blocks] == ["house", "persona"]
    assert chats.prepare(QUESTION, Scope("ben")).choice.front == ()


def test_a_filter_of_a_chat_leaves_its_blocks(chats: Chats, memory: Memory) -> None:
    memory.add("My sister is called Ines.", user_id="ana", metadata={"topic": "names"})
    chats.encode_facts(ANA)
    found = front(chats, top_k=9, within=read_filter({"topic": "names"}))
    assert found == ["Ana's house is red.", "You are brief.", "My sister is called Ines."]


def test_changing_a_block_invalidates_nothing_else(chats: Chats, memory: Memory) -> None:
    jobs = chats.encoder.new_jobs(ANA)
    alone = [job for job in jobs if job.num_facts == 1]
    assert len(alone) == 2
    before = chats.encoder.keys(ids(memory.get_all(user_id="ana")))
    assert len(before) == 3
    [block] = [block for block in memory.get_blocks(user_id="ana") if block.block == "house"]
    key = chats.encoder.keys([block.id])[block.id]
    update = memory.set_block("house", "Ana's house is blue.", user_id="ana")
    assert update.keys == (key,)
    assert chats.encoder.keys(ids(memory.get_all(user_id="ana"))) == before
    [again] = chats.encoder.new_jobs(ANA)
    assert again.num_facts == 1
    [old] = [job for job in alone if key in {span.key for span in job.captures}]
    chats.pool.keys |= {span.key for job in (*jobs, again) for span in job.captures}
    chats.pool.keys.discard(key)
    assert front(chats, top_k=0) == ["Ana's house is blue.", "You are brief."]
    assert chats.encoder.is_outdated(old)


def test_a_block_that_was_lost_is_rebuilt(chats: Chats, memory: Memory) -> None:
    chats.encoder.new_jobs(ANA)
    blocks = memory.get_blocks(user_id="ana")
    rebuilt = chats.jobs.for_repair(ANA, set(ids(blocks)))
    assert [job.num_facts for job in rebuilt] == [1, 1]


def test_a_deletion_between_the_reads_makes_the_older_epoch_count(
    chats: Chats, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is then refused: it may name what was deleted."""
    chats.encode_facts(ANA)
    [sister] = [fact for fact in memory.get_all(user_id="ana") if "sister" in fact.text]
    recall = memory.recall

    def recall_then_delete(*args: Any) -> Any:
        found = recall(*args)
        memory.delete(sister.id)
        return found

    monkeypatch.setattr(memory, "recall", recall_then_delete)
    prepared = chats.prepare(QUESTION, ANA, top_k=1)
    assert prepared.epoch == 0 < memory.epoch(user_id="ana")
