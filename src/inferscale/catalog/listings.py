"""Which facts a scope has, in the order they were stored, inside the caller's transaction."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

from inferscale.catalog import cursors as _cursors
from inferscale.catalog import passes as _passes
from inferscale.catalog import rows as _rows
from inferscale.catalog.conditions import LIVE
from inferscale.catalog.reads import listed
from inferscale.catalog.results import FoundFacts
from inferscale.catalog.sql import NO_LIMIT, NUMBERS, TEXTS, Connection
from inferscale.facts import Fact, Page, Scope
from inferscale.filters import Filter


def facts(
    connection: Connection, filter: Scope, limit: int | None, after: int, within: Filter | None
) -> list[Fact]:
    """No blocks, and nothing that has expired."""
    where, values = listed(connection, filter, within, time.time())
    clause = f"WHERE {where} AND f.seq > ? ORDER BY f.seq LIMIT ?"
    return _rows.select_facts(connection, clause, *values, after, NO_LIMIT if limit is None else limit)


def page(
    connection: Connection, filter: Scope, limit: int, cursor: str | None, within: Filter | None
) -> Page:
    where, values = listed(connection, filter, within, time.time())
    # Numbers first, from an index: else the texts of all facts that follow would be read and sorted.
    clause = (
        f"WHERE f.seq IN (SELECT f.seq FROM facts f WHERE {where} AND f.seq > ? "
        "ORDER BY f.seq LIMIT ?) ORDER BY f.seq"
    )
    key = _cursors.read_key(connection)
    after = 0 if cursor is None else _cursors.seq_at(key, cursor)
    found = _rows.select_facts(connection, clause, *values, after, limit + 1)
    has_more, found = len(found) > limit, found[:limit]
    return Page(found, _cursors.cursor_at(key, found[-1].seq) if has_more and found else None)


def newest_ids(connection: Connection, filter: Scope, limit: int) -> list[str]:
    where, values = listed(connection, filter, None, time.time())
    sql = f"SELECT f.id FROM facts f WHERE {where} ORDER BY f.seq DESC LIMIT ?"
    return [row[0] for row in connection.execute(sql, (*values, limit))]


def count(connection: Connection, filter: Scope) -> int:
    where, values = listed(connection, filter, None, time.time())
    return int(connection.execute(f"SELECT count(*) FROM facts f WHERE {where}", values).fetchone()[0])


def all_facts(connection: Connection, filter: Scope, limit: int, after: int) -> list[Fact]:
    """Blocks and what has expired as well."""
    where, values = _rows.covered(filter)
    clause = f"WHERE f.scope IN (SELECT id FROM scopes WHERE {where}) AND f.seq > ? ORDER BY f.seq LIMIT ?"
    return _rows.select_facts(connection, clause, *values, after, limit)


def by_ids(connection: Connection, fact_ids: Iterable[str]) -> list[Fact]:
    """In the order of the ids; ids that name no fact are left out."""
    ids = list(fact_ids)
    clause = f"WHERE f.id IN {TEXTS}"
    found = {fact.id: fact for fact in _rows.select_facts(connection, clause, json.dumps(ids))}
    return [found[fact_id] for fact_id in ids if fact_id in found]


def by_seqs(connection: Connection, filter: Scope, seqs: Iterable[int], model: str | None) -> FoundFacts:
    wanted = list(seqs)
    clause = f"WHERE f.seq IN {NUMBERS}"
    found = {fact.seq: fact for fact in _rows.select_facts(connection, clause, json.dumps(wanted))}
    keys = {} if model is None else _passes.current_keys(connection, model, wanted)
    epoch = _rows.read_epoch(connection, filter)
    return FoundFacts(found, {found[seq].id: key for seq, key in keys.items() if seq in found}, epoch)


def neighbours_before(connection: Connection, fact: Fact, n: int) -> list[Fact]:
    """Of the same exact scope, oldest first."""
    clause = (
        "WHERE f.scope = (SELECT scope FROM facts WHERE seq = ?) AND f.seq < ? AND f.block IS NULL "
        f"AND {LIVE} ORDER BY f.seq DESC LIMIT ?"
    )
    return _rows.select_facts(connection, clause, fact.seq, fact.seq, time.time(), max(0, n))[::-1]


def unencoded(connection: Connection, model: str, filter: Scope) -> list[Fact]:
    """Blocks as well."""
    where, values = _rows.covered(filter)
    clause = (
        f"WHERE f.scope IN (SELECT id FROM scopes WHERE {where}) AND {LIVE} AND NOT EXISTS "
        "(SELECT 1 FROM encodings e WHERE e.fact = f.seq AND e.model = ?) ORDER BY f.seq"
    )
    return _rows.select_facts(connection, clause, *values, time.time(), model)


def provisional(connection: Connection, model: str, filter: Scope, *, is_exact: bool = False) -> list[Fact]:
    """No blocks. is_exact: only of the scope that `filter` is."""
    where, values = _rows.covered(filter)
    if is_exact:
        where += "".join(f" AND {name} IS NULL" for name in _rows.SCOPE_COLUMNS if not getattr(filter, name))
    clause = (
        f"WHERE f.scope IN (SELECT id FROM scopes WHERE {where}) AND f.block IS NULL AND {LIVE} AND "
        "(SELECT max(p.directions * p.is_done) FROM encodings e JOIN passes p ON p.id = e.pass "
        "WHERE e.fact = f.seq AND e.model = ?) < 2 ORDER BY f.seq"
    )
    return _rows.select_facts(connection, clause, *values, time.time(), model)


def has_facts(connection: Connection, filter: Scope) -> bool:
    where, values = _rows.covered(filter)
    sql = f"SELECT EXISTS (SELECT 1 FROM facts WHERE scope IN (SELECT id FROM scopes WHERE {where}))"
    return bool(connection.execute(sql, values).fetchone()[0])


def count_rows(connection: Connection) -> int:
    return int(connection.execute("SELECT count(*) FROM facts").fetchone()[0])


def count_scopes(connection: Connection) -> int:
    holds_facts = "EXISTS (SELECT 1 FROM facts WHERE facts.scope = scopes.id)"
    return int(connection.execute(f"SELECT count(*) FROM scopes WHERE {holds_facts}").fetchone()[0])
