"""Facts that change: what an update leaves, takes away and remembers; races of it; older catalogs."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes import ANA, DIM, WordEmbedder, add, ids, open_catalog, open_memory, rows_of
from inferscale.catalog import CATALOG_FILE, NewPass, VectorMark
from inferscale.catalog.migrations import MIGRATIONS
from inferscale.errors import CatalogError, EmptyText, InvalidInput, TextTooLong, UnknownFact
from inferscale.facts import KEEP, Scope, Turn
from inferscale.memory import Memory

pytestmark = pytest.mark.usefixtures("both_databases")


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    with open_memory(tmp_path) as opened:
        yield opened


def texts(memory: Memory, query: str, **options: Any) -> list[str]:
    return [hit.fact.text for hit in memory.search(query, user_id="ana", **options)]


def file_bytes(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(folder.glob(CATALOG_FILE + "*")))


# --- update --------------------------------------------------------------------------------------


def test_a_changed_fact_keeps_its_id_and_place(memory: Memory) -> None:
    first, last = memory.add(["the cat is red", "the dog"], user_id="ana", speaker="Ana", metadata={"n": 1})
    assert first.updated_at == first.created_at > time.time() - 60
    assert texts(memory, "cat", top_k=1) == ["the cat is red"]
    changed = memory.update(first.id, text="the bicycle is blue").fact
    assert (changed.id, changed.seq, changed.scope) == (first.id, first.seq, first.scope)
    assert (changed.text, changed.speaker, changed.metadata) == ("the bicycle is blue", "Ana", {"n": 1})
    assert changed.created_at == first.created_at < changed.updated_at
    assert memory.get(first.id) == changed
    assert memory.get_all(user_id="ana") == [changed, last]
    [hit] = memory.search("Ana: the bicycle is blue", user_id="ana", top_k=1)
    assert (hit.fact, round(hit.score, 4)) == (changed, 1)
    assert memory.search("Ana: the cat is red", user_id="ana", top_k=1)[0].score < 0.9
    assert memory._search._index is not None
    assert len(memory._search._index) == 2


def test_what_is_not_given_stays_and_none_takes_away(memory: Memory) -> None:
    turn = Turn("the cat", "Ana", "8 May", {"a": 1})
    [fact] = memory.add(turn, user_id="ana")

    def said() -> tuple[Any, ...]:
        now = memory.get(fact.id)
        return now.text, now.speaker, now.said_at, now.metadata

    memory.update(fact.id, speaker="Bo", said_at=KEEP)
    assert said() == ("the cat", "Bo", "8 May", {"a": 1})
    assert memory.search("bo: the cat 8 may", user_id="ana")[0].score > 0.99
    memory.update(fact.id, said_at=None)
    assert said() == ("the cat", "Bo", None, {"a": 1})
    memory.update(fact.id, speaker=" ", metadata={"b": 2})
    assert said() == ("the cat", None, None, {"b": 2})
    memory.update(fact.id, text="the\0 cow", metadata={})
    assert said() == ("the cow", None, None, {})


def test_rewording_takes_away_the_kv_that_saw_the_old_words(memory: Memory) -> None:
    catalog, scope = memory.catalog, Scope("ana", "bot")
    facts = ids(memory.add(list("abcd"), user_id="ana", agent_id="bot"))
    [twin] = ids(memory.add("a", user_id="ben"))
    catalog.passes.record("m", scope, facts[:1], facts[1:], ["b", "c", "d"])
    catalog.passes.record("n", scope, [], facts[:1], ["shared"])
    catalog.passes.record("n", Scope("ben"), [], [twin], ["shared"])
    update = memory.update(facts[2], text="C")
    assert (update.fact.text, update.keys) == ("C", ("c", "d"))
    assert dict(update.epochs) == {scope: 1, Scope("ana"): 1, Scope(agent_id="bot"): 1}
    assert memory.epoch(user_id="ana") == 1
    assert set(catalog.passes.encodings("m", facts)) == {facts[1]}
    assert ids(catalog.unencoded("m", scope)) == [facts[0], facts[2], facts[3]]
    update = memory.update(facts[0], speaker="Ana")  # stands before the text in prompts
    assert (update.keys, {epoch for _, epoch in update.epochs}) == (("b",), {2})
    assert catalog.passes.encodings("n", [twin])[twin].key == "shared"
    assert memory.recall("C", scope, 9, "m").keys == {}


def test_metadata_alone_costs_nothing(memory: Memory, tmp_path: Path) -> None:
    embedder = WordEmbedder()
    with open_memory(tmp_path, embedder=embedder, check_text=lambda _: pytest.fail("checked")) as other:
        [fact] = memory.add("the cat", user_id="ana", metadata={"n": 1})
        memory.catalog.passes.record("m", ANA, [], [fact.id], ["key"])
        mark = memory.catalog.feed.vector_changes(VectorMark()).mark
        update = other.update(fact.id, metadata={"n": True})  # equal in Python, not in JSON
        assert (update.keys, update.epochs, embedder.num_texts) == ((), (), 0)
        assert update.fact.metadata["n"] is True
        assert update.fact.updated_at > fact.updated_at
        assert memory.get(fact.id) == update.fact
        assert memory.recall("cat", ANA, 1, "m").keys == {fact.id: "key"}
        assert memory.epoch(user_id="ana") == 0
        changes = memory.catalog.feed.vector_changes(mark)
        assert (changes.fact_seqs, changes.removed_seqs) == ([], [])
        assert [event.text for event in memory.history(fact.id)] == ["the cat", "the cat"]


def test_an_update_that_changes_nothing_is_none(memory: Memory) -> None:
    [fact] = memory.add(Turn("the cat", "Ana", "8 May", {"a": [1], "b": 2}), user_id="ana")
    memory.catalog.passes.record("m", ANA, [], [fact.id], ["key"])
    token = memory.catalog.change_token()
    for same in (
        {},
        {"text": "the cat"},
        {"text": "the cat\0", "speaker": " Ana", "said_at": "8 May", "metadata": {"a": [1], "b": 2}},
    ):
        assert memory.update(fact.id, **same) == (fact, (), ())
    assert memory.catalog.change_token() == token
    assert len(memory.history(fact.id)) == 1
    assert memory.catalog.passes.encodings("m", [fact.id])[fact.id].key == "key"


def test_what_cannot_be_stored_changes_nothing(tmp_path: Path) -> None:
    def check(turn: Turn) -> None:
        if len(turn.text) > 20:
            raise TextTooLong("too long")

    with open_memory(tmp_path, check_text=check) as memory:
        [fact] = memory.add("the cat", user_id="ana")
        bad: list[tuple[dict[str, Any], type[Exception]]] = [
            ({"text": " \0"}, EmptyText),
            ({"text": 7}, InvalidInput),
            ({"text": "x" * 21}, TextTooLong),
            ({"text": "dog", "speaker": 7}, InvalidInput),
            ({"said_at": []}, InvalidInput),
            ({"metadata": {"a": {1}}}, InvalidInput),
            ({"text": "dog", "metadata": {1: "a"}}, InvalidInput),
            ({"metadata": [1]}, InvalidInput),
        ]
        before = rows_of(tmp_path)
        for given, error in bad:
            with pytest.raises(error):
                memory.update(fact.id, **given)
        for call in (lambda: memory.update("no-such-id", text="x"), lambda: memory.history("no-such-id")):
            with pytest.raises(UnknownFact, match="no-such-id"):
                call()
        assert rows_of(tmp_path) == before
        with pytest.raises(InvalidInput, match="shape"):
            memory.catalog.update(fact, Turn("dog"), np.zeros(3, dtype=np.float32))
        assert memory.get(fact.id) == fact


@pytest.mark.sqlite_only
def test_an_update_is_whole_or_not_at_all(memory: Memory, tmp_path: Path) -> None:
    first, second = memory.add(["the cat", "the dog"], user_id="ana")
    memory.catalog.passes.record("m", ANA, [first.id], [second.id], ["key"])
    with closing(sqlite3.connect(tmp_path / CATALOG_FILE)) as raw:
        raw.execute(
            "CREATE TRIGGER refuse BEFORE UPDATE OF text ON facts BEGIN SELECT raise(ABORT, 'not today'); END"
        )
    before = rows_of(tmp_path)
    with pytest.raises(CatalogError, match="not today"):
        memory.update(first.id, text="the cow")
    assert rows_of(tmp_path) == before
    assert texts(memory, "cat", top_k=1) == ["the cat"]


# --- history -------------------------------------------------------------------------------------


def test_history_tells_of_every_update(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    [other, fact] = memory.add(["other", "one"], user_id="ana")
    two = memory.update(fact.id, text="two").fact
    spoken = memory.update(fact.id, speaker="Ana").fact
    monkeypatch.setattr(time, "time", lambda: fact.created_at - 1000)  # somebody set the clock back
    three = memory.update(fact.id, text="three").fact
    assert [event[:4] for event in memory.history(fact.id)] == [
        ("ADD", "one", None, fact.created_at),
        ("UPDATE", "two", "one", two.updated_at),
        ("UPDATE", "two", "two", spoken.updated_at),
        ("UPDATE", "three", "two", three.updated_at),
    ]
    at = [event.at for event in memory.history(fact.id)]
    assert at == sorted(at)
    assert memory.history(fact.id)[1].previous_text == "one"
    assert memory.history(other.id) == [("ADD", "other", None, other.created_at, None)]


@pytest.mark.sqlite_only
@pytest.mark.parametrize("whole_scope", [False, True])
def test_a_deletion_takes_all_former_texts_with_it(memory: Memory, tmp_path: Path, whole_scope: bool) -> None:
    """Read while the memory is open: neither tables nor free pages nor SQLite's log keep them."""
    [kept] = memory.add("kept", user_id="ben")
    facts = memory.add([f"secret-penguin {i}" for i in range(30)], user_id="ana")
    for fact in facts:
        memory.update(fact.id, text=f"secret-walrus {fact.seq}" * 30)
        memory.update(fact.id, text="secret-ostrich", speaker="secret-speaker", metadata={"secret-": 1})
    memory.update(kept.id, text="kept again")
    assert b"secret-penguin" in file_bytes(tmp_path)
    if whole_scope:
        assert memory.delete_all(user_id="ana").num_facts == 30
    else:
        for fact in facts:
            memory.delete(fact.id)
    assert "secret-" not in str(rows_of(tmp_path))
    assert len(rows_of(tmp_path)["revisions"]) == 1
    assert b"secret-" not in file_bytes(tmp_path)
    with pytest.raises(UnknownFact):
        memory.history(facts[0].id)
    assert [event.text for event in memory.history(kept.id)] == ["kept", "kept again"]


@pytest.mark.sqlite_only
def test_a_reader_elsewhere_does_not_hold_up_a_deletion(memory: Memory, tmp_path: Path) -> None:
    [fact] = memory.add("secret-penguin", user_id="ana")
    [late] = memory.add("x", user_id="ana")
    with closing(sqlite3.connect(tmp_path / CATALOG_FILE, isolation_level=None)) as raw:
        raw.execute("BEGIN")
        raw.execute("SELECT * FROM facts").fetchall()
        start_s = time.monotonic()
        memory.delete(fact.id)
        assert time.monotonic() - start_s < 10
    memory.delete(late.id)
    assert b"secret-" not in file_bytes(tmp_path)


# --- several at a time ---------------------------------------------------------------------------


def test_a_second_memory_sees_changes(memory: Memory, tmp_path: Path) -> None:
    cat, dog = memory.add(["the cat", "the dog"], user_id="ana")
    memory.catalog.passes.record("m", ANA, [], [cat.id], ["key"])
    with open_memory(tmp_path) as other:
        for each in (memory, other):  # both have an index and remember what they read
            assert each.recall("the cat", ANA, 9, "m").keys == {cat.id: "key"}
        memory.update(cat.id, text="a bicycle")
        other.update(dog.id, text="an aeroplane")
        memory.update(dog.id, metadata={"n": 1})
        [train] = other.add("trains", user_id="ana")
        other.update(train.id, text="a ship")  # not read by `memory` before
        for each in (memory, other):
            for text in ("a bicycle", "an aeroplane", "a ship"):
                [hit] = each.search(text, user_id="ana", top_k=1)
                assert (hit.fact.text, round(hit.score, 4)) == (text, 1)
            recall = each.recall("a bicycle", ANA, 9, "m")
            assert (recall.keys, recall.epoch, len(recall.hits)) == ({}, 3, 3)
            assert each.search("an aeroplane", user_id="ana")[0].fact.metadata == {"n": 1}
            assert each._search._index is not None
            assert len(each._search._index) == 3
        other.update(cat.id, text="a boat")
        other.delete(cat.id)  # both since `memory` looked last
        assert sorted(texts(memory, "a boat")) == ["a ship", "an aeroplane"]


def test_a_fact_that_is_deleted_during_its_update_stays_deleted(memory: Memory, tmp_path: Path) -> None:
    [fact, other_fact] = memory.add(["the cat", "stays"], user_id="ana")
    with open_memory(tmp_path, check_text=lambda _: memory.delete(fact.id)) as other:
        assert len(texts(other, "cat")) == 2
        with pytest.raises(UnknownFact):
            other.update(fact.id, text="the dog")
        assert texts(other, "dog") == texts(memory, "dog") == ["stays"]
    found = rows_of(tmp_path)
    assert [len(found[name]) for name in ("facts", "vectors", "revisions")] == [1, 1, 0]
    assert memory.epoch(user_id="ana") == 1
    assert memory.get(other_fact.id) == other_fact


def test_updates_at_a_time_do_not_undo_each_other(memory: Memory, tmp_path: Path) -> None:
    [fact] = memory.add("the cat", user_id="ana")
    seen: list[Turn] = []

    def check(turn: Turn) -> None:
        seen.append(turn)
        if len(seen) == 1:
            memory.update(fact.id, speaker="Ana", metadata={"n": 1})

    with open_memory(tmp_path, check_text=check) as other:
        changed = other.update(fact.id, text="the dog").fact
    assert (changed.text, changed.speaker, changed.metadata) == ("the dog", "Ana", {"n": 1})
    assert [turn.speaker for turn in seen] == [None, "Ana"]  # what is checked is what is stored
    assert memory.get(fact.id) == changed
    assert [event.text for event in memory.history(fact.id)] == ["the cat", "the cat", "the dog"]
    assert memory.search("ana: the dog", user_id="ana")[0].score > 0.99


def test_threads_update_one_fact(memory: Memory, tmp_path: Path) -> None:
    [fact] = memory.add("start", user_id="ana")
    with open_memory(tmp_path) as other, ThreadPoolExecutor(6) as pool:

        def work(number: int) -> None:
            mine = (memory, other)[number % 2]
            for i in range(10):
                mine.update(fact.id, text=f"word{number} and word{i}")
                mine.search("word", user_id="ana")

        list(pool.map(work, range(6)))
        events = memory.history(fact.id)
        assert len(events) == 61
        assert [event.previous_text for event in events[1:]] == [event.text for event in events[:-1]]
        assert memory.epoch(user_id="ana") == 60
        for each in (memory, other):
            [hit] = each.search(events[-1].text, user_id="ana")
            assert (hit.fact.text, round(hit.score, 4)) == (events[-1].text, 1)


def test_updates_race_deletions(memory: Memory, tmp_path: Path) -> None:
    facts = memory.add([f"thing {i}" for i in range(40)], user_id="ana")
    for fact in facts:
        memory.catalog.passes.record("m", ANA, [], [fact.id], [fact.id])
    assert len(texts(memory, "thing", top_k=99)) == 40

    def change(fact_id: str) -> tuple[str, ...]:
        try:
            return memory.update(fact_id, text=f"changed {fact_id}").keys
        except UnknownFact:
            return ()

    with open_memory(tmp_path) as other, ThreadPoolExecutor(8) as pool:
        changed = [pool.submit(change, fact.id) for fact in facts]
        deleted = [pool.submit(other.delete, fact.id) for fact in reversed(facts)]
        keys = [key for run in changed for key in run.result()]
        keys += [key for run in deleted for key in run.result().keys]
        assert sorted(keys) == sorted(ids(facts)), "each key is forgotten by the one who took it away"
    memory.add("left", user_id="ana")
    assert texts(memory, "thing", top_k=99) == ["left"]
    assert memory._search._index is not None
    assert len(memory._search._index) == 1
    found = rows_of(tmp_path)
    assert [len(found[name]) for name in ("facts", "vectors", "revisions", "encodings")] == [1, 1, 0, 0]


def test_passes_of_an_older_text_are_not_recorded(memory: Memory) -> None:
    catalog = memory.catalog
    facts = ids(memory.add(["one", "two"], user_id="ana"))
    epoch = catalog.epoch(ANA)
    passes = [NewPass([], facts[:1], ["one"]), NewPass(facts[:1], facts[1:], ["two"])]
    memory.update(facts[0], metadata={"n": 1})
    assert None not in catalog.passes.record_all("m", ANA, passes, epoch)
    memory.update(facts[0], text="ONE")
    assert catalog.passes.record_all("n", ANA, passes, epoch) == [None, None]
    assert catalog.passes.encodings("n", facts) == {}
    assert None not in catalog.passes.record_all("n", ANA, passes, epoch + 1)


# --- facts that are no longer so -------------------------------------------------------------------


def test_a_retired_fact_is_in_histories_only(memory: Memory) -> None:
    old, new = memory.add(["the cat is red", "the cat is blue"], user_id="ana")
    memory.update(old.id, text="the cat is dark red")
    catalog = memory.catalog
    catalog.passes.record("m", ANA, [], [old.id, new.id], ["one", "two"])
    deletion = catalog.retire(old.id, new.id, "painted")
    assert set(deletion.keys) == {"one", "two"}  # what was encoded behind it has seen it
    assert deletion.epochs
    assert catalog.passes.encodings("m", [new.id]) == {}
    assert texts(memory, "the cat is dark red") == ["the cat is blue"]
    assert memory.get_all(user_id="ana") == [memory.get(new.id)]
    with pytest.raises(UnknownFact):
        memory.get(old.id)
    ended = [(*event[:3], event.reason) for event in memory.history(old.id)]
    assert ended == [
        ("ADD", "the cat is red", None, None),
        ("UPDATE", "the cat is dark red", "the cat is red", None),
        ("END", "the cat is blue", "the cat is dark red", "painted"),
    ]
    assert [(*event[:3], event.reason) for event in memory.history(new.id)] == [
        ("ADD", "the cat is blue", None, None),
        ("SUPERSEDE", "the cat is blue", "the cat is dark red", "painted"),
    ]


@pytest.mark.parametrize("whole_scope", [False, True])
def test_what_a_fact_superseded_goes_with_it(memory: Memory, tmp_path: Path, whole_scope: bool) -> None:
    first, second, third, other = memory.add(["zebra", "lion", "tiger", "other"], user_id="ana")
    memory.catalog.retire(first.id, second.id)
    memory.catalog.retire(second.id, third.id)
    if whole_scope:
        memory.delete_all(user_id="ana")
    else:
        memory.delete(third.id)
    for fact in (first, second, third):
        with pytest.raises(UnknownFact):
            memory.history(fact.id)
    stored = file_bytes(tmp_path)
    assert not any(text in stored for text in (b"zebra", b"lion", b"tiger"))
    assert whole_scope or memory.history(other.id)


def test_only_facts_that_exist_are_retired_or_succeed(memory: Memory) -> None:
    [fact] = memory.add("cat", user_id="ana")
    for pair in ((fact.id, "nobody"), ("nobody", fact.id)):
        with pytest.raises(UnknownFact):
            memory.catalog.retire(*pair)
    assert memory.get(fact.id) == fact
    assert len(memory.history(fact.id)) == 1


# --- catalogs of older versions ------------------------------------------------------------------


@pytest.mark.sqlite_only
def test_a_catalog_of_the_first_version_is_migrated(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / CATALOG_FILE, isolation_level=None)) as raw:
        for statement in MIGRATIONS[0]:
            raw.execute(statement)
        raw.execute("PRAGMA user_version = 1")
        raw.execute("INSERT INTO meta VALUES ('embedder_name', 'fake'), ('embedder_dim', '4')")
        raw.execute("INSERT INTO scopes (user_id, epoch) VALUES ('ana', 3)")
        for number in (1, 2, 5):
            raw.execute(
                "INSERT INTO facts VALUES (?, ?, 1, ?, 'Ana', NULL, ?, '{}')",
                (number, f"id {number}", f"text {number}", 1000.5 + number),
            )
            raw.execute("INSERT INTO vectors VALUES (?, 'fake', 4, zeroblob(16))", (number,))
        raw.execute("INSERT INTO deletions (fact) VALUES (3), (4)")
    catalog = open_catalog(tmp_path)
    facts = catalog.facts(ANA)
    assert [(fact.id, fact.created_at, fact.updated_at) for fact in facts] == [
        (f"id {number}", 1000.5 + number, 1000.5 + number) for number in (1, 2, 5)
    ]
    assert [event[:4] for event in catalog.history("id 2")] == [("ADD", "text 2", None, 1002.5)]
    mark = catalog.feed.vector_changes(VectorMark()).mark
    assert mark == (5, 2)
    update = catalog.update(facts[1], Turn("new"), np.ones(DIM, dtype=np.float32))
    assert update is not None
    assert dict(update.epochs) == {ANA: 4}
    assert [event[:3] for event in catalog.history("id 2")] == [
        ("ADD", "text 2", None),
        ("UPDATE", "new", "text 2"),
    ]
    changes = catalog.feed.vector_changes(mark)
    assert (changes.fact_seqs, changes.vectors.tolist(), changes.removed_seqs) == ([2], [[1] * 4], [])
    assert catalog.page(ANA, 2).next_cursor is not None
    assert add(catalog, ANA, "more")[0].seq == 6
    catalog.close()


@pytest.mark.sqlite_only
def test_passes_of_older_catalogs_have_one_direction(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / CATALOG_FILE, isolation_level=None)) as raw:
        for statements in MIGRATIONS[:3]:
            for statement in statements:
                raw.execute(statement)
        raw.execute("PRAGMA user_version = 3")
        raw.execute("INSERT INTO scopes (user_id) VALUES ('ana')")
        for number in (1, 2):
            raw.execute(
                "INSERT INTO facts (seq, id, scope, text, created_at, metadata) "
                "VALUES (?, ?, 1, 'x', 1, '{}')",
                (number, f"id {number}"),
            )
        raw.execute("INSERT INTO passes (model, scope, num_window) VALUES ('m', 1, 0)")
        for number in (1, 2):
            raw.execute("INSERT INTO pass_facts VALUES (1, ?, ?)", (number - 1, number))
            raw.execute("INSERT INTO encodings VALUES ('m', ?, ?, 1, ?)", (number, f"k{number}", number - 1))
    catalog = open_catalog(tmp_path)
    assert catalog.passes.by_ids([1])[1].directions == 1
    assert catalog.passes.keys_attending("id 2") == ["k2"], "what stands before a fact has not seen it"
    assert catalog.passes.encodings("m", ["id 1"])["id 1"].key == "k1"
    both = catalog.passes.record("m", ANA, [], ["id 1", "id 2"], ["m1", "m2"], 2)
    assert catalog.passes.encodings("m", ["id 1"])["id 1"].key == "k1", "what it has is done"
    assert catalog.passes.by_ids([both])[both].directions == 2
    assert catalog.passes.keys_attending("id 2") == ["k2", "m1", "m2"]
    catalog.close()
