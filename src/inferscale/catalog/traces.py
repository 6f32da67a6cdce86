"""What a catalog still holds of a scope, or of facts that are gone.

Goes through the tables by their columns (`scope`: code of an exact scope; `fact`: number of a fact), so that
a table that is added later is looked through as well. Reads only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from inferscale.catalog.passes import known_keys
from inferscale.catalog.rows import covered
from inferscale.catalog.sql import NUMBERS, Connection, Database
from inferscale.facts import Scope

_NUMBERS_ONLY = ("changes",)
"""Holds numbers of facts that are gone on purpose: so other processes learn of it."""
_TEXTS = (
    ("facts", "text"), ("facts", "metadata"), ("past", "text"), ("past", "revisions"), ("past", "reason"),
    ("revisions", "text"),
)  # fmt: skip


class TableTraces(NamedTuple):
    """Rows of one table. of_scope: of the scope or of its facts. orphans: of facts that do not exist."""

    table: str
    of_scope: int
    orphans: int


class CatalogTraces:
    """Reads of one catalog, over a database object of its own, which it closes."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.place = database.place

    def close(self) -> None:
        """Empty the log, where nobody else is reading, and close the file."""
        self._database.empty_log()
        self._database.close()

    def tables(self, filter: Scope) -> list[TableTraces]:
        """What each table that belongs to scopes or facts holds."""
        where, values = covered(filter)
        in_scope = f"{NUMBERS}"
        facts = f"(SELECT seq FROM facts WHERE scope IN {in_scope})"
        found = []
        with self._database.read() as connection:
            rows = connection.execute(f"SELECT id FROM scopes WHERE {where}", values).fetchall()
            codes = json.dumps([row[0] for row in rows])
            for table, columns in _tables(connection):
                of_scope = orphans = 0
                if "scope" in columns:
                    of_scope = _count(connection, table, f"scope IN {in_scope}", codes)
                if "fact" in columns:
                    of_scope += _count(connection, table, f"fact IN {facts}", codes)
                    orphans = _count(connection, table, "fact NOT IN (SELECT seq FROM facts)")
                found.append(TableTraces(table, of_scope, orphans))
        return found

    def is_known(self, filter: Scope) -> bool:
        """Whether anything was ever stored under a scope that it covers: the names of scopes stay."""
        where, values = covered(filter)
        with self._database.read() as connection:
            found = connection.execute(f"SELECT EXISTS (SELECT 1 FROM scopes WHERE {where})", values)
            return bool(found.fetchone()[0])

    def keys(self, filter: Scope) -> set[str]:
        """Keys of all encodings of the scope's facts, of all models."""
        where, values = covered(filter)
        with self._database.read() as connection:
            found = connection.execute(
                "SELECT e.key FROM encodings e JOIN facts f ON f.seq = e.fact "
                f"WHERE f.scope IN (SELECT id FROM scopes WHERE {where})",
                values,
            )
            return {row[0] for row in found}

    def unnamed(self, keys: Iterable[str]) -> set[str]:
        """Those of the keys that no encoding has."""
        wanted = list(keys)
        with self._database.read() as connection:
            return set(wanted) - known_keys(connection, wanted)

    def is_said(self, text: str) -> bool:
        """Whether any fact or history of any scope says this, alone or within other words."""
        shapes = {text, json.dumps(text)[1:-1]}
        with self._database.read() as connection:
            return any(
                connection.execute(
                    f"SELECT EXISTS (SELECT 1 FROM {table} WHERE instr({column}, ?) > 0)", (shape,)
                ).fetchone()[0]
                for table, column in _TEXTS
                for shape in shapes
            )


def _tables(connection: Connection) -> list[tuple[str, set[str]]]:
    """Tables with a column `scope` or `fact`, by name."""
    return [
        (name, columns)
        for name, columns in connection.tables().items()
        if name not in _NUMBERS_ONLY and columns & {"scope", "fact"}
    ]


def _count(connection: Connection, table: str, condition: str, *values: str) -> int:
    return int(connection.execute(f'SELECT count(*) FROM "{table}" WHERE {condition}', values).fetchone()[0])
