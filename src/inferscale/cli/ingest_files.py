"""Files of facts → clean turns, checked as a whole before anything is stored.

Three formats: one JSON value a line (text, an object with `text`, or a chat message), one JSON list of
these, or plain text with one fact a line. Knows nothing of storage.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from inferscale.catalog.rows import metadata_json
from inferscale.errors import EmptyText, InvalidInput
from inferscale.facts import Turn
from inferscale.turns import Content, read_turns

Format = Literal["auto", "jsonl", "json", "text"]

_BY_SUFFIX: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}
_NOTHING_STORED = "Nothing was stored."
_TURN_FIELDS = ("text", "speaker", "said_at", "metadata")


class Item(NamedTuple):
    """One turn and where it stands, such as `line 7`."""

    turn: Turn
    place: str


class FactFile(NamedTuple):
    """A file that was read. name: for messages. num_skipped: messages that are no utterances."""

    name: str
    items: list[Item]
    num_skipped: int


def read_file(path: str, form: Format, speaker: str | None, said_at: str | None) -> FactFile:
    """Read and check a file, `-` for standard input. Raises InvalidInput, which names the place.

    speaker, said_at: hold for facts that do not say otherwise.
    """
    name = "standard input" if path == "-" else path
    text = _text(path, name)
    chosen = _guess(path, text) if form == "auto" else form
    values = {"jsonl": _lines_of_json, "json": _list_of_json, "text": _lines_of_text}[chosen](text, name)
    items: list[Item] = []
    num_skipped = 0
    for place, value in values:
        try:
            turns = _turns(_content(value), speaker, said_at)
            for turn in turns:
                metadata_json(turn.metadata)
        except InvalidInput as error:
            kind = EmptyText if isinstance(error, EmptyText) else InvalidInput
            told = f"{place.capitalize()} of {name}: {error}"
            raise kind(told if told.endswith(_NOTHING_STORED) else f"{told} {_NOTHING_STORED}") from error
        num_skipped += not turns
        items += [Item(turn, place) for turn in turns]
    return FactFile(name, items, num_skipped)


def _turns(content: Content, speaker: str | None, said_at: str | None) -> list[Turn]:
    """None for a message that is no utterance: only a list, if only of one, passes over these."""
    try:
        return read_turns([content], speaker, said_at)
    except InvalidInput:
        return read_turns(content, speaker, said_at)  # raises too, and counts no items


def _text(path: str, name: str) -> str:
    try:
        raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise InvalidInput(f"{name} cannot be read: {error.strerror}. Nothing was stored.") from error
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise InvalidInput(
            f"Line {line} of {name} is not UTF-8; convert the file, with `iconv -t UTF-8`, say. Nothing was "
            "stored."
        ) from error


def _guess(path: str, text: str) -> Format:
    """By the file's name, else by how its content begins: a broken line must not pass for plain text."""
    by_name = _BY_SUFFIX.get(Path(path).suffix.lower())
    if by_name is not None:
        return by_name
    start = text.lstrip()
    if start.startswith("{"):
        return "jsonl"
    if start.startswith("[") and _is_json(start):
        return "json"
    return "jsonl" if start[:1] in '["' and _is_json(start.split("\n", 1)[0]) else "text"


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _lines_of_json(text: str, name: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield f"line {number}", json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(
                f"Line {number} of {name} is not JSON: {error}. Give one value a line, or --format json for "
                "one list, --format text for plain text. Nothing was stored."
            ) from error


def _list_of_json(text: str, name: str) -> Iterator[tuple[str, Any]]:
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(
            f"{name} is not JSON: {error}. Give one list, or --format jsonl for one value a line. Nothing "
            "was stored."
        ) from error
    if not isinstance(listed, list):
        raise InvalidInput(
            f"{name} holds a JSON {type(listed).__name__}; a list of texts, objects with 'text' or chat "
            "messages is needed. Nothing was stored."
        )
    for number, value in enumerate(listed, start=1):
        yield f"item {number}", value


def _lines_of_text(text: str, name: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"line {number}", line.strip()


def _content(value: Any) -> Content:
    """A JSON value as `Memory.add` takes it."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping):
        raise InvalidInput(
            f"it is a JSON {type(value).__name__}; allowed are text, an object with 'text', and a chat "
            "message."
        )
    if "role" in value:
        return value
    if "text" not in value or not set(value) <= set(_TURN_FIELDS):
        given = ", ".join(sorted(map(repr, value))) or "no fields"
        raise InvalidInput(
            f"it is an object with {given}; allowed are {', '.join(map(repr, _TURN_FIELDS))}, the first is "
            "needed, or a chat message with 'role' and 'content'."
        )
    metadata = value.get("metadata")
    return Turn(
        value["text"], value.get("speaker"), value.get("said_at"), {} if metadata is None else metadata
    )
