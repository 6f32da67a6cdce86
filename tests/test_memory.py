"""Memory as its users see it: what is stored, found, refused; several threads and processes."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fakes import WordEmbedder, catalog_variable, open_memory
from inferscale.config import MemoryConfig
from inferscale.errors import (
    EmbedderMismatch,
    EmptyText,
    InvalidInput,
    UnknownFact,
    UnknownScope,
)
from inferscale.facts import Scope, Turn
from inferscale.memory import Memory

pytestmark = pytest.mark.usefixtures("both_databases")


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    with open_memory(tmp_path) as opened:
        yield opened


def texts(memory: Memory, query: str, **scope: Any) -> list[str]:
    return [hit.fact.text for hit in memory.search(query, **scope)]


# --- add and search ------------------------------------------------------------------------------


def test_what_is_added_is_found(memory: Memory) -> None:
    [dog] = memory.add("my dog is called rex", user_id="ana")
    [car] = memory.add(
        "the car is red", user_id="ana", speaker="Ana", said_at="8 May 2023", metadata={"n": 1}
    )
    assert (car.speaker, car.said_at, car.metadata, car.scope) == (
        "Ana",
        "8 May 2023",
        {"n": 1},
        Scope("ana"),
    )
    first, second = memory.search("what is the dog called", user_id="ana")
    assert (first.fact, second.fact) == (dog, car)
    assert 1 >= first.score > second.score
    assert memory.search("car", user_id="ana", top_k=1)[0].fact == car
    assert memory.get(dog.id) == dog
    assert memory.get_all(user_id="ana") == [dog, car]
    assert memory.get_all(user_id="ana", limit=1) == [dog]
    assert memory.get_all(user_id="ana", limit=0) == []
    assert memory.count(user_id="ana") == 2


def test_speaker_and_time_can_be_searched(memory: Memory) -> None:
    turns = [Turn("sounds good", "Melanie", "8 May"), Turn("sounds good", "Caroline", "9 June")]
    memory.add(turns, user_id="ana")
    assert memory.search("caroline", user_id="ana")[0].fact.speaker == "Caroline"
    assert memory.search("8 may", user_id="ana")[0].fact.speaker == "Melanie"


def test_equal_facts_come_newest_first(memory: Memory) -> None:
    added = [memory.add("tea please", user_id="ana")[0] for _ in range(5)]
    assert [hit.fact for hit in memory.search("tea", user_id="ana", top_k=3)] == added[:1:-1]


def test_ten_facts_of_one_user_are_found_among_many(memory: Memory) -> None:
    memory.add([f"the cat number {i}" for i in range(3000)], user_id="crowd")
    memory.add([f"something else {i}" for i in range(10)], user_id="ana")
    hits = memory.search("the cat number", user_id="ana", top_k=50)
    assert len(hits) == 10
    assert {hit.fact.scope.user_id for hit in hits} == {"ana"}


def test_filters_in_all_combinations(memory: Memory) -> None:
    triples = [t for t in itertools.product(("u", "v", None), ("a", None), ("r", None)) if any(t)]
    for triple in triples:
        scope = Scope(*triple)
        memory.add(scope.describe(), user_id=triple[0], agent_id=triple[1], run_id=triple[2])
    for triple in triples:
        filter = Scope(*triple)
        expected = {Scope(*other).describe() for other in triples if filter.covers(Scope(*other))}
        ids = {"user_id": triple[0], "agent_id": triple[1], "run_id": triple[2]}
        assert {hit.fact.text for hit in memory.search("user_id", **ids, top_k=99)} == expected
        assert {fact.text for fact in memory.get_all(**ids)} == expected
        assert memory.count(**ids) == len(expected)


def test_recall_brings_keys_and_the_epoch(memory: Memory) -> None:
    first, second, third = memory.add(["the cat", "the dog", "the cow"], user_id="ana")
    memory.delete(third.id)
    memory.catalog.passes.record("m", first.scope, [first.id], [second.id], ["key"])
    recall = memory.recall("the dog", Scope("ana"), 5, "m")
    assert list(recall.hits) == memory.search("the dog", user_id="ana", top_k=5)
    assert (recall.keys, recall.epoch) == ({second.id: "key"}, 1)
    assert recall.embed_ms > 0
    assert recall.search_ms > 0
    assert memory.recall("the dog", Scope("ana"), 5).keys == {}
    assert memory.recall("the dog", Scope("ana"), 0, "m") == ((), {}, 1, 0.0, 0.0)
    with pytest.raises(UnknownScope):
        memory.recall("the dog", Scope("nobody"), 5, "m")


# --- scopes and numbers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids",
    [
        {},
        {"user_id": ""},
        {"user_id": " "},
        {"user_id": 7},
        {"user_id": "a\0"},
        {"user_id": "\ud83d"},
        {"user_id": "x" * 1001},
        {"user_id": "ana", "run_id": ""},
    ],
)
def test_bad_scopes_are_refused_everywhere(memory: Memory, ids: dict[str, Any]) -> None:
    for call in (
        lambda: memory.add("x", **ids),
        lambda: memory.search("x", **ids),
        lambda: memory.get_all(**ids),
        lambda: memory.count(**ids),
        lambda: memory.epoch(**ids),
        lambda: memory.page(**ids),
        lambda: memory.delete_all(**ids),
    ):
        with pytest.raises(InvalidInput):
            call()


@pytest.mark.parametrize("user_id", ["x" * 1000, "a/b/../c", "Ünï 🧀", "' OR 1=1 --", "%", "a b"])
def test_ids_are_exact(memory: Memory, user_id: str) -> None:
    memory.add("mine", user_id=user_id)
    memory.add("other", user_id=user_id[:-1] + "?")
    assert texts(memory, "mine", user_id=user_id) == ["mine"]


def test_an_unknown_scope_is_an_error_that_names_nobody_else(memory: Memory) -> None:
    memory.add("x", user_id="secret-name")
    memory.add("x", user_id="other-secret")
    for call in (lambda: memory.search("x", user_id="ana"), lambda: memory.get_all(user_id="ana")):
        with pytest.raises(UnknownScope, match=r"user_id='ana'.* 2 other scopes") as raised:
            call()
        assert "secret" not in str(raised.value)
    assert memory.count(user_id="ana") == memory.epoch(user_id="ana") == 0
    [fact] = memory.add("x", user_id="ana")
    memory.delete(fact.id)
    with pytest.raises(UnknownScope):
        memory.search("x", user_id="ana")


def test_top_k(memory: Memory) -> None:
    memory.add(["a", "b", "c"], user_id="ana")
    assert memory.search("a", user_id="ana", top_k=0) == []
    assert len(memory.search("a", user_id="ana", top_k=2)) == 2
    assert len(memory.search("a", user_id="ana", top_k=10**9)) == 3
    for bad in (-1, 1.5, True, "3"):
        with pytest.raises(InvalidInput, match="top_k"):
            memory.search("a", user_id="ana", top_k=bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="limit"):
        memory.get_all(user_id="ana", limit=-1)
    for blank in ("", " \0"):
        with pytest.raises(EmptyText, match="query"):
            memory.search(blank, user_id="ana")


# --- delete --------------------------------------------------------------------------------------


def test_a_deleted_fact_never_comes_back(memory: Memory, tmp_path: Path) -> None:
    keep, gone = memory.add(["the red car", "the red dog"], user_id="ana")
    assert texts(memory, "dog", user_id="ana")[0] == "the red dog"
    memory.catalog.passes.record("m", keep.scope, [gone.id], [keep.id], ["key"])
    deletion = memory.delete(gone.id)
    assert (deletion.fact, deletion.keys, deletion.epochs) == (gone, ("key",), ((Scope("ana"), 1),))
    assert memory.epoch(user_id="ana") == 1
    assert memory._search._index is not None
    assert gone.seq not in memory._search._index
    assert texts(memory, "dog", user_id="ana") == ["the red car"]
    for call in (lambda: memory.get(gone.id), lambda: memory.delete(gone.id)):
        with pytest.raises(UnknownFact, match=gone.id):
            call()
    with open_memory(tmp_path) as again:
        assert texts(again, "dog", user_id="ana") == ["the red car"]


def test_a_deleted_scope_is_gone_as_a_whole(memory: Memory, tmp_path: Path) -> None:
    mine = memory.add(["the red car", "the red dog"], user_id="ana", run_id="r")
    [wide] = memory.add("the red house", user_id="ana")
    [his] = memory.add("the red boat", user_id="ben", run_id="r")
    memory.catalog.passes.record("m", mine[0].scope, [mine[0].id], [mine[1].id], ["key"])
    with open_memory(tmp_path) as other:
        for each in (memory, other):
            assert len(each.recall("red", Scope("ana"), 9, "m").hits) == 3
        assert memory.delete_all(user_id="ana", run_id="none") == (0, (), ())
        assert memory.delete_all(user_id="nobody") == (0, (), ())
        deletion = memory.delete_all(user_id="ana", run_id="r")
        assert (deletion.num_facts, deletion.keys) == (2, ("key",))
        assert memory._search._index is not None
        assert len(memory._search._index) == 2
        assert dict(deletion.epochs) == {Scope("ana", None, "r"): 1, Scope("ana"): 1, Scope(run_id="r"): 1}
        for each in (memory, other):
            recall = each.recall("red", Scope("ana"), 9, "m")
            assert ([hit.fact for hit in recall.hits], recall.epoch) == ([wide], 1)
            assert [hit.fact for hit in each.search("red", run_id="r")] == [his]
            assert each._search._index is not None
            assert len(each._search._index) == 2
            with pytest.raises(UnknownScope):
                each.search("red", user_id="ana", run_id="r")
            with pytest.raises(UnknownFact):
                each.history(mine[0].id)
        other.delete_all(user_id="ana")
        assert memory.count(user_id="ana") == 0
        assert memory.count(user_id="ben") == 1


def test_facts_are_added_while_their_scope_is_deleted(memory: Memory, tmp_path: Path) -> None:
    """Every fact is deleted once or left, and index and catalog agree on which."""
    memory.add("x", user_id="ana")
    assert texts(memory, "x", user_id="ana") == ["x"]

    def add(number: int) -> int:
        return sum(len(memory.add([f"{number} {i} a", f"{number} {i} b"], user_id="ana")) for i in range(20))

    with open_memory(tmp_path) as other, ThreadPoolExecutor(4) as pool:
        adding = [pool.submit(add, number) for number in range(3)]
        deleted = sum(other.delete_all(user_id="ana").num_facts for _ in range(15))
        added = 1 + sum(run.result() for run in adding)
    assert deleted + memory.count(user_id="ana") == added
    memory.add("last", user_id="ana")
    found = {hit.fact.text for hit in memory.search("last", user_id="ana", top_k=999)}
    assert found == {fact.text for fact in memory.get_all(user_id="ana")}


# --- pages ---------------------------------------------------------------------------------------


def read_pages(memory: Memory, limit: int, meanwhile: Callable[[int], None] = lambda _: None) -> list[str]:
    read: list[str] = []
    cursor = None
    for number in itertools.count():
        page = memory.page(user_id="ana", limit=limit, after=cursor)
        read += [fact.text for fact in page.facts]
        cursor = page.next_cursor
        if cursor is None:
            return read
        assert len(page.facts) == limit
        meanwhile(number)
    raise AssertionError


@pytest.mark.parametrize("limit", [1, 2, 5, 10, 11, 1000])
def test_pages_hold_every_fact_once_in_order(memory: Memory, limit: int) -> None:
    for i in range(10):
        memory.add(f"{i}", user_id="ana", run_id=f"run {i % 3}")
        memory.add("not hers", user_id="ben")
    assert read_pages(memory, limit) == [str(i) for i in range(10)]


def test_pages_are_stable_while_facts_come_change_and_go(memory: Memory) -> None:
    facts = memory.add([str(i) for i in range(9)], user_id="ana")

    def meanwhile(number: int) -> None:
        if number == 0:  # 0 to 2 were read
            memory.delete(facts[2].id)  # the one that the cursor stands behind
            memory.delete(facts[4].id)
            memory.update(facts[0].id, text="read before")
            memory.update(facts[5].id, text="five")
        if number == 1:
            memory.add("late", user_id="ana")

    assert read_pages(memory, 3, meanwhile) == ["0", "1", "2", "3", "five", "6", "7", "8", "late"]


def test_who_changes_what_he_reads_comes_to_an_end(memory: Memory) -> None:
    memory.add([str(i) for i in range(5)], user_id="ana")
    cursor, num_read = None, 0
    while num_read < 50:
        page = memory.page(user_id="ana", limit=2, after=cursor)
        for fact in page.facts:
            memory.update(fact.id, text=f"{fact.text} changed")
            num_read += 1
        if (cursor := page.next_cursor) is None:
            break
    assert num_read == 5
    assert [fact.text for fact in memory.get_all(user_id="ana")] == [f"{i} changed" for i in range(5)]


def test_an_unknown_scope_has_an_empty_page(memory: Memory) -> None:
    memory.add("x", user_id="ben")
    assert memory.page(user_id="ana") == ([], None)
    [fact] = memory.add("y", user_id="ana")
    assert memory.page(user_id="ana") == ([fact], None)
    for bad in (0, -1, True, 1.5, "3"):
        with pytest.raises(InvalidInput, match="limit"):
            memory.page(user_id="ana", limit=bad)  # type: ignore[arg-type]


def test_cursors_are_sealed_and_tell_nothing(memory: Memory, tmp_path: Path) -> None:
    memory.add(["a", "b", "c"], user_id="ana")
    memory.add(["x"] * 5, user_id="ben")
    cursor = memory.page(user_id="ana", limit=1).next_cursor
    later = memory.page(user_id="ana", limit=2).next_cursor
    assert cursor is not None
    assert later is not None
    assert cursor[:6] != later[:6]
    assert cursor[-6:] != later[-6:]
    with open_memory(tmp_path) as other:
        assert [fact.text for fact in other.page(user_id="ana", after=cursor).facts] == ["b", "c"]
    with open_memory(tmp_path / "another") as another:
        another.add("a", user_id="ana")
        wrong = [cursor[:-1] + ("0" if cursor[-1] != "0" else "1"), cursor[:-2], cursor + "00", f" {cursor}"]
        wrong += [cursor.upper() + "A", "", "0", "1", "é" * 32, "0" * 32, "f" * 32, "x" * 10_000, 7, b"ab"]
        for each, after in [*((memory, text) for text in wrong), (another, cursor)]:
            for user_id in ("ana", "nobody"):
                with pytest.raises(InvalidInput, match="next_cursor") as raised:
                    each.page(user_id=user_id, after=after)  # type: ignore[arg-type]
                assert len(str(raised.value)) < 300


# --- several memories on one folder --------------------------------------------------------------


def test_a_second_memory_sees_adds_and_deletions(memory: Memory, tmp_path: Path) -> None:
    first = memory.add("the cat", user_id="ana")
    with open_memory(tmp_path) as other:
        assert texts(other, "cat", user_id="ana") == ["the cat"]
        mine = memory.add("my cat", user_id="ana")
        other.add("your cat", user_id="ana")
        memory.add("nobody's cat", user_id="ana")
        everything = {"the cat", "my cat", "your cat", "nobody's cat"}
        assert (
            set(texts(memory, "cat", user_id="ana")) == set(texts(other, "cat", user_id="ana")) == everything
        )
        other.delete(mine[0].id)
        memory.delete(first[0].id)
        everything -= {"the cat", "my cat"}
        assert (
            set(texts(memory, "cat", user_id="ana")) == set(texts(other, "cat", user_id="ana")) == everything
        )
        assert memory._search._index is not None
        assert len(memory._search._index) == 2


def test_searching_again_reads_no_vectors(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.add("x", user_id="ana")
    memory.search("x", user_id="ana")
    monkeypatch.setattr(
        memory.catalog.feed, "vector_changes", lambda *_: pytest.fail("read the vectors again")
    )
    assert texts(memory, "x", user_id="ana") == ["x"]


def test_the_index_loads_in_parts(memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.add([f"fact {i}" for i in range(25)], user_id="ana")
    with open_memory(tmp_path) as other:
        read = other.catalog.feed.vector_changes
        monkeypatch.setattr(other.catalog.feed, "vector_changes", lambda mark: read(mark, limit=10))
        assert len(other.search("fact", user_id="ana", top_k=99)) == 25


_OTHER_PROCESS = """
import sys
from fakes import WordEmbedder, open_memory
from inferscale.config import MemoryConfig
from inferscale.memory import Memory
folder, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
with Memory(MemoryConfig(data_dir=folder), embedder=WordEmbedder()) as memory:
    for i in range(count):
        memory.add([f"{name} said {i}", f"and {name} again {i}"], user_id="ana")
    if name == "otto":
        [fact] = [fact for fact in memory.get_all(user_id="ana") if fact.text == "delete me"]
        memory.delete(fact.id)
        [fact] = [fact for fact in memory.get_all(user_id="ana") if fact.text == "change me"]
        memory.update(fact.id, text="an astonishing zeppelin")
    assert len(memory.search(name, user_id="ana", top_k=5)) == 5
"""


def test_processes_on_one_folder(memory: Memory, tmp_path: Path) -> None:
    memory.add(["keep me", "delete me", "change me"], user_id="ana")
    assert len(memory.search("me", user_id="ana")) == 3
    command = [sys.executable, "-c", _OTHER_PROCESS, str(tmp_path)]
    environment = {"PYTHONPATH": ":".join([str(Path(__file__).parent), *filter(None, sys.path)])}
    environment |= catalog_variable(tmp_path)
    running = [subprocess.Popen([*command, name, "15"], env=environment) for name in ("otto", "paula")]
    for i in range(15):
        memory.add(f"meanwhile {i}", user_id="ana")
        memory.search("me", user_id="ana")
    assert [process.wait(timeout=60) for process in running] == [0, 0]
    found = [hit.fact.text for hit in memory.search("me", user_id="ana", top_k=999)]
    assert len(found) == len(set(found)) == 2 + 15 + 2 * 30
    assert memory.search("an astonishing zeppelin", user_id="ana")[0].score > 0.99
    assert "keep me" in found
    assert "delete me" not in found
    assert sum("otto" in text for text in found) == sum("paula" in text for text in found) == 30


def test_eight_threads_add_and_search(memory: Memory) -> None:
    for number in range(4):
        memory.add("stays", user_id=f"user {number}")

    def work(number: int) -> None:
        user_id = f"user {number % 4}"
        for i in range(15):
            [fact] = memory.add(f"thing {number} {i}", user_id=user_id)
            hits = memory.search(f"thing {number} {i}", user_id=user_id, top_k=999)
            assert fact in [hit.fact for hit in hits]
            assert {hit.fact.scope.user_id for hit in hits} == {user_id}
            if i % 3 == 0:
                memory.delete(fact.id)
                assert fact not in [hit.fact for hit in memory.search("thing", user_id=user_id, top_k=999)]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert [memory.count(user_id=f"user {n}") for n in range(4)] == [21] * 4
    assert [memory.epoch(user_id=f"user {n}") for n in range(4)] == [10] * 4


# --- embedder ------------------------------------------------------------------------------------


def test_another_embedder_is_refused_but_facts_stay_readable(memory: Memory, tmp_path: Path) -> None:
    [fact] = memory.add("x", user_id="ana")
    for other in (WordEmbedder(name="other"), WordEmbedder(dim=16)):
        with open_memory(tmp_path, embedder=other) as second:
            assert second.get(fact.id) == fact
            for call in (
                lambda m=second: m.add("y", user_id="ana"),
                lambda m=second: m.search("y", user_id="ana"),
            ):
                with pytest.raises(
                    EmbedderMismatch, match=rf"'words' with 32 .*{other.name!r} with {other.dim}"
                ):
                    call()
    assert memory.count(user_id="ana") == 1


def test_the_default_embedder_is_fetched_on_first_use_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[object] = []

    def ensure(progress: object) -> Path:
        fetched.append(progress)
        return tmp_path / "all-MiniLM-L6-v2"

    monkeypatch.setattr("inferscale.models.ensure_embedder", ensure)
    monkeypatch.setattr(
        "inferscale.retrieval.SentenceEmbedder", lambda source, device: WordEmbedder(name=source.name)
    )
    with Memory(MemoryConfig(data_dir=tmp_path)) as memory:
        assert memory.count(user_id="ana") == 0
        assert fetched == []
        memory.add("x", user_id="ana")
        memory.add("y", user_id="ana")
    assert len(fetched) == 1
    assert fetched != [print]


def test_importing_memory_loads_no_heavy_package() -> None:
    code = (
        "import sys, inferscale.memory; "
        "print([name for name in ('torch', 'transformers', 'vllm') if name in sys.modules])"
    )
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"
