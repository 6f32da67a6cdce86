"""New facts with their vectors, inside the caller's transaction."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from inferscale.catalog import rows as _rows
from inferscale.catalog import vectors as _vectors
from inferscale.catalog.sql import Connection
from inferscale.dates import read_time
from inferscale.facts import Fact, Scope, Turn


def add_facts(
    connection: Connection,
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
    ids = [str(uuid.uuid4()) for _ in turns]
    said = [(turn.text, turn.speaker, turn.said_at) for turn in turns]
    times = [(turn.expires_at, read_time(turn.said_at)) for turn in turns]
    seqs = connection.insert_all(
        "INSERT INTO facts (id, scope, text, speaker, said_at, created_at, metadata, expires_at, "
        "happened_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (fact_id, code, *words, now, meta, *when)
            for fact_id, words, meta, when in zip(ids, said, metadata, times, strict=True)
        ],
        "seq",
    )
    _vectors.store_all(connection, embedder, seqs, vectors)
    return [
        Fact(fact_id, seq, scope, *words, now, now, json.loads(meta), *when)
        for fact_id, seq, words, meta, when in zip(ids, seqs, said, metadata, times, strict=True)
    ]
