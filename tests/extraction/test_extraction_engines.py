"""What extraction by our own engines does about schemas and room."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from inferscale.errors import ExtractionError, InvalidInput
from inferscale.extraction import with_schema
from inferscale.extraction.engines import Question, SchemaOrText, question_of

MESSAGES = [{"role": "user", "content": "What?"}]
SCHEMA = {"type": "object"}


class Asked:
    """An engine's answers in order: objects, or refusals."""

    def __init__(self, *answers: dict[str, Any] | InvalidInput) -> None:
        self.answers = list(answers)
        self.given: list[Any] = []

    def __call__(
        self,
        messages: Sequence[Any],
        schema: Mapping[str, Any] | None,
        max_tokens: int,
        temperature: float,
    ) -> dict[str, Any]:
        self.given.append((list(messages), schema, max_tokens, temperature))
        answer = self.answers.pop(0)
        if isinstance(answer, InvalidInput):
            raise answer
        return answer


def test_a_refused_schema_is_shown_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    ask = Asked(InvalidInput("no backend"), {"a": 1}, {"a": 2})
    model = SchemaOrText(ask)
    with caplog.at_level(logging.WARNING):
        assert [model.complete(MESSAGES, SCHEMA, 99, 0.5) for _ in range(2)] == [{"a": 1}, {"a": 2}]
    shown = (with_schema(MESSAGES, SCHEMA), None, 99, 0.5)
    assert ask.given == [(MESSAGES, SCHEMA, 99, 0.5), shown, shown]
    assert [record.getMessage() for record in caplog.records] == [
        "Answers are not held to a schema from now on: no backend"
    ]


def test_a_request_that_is_refused_either_way_says_nothing_about_schemas() -> None:
    ask = Asked(InvalidInput("too hot"), InvalidInput("too hot"), {"a": 1})
    model = SchemaOrText(ask)
    with pytest.raises(ExtractionError, match="refused the request: too hot"):
        model.complete(MESSAGES, SCHEMA, 99, 0.5)
    assert model.complete(MESSAGES, SCHEMA, 99, 0.5) == {"a": 1}
    assert ask.given[-1] == (MESSAGES, SCHEMA, 99, 0.5)


@pytest.mark.parametrize(("num_tokens", "room"), [(10, 100), (130, 70), (136, 64)])
def test_an_answer_gets_what_the_prompt_leaves(num_tokens: int, room: int) -> None:
    ids = tuple(range(num_tokens))
    prompts: Any = SimpleNamespace(build=lambda messages, template_kwargs: SimpleNamespace(token_ids=ids))
    assert question_of(prompts, MESSAGES, 100, 200) == Question(ids, room)
    with pytest.raises(
        ExtractionError, match=f"has {num_tokens} tokens, and the model takes {num_tokens + 63}"
    ):
        question_of(prompts, MESSAGES, 100, num_tokens + 63)
