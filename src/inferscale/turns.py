"""What callers hand to `Memory` → clean turns and scopes, or one clear error.

Knows nothing of storage, tokens and vectors.

Which messages are memory: utterances of users and assistants. System and developer texts are
instructions, tool results are data of one moment, and an assistant message that only calls tools
says nothing: in a list of messages these are passed over, and the log says how many. A message
that should hold an utterance but is blank is an error.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from inferscale.dates import is_time, read_time
from inferscale.errors import EmptyText, InvalidInput
from inferscale.facts import KEEP, Fact, Keep, Scope, Turn

Content = str | Turn | Mapping[str, Any]
"""One thing to remember: text, a turn, or a chat message: `role`, `content`, optional `name` and `time`."""

MAX_ID_CHARS = 1000
MAX_METADATA_LEVELS = 50
"""Dicts and lists in each other: whoever writes them down or compares them goes down as deep."""

_BLOCK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_SPOKEN_ROLES = ("user", "assistant")
_SILENT_ROLES = ("system", "developer", "tool", "function")
_TEXT_PARTS = ("text", "input_text", "output_text")

_log = logging.getLogger(__name__)


def clean_text(text: str) -> str:
    """`text` as it can be stored, all else kept as it is.

    NUL characters are removed: SQLite's text functions and many tokenizers stop at them. A
    surrogate pair becomes the character that it means, and half a pair, which is not valid
    Unicode, becomes U+FFFD.
    """
    if "\0" in text:
        text = text.replace("\0", "")
    if any("\ud800" <= char <= "\udfff" for char in text):
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def read_scope(user_id: str | None, agent_id: str | None, run_id: str | None) -> Scope:
    """Check ids and make a Scope of them. Raises InvalidInput.

    Ids are compared exactly, so they are refused rather than repaired.
    """
    for name, value in (("user_id", user_id), ("agent_id", agent_id), ("run_id", run_id)):
        if value is None:
            continue
        if not isinstance(value, str):
            raise InvalidInput(f"{name} is {value!r}; it must be text, so give {str(value)!r}.")
        if not value.strip() or len(value) > MAX_ID_CHARS:
            raise InvalidInput(
                f"{name} has {len(value)} characters; allowed are 1 to {MAX_ID_CHARS}, not all blank."
            )
        if clean_text(value) != value:
            raise InvalidInput(f"{name} is {value!r}; NUL and surrogate characters are not allowed in ids.")
    scope = Scope(user_id, agent_id, run_id)
    if scope.is_empty():
        raise InvalidInput("no scope was given; give at least one of user_id, agent_id and run_id.")
    return scope


def read_query(query: str) -> str:
    """A clean question. Raises EmptyText for a blank one."""
    return _spoken(query, "the query", told="")


def read_count(value: int, name: str, lowest: int = 0) -> int:
    """A whole number from `lowest` on. Raises InvalidInput."""
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise InvalidInput(f"{name} is {value!r}; allowed are whole numbers from {lowest}.")
    return value


def read_block_name(name: object) -> str:
    """Check the name of a core block. Raises InvalidInput."""
    if not isinstance(name, str) or _BLOCK_NAME.fullmatch(name) is None:
        shown = repr(name[:80]) if isinstance(name, str) else f"a {type(name).__name__}"
        raise InvalidInput(
            f"the name of a core block is {shown}; allowed are 1 to 64 letters of a to z, digits, '_', '-' "
            "and '.', the first a letter or digit."
        )
    return name


def read_expiry(value: object) -> float | None:
    """Unix time of a number, or of a text that `dates.read_time` reads. Raises InvalidInput."""
    if value is None:
        return None
    found = read_time(value) if isinstance(value, str) else value
    if not is_time(found):
        shown = repr(value[:80]) if isinstance(value, str) else f"{value!r:.80}"
        raise InvalidInput(
            f"expires_at is {shown}, which names no time; give seconds since 1970 or a date such as "
            "'2026-05-08' or '2026-05-08T13:56:00Z'."
        )
    return float(found)


def is_deeper(value: object, num_levels: int) -> bool:
    """Whether more than `num_levels` dicts and lists lie in each other."""
    level = [value]
    for _ in range(num_levels):
        inner = [
            item for outer in level for item in _items(outer) if isinstance(item, Mapping | list | tuple)
        ]
        level = list({id(item): item for item in inner}.values())  # what holds itself shall not multiply
        if not level:
            return False
    return True


def read_turns(
    content: Content | Sequence[Content],
    speaker: str | None = None,
    said_at: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    expires_at: float | str | None = None,
) -> list[Turn]:
    """Turns in order. What is given beside `content` holds where an item does not say otherwise.

    A chat message's speaker is its `name`, else `speaker` for the role user, else its role. An
    item's own metadata wins over `metadata`, name by name. Raises EmptyText and InvalidInput; the
    message says which item of a list is meant.
    """
    labels = (_label(speaker, "speaker"), _label(said_at, "said_at"))
    defaults = Turn("", *labels, dict(metadata or {}), read_expiry(expires_at))
    _check_metadata(defaults.metadata, "the call")
    if isinstance(content, str | Turn | Mapping):
        if isinstance(content, Mapping) and _is_silent(content):
            raise InvalidInput(
                f"a message of the role {content.get('role')!r} without an utterance is not memory; "
                "give its text as a plain string to store it all the same."
            )
        return [_read_turn(content, defaults, "the text")]
    given: object = content
    if not isinstance(given, Sequence) or isinstance(given, bytes | bytearray):
        raise InvalidInput(
            f"content is a {type(content).__name__}; allowed are text, a Turn, a chat message, "
            "or a list of these."
        )
    turns: list[Turn] = []
    skipped: Counter[str] = Counter()
    for number, item in enumerate(content, start=1):
        if isinstance(item, Mapping) and _is_silent(item):
            skipped[str(item.get("role"))] += 1
        else:
            turns.append(_read_turn(item, defaults, f"item {number} of {len(content)}"))
    if skipped:
        roles = ", ".join(f"{count} {role}" for role, count in sorted(skipped.items()))
        _log.info(
            "%d of %d messages are no utterances and were not stored: %s",
            skipped.total(),
            len(content),
            roles,
        )
    return turns


def read_change(
    fact: Fact,
    text: str | None,
    speaker: str | Keep | None,
    said_at: str | Keep | None,
    metadata: Mapping[str, Any] | None,
) -> Turn:
    """What a fact says after an update. Only what is given is checked and cleaned: the rest was before."""
    [given] = read_turns(
        Turn(
            "unchanged" if text is None else text,
            None if speaker is KEEP else speaker,
            None if said_at is KEEP else said_at,
            {} if metadata is None else metadata,  # type: ignore[arg-type]  # checked there
        )
    )
    return Turn(
        fact.text if text is None else given.text,
        fact.speaker if speaker is KEEP else given.speaker,
        fact.said_at if said_at is KEEP else given.said_at,
        fact.metadata if metadata is None else given.metadata,
    )


def from_assistant(content: Content | Sequence[Content]) -> list[bool]:
    """Whether an assistant says it, for each of the turns that `read_turns` makes of the same content."""
    items = [content] if isinstance(content, str | Turn | Mapping) else content
    return [
        item.get("role") == "assistant"
        if isinstance(item, Mapping)
        else isinstance(item, Turn) and (item.speaker or "").casefold() == "assistant"
        for item in items
        if not (isinstance(item, Mapping) and _is_silent(item))
    ]


def _read_turn(item: Content, defaults: Turn, where: str) -> Turn:
    if isinstance(item, str):
        return replace(defaults, text=_spoken(item, where), metadata=dict(defaults.metadata))
    if isinstance(item, Turn):
        if not isinstance(item.metadata, Mapping):
            raise InvalidInput(
                f"{where} has metadata of the type {type(item.metadata).__name__}; allowed is a dict."
            )
        _check_metadata(item.metadata, where)
        return Turn(
            _spoken(item.text, where),
            _label(item.speaker, "speaker") or defaults.speaker,
            _label(item.said_at, "said_at") or defaults.said_at,
            {**defaults.metadata, **item.metadata},
            defaults.expires_at if item.expires_at is None else read_expiry(item.expires_at),
        )
    if isinstance(item, Mapping):
        return _read_message(item, defaults, where)
    raise InvalidInput(f"{where} is a {type(item).__name__}; allowed are text, a Turn and a chat message.")


def _read_message(message: Mapping[str, Any], defaults: Turn, where: str) -> Turn:
    role = message.get("role")
    if role not in _SPOKEN_ROLES:
        allowed = ", ".join(repr(name) for name in _SPOKEN_ROLES + _SILENT_ROLES)
        raise InvalidInput(
            f"{where} has the role {role!r}; allowed are {allowed}. A person's name goes into 'name'."
        )
    return Turn(
        _spoken(_message_text(message.get("content"), where), where),
        _label(message.get("name"), "name") or (role == "user" and defaults.speaker) or role,
        _label(message.get("time"), "time") or defaults.said_at,
        dict(defaults.metadata),
        defaults.expires_at,
    )


def _message_text(content: object, where: str) -> str:
    """A message's text: the content itself, or its text parts, one a line. Other parts hold no text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) for part in content):
        raise InvalidInput(
            f"{where} has content of the type {type(content).__name__}; allowed are text and text parts."
        )
    texts = [part.get("text") for part in content if part.get("type") in _TEXT_PARTS]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidInput(f"{where} has a text part without text.")
    return "\n".join(text for text in texts if isinstance(text, str))


def _check_metadata(metadata: Mapping[str, Any], where: str) -> None:
    """Refuse what no answer could hold. That it is JSON at all is the catalog's to check."""
    if is_deeper(metadata, MAX_METADATA_LEVELS):
        raise InvalidInput(
            f"{where} has metadata of more than {MAX_METADATA_LEVELS} levels; make it flatter, or store the "
            "deep part as text."
        )
    try:
        json.dumps(dict(metadata), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"{where} has metadata with half of a surrogate pair, which is not valid Unicode. Repair or "
            "remove it."
        ) from error
    except (TypeError, ValueError):
        pass


def _items(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _is_silent(message: Mapping[str, Any]) -> bool:
    """Whether a chat message is none that people or assistants said."""
    role = message.get("role")
    calls_tools = bool(message.get("tool_calls") or message.get("function_call"))
    return role in _SILENT_ROLES or (role == "assistant" and calls_tools and not message.get("content"))


def _spoken(text: object, where: str, told: str = " Nothing was stored.") -> str:
    if not isinstance(text, str):
        raise InvalidInput(f"{where} is a {type(text).__name__}; it must be text.")
    cleaned = clean_text(text)
    if not cleaned.strip():
        raise EmptyText(f"{where} is blank; give at least one visible character.{told}")
    return cleaned


def _label(value: object, name: str) -> str | None:
    """A speaker or a time; blank ones count as not given."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise InvalidInput(f"{name} is {value!r}; it must be text.")
    return clean_text(value).strip() or None
