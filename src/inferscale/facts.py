"""Value types of the memory: scopes, turns, facts and search hits.

Knows nothing of tokens, KV or storage. Imports the standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Scope:
    """Who a fact belongs to. A fact is stored under exactly one scope.

    As a filter (`covers`), a field that is None matches everything, so
    `Scope(user_id="ana")` finds all facts of Ana whatever the agent or run.
    """

    user_id: str | None = None
    agent_id: str | None = None
    run_id: str | None = None

    def is_empty(self) -> bool:
        return self.user_id is None and self.agent_id is None and self.run_id is None

    def covers(self, other: Scope) -> bool:
        """Whether a fact stored under `other` is visible through this filter."""
        return (
            (self.user_id is None or self.user_id == other.user_id)
            and (self.agent_id is None or self.agent_id == other.agent_id)
            and (self.run_id is None or self.run_id == other.run_id)
        )

    def describe(self) -> str:
        """Text for messages to people, such as `user_id='ana', run_id='7'`."""
        parts = [
            f"{name}={value!r}"
            for name, value in (
                ("user_id", self.user_id),
                ("agent_id", self.agent_id),
                ("run_id", self.run_id),
            )
            if value is not None
        ]
        return ", ".join(parts) or "no scope"


@dataclass(frozen=True, slots=True)
class Turn:
    """One utterance to remember: its text, who said it and when.

    `said_at` is free text (`"8 May 2023, 1:56 pm"`, ISO 8601, …): it is shown
    to the model as given and never parsed.
    """

    text: str
    speaker: str | None = None
    said_at: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fact:
    """One stored unit of memory text.

    `seq` rises with every stored fact of a catalog, so within a scope it is
    the order in which things were said. `created_at` is Unix time in seconds.
    """

    id: str
    seq: int
    scope: Scope
    text: str
    speaker: str | None = None
    said_at: str | None = None
    created_at: float = 0.0
    metadata: dict[str, Any] = field(default_factory=dict)


class SearchHit(NamedTuple):
    """A fact and its cosine similarity to the query, in [-1, 1]."""

    fact: Fact
    score: float
