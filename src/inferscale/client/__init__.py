"""Typed clients of an InferScale server's memory API (docs/server.md).

    from inferscale import Client

    with Client("http://127.0.0.1:8000") as client:
        client.add("My sister Ingrid lives in Oslo.", user_id="ana")
        print(client.chat("Where does my sister live?", user_id="ana").text)

Needs neither torch nor vLLM. `Memory` is what the server stores, not the `inferscale.Memory` that stores it.
"""

from __future__ import annotations

from inferscale.client.client import AsyncClient, Client
from inferscale.client.errors import (
    ApiError,
    AuthenticationError,
    BadRequest,
    ConnectionFailed,
    NotFound,
    PermissionDenied,
    ServerError,
    UnexpectedAnswer,
)
from inferscale.client.results import (
    Added,
    Block,
    Change,
    ChatReply,
    HistoryEvent,
    Memory,
    MemoryUse,
    Page,
    SearchResult,
    Stats,
    UsedFact,
)
from inferscale.client.streams import AsyncChatStream, ChatStream

__all__ = [
    "Added",
    "ApiError",
    "AsyncChatStream",
    "AsyncClient",
    "AuthenticationError",
    "BadRequest",
    "Block",
    "Change",
    "ChatReply",
    "ChatStream",
    "Client",
    "ConnectionFailed",
    "HistoryEvent",
    "Memory",
    "MemoryUse",
    "NotFound",
    "Page",
    "PermissionDenied",
    "SearchResult",
    "ServerError",
    "Stats",
    "UnexpectedAnswer",
    "UsedFact",
]
