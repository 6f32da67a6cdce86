"""What extraction asks a model for: one JSON object that fits a schema. Knows no engine and no facts.

An implementation asks its engine to hold the answer to the schema, and where the engine cannot, shows the
schema to the model (`with_schema`). Either way the answer is read by `read_object`, and what is in it is
checked by whoever asked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from inferscale.errors import ExtractionError

Message = Mapping[str, str]
"""`role` (system or user) and `content`."""


class ExtractionModel(Protocol):
    """Answers in JSON. To be called from several threads."""

    def complete(
        self,
        messages: Sequence[Message],
        schema: Mapping[str, Any],
        max_tokens: int,
        temperature: float = 0.0,
    ) -> dict[str, Any]:
        """The object that the model answers in `max_tokens` at most; it should fit the JSON schema.

        Raises ExtractionError where it gives none: no JSON, no answer in time, a server that is not there.
        """
        ...


def asked(
    model: ExtractionModel,
    messages: Sequence[Message],
    schema: Mapping[str, Any],
    max_tokens: int,
    temperature: float,
) -> Mapping[str, Any]:
    """What a model answers. Raises ExtractionError whatever goes wrong in it: what was said must not be lost
    for a model, which may be anybody's."""
    try:
        answer: object = model.complete(messages, schema, max_tokens, temperature)
    except ExtractionError:
        raise
    except Exception as error:  # without its message, which may quote what was said
        raise ExtractionError(f"the extraction model failed: {type(error).__name__}.") from error
    if not isinstance(answer, Mapping):
        raise ExtractionError(f"the model's answer is a {type(answer).__name__} and no object.")
    return answer


def read_object(text: str) -> dict[str, Any]:
    """The JSON object in a model's answer, which may stand in a code fence or behind other words.

    Raises ExtractionError.
    """
    start = text.find("{")
    if start < 0:
        raise ExtractionError(f"the model's answer of {len(text)} characters holds no JSON object.")
    try:
        found, _ = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise ExtractionError(
            f"the model's answer of {len(text)} characters is no whole JSON object; it may have been cut off."
        ) from error
    assert isinstance(found, dict)
    return found


def with_schema(messages: Sequence[Message], schema: Mapping[str, Any]) -> list[Message]:
    """`messages` for an engine that cannot hold an answer to a schema: the model is told of it."""
    told = f"\n\nAnswer with one JSON object and nothing else. Its JSON schema:\n{json.dumps(schema)}"
    *before, last = messages
    return [*before, {**last, "content": last["content"] + told}]
