"""How right an answer is, on pairs made by hand."""

from __future__ import annotations

import math

import pytest

from inferscale.bench.answer_scores import (
    bleu1,
    declines,
    exact_match,
    resists,
    scored_gold,
    token_f1,
    words,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The cat and a dog.", ["cat", "dog"]),
        ("C. S.Lewis", ["c", "slewis"]),
        ("7 May, 2023", ["7", "may", "2023"]),
        ("It’s “rain–soaked” \n $5", ["its", "rainsoaked", "5"]),
        ("Überall ÄNDERN", ["überall", "ändern"]),
        (" … ", []),
        ("the", []),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    assert words(text) == expected


@pytest.mark.parametrize(
    ("answer", "gold", "f1", "bleu", "is_exact"),
    [
        ("Oslo", "oslo.", 1.0, 1.0, True),
        ("2", "2", 1.0, 1.0, True),
        ("In Oslo, Norway", "Oslo", 2 * 1 / 4, 1 / 3, False),
        ("Oslo", "Oslo in Norway", 2 * 1 / 4, math.exp(1 - 3), False),
        ("yes yes yes", "yes no", 2 * 1 / 5, 1 / 3, False),  # a word counts as often as it is in both
        ("May 7 2023", "7 May 2023", 1.0, 1.0, False),
        ("", "Oslo", 0.0, 0.0, False),
        ("Paris", "Oslo", 0.0, 0.0, False),
        ("the", "an", 1.0, 1.0, True),
        ("Oslo", "the", 0.0, 0.0, False),
    ],
)
def test_scores(answer: str, gold: str, f1: float, bleu: float, is_exact: bool) -> None:
    assert token_f1(answer, gold) == pytest.approx(f1)
    assert bleu1(answer, gold) == pytest.approx(bleu)
    assert exact_match(answer, gold) is is_exact


def test_reasons_of_open_domain_answers_are_not_asked_for() -> None:
    assert scored_gold("Likely no; since this one went badly", 3) == "Likely no"
    assert scored_gold("red; blue", 1) == "red; blue"


@pytest.mark.parametrize(
    "answer",
    ["Not mentioned.", "It was never said", "No information available", "I don't know.", "unknown", "None",
     "The memories do not say.", "That is not explicitly stated."],
)  # fmt: skip
def test_what_declines(answer: str) -> None:
    assert declines(answer)
    assert resists(answer, "")


@pytest.mark.parametrize(
    "answer",
    ["", "hoodies", "She did not know how to swim", "no", "nobody", "A known painter", "None of them"],
)
def test_what_does_not(answer: str) -> None:
    assert not declines(answer)
    assert not resists(answer, "")


def test_two_questions_of_category_5_have_an_answer() -> None:
    assert resists("No, Caroline did.", "No")
    assert not resists("Yes, she did. No doubt", "No")
    assert resists("not mentioned", "No")
    assert not resists("Not so", "No")
