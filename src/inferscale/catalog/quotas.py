"""How much one owner may store, checked inside the transaction that stores it.

The owner of a fact is its user, whatever agent and run it has; without a user its agent, else its run.
"""

from __future__ import annotations

from typing import NamedTuple

from inferscale.catalog.sql import STORED_BYTES, Connection
from inferscale.errors import QuotaExceeded
from inferscale.facts import Scope


class Quota(NamedTuple):
    """Of each owner; None: no limit. max_bytes: of texts and metadata, in UTF-8, without histories."""

    max_facts: int | None = None
    max_bytes: int | None = None


def check(connection: Connection, scope: Scope, quota: Quota) -> None:
    """Raise QuotaExceeded where the owner of `scope` holds more than allowed by now."""
    if quota == Quota():
        return
    where, values = _owned(scope)
    facts = f"facts WHERE scope IN (SELECT id FROM scopes WHERE {where})"
    if quota.max_facts is not None:
        held = int(connection.execute(f"SELECT count(*) FROM {facts}", values).fetchone()[0])
        if held > quota.max_facts:
            raise QuotaExceeded(_refusal(f"{held} facts", f"{quota.max_facts} facts"))
    if quota.max_bytes is not None:
        total = f"SELECT coalesce(sum({STORED_BYTES}), 0) FROM {facts}"
        held = int(connection.execute(total, values).fetchone()[0])
        if held > quota.max_bytes:
            raise QuotaExceeded(_refusal(f"{held} bytes", f"{quota.max_bytes} bytes"))


def _refusal(held: str, allowed: str) -> str:
    return (
        f"this user would hold {held}; allowed are {allowed}. Nothing of it was stored: delete memories "
        "that are not needed, or ask the operator for more."
    )


def _owned(scope: Scope) -> tuple[str, list[str]]:
    """SQL condition on `scopes` for all exact scopes of the same owner."""
    if scope.user_id is not None:
        return "user_id = ?", [scope.user_id]
    if scope.agent_id is not None:
        return "user_id IS NULL AND agent_id = ?", [scope.agent_id]
    assert scope.run_id is not None
    return "user_id IS NULL AND agent_id IS NULL AND run_id = ?", [scope.run_id]
