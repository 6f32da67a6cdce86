"""Verdicts of earlier starts, in `self-check.json` of the data folder, by all that could change them.

A file that cannot be read or written costs a check, never a start. Holds nothing of users.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from inferscale.self_check.verdict import Verdict

logger = logging.getLogger(__name__)

FILE = "self-check.json"
_MAX_VERDICTS = 64
_SOURCES = ("rope.py", "plan.py", "self_check", "connector", "kernels", "pool")
"""What of InferScale moves KV, and what checks it."""


def key_of(facts: Mapping[str, Any]) -> str:
    """facts: the model's fingerprint, the engine's version, formats and paths; plain values. Our own code
    counts by itself, so that no change of it is forgotten."""
    told = json.dumps([_code(), dict(facts)], sort_keys=True)
    return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()


@lru_cache(maxsize=1)
def _code() -> str:
    root = Path(__file__).parents[1]
    digest = hashlib.blake2b(digest_size=16)
    for name in _SOURCES:
        paths = sorted((root / name).glob("*.py")) if (root / name).is_dir() else [root / name]
        for path in paths:
            digest.update(path.read_bytes())
    return digest.hexdigest()


def recall(folder: Path, key: str) -> Verdict | None:
    """The verdict of an earlier start; None without one."""
    entry = _read(folder).get(key)
    known = {field.name for field in fields(Verdict)}
    try:
        return (
            None
            if entry is None
            else replace(
                Verdict(**{name: value for name, value in entry.items() if name in known}), is_new=False
            )
        )
    except (AttributeError, TypeError, ValueError):
        return None


def all_of(folder: Path) -> list[Verdict]:
    """Every verdict of the folder, the latest last."""
    found = [recall(folder, key) for key in _read(folder)]
    return [verdict for verdict in found if verdict is not None]


def remember(folder: Path, key: str, verdict: Verdict, facts: Mapping[str, Any]) -> None:
    """facts: as of `key_of`, for people who read the file."""
    entries = _read(folder)
    entries.pop(key, None)
    entries[key] = {**asdict(verdict), **facts}
    kept = dict(list(entries.items())[-_MAX_VERDICTS:])
    try:
        _write(folder, json.dumps(kept, indent=1))
    except OSError as error:
        logger.warning("The verdict of the self-check is not kept, so the next start checks again: %s", error)


def _write(folder: Path, text: str) -> None:
    """Whole or not at all. A new folder is its owner's, as the catalog would make it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not any(folder.iterdir()):
        with suppress(PermissionError):
            folder.chmod(0o700)
    descriptor, draft = tempfile.mkstemp(dir=folder, prefix=f".{FILE}-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(draft).replace(folder / FILE)
    except OSError:
        Path(draft).unlink(missing_ok=True)
        raise


def _read(folder: Path) -> dict[str, Any]:
    try:
        read = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}
