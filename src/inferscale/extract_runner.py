"""Extraction by the engine that also answers, offline (`extraction.ExtractionModel`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inferscale.errors import EngineError, ExtractionError, InvalidInput
from inferscale.extraction import read_object
from inferscale.extraction.engines import SchemaOrText, question_of
from inferscale.extraction.llm import Message
from inferscale.offline import Generation, GenerationRequest, schema_sampling
from inferscale.prompt import PromptBuilder


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
        self._schemas = SchemaOrText(self._ask)

    def complete(
        self,
        messages: Sequence[Message],
        schema: Mapping[str, Any],
        max_tokens: int,
        temperature: float = 0.0,
    ) -> dict[str, Any]:
        """See `ExtractionModel`."""
        return self._schemas.complete(messages, schema, max_tokens, temperature)

    def _ask(
        self,
        messages: Sequence[Message],
        schema: Mapping[str, Any] | None,
        max_tokens: int,
        temperature: float,
    ) -> dict[str, Any]:
        sampling = {} if schema is None else schema_sampling(schema)
        if schema is not None and not sampling:
            raise InvalidInput("this vLLM has no structured outputs.")
        ids, room = question_of(self._prompts, messages, max_tokens, self._max_model_len)
        try:
            result = self._generate(GenerationRequest(ids, room, temperature=temperature, sampling=sampling))
        except EngineError as error:
            raise ExtractionError(f"the engine failed: {error}") from error
        if result.finish_reason == "error":
            raise ExtractionError("the engine failed the request; its log says why.")
        return read_object(result.text)
