"""Vectors of another embedder, made beside those in use and put in their place at once.

    begin ─▶ (missing ─▶ store) until none is missing ─▶ switch ─▶ clear_old

`vectors_next` fills while everybody goes on with `vectors`; a fact that is reworded or deleted meanwhile
loses its row there. `switch` is one transaction that renames tables and moves no vector, and is refused while
a fact has none. So a search sees old vectors only, or new ones only; a process that still embeds with the old
model is refused from then on (`Catalog.record_embedder`). Whoever is killed goes on where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscale.catalog.rows import EmbedderIdentity, read_embedder, select_facts
from inferscale.catalog.sql import Connection, Database
from inferscale.catalog.vectors import REPLACES
from inferscale.errors import CatalogError, InvalidInput
from inferscale.facts import Fact

_NEXT = ("next_embedder_name", "next_embedder_dim")
_CLEARED_AT_ONCE = 5_000


class Progress(NamedTuple):
    """Facts that have a vector of the next embedder, and all facts; core blocks have none."""

    num_done: int
    num_facts: int


class NextVectors:
    """Of one catalog, over a database object of its own, which it closes."""

    def __init__(self, database: Database, embedder: EmbedderIdentity) -> None:
        self.embedder = embedder
        self._database = database

    def close(self) -> None:
        self._database.close()

    def begin(self) -> bool:
        """Whether there is something to do: False where these are the vectors in use already.

        Goes on with what was begun for the same embedder; drops what was begun for another.
        """
        with self._database.write() as connection:
            used = read_embedder(connection)
            if used is None or used == self.embedder:
                connection.execute("DELETE FROM vectors_next")
                connection.execute("DELETE FROM meta WHERE name IN (?, ?)", _NEXT)
                return False
            if self._begun(connection) != self.embedder:
                connection.execute("DELETE FROM vectors_next")
                values = (self.embedder.name, str(self.embedder.dim))
                connection.executemany(
                    "INSERT INTO meta (name, value) VALUES (?, ?) "
                    "ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                    list(zip(_NEXT, values, strict=True)),
                )
            return True

    def progress(self) -> Progress:
        with self._database.read() as connection:
            done = connection.execute("SELECT count(*) FROM vectors_next").fetchone()[0]
            total = connection.execute("SELECT count(*) FROM facts WHERE block IS NULL").fetchone()[0]
            return Progress(int(done), int(total))

    def missing(self, after: int, limit: int) -> list[Fact]:
        """At most `limit` facts above `after` that have no vector yet, in seq order."""
        clause = (
            "WHERE f.seq > ? AND f.block IS NULL AND NOT EXISTS "
            "(SELECT 1 FROM vectors_next v WHERE v.fact = f.seq) ORDER BY f.seq LIMIT ?"
        )
        with self._database.read() as connection:
            return select_facts(connection, clause, after, limit)

    def store(self, facts: Sequence[Fact], vectors: NDArray[np.float32]) -> None:
        """Store vectors, float32 [n, dim], of facts as they were read; those that say something else by now,
        or are gone, are passed over. Raises CatalogError where another re-embedding was begun meanwhile."""
        if vectors.shape != (len(facts), self.embedder.dim):
            raise InvalidInput(
                f"vectors have the shape {vectors.shape}; {(len(facts), self.embedder.dim)} is needed."
            )
        data = np.asarray(vectors, dtype="<f4")
        with self._database.write() as connection:
            self._check_begun(connection)
            connection.executemany(
                "INSERT INTO vectors_next (fact, embedder, dim, data) SELECT seq, ?, ?, ? FROM facts "
                f"WHERE seq = ? AND text = ? AND speaker IS ? AND said_at IS ? {REPLACES}",
                [
                    (*self.embedder, row.tobytes(), fact.seq, fact.text, fact.speaker, fact.said_at)
                    for fact, row in zip(facts, data, strict=True)
                ],
            )

    def switch(self) -> bool:
        """Use the new vectors from now on; False where a fact has none yet, and nothing is changed."""
        with self._database.write() as connection:
            self._check_begun(connection)
            lacks = connection.execute(
                "SELECT EXISTS (SELECT 1 FROM facts f WHERE f.block IS NULL AND NOT EXISTS "
                "(SELECT 1 FROM vectors_next v WHERE v.fact = f.seq))"
            ).fetchone()[0]
            if lacks:
                return False
            connection.execute("DROP TABLE IF EXISTS vectors_old")
            connection.rename_tables(("vectors", "vectors_old"), ("vectors_next", "vectors"))
            connection.make_vectors_next()
            values = [(self.embedder.name, "embedder_name"), (str(self.embedder.dim), "embedder_dim")]
            connection.executemany("UPDATE meta SET value = ? WHERE name = ?", values)
            connection.execute("DELETE FROM meta WHERE name IN (?, ?)", _NEXT)
        return True

    def clear_old(self) -> None:
        """Remove the vectors that are used no more, in parts, so that nobody waits long."""
        while True:
            with self._database.write() as connection:
                if "vectors_old" not in connection.tables():
                    break
                cleared = connection.execute(
                    "DELETE FROM vectors_old WHERE fact IN (SELECT fact FROM vectors_old LIMIT ?)",
                    (_CLEARED_AT_ONCE,),
                ).rowcount
                if not cleared:
                    connection.execute("DROP TABLE vectors_old")
        self._database.empty_log()

    def _check_begun(self, connection: Connection) -> None:
        begun = self._begun(connection)
        if begun != self.embedder:
            other = "it was ended" if begun is None else f"one for {begun.name!r} was begun"
            raise CatalogError(f"re-embedding for {self.embedder.name!r} cannot go on: {other} meanwhile.")

    @staticmethod
    def _begun(connection: Connection) -> EmbedderIdentity | None:
        found = dict(
            connection.execute("SELECT name, value FROM meta WHERE name IN (?, ?)", _NEXT).fetchall()
        )
        return EmbedderIdentity(found[_NEXT[0]], int(found[_NEXT[1]])) if found else None
