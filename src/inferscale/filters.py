"""Filters on what is stored with a fact: from JSON to a small tree, or one clear error.

    {"topic": "travel"}                                   topic is travel
    {"rating": {"gte": 3, "lt": 9}, "tag": {"in": ["a", "b"]}}    all of these
    {"OR": [{"topic": "travel"}, {"NOT": [{"topic": {"contains": "work"}}]}]}

The form is Mem0's. A name is that of a metadata field at the top level; `created_at`, `updated_at`,
`happened_at` (what `said_at` means) and `speaker` are those of the fact, whatever its metadata hold. Every
test is true or false: a fact without the field passes `ne` and `nin`, which are the opposites of `eq` and
`in`, and no other test; `NOT` passes what none of its parts passes. Texts are compared with texts, numbers
with numbers and true and false with these; nothing is converted. Knows no storage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, cast, get_args

from inferscale.dates import read_time
from inferscale.errors import InvalidInput

Operator = Literal["eq", "ne", "in", "nin", "gt", "gte", "lt", "lte", "contains", "icontains"]
Junction = Literal["AND", "OR", "NOT"]
Value = str | int | float | bool | None

OPERATORS: tuple[Operator, ...] = get_args(Operator)
TIMES = ("created_at", "updated_at", "happened_at")
"""Names of times: numbers are Unix times in seconds, texts are read by `dates.read_time`."""
SPEAKER = "speaker"
MAX_LEVELS = 8
MAX_TESTS = 100
MAX_VALUES = 1000
MAX_CHARS = 1000

_LISTS = ("in", "nin")
_ORDERS = ("gt", "gte", "lt", "lte")
_PARTS = ("contains", "icontains")
_IDS = ("user_id", "agent_id", "run_id")
_INTEGERS = 2**63


@dataclass(frozen=True, slots=True)
class Comparison:
    """One field against a value; `in` and `nin` have several, all others one."""

    name: str
    operator: Operator
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """AND: all parts pass; OR: one does; NOT: none does."""

    junction: Junction
    parts: tuple[Comparison | Group, ...]


Filter = Comparison | Group


def read_filter(given: object) -> Filter | None:
    """The filter of an object in the form above; None for None and an empty object. Raises InvalidInput."""
    if given is None or given == {}:
        return None
    return _Reader().group(given, "filters", 1)


class _Reader:
    """Counts what it reads, so that a filter has a bounded size."""

    def __init__(self) -> None:
        self.num_tests = 0
        self.num_values = 0

    def group(self, given: object, where: str, level: int) -> Filter:
        if not isinstance(given, Mapping):
            _refuse(f"{where} is {_shown(given)}; allowed is an object such as {{'topic': 'travel'}}.")
        if not given:
            _refuse(f"{where} is empty; give a field such as {{'topic': 'travel'}}, or leave it out.")
        if level > MAX_LEVELS:
            _refuse(f"filters have more than {MAX_LEVELS} levels of AND, OR and NOT; make them flatter.")
        parts: list[Filter] = []
        for name, value in given.items():
            if name in get_args(Junction):
                parts.append(self.junction(cast(Junction, name), value, where, level))
            else:
                parts += self.tests(name, value, where)
        return parts[0] if len(parts) == 1 else Group("AND", tuple(parts))

    def junction(self, name: Junction, given: object, where: str, level: int) -> Group:
        listed = [given] if name == "NOT" and isinstance(given, Mapping) else given
        if not isinstance(listed, list | tuple) or not listed:
            _refuse(f"{where}.{name} is {_shown(given)}; allowed is a list of at least one object.")
        if len(listed) > MAX_TESTS:
            _refuse(f"{where}.{name} has {len(listed)} parts; allowed are {MAX_TESTS} tests in all.")
        parts = (self.group(part, f"{where}.{name}[{n}]", level + 1) for n, part in enumerate(listed))
        return Group(name, tuple(parts))

    def tests(self, name: object, given: object, where: str) -> list[Filter]:
        field = _field(name, where)
        place = f"{where}.{field if len(field) <= 60 else field[:60] + '…'}"
        named: Mapping[Any, object] = given if isinstance(given, Mapping) else {"eq": given}
        if not named:
            _refuse(f"{place} is empty; allowed is a value, or an object with {', '.join(OPERATORS)}.")
        tests: list[Filter] = []
        for operator, value in named.items():
            if operator not in OPERATORS:
                _refuse(f"{place} has the operator {_shown(operator)}; allowed are {', '.join(OPERATORS)}.")
            self.num_tests += 1
            tests.append(
                Comparison(field, operator, self.values(field, operator, value, f"{place}.{operator}"))
            )
        if self.num_tests > MAX_TESTS:
            _refuse(f"filters have more than {MAX_TESTS} tests; allowed are {MAX_TESTS}.")
        return tests

    def values(self, field: str, operator: Operator, given: object, where: str) -> tuple[Value, ...]:
        if operator in _LISTS:
            if not isinstance(given, list | tuple | set | frozenset):
                _refuse(f"{where} is {_shown(given)}; allowed is a list of values.")
            listed = list(given)
        else:
            listed = [given]
        self.num_values += len(listed)
        if self.num_values > MAX_VALUES:
            _refuse(f"filters have more than {MAX_VALUES} values; allowed are {MAX_VALUES}.")
        return tuple(_value(field, operator, value, where) for value in listed)


def _field(name: object, where: str) -> str:
    if not isinstance(name, str) or not name or len(name) > MAX_CHARS or not _is_text(name):
        _refuse(f"{where} has the name {_shown(name)}; allowed are texts of 1 to {MAX_CHARS} characters.")
    if name in _IDS:
        _refuse(f"{where} has {name}, which is no metadata: give it beside the filter, as the scope.")
    if name.upper() in get_args(Junction):
        _refuse(f"{where} has the name {name!r}; write {name.upper()}.")
    return name


def _value(field: str, operator: Operator, value: object, where: str) -> Value:
    if isinstance(value, str):
        if len(value) > MAX_CHARS or not _is_text(value):
            _refuse(f"{where} is {_shown(value)}; allowed are texts of up to {MAX_CHARS} characters.")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if isinstance(value, float) and not math.isfinite(value):
            _refuse(f"{where} is {value}; allowed are finite numbers.")
        if isinstance(value, int) and not -_INTEGERS <= value < _INTEGERS:
            value = _as_float(value, where)
    elif not (value is None or isinstance(value, bool)):
        _refuse(f"{where} is {_shown(value)}; allowed are text, numbers, true, false and null.")
    if operator in _ORDERS and (value is None or isinstance(value, bool)):
        _refuse(f"{where} is {_shown(value)}; allowed are numbers and texts.")
    if field in TIMES:
        return _time(operator, value, where)
    if operator == "icontains" or (field == SPEAKER and operator in _PARTS):
        if not isinstance(value, str):
            _refuse(f"{where} is {_shown(value)}; allowed is a text.")
    elif field == SPEAKER and not (value is None or isinstance(value, str)):
        _refuse(f"{where} is {_shown(value)}; allowed are texts and null.")
    return value


def _time(operator: Operator, value: object, where: str) -> float | None:
    if operator in _PARTS or isinstance(value, bool):
        _refuse(f"{where}: a time is compared by {', '.join(o for o in OPERATORS if o not in _PARTS)}.")
    if value is None or isinstance(value, int | float):
        return None if value is None else float(value)
    found = read_time(str(value))
    if found is None:
        _refuse(
            f"{where} is {_shown(value)}, which names no time; give seconds since 1970 or a date such as "
            "'2023-05-08' or '2023-05-08T13:56:00Z'."
        )
    return found


def _as_float(value: int, where: str) -> float:
    try:
        return float(value)
    except OverflowError:
        _refuse(f"{where} is a number of {value.bit_length()} bits; allowed are numbers up to 1e308.")


def _is_text(text: str) -> bool:
    """Whether it can stand in the catalog, where neither NUL nor halves of surrogate pairs are."""
    return "\0" not in text and not any("\ud800" <= char <= "\udfff" for char in text)


def _shown(value: object) -> str:
    """A few characters of a plain value; of others, which may be deep, the type."""
    if isinstance(value, str):
        return repr(value[:60]) + ("…" if len(value) > 60 else "")
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int) and value.bit_length() < 200:
        return repr(value)
    return f"a {type(value).__name__}"


def _refuse(message: str) -> NoReturn:
    raise InvalidInput(message)
