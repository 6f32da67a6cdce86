"""InferScale: long-term memory for self-hosted LLMs, injected as KV instead of prefilled as text.

Names are loaded when they are first used: `import inferscale` imports neither torch nor vLLM.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inferscale.client import AsyncClient, Client
    from inferscale.config import ConnectorConfig, EncodingConfig, MemoryConfig
    from inferscale.errors import InferScaleError
    from inferscale.facts import Fact, Scope, SearchHit, Turn
    from inferscale.memory import Memory
    from inferscale.memory_llm import ChatResult, MemoryLLM
    from inferscale.tail import Tail

_HOMES = {
    "AsyncClient": "client",
    "ChatResult": "memory_llm",
    "Client": "client",
    "ConnectorConfig": "config",
    "EncodingConfig": "config",
    "Fact": "facts",
    "InferScaleError": "errors",
    "Memory": "memory",
    "MemoryConfig": "config",
    "MemoryLLM": "memory_llm",
    "Scope": "facts",
    "SearchHit": "facts",
    "Tail": "tail",
    "Turn": "facts",
}

__all__ = [
    "AsyncClient",
    "ChatResult",
    "Client",
    "ConnectorConfig",
    "EncodingConfig",
    "Fact",
    "InferScaleError",
    "Memory",
    "MemoryConfig",
    "MemoryLLM",
    "Scope",
    "SearchHit",
    "Tail",
    "Turn",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"inferscale.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
