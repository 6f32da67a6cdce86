"""Whose vectors a catalog holds, and whether they are those of this process."""

from __future__ import annotations

from inferscale.catalog.rows import EmbedderIdentity, read_embedder
from inferscale.catalog.sql import Connection, Database
from inferscale.errors import EmbedderMismatch


class OwnEmbedder:
    """The embedder of this process, once it is recorded; before, nothing is checked."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._own: EmbedderIdentity | None = None

    def record(self, own: EmbedderIdentity) -> None:
        """Let the catalog hold its vectors. Raises EmbedderMismatch if it holds another's."""
        with self._database.read() as connection:
            found = read_embedder(connection)
        if found is None:
            with self._database.write() as connection:
                connection.executemany(
                    "INSERT INTO meta (name, value) VALUES (?, ?) ON CONFLICT DO NOTHING",
                    [("embedder_name", own.name), ("embedder_dim", str(own.dim))],
                )
                found = read_embedder(connection)
        self._own = own
        self._compare(found)

    def check(self, connection: Connection) -> None:
        """Raise EmbedderMismatch where the catalog holds vectors of another one by now."""
        self._compare(read_embedder(connection))

    def _compare(self, found: EmbedderIdentity | None) -> None:
        own = self._own
        if found is None or own is None or found == own:
            return
        raise EmbedderMismatch(
            f"{self._database.place} holds vectors of the embedder {found.name!r} with {found.dim} "
            f"dimensions, not of {own.name!r} with {own.dim}; the two cannot be compared. Start again with "
            f"embedder set to {found.name!r}, or embed the folder anew, with the --embedder that was given "
            f"here: inferscale reembed {self._database.option}"
        )
