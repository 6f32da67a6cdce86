"""A fact with its history as one JSON object, ours or Mem0's, and back. Knows no files.

Ours has the fields of `FIELDS`; the times are Unix times in seconds but for `said_at`, which is text.
`revisions`: former texts, oldest first, each with the time at which it was replaced. `ended`: of a fact that
is no longer so, until when it was, the id of its successor and why.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

from inferscale.catalog import Ended, Revision, StoredFact
from inferscale.catalog.rows import metadata_json
from inferscale.dates import is_time
from inferscale.errors import EmptyText, InvalidInput
from inferscale.facts import Fact, Scope, Turn
from inferscale.turns import clean_text, read_block_name, read_scope, read_turns

IDS = ("user_id", "agent_id", "run_id")
_TIMES = ("created_at", "updated_at")
_SAID = ("text", "speaker", "said_at")
FIELDS = ("id", *IDS, *_SAID, *_TIMES, "metadata", "expires_at", "block", "revisions", "ended")
_NEEDED = ("id", "text", "created_at")

MEM0_FIELDS = ("memory", "data")
"""One of these holds the text of a Mem0 memory: of a result, or of what its store holds."""
_MEM0_OWN: tuple[str, ...] = (
    "id",
    "memory",
    "data",
    "hash",
    "text_lemmatized",
    "score",
    "score_details",
    "event",
    "metadata",
)
_MEM0_OWN += (*IDS, *_TIMES, "expiration_date")
_MAX_ID_CHARS = 1000


def record_of(stored: StoredFact, with_history: bool) -> dict[str, Any]:
    """The record of a fact; without what it lacks."""
    fact = stored.fact
    record: dict[str, Any] = {"id": fact.id}
    record.update({name: getattr(fact.scope, name) for name in IDS})
    record.update(
        {name: getattr(fact, name) for name in (*_SAID, *_TIMES, "metadata", "expires_at", "block")}
    )
    if with_history and stored.revisions:
        record["revisions"] = [revision._asdict() for revision in stored.revisions]
    if stored.ended is not None:
        record["ended"] = {name: value for name, value in stored.ended._asdict().items() if value is not None}
    return {name: value for name, value in record.items() if value is not None and value != {}}


def read_record(value: object, owner: Scope) -> StoredFact:
    """The fact of a record, ours or Mem0's. owner: of one that names none. Raises InvalidInput."""
    if not isinstance(value, Mapping):
        raise InvalidInput(f"it is a JSON {type(value).__name__}; an object with a fact is needed.")
    if any(name in value for name in MEM0_FIELDS) and "text" not in value:
        return _read_mem0(value, owner)
    missing = [name for name in _NEEDED if name not in value]
    unknown = sorted(set(map(str, value)) - set(FIELDS))
    if missing or unknown:
        what = f"lacks {', '.join(missing)}" if missing else f"has unknown fields {', '.join(unknown)}"
        raise InvalidInput(
            f"it {what}; allowed are {', '.join(FIELDS)}, as `inferscale export` writes them. "
            "Facts without an id are stored by `inferscale ingest`."
        )
    created_at = _seconds(value["created_at"], "created_at")
    updated_at = _seconds(value.get("updated_at", created_at), "updated_at")
    expires_at = value.get("expires_at")
    turn = _turn(value["text"], value.get("speaker"), value.get("said_at"), value.get("metadata"))
    fact = Fact(
        _name(value["id"], "id"),
        0,
        _scope(value, owner),
        turn.text,
        turn.speaker,
        turn.said_at,
        created_at,
        updated_at,
        turn.metadata,
        None if expires_at is None else _seconds(expires_at, "expires_at"),
        block=None if value.get("block") is None else read_block_name(value["block"]),
    )
    return StoredFact(fact, _revisions(value.get("revisions")), _ended(value.get("ended")))


def _read_mem0(value: Mapping[str, Any], owner: Scope) -> StoredFact:
    """A memory of Mem0: a result of `get_all`, or a payload of its store with its id.

    actor_id, role and attributed_to stay metadata, as the interface of Mem0 shows them; who is named, or
    else the role, is the speaker.
    """
    beside = {
        name: content for name, content in value.items() if name not in _MEM0_OWN and content is not None
    }
    given = value.get("metadata")
    if given is not None and not isinstance(given, Mapping):
        raise InvalidInput(f"metadata is a JSON {type(given).__name__}; an object is needed.")
    revisions = _revisions(beside.pop("revisions", None))
    turn = _turn(
        value["memory"] if "memory" in value else value["data"],
        beside.get("actor_id") or beside.get("role"),
        beside.pop("said_at", None),
        {**(given or {}), **beside},
    )
    created_at = moment(value.get("created_at"), "created_at")
    updated_at = created_at if value.get("updated_at") is None else moment(value["updated_at"], "updated_at")
    fact = Fact(
        _name(value.get("id") or str(uuid.uuid4()), "id"),
        0,
        _scope(value, owner),
        turn.text,
        turn.speaker,
        turn.said_at,
        created_at,
        updated_at,
        turn.metadata,
        _end_of_day(value.get("expiration_date")),
    )
    return StoredFact(fact, revisions)


def _turn(text: object, speaker: object, said_at: object, metadata: object) -> Turn:
    """Checked and cleaned as by `Memory.add`."""
    if isinstance(text, str) and not clean_text(text).strip():
        raise EmptyText("its text is blank; at least one visible character is needed.")
    given = {} if metadata is None else metadata
    [turn] = read_turns(Turn(text, speaker, said_at, given))  # type: ignore[arg-type]  # checked there
    metadata_json(turn.metadata)
    return turn


def _scope(value: Mapping[str, Any], owner: Scope) -> Scope:
    ids = [value.get(name) for name in IDS]
    if all(found is None for found in ids):
        if owner.is_empty():
            raise InvalidInput("it names no owner; give --user-id, --agent-id or --run-id for such facts.")
        return owner
    return read_scope(*ids)


def _revisions(value: object) -> tuple[Revision, ...]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise InvalidInput(f"revisions is a JSON {type(value).__name__}; a list is needed.")
    found = []
    for revision in value:
        if not isinstance(revision, Mapping) or set(revision) != {"text", "replaced_at"}:
            raise InvalidInput("revisions holds something else than objects with text and replaced_at.")
        text = revision["text"]
        if not isinstance(text, str):
            raise InvalidInput(f"a revision's text is a JSON {type(text).__name__}; text is needed.")
        found.append(Revision(clean_text(text), _seconds(revision["replaced_at"], "replaced_at")))
    return tuple(found)


def _ended(value: object) -> Ended | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or "until" not in value or not set(value) <= set(Ended._fields):
        raise InvalidInput(f"ended is none; an object with {', '.join(Ended._fields)} is needed.")
    reason = value.get("reason")
    if not (reason is None or isinstance(reason, str)):
        raise InvalidInput(f"ended has a reason that is a JSON {type(reason).__name__}; text is needed.")
    successor = None if value.get("successor") is None else _name(value["successor"], "successor")
    return Ended(_seconds(value["until"], "until"), successor, None if reason is None else clean_text(reason))


def _name(value: object, what: str) -> str:
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise InvalidInput(f"{what} is {value!r}; text is needed.")
    text = str(value)
    if not text.strip() or len(text) > _MAX_ID_CHARS or clean_text(text) != text:
        raise InvalidInput(
            f"{what} is {text[:60]!r}; allowed are 1 to {_MAX_ID_CHARS} characters, not all blank."
        )
    return text


def _seconds(value: object, what: str) -> float:
    if not is_time(value):
        raise InvalidInput(
            f"{what} is {value!r:.60}; a Unix time in seconds, of the years 1 to 9999, is needed."
        )
    return float(value)


def moment(value: object, what: str) -> float:
    """A time of Mem0's, ISO 8601, in UTC where it names no zone; now where there is none."""
    if value is None:
        return datetime.now(UTC).timestamp()
    try:
        found = datetime.fromisoformat(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{what} is {value!r}; a time in the form of ISO 8601 is needed.") from error
    return _seconds((found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp(), what)


def _end_of_day(value: object) -> float | None:
    """Mem0 hides a memory from the day behind its `expiration_date` on, in UTC."""
    if value is None:
        return None
    try:
        day = date.fromisoformat(value)  # type: ignore[arg-type]
        if day == date.max:  # for ever, as some write it
            return None
        return datetime.combine(day + timedelta(days=1), time(), UTC).timestamp()
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(f"expiration_date is {value!r}; a date such as 2030-12-31 is needed.") from error
