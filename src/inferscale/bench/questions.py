"""LoCoMo's questions with their gold answers (Maharana et al., 2024), for measuring the quality of answers.

Evaluation only; the file is never shipped. Some of its answers are numbers; here all are texts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from inferscale.bench.conversation import read_conversation
from inferscale.bench.recall import turn_ids
from inferscale.errors import InvalidInput
from inferscale.facts import Turn

CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop"}
"""Category 5 asks for what nobody said; it has no gold answer."""
ADVERSARIAL = 5

T = TypeVar("T")


class GoldQuestion(NamedTuple):
    """number: its place among all questions of the conversation, from 0. answer: of category 5 nearly always
    "". evidence: ids of turns that answer it (`dia_id`). note: further text behind its instruction."""

    number: int
    text: str
    answer: str
    category: int
    evidence: frozenset[str] = frozenset()
    note: str = ""


class GoldConversation(NamedTuple):
    """Turns in the order they were said. number: in its file, from 1."""

    name: str
    number: int
    turns: tuple[Turn, ...]
    questions: tuple[GoldQuestion, ...]


def read_gold(
    path: Path,
    number: int,
    categories: Sequence[int] = tuple(CATEGORIES),
    *,
    with_adversarial: bool = False,
) -> GoldConversation:
    """Conversation `number`, from 1, of a LoCoMo file with its questions of these categories.

    with_adversarial: category 5 is allowed too. Raises InvalidInput for a file that is none, unknown
    categories, or where there are no such questions.
    """
    allowed = {*CATEGORIES, ADVERSARIAL} if with_adversarial else set(CATEGORIES)
    if set(categories) - allowed or not categories:
        raise InvalidInput(
            f"the categories are {list(categories)}; allowed are 1 (multi-hop), 2 (temporal), 3 (open-domain)"
            + (
                ", 4 (single-hop) and 5 (adversarial)."
                if with_adversarial
                else " and 4 (single-hop). Questions of category 5 have no gold answer."
            )
        )
    conversation = read_conversation(path, number)
    known = {str((turn.metadata or {}).get("dia_id")) for turn in conversation.turns}
    asked = json.loads(path.read_text(encoding="utf-8"))[number - 1]["qa"]
    questions = tuple(
        GoldQuestion(
            place,
            str(qa["question"]),
            str(qa.get("answer", "")),
            int(qa["category"]),
            frozenset(name for text in qa.get("evidence") or () for name in turn_ids(str(text))) & known,
        )
        for place, qa in enumerate(asked)
        if qa.get("category") in categories
        and (str(qa.get("answer", "")).strip() or qa["category"] == ADVERSARIAL)
        and str(qa["question"]).strip()
    )
    if not questions:
        raise InvalidInput(f"{conversation.name} has no questions of the categories {list(categories)}.")
    return GoldConversation(conversation.name, number, conversation.turns, questions)


def spread(items: Sequence[T], num: int | None) -> tuple[T, ...]:
    """`num` of the items, evenly spread over them; all where `num` is None or there are no more."""
    if num is None or num >= len(items):
        return tuple(items)
    return tuple(items[place * len(items) // num] for place in range(num))
