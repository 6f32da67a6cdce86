"""Filters on facts in Python, for a database whose SQL has no words for all of them.

They mean what `filters` says, as what `conditions` makes of them does. PostgreSQL folds case otherwise than
Python, and its JSON refuses texts that a fact's metadata may hold; so facts are read, and tested here.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from inferscale.catalog.sql import Connection
from inferscale.filters import SPEAKER, TIMES, Comparison, Filter, Value

_ORDERS: Mapping[str, Callable[[Any, Any], bool]] = {
    "gt": operator.gt,
    "gte": operator.ge,
    "lt": operator.lt,
    "lte": operator.le,
}
_OWN = ("created_at", "updated_at", "happened_at", SPEAKER)
_Kind = Literal["null", "bool", "text", "number", "other"]


def passing(connection: Connection, condition: str, values: Sequence[Any], within: Filter) -> list[int]:
    """Numbers of the facts `f` that meet an SQL condition and pass the filter, rising."""
    found = connection.execute(
        "SELECT f.seq, f.metadata, f.created_at, coalesce(f.updated_at, f.created_at), f.happened_at, "
        f"f.speaker FROM facts f WHERE {condition} ORDER BY f.seq",
        values,
    )
    return [
        seq
        for seq, metadata, *own in found
        if passes({} if metadata == "{}" else json.loads(metadata), dict(zip(_OWN, own, strict=True)), within)
    ]


def passes(metadata: Mapping[str, Any], own: Mapping[str, Any], part: Filter) -> bool:
    """own: the fact's times and speaker, whose names win over those of its metadata."""
    if not isinstance(part, Comparison):
        results = (passes(metadata, own, inner) for inner in part.parts)
        if part.junction == "AND":
            return all(results)
        return any(results) if part.junction == "OR" else not any(results)
    fields = own if part.name == SPEAKER or part.name in TIMES else metadata
    if part.operator in ("ne", "nin"):
        return not _is_one_of(fields, part)
    if part.operator in ("eq", "in"):
        return _is_one_of(fields, part)
    found, value = fields.get(part.name), part.values[0]
    if part.operator == "contains":
        if isinstance(found, list):
            return any(_same(item, value) for item in found)
        return isinstance(found, str) and isinstance(value, str) and value in found
    if part.operator == "icontains":
        return isinstance(found, str) and str(value).casefold() in found.casefold()
    kind = _kind(found)
    return (
        kind in ("text", "number") and kind == _kind(value) and _ORDERS[part.operator](_rounded(found), value)
    )


def _is_one_of(fields: Mapping[str, Any], test: Comparison) -> bool:
    return test.name in fields and any(_same(fields[test.name], value) for value in test.values)


def _same(found: object, wanted: Value) -> bool:
    kind = _kind(found)
    return kind != "other" and kind == _kind(wanted) and _rounded(found) == wanted


def _rounded(found: Any) -> Any:
    """Whole numbers of more than 64 bits as floats, as filters have them and SQLite reads them."""
    if not isinstance(found, int) or -(2**63) <= found < 2**63:
        return found
    try:
        return float(found)
    except OverflowError:
        return math.inf if found > 0 else -math.inf


def _kind(value: object) -> _Kind:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, str):
        return "text"
    return "number" if isinstance(value, int | float) else "other"
