"""Scores of answers that were computed before; see `record_cache`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferscale.bench.forced import TokenScore
from inferscale.bench.record_cache import RecordCache, record_key

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
    return record_key(_VERSION, parts)


class ScoreCache:
    """Key → score; written line by line. path: None keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self._records = RecordCache(path, "score")

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: str) -> AnswerScore | None:
        read = self._records.get(key)
        if read is None:
            return None
        tops = [TokenScore.unpacked(packed) for packed in read["tops"]]
        return AnswerScore(read["logprobs"], read["best_ids"], read["kls"], read["missing"], tops)

    def put(self, key: str, score: AnswerScore) -> None:
        self._records.put(key, {**vars(score), "tops": [top.packed() for top in score.tops]})
