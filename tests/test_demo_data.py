"""The demo's conversation is complete and fair: the evidence says the answer, the question does not."""

import dataclasses
from collections import Counter
from datetime import datetime

import pytest

from inferscale.demo import Conversation, Question, load_conversation

CONVERSATION = load_conversation()
each_question = pytest.mark.parametrize("question", CONVERSATION.questions, ids=lambda question: question.id)


def test_it_has_the_size_that_the_demo_needs() -> None:
    words = [len(turn.text.split()) for turn in CONVERSATION.turns]
    sessions = Counter(turn.said_at for turn in CONVERSATION.turns)

    assert 110 <= len(words) <= 130
    assert min(words) >= 15
    assert max(words) <= 60
    assert 4_000 <= sum(words) <= 5_500
    assert 6 <= len(sessions) <= 8
    assert 8 <= len(CONVERSATION.questions) <= 12


def test_two_people_take_turns_in_every_session() -> None:
    assert len({turn.speaker for turn in CONVERSATION.turns}) == 2
    for before, turn in zip(CONVERSATION.turns, CONVERSATION.turns[1:], strict=False):
        if before.said_at == turn.said_at:
            assert before.speaker != turn.speaker


def test_sessions_are_in_order_and_of_2025() -> None:
    times = [datetime.strptime(turn.said_at or "", "%d %B %Y, %I:%M %p") for turn in CONVERSATION.turns]

    assert times == sorted(times)
    assert {time.year for time in times} == {2025}


def test_no_two_turns_and_no_two_questions_are_alike() -> None:
    for values in (
        [turn.text for turn in CONVERSATION.turns],
        [question.id for question in CONVERSATION.questions],
        [question.question for question in CONVERSATION.questions],
        [question.answer for question in CONVERSATION.questions],
    ):
        assert len(set(values)) == len(values)


def test_texts_are_clean() -> None:
    for turn in CONVERSATION.turns:
        assert turn.text == " ".join(turn.text.split())
        assert turn.text.isascii()
        assert "<|" not in turn.text


@each_question
def test_every_evidence_turn_says_the_answer(question: Question) -> None:
    assert question.evidence
    for index in question.evidence:
        assert 0 <= index < len(CONVERSATION.turns)
        assert question.is_right(CONVERSATION.turns[index].text)


@each_question
def test_the_answer_is_in_few_other_turns(question: Question) -> None:
    saying = {index for index, turn in enumerate(CONVERSATION.turns) if question.is_right(turn.text)}

    assert set(question.evidence) <= saying
    assert len(saying) <= 12


@each_question
def test_the_gold_answer_is_right_and_the_question_does_not_answer_itself(question: Question) -> None:
    assert question.is_right(question.answer)
    assert not question.is_right(question.question)
    assert not any(accepted in question.question.lower() for accepted in question.accept)


@each_question
def test_no_other_gold_answer_passes(question: Question) -> None:
    others = [other.answer for other in CONVERSATION.questions if other.id != question.id]

    assert not [answer for answer in others if question.is_right(answer)]


@each_question
def test_accepted_strings_are_lower_case_and_not_loose(question: Question) -> None:
    assert question.accept
    for accepted in question.accept:
        assert accepted == accepted.lower().strip()
        assert len(accepted) >= 4


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("It is Basil.", True),
        ("BASIL", True),
        ("the cat's name is basil!", True),
        ("Basilica", False),
        ("nobasil", False),
        ("", False),
    ],
)
def test_an_answer_is_right_when_it_holds_an_accepted_string_as_whole_words(answer: str, right: bool) -> None:
    question = Question("cat", "What is the cat called?", "Basil", ("basil",), (0,))

    assert question.is_right(answer) is right


def test_the_types_are_frozen() -> None:
    empty = Conversation("empty", (), ())

    with pytest.raises(dataclasses.FrozenInstanceError):
        empty.title = "other"  # type: ignore[misc]
