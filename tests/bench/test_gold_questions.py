"""LoCoMo's questions with gold answers, and a choice of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inferscale.bench.questions import GoldQuestion, read_gold, spread
from inferscale.errors import InvalidInput
from locomo_file import write_locomo


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_locomo(tmp_path)


def test_answers_are_texts_and_traps_are_left_out(file: Path) -> None:
    read = read_gold(file, 1)
    assert (read.name, read.number, len(read.turns)) == ("locomo.json#1", 1, 6)
    assert read.questions == (
        GoldQuestion(0, "Where does Ana live?", "Oslo", 4),
        GoldQuestion(1, "How many dogs has Ben?", "2", 4),
        GoldQuestion(2, "When did Ana move?", "8 May 2023", 2),
        GoldQuestion(4, "What might Ben like?", "dogs", 3),
    )


def test_categories(file: Path) -> None:
    assert [question.number for question in read_gold(file, 1, (2, 3)).questions] == [2, 4]
    with pytest.raises(InvalidInput, match="no gold answer"):
        read_gold(file, 1, (4, 5))
    with pytest.raises(InvalidInput, match="no questions of the categories"):
        read_gold(file, 1, (1,))
    with pytest.raises(InvalidInput, match="1 to 2"):
        read_gold(file, 3)


def test_questions_are_spread_evenly() -> None:
    assert spread(range(10), 3) == (0, 3, 6)
    assert spread(range(10), 10) == spread(range(10), 99) == spread(range(10), None) == tuple(range(10))


def test_category_5_is_read_where_it_is_asked_for(file: Path) -> None:
    read = read_gold(file, 1, (5,), with_adversarial=True)
    assert read.questions == (GoldQuestion(3, "When was Ben in Rome?", "", 5),)
    with pytest.raises(InvalidInput, match=r"and 5 \(adversarial\)"):
        read_gold(file, 1, (6,), with_adversarial=True)


def test_evidence_names_turns_that_are_there(file: Path) -> None:
    samples = json.loads(file.read_text())
    for question, evidence in zip(
        samples[0]["qa"], (["D1:1", "D:1:02"], ["D1:2; D1:3"], [], ["D1:6"], ["D9:9"]), strict=True
    ):
        question["evidence"] = evidence
    file.write_text(json.dumps(samples))
    found = [question.evidence for question in read_gold(file, 1).questions]
    assert found == [{"D1:1", "D1:2"}, {"D1:2", "D1:3"}, set(), set()]
