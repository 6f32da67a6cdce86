"""The recall benchmark on a LoCoMo file made for it, with all of its traps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fakes import WordEmbedder
from inferscale.bench import recall
from inferscale.bench.harness import read_rows
from inferscale.bench.recall import Question, read_questions, run_recall, turn_ids
from inferscale.errors import InvalidInput


def conversation(*questions: dict[str, Any]) -> dict[str, Any]:
    said = ["the cat is called Tom", "we went to Rome", "the dog likes milk", "it rains in Oslo"]
    turns = [{"speaker": "Ana", "dia_id": f"D1:{n}", "text": text} for n, text in enumerate(said, start=1)]
    more = [{"speaker": "Ben", "dia_id": "D2:5", "text": "a violin"}]
    return {"conversation": {"session_1": turns, "session_2": more}, "qa": list(questions)}


def asked(question: str, evidence: Any, category: int = 4) -> dict[str, Any]:
    return {"question": question, "answer": "x", "evidence": evidence, "category": category}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    samples = [
        conversation(
            asked("what is the cat called", ["D1:1"]),
            asked("who went to Rome and plays the violin", ["D1:2; D2:05"], 1),
            asked("what rains and likes milk", ["D1:3 D1:4", "D9:9"], 1),
            asked("nothing names a turn", ["D", "D7:1"]),
            asked("no evidence", []),
            asked("a trap", ["D1:1"], 5),
        ),
        conversation(asked("where does it rain", ["D:1:4"], 2)),
    ]
    path = tmp_path / "locomo.json"
    path.write_text(json.dumps(samples), encoding="utf-8")
    return path


def test_questions_and_what_is_left_out(file: Path) -> None:
    data = read_questions(file)
    assert [len(turns) for turns in data.conversations] == [5, 5]
    assert data.questions == [
        Question(1, "what is the cat called", 4, frozenset({0})),
        Question(1, "who went to Rome and plays the violin", 1, frozenset({1, 4})),
        Question(1, "what rains and likes milk", 1, frozenset({2, 3})),
        Question(2, "where does it rain", 2, frozenset({3})),
    ]
    assert (data.num_without_evidence, data.num_unknown_evidence) == (2, 3)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("D8:6; D9:17", ["D8:6", "D9:17"]),
        ("D9:1 D4:4 D4:6", ["D9:1", "D4:4", "D4:6"]),
        ("D:11:26", ["D11:26"]),
        ("D30:05", ["D30:5"]),
        ("D", []),
        ("", []),
    ],
)
def test_evidence(text: str, ids: list[str]) -> None:
    assert turn_ids(text) == ids


def test_a_run(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "NUM_OTHERS", 50)
    said: list[str] = []
    out = tmp_path / "recall.jsonl"
    embedders = [WordEmbedder(256), WordEmbedder(256, name="others")]
    rows = run_recall(file, embedders, [1, 5], out, said.append)
    assert read_rows(out) == rows
    assert {row["model"] for row in rows} == {"words", "others"}
    assert len({row["run"] for row in rows}) == 1
    found = {
        (row["metric"], row["k"]): row
        for row in rows
        if row["model"] == "words" and row["mode"] in ("semantic", None)
    }
    # One of one, one of two, one of two, one of one; all turns are among the best five.
    assert found["recall", 1]["p50"] == 0.75
    assert found["recall", 5]["p50"] == 1.0
    assert found["recall", 1]["config"]["by_category"] == {"1": 0.5, "2": 1.0, "4": 1.0}
    assert found["recall", 1]["config"]["questions"] == 4
    low, high = found["recall", 1]["ci95"]
    assert 0.5 <= low <= 0.75 <= high <= 1
    assert found["embed_query", None]["n"] == 4
    searches = [row["config"]["other_facts"] for row in rows if row["metric"] == "search"]
    assert searches == [0, 0, 50, 50] * 2
    assert {row["mode"] for row in rows if row["metric"] == "recall"} == {"semantic", "hybrid"}
    assert found["recall", 1]["config"]["retrieval"]["lexical_weight"] == 0
    assert "recall @1 0.7500, @5 1.0000" in said[1]


def test_what_cannot_be_run(file: Path, tmp_path: Path) -> None:
    for embedders, ks in (([], [5]), ([WordEmbedder()], []), ([WordEmbedder()], [0])):
        with pytest.raises(InvalidInput, match="one of each is needed"):
            run_recall(file, embedders, ks, None, print)
    with pytest.raises(InvalidInput, match="not a LoCoMo file"):
        run_recall(tmp_path / "none.json", [WordEmbedder()], [5], None, print)
