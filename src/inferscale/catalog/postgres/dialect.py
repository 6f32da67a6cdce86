"""A psycopg connection as a `Connection` of the catalog: its SQL in PostgreSQL's words.

Statements are written for SQLite (`catalog.sql`); the fragments that it names are replaced here, and
parameters get psycopg's sign. Statements that come often are prepared by psycopg, once a session.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import psycopg

from inferscale.catalog.postgres.schema import TABLES, VECTORS_NEXT
from inferscale.catalog.sql import EXACT, NUMBERS, STORED_BYTES, TEXTS

_FRAGMENTS = {
    NUMBERS: "(SELECT jsonb_array_elements_text(?::jsonb)::bigint AS value)",
    TEXTS: '(SELECT jsonb_array_elements_text(?::jsonb) COLLATE "C" AS value)',
    EXACT: "scope_digest(user_id, agent_id, run_id) = scope_digest(?, ?, ?)",
    STORED_BYTES: "octet_length(text) + octet_length(metadata)",
    " IS ?": " IS NOT DISTINCT FROM ?",
    "instr(": "strpos(",
}


@lru_cache(maxsize=1024)
def translated(sql: str) -> str:
    """A statement of the catalog for psycopg."""
    for ours, theirs in _FRAGMENTS.items():
        sql = sql.replace(ours, theirs)
    return sql.replace("%", "%%").replace("?", "%s")


class PostgresConnection:
    """`Connection` over one of psycopg, in a transaction."""

    filters_in_sql = False

    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection

    def execute(self, sql: str, values: Sequence[Any] = ()) -> psycopg.Cursor:
        return self._connection.execute(_query(sql), values)

    def executemany(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        self._connection.cursor().executemany(_query(sql), rows)

    def insert(self, sql: str, values: Sequence[Any], column: str) -> int:
        row = self.execute(f"{sql} RETURNING {column}", values).fetchone()
        assert row is not None
        return int(row[0])

    def insert_all(self, sql: str, rows: Sequence[Sequence[Any]], column: str) -> list[int]:
        """Without waiting for the server after each."""
        if not rows:
            return []
        cursor = self._connection.cursor()
        cursor.executemany(_query(f"{sql} RETURNING {column}"), rows, returning=True)
        numbers = [int(row[0]) for row in cursor.fetchall()]
        while cursor.nextset():  # `results` came with psycopg 3.3
            numbers += [int(row[0]) for row in cursor.fetchall()]
        return numbers

    def tables(self) -> dict[str, set[str]]:
        found = self.execute(
            "SELECT table_name, column_name FROM information_schema.columns "
            f"WHERE table_schema = current_schema() AND table_name IN {TEXTS} ORDER BY table_name",
            (_json_list(TABLES),),
        )
        tables: dict[str, set[str]] = {}
        for table, column in found:
            tables.setdefault(table, set()).add(column)
        return tables

    def rename_tables(self, *renamed: tuple[str, str]) -> None:
        # The body of a trigger's function is a text and names tables as it is written.
        for old, new in renamed:
            self.execute(f"ALTER TABLE {old} RENAME TO {new}")

    def make_vectors_next(self) -> None:
        for statement in VECTORS_NEXT:
            self.execute(statement)


def _query(sql: str) -> bytes:
    """psycopg's types allow literals and bytes only; all that a caller gave is a parameter."""
    return translated(sql).encode()


def _json_list(names: Iterable[str]) -> str:
    assert all(re.fullmatch(r"\w+", name) for name in names)
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"
