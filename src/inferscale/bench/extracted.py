"""The facts that the model itself extracts of a conversation, as `add(…, infer=True)` stores them.

Each session is added by itself, in order, so that later facts supersede earlier ones. A fact keeps speaker,
time and evidence id of the turn that it comes from.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import groupby
from typing import Any

from inferscale.bench.engine import BenchEngine
from inferscale.bench.questions import GoldConversation
from inferscale.bench.record_cache import RecordCache, record_key
from inferscale.catalog_url import IN_FOLDER
from inferscale.config import MemoryConfig
from inferscale.extract_runner import EngineExtraction
from inferscale.extraction import ExtractionModel
from inferscale.extraction.llm import Message
from inferscale.facts import Turn
from inferscale.memory import Memory
from inferscale.prompt import PromptBuilder
from inferscale.retrieval import Embedder

_USER = "bench"
_VERSION = 1


class RememberingModel:
    """Asks a model once for each answer, also over runs. Answers that are none are asked for again."""

    def __init__(self, model: ExtractionModel, cache: RecordCache, name: Sequence[str]) -> None:
        self._model = model
        self._cache = cache
        self._name = list(name)

    def complete(
        self,
        messages: Sequence[Message],
        schema: Mapping[str, Any],
        max_tokens: int,
        temperature: float = 0.0,
    ) -> dict[str, Any]:
        """See `ExtractionModel`."""
        asked = {
            "model": self._name,
            "messages": [dict(message) for message in messages],
            "schema": schema,
            "max_tokens": max_tokens,
            "temperature": temperature,
        }
        key = record_key(_VERSION, asked)
        record = self._cache.get(key)
        if record is None:
            record = {"extraction": self._model.complete(messages, schema, max_tokens, temperature)}
            self._cache.put(key, record)
        answer: dict[str, Any] = record["extraction"]
        return answer


def extract_facts(
    engine: BenchEngine,
    prompts: PromptBuilder,
    conversation: GoldConversation,
    embedder: Embedder,
    cache: RecordCache,
    machine: Sequence[str],
) -> GoldConversation:
    """The conversation with the facts that were extracted in the place of its turns."""
    offline = engine.offline
    model = RememberingModel(
        EngineExtraction(prompts, lambda request: offline.generate([request])[0], offline.max_model_len),
        cache,
        [*machine, offline.fingerprint],
    )
    with tempfile.TemporaryDirectory(prefix="inferscale-bench-") as folder:
        memory = Memory(MemoryConfig(folder, catalog=IN_FOLDER), embedder=embedder, extraction=model)
        with closing(memory):
            for _, session in groupby(conversation.turns, key=lambda turn: turn.said_at):
                memory.add(list(session), user_id=_USER, infer=True)
            facts = memory.get_all(user_id=_USER)
    turns = tuple(Turn(fact.text, fact.speaker, fact.said_at, fact.metadata) for fact in facts)
    return conversation._replace(turns=turns)
