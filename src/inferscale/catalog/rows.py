"""Reading and writing scopes, facts and the recorded embedder, inside the caller's transaction.

Knows nothing of encodings and of vectors' content.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from inferscale.catalog.results import ScopeEpoch
from inferscale.catalog.sql import EXACT, TEXTS, Connection
from inferscale.errors import InvalidInput
from inferscale.facts import Fact, Scope

_FACTS = (
    "SELECT f.id, f.seq, s.user_id, s.agent_id, s.run_id, "
    "f.text, f.speaker, f.said_at, f.created_at, coalesce(f.updated_at, f.created_at), f.metadata, "
    "f.expires_at, f.happened_at, f.block "
    "FROM facts f JOIN scopes s ON s.id = f.scope "
)

SCOPE_COLUMNS = ("user_id", "agent_id", "run_id")


class Condition(NamedTuple):
    sql: str
    values: list[str]


def covered(filter: Scope) -> Condition:
    """SQL condition on `scopes` for the exact scopes that `filter` covers."""
    given = [(name, value) for name in SCOPE_COLUMNS if (value := getattr(filter, name)) is not None]
    return Condition(
        " AND ".join(f"{column} = ?" for column, _ in given) or "TRUE", [value for _, value in given]
    )


def filters_over(scope: Scope) -> list[Scope]:
    """Every filter that covers the exact scope: up to seven."""
    filters = {
        Scope(user_id, agent_id, run_id): None
        for user_id in (scope.user_id, None)
        for agent_id in (scope.agent_id, None)
        for run_id in (scope.run_id, None)
    }
    return [filter for filter in filters if not filter.is_empty()]


def read_epoch(connection: Connection, filter: Scope) -> int:
    where, values = covered(filter)
    return int(
        connection.execute(f"SELECT coalesce(sum(epoch), 0) FROM scopes WHERE {where}", values).fetchone()[0]
    )


def read_epochs(connection: Connection, filters: Iterable[Scope]) -> list[ScopeEpoch]:
    """The epoch of each filter, none of which is empty, in their order.

    One query for all filters that give the same ids: asked for one by one, a user with many runs
    would have all runs read for each of them.
    """
    wanted = list(filters)
    by_columns: dict[tuple[str, ...], list[Scope]] = {}
    for filter in wanted:
        columns = tuple(name for name in SCOPE_COLUMNS if getattr(filter, name) is not None)
        by_columns.setdefault(columns, []).append(filter)
    epochs: dict[Scope, int] = {}
    for columns, alike in by_columns.items():
        where = " AND ".join(f"{name} IN {TEXTS}" for name in columns)
        listed = ", ".join(columns)
        values = [json.dumps(list({getattr(filter, name) for filter in alike})) for name in columns]
        found = connection.execute(
            f"SELECT sum(epoch), {listed} FROM scopes WHERE {where} GROUP BY {listed}", values
        )
        epochs.update({Scope(**dict(zip(columns, ids, strict=True))): int(epoch) for epoch, *ids in found})
    return [ScopeEpoch(filter, epochs.get(filter, 0)) for filter in wanted]


def scope_code(connection: Connection, scope: Scope) -> int:
    """Code of an exact scope, made on first use."""
    ids = (scope.user_id, scope.agent_id, scope.run_id)
    if scope.is_empty() or "" in ids:
        raise InvalidInput(
            f"{scope} is no exact scope: ids must not be empty and at least one must be given."
        )
    find = f"SELECT id FROM scopes WHERE {EXACT}"
    found = connection.execute(find, ids).fetchone()
    if found is None:
        new = "INSERT INTO scopes (user_id, agent_id, run_id) VALUES (?, ?, ?)"
        return connection.insert(new, ids, "id")
    return int(found[0])


def select_facts(connection: Connection, clause: str, *values: object) -> list[Fact]:
    """Facts of a read; those of one scope share it, and each has metadata of its own."""
    scopes: dict[tuple[str | None, ...], Scope] = {}
    facts = []
    for row in connection.execute(_FACTS + clause, values).fetchall():
        fact_id, seq, user_id, agent_id, run_id, text, speaker, said_at, created_at, updated_at, *rest = row
        metadata, expires_at, happened_at, block = rest
        ids = (user_id, agent_id, run_id)
        scope = scopes.get(ids) or scopes.setdefault(ids, Scope(*ids))
        own = {} if metadata == "{}" else json.loads(metadata)
        said = (text, speaker, said_at)
        times = (expires_at, happened_at)
        facts.append(Fact(fact_id, seq, scope, *said, created_at, updated_at, own, *times, block))
    return facts


class EmbedderIdentity(NamedTuple):
    name: str
    dim: int


def read_embedder(connection: Connection) -> EmbedderIdentity | None:
    found = dict(connection.execute("SELECT name, value FROM meta WHERE name LIKE 'embedder_%'").fetchall())
    return EmbedderIdentity(found["embedder_name"], int(found["embedder_dim"])) if found else None


def metadata_json(metadata: dict[str, Any]) -> str:
    """JSON text of a fact's metadata. Raises InvalidInput where a value would not come back the same."""
    try:
        text = json.dumps(metadata, allow_nan=False)
        same = isinstance(metadata, dict) and json.loads(text) == metadata
    except (TypeError, ValueError, RecursionError):
        same = False
    if not same:
        raise InvalidInput(
            "metadata is not plain JSON; allowed are dicts with text keys, lists, text, finite numbers, "
            "booleans and None."
        )
    return text
