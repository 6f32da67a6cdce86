"""What a search finds: rankings by meaning, by words and by age, fused by rank; repetitions last.

Reciprocal rank fusion (Cormack, Clarke and Büttcher 2009): scores of different kinds are never compared, only
places. Knows neither facts nor storage.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscale.config import RetrievalConfig
from inferscale.retrieval.index import IndexHit, VectorIndex
from inferscale.retrieval.lexical import LexicalIndex

_AT_ONCE = 1000
"""Candidates up to this number are compared by one product of matrices."""
_MAX_DEPTH = 20_000
"""Among so many facts, others than repetitions are looked for."""

_log = logging.getLogger(__name__)


class Query(NamedTuple):
    """text, and its vector: float32 [dim]. marks: of the exact scopes to search (`lexical.Mark`).

    ids: only these facts of them; None: all.
    """

    text: str
    vector: NDArray[np.float32]
    marks: Sequence[tuple[int, int, int, int]]
    ids: Sequence[int] | None = None


class HybridSearch:
    """Searches one index of vectors and one of words. As safe from several threads as these two are."""

    def __init__(self, vectors: VectorIndex, words: LexicalIndex, config: RetrievalConfig) -> None:
        self.vectors = vectors
        self.words = words
        self.config = config
        self._has_told = False

    def search(self, query: Query, k: int) -> list[IndexHit]:
        """The k best facts, best first, each with its cosine similarity to the query, whatever its place.

        All facts where there are no more than k. Where facts are passed over as repetitions, and there are
        others, more are looked at.
        """
        if k <= 0 or not query.marks:
            return []
        depth = max(self.config.candidates, 2 * k)
        while True:
            by_meaning = self.vectors.search(
                query.vector, depth, [mark[0] for mark in query.marks], query.ids
            )
            ranked = self._fused(query, by_meaning, depth)
            if self.config.duplicate_similarity is None:
                return ranked[:k]
            first, repeated = self._distinct(ranked, k)
            if len(first) >= k or len(by_meaning) < depth or depth >= _MAX_DEPTH:
                return (first + repeated)[:k]
            depth *= 4

    def _fused(self, query: Query, by_meaning: Sequence[IndexHit], depth: int) -> list[IndexHit]:
        weights = self.config
        rankings = [([hit.id for hit in by_meaning], 1.0)]
        if weights.lexical_weight > 0:
            if not self.words.covers(query.marks) and not self._has_told:
                self._has_told = True
                _log.warning("A search covers so many facts that they are ranked by meaning only.")
            rankings.append(
                (self.words.search(query.text, depth, query.marks, query.ids), weights.lexical_weight)
            )
        if weights.recency_weight > 0:
            found = {id for ranking, _ in rankings for id in ranking}
            rankings.append((sorted(found, reverse=True), weights.recency_weight))
        if len(rankings) == 1:
            return list(by_meaning)
        order = fused(rankings, weights.rank_constant)
        return self._scored(query.vector, order, {hit.id: hit.score for hit in by_meaning})

    def _scored(
        self, vector: NDArray[np.float32], order: Sequence[int], known: dict[int, float]
    ) -> list[IndexHit]:
        """With the similarity of those that only other rankings found; without those that have no vector."""
        missing = [id for id in order if id not in known]
        if missing:
            rows = self.vectors.vectors_of(missing)
            unit = vector / max(float(np.linalg.norm(vector)), 1e-12)
            scores = (rows @ unit).astype(np.float64).clip(-1, 1)
            scored = zip(missing, scores.tolist(), rows, strict=True)
            known |= {id: score for id, score, row in scored if row.any()}
        return [IndexHit(id, known[id]) for id in order if id in known]

    def _distinct(self, ranked: Sequence[IndexHit], k: int) -> tuple[list[IndexHit], list[IndexHit]]:
        """At most k hits none of which repeats one before it, and what was passed over, both in order."""
        threshold = self.config.duplicate_similarity
        assert threshold is not None
        rows = self.vectors.vectors_of([hit.id for hit in ranked])
        first: list[IndexHit] = []
        repeated: list[IndexHit] = []
        is_repeated = np.zeros(len(ranked), dtype=np.bool_)
        similar = rows @ rows.T >= threshold if len(ranked) <= _AT_ONCE else None
        for place, hit in enumerate(ranked):
            if is_repeated[place]:
                repeated.append(hit)
            elif len(first) < k:
                first.append(hit)
                is_repeated |= similar[place] if similar is not None else rows @ rows[place] >= threshold
            else:
                break
        return first, repeated


def fused(rankings: Sequence[tuple[Sequence[int], float]], rank_constant: int) -> list[int]:
    """All ids of the rankings, each best first with a weight, by the sum of weight / (constant + rank).

    Equal sums stand in the order in which their ids first come.
    """
    sums: dict[int, float] = {}
    for ranking, weight in rankings:
        for rank, id in enumerate(ranking, start=1):
            sums[id] = sums.get(id, 0.0) + weight / (rank_constant + rank)
    return sorted(sums, key=sums.__getitem__, reverse=True)
