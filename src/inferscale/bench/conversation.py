"""Reads a conversation with questions for benchmarks: LoCoMo's JSON, or the demo's own conversation.

LoCoMo (Maharana et al., 2024) is for evaluation only and is never shipped; its path is an argument.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from inferscale.demo import load_conversation
from inferscale.errors import InvalidInput
from inferscale.facts import Turn

_TRAP = 5  # LoCoMo's category of questions that the conversation does not answer


class BenchConversation(NamedTuple):
    """Turns in the order they were said, and questions about them."""

    name: str
    turns: tuple[Turn, ...]
    questions: tuple[str, ...]

    def check_k(self, k: int, num_turns: int | None = None) -> None:
        """Raise InvalidInput for more facts than turns; num_turns: that are used, all of them by default."""
        num_turns = len(self.turns[:num_turns])
        if k > num_turns:
            raise InvalidInput(f"k={k} was asked for; {self.name} has {num_turns} turns. Lower --k.")


def read_conversation(path: Path | None, number: int = 1) -> BenchConversation:
    """Conversation `number`, counted from 1, of a LoCoMo file; without a path, the demo's conversation.

    Raises InvalidInput for a file that is none, or a conversation without turns or usable questions.
    """
    if path is None:
        demo = load_conversation()
        return BenchConversation("demo", demo.turns, tuple(q.question for q in demo.questions))
    try:
        samples = json.loads(path.read_text(encoding="utf-8"))
        if not 1 <= number <= len(samples):
            raise InvalidInput(f"conversation {number} was asked for; {path} has 1 to {len(samples)}.")
        sample = samples[number - 1]
        questions = tuple(
            qa["question"] for qa in sample["qa"] if qa.get("category") != _TRAP and qa["question"].strip()
        )
        turns = tuple(_turns(sample["conversation"]))
    except InvalidInput:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(
            f"{path} is not a LoCoMo file ({type(error).__name__}: {error}); give the path of locomo10.json."
        ) from error
    if not turns or not questions:
        raise InvalidInput(
            f"conversation {number} of {path} has {len(turns)} turns and {len(questions)} usable questions "
            "(not blank, and not of category 5, whose answer nobody said); it needs at least one of each."
        )
    return BenchConversation(f"{path.name}#{number}", turns, questions)


def _turns(conversation: dict[str, Any]) -> list[Turn]:
    """Turns of all sessions; what an image shows is part of what was said."""
    sessions = sorted(int(m[1]) for name in conversation if (m := re.fullmatch(r"session_(\d+)", name)))
    turns = []
    for session in sessions:
        said_at = conversation.get(f"session_{session}_date_time")
        for turn in conversation[f"session_{session}"]:
            caption = turn.get("blip_caption")
            text = turn["text"] + (f" [shares {caption}]" if caption else "")
            turns.append(Turn(text, turn["speaker"], said_at, {"dia_id": turn["dia_id"]}))
    return turns
