"""`Memory` with the verbs, arguments and results of Mem0 2.x.

Knows nothing of storage and engines. Errors are ours; what is a ValueError in Mem0 is one here, too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from inferscale.compat.mem0 import given as _given
from inferscale.compat.mem0.given import DEFAULT_THRESHOLD
from inferscale.compat.mem0.settings import read_settings
from inferscale.compat.mem0.shapes import (
    IDS,
    Results,
    changed,
    end_of_day,
    history_rows,
    score_details,
    shown,
    stored,
)
from inferscale.config import MemoryConfig
from inferscale.errors import InvalidInput, UnknownFact, UnknownScope
from inferscale.facts import Fact, Keep, Scope
from inferscale.memory import Memory as FactMemory

if TYPE_CHECKING:
    from inferscale.extraction import ExtractionModel, Inference

_log = logging.getLogger(__name__)
UNSET: Final = Keep.KEEP
DEFAULT_TOP_K = 20


class Memory:
    """Mem0's `Memory` on a data folder of InferScale. Safe from several threads and processes.

    config: where memory lives, as of `inferscale.memory.Memory`. extraction: a model, for
    `add(…, infer=True)`. memory: an open one to use instead of these, which stays open when this is closed.
    """

    def __init__(
        self,
        config: MemoryConfig | None = None,
        *,
        extraction: ExtractionModel | Inference | None = None,
        memory: FactMemory | None = None,
    ) -> None:
        if config is not None and not isinstance(config, MemoryConfig):
            raise InvalidInput(
                f"config is a {type(config).__name__}; give an inferscale.config.MemoryConfig, or a dict to "
                "Memory.from_config."
            )
        self.memory = memory if memory is not None else FactMemory(config, extraction=extraction)
        self.config = self.memory.config
        self._owns_memory = memory is None
        self._warned_of: set[str] = set()

    @classmethod
    def from_config(cls, config_dict: Mapping[str, Any]) -> Memory:
        """config_dict: fields of `MemoryConfig`, such as data_dir and embedder, and Mem0's sections.

        Of these, an embedder of the provider huggingface is used, and an llm of the providers vllm,
        lmstudio and openai that names its server; of others the log says that they are not.
        """
        config, extraction = read_settings(config_dict)
        return cls(config, extraction=extraction)

    def add(
        self,
        messages: Any,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        metadata: dict[str, Any] | None = None,
        timestamp: Any = None,
        expiration_date: Any = None,
        infer: bool = True,
        memory_type: str | None = None,
        prompt: str | None = None,
    ) -> Results:
        """Store text, a chat message or a list of them, all or none; the results have id, memory and event.

        timestamp: when it was said: seconds since 1970, a datetime or text. expiration_date: the last
        day on which it is found. Raises InvalidInput, and EmptyText for a blank message.
        """
        scope = _given.read_ids(
            user_id, agent_id, run_id, "give at least one of user_id, agent_id and run_id."
        )
        if memory_type is not None:
            raise InvalidInput(f"memory_type is {memory_type!r}; leave it out: all memories are of one type.")
        own = _given.read_metadata(metadata, "add", {})
        until = own.pop("expiration_date", None) if expiration_date is None else expiration_date
        own.pop("expiration_date", None)
        extracts = infer and self.memory.extraction is not None
        if infer and not extracts:
            self._warn("infer=True", "no model extracts facts here: what was said is stored turn by turn")
        if prompt is not None:
            self._warn("prompt", "give the model its texts as inferscale.extraction.Prompts")
        content = _given.read_messages(messages, has_roles=not extracts)
        if not content:
            return {"results": []}
        added = self.memory.add(
            content,
            **scope.ids(),
            said_at=_given.read_timestamp(timestamp),
            metadata=own,
            expires_at=None if until is None else end_of_day(until),
            infer=extracts,
        )
        if infer:
            return {"results": [changed(event) for event in added.events]}
        return {"results": [stored(fact) for fact in added]}

    def get(self, memory_id: str) -> dict[str, Any] | None:
        """A memory; None for an unknown id."""
        fact = self._fact(memory_id)
        return None if fact is None else shown(fact, score=None)

    def get_all(
        self,
        *,
        filters: dict[str, Any] | None = None,
        top_k: int = DEFAULT_TOP_K,
        show_expired: bool = False,
        **kwargs: Any,
    ) -> Results:
        """The first `top_k` memories in the order they were stored. `limit` is another name of `top_k`."""
        top_k = _given.read_count(kwargs.pop("limit", top_k), "top_k")
        scope, rest = _given.read_filters(filters, kwargs, "get_all")
        _check_no_expired(show_expired)
        try:
            facts = self.memory.get_all(**scope.ids(), limit=top_k, filters=rest)
        except UnknownScope:
            return {"results": []}
        return {"results": [shown(fact) for fact in facts]}

    def search(
        self,
        query: str,
        *,
        top_k: int = DEFAULT_TOP_K,
        filters: dict[str, Any] | None = None,
        threshold: float | None = DEFAULT_THRESHOLD,
        rerank: bool = False,
        explain: bool = False,
        reference_date: Any = None,
        show_expired: bool = False,
        **kwargs: Any,
    ) -> Results:
        """The `top_k` memories nearest to `query` whose score is at least `threshold`, best first."""
        if reference_date is not None:
            raise InvalidInput(
                "reference_date is not supported; filter by created_at or happened_at instead."
            )
        top_k = _given.read_count(kwargs.pop("limit", top_k), "top_k")
        lowest = _given.read_threshold(threshold)
        scope, rest = _given.read_filters(filters, kwargs, "search")
        _check_no_expired(show_expired)
        try:
            hits = self.memory.search(query, **scope.ids(), top_k=top_k, filters=rest)
        except UnknownScope:
            return {"results": []}
        results = []
        for fact, score in hits:
            if score < lowest:
                continue
            result = shown(fact, score=min(score, 1.0))
            if explain:
                result["score_details"] = score_details(min(score, 1.0), lowest)
            results.append(result)
        return {"results": results}

    def update(
        self,
        memory_id: str,
        text: str | None = None,
        metadata: dict[str, Any] | None = None,
        expiration_date: Any = UNSET,
        data: str | None = None,
    ) -> dict[str, str]:
        """Change what is given; metadata are set name by name. expiration_date: None takes it away.

        data: Mem0's old name of `text`. Raises UnknownFact.
        """
        text = data if text is None else text
        if text is None and metadata is None and expiration_date is UNSET:
            raise InvalidInput("nothing was given; give at least one of text, metadata and expiration_date.")
        fact = self.memory.get(memory_id)
        merged = None
        if metadata is not None:
            known = {**fact.metadata, **{name: getattr(fact.scope, name) for name in IDS}}
            own = _given.read_metadata(metadata, "update", known)
            until = own.pop("expiration_date", UNSET)
            expiration_date = until if expiration_date is UNSET else expiration_date
            merged = {**fact.metadata, **own}
        self.memory.update(memory_id, text=text, metadata=merged)
        if expiration_date is not UNSET:
            expires_at = None if expiration_date is None else end_of_day(expiration_date)
            self.memory.catalog.set_expiry(memory_id, expires_at)
        return {"message": "Memory updated successfully!"}

    def delete(self, memory_id: str) -> dict[str, str]:
        """Delete a memory with its history. Raises UnknownFact."""
        self.memory.delete(memory_id)
        return {"message": "Memory deleted successfully!"}

    def delete_all(
        self, user_id: str | None = None, agent_id: str | None = None, run_id: str | None = None
    ) -> dict[str, str]:
        """Delete all memories of a user, agent or run at once, with their histories."""
        advice = "give at least one of user_id, agent_id and run_id, or delete everything by reset()."
        scope = _given.read_ids(user_id, agent_id, run_id, advice)
        self.memory.delete_all(**scope.ids())
        return {"message": "Memories deleted successfully!"}

    def history(self, memory_id: str) -> list[dict[str, Any]]:
        """How a memory was added and changed, oldest first; nothing of one that was deleted or never was."""
        try:
            events = self.memory.history(memory_id)
        except UnknownFact:
            return []
        return history_rows(memory_id, events, self._fact(memory_id))

    def reset(self) -> None:
        """Delete all memories of everybody, at once."""
        _log.warning("all memories of %s are deleted", self.config.data_dir)
        self.memory.catalog.delete_all(Scope())

    def chat(self, query: str) -> None:
        """Not there, as in Mem0; `inferscale.MemoryLLM` and `inferscale serve` chat with memory."""
        raise NotImplementedError("chat is not supported; use inferscale.MemoryLLM or inferscale serve.")

    def close(self) -> None:
        """Close the data folder, unless it was given open. May be called twice."""
        if self._owns_memory:
            self.memory.close()

    def __enter__(self) -> Memory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fact(self, memory_id: str) -> Fact | None:
        try:
            return self.memory.get(memory_id)
        except UnknownFact:
            return None

    def _warn(self, argument: str, what: str) -> None:
        """Once for each argument that does not do here what it does in Mem0."""
        if argument not in self._warned_of:
            self._warned_of.add(argument)
            _log.warning("add(): %s is not used: %s", argument, what)


def _check_no_expired(show_expired: bool) -> None:
    if show_expired:
        raise InvalidInput("show_expired=True is not supported: what has expired is deleted. Leave it out.")
