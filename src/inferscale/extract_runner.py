"""Extraction by the engine that also answers, offline (`extraction.ExtractionModel`).

The answer is held to its schema by vLLM's structured outputs; where this vLLM has none, or none for this
schema, the model is shown the schema instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inferscale.errors import EngineError, ExtractionError, InvalidInput
from inferscale.extraction import read_object, with_schema
from inferscale.extraction.llm import Message
from inferscale.offline import Generation, GenerationRequest, schema_sampling
from inferscale.prompt import PromptBuilder

logger = logging.getLogger(__name__)

_MIN_TOKENS = 64
"""Room for an answer without which a prompt is refused."""


class EngineExtraction:
    """generate: runs one request; called from several threads."""

    def __init__(
        self,
        prompts: PromptBuilder,
        generate: Callable[[GenerationRequest], Generation],
        max_model_len: int,
    ) -> None:
        self._prompts = prompts
        self._generate = generate
        self._max_model_len = max_model_len
        self._takes_schemas = True

    def complete(
        self,
        messages: Sequence[Message],
        schema: Mapping[str, Any],
        max_tokens: int,
        temperature: float = 0.0,
    ) -> dict[str, Any]:
        """See `ExtractionModel`."""
        sampling = schema_sampling(schema) if self._takes_schemas else {}
        if sampling:
            try:
                return self._answer(messages, max_tokens, temperature, sampling)
            except InvalidInput as error:
                refusal = error
        try:
            answer = self._answer(with_schema(messages, schema), max_tokens, temperature, {})
        except InvalidInput as error:
            raise ExtractionError(f"the engine refused the request: {error}") from error
        if sampling:
            logger.warning("Answers are not held to a schema from now on: %s", refusal)
            self._takes_schemas = False
        return answer

    def _answer(
        self,
        messages: Sequence[Message],
        max_tokens: int,
        temperature: float,
        sampling: Mapping[str, Any],
    ) -> dict[str, Any]:
        prompt = self._prompts.build(messages, template_kwargs={"enable_thinking": False})
        room = min(max_tokens, self._max_model_len - len(prompt.token_ids))
        if room < _MIN_TOKENS:
            raise ExtractionError(
                f"the prompt has {len(prompt.token_ids)} tokens, and the model takes {self._max_model_len} "
                "with the answer."
            )
        try:
            result = self._generate(
                GenerationRequest(prompt.token_ids, room, temperature=temperature, sampling=sampling)
            )
        except EngineError as error:
            raise ExtractionError(f"the engine failed: {error}") from error
        if result.finish_reason == "error":
            raise ExtractionError("the engine failed the request; its log says why.")
        return read_object(result.text)
