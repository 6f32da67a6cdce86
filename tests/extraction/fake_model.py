"""A model for extraction whose answers a test writes, and that remembers what it was shown."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inferscale.errors import ExtractionError
from inferscale.extraction.llm import Message

Answer = dict[str, Any] | Exception


def facts(*found: tuple[int, str]) -> dict[str, Any]:
    return {"facts": [{"line": line, "text": text} for line, text in found], "nothing": not found}


def decision(event: str, number: int = 0, text: str = "", reason: str = "so") -> dict[str, Any]:
    return {"event": event, "id": number, "text": text, "reason": reason}


class FakeModel:
    """extract, decide: answers in order, the last one again and again; or made from the question asked."""

    def __init__(
        self,
        extract: Sequence[Answer] | Callable[[str], Answer] = (),
        decide: Sequence[Answer] | Callable[[str], Answer] = (),
    ) -> None:
        self._answers = {"extract": extract, "decide": decide}
        self._lock = threading.Lock()
        self.asked: dict[str, list[str]] = {"extract": [], "decide": []}
        self.temperatures: list[float] = []

    def complete(
        self,
        messages: Sequence[Message],
        schema: Mapping[str, Any],
        max_tokens: int,
        temperature: float = 0.0,
    ) -> dict[str, Any]:
        kind = "decide" if "event" in schema["properties"] else "extract"
        question = messages[-1]["content"]
        answers = self._answers[kind]
        with self._lock:
            self.asked[kind].append(question)
            self.temperatures.append(temperature)
            place = len(self.asked[kind]) - 1
        if callable(answers):
            answer = answers(question)
        elif not answers:
            raise ExtractionError("nothing was to be asked here.")
        else:
            answer = answers[min(place, len(answers) - 1)]
        if isinstance(answer, Exception):
            raise answer
        return answer
