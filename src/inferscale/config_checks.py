"""What settings have in common: how sizes are written, how values are checked, unknown keys are refused."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from decimal import Decimal
from textwrap import shorten
from typing import Any, TypeVar

from inferscale.errors import InvalidConfig

_C = TypeVar("_C")

MAX_BYTES = 2**60
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_size(value: int | str, name: str) -> int:
    """`536870912`, `"512MiB"` or `"2 GB"` → bytes. Raises InvalidConfig."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    text = value if isinstance(value, str) else ""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise InvalidConfig(
            f"{name} is {value!r}; allowed are bytes as a whole number or a size such as '512MiB' or '2GB'."
        )
    size = int(Decimal(match[1]) * _UNITS[match[2].lower()])
    if size > MAX_BYTES:
        raise InvalidConfig(f"{name} is {shorten(text, 40, placeholder='…')}; allowed are sizes up to 1 EiB.")
    return size


def check_int(value: object, name: str, lowest: int, highest: int | None = None) -> None:
    """Settings come from JSON, where "16", 16.0 and true are easily written for 16 or 1."""
    allowed = f"{lowest} to {highest}" if highest is not None else f"{lowest} or more"
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidConfig(f"{name} is {value!r}; allowed are whole numbers, {allowed}, without quotes.")
    if value < lowest or (highest is not None and value > highest):
        raise InvalidConfig(f"{name} is {value}; allowed are {allowed}.")


def check_number(value: object, name: str, lowest: float, highest: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not lowest <= value <= highest:  # type: ignore[operator]
        raise InvalidConfig(f"{name} is {value!r}; allowed are numbers from {lowest:g} to {highest:g}.")


def check_path(value: object, name: str) -> None:
    if value is not None and (not isinstance(value, str) or not value):
        raise InvalidConfig(f"{name} is {value!r}; allowed is a path as a string. Leave it out for none.")


def from_mapping(cls: type[_C], settings: Mapping[str, Any], where: str) -> _C:
    """Build the dataclass `cls` from `settings`; an unknown key is an InvalidConfig."""
    allowed = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(settings) - allowed)
    if unknown:
        raise InvalidConfig(
            f"{where} has unknown settings {', '.join(unknown)}; allowed are {', '.join(sorted(allowed))}."
        )
    return cls(**settings)
