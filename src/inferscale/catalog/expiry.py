"""Changing when a fact expires, inside the caller's transaction. Its wording, and so its KV, stays."""

from __future__ import annotations

from inferscale.catalog.sql import Connection
from inferscale.errors import UnknownFact
from inferscale.facts import Fact, Turn


def ends_before(fact: Fact, turn: Turn) -> bool:
    """Whether a fact expires although what says the same would not yet, or never."""
    if fact.expires_at is None:
        return False
    return turn.expires_at is None or turn.expires_at > fact.expires_at


def set_expiry(connection: Connection, fact_id: str, expires_at: float | None) -> None:
    """expires_at: Unix time from which the fact is not found any more; None for never. Raises UnknownFact."""
    changed = connection.execute("UPDATE facts SET expires_at = ? WHERE id = ?", (expires_at, fact_id))
    if changed.rowcount == 0:
        raise UnknownFact(f"no fact has the id {fact_id!r}; it may have been deleted.")
