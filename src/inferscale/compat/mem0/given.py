"""What Mem0's callers give → scopes, filters and turns of ours, or one clear error."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, date, datetime
from typing import Any, NamedTuple

from inferscale.compat.mem0.shapes import IDS
from inferscale.errors import InvalidInput
from inferscale.facts import Scope
from inferscale.turns import Content, read_scope, read_turns

_log = logging.getLogger(__name__)
_IDENTITY = (*IDS, "actor_id")


class Selection(NamedTuple):
    """The ids of Mem0's `filters`, and all else that they ask for."""

    scope: Scope
    filters: dict[str, Any]


def read_ids(user_id: object, agent_id: object, run_id: object, advice: str) -> Scope:
    """A scope of Mem0's ids: trimmed, numbers as text, no white space inside. Raises InvalidInput."""
    ids = [_id(value, name) for name, value in zip(IDS, (user_id, agent_id, run_id), strict=True)]
    if all(value is None for value in ids):
        raise InvalidInput(f"no id was given; {advice}")
    return read_scope(*ids)


def _id(value: object, name: str) -> str | None:
    if value is None:
        return None
    text = str(value).strip()
    if not text or text == "*" or any(char.isspace() for char in text):
        raise InvalidInput(
            f"{name} is {value!r}; allowed is text without white space that names one {name[: -len('_id')]}."
        )
    return text


def read_filters(filters: object, options: Mapping[str, Any], verb: str) -> Selection:
    """Scope and metadata filter. options: keyword arguments that the verb does not name.

    `{"field": "*"}` asks for nothing, as in Mem0's default store; a list of values stands for `in`.
    """
    misplaced = [name for name in IDS if name in options]
    if misplaced:
        raise InvalidInput(
            f"{verb}() takes no {misplaced[0]}; give filters={{{misplaced[0]!r}: {options[misplaced[0]]!r}}}."
        )
    if options:
        raise TypeError(f"{verb}() got an unexpected keyword argument {next(iter(options))!r}")
    if filters is not None and not isinstance(filters, Mapping):
        raise InvalidInput(f"filters is a {type(filters).__name__}; give filters={{'user_id': '…'}}.")
    rest = dict(filters or {})
    ids = {name: rest.pop(name, None) for name in IDS}
    scope = read_ids(**ids, advice="filters needs at least one of user_id, agent_id and run_id.")
    return Selection(scope, _plain(rest))


def _plain(filters: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, value in filters.items():
        if name in ("AND", "OR", "NOT") and isinstance(value, list):
            parts = [_plain(part) if isinstance(part, Mapping) else part for part in value]
            if name == "OR" and {} in parts:
                continue  # one of its parts passes everything
            parts = [part for part in parts if part != {}]
            if parts or not value:
                plain[name] = parts
        elif isinstance(value, list):
            plain[name] = {"in": value}
        elif value != "*":
            plain[name] = value
    return plain


def read_metadata(
    metadata: Mapping[str, Any] | None, verb: str, current: Mapping[str, Any]
) -> dict[str, Any]:
    """Metadata without ids, which only their own arguments set. current: what is no change of them."""
    if metadata is not None and not isinstance(metadata, Mapping):
        raise InvalidInput(f"metadata is a {type(metadata).__name__}; allowed is a dict.")
    given = copy.deepcopy(dict(metadata or {}))
    for name in _IDENTITY:
        if name in given and given.pop(name) != current.get(name):
            _log.warning("%s(): metadata[%r] was left out; ids are not set by metadata", verb, name)
    return given


def read_messages(messages: object, *, has_roles: bool) -> list[Content]:
    """What of the messages was said. has_roles: as turns with role and actor_id in their metadata, as Mem0
    keeps them; else as messages. What lacks a role is passed over."""
    listed: object = messages
    if isinstance(messages, str):
        turns = read_turns(messages)
        return [replace(turn, metadata={"role": "user"}) for turn in turns] if has_roles else [*turns]
    if isinstance(messages, Mapping):
        listed = [messages]
    if not isinstance(listed, list):
        raise InvalidInput(
            f"messages is a {type(messages).__name__}; allowed are text, a chat message and a list of these."
        )
    content: list[Content] = []
    for number, message in enumerate(listed, start=1):
        role = message.get("role") if isinstance(message, Mapping) else None
        if role is None or message.get("content") is None:
            _log.warning(
                "add(): message %d of %d was passed over: it lacks 'role' or 'content'", number, len(listed)
            )
        elif not has_roles:
            content.append(message)
        else:
            beside = {"role": role, **({"actor_id": message["name"]} if message.get("name") else {})}
            content += [replace(turn, metadata=beside) for turn in read_turns([message])]
    return content


def read_timestamp(given: object) -> str | None:
    """When messages were said, as text: of a Unix time in seconds, a date, a datetime, or text as it is."""
    if given is None or isinstance(given, str):
        return given
    if isinstance(given, int | float) and not isinstance(given, bool):
        try:
            return datetime.fromtimestamp(given, UTC).isoformat(timespec="seconds")
        except (OverflowError, ValueError, OSError):
            pass
    if isinstance(given, date):  # a datetime as well
        return given.isoformat()
    raise InvalidInput(f"timestamp is {given!r}; allowed are seconds since 1970, a datetime and text.")


def read_count(given: object, name: str) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise InvalidInput(f"{name} is {given!r}; allowed are whole numbers from 0.")
    return given


def read_threshold(given: object) -> float:
    """The lowest score of a result; Mem0's default for None."""
    if given is None:
        return DEFAULT_THRESHOLD
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= 1:
        raise InvalidInput(f"threshold is {given!r}; allowed are numbers from 0 to 1.")
    return float(given)


DEFAULT_THRESHOLD = 0.1
