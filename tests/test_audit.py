"""An audit finds nothing after a deletion, and whatever is planted."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import pytest
from click.testing import CliRunner

from fakes import ANA, DIM, add, open_catalog, open_memory
from inferscale.catalog import CATALOG_FILE, Catalog
from inferscale.cli.app import main
from inferscale.errors import InvalidInput
from inferscale.facts import Scope, Turn
from inferscale.operations.audit import Audit, audit
from inferscale.pool.disk import DiskStore

BOB = Scope(user_id="bob")
SECRET = "Ana's locker has the number 4711"
LONG = "The long story of Ana's summer house. " * 300  # goes on in overflow pages


class Numbers(NamedTuple):
    facts: int
    injectable: int | None


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    opened = open_catalog(tmp_path)
    yield opened
    opened.close()


def places(found: Audit) -> set[str]:
    return {finding.place for finding in found.findings if finding.num_found}


def plant(folder: Path, sql: str, *values: object) -> None:
    connection = sqlite3.connect(folder / CATALOG_FILE)
    connection.execute("PRAGMA secure_delete = OFF")
    with connection:
        connection.execute(sql, values)
    connection.close()


def test_what_is_stored_is_found_everywhere(catalog: Catalog, tmp_path: Path) -> None:
    first, second = add(catalog, ANA, SECRET, "two")
    catalog.passes.record("m", ANA, [first.id], [second.id], ["key"])
    catalog.retire(first.id)
    catalog.passes.record("m", ANA, [], [second.id], ["key"])
    store = DiskStore(tmp_path / "kv", "format", 0, 4)
    store.open()
    store.write("key", memoryview(b"rows"), 0)
    store.write("of a system text", memoryview(b"rows"), 0)
    catalog.close()
    found = audit(tmp_path, ANA, server=Numbers(1, 1))
    tables = {f"table {name}" for name in ("facts", "vectors", "past", "passes", "pass_facts", "encodings")}
    assert places(found) == {*tables, "kv", "server"}
    assert not found.is_clean
    assert {finding.num_found for finding in found.findings if finding.place == "kv"} == {1, None}


def test_nothing_is_found_once_all_is_deleted(catalog: Catalog, tmp_path: Path) -> None:
    facts = add(catalog, ANA, SECRET, LONG, *(f"{SECRET} {i}" for i in range(200)))
    add(catalog, BOB, "Bob stays")
    catalog.passes.record("m", ANA, [facts[0].id], [facts[1].id], ["key"])
    catalog.retire(facts[2].id, facts[0].id, "for a reason of the audit")
    catalog.update(facts[3], Turn(f"{SECRET} no more"), np.ones(DIM, dtype=np.float32))
    catalog.delete_all(ANA)
    catalog.close()
    texts = [SECRET, LONG, f"{SECRET} 7", f"{SECRET} no more", "for a reason of the audit"]
    found = audit(tmp_path, ANA, texts, Numbers(0, 0))
    assert found.is_clean, found
    assert not audit(tmp_path, BOB).is_clean


@pytest.mark.parametrize(
    ("sql", "values", "place"),
    [
        ("INSERT INTO past VALUES ('x', 1, 'old', NULL, NULL, 0, '[]', 0, NULL, NULL)", (), "table past"),
        ("INSERT INTO passes (model, scope, num_window) VALUES ('m', 1, 0)", (), "table passes"),
        ("INSERT INTO vectors VALUES (1, 'fake', 1, x'00000000')", (), "table vectors"),
        ("INSERT INTO vectors_next VALUES (1, 'fake', 1, x'00000000')", (), "table vectors_next"),
        ("INSERT INTO revisions VALUES (1, 0, 'former', 0)", (), "table revisions"),
        ("INSERT INTO meta VALUES ('planted', ?)", (SECRET,), CATALOG_FILE),
        ("INSERT INTO meta VALUES ('planted', ?)", (json.dumps([LONG]),), CATALOG_FILE),
    ],
)
def test_a_leftover_in_the_catalog_is_found(
    catalog: Catalog, tmp_path: Path, sql: str, values: tuple[str, ...], place: str
) -> None:
    add(catalog, ANA, SECRET, LONG)
    add(catalog, BOB, "Bob stays")
    catalog.delete_all(ANA)
    catalog.close()
    assert audit(tmp_path, ANA, [SECRET, LONG]).is_clean
    plant(tmp_path, sql, *values)
    assert places(audit(tmp_path, ANA, [SECRET, LONG])) == {place}


def test_free_pages_that_were_not_emptied_are_found(catalog: Catalog, tmp_path: Path) -> None:
    add(catalog, ANA, *(f"{SECRET} {i}" for i in range(500)))
    catalog.close()
    plant(tmp_path, "DELETE FROM facts")
    free = [f for f in audit(tmp_path, ANA).findings if f.what.startswith("free pages")]
    assert [f.num_found for f in free] != [0]
    found = audit(tmp_path, ANA, [f"{SECRET} 17"])
    assert [f.place for f in found.findings if f.what == "former texts, of 1" and f.num_found] == [
        CATALOG_FILE
    ]


def test_a_text_in_another_file_of_the_folder_is_found(catalog: Catalog, tmp_path: Path) -> None:
    catalog.count(ANA)
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "old.jsonl").write_text(json.dumps({"text": "Ärger mit dem Nachbarn"}))
    assert places(audit(tmp_path, ANA, ["Ärger mit dem Nachbarn"])) == {"old.jsonl"}


def test_what_others_say_as_well_is_no_finding(catalog: Catalog, tmp_path: Path) -> None:
    """Shared facts survive the deletion of one owner."""
    add(catalog, ANA, SECRET)
    [bobs] = add(catalog, BOB, SECRET)
    catalog.passes.record("m", ANA, [], [catalog.facts(ANA)[0].id], ["one"])
    catalog.passes.record("m", BOB, [], [bobs.id], ["two"])
    deletion = catalog.delete_all(ANA)
    assert deletion.keys == ("one",)
    assert catalog.facts(BOB) == [bobs]
    assert catalog.passes.encodings("m", [bobs.id])[bobs.id].key == "two"
    catalog.close()
    found = audit(tmp_path, ANA, [SECRET])
    assert found.is_clean
    assert "facts that are there say the same" in {finding.note for finding in found.findings}


def test_a_server_that_holds_facts_or_does_not_say(catalog: Catalog, tmp_path: Path) -> None:
    catalog.count(ANA)
    assert places(audit(tmp_path, ANA, server=Numbers(0, 3))) == {"server"}
    assert audit(tmp_path, ANA, server=Numbers(0, None)).is_clean


def test_a_folder_without_memory_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="holds no memory"):
        audit(tmp_path / "none", ANA)
    assert not (tmp_path / "none").exists()


def test_on_the_command_line(tmp_path: Path) -> None:
    with open_memory(tmp_path) as memory:
        [fact] = memory.add(Turn(SECRET), user_id="ana")
        memory.update(fact.id, text="Ana's locker was sold last week")
        memory.add("Bob stays", user_id="bob")
    where = ["audit", "--user-id", "ana", "--data-dir", str(tmp_path)]
    there = CliRunner().invoke(main, where)
    assert there.exit_code == 1, there.output
    assert "table revisions" in there.output
    assert "Found in: table facts" in there.output
    with open_memory(tmp_path) as memory:
        memory.delete_all(user_id="ana")
    gone = CliRunner().invoke(
        main, [*where, "--texts", "-", "--json"], input=f"{SECRET}\nAna's locker was sold\n"
    )
    assert gone.exit_code == 0, gone.output
    found = [json.loads(line) for line in gone.stdout.splitlines()]
    assert {"former texts, of 2"} <= {row["what"] for row in found}
    assert not any(row["num_found"] for row in found)


class OneServer:
    """A client of a server that still has one fact of everybody."""

    asked: ClassVar[list[object]] = []

    def __init__(self, url: str, api_key: str | None) -> None:
        self.asked.append((url, api_key))

    def __enter__(self) -> OneServer:
        return self

    def __exit__(self, *_: object) -> None: ...

    def stats(self, **ids: str | None) -> Numbers:
        self.asked.append(ids)
        return Numbers(1, 0)


def test_a_server_is_asked_with_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_memory(tmp_path) as memory:
        memory.add("Bob stays", user_id="bob")
    monkeypatch.setattr("inferscale.client.Client", OneServer)
    monkeypatch.setenv("OPERATOR_KEY", "k-1")
    where = ["audit", "--user-id", "ana", "--data-dir", str(tmp_path), "--url", "http://127.0.0.1:1"]
    done = CliRunner().invoke(main, [*where, "--api-key-env", "OPERATOR_KEY"])
    assert done.exit_code == 1, done.output
    assert "Found in: server." in done.stderr
    assert OneServer.asked == [
        ("http://127.0.0.1:1", "k-1"),
        {"user_id": "ana", "agent_id": None, "run_id": None},
    ]
    refused = CliRunner().invoke(main, [*where, "--api-key-env", "NO_SUCH_KEY"])
    assert "NO_SUCH_KEY, named by --api-key-env, is not set" in refused.stderr


def test_an_id_that_was_never_known_is_told(catalog: Catalog, tmp_path: Path) -> None:
    add(catalog, ANA, SECRET)
    catalog.delete_all(ANA)
    catalog.close()
    assert ANA.user_id is not None
    told = {}
    for name in (ANA.user_id, "nana"):
        result = CliRunner().invoke(main, ["audit", "--user-id", name, "--data-dir", str(tmp_path)])
        assert result.exit_code == 0, result.output
        told[name] = "Nothing was ever stored in" in result.stderr
    assert told == {ANA.user_id: False, "nana": True}
