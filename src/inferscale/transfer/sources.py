"""Files of facts → facts, one after the other: JSON lines, a JSON document, and Mem0's stores.

Lines are read one by one, so a file may be larger than memory. Knows nothing of where facts go.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from inferscale.catalog import StoredFact
from inferscale.errors import InvalidInput
from inferscale.facts import Scope
from inferscale.transfer import mem0_stores
from inferscale.transfer.mem0_stores import Change
from inferscale.transfer.records import moment, read_record

NOBODY = Scope()
_LISTS = ("results", "memories")
"""Names under which a JSON document holds its list, as the results of Mem0's `get_all` do."""


class Item(NamedTuple):
    """A fact and where it stands, such as `line 7 of facts.jsonl`."""

    place: str
    stored: StoredFact


def read_source(
    path: str, owner: Scope = NOBODY, *, history: str | None = None, collection: str | None = None
) -> Iterator[Item]:
    """The facts of a file, `-` for standard input, or of Mem0's Qdrant folder, as they are read.

    owner: of facts that name none. history: Mem0's `history.db` with the former texts. Raises
    InvalidInput, with the place, for what is no fact.
    """
    changes = {} if history is None else _read_history(Path(history))
    for place, value in _values(path, collection, changes):
        if isinstance(value, dict) and "revisions" not in value:
            value = _with_revisions(value, changes.get(str(value.get("id")), ()))
        try:
            stored = read_record(value, owner)
        except InvalidInput as error:
            raise type(error)(f"{place[:1].upper()}{place[1:]} is no fact: {error}") from error
        yield Item(place, stored)


def _values(path: str, collection: str | None, changes: dict[str, list[Change]]) -> Iterator[tuple[str, Any]]:
    """JSON values with their places. changes: to which a history adds what it tells."""
    if path == "-":
        yield from _values_of_text(sys.stdin.buffer, "standard input")
        return
    source = Path(path)
    if source.is_dir():
        source = mem0_stores.collection_file(source, collection)
    try:
        # A pipe, such as one of a shell's <(…), can be read once.
        is_database = not source.is_fifo() and mem0_stores.is_sqlite(source)
    except OSError as error:
        raise InvalidInput(
            f"{path} cannot be read: {error.strerror}. Give a file, or - for standard input."
        ) from error
    if not is_database:
        with source.open("rb") as file:
            yield from _values_of_text(file, path)
    elif mem0_stores.has_table(source, "points"):
        for number, point in enumerate(mem0_stores.read_collection(source), start=1):
            yield f"memory {number} of {path}", point
    else:
        changes.update(_read_history(source))
        for number, memory in enumerate(mem0_stores.memories_of(changes), start=1):
            yield f"memory {number} of {path}", memory


def _values_of_text(file: IO[bytes], name: str) -> Iterator[tuple[str, Any]]:
    """A value a line; or the items of a document, which begins with `[` or with a line `{`."""
    is_first = True
    for number, line in enumerate(file, start=1):
        text = _decoded(line, number, name).strip()
        if not text:
            continue
        if is_first and (text == "{" or text.startswith("[")):
            yield from _values_of_document(text + "\n" + _decoded(file.read(), number, name), number, name)
            return
        is_first = False
        value = _parsed(text, number, name)
        listed = _list_in(value)
        if listed is None:
            yield f"line {number} of {name}", value
        else:
            yield from _items(listed, name)


def _values_of_document(text: str, number: int, name: str) -> Iterator[tuple[str, Any]]:
    """number: of the line that it begins with."""
    value = _parsed(text, number, name)
    listed = value if isinstance(value, list) else _list_in(value)
    yield from _items([value] if listed is None else listed, name)


def _items(listed: Sequence[Any], name: str) -> Iterator[tuple[str, Any]]:
    for number, value in enumerate(listed, start=1):
        yield f"item {number} of {name}", value


def _list_in(value: object) -> list[Any] | None:
    if not isinstance(value, dict) or "id" in value:
        return None
    return next((value[name] for name in _LISTS if isinstance(value.get(name), list)), None)


def _decoded(line: bytes, number: int, name: str) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"Line {number} of {name} is not UTF-8. Convert the file, or repair the line."
        ) from error


def _parsed(text: str, number: int, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        line = number + getattr(error, "lineno", 1) - 1
        raise InvalidInput(f"Line {line} of {name} is not JSON: {error}. Give one object a line.") from error


def _read_history(path: Path) -> dict[str, list[Change]]:
    try:
        is_history = mem0_stores.is_sqlite(path) and mem0_stores.has_table(path, "history")
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}.") from error
    if not is_history:
        raise InvalidInput(f"{path} is no history of Mem0. Give the file that its history_db_path names.")
    return mem0_stores.read_history(path)


def _with_revisions(value: dict[str, Any], changes: Sequence[Change]) -> dict[str, Any]:
    """The memory with the texts that its updates replaced."""
    replaced = [change for change in changes if change.event == "UPDATE" and change.old_memory is not None]
    if not replaced:
        return value
    revisions = [
        {"text": change.old_memory, "replaced_at": moment(change.updated_at, "updated_at")}
        for change in replaced
    ]
    return {**value, "revisions": revisions}
