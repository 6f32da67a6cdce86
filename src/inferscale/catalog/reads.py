"""What a search reads beside vectors: which facts may be found, their texts, core blocks; what expires.

Inside the caller's transaction. Core blocks are facts without a vector, apart from all others: they are never
found, listed or anybody's window, but stand in front of every chat whose scope covers theirs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from inferscale.catalog import conditions as _conditions
from inferscale.catalog import passes as _passes
from inferscale.catalog import rows as _rows
from inferscale.catalog.conditions import LIVE, FactCondition
from inferscale.catalog.filtering import passing
from inferscale.catalog.results import FoundBlocks, ScopeMark, StoredText
from inferscale.catalog.sql import NUMBERS, Connection
from inferscale.facts import Scope
from inferscale.filters import Filter


def listed(connection: Connection, scope: Scope, within: Filter | None, now: float) -> FactCondition:
    """Condition on `facts f`: under `scope`, no block, not expired at `now`, passing the filter."""
    where, values = _rows.covered(scope)
    sql = f"f.scope IN (SELECT id FROM scopes WHERE {where}) AND f.block IS NULL AND {LIVE}"
    given: list[Any] = [*values, now]
    if within is not None and connection.filters_in_sql:
        condition = _conditions.condition_of(within)
        sql, given = f"{sql} AND {condition.sql}", [*given, *condition.values]
    elif within is not None:
        sql, given = f"f.seq IN {NUMBERS}", [json.dumps(passing(connection, sql, given, within))]
    return FactCondition(sql, given)


def matching(connection: Connection, scope: Scope, within: Filter | None, now: float) -> list[int]:
    """Sequence numbers of the facts that a search of the scope may find, rising."""
    sql, values = listed(connection, scope, within, now)
    return [
        row[0] for row in connection.execute(f"SELECT f.seq FROM facts f WHERE {sql} ORDER BY f.seq", values)
    ]


def next_expiry(connection: Connection) -> float | None:
    found = connection.execute("SELECT min(expires_at) FROM facts WHERE expires_at IS NOT NULL").fetchone()
    return None if found[0] is None else float(found[0])


def has_expired(connection: Connection, scope: Scope, now: float) -> bool:
    where, values = _rows.covered(scope)
    found = connection.execute(
        "SELECT EXISTS (SELECT 1 FROM facts f WHERE f.expires_at <= ? "
        f"AND f.scope IN (SELECT id FROM scopes WHERE {where}))",
        (now, *values),
    ).fetchone()
    return bool(found[0])


def scope_marks(connection: Connection, scope: Scope) -> list[ScopeMark]:
    """Of the exact scopes under `scope` that hold facts."""
    where, values = _rows.covered(scope)
    found = connection.execute(
        "SELECT s.id, s.epoch, max(f.seq), count(*) FROM scopes s JOIN facts f ON f.scope = s.id "
        f"WHERE {where} GROUP BY s.id ORDER BY s.id",
        values,
    )
    return [ScopeMark(*row) for row in found.fetchall()]


def texts(connection: Connection, code: int, after: int) -> list[StoredText]:
    """What the facts of an exact scope say, those above `after`, in seq order; no blocks."""
    found = connection.execute(
        "SELECT seq, text, speaker, said_at FROM facts WHERE scope = ? AND seq > ? AND block IS NULL "
        "ORDER BY seq",
        (code, after),
    )
    return [StoredText(*row) for row in found.fetchall()]


def texts_of(connection: Connection, code: int, seqs: Iterable[int]) -> list[StoredText]:
    """What those of the facts say that the exact scope holds, in seq order; no blocks."""
    found = connection.execute(
        f"SELECT seq, text, speaker, said_at FROM facts WHERE seq IN {NUMBERS} "
        "AND scope = ? AND block IS NULL ORDER BY seq",
        (json.dumps(list(seqs)), code),
    )
    return [StoredText(*row) for row in found.fetchall()]


def changes_after(connection: Connection, change: int) -> tuple[int, list[int]]:
    """Number of the last change, and the facts of anybody that changed behind `change` (`vectors`)."""
    last = connection.execute("SELECT coalesce(max(id), 0) FROM changes").fetchone()[0]
    found = connection.execute("SELECT DISTINCT fact FROM changes WHERE id > ? ORDER BY fact", (change,))
    return last, [row[0] for row in found.fetchall()]


def blocks(connection: Connection, scope: Scope, model: str | None, now: float) -> FoundBlocks:
    """Core blocks under `scope` by name, their keys for `model` and the epoch of the scope."""
    where, values = _rows.covered(scope)
    clause = (
        f"WHERE f.block IS NOT NULL AND f.scope IN (SELECT id FROM scopes WHERE {where}) AND {LIVE} "
        "ORDER BY f.block, f.seq"
    )
    found = _rows.select_facts(connection, clause, *values, now)
    keys: dict[int, str] = {}
    if model is not None and found:
        keys = _passes.current_keys(connection, model, [fact.seq for fact in found])
    named = {fact.id: keys[fact.seq] for fact in found if fact.seq in keys}
    return FoundBlocks(tuple(found), named, _rows.read_epoch(connection, scope))
