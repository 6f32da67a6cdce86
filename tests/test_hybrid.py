"""Fusion by rank, and repetitions that leave room for others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fakes import WordEmbedder
from inferscale.config import MemoryConfig, RetrievalConfig
from inferscale.errors import InvalidConfig
from inferscale.memory import Memory
from inferscale.retrieval import HybridSearch, LexicalIndex, Query, VectorIndex
from inferscale.retrieval.hybrid import fused
from inferscale.server_config import ServerConfig


def open_with(folder: Path, **retrieval: Any) -> Memory:
    config = MemoryConfig(data_dir=folder, retrieval=RetrievalConfig(**retrieval))
    return Memory(config, embedder=WordEmbedder())


def test_ranks_are_fused() -> None:
    assert fused([([1, 2, 3], 1.0)], 60) == [1, 2, 3]
    assert fused([([1, 2, 3], 1.0), ([3], 0.5)], 60) == [3, 1, 2]
    assert fused([([1, 2, 3], 1.0), ([3, 9], 0.001)], 60) == [1, 2, 3, 9]
    assert fused([([1, 2], 1.0), ([2, 1], 1.0)], 60) == [1, 2]
    assert fused([], 60) == []


def indexes(vectors: NDArray[np.float32], texts: list[str]) -> tuple[VectorIndex, LexicalIndex, Any]:
    index = VectorIndex(vectors.shape[1])
    index.add(range(1, len(texts) + 1), [1] * len(texts), vectors)
    listed = list(enumerate(texts, start=1))
    lexical = LexicalIndex(lambda code, after: [item for item in listed if item[0] > after])
    return index, lexical, [(1, 0, len(texts), len(texts))]


def test_a_word_is_found_that_meaning_alone_misses() -> None:
    rng = np.random.default_rng(0)
    query = rng.standard_normal(8).astype(np.float32)
    near = query + 0.1 * rng.standard_normal((300, 8)).astype(np.float32)
    texts = [f"text {n}" for n in range(300)]
    near[7] = -query
    texts[7] = "the passport is X4711"
    vectors, lexical, marks = indexes(near, texts)
    asked = Query("X4711", query, marks)
    off = RetrievalConfig(lexical_weight=0, duplicate_similarity=None)
    assert 8 not in [hit.id for hit in HybridSearch(vectors, lexical, off).search(asked, 50)]
    on = RetrievalConfig(lexical_weight=1, duplicate_similarity=None)
    found = HybridSearch(vectors, lexical, on).search(asked, 50)
    assert found[1].id == 8 or found[0].id == 8
    [score] = [hit.score for hit in found if hit.id == 8]
    assert score == pytest.approx(-1, abs=1e-5)
    limited = HybridSearch(vectors, lexical, on).search(asked._replace(ids=[3, 4]), 50)
    assert sorted(hit.id for hit in limited) == [3, 4]


def test_twenty_copies_do_not_fill_the_best_ten(tmp_path: Path) -> None:
    with open_with(tmp_path) as memory:
        memory.add(["ana likes green tea"] * 10 + ["green tea likes ana"] * 10, user_id="ana")
        others = [f"tea number {word * 3}" for word in "abcdefghi"]
        memory.add(others, user_id="ana")
        found = [hit.fact.text for hit in memory.search("likes green tea", user_id="ana", top_k=10)]
        assert set(found) >= set(others)
        assert len(found) == 10
        everything = memory.search("likes green tea", user_id="ana", top_k=100)
        assert len(everything) == 29  # what is passed over comes last
        assert [hit.fact.text for hit in everything[:10]] == found


def test_repetitions_keep_their_place_where_that_is_wanted(tmp_path: Path) -> None:
    with open_with(tmp_path, duplicate_similarity=None) as memory:
        memory.add(["ana likes green tea"] * 20 + ["tea is hot"], user_id="ana")
        found = [hit.fact.text for hit in memory.search("likes green tea", user_id="ana", top_k=10)]
        assert found == ["ana likes green tea"] * 10


def test_more_is_looked_at_where_many_are_repetitions() -> None:
    vectors = np.ones((3000, 4), dtype=np.float32)
    vectors[2990:] = np.eye(10, 4, dtype=np.float32)
    texts = ["same"] * 3000
    index, lexical, marks = indexes(vectors, texts)
    search = HybridSearch(index, lexical, RetrievalConfig(candidates=10))
    found = search.search(Query("none", np.ones(4, dtype=np.float32), marks), 5)
    assert len({hit.id for hit in found} & set(range(2991, 3001))) == 4


def test_newer_facts_come_first_where_that_is_wanted(tmp_path: Path) -> None:
    with open_with(tmp_path, lexical_weight=0, recency_weight=100) as memory:
        old, new = memory.add(["the answer is yes", "the reply is no"], user_id="ana")
        assert [hit.fact for hit in memory.search("the answer is yes", user_id="ana")] == [new, old]


@pytest.mark.parametrize(
    "bad",
    [
        {"lexical_weight": -1},
        {"lexical_weight": "1"},
        {"recency_weight": True},
        {"rank_constant": 0},
        {"candidates": 0},
        {"duplicate_similarity": 0.1},
        {"duplicate_similarity": float("nan")},
    ],
)
def test_settings_out_of_range(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        RetrievalConfig(**bad)
    with pytest.raises(InvalidConfig):
        ServerConfig(retrieval=bad)


def test_the_servers_settings_reach_its_memory() -> None:
    assert ServerConfig(retrieval={"candidates": 7}).memory.retrieval == RetrievalConfig(candidates=7)
    with pytest.raises(InvalidConfig, match="unknown"):
        ServerConfig(retrieval={"weight": 1})
