"""Setting and deleting core blocks, and deleting what has expired, inside the caller's transaction."""

from __future__ import annotations

import time
import uuid

from inferscale.catalog import changes as _changes
from inferscale.catalog import rows as _rows
from inferscale.catalog.results import Deletion, ScopeDeletion, Update
from inferscale.catalog.sql import Connection
from inferscale.errors import UnknownFact
from inferscale.facts import Fact, Scope, Turn


def set_block(connection: Connection, scope: Scope, name: str, text: str) -> Update:
    """Store a block under an exact scope, or update the one of that name. Its speaker is its name."""
    found = _named(connection, scope, name)
    turn = Turn(text, name)
    if found is not None:
        if found.expires_at is None and _changes.is_same(found, turn):
            return Update(found, (), ())
        update = _changes.update(connection, found, turn, None)
        assert update is not None  # read in this transaction
        return update
    now = time.time()
    fact_id = str(uuid.uuid4())
    seq = connection.insert(
        "INSERT INTO facts (id, scope, text, speaker, created_at, metadata, block) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        (fact_id, _rows.scope_code(connection, scope), text, name, now, "{}", name),
        "seq",
    )
    fact = Fact(fact_id, seq, scope, text, name, None, now, now, block=name)
    return Update(fact, (), ())


def delete_block(connection: Connection, scope: Scope, name: str) -> Deletion:
    """Raises UnknownFact."""
    found = _named(connection, scope, name)
    if found is None:
        raise UnknownFact(
            f"no core block has the name {name!r} in this scope; it may have been deleted already."
        )
    return _changes.delete(connection, found.id)


def _named(connection: Connection, scope: Scope, name: str) -> Fact | None:
    found = _rows.select_facts(
        connection, "WHERE f.block = ? AND f.scope = ?", name, _rows.scope_code(connection, scope)
    )
    return found[0] if found else None


def purge_expired(connection: Connection, now: float) -> ScopeDeletion:
    """Delete all facts that have expired at `now`, of everybody, as `changes.delete` does."""
    expired = _rows.select_facts(connection, "WHERE f.expires_at <= ? ORDER BY f.seq", now)
    return _changes.delete_facts(connection, expired)
