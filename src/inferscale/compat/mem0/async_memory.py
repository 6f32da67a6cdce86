"""Mem0's `AsyncMemory`: every verb of `Memory` in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from inferscale.compat.mem0.given import DEFAULT_THRESHOLD
from inferscale.compat.mem0.memory import DEFAULT_TOP_K, UNSET, Memory
from inferscale.compat.mem0.settings import read_settings
from inferscale.compat.mem0.shapes import Results
from inferscale.config import MemoryConfig
from inferscale.memory import Memory as FactMemory

if TYPE_CHECKING:
    from inferscale.extraction import ExtractionModel, Inference


class AsyncMemory:
    """As `Memory`, for callers that await. Says, raises and returns the same."""

    def __init__(
        self,
        config: MemoryConfig | None = None,
        *,
        extraction: ExtractionModel | Inference | None = None,
        memory: FactMemory | None = None,
    ) -> None:
        self._sync = Memory(config, extraction=extraction, memory=memory)
        self.memory = self._sync.memory
        self.config = self._sync.config

    @classmethod
    def from_config(cls, config_dict: Mapping[str, Any]) -> AsyncMemory:
        config, extraction = read_settings(config_dict)
        return cls(config, extraction=extraction)

    async def add(
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
        llm: Any = None,
    ) -> Results:
        return await asyncio.to_thread(
            self._sync.add,
            messages,
            user_id=user_id,
            agent_id=agent_id,
            run_id=run_id,
            metadata=metadata,
            timestamp=timestamp,
            expiration_date=expiration_date,
            infer=infer,
            memory_type=memory_type,
            prompt=prompt,
        )

    async def get(self, memory_id: str) -> dict[str, Any] | None:
        return await asyncio.to_thread(self._sync.get, memory_id)

    async def get_all(
        self,
        *,
        filters: dict[str, Any] | None = None,
        top_k: int = DEFAULT_TOP_K,
        show_expired: bool = False,
        **kwargs: Any,
    ) -> Results:
        return await asyncio.to_thread(
            self._sync.get_all, filters=filters, top_k=top_k, show_expired=show_expired, **kwargs
        )

    async def search(
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
        return await asyncio.to_thread(
            self._sync.search,
            query,
            top_k=top_k,
            filters=filters,
            threshold=threshold,
            rerank=rerank,
            explain=explain,
            reference_date=reference_date,
            show_expired=show_expired,
            **kwargs,
        )

    async def update(
        self,
        memory_id: str,
        text: str | None = None,
        metadata: dict[str, Any] | None = None,
        expiration_date: Any = UNSET,
        data: str | None = None,
    ) -> dict[str, str]:
        return await asyncio.to_thread(self._sync.update, memory_id, text, metadata, expiration_date, data)

    async def delete(self, memory_id: str) -> dict[str, str]:
        return await asyncio.to_thread(self._sync.delete, memory_id)

    async def delete_all(
        self, user_id: str | None = None, agent_id: str | None = None, run_id: str | None = None
    ) -> dict[str, str]:
        return await asyncio.to_thread(self._sync.delete_all, user_id, agent_id, run_id)

    async def history(self, memory_id: str) -> list[dict[str, Any]]:
        return await asyncio.to_thread(self._sync.history, memory_id)

    async def reset(self) -> None:
        await asyncio.to_thread(self._sync.reset)

    async def chat(self, query: str) -> None:
        self._sync.chat(query)

    def close(self) -> None:
        self._sync.close()

    async def __aenter__(self) -> AsyncMemory:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
