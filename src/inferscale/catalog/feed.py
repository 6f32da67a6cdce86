"""What an index of the catalog is made of, and what keeps it in step. Every method is one transaction.

Contracts: `reads` and `vectors`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from inferscale.catalog import reads as _reads
from inferscale.catalog import rows as _rows
from inferscale.catalog import vectors as _vectors
from inferscale.catalog.embedders import OwnEmbedder
from inferscale.catalog.results import ScopeMark, StoredText, VectorChanges, VectorMark
from inferscale.catalog.sql import Database
from inferscale.facts import Scope
from inferscale.filters import Filter


class IndexFeed:
    """`Catalog.feed`."""

    def __init__(self, database: Database, embedder: OwnEmbedder) -> None:
        self._database = database
        self._embedder = embedder

    def scope_codes(self, filter: Scope) -> list[int]:
        """Codes of the exact scopes that `filter` covers."""
        where, values = _rows.covered(filter)
        with self._database.read() as connection:
            return [row[0] for row in connection.execute(f"SELECT id FROM scopes WHERE {where}", values)]

    def scope_marks(self, scope: Scope) -> list[ScopeMark]:
        """How far the exact scopes under `scope` are that hold facts."""
        with self._database.read() as connection:
            return _reads.scope_marks(connection, scope)

    def matching(self, scope: Scope, within: Filter | None = None) -> list[int]:
        """Sequence numbers of the facts under `scope` that may be found and pass the filter, rising."""
        with self._database.read() as connection:
            return _reads.matching(connection, scope, within, time.time())

    def vector_changes(self, since: VectorMark, limit: int = 50_000) -> VectorChanges:
        """At most `limit` vectors stored since the mark, and what `limit` changes did to older facts."""
        with self._database.read() as connection:
            self._embedder.check(connection)
            return _vectors.changes_since(connection, since, limit)

    def texts(self, code: int, after: int = 0) -> list[StoredText]:
        """What the facts of an exact scope say, those above `after`, in seq order; no core blocks."""
        with self._database.read() as connection:
            return _reads.texts(connection, code, after)

    def texts_of(self, code: int, seqs: Iterable[int]) -> list[StoredText]:
        """The same of those of the facts that the exact scope holds."""
        with self._database.read() as connection:
            return _reads.texts_of(connection, code, seqs)

    def changes_after(self, change: int) -> tuple[int, list[int]]:
        """Number of the last change, and facts of anybody that were removed or reworded behind `change`."""
        with self._database.read() as connection:
            return _reads.changes_after(connection, change)
