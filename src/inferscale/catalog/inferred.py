"""What extraction reads and writes, inside the caller's transaction, always within one exact scope.

A decision about a new fact is made from what its scope says at one moment (`similar`) and carried out only
where the scope still says the same (`apply`): so two processes that are told the same at a time store it
once. Knows nothing of models and of what is decided.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from inferscale.catalog import additions as _additions
from inferscale.catalog import changes as _changes
from inferscale.catalog import expiry as _expiry
from inferscale.catalog import rows as _rows
from inferscale.catalog.results import Applied, InferMark, SimilarFacts
from inferscale.catalog.sql import EXACT, NUMBERS, Connection
from inferscale.errors import UnknownFact
from inferscale.facts import Fact, Scope, SearchHit, Turn, Wording

_EXACT = f"(SELECT id FROM scopes WHERE {EXACT})"
_LIVE = "f.block IS NULL AND (f.expires_at IS NULL OR f.expires_at > ?)"


def similar(connection: Connection, scope: Scope, vector: NDArray[np.float32], limit: int) -> SimilarFacts:
    """The facts of an exact scope most like `vector` (float32 [dim]), best first, newer ones first of equals.

    Compared one by one: exact, and of one read with the mark.
    """
    found = connection.execute(
        f"SELECT f.seq, v.data FROM facts f JOIN vectors v ON v.fact = f.seq WHERE f.scope = {_EXACT} "
        f"AND {_LIVE} AND v.dim = ?",
        (*_ids(scope), time.time(), len(vector)),
    ).fetchall()
    mark = read_mark(connection, scope)
    if not found or limit < 1:
        return SimilarFacts((), mark)
    seqs = np.array([row[0] for row in found])
    stored = np.frombuffer(b"".join(row[1] for row in found), dtype="<f4").reshape(len(found), -1)
    norms = np.linalg.norm(stored, axis=1) * np.linalg.norm(vector)
    scores = stored @ vector / np.maximum(norms, 1e-12)
    best = np.lexsort((-seqs, -scores))[:limit]
    by_seq = {int(seqs[place]): float(scores[place]) for place in best}
    facts = _rows.select_facts(connection, f"WHERE f.seq IN {NUMBERS}", json.dumps(list(by_seq)))
    hits = {fact.seq: SearchHit(fact, by_seq[fact.seq]) for fact in facts}
    return SimilarFacts(tuple(hits[seq] for seq in by_seq), mark)


def read_mark(connection: Connection, scope: Scope) -> InferMark:
    """What rises with every addition, rewording and deletion in an exact scope."""
    found = connection.execute(
        f"SELECT epoch, (SELECT max(seq) FROM facts WHERE scope = s.id) FROM scopes s WHERE s.id = {_EXACT}",
        _ids(scope),
    ).fetchone()
    return InferMark(*(found[0], found[1] or 0) if found is not None else (0, 0))


def apply(
    connection: Connection,
    scope: Scope,
    turn: Turn | None,
    vector: NDArray[np.float32] | None,
    mark: InferMark | None,
    retires: str | None,
    reason: str | None,
) -> Applied | None:
    """Store `turn` in place of the fact `retires`; either may be None. See `Catalog.apply_inferred`."""
    if mark is not None and read_mark(connection, scope) != mark:
        return None
    fact, is_new = None, False
    if turn is not None:
        assert vector is not None
        fact, is_new = _stored(connection, scope, turn, vector, with_time=False)
    retired = None
    if retires is not None and (fact is None or fact.id != retires):
        if _changes.read_fact(connection, retires).scope != scope:
            raise UnknownFact(f"no fact has the id {retires!r} in this scope.")
        retired = _changes.retire(connection, retires, None if fact is None else fact.id, reason)
    return Applied(fact, is_new, retired)


def add_new(
    connection: Connection, scope: Scope, turns: Sequence[Turn], vectors: NDArray[np.float32]
) -> list[Applied]:
    """Store turns but for those whose whole wording is there already, in order; vectors: float32 [n, dim]."""
    stored = [
        _stored(connection, scope, turn, vector, with_time=True)
        for turn, vector in zip(turns, vectors, strict=True)
    ]
    return [Applied(fact, is_new, None) for fact, is_new in stored]


def _stored(
    connection: Connection, scope: Scope, turn: Turn, vector: NDArray[np.float32], *, with_time: bool
) -> tuple[Fact, bool]:
    """The fact of the scope that says this already, or a new one, and whether it is new.

    with_time: one that was said at another time is another.
    """
    found = _rows.select_facts(
        connection,
        f"WHERE f.scope = {_EXACT} AND f.text = ? AND {_LIVE} ORDER BY f.seq",
        *_ids(scope),
        turn.text,
        time.time(),
    )
    for fact in found:
        if Wording.of(fact) == Wording.of(turn) or (not with_time and fact.speaker == turn.speaker):
            if _expiry.ends_before(fact, turn):
                _expiry.set_expiry(connection, fact.id, turn.expires_at)
                fact = replace(fact, expires_at=turn.expires_at)
            return fact, False
    meta = _rows.metadata_json(turn.metadata)
    [fact] = _additions.add_facts(connection, scope, [turn], [meta], vector.reshape(1, -1))
    return fact, True


def _ids(scope: Scope) -> tuple[str | None, str | None, str | None]:
    return scope.user_id, scope.agent_id, scope.run_id
