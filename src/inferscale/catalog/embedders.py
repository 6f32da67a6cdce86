"""Whose vectors a catalog holds, and whether they are those of this process."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from inferscale.catalog.database import Database
from inferscale.catalog.rows import EmbedderIdentity, read_embedder
from inferscale.errors import EmbedderMismatch


class OwnEmbedder:
    """The embedder of this process, once it is recorded; before, nothing is checked."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._own: EmbedderIdentity | None = None

    def record(self, database: Database, own: EmbedderIdentity) -> None:
        """Let the catalog hold its vectors. Raises EmbedderMismatch if it holds another's."""
        with database.read() as connection:
            found = read_embedder(connection)
        if found is None:
            with database.write() as connection:
                connection.executemany(
                    "INSERT OR IGNORE INTO meta (name, value) VALUES (?, ?)",
                    [("embedder_name", own.name), ("embedder_dim", str(own.dim))],
                )
                found = read_embedder(connection)
        self._own = own
        self._compare(found)

    def check(self, connection: sqlite3.Connection) -> None:
        """Raise EmbedderMismatch where the catalog holds vectors of another one by now."""
        self._compare(read_embedder(connection))

    def _compare(self, found: EmbedderIdentity | None) -> None:
        own = self._own
        if found is None or own is None or found == own:
            return
        raise EmbedderMismatch(
            f"{self._path} holds vectors of the embedder {found.name!r} with {found.dim} dimensions, "
            f"not of {own.name!r} with {own.dim}; the two cannot be compared. Start again with embedder set "
            f"to {found.name!r}, or embed the folder anew, with the --embedder that was given here: "
            f"inferscale reembed --data-dir {self._path.parent}"
        )
