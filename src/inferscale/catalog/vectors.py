"""Vectors of facts, and how a reader of them keeps up, inside the caller's transaction.

Two growing numbers say how far a reader has come. Facts have ever higher sequence numbers, so new
ones are those above the last that it read. A fact that is deleted, or whose vector is replaced, puts
its number into `changes`; whether it is still there says which of the two it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferscale.catalog.results import VectorChanges, VectorMark
from inferscale.catalog.rows import EmbedderIdentity, read_embedder
from inferscale.catalog.sql import Connection
from inferscale.errors import CatalogError, InvalidInput

REPLACES = (
    "ON CONFLICT (fact) DO UPDATE SET embedder = excluded.embedder, dim = excluded.dim, data = excluded.data"
)
"""Of an INSERT: the vector of a fact takes the place of the one that it has."""


def fitting_embedder(connection: Connection, vectors: NDArray[np.float32], num_rows: int) -> EmbedderIdentity:
    """The recorded embedder, which made these vectors. Raises InvalidInput for another shape."""
    embedder = read_embedder(connection)
    if embedder is None:
        raise CatalogError("The catalog knows no embedder yet; call record_embedder before facts are stored.")
    if vectors.shape != (num_rows, embedder.dim):
        raise InvalidInput(f"vectors have the shape {vectors.shape}; {(num_rows, embedder.dim)} is needed.")
    return embedder


def store(
    connection: Connection, embedder: EmbedderIdentity, fact_seq: int, vector: NDArray[np.float32]
) -> None:
    """Store the vector of a fact, float32 [dim], in place of the one that it has, if any."""
    store_all(connection, embedder, [fact_seq], vector.reshape(1, -1))


def store_all(
    connection: Connection,
    embedder: EmbedderIdentity,
    fact_seqs: Sequence[int],
    vectors: NDArray[np.float32],
) -> None:
    """The same of several; vectors: float32 [n, dim]."""
    data = np.asarray(vectors, dtype="<f4")
    connection.executemany(
        f"INSERT INTO vectors (fact, embedder, dim, data) VALUES (?, ?, ?, ?) {REPLACES}",
        [
            (seq, embedder.name, embedder.dim, vector.tobytes())
            for seq, vector in zip(fact_seqs, data, strict=True)
        ],
    )


def note_change(connection: Connection, fact_seq: int) -> None:
    """Let all readers know that this fact is removed, or its vector replaced, by this transaction."""
    connection.execute("INSERT INTO changes (fact) VALUES (?)", (fact_seq,))


def changes_since(connection: Connection, since: VectorMark, limit: int) -> VectorChanges:
    """At most `limit` new vectors, and what became of older facts by at most `limit` changes."""
    embedder = read_embedder(connection)
    new = connection.execute(
        "SELECT f.seq, f.scope, v.data FROM facts f JOIN vectors v ON v.fact = f.seq "
        "WHERE f.seq > ? AND f.block IS NULL ORDER BY f.seq LIMIT ?",
        (since.seq, limit),
    ).fetchall()
    if since == VectorMark():
        # A reader that knows nothing gets vectors as they are now: older changes are none to it.
        last = connection.execute("SELECT coalesce(max(id), 0) FROM changes").fetchone()
        replaced, removed, last_change, num_changes = list[Any](), list[int](), int(last[0]), 0
    else:
        found = connection.execute(
            "SELECT c.id, c.fact, f.scope, v.data FROM changes c LEFT JOIN facts f ON f.seq = c.fact "
            "LEFT JOIN vectors v ON v.fact = f.seq AND f.block IS NULL AND f.seq <= ? "
            "WHERE c.id > ? ORDER BY c.id LIMIT ?",
            (since.seq, since.change, limit),
        ).fetchall()
        # A fact above the mark is not known to the reader: it is, or will be, among the new ones.
        rows = {fact: (fact, code, data) for _, fact, code, data in found if data is not None}
        replaced = [rows[fact] for fact in sorted(rows)]
        removed = list(dict.fromkeys(fact for _, fact, code, _ in found if code is None))
        last_change, num_changes = (found[-1][0] if found else since.change), len(found)
    return VectorChanges(
        mark=VectorMark(new[-1][0] if new else since.seq, last_change),
        fact_seqs=[row[0] for row in (*replaced, *new)],
        scope_codes=[row[1] for row in (*replaced, *new)],
        vectors=_array([row[2] for row in (*replaced, *new)], embedder.dim if embedder else 0),
        removed_seqs=removed,
        is_complete=len(new) < limit and num_changes < limit,
    )


def _array(blobs: Sequence[bytes], dim: int) -> NDArray[np.float32]:
    """float32 [n, dim], which cannot be written to: a copy of all vectors takes a while."""
    numbers = np.frombuffer(b"".join(blobs), dtype="<f4").astype(np.float32, copy=False)
    return numbers.reshape(len(blobs), dim)
