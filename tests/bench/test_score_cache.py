"""The file of scores: what is in it comes back, also after an interruption."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from inferscale.bench.forced import TokenScore
from inferscale.bench.score_cache import AnswerScore, ScoreCache, cache_key
from inferscale.errors import InvalidInput

TOP = TokenScore(-0.1, np.array([4, 2], dtype=np.int32), np.array([-0.1, -2.5], dtype=np.float32))
TEXT = AnswerScore([-0.1, -1.9], [4, 2], [], [], [TOP, TOP])
INJECT = AnswerScore([-0.2, -2.0], [4, 3], [0.25, 0.75], [0.0, 0.1], [])


def test_means_over_tokens() -> None:
    assert TEXT.nll == pytest.approx(1.0)
    assert INJECT.kl == pytest.approx(0.5)
    assert INJECT.agreement(TEXT) == 0.5


def test_scores_come_back_in_another_process(tmp_path: Path) -> None:
    path = tmp_path / "new" / "scores.jsonl"
    cache = ScoreCache(path)
    cache.put("a", TEXT)
    cache.put("b", INJECT)
    for found in (cache, ScoreCache(path)):
        assert len(found) == 2
        assert found.get("b") == INJECT
        assert found.get("c") is None
        text = found.get("a")
        assert text is not None
        assert text.logprobs == TEXT.logprobs
        assert [top.ids.tolist() for top in text.tops] == [[4, 2], [4, 2]]
        assert [top.logprobs.tolist() for top in text.tops] == [TOP.logprobs.tolist()] * 2


def test_half_a_line_is_what_an_interrupted_run_leaves(tmp_path: Path) -> None:
    path = tmp_path / "scores.jsonl"
    ScoreCache(path).put("a", INJECT)
    whole = path.read_text()
    path.write_text(whole + whole[: len(whole) // 2])
    cache = ScoreCache(path)
    assert (len(cache), path.read_text()) == (1, whole)
    cache.put("b", INJECT)
    assert len(ScoreCache(path)) == 2
    path.write_text(whole[:9])
    assert len(ScoreCache(path)) == 0
    assert path.read_text() == ""


def test_another_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary\n")
    with pytest.raises(InvalidInput, match=r"Line 1 .* is no score"):
        ScoreCache(path)
    assert path.read_text() == "dear diary\n"


def test_no_file() -> None:
    cache = ScoreCache(None)
    cache.put("a", INJECT)
    assert cache.get("a") == INJECT


def test_a_key_names_every_part() -> None:
    keys = {cache_key(a=1, b=(1, 2)), cache_key(a=1, b=(12,)), cache_key(a=2, b=(1, 2)), cache_key(a=1)}
    assert len(keys) == 4
    assert cache_key(b=(1, 2), a=1) in keys
