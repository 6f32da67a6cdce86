"""Facts and histories as Mem0 shows them."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, TypedDict

from inferscale.errors import InvalidInput
from inferscale.facts import ChangeEvent, Fact, HistoryEvent

IDS = ("user_id", "agent_id", "run_id")
KEPT_IN_METADATA = ("actor_id", "role", "attributed_to")
"""What Mem0 keeps in the same place as metadata and shows beside them."""
_ROLES = ("user", "assistant")


class Results(TypedDict):
    results: list[dict[str, Any]]


def shown(fact: Fact, **score: float | None) -> dict[str, Any]:
    """A fact with Mem0's keys. score: `score=…` where the call shows one."""
    beside = {name: getattr(fact.scope, name) for name in IDS if getattr(fact.scope, name) is not None}
    if fact.speaker is not None and fact.speaker not in _ROLES:
        beside["actor_id"] = fact.speaker
    beside.update({name: fact.metadata[name] for name in KEPT_IN_METADATA if name in fact.metadata})
    if fact.expires_at is not None:
        beside["expiration_date"] = last_day(fact.expires_at).isoformat()
    if fact.said_at is not None:
        beside["said_at"] = fact.said_at  # none of Mem0's, which knows no such time
    metadata = {name: value for name, value in fact.metadata.items() if name not in KEPT_IN_METADATA}
    return {
        "id": fact.id,
        "memory": fact.text,
        "hash": hashlib.md5(fact.text.encode(), usedforsecurity=False).hexdigest(),
        "metadata": metadata or None,
        **score,
        "created_at": iso(fact.created_at),
        "updated_at": iso(fact.updated_at),
        **beside,
    }


def stored(fact: Fact) -> dict[str, Any]:
    """A turn that was stored as it is."""
    return {
        "id": fact.id,
        "memory": fact.text,
        "event": "ADD",
        "actor_id": fact.metadata.get("actor_id"),
        "role": fact.metadata.get("role"),
    }


def changed(event: ChangeEvent) -> dict[str, Any]:
    """What became of a fact that was extracted."""
    result = {"id": event.id, "memory": event.text, "event": event.event}
    if event.event == "UPDATE":
        result["previous_memory"] = event.previous_text or ""
    return result


def history_rows(memory_id: str, events: Sequence[HistoryEvent], fact: Fact | None) -> list[dict[str, Any]]:
    """Mem0's rows, oldest first. fact: as it is now, None where it is no longer so.

    A fact that took another's place shows it as an update, one that has ended as a deletion.
    """
    known = {} if fact is None else shown(fact)
    rows = []
    for number, event in enumerate(events):
        has_ended = event.event == "END"
        rows.append(
            {
                "id": str(uuid.uuid5(uuid.NAMESPACE_OID, f"{memory_id}/{number}")),
                "memory_id": memory_id,
                "old_memory": event.previous_text,
                "new_memory": None if has_ended else event.text,
                "event": {"SUPERSEDE": "UPDATE", "END": "DELETE"}.get(event.event, event.event),
                "created_at": iso(events[0].at),
                "updated_at": iso(event.at),
                "is_deleted": has_ended,
                "actor_id": known.get("actor_id"),
                "role": known.get("role"),
            }
        )
    return rows


def score_details(score: float, threshold: float) -> dict[str, float]:
    """Mem0's account of a score. Here it is the similarity of the texts, and nothing is added to it."""
    return {
        "semantic_score": score,
        "bm25_score": 0.0,
        "entity_boost": 0.0,
        "raw_score": score,
        "max_possible_score": 1.0,
        "final_score": score,
        "threshold": threshold,
    }


def iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()


def last_day(expires_at: float) -> date:
    """The last day, in UTC, on which a fact is found that expires then."""
    return (datetime.fromtimestamp(expires_at, UTC) - timedelta(microseconds=1)).date()


def end_of_day(given: object) -> float:
    """Unix time at which a day ends in UTC: when a memory with that `expiration_date` is hidden."""
    day = given
    if isinstance(day, str):
        try:
            day = date.fromisoformat(day)
        except ValueError:
            day = None
    if isinstance(day, datetime):
        day = day.date()
    if not isinstance(day, date) or day == date.max:
        raise InvalidInput(f"expiration_date is {given!r}; give a date such as '2030-12-31'.")
    return datetime.combine(day + timedelta(days=1), time(), UTC).timestamp()
