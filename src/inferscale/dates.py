"""What a free text says of a time, such as `8 May 2023, 1:56 pm`, `1:56 pm on 8 May, 2023` or ISO 8601."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from functools import lru_cache
from typing import TypeGuard

from dateutil import parser

_MAX_CHARS = 64
_FIRST_S = datetime.min.replace(tzinfo=UTC).timestamp()
_END_S = datetime.max.replace(tzinfo=UTC).timestamp()
_EITHER_WAY = re.compile(r"\b(0?[1-9]|1[0-2])[/.-](0?[1-9]|1[0-2])[/.-](\d{4}|\d\d)\b")
"""Day and month, or month and day."""
_TWICE = (datetime(2000, 1, 1, tzinfo=UTC), datetime(2001, 2, 2, tzinfo=UTC))
"""Two times that fill what a text leaves open: a text that says no day, month or year gives two answers."""


def is_time(value: object) -> TypeGuard[float]:
    """Whether this is the Unix time of a moment that a calendar has, in the years 1 to 9999."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and _FIRST_S <= value < _END_S  # type: ignore[operator]


@lru_cache(maxsize=4096)
def read_time(text: str | None) -> float | None:
    """Unix time of the moment, or of the start of the day, that a text names; None where it names none.

    A text without a time zone is in UTC. Nothing is guessed: `7 May` names no year, so no time, and
    `4/5/2023` may be a day in April or in May.
    """
    moment = _read(text)
    return None if moment is None else moment.timestamp()


@lru_cache(maxsize=4096)
def read_date(text: str | None) -> date | None:
    """The day that a text names, in the time zone that it names; None where `read_time` reads none."""
    moment = _read(text)
    return None if moment is None else moment.date()


def _read(text: str | None) -> datetime | None:
    if text is None or len(text) > _MAX_CHARS or not any(char.isdigit() for char in text):
        return None
    if _EITHER_WAY.search(text):
        return None
    plain = text.replace(" on ", " ")
    try:
        first, second = (parser.parse(plain, default=default, tzinfos=_zone) for default in _TWICE)
    except (ValueError, OverflowError, TypeError):
        return None
    return first if first == second else None


def _zone(name: str | None, offset_s: int | None) -> tzinfo:
    """Raises ValueError for an abbreviation: there is more than one EST."""
    if offset_s is None and name not in (None, "UTC", "GMT", "Z"):
        raise ValueError(name)
    return timezone(timedelta(seconds=offset_s or 0))
