"""The check as part of a start: once for a model and its conditions, unless it is to be otherwise."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from inferscale.config import SelfCheck
from inferscale.self_check.remembered import key_of, recall, remember
from inferscale.self_check.trials import Probe, Seen, Subject, conduct
from inferscale.self_check.verdict import Verdict, passed_over


def at_start(
    setting: SelfCheck, subject: Subject, folder: Path, conditions: Mapping[str, Any]
) -> Generator[list[Probe], list[Seen], Verdict]:
    """As `conduct`, with the verdict of an earlier start where the setting is `auto`. folder: of the data."""
    if conditions.get("injection_path") == "none":
        return Verdict("off")
    if setting == "never":
        return passed_over("self_check is 'never'")
    key = key_of(conditions)
    known = recall(folder, key) if setting == "auto" else None
    if known is not None:
        return known
    start_s = time.perf_counter()
    verdict = yield from conduct(subject)
    verdict = replace(verdict, seconds=round(time.perf_counter() - start_s, 3))
    if verdict.is_lasting:
        remember(folder, key, verdict, conditions)
    return verdict
