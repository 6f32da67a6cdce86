"""What Mem0 stores by default → its memories as JSON objects: a local Qdrant folder, and `history.db`.

Both are SQLite files and are only read. Qdrant keeps each point as a pickle, which could run code: here
nothing but a point's own fields is taken from it, and any other name in it is refused. Neither library is
needed.
"""

from __future__ import annotations

import io
import pickle
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from inferscale.errors import InvalidInput

COLLECTION_FILE = "storage.sqlite"
_COLLECTIONS = "collection"
_DEFAULT_COLLECTION = "mem0"
_NOT_MEMORIES = ("_entities", "-entities", "mem0migrations")
_SQLITE = b"SQLite format 3\0"
_UNREADABLE = (
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    TypeError,
    ValueError,
)


class Change(NamedTuple):
    """A row of `history.db`; times as Mem0 writes them."""

    old_memory: str | None
    new_memory: str | None
    event: str
    created_at: str | None
    updated_at: str | None
    actor_id: str | None
    role: str | None


def is_sqlite(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_SQLITE)) == _SQLITE


def has_table(path: Path, name: str) -> bool:
    with closing(_open(path)) as connection:
        return bool(
            _rows(connection, path, "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", name)
        )


def collection_file(folder: Path, collection: str | None) -> Path:
    """The file of a collection in a local Qdrant folder: the one named, `mem0`, or the only one."""
    if collection is None and (folder / COLLECTION_FILE).is_file():
        return folder / COLLECTION_FILE
    files = {file.parent.name: file for file in folder.glob(f"{_COLLECTIONS}/*/{COLLECTION_FILE}")}
    names = sorted(name for name in files if not name.endswith(_NOT_MEMORIES))
    chosen = collection or (_DEFAULT_COLLECTION if _DEFAULT_COLLECTION in files else None)
    if chosen is None and len(names) == 1:
        chosen = names[0]
    if chosen is None or chosen not in files:
        found = f"it holds the collections {', '.join(sorted(files))}" if files else "it holds no collection"
        raise InvalidInput(
            f"{folder} is no local Qdrant folder with "
            f"{'memories of Mem0' if chosen is None else f'the collection {chosen!r}'}: {found}. Give the "
            "folder that Mem0's vector_store.config.path names, and --collection."
        )
    return files[chosen]


def read_collection(path: Path) -> Iterator[dict[str, Any]]:
    """Payloads with their ids, oldest first."""
    with closing(_open(path)) as connection:
        rows = _rows(connection, path, "SELECT point FROM points ORDER BY rowid")
    points: dict[str, dict[str, Any]] = {}
    for number, (blob,) in enumerate(rows, start=1):
        try:
            state = _PointReader(io.BytesIO(blob)).load().state
            fields = state.get("__dict__", state)
            payload = dict(fields["payload"] or {})
            fact_id = str(fields["id"])
        except _UNREADABLE as error:
            raise InvalidInput(f"point {number} of {path} cannot be read: {error}") from error
        points.pop(fact_id, None)  # a newer row of the same point counts
        points[fact_id] = {**payload, "id": fact_id}
    yield from sorted(points.values(), key=lambda point: str(point.get("created_at")))


def read_history(path: Path) -> dict[str, list[Change]]:
    """Memory id → its changes, oldest first."""
    with closing(_open(path)) as connection:
        columns = {row[1] for row in _rows(connection, path, "PRAGMA table_info(history)")}
        listed = ", ".join(name if name in columns else f"NULL AS {name}" for name in Change._fields)
        found = _rows(connection, path, f"SELECT memory_id, {listed} FROM history ORDER BY rowid")
    changes: dict[str, list[Change]] = {}
    for memory_id, *row in found:
        changes.setdefault(str(memory_id), []).append(Change(*row))
    return changes


def memories_of(history: dict[str, list[Change]]) -> Iterator[dict[str, Any]]:
    """What the memories say that were not deleted. A history names no owners and no metadata."""
    for memory_id, changes in history.items():
        last = changes[-1]
        if last.event == "DELETE" or last.new_memory is None:
            continue
        memory = {
            "id": memory_id,
            "memory": last.new_memory,
            "created_at": changes[0].created_at or last.created_at,
            "updated_at": last.updated_at or last.created_at,
            "actor_id": last.actor_id,
            "role": last.role,
        }
        yield {name: value for name, value in memory.items() if value is not None}


def _open(path: Path) -> sqlite3.Connection:
    try:
        return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    except sqlite3.Error as error:
        raise InvalidInput(f"{path} cannot be opened: {error}. Check its permissions.") from error


def _rows(connection: sqlite3.Connection, path: Path, sql: str, *values: object) -> list[tuple[Any, ...]]:
    try:
        return connection.execute(sql, values).fetchall()
    except sqlite3.Error as error:
        raise InvalidInput(
            f"{path} cannot be read: {error}. Close the program that uses it, or give a copy."
        ) from error


class _Inert:
    """Stands for the classes of Qdrant's client and numpy: takes a state and does nothing."""

    state: Any

    def __new__(cls, *_: object) -> _Inert:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _PointReader(pickle.Unpickler):
    """Reads plain values, and stand-ins for Qdrant's models and for vectors; refuses any other name."""

    def find_class(self, module: str, name: str) -> type:
        if module.partition(".")[0] in ("qdrant_client", "numpy"):
            return _Inert
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a point")
