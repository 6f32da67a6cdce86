"""The demo's conversation: two fictional friends, eight talks in one year, and questions about them.

`conversation.json` beside this file was written for this project; people, places and brands in it
are invented. Every question is answered by one turn, and nothing outside the conversation tells
the answer. Knows nothing of memory, tokens or models. Imports the standard library only.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib.resources import files

from inferscale.facts import Turn


@dataclass(frozen=True, slots=True)
class Question:
    """A question with one known answer.

    answer: the gold answer, for people to read. accept: lower-case strings; an answer that holds
    one of them as whole words is right. evidence: indexes of the turns that say it.
    """

    id: str
    question: str
    answer: str
    accept: tuple[str, ...]
    evidence: tuple[int, ...]

    def is_right(self, answer: str) -> bool:
        """Whether `answer` holds an accepted string as whole words, in any case."""
        text = answer.lower()
        return any(re.search(rf"(?<!\w){re.escape(accepted)}(?!\w)", text) for accepted in self.accept)


@dataclass(frozen=True, slots=True)
class Conversation:
    """What was said, in order, and what can be asked about it."""

    title: str
    turns: tuple[Turn, ...]
    questions: tuple[Question, ...]


def load_conversation() -> Conversation:
    """The conversation that ships with the package."""
    data = json.loads(files(__name__).joinpath("conversation.json").read_text(encoding="utf-8"))
    return Conversation(
        title=data["title"],
        turns=tuple(
            Turn(text=turn["text"], speaker=turn["speaker"], said_at=turn["said_at"])
            for turn in data["turns"]
        ),
        questions=tuple(
            Question(
                id=question["id"],
                question=question["question"],
                answer=question["answer"],
                accept=tuple(question["accept"]),
                evidence=tuple(question["evidence"]),
            )
            for question in data["questions"]
        ),
    )
