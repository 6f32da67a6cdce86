"""Scores of answers that were computed before, in a file of JSON lines: an interrupted run goes on there.

A key names all that decides a score, so a file may be shared by runs with other questions or policies.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferscale.bench.forced import TokenScore
from inferscale.errors import InvalidInput

_VERSION = 2


@dataclass(frozen=True)
class AnswerScore:
    """One gold answer in one mode; a list has one item for each of its tokens.

    logprobs: of the tokens. best_ids: most likely tokens. kls, missing: see `forced.Divergence`; empty for a
    reference, which has `tops` instead.
    """

    logprobs: list[float]
    best_ids: list[int]
    kls: list[float]
    missing: list[float]
    tops: list[TokenScore]

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood of a token, in nats."""
        return -sum(self.logprobs) / len(self.logprobs)

    @property
    def kl(self) -> float:
        return sum(self.kls) / len(self.kls)

    def agreement(self, reference: AnswerScore) -> float:
        """Share of tokens whose most likely one is the reference's."""
        same = [a == b for a, b in zip(self.best_ids, reference.best_ids, strict=True)]
        return sum(same) / len(same)


def cache_key(**parts: Any) -> str:
    """Digest of all that decides a score."""
    text = json.dumps([_VERSION, parts], sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class ScoreCache:
    """Key → score; written line by line. path: None keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lines: dict[str, str] = {}
        if path is not None and path.exists():
            self._read(path)

    def __len__(self) -> int:
        return len(self._lines)

    def _read(self, path: Path) -> None:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"{path} cannot be read as a file of scores: {error}.") from error
        whole, _, rest = text.rpartition("\n")
        if rest:  # the run was ended in the middle of a line
            path.write_text(whole + "\n" if whole else "", encoding="utf-8")
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                self._lines[json.loads(line)["key"]] = line
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidInput(
                    f"Line {number} of {path} is no score: {error!r}. Remove it, or give another --cache."
                ) from error

    def get(self, key: str) -> AnswerScore | None:
        if key not in self._lines:
            return None
        read = json.loads(self._lines[key])
        tops = [TokenScore.unpacked(packed) for packed in read["tops"]]
        return AnswerScore(read["logprobs"], read["best_ids"], read["kls"], read["missing"], tops)

    def put(self, key: str, score: AnswerScore) -> None:
        record = {**vars(score), "tops": [top.packed() for top in score.tops], "key": key}
        self._lines[key] = json.dumps(record, separators=(",", ":"))
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(self._lines[key] + "\n")
