"""New facts with their vectors, inside the caller's transaction."""

from __future__ import annotations

import json
import sqlite3
import time
import uuid
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from inferscale.catalog import rows as _rows
from inferscale.catalog import vectors as _vectors
from inferscale.dates import read_time
from inferscale.facts import Fact, Scope, Turn


def add_facts(
    connection: sqlite3.Connection,
    scope: Scope,
    turns: Sequence[Turn],
    metadata: Sequence[str],
    vectors: NDArray[np.float32],
) -> list[Fact]:
    """Store turns of one moment, in order.

    metadata: of each, from `rows.metadata_json`. vectors: float32 [n, dim]; raises InvalidInput for others.
    """
    embedder = _vectors.fitting_embedder(connection, vectors, len(turns))
    code = _rows.scope_code(connection, scope)
    now = time.time()
    facts = []
    for turn, meta, vector in zip(turns, metadata, vectors, strict=True):
        said = (turn.text, turn.speaker, turn.said_at)
        fact_id, happened_at = str(uuid.uuid4()), read_time(turn.said_at)
        cursor = connection.execute(
            "INSERT INTO facts (id, scope, text, speaker, said_at, created_at, metadata, expires_at, "
            "happened_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (fact_id, code, *said, now, meta, turn.expires_at, happened_at),
        )
        seq = cursor.lastrowid
        assert seq is not None
        _vectors.store(connection, embedder, seq, vector)
        own = json.loads(meta)
        facts.append(Fact(fact_id, seq, scope, *said, now, now, own, turn.expires_at, happened_at))
    return facts
