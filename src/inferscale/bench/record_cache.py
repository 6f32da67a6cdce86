"""Records that were computed before, in a file of JSON lines: an interrupted run goes on there.

A key names all that decides a record, so a file may be shared by runs that ask for other things.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inferscale.errors import InvalidInput


def record_key(version: int, parts: Mapping[str, Any]) -> str:
    """Digest of all that decides a record. version: of the record's form."""
    text = json.dumps([version, parts], sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class RecordCache:
    """Key → record; written line by line. path: None keeps nothing. name: what a record is, for errors."""

    def __init__(self, path: Path | None, name: str) -> None:
        self._path = path
        self._name = name
        self._lines: dict[str, str] = {}
        if path is not None and path.exists():
            self._read(path)

    def __len__(self) -> int:
        return len(self._lines)

    def _read(self, path: Path) -> None:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"{path} cannot be read as a file of {self._name}s: {error}.") from error
        whole, _, rest = text.rpartition("\n")
        lines = whole.splitlines() + ([rest] if rest and not rest.startswith("{") else [])
        for number, line in enumerate(lines, start=1):
            try:
                self._lines[json.loads(line)["key"]] = line
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidInput(
                    f"Line {number} of {path} is no {self._name}: {error!r}. Remove it, or give another "
                    "--cache."
                ) from error
        if rest:  # the run was ended in the middle of a line
            path.write_text(whole + "\n" if whole else "", encoding="utf-8")

    def get(self, key: str) -> dict[str, Any] | None:
        """The record with its key."""
        line = self._lines.get(key)
        if line is None:
            return None
        record: dict[str, Any] = json.loads(line)
        return record

    def put(self, key: str, record: Mapping[str, Any]) -> None:
        """record: JSON, without `key`. On disk when this returns, as far as the system keeps its word."""
        self._lines[key] = json.dumps({**record, "key": key}, separators=(",", ":"))
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(self._lines[key] + "\n")
