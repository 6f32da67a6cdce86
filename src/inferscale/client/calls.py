"""Every request of the memory API, as a value: one function for each method of the clients.

Knows nothing of connections: `Client` and `AsyncClient` send these calls and read the answers with them.
The contract is docs/server.md. Arguments that are None are left out, so that the server's defaults hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

from inferscale.client import results
from inferscale.client.results import (
    Added,
    Block,
    ChatReply,
    HistoryEvent,
    Memory,
    Page,
    SearchResult,
    Stats,
)
from inferscale.errors import InvalidInput
from inferscale.fact_order import FactOrder
from inferscale.facts import KEEP, Keep, Turn
from inferscale.tail import Tail

T = TypeVar("T")

Mode = Literal["inject", "text", "none"]
Message = Mapping[str, Any]
"""A chat message in OpenAI's form: `role` and `content`."""

MEMORIES = "/v1/memories"
_BLOCKS = f"{MEMORIES}/blocks"
_CHAT_ARGUMENTS = ("messages", "model", "memory", "stream")


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request; `read` makes the result of a good answer's JSON."""

    method: str
    path: str
    read: Callable[[Any], T]
    query: Mapping[str, Any] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None

    @property
    def lacks_model(self) -> bool:
        return self.body is not None and self.body.get("model", "") is None

    def with_body(self, **values: Any) -> Call[T]:
        return replace(self, body={**(self.body or {}), **values})


def add(
    text: str | None = None,
    *,
    messages: Sequence[Message] | None = None,
    items: Sequence[str | Turn | Mapping[str, Any]] | None = None,
    user_id: str | None = None,
    agent_id: str | None = None,
    run_id: str | None = None,
    speaker: str | None = None,
    said_at: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    expires_at: float | str | None = None,
    infer: bool | None = None,
) -> Call[Added]:
    """Store a text, the turns of a conversation or several items: give one of the three.

    `speaker`, `said_at`, `metadata` and `expires_at` (Unix time or a date such as ISO 8601, from which on it
    is not found) hold for what does not say otherwise. Memories can be searched when this returns; `pending`
    says how many of the server's wait for their KV. infer: the server's model extracts short facts, and these
    are stored; `events` of the answer say what became of each.
    """
    if sum(given is not None for given in (text, messages, items)) != 1:
        raise InvalidInput("add takes one of text, messages and items.")
    if text is not None and not isinstance(text, str):
        raise InvalidInput(
            f"text is a {type(text).__name__}; it must be text. Give chat messages as messages=[…], and "
            "several texts, turns or objects with a text as items=[…]."
        )
    body = {
        "text": text,
        "messages": None if messages is None else list(messages),
        "items": None if items is None else [_item(each) for each in items],
        **_scope(user_id, agent_id, run_id),
        "speaker": speaker,
        "said_at": said_at,
        "metadata": metadata,
        "expires_at": expires_at,
        "infer": infer,
    }
    return Call("POST", MEMORIES, results.read_added, body=_given(body))


def search(
    query: str,
    *,
    user_id: str | None = None,
    agent_id: str | None = None,
    run_id: str | None = None,
    top_k: int = 10,
    filters: Mapping[str, Any] | None = None,
) -> Call[list[SearchResult]]:
    """The memories that fit the query best, best first. A scope without memories gives an empty list.

    filters: on metadata, times and speaker, such as `{"topic": "travel", "rating": {"gte": 3}}`; `top_k`
    counts what passes.
    """
    body = {"query": query, "top_k": top_k, **_scope(user_id, agent_id, run_id)}
    body |= _given({"filters": filters})
    return Call("POST", f"{MEMORIES}/search", results.read_results, body=body)


def get(memory_id: str) -> Call[Memory]:
    """One memory. Raises NotFound."""
    return Call("GET", _path(memory_id), results.read_memory)


def list_page(
    *,
    user_id: str | None = None,
    agent_id: str | None = None,
    run_id: str | None = None,
    limit: int | None = None,
    after: str | None = None,
    filters: Mapping[str, Any] | None = None,
) -> Call[Page]:
    """One page of memories in the order they were stored; `after` is the `next_cursor` of the page before.

    filters: as of `search`.
    """
    given = None if filters is None else _json(filters)
    query = {**_scope(user_id, agent_id, run_id), "limit": limit, "after": after, "filters": given}
    return Call("GET", MEMORIES, results.read_page, query=_given(query))


def update(
    memory_id: str,
    *,
    text: str | None = None,
    speaker: str | Keep | None = KEEP,
    said_at: str | Keep | None = KEEP,
    metadata: Mapping[str, Any] | None = None,
) -> Call[Memory]:
    """Change a memory, and return it as it is now; what is not given stays as it was. Raises NotFound.

    None as `speaker` or `said_at` removes it; `metadata` replaces all that there was.
    """
    body = _given({"text": text, "metadata": metadata})
    body |= {name: value for name, value in (("speaker", speaker), ("said_at", said_at)) if value is not KEEP}
    if not body:
        raise InvalidInput("update changes nothing; give text, speaker, said_at or metadata.")
    return Call("PUT", _path(memory_id), results.read_memory, body=body)


def delete(memory_id: str) -> Call[int]:
    """Delete one memory; returns how many were deleted. Raises NotFound."""
    return Call("DELETE", _path(memory_id), results.read_deleted)


def delete_all(
    *, user_id: str | None = None, agent_id: str | None = None, run_id: str | None = None
) -> Call[int]:
    """Delete all memories of a scope; returns how many were deleted."""
    return Call("DELETE", MEMORIES, results.read_deleted, query=_scope(user_id, agent_id, run_id))


def history(memory_id: str) -> Call[list[HistoryEvent]]:
    """What happened to a memory, oldest first. Raises NotFound, also for one that was deleted."""
    return Call("GET", _path(memory_id, "/history"), results.read_history)


def set_block(
    name: str,
    text: str,
    *,
    user_id: str | None = None,
    agent_id: str | None = None,
    run_id: str | None = None,
) -> Call[Block]:
    """Store a core block under exactly this scope, in place of the one of that name, if any.

    It stands in front of every chat whose scope covers its own.
    """
    body = {"text": text, **_scope(user_id, agent_id, run_id)}
    return Call("PUT", _path(name, of=_BLOCKS), results.read_block, body=body)


def get_blocks(
    *, user_id: str | None = None, agent_id: str | None = None, run_id: str | None = None
) -> Call[list[Block]]:
    """The core blocks of a chat with this scope, by name."""
    return Call("GET", _BLOCKS, results.read_blocks, query=_scope(user_id, agent_id, run_id))


def delete_block(
    name: str, *, user_id: str | None = None, agent_id: str | None = None, run_id: str | None = None
) -> Call[int]:
    """Delete a core block of exactly this scope; returns how many were deleted. Raises NotFound."""
    query = _scope(user_id, agent_id, run_id)
    return Call("DELETE", _path(name, of=_BLOCKS), results.read_deleted, query=query)


def warm(*, user_id: str | None = None, agent_id: str | None = None, run_id: str | None = None) -> Call[int]:
    """Have the facts of a scope, or of all, encoded in the background; returns how many wait."""
    body = _scope(user_id, agent_id, run_id)
    return Call("POST", f"{MEMORIES}/warm", results.read_pending, body=body)


def stats(
    *, user_id: str | None = None, agent_id: str | None = None, run_id: str | None = None
) -> Call[Stats]:
    """Facts, pool and counters, of a scope or of all."""
    return Call("GET", f"{MEMORIES}/stats", results.read_stats, query=_scope(user_id, agent_id, run_id))


def set_injection(enabled: bool) -> Call[bool]:
    """Switch injection on or off for the whole server; off, facts are prefilled as text."""
    return Call("PUT", f"{MEMORIES}/injection", results.read_enabled, body={"enabled": enabled})


def first_model() -> Call[str]:
    """The model that the server serves; the first one if there are adapters, too."""
    return Call("GET", "/v1/models", results.read_first_model)


def chat(
    messages: str | Sequence[Message],
    *,
    user_id: str | None = None,
    agent_id: str | None = None,
    run_id: str | None = None,
    model: str | None = None,
    top_k: int | None = None,
    mode: Mode | None = None,
    tail: int | str | Tail | None = None,
    order: FactOrder | None = None,
    store: bool | Literal["infer"] | None = None,
    filters: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Call[ChatReply]:
    """Ask with memory: a text, or chat messages that end with the user's.

    model: None is the one that the server serves; it is asked for once. top_k: facts in the prompt. mode:
    "inject", "text" (the same facts prefilled) or "none". tail: best facts that are recomputed instead of
    injected, such as 5, "10%" of their tokens, "300t", the smallest of several ("6,12%") or 0; None: what the
    server was told, and none behind earlier turns. order: of the facts in the prompt, "best-last",
    "chronological" or "session". store: remember the new turns after the answer, or facts that are extracted
    of them ("infer"). filters: as of `search`. extra: more fields of the chat completion request, such as
    `{"max_tokens": 64, "temperature": 0}`. With neither a scope nor one of top_k, mode, tail, order, store
    and filters it is a chat without memory.
    """
    taken = sorted(set(extra or {}).intersection(_CHAT_ARGUMENTS))
    if taken:
        raise InvalidInput(
            f"extra holds {', '.join(taken)}; give messages and model as arguments, the fields of memory as "
            "user_id, top_k and so on, and use stream_chat for a stream."
        )
    tail = str(tail) if isinstance(tail, Tail) else tail
    chosen: dict[str, Any] = {"top_k": top_k, "mode": mode, "tail": tail, "order": order}
    chosen |= {"store": store, "filters": filters}
    memory = _given({**_scope(user_id, agent_id, run_id), **chosen})
    body: dict[str, Any] = {
        **(extra or {}),
        "model": model,
        "messages": [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages),
    }
    if memory:
        body["memory"] = memory
    return Call("POST", "/v1/chat/completions", results.read_reply, body=body)


def _scope(user_id: str | None, agent_id: str | None, run_id: str | None) -> dict[str, Any]:
    return _given({"user_id": user_id, "agent_id": agent_id, "run_id": run_id})


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _item(item: str | Turn | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(item, str):
        return {"text": item}
    if isinstance(item, Turn):
        return _given(
            {
                "text": item.text,
                "speaker": item.speaker,
                "said_at": item.said_at,
                "metadata": item.metadata or None,
                "expires_at": item.expires_at,
            }
        )
    return item


def _json(value: Mapping[str, Any]) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"filters cannot be sent: {error}. Give what JSON can hold.") from error


def _path(memory_id: str, below: str = "", of: str = MEMORIES) -> str:
    # A blank id, or one that means a folder, would name another route, such as that which deletes a scope.
    if not isinstance(memory_id, str) or not memory_id.strip() or memory_id in (".", ".."):
        raise InvalidInput(f"{memory_id!r} is not the id of a memory; add, search and list return ids.")
    try:
        return f"{of}/{quote(memory_id, safe='')}{below}"
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{memory_id!r} is not the id of a memory: it is not valid Unicode.") from error
