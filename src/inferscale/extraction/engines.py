"""Extraction by an engine that also answers: what is the same offline and in the server.

An answer is held to its schema by vLLM's structured outputs. Where this vLLM has none, or none for this
schema, the model is shown the schema instead. Knows no engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from inferscale.errors import ExtractionError, InvalidInput
from inferscale.extraction.llm import Message, with_schema
from inferscale.prompt import PromptBuilder

logger = logging.getLogger(__name__)

_MIN_TOKENS = 64
"""Room for an answer without which a prompt is refused."""

Ask = Callable[[Sequence[Message], Mapping[str, Any] | None, int, float], dict[str, Any]]
"""Messages, schema, most tokens and temperature → the object that the engine answers, held to the schema
where one is given. Raises InvalidInput for what the engine refuses, ExtractionError where no answer comes."""


class SchemaOrText:
    """Asks with a schema until the engine refuses one, and then without. Safe from several threads."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._takes_schemas = True

    def complete(
        self, messages: Sequence[Message], schema: Mapping[str, Any], max_tokens: int, temperature: float
    ) -> dict[str, Any]:
        """See `ExtractionModel`."""
        refusal: InvalidInput | None = None
        if self._takes_schemas:
            try:
                return self._ask(messages, schema, max_tokens, temperature)
            except InvalidInput as error:
                refusal = error
        try:
            answer = self._ask(with_schema(messages, schema), None, max_tokens, temperature)
        except InvalidInput as error:
            raise ExtractionError(f"the engine refused the request: {error}") from error
        if refusal is not None:  # only now: it may have been the request, not the schema, that was refused
            logger.warning("Answers are not held to a schema from now on: %s", refusal)
            self._takes_schemas = False
        return answer


class Question(NamedTuple):
    """What an engine is given. max_tokens: of the answer."""

    token_ids: tuple[int, ...]
    max_tokens: int


def question_of(
    prompts: PromptBuilder, messages: Sequence[Message], max_tokens: int, max_model_len: int
) -> Question:
    """The prompt, and the room that it leaves. Raises ExtractionError where that is too little."""
    ids = prompts.build(messages, template_kwargs={"enable_thinking": False}).token_ids
    room = min(max_tokens, max_model_len - len(ids))
    if room < _MIN_TOKENS:
        raise ExtractionError(
            f"the prompt has {len(ids)} tokens, and the model takes {max_model_len} with the answer."
        )
    return Question(ids, room)
