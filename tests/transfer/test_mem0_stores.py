"""Mem0's own files, written by mem0ai 2.2.1 (compat/mem0_play.py): a Qdrant folder, history.db, a get_all."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fakes import open_memory
from inferscale.compat.mem0 import Memory as Mem0
from inferscale.errors import InvalidInput
from inferscale.facts import Scope
from inferscale.memory import Memory
from inferscale.transfer import import_facts, read_source

DATA = Path(__file__).parent / "data" / "mem0"
QDRANT, HISTORY = str(DATA / "qdrant"), str(DATA / "history.db")


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    with open_memory(tmp_path / "memory") as opened:
        yield opened


def test_a_qdrant_folder_comes_in_as_mem0_showed_it(memory: Memory) -> None:
    recorded = Path(__file__).parents[1] / "compat" / "data" / "mem0.json"
    shown = json.loads(recorded.read_text(encoding="utf-8"))["everything"]
    assert import_facts(memory, read_source(QDRANT))[:3] == (4, 0, 0)
    mem0 = Mem0(memory=memory)
    assert mem0.get_all(filters={"user_id": "ann"}) == shown
    bobs = mem0.get_all(filters={"user_id": "bob"})["results"]
    assert [(found["memory"], found["role"], found.get("actor_id"), found["metadata"]) for found in bobs] == [
        ("zebra crossing walks", "user", "bob", {"topic": "walks", "n": 1}),
        ("quiet harbour lights", "assistant", None, {"topic": "walks", "n": 1}),
    ]
    assert [fact.speaker for fact in memory.get_all(user_id="bob")] == ["bob", "assistant"]
    [hit] = memory.search("zebra", user_id="bob", top_k=1)
    assert hit.fact.text == "zebra crossing walks"
    assert import_facts(memory, read_source(QDRANT))[:3] == (0, 0, 4)


def test_history_comes_along(memory: Memory) -> None:
    import_facts(memory, read_source(QDRANT, history=HISTORY))
    [fact] = memory.get_all(user_id="ann")
    rows = Mem0(memory=memory).history(fact.id)
    with closing(sqlite3.connect(HISTORY)) as connection:
        expected = connection.execute(
            "SELECT old_memory, new_memory, event FROM history WHERE memory_id = ? ORDER BY rowid", (fact.id,)
        ).fetchall()
    assert [(row["old_memory"], row["new_memory"], row["event"]) for row in rows] == expected
    assert len(rows) == 2


def test_a_history_alone_needs_an_owner_and_brings_nothing_deleted(memory: Memory) -> None:
    with pytest.raises(InvalidInput, match=r"Memory 1 of .*history.db is no fact: it names no owner"):
        import_facts(memory, read_source(HISTORY))
    import_facts(memory, read_source(HISTORY, Scope("eve")))
    texts = [fact.text for fact in memory.get_all(user_id="eve")]
    assert texts == ["Likes tea.", "zebra crossing walks", "quiet harbour lights", "second"]
    assert memory.history(memory.get_all(user_id="eve")[3].id)[0].text == "first"


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("form", ["results", "list", "lines"])
def test_a_dump_of_get_all_comes_in(memory: Memory, tmp_path: Path, form: str, indent: int | None) -> None:
    import_facts(memory, read_source(QDRANT))
    shown = Mem0(memory=memory).get_all(filters={"user_id": "bob"})
    file = tmp_path / "dump.json"
    if form == "lines":
        file.write_text("\n".join(map(json.dumps, shown["results"])), encoding="utf-8")
    else:
        dumped = shown if form == "results" else shown["results"]
        file.write_text("\n" + json.dumps(dumped, indent=indent), encoding="utf-8-sig")
    with open_memory(tmp_path / "other") as other:
        assert import_facts(other, read_source(str(file)))[:3] == (2, 0, 0)
        assert Mem0(memory=other).get_all(filters={"user_id": "bob"}) == shown


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"created_at": "soon"}, "created_at is 'soon'"),
        ({"created_at": "0001-01-01T00:00:00+14:00"}, "created_at is -6"),
        ({"expiration_date": "soon"}, "expiration_date is 'soon'"),
        ({"metadata": 1}, "metadata is a JSON int"),
        ({"memory": ""}, "its text is blank"),
    ],
)
def test_a_bad_memory_of_a_dump_is_named(
    memory: Memory, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    good = {"id": "1", "memory": "x", "user_id": "ann"}
    file = tmp_path / "dump.json"
    file.write_text(json.dumps({"results": [good, {**good, **change}]}), encoding="utf-8")
    with pytest.raises(InvalidInput, match=rf"Item 2 of .*: {message}"):
        import_facts(memory, read_source(str(file)))


def test_the_last_day_of_the_calendar_is_for_ever(memory: Memory, tmp_path: Path) -> None:
    file = tmp_path / "dump.json"
    record = {"id": "1", "memory": "x", "user_id": "ann", "expiration_date": "9999-12-31"}
    file.write_text(json.dumps([record]), encoding="utf-8")
    import_facts(memory, read_source(str(file)))
    assert memory.get("1").expires_at is None


def test_other_collections_are_named(memory: Memory, tmp_path: Path) -> None:
    folder = tmp_path / "qdrant"
    shutil.copytree(Path(QDRANT) / "collection" / "mem0", folder / "collection" / "talks")
    (folder / "collection" / "talks_entities").mkdir()
    shutil.copy(
        Path(QDRANT) / "collection" / "mem0" / "storage.sqlite", folder / "collection" / "talks_entities"
    )
    assert len(list(read_source(str(folder)))) == 4
    assert len(list(read_source(str(folder / "collection" / "talks")))) == 4
    with pytest.raises(InvalidInput, match=r"'other'.*talks, talks_entities.*--collection"):
        list(read_source(str(folder), collection="other"))
    with pytest.raises(InvalidInput, match="holds no collection"):
        list(read_source(str(tmp_path)))
    with pytest.raises(InvalidInput, match="no history of Mem0"):
        list(read_source(QDRANT, history=str(folder / "collection" / "talks" / "storage.sqlite")))


class PointStruct:
    """As Qdrant's client writes it, with a vector that is an array."""

    __module__ = "qdrant_client.http.models.models"

    def __init__(self) -> None:
        payload = {"data": "x", "user_id": "ann"}
        self.__dict__ = {"id": "1", "vector": {"": np.ones(4, np.float32)}, "payload": payload}


def store_point(folder: Path, point: object) -> None:
    with closing(sqlite3.connect(folder / "storage.sqlite")) as connection, connection:
        connection.execute("CREATE TABLE points (id TEXT PRIMARY KEY, point BLOB)")
        connection.execute("INSERT INTO points VALUES ('1', ?)", (pickle.dumps(point),))


def test_a_point_may_hold_its_vector_as_an_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(PointStruct.__module__)
    module.PointStruct = PointStruct  # type: ignore[attr-defined]
    for name in ("qdrant_client", "qdrant_client.http", "qdrant_client.http.models"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    store_point(tmp_path, PointStruct())
    [item] = read_source(str(tmp_path))
    assert (item.stored.fact.text, item.stored.fact.scope) == ("x", Scope("ann"))


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["EVIL_FOLDER"],)


def test_a_point_that_would_run_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    monkeypatch.setenv("EVIL_FOLDER", str(victim))
    store_point(tmp_path, Evil())
    with pytest.raises(InvalidInput, match=r"point 1 of .* cannot be read: .*mkdir has no place in a point"):
        list(read_source(str(tmp_path)))
    assert not victim.exists()


def test_the_stores_of_mem0_are_not_written_to(tmp_path: Path) -> None:
    shutil.copytree(DATA, tmp_path / "mem0")
    files = [path for path in (tmp_path / "mem0").rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    list(read_source(str(tmp_path / "mem0" / "qdrant"), history=str(tmp_path / "mem0" / "history.db")))
    assert {path: path.read_bytes() for path in (tmp_path / "mem0").rglob("*") if path.is_file()} == before
