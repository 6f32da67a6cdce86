"""The catalog: whole transactions, permissions, scopes, and what each key attended to."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from fakes import ANA, DIM, add, catalog_variable, ids, open_catalog
from inferscale.catalog import CATALOG_FILE, Catalog, VectorMark
from inferscale.catalog.migrations import MIGRATIONS
from inferscale.errors import CatalogError, EmbedderMismatch, InvalidInput, NewerCatalog, UnknownFact
from inferscale.facts import Fact, Scope, Turn

pytestmark = pytest.mark.usefixtures("both_databases")


@pytest.fixture
def catalog(tmp_path: Path):
    with_embedder = open_catalog(tmp_path / "data")
    yield with_embedder
    with_embedder.close()


# --- facts ---------------------------------------------------------------------------------------


def test_a_fact_comes_back_as_it_was_given(catalog: Catalog, tmp_path: Path) -> None:
    turn = Turn("Käse 🧀 שלום\n<|im_end|>", "Ana", "8 May 2023", {"a": [1, {"b": None}], "z\ud83d\0": "x"})
    scope = Scope("u/1", "ägent", "r" * 1000)
    vector = np.array([[0.5, -1.0, 2.0, 1e-30]], dtype=np.float32)
    [stored] = catalog.add_facts(scope, [turn], vector)
    catalog.close()
    again = Catalog(tmp_path / "data")
    [fact] = again.facts(scope)
    assert fact == stored == again.get(stored.id)
    assert (fact.text, fact.speaker, fact.said_at, fact.metadata, fact.scope) == (
        turn.text,
        turn.speaker,
        turn.said_at,
        turn.metadata,
        scope,
    )
    assert np.array_equal(again.feed.vector_changes(VectorMark()).vectors, vector)
    again.close()


@pytest.mark.parametrize("text", ["🦊" * 1000, "שלום עולם", "x" * 100_000, "\u202eabc", "a\0b"])
def test_text_is_stored_exactly(catalog: Catalog, text: str, both_databases: str) -> None:
    if "\0" in text and both_databases == "postgres":
        with pytest.raises(InvalidInput, match="NUL"):
            add(catalog, ANA, text)
        return
    [fact] = add(catalog, ANA, text)
    assert catalog.facts_by_ids([fact.id])[0].text == text


def test_facts_are_paged_in_seq_order(catalog: Catalog) -> None:
    stored = add(catalog, ANA, *"abcde")
    add(catalog, Scope(user_id="bob"), "other")
    assert catalog.facts(ANA) == stored
    assert catalog.facts(ANA, limit=2) == stored[:2]
    assert catalog.facts(ANA, limit=2, after=stored[1].seq) == stored[2:4]
    assert catalog.facts(Scope(), after=stored[-1].seq)[0].text == "other"
    assert catalog.facts_by_ids([stored[3].id, "none", stored[0].id]) == [stored[3], stored[0]]
    assert catalog.found_facts(ANA, [stored[2].seq, 10**9]).facts == {stored[2].seq: stored[2]}
    assert catalog.count_scopes() == 2


def test_facts_keys_and_epoch_in_one_read(catalog: Catalog) -> None:
    first, second, third = add(catalog, ANA, "one", "two", "three")
    [other] = add(catalog, Scope(user_id="bob"), "other")
    catalog.passes.record("m", ANA, [first.id], [second.id, third.id], ["old two", "three"])
    catalog.passes.record("m", ANA, [third.id], [second.id], ["two"])
    catalog.passes.record("n", ANA, [], [first.id], ["of another model"])
    seqs = [third.seq, first.seq, second.seq, 10**9]
    found = catalog.found_facts(ANA, seqs, "m")
    assert found.facts == {fact.seq: fact for fact in (first, second, third)}
    assert found.keys == {second.id: "two", third.id: "three"}
    assert found.keys == {
        fact_id: encoding.key
        for fact_id, encoding in catalog.passes.encodings("m", ids([first, second, third])).items()
    }
    assert catalog.found_facts(ANA, seqs) == (found.facts, {}, 0)
    catalog.delete(first.id)
    found = catalog.found_facts(ANA, [*seqs, other.seq], "m")
    assert [fact.id for fact in found.facts.values()] == ids([second, third, other])
    assert (found.keys, found.epoch) == ({second.id: "two"}, 1)


def test_each_fact_has_metadata_of_its_own(catalog: Catalog) -> None:
    turns = [Turn("a", metadata={"n": [1]}), Turn("b"), Turn("c")]
    stored = catalog.add_facts(ANA, turns, np.zeros((3, DIM), dtype=np.float32))
    read = catalog.facts(ANA)
    assert read == stored
    read[0].metadata["n"].append(2)
    read[1].metadata["m"] = 1
    assert read[2].metadata == {}
    assert catalog.facts(ANA) == stored


def test_add_stores_all_or_nothing(catalog: Catalog) -> None:
    vectors = np.zeros((2, DIM), dtype=np.float32)
    for bad in (
        Turn("half \ud83d"),
        Turn("x", metadata={"a": {1, 2}}),
        Turn("x", metadata={"a": float("nan")}),
    ):
        with pytest.raises(InvalidInput):
            catalog.add_facts(ANA, [Turn("good"), bad], vectors)
    with pytest.raises(InvalidInput, match="shape"):
        catalog.add_facts(ANA, [Turn("good")], vectors)
    with pytest.raises(InvalidInput, match="owner"):
        catalog.add_facts(Scope(), [Turn("a"), Turn("b")], vectors)
    assert catalog.count(Scope()) == 0
    assert catalog.count_scopes() == 0


@pytest.mark.parametrize("metadata", [{1: "a"}, {"a": (1, 2)}, {"a": b"x"}])
def test_metadata_that_would_change_is_refused(catalog: Catalog, metadata: dict) -> None:
    with pytest.raises(InvalidInput, match="plain JSON"):
        catalog.add_facts(ANA, [Turn("x", metadata=metadata)], np.zeros((1, DIM), dtype=np.float32))


ALL_SCOPES = [Scope(*triple) for triple in itertools.product(("u", "v", None), ("a", None), ("r", "s", None))]


def test_filters_cover_every_combination_of_missing_ids(catalog: Catalog) -> None:
    exact = [scope for scope in ALL_SCOPES if not scope.is_empty()]
    for scope in exact * 2:
        add(catalog, scope, scope.describe())
    assert catalog.count_scopes() == len(exact)  # unique also where ids are NULL
    for filter in ALL_SCOPES:
        expected = [scope for scope in exact * 2 if filter.covers(scope)]
        assert [fact.scope for fact in catalog.facts(filter)] == expected
        assert catalog.count(filter) == len(expected)
        assert len(catalog.feed.scope_codes(filter)) == len(set(expected))


def test_an_epoch_counts_the_deletions_it_covers(catalog: Catalog) -> None:
    exact = [scope for scope in ALL_SCOPES if not scope.is_empty()]
    facts = [fact for scope in exact for fact in add(catalog, scope, "a", "b")]
    before = {filter: catalog.epoch(filter) for filter in ALL_SCOPES}
    assert set(before.values()) == {0}
    for fact in facts:
        deletion = catalog.delete(fact.id)
        after = {filter: catalog.epoch(filter) for filter in ALL_SCOPES}
        for filter in ALL_SCOPES:
            assert after[filter] == before[filter] + filter.covers(fact.scope)
        covering = {filter: after[filter] for filter in ALL_SCOPES if filter.covers(fact.scope)}
        del covering[Scope()]
        assert dict(deletion.epochs) == covering
        before = after


def test_deleting_a_scope_raises_every_epoch_over_it_once_an_exact_scope(tmp_path: Path) -> None:
    exact = [scope for scope in ALL_SCOPES if not scope.is_empty()]
    for number, filter in enumerate(ALL_SCOPES):
        catalog = open_catalog(tmp_path / str(number))
        facts = [fact for scope in exact for fact in add(catalog, scope, "a", "b")]
        catalog.delete(facts[0].id)
        catalog.delete(facts[1].id)  # a scope without facts any more
        before = {any_filter: catalog.epoch(any_filter) for any_filter in ALL_SCOPES}
        gone = [fact for fact in facts[2:] if filter.covers(fact.scope)]
        deletion = catalog.delete_all(filter)
        assert deletion.num_facts == len(gone)
        assert catalog.facts(Scope()) == [fact for fact in facts[2:] if fact not in gone]
        touched = {fact.scope for fact in gone}
        for any_filter in ALL_SCOPES:
            assert catalog.epoch(any_filter) == before[any_filter] + sum(map(any_filter.covers, touched))
        assert dict(deletion.epochs) == {
            any_filter: catalog.epoch(any_filter)
            for any_filter in ALL_SCOPES
            if not any_filter.is_empty() and any(map(any_filter.covers, touched))
        }
        assert len(deletion.epochs) == len(dict(deletion.epochs))
        assert catalog.delete_all(filter) == (0, (), ())
        catalog.close()


def test_deleting_a_scope_takes_its_encodings_and_those_only(catalog: Catalog) -> None:
    run, bob = Scope("ana", run_id="r"), Scope("bob", run_id="r")
    mine, others = ids(add(catalog, run, *"abc")), ids(add(catalog, ANA, "x", "y"))
    [his] = ids(add(catalog, bob, "a"))
    catalog.passes.record("m", run, mine[:1], mine[1:], ["b", "c"])
    catalog.passes.record("n", run, [], mine[:1], ["shared"])
    catalog.passes.record("n", bob, [], [his], ["shared"])
    catalog.passes.record("m", ANA, others[:1], others[1:], ["y"])
    deletion = catalog.delete_all(run)
    assert (deletion.num_facts, deletion.keys) == (3, ("b", "c"))
    assert dict(deletion.epochs) == {run: 1, ANA: 1, Scope(run_id="r"): 1}
    assert catalog.passes.encodings("m", others)[others[1]].key == "y"
    assert catalog.passes.attended_to("shared") == [his]
    assert set(catalog.delete_all(ANA).keys) == {"y"}
    assert catalog.delete_all(bob).keys == ("shared",)
    with catalog._database.read() as connection:
        for table in ("facts", "vectors", "passes", "pass_facts", "encodings"):
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)


@pytest.mark.sqlite_only
def test_a_scope_is_deleted_whole_or_not_at_all(catalog: Catalog) -> None:
    facts = add(catalog, ANA, *"abc")
    catalog.passes.record("m", ANA, [], ids(facts), ["a", "b", "c"])
    with catalog._database.write() as connection:
        connection.execute(
            "CREATE TRIGGER refuse BEFORE DELETE ON facts WHEN old.text = 'c' "
            "BEGIN SELECT raise(ABORT, 'not this one'); END"
        )
    mark = catalog.feed.vector_changes(VectorMark()).mark
    with pytest.raises(CatalogError, match="not this one"):
        catalog.delete_all(ANA)
    assert catalog.facts(ANA) == facts
    assert len(catalog.passes.encodings("m", ids(facts))) == 3
    assert catalog.epoch(ANA) == 0
    assert catalog.feed.vector_changes(mark).removed_seqs == []


def test_neighbours_stay_in_the_exact_scope(catalog: Catalog) -> None:
    first = add(catalog, ANA, "1", "2")
    add(catalog, Scope("ana", run_id="r"), "elsewhere")
    second = add(catalog, ANA, "3", "4")
    assert catalog.neighbours_before(second[1], 2) == [first[1], second[0]]
    assert catalog.neighbours_before(second[1], 9) == [*first, second[0]]
    assert catalog.neighbours_before(first[0], 9) == catalog.neighbours_before(second[1], 0) == []


def test_deleted_facts_are_gone_and_seq_is_never_used_again(catalog: Catalog) -> None:
    first, last = add(catalog, ANA, "keep", "gone")
    deletion = catalog.delete(last.id)
    assert deletion.fact == last
    assert catalog.get(last.id) is None
    assert catalog.facts(ANA) == [first]
    with pytest.raises(UnknownFact, match="deleted"):
        catalog.delete(last.id)
    assert add(catalog, ANA, "new")[0].seq > last.seq


@pytest.mark.sqlite_only
def test_deleted_text_is_overwritten_in_the_file(tmp_path: Path) -> None:
    catalog = open_catalog(tmp_path)
    facts = add(catalog, ANA, *(f"secret-penguin {i}" for i in range(200)), "keep")
    catalog.close()
    catalog = open_catalog(tmp_path)
    for fact in facts[:-1]:
        catalog.delete(fact.id)
    catalog.close()
    assert [file.name for file in tmp_path.iterdir()] == [CATALOG_FILE]
    assert b"secret-penguin" not in (tmp_path / CATALOG_FILE).read_bytes()


def files_with(folder: Path, text: bytes) -> list[str]:
    return [file.name for file in folder.iterdir() if text in file.read_bytes()]


@pytest.mark.sqlite_only
def test_deleted_text_is_gone_from_the_log_at_once(tmp_path: Path) -> None:
    catalog, other = open_catalog(tmp_path), open_catalog(tmp_path)
    said, kept = add(catalog, ANA, "secret-penguin", "keep")
    catalog.update(said, Turn("secret-puffin " * 1000), np.ones((1, DIM), dtype=np.float32))
    assert other.count(ANA) == 2
    assert files_with(tmp_path, b"secret-") == [f"{CATALOG_FILE}-wal"]
    catalog.delete(said.id)
    assert files_with(tmp_path, b"secret-") == []
    assert other.facts(ANA) == [kept]
    for each in (catalog, other):
        each.close()


@pytest.mark.sqlite_only
@pytest.mark.parametrize(
    "use", [lambda catalog: add(catalog, ANA, "more"), lambda catalog: catalog.count(ANA)]
)
def test_where_another_process_reads_it_is_gone_after_the_next_use(
    tmp_path: Path, use: Callable[[Catalog], object]
) -> None:
    catalog, other = open_catalog(tmp_path), open_catalog(tmp_path)
    [fact] = add(catalog, ANA, "secret-penguin")
    with other._database.read() as connection:
        connection.execute("SELECT count(*) FROM facts").fetchone()
        start_s = time.monotonic()
        catalog.delete(fact.id)
        use(catalog)
        assert time.monotonic() - start_s < 5, "nobody waits for the one that reads"
        assert files_with(tmp_path, b"secret-penguin") == [f"{CATALOG_FILE}-wal"]
    use(catalog)
    assert files_with(tmp_path, b"secret-penguin") == []
    for each in (catalog, other):
        each.close()


@pytest.mark.sqlite_only
def test_what_a_killed_process_deleted_is_gone_after_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = open_catalog(tmp_path / "data")
    [fact] = add(catalog, ANA, "secret-penguin")
    with monkeypatch.context() as patch:
        patch.setattr(catalog._database, "empty_log", lambda: None)
        catalog.delete(fact.id)
    left = shutil.copytree(tmp_path / "data", tmp_path / "left")
    catalog.close()
    assert files_with(left, b"secret-penguin") == [f"{CATALOG_FILE}-wal"]
    started = Catalog(left)
    assert started.count(ANA) == 0
    assert files_with(left, b"secret-penguin") == []
    started.close()


# --- the file ------------------------------------------------------------------------------------


@pytest.mark.sqlite_only
def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        catalog = open_catalog(tmp_path / "deep" / "data")
        add(catalog, ANA, "x")
    finally:
        os.umask(old)
    folder = tmp_path / "deep" / "data"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}
    assert modes == {CATALOG_FILE + end: 0o600 for end in ("", "-wal", "-shm")}
    catalog.close()


@pytest.mark.sqlite_only
def test_an_open_file_is_made_private_and_a_shared_folder_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o755)
    (folder / "other.txt").write_text("not ours")
    (folder / CATALOG_FILE).touch(mode=0o644)
    open_catalog(folder).close()
    assert stat.S_IMODE((folder / CATALOG_FILE).stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


@pytest.mark.sqlite_only
def test_pragmas(catalog: Catalog) -> None:
    with catalog._database.read() as connection:
        found = {
            name: connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("journal_mode", "foreign_keys", "secure_delete")
        }
        assert connection.execute("PRAGMA user_version").fetchone()[0] == len(MIGRATIONS)
        assert connection.execute("PRAGMA busy_timeout").fetchone()[0] >= 1000
    assert found == {"journal_mode": "wal", "foreign_keys": 1, "secure_delete": 1}


@pytest.mark.sqlite_only
def test_a_newer_catalog_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    open_catalog(tmp_path).close()
    path = tmp_path / CATALOG_FILE
    raw = sqlite3.connect(path)
    raw.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    raw.execute("PRAGMA journal_mode = DELETE")
    raw.close()
    before = path.read_bytes()
    with pytest.raises(NewerCatalog, match=f"version {len(MIGRATIONS) + 1}.*up to {len(MIGRATIONS)}"):
        Catalog(tmp_path).count(Scope())
    assert path.read_bytes() == before


@pytest.mark.sqlite_only
def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / CATALOG_FILE
    raw = sqlite3.connect(path)
    raw.execute("CREATE TABLE t (x)")
    raw.close()
    with pytest.raises(CatalogError, match="another program"):
        Catalog(tmp_path).count(Scope())
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(CatalogError, match="not an SQLite database"):
        Catalog(tmp_path).count(Scope())
    (tmp_path / "file").touch()
    with pytest.raises(CatalogError, match="cannot be used"):
        Catalog(tmp_path / "file" / "data").count(Scope())


@pytest.mark.sqlite_only
def test_a_failed_migration_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "inferscale.catalog.migrations.MIGRATIONS", (*MIGRATIONS, ("CREATE TABLE n (x)", "NO SQL"))
    )
    with pytest.raises(CatalogError):
        Catalog(tmp_path).count(Scope())
    monkeypatch.undo()
    catalog = open_catalog(tmp_path)  # those before have been applied, the last not at all
    with catalog._database.read() as connection:
        assert connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'n'").fetchone() == (0,)
    catalog.close()


def test_another_embedder_is_refused(catalog: Catalog) -> None:
    catalog.record_embedder("fake", DIM)
    for name, dim in (("other", DIM), ("fake", DIM + 1)):
        with pytest.raises(EmbedderMismatch, match=f"'fake' with 4 .*{name!r} with {dim}"):
            catalog.record_embedder(name, dim)


def test_a_closed_catalog_says_so(tmp_path: Path) -> None:
    catalog = open_catalog(tmp_path)
    catalog.close()
    catalog.close()
    with pytest.raises(CatalogError, match="closed"):
        catalog.count(ANA)


@pytest.mark.sqlite_only
def test_use_after_a_fork_is_refused(catalog: Catalog) -> None:
    handle = catalog._database._handle
    assert handle is not None
    handle.process = -1
    with pytest.raises(CatalogError, match="fork"):
        catalog.count(ANA)
    handle.process = os.getpid()


@pytest.mark.sqlite_only
def test_a_failing_write_rolls_back_and_the_catalog_stays_usable(catalog: Catalog) -> None:
    with catalog._database.write() as connection:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
    with catalog._database._open_handle().lock:
        catalog._database._open_handle().connection.execute(f"PRAGMA max_page_count = {pages + 20}")
    with pytest.raises(CatalogError, match="disk is full"):
        add(catalog, ANA, "small", "x" * 1_000_000)
    assert catalog.count(ANA) == 0
    add(catalog, ANA, "small")
    assert catalog.count(ANA) == 1


# --- threads and processes -----------------------------------------------------------------------

_WRITER = """
import os
import sys
import numpy as np
from inferscale.catalog import Catalog
from inferscale.facts import Fact, Scope, Turn
folder, name, batches, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
catalog = Catalog(folder, url=os.environ.get("INFERSCALE_CATALOG"))
catalog.record_embedder("fake", 4)
for batch in range(batches):
    turns = [Turn(f"{name} {batch} {i}") for i in range(size)]
    catalog.add_facts(Scope(user_id=name), turns, np.ones((size, 4), dtype=np.float32))
    print(batch, flush=True)
"""


def start_writer(folder: Path, name: str, batches: int, size: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _WRITER, str(folder), name, str(batches), str(size)]
    environment = {**os.environ, **catalog_variable(folder)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_eight_threads_add(catalog: Catalog) -> None:
    def work(number: int) -> None:
        for i in range(20):
            add(catalog, Scope(user_id=f"u{number % 4}"), f"{number} {i} a", f"{number} {i} b")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    facts = catalog.facts(Scope())
    assert len({fact.text for fact in facts}) == len({fact.seq for fact in facts}) == len(facts) == 320
    assert catalog.count_scopes() == 4
    for first, second in zip(facts[::2], facts[1::2], strict=True):  # a call's facts follow each other
        assert first.text[:-1] == second.text[:-1]


def test_two_processes_add_to_a_new_folder(tmp_path: Path) -> None:
    writers = [start_writer(tmp_path, name, 25, 4) for name in ("p", "q")]
    for writer in writers:
        writer.communicate(timeout=60)
        assert writer.returncode == 0
    catalog = open_catalog(tmp_path)
    assert (catalog.count(Scope(user_id="p")), catalog.count(Scope(user_id="q"))) == (100, 100)
    catalog.close()


def test_killed_while_adding_leaves_whole_transactions(tmp_path: Path) -> None:
    size = 300
    writer = start_writer(tmp_path, "p", 100_000, size)
    assert writer.stdout is not None
    committed = -1
    for line in writer.stdout:
        committed = int(line)
        if committed == 5:
            break
    writer.send_signal(signal.SIGKILL)
    committed = max([committed, *map(int, writer.stdout.read().split())])
    writer.wait()
    writer.stdout.close()
    catalog = open_catalog(tmp_path)
    per_batch: dict[int, int] = {}
    for fact in catalog.facts(Scope()):
        batch = int(fact.text.split()[1])
        per_batch[batch] = per_batch.get(batch, 0) + 1
    assert set(per_batch.values()) == {size}
    assert set(per_batch) >= set(range(committed + 1))
    with catalog._database.read() as connection:
        if not catalog_variable(tmp_path):
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    assert len(catalog.feed.vector_changes(VectorMark()).fact_seqs) == len(per_batch) * size
    add(catalog, Scope(user_id="p"), "still usable")
    catalog.close()


# --- vectors -------------------------------------------------------------------------------------


def test_vector_changes_follow_adds_and_deletions_of_everybody(tmp_path: Path) -> None:
    mine, other = open_catalog(tmp_path), open_catalog(tmp_path)
    facts = add(mine, ANA, *"abcde")
    token = mine.change_token()
    assert mine.change_token() == token
    changes = mine.feed.vector_changes(VectorMark(), limit=3)
    assert changes.fact_seqs == [fact.seq for fact in facts[:3]]
    assert not changes.is_complete
    other.delete(facts[0].id)  # read by `mine` already
    other.delete(facts[4].id)  # not read by it yet
    new = add(other, Scope(user_id="bob"), "new")
    assert mine.change_token() != token
    changes = mine.feed.vector_changes(changes.mark)
    assert changes.fact_seqs == [facts[3].seq, new[0].seq]
    assert facts[0].seq in changes.removed_seqs
    assert changes.is_complete
    assert changes.scope_codes == mine.feed.scope_codes(ANA) + mine.feed.scope_codes(Scope(user_id="bob"))
    again = mine.feed.vector_changes(changes.mark)
    assert (again.fact_seqs, again.removed_seqs, again.mark) == ([], [], changes.mark)
    token = mine.change_token()
    mine.delete(new[0].id)
    assert mine.change_token() != token
    mine.close()
    other.close()


def test_replaced_vectors_come_once_and_as_they_are_now(tmp_path: Path) -> None:
    mine, other = open_catalog(tmp_path), open_catalog(tmp_path)
    facts = add(mine, ANA, *"abcdef")

    def reword(fact: Fact, text: str, number: float) -> None:
        update = other.update(other.facts_by_ids([fact.id])[0], Turn(text), np.full(DIM, number, np.float32))
        assert update is not None

    mark = mine.feed.vector_changes(VectorMark(), limit=4).mark
    reword(facts[2], "C", 2)
    reword(facts[0], "A", 0)
    reword(facts[2], "CC", 22)
    reword(facts[5], "F", 5)  # not read yet
    reword(facts[1], "B", 1)
    other.delete(facts[1].id)
    other.delete(facts[4].id)
    changes = mine.feed.vector_changes(mark)
    assert changes.fact_seqs == [facts[0].seq, facts[2].seq, facts[5].seq]
    assert changes.vectors[:, 0].tolist() == [0, 22, 5]
    assert changes.scope_codes == mine.feed.scope_codes(ANA) * 3
    assert changes.removed_seqs == [facts[1].seq, facts[4].seq]
    assert mine.feed.vector_changes(changes.mark).fact_seqs == []
    read: dict[int, float] = {}
    removed: set[int] = set()
    while True:  # few at a time
        changes = mine.feed.vector_changes(mark, limit=2)
        assert len(changes.fact_seqs) <= 4
        read.update(zip(changes.fact_seqs, changes.vectors[:, 0].tolist(), strict=True))
        removed.update(changes.removed_seqs)
        mark = changes.mark
        if changes.is_complete:
            break
    assert read == {facts[0].seq: 0, facts[2].seq: 22, facts[5].seq: 5}
    assert removed == {facts[1].seq, facts[4].seq}
    mine.close()
    other.close()
