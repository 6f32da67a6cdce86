"""Filters as SQL conditions on `facts f`. All that a caller gave is a bound parameter, names of fields too.

Every condition is 0 or 1, never NULL: a field that is missing makes a test false. Metadata are read with
`json_each`, which compares decoded names: `json_extract` of this SQLite compares them as they are written, so
that it would not find `é`, which is written as an escape.
"""

from __future__ import annotations

import json
import sqlite3
from typing import Any, NamedTuple

from inferscale.filters import SPEAKER, TIMES, Comparison, Filter, Operator, Value

_COLUMNS = {
    "created_at": "f.created_at",
    "updated_at": "coalesce(f.updated_at, f.created_at)",
    "happened_at": "f.happened_at",
    SPEAKER: "f.speaker",
}
_ORDERS = {"gt": ">", "gte": ">=", "lt": "<", "lte": "<="}
_TEXT, _NUMBER = "'text'", "'integer', 'real'"
_OPPOSITES: dict[str, Operator] = {"ne": "eq", "nin": "in"}


class FactCondition(NamedTuple):
    """sql: uses `f` for facts."""

    sql: str
    values: list[Any]


LIVE = "(f.expires_at IS NULL OR f.expires_at > ?)"
"""Condition of facts that have not expired at a time."""


def prepare(connection: sqlite3.Connection) -> None:
    """Give the connection the function that these conditions need."""
    connection.create_function("folded", 1, _folded, deterministic=True)


def condition_of(filter: Filter) -> FactCondition:
    if isinstance(filter, Comparison):
        return _test(filter)
    parts = [condition_of(part) for part in filter.parts]
    joined = (" AND " if filter.junction == "AND" else " OR ").join(part.sql for part in parts)
    sql = f"NOT ({joined})" if filter.junction == "NOT" else f"({joined})"
    return FactCondition(sql, [value for part in parts for value in part.values])


def _test(test: Comparison) -> FactCondition:
    opposite = _OPPOSITES.get(test.operator)
    if opposite is not None:
        sql, values = _test(Comparison(test.name, opposite, test.values))
        return FactCondition(f"NOT {sql}", values)
    if test.name in _COLUMNS:
        return _on_column(test)
    sql, values = _on_atom(test, "m.type", "m.atom")
    if test.operator == "contains":
        sql, values = _contained(test.values[0], sql, values)
    return FactCondition(
        f"EXISTS (SELECT 1 FROM json_each(f.metadata) m WHERE m.key = ? AND ({sql}))", [test.name, *values]
    )


def _on_column(test: Comparison) -> FactCondition:
    """A column is NULL where the fact has none; `eq` and `in` find that by null."""
    column = _COLUMNS[test.name]
    kind = "'real'" if test.name in TIMES else _TEXT
    type_of = f"CASE WHEN {column} IS NULL THEN 'null' ELSE {kind} END"
    sql, values = _on_atom(test, type_of, column)
    return FactCondition(f"coalesce(({sql}), 0)", values)


def _on_atom(test: Comparison, type_of: str, atom: str) -> FactCondition:
    value = test.values[0] if test.values else None
    if test.operator in ("eq", "in"):
        return _one_of(test.values, type_of, atom)
    if test.operator == "icontains":
        return FactCondition(f"{type_of} = 'text' AND instr(folded({_raw(atom)}), ?) > 0", [_fold(value)])
    if test.operator == "contains":
        return FactCondition(f"{type_of} = 'text' AND instr({atom}, ?) > 0", [value])
    types = _TEXT if isinstance(value, str) else _NUMBER
    return FactCondition(f"{type_of} IN ({types}) AND {atom} {_ORDERS[test.operator]} ?", [value])


def _one_of(wanted: tuple[Value, ...], type_of: str, atom: str) -> FactCondition:
    parts: list[str] = []
    values: list[Any] = []
    texts = [value for value in wanted if isinstance(value, str)]
    numbers = [value for value in wanted if isinstance(value, int | float) and not isinstance(value, bool)]
    for types, listed in ((_TEXT, texts), (_NUMBER, numbers)):
        if listed:
            parts.append(f"({type_of} IN ({types}) AND {atom} IN (SELECT value FROM json_each(?)))")
            values.append(json.dumps(listed))
    for name, is_wanted in (
        ("null", None in wanted),
        ("true", _has(wanted, True)),
        ("false", _has(wanted, False)),
    ):
        if is_wanted:
            parts.append(f"{type_of} = '{name}'")
    return FactCondition(" OR ".join(parts) or "0", values)


def _contained(value: Value, sql: str, values: list[Any]) -> FactCondition:
    """`contains` of a list: one of its members is the value. Of a text: the value is part of it."""
    member, wanted = _one_of((value,), "e.type", "e.atom")
    listed = f"m.type = 'array' AND EXISTS (SELECT 1 FROM json_each(m.value) e WHERE {member})"
    if not isinstance(value, str):
        return FactCondition(listed, wanted)
    return FactCondition(f"({sql}) OR ({listed})", [*values, *wanted])


def _has(wanted: tuple[Value, ...], value: bool) -> bool:
    return any(item is value for item in wanted)


def _raw(atom: str) -> str:
    """As bytes: metadata of earlier versions may hold halves of characters, which are no text for Python."""
    return f"CAST({atom} AS BLOB)"


def _folded(text: bytes | None) -> str | None:
    return None if text is None else _fold(text.decode("utf-8", "replace"))


def _fold(value: Value) -> str:
    return str(value).casefold()
