"""Export and import: what goes out comes in as it was, in batches, and bad lines are named."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes import WordEmbedder, open_memory
from inferscale.catalog import NewPass, StoredFact
from inferscale.config import MemoryConfig
from inferscale.errors import EmptyText, InvalidInput, QuotaExceeded
from inferscale.facts import Fact, Scope, Turn
from inferscale.memory import Memory
from inferscale.transfer import export_facts, import_facts, read_source

ANA = Scope("ana")


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    with open_memory(tmp_path / "from") as opened:
        yield opened


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Memory]:
    with open_memory(tmp_path / "to") as opened:
        yield opened


def fill(memory: Memory) -> list[Fact]:
    """Facts of all kinds, of two owners in turn."""
    memory.add("my dog is called rex", user_id="ana", metadata={"tags": ["a", None, 1.5], "öäü": {"n": True}})
    memory.add(
        Turn("line one\nline two\u2028three", "Ana", "8 May 2023", expires_at=4e9),
        user_id="bob",
        agent_id="x",
    )
    memory.add("the cat is white", user_id="ana", run_id="7", speaker="Ana", said_at="yesterday")
    [car] = memory.add("the car is red", user_id="ana")
    memory.update(car.id, text="the car is blue")
    memory.update(car.id, text="the car is green", metadata={"k": "v"})
    memory.set_block("persona", "A friend of dogs.", user_id="ana")
    return stored(memory)


def stored(memory: Memory) -> list[Fact]:
    return [replace(item.fact, seq=0) for item in memory.catalog.stored_facts(Scope(), 1000)]


def write(path: Path, memory: Memory, scope: Scope = Scope(), **options: Any) -> str:  # noqa: B008
    lines = [
        json.dumps(record, ensure_ascii=False) + "\n" for record in export_facts(memory, scope, **options)
    ]
    path.write_text("".join(lines), encoding="utf-8")
    return str(path)


# --- there and back --------------------------------------------------------------------------------


def test_what_is_exported_comes_in_as_it_was(memory: Memory, other: Memory, tmp_path: Path) -> None:
    facts = fill(memory)
    file = write(tmp_path / "facts.jsonl", memory, with_history=True)
    done = import_facts(other, read_source(file), batch_size=2)
    assert done == (5, 0, 0, (), ())
    assert stored(other) == facts
    for fact in facts:
        assert other.history(fact.id) == memory.history(fact.id)
    for query in ("what is the dog called", "car", "cat white"):
        assert [(hit.fact.id, hit.score) for hit in other.search(query, user_id="ana")] == [
            (hit.fact.id, hit.score) for hit in memory.search(query, user_id="ana")
        ]
    assert [fact.text for fact in other.get_blocks(user_id="ana")] == ["A friend of dogs."]


def test_without_history_only_the_last_text_leaves(memory: Memory, other: Memory, tmp_path: Path) -> None:
    fill(memory)
    file = write(tmp_path / "facts.jsonl", memory)
    assert "the car is red" not in Path(file).read_text(encoding="utf-8")
    import_facts(other, read_source(file))
    [car] = [fact for fact in stored(other) if fact.text == "the car is green"]
    assert car.updated_at > car.created_at


def test_an_export_holds_its_scope_and_nothing_that_has_expired(memory: Memory) -> None:
    memory.add("of ana", user_id="ana")
    memory.add("of bob", user_id="bob")
    memory.add(Turn("over", expires_at=time.time() - 1), user_id="ana")
    assert [record["text"] for record in export_facts(memory, ANA)] == ["of ana"]
    assert [record["text"] for record in export_facts(memory, Scope())] == ["of ana", "of bob"]


def test_more_facts_than_one_read(memory: Memory, other: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferscale.transfer.moves._EXPORT_BATCH", 2)
    memory.add([f"fact {number}" for number in range(5)], user_id="ana")
    assert [record["text"] for record in export_facts(memory, ANA)] == [f"fact {n}" for n in range(5)]


def test_with_history_leaves_what_is_no_longer_so(memory: Memory, other: Memory, tmp_path: Path) -> None:
    old, new = memory.add(["lives in Linz", "lives in Graz"], user_id="ana")
    memory.update(old.id, text="lives in Linz, at the river")
    memory.catalog.retire(old.id, new.id, "moved")
    assert [record["id"] for record in export_facts(memory, ANA)] == [new.id]
    file = write(tmp_path / "facts.jsonl", memory, with_history=True)
    assert import_facts(other, read_source(file))[:3] == (2, 0, 0)
    assert [fact.id for fact in other.get_all(user_id="ana")] == [new.id]
    for fact in (old, new):
        assert other.history(fact.id) == memory.history(fact.id)
    assert import_facts(other, read_source(file))[:3] == (0, 0, 2)
    other.delete(new.id)  # takes along what it superseded
    assert list(export_facts(other, ANA, with_history=True)) == []


# --- what is there already -------------------------------------------------------------------------


def test_facts_that_are_there_are_passed_over_without_embedding(memory: Memory, tmp_path: Path) -> None:
    facts = fill(memory)
    file = write(tmp_path / "facts.jsonl", memory)
    embedder = memory._search._embedder
    assert isinstance(embedder, WordEmbedder)
    num_texts = embedder.num_texts
    assert import_facts(memory, read_source(file))[:3] == (0, 0, 5)
    assert embedder.num_texts == num_texts
    assert stored(memory) == facts


def test_an_id_twice_in_one_batch_is_one_fact(other: Memory, tmp_path: Path) -> None:
    lines = [{"id": "1", "text": text, "created_at": 1.0, "user_id": "ana"} for text in ("first", "second")]
    file = tmp_path / "facts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert import_facts(other, read_source(str(file)))[:3] == (1, 0, 1)
    assert other.get("1").text == "first"


def test_a_replaced_fact_keeps_its_place_and_is_found_by_its_new_words(memory: Memory) -> None:
    old, last = memory.add(["the dog is brown", "a later fact"], user_id="ana")
    pass_id = memory.catalog.passes.record("model", old.scope, [old.id], [last.id], ["key"])
    assert memory.search("dog", user_id="ana")  # the index knows the old vector
    epoch = memory.epoch(user_id="ana")
    new = StoredFact(replace(old, text="the cat is white", metadata={"k": 1}))
    done = memory.import_facts([new], replaces=True)
    assert done[:4] == (0, 1, 0, ("key",))
    assert memory.epoch(user_id="ana") > epoch
    assert memory.catalog.passes.by_ids([pass_id]) == {}
    assert [fact.text for fact in memory.get_all(user_id="ana")] == ["the cat is white", "a later fact"]
    [hit, *_] = memory.search("white cat", user_id="ana")
    assert (hit.fact.id, hit.fact.metadata) == (old.id, {"k": 1})
    assert hit.score > 0.7


def test_a_fact_that_is_replaced_may_go_to_another_owner(memory: Memory) -> None:
    [fact] = memory.add("the dog is brown", user_id="ana")
    memory.search("dog", user_id="ana")
    memory.import_facts([StoredFact(replace(fact, scope=Scope("bob")))], replaces=True)
    assert memory.count(user_id="ana") == 0
    assert [hit.fact.id for hit in memory.search("dog", user_id="bob")] == [fact.id]


def test_a_core_block_of_the_same_name_counts_as_the_same(memory: Memory) -> None:
    memory.set_block("persona", "A friend.", user_id="ana")
    [item] = memory.catalog.stored_facts(ANA, 10)
    twin = item._replace(fact=replace(item.fact, id="other", text="A foe."))
    assert memory.import_facts([twin])[:3] == (0, 0, 1)
    assert memory.import_facts([twin], replaces=True)[:3] == (0, 1, 0)
    assert [fact.text for fact in memory.get_blocks(user_id="ana")] == ["A foe."]


def test_a_fact_that_is_no_longer_so_does_not_come_back(memory: Memory) -> None:
    old, new = memory.add(["lives in Linz", "lives in Graz"], user_id="ana")
    memory.catalog.retire(old.id, new.id)
    assert memory.import_facts([StoredFact(old)])[:3] == (0, 0, 1)
    assert [fact.text for fact in memory.get_all(user_id="ana")] == ["lives in Graz"]
    assert memory.import_facts([StoredFact(old)], replaces=True)[:3] == (0, 1, 0)
    assert memory.history(old.id)[-1].event == "ADD"


def test_passes_can_be_recorded_over_imported_facts(other: Memory) -> None:
    facts = [Fact(f"id{n}", 0, ANA, f"fact {n}", created_at=1.0, updated_at=1.0) for n in range(2)]
    other.import_facts([StoredFact(fact) for fact in facts])
    assert other.catalog.passes.record_all("model", ANA, [NewPass([], ["id0", "id1"], ["k0", "k1"])]) == [1]


# --- errors ----------------------------------------------------------------------------------------

GOOD = {"id": "1", "text": "x", "created_at": 1.0, "user_id": "ana"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Line 3 of .* is not JSON"),
        ('"text"', "Line 3 of .* is no fact: it is a JSON str"),
        (json.dumps({**GOOD, "colour": 1}), "Line 3 .* unknown fields colour; allowed are id, user_id"),
        (json.dumps({"text": "x", "user_id": "ana"}), "Line 3 .* lacks id, created_at.*inferscale ingest"),
        (json.dumps({**GOOD, "user_id": None}), "Line 3 .* names no owner; give --user-id"),
        (json.dumps({**GOOD, "user_id": 7}), "Line 3 .* user_id is 7"),
        (json.dumps({**GOOD, "text": " "}), "Line 3 .* blank"),
        (json.dumps({**GOOD, "text": None}), "Line 3 .* must be text"),
        (json.dumps({**GOOD, "created_at": "now"}), "Line 3 .* created_at is 'now'"),
        (json.dumps({**GOOD, "expires_at": float("nan")}), "Line 3 .* expires_at is nan"),
        (json.dumps({**GOOD, "metadata": []}), "Line 3 .* metadata"),
        (json.dumps({**GOOD, "id": ""}), "Line 3 .* id is ''"),
        (json.dumps({**GOOD, "block": "no good name!"}), "Line 3 .* core block"),
        (json.dumps({**GOOD, "revisions": [{"text": "x"}]}), "Line 3 .* revisions"),
        (json.dumps({**GOOD, "revisions": "x"}), "Line 3 .* revisions"),
        (json.dumps({**GOOD, "ended": {"why": "x"}}), "Line 3 .* ended is none"),
        (json.dumps({**GOOD, "metadata": {"n": 1e999}}), "Line 3 .* metadata is not plain JSON"),
    ],
)
def test_a_bad_line_is_named_and_whole_batches_before_it_stay(
    other: Memory, tmp_path: Path, line: str, message: str
) -> None:
    good = [json.dumps({**GOOD, "id": str(n)}) for n in (1, 2)]
    file = tmp_path / "facts.jsonl"
    file.write_text("\n".join([*good, line, json.dumps({**GOOD, "id": "4"})]), encoding="utf-8")
    with pytest.raises(InvalidInput, match=message):
        import_facts(other, read_source(str(file)), batch_size=1)
    assert [fact.id for fact in stored(other)] == ["1", "2"]


@pytest.mark.parametrize("bad", ["1e999", "NaN", "9e18", "-9e18", "1" + "0" * 400])
@pytest.mark.parametrize("field", ["created_at", "expires_at"])
def test_a_time_that_no_calendar_has_is_refused(other: Memory, tmp_path: Path, bad: str, field: str) -> None:
    """Interfaces that show dates, such as Mem0's, would fail for all facts of its owner."""
    record = {"id": "a", "user_id": "ana", "text": "x", "created_at": 1, field: "TIME"}
    (tmp_path / "facts.jsonl").write_text(json.dumps(record).replace('"TIME"', bad))
    with pytest.raises(InvalidInput, match=rf"Line 1 .*{field} is .* years 1 to 9999"):
        import_facts(other, read_source(str(tmp_path / "facts.jsonl")))


def test_a_pipe_is_read_from_its_beginning(memory: Memory, other: Memory, tmp_path: Path) -> None:
    fill(memory)
    file, pipe = Path(write(tmp_path / "facts.jsonl", memory)), tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(file.read_bytes()), daemon=True)
    writer.start()
    assert import_facts(other, read_source(str(pipe)))[:3] == (5, 0, 0)
    writer.join()


def test_a_line_that_is_no_utf8_and_a_file_that_is_not_there(other: Memory, tmp_path: Path) -> None:
    file = tmp_path / "facts.jsonl"
    file.write_bytes(json.dumps(GOOD).encode() + b"\n\xff\n")
    with pytest.raises(InvalidInput, match=r"Line 2 of .* is not UTF-8"):
        import_facts(other, read_source(str(file)))
    with pytest.raises(InvalidInput, match="cannot be read: No such file"):
        import_facts(other, read_source(str(tmp_path / "nothing")))


def test_a_batch_is_stored_whole_or_not_at_all(other: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    good = Fact("1", 0, ANA, "fact", created_at=1.0, updated_at=1.0)
    bad = replace(good, id="2", metadata={1: "no text key"})  # type: ignore[dict-item]
    with pytest.raises(InvalidInput):
        other.import_facts([StoredFact(good), StoredFact(bad)])
    assert stored(other) == []


def test_an_import_is_held_to_the_quota_of_each_owner(tmp_path: Path) -> None:
    config = MemoryConfig(data_dir=tmp_path, max_facts_per_user=1)
    with Memory(config, embedder=WordEmbedder()) as memory:
        facts = [Fact(str(n), 0, Scope(user), "fact") for n, user in enumerate(("ana", "bob", "ana"))]
        assert memory.import_facts([StoredFact(fact) for fact in facts[:2]])[:3] == (2, 0, 0)
        with pytest.raises(QuotaExceeded):
            memory.import_facts([StoredFact(facts[2])])
        assert len(stored(memory)) == 2


def test_texts_are_checked_as_those_of_an_add(tmp_path: Path) -> None:
    def refuse(turn: Turn) -> None:
        raise EmptyText(turn.text)

    with open_memory(tmp_path, check_text=refuse) as memory, pytest.raises(EmptyText, match="fact"):
        memory.import_facts([StoredFact(Fact("1", 0, ANA, "fact"))])
    with open_memory(tmp_path, check_text=refuse) as memory, pytest.raises(EmptyText, match="persona"):
        memory.import_facts([StoredFact(Fact("2", 0, ANA, "persona", block="persona"))])
