"""What `MemoryService` answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from inferscale.facts import ChangeEvent, Fact
from inferscale.self_check import Verdict, passed_over


class ShownFact(NamedTuple):
    """A fact for its owner. injectable: its KV is in the pool."""

    fact: Fact
    injectable: bool


class InferredFacts(NamedTuple):
    """What was stored of a conversation, and what became of each of its facts; see `catalog.Added`."""

    facts: list[ShownFact]
    events: tuple[ChangeEvent, ...]
    warning: str | None


class FactPage(NamedTuple):
    """As `facts.Page`, for its owner."""

    facts: list[ShownFact]
    next_cursor: str | None


class Stats(NamedTuple):
    """num_injectable: None where it was not asked for a scope. counters: the connector's and the pool's.
    verdict: of the self-check."""

    num_facts: int
    num_injectable: int | None
    num_pending: int
    injection: bool
    counters: Mapping[str, Any]
    verdict: Verdict = passed_over("it has not run yet")
