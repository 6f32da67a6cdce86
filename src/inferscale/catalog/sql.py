"""What the catalog asks of a database, SQLite or PostgreSQL, and the SQL in which the two differ.

All SQL of the catalog is written once, as SQLite takes it. Where PostgreSQL says something otherwise, the
statement holds one of the fragments here, in whose place `postgres.dialect` puts its own
words. Knows no table's meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

NUMBERS = "(SELECT value FROM json_each(?) AS numbers)"
"""The whole numbers of a JSON list, as rows with the column `value`."""
TEXTS = "(SELECT value FROM json_each(?) AS texts)"
"""The same of texts."""
EXACT = (
    "ifnull(user_id, '') = ifnull(?, '') AND ifnull(agent_id, '') = ifnull(?, '') "
    "AND ifnull(run_id, '') = ifnull(?, '')"
)
"""Condition on `scopes` for the exact scope of three ids; an id is never ''."""
STORED_BYTES = "length(CAST(text AS BLOB)) + length(CAST(metadata AS BLOB))"
"""Of a fact, in UTF-8."""
NO_LIMIT = 2**62


class Cursor(Protocol):
    """What a statement answers. rowcount: rows that it changed."""

    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    """One transaction of a database.

    filters_in_sql: whether `conditions.condition_of` is SQL that it understands.
    """

    filters_in_sql: bool

    def execute(self, sql: str, values: Sequence[Any] = ()) -> Cursor: ...

    def executemany(self, sql: str, rows: Iterable[Sequence[Any]]) -> object: ...

    def insert(self, sql: str, values: Sequence[Any], column: str) -> int:
        """Insert one row; the number that its `column`, which counts the rows, has got."""
        ...

    def insert_all(self, sql: str, rows: Sequence[Sequence[Any]], column: str) -> list[int]:
        """The same of several rows, in their order."""
        ...

    def tables(self) -> Mapping[str, set[str]]:
        """Name of each table of the catalog, in order, and its columns."""
        ...

    def rename_tables(self, *renamed: tuple[str, str]) -> None:
        """Old and new names, in turn. What names a table elsewhere, as a trigger does, keeps the old one."""
        ...

    def make_vectors_next(self) -> None:
        """An empty table `vectors_next`, as the migrations make it."""
        ...


class ChangeToken(NamedTuple):
    """Differs from an earlier token of the same Database if anything was written since, here or elsewhere.

    data_version: differs where somebody else wrote.
    """

    data_version: int
    own_writes: int


class Database(Protocol):
    """A catalog's database, opened (and made or migrated) on first use. Safe from several threads.

    place: what to call it in messages. option: how a command is told of it.
    """

    @property
    def place(self) -> str: ...

    @property
    def option(self) -> str: ...

    def read(self) -> AbstractContextManager[Connection]:
        """One consistent snapshot for everything that is read inside."""
        ...

    def write(self) -> AbstractContextManager[Connection]:
        """One write transaction, alone: all of it is stored, or on any exception nothing.

        Raises CatalogError where nothing can be written.
        """
        ...

    def change_token(self) -> ChangeToken: ...

    def empty_log(self) -> None:
        """Let what was deleted leave the log as well, where the database can be told to."""
        ...

    def close(self) -> None:
        """Any later use is a CatalogError. May be called twice."""
        ...
