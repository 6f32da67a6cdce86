"""Value types of the memory: scopes, turns, facts, search hits, pages and history.

Knows nothing of tokens, KV or storage. Imports the standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Literal, NamedTuple, TypedDict


class Keep(Enum):
    """The type of `KEEP`."""

    KEEP = "keep"


KEEP: Final = Keep.KEEP
"""Says of an argument that it is to be left as it is, where None is a value of its own."""


class ScopeIds(TypedDict):
    """The ids of a scope as the methods of `Memory` take them: `memory.search(query, **ids)`."""

    user_id: str | None
    agent_id: str | None
    run_id: str | None


@dataclass(frozen=True, slots=True)
class Scope:
    """Who a fact belongs to. A fact is stored under exactly one scope.

    As a filter (`covers`), a field that is None matches everything, so
    `Scope(user_id="ana")` finds all facts of Ana whatever the agent or run.
    """

    user_id: str | None = None
    agent_id: str | None = None
    run_id: str | None = None

    def ids(self) -> ScopeIds:
        return ScopeIds(user_id=self.user_id, agent_id=self.agent_id, run_id=self.run_id)

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

    `said_at` is free text (`"8 May 2023, 1:56 pm"`, ISO 8601, …): it is shown to the model as given;
    time ranges need one that can be read as a time (`dates.read_time`). `expires_at` is a Unix time:
    from then on the fact is not found any more.
    """

    text: str
    speaker: str | None = None
    said_at: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class Fact:
    """One stored unit of memory text.

    `seq` rises with every stored fact of a catalog, so within a scope it is
    the order in which things were said. It stays when a fact is changed.
    `created_at` and `updated_at` are Unix times in seconds, equal until a
    fact is changed for the first time. `happened_at` is the Unix time that
    `said_at` means, where it can be read. `block` is the name of a core
    block, which stands in front of every prompt of its scope.
    """

    id: str
    seq: int
    scope: Scope
    text: str
    speaker: str | None = None
    said_at: str | None = None
    created_at: float = 0.0
    updated_at: float = 0.0
    metadata: dict[str, Any] = field(default_factory=dict)
    expires_at: float | None = None
    happened_at: float | None = None
    block: str | None = None

    def has_expired(self, now: float) -> bool:
        return self.expires_at is not None and self.expires_at <= now


class Wording(NamedTuple):
    """All of a turn or fact that is embedded and that stands in prompts: what its KV depends on."""

    text: str
    speaker: str | None
    said_at: str | None

    @classmethod
    def of(cls, item: Turn | Fact) -> Wording:
        return cls(item.text, item.speaker, item.said_at)


class SearchHit(NamedTuple):
    """A fact and its cosine similarity to the query, in [-1, 1]."""

    fact: Fact
    score: float


class Page(NamedTuple):
    """Facts in the order they were stored. next_cursor: where the next page begins; None on the last."""

    facts: list[Fact]
    next_cursor: str | None


class ChangeEvent(NamedTuple):
    """What became of one fact that was to be remembered.

    ADD: it is stored under `id`. UPDATE: it is stored under `id` and supersedes the fact `previous_id`, which
    said `previous_text`. DELETE: it ended the fact `id`, which said `text` and `previous_text`. NONE: the
    fact `id` says it already, in the words of `text`. reason: why, where somebody said so.
    """

    event: Literal["ADD", "UPDATE", "DELETE", "NONE"]
    id: str
    text: str
    previous_text: str | None = None
    reason: str | None = None
    previous_id: str | None = None


class HistoryEvent(NamedTuple):
    """A fact was stored (`ADD`; previous_text is None), changed (`UPDATE`), took another's place
    (`SUPERSEDE`; previous_text is what the other said) or ended (`END`; text is what took its place, or
    its own). at: Unix time in seconds. reason: why, where somebody said so.

    Where only speaker, time or metadata changed, both texts are the same.
    """

    event: Literal["ADD", "UPDATE", "SUPERSEDE", "END"]
    text: str
    previous_text: str | None
    at: float
    reason: str | None = None
