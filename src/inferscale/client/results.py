"""What the client returns: value types, and how they are read from the server's JSON.

Knows nothing of HTTP. Fields that a newer server adds are passed over; those that an older one lacks have
their defaults. The readers let KeyError, TypeError and AttributeError out where the JSON has another shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Memory:
    """One stored memory. Times are Unix time in seconds.

    `said_at` is free text, as given. `injectable`: its KV is in the pool now; it can be found either way.
    """

    id: str
    text: str
    user_id: str | None = None
    agent_id: str | None = None
    run_id: str | None = None
    speaker: str | None = None
    said_at: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    created_at: float = 0.0
    updated_at: float = 0.0
    expires_at: float | None = None
    injectable: bool | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """A core block. Times are Unix time in seconds."""

    id: str
    name: str
    text: str
    user_id: str | None = None
    agent_id: str | None = None
    run_id: str | None = None
    created_at: float = 0.0
    updated_at: float = 0.0
    injectable: bool | None = None


class SearchResult(NamedTuple):
    """A memory and its similarity to the query, in [-1, 1]."""

    memory: Memory
    score: float


@dataclass(frozen=True, slots=True)
class Change:
    """What became of a fact that was extracted. `event` is ADD, UPDATE, DELETE or NONE.

    `id` is the memory that is meant: of UPDATE the new one, which supersedes `previous_id`; of NONE the one
    that says so already.
    """

    event: str
    id: str
    text: str
    previous_text: str | None = None
    reason: str | None = None
    previous_id: str | None = None


class Added(NamedTuple):
    """New memories in the order given, and how many of the server's facts are not encoded yet.

    Where facts were to be extracted, `events` says what became of each, and `warning` why turns were
    stored as they were said, if any.
    """

    memories: tuple[Memory, ...]
    pending: int
    events: tuple[Change, ...] = ()
    warning: str | None = None


class Page(NamedTuple):
    """Memories in the order they were stored. `next_cursor` is the next page's `after`."""

    memories: tuple[Memory, ...]
    has_more: bool
    next_cursor: str | None


@dataclass(frozen=True, slots=True)
class HistoryEvent:
    """`event` is ADD or UPDATE; `at` is Unix time in seconds."""

    event: str
    text: str
    previous_text: str | None = None
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Stats:
    """`injectable` is None where the server cannot tell; `pending` facts are not encoded yet. `self_check`:
    what the server's check at the start found, as `state` and `detail`; where the state is `refused` or
    `off`, nothing is injected."""

    facts: int
    injectable: int | None = None
    pending: int = 0
    injection: bool = True
    pool: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, Any] = field(default_factory=dict)
    self_check: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UsedFact:
    """A fact that stood in the prompt."""

    id: str
    text: str
    speaker: str | None = None
    said_at: str | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What memory did for one chat. `mode` is inject, text or none; tokens are those of the prompt.

    `missing_tokens`: of facts that were prefilled because their KV was not in the pool. `left_out`: facts
    that were found and did not fit. `reason`: why nothing was injected, where that is unusual. `stored`:
    whether the new turns are remembered after the answer. `blocks`: names of the core blocks in the prompt.
    """

    mode: str
    facts: tuple[UsedFact, ...] = ()
    blocks: tuple[str, ...] = ()
    prompt_tokens: int | None = None
    injected_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int | None = None
    missing_tokens: int = 0
    left_out: int = 0
    reason: str | None = None
    stored: bool = False
    timings_ms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChatReply:
    """An answer. `memory` is None where the chat asked for none, or the server has none.

    `raw` is the answer's JSON; for a stream, its last chunk with the memory object.
    """

    text: str
    memory: MemoryUse | None
    finish_reason: str | None
    raw: dict[str, Any] = field(repr=False)


def read_memory(data: Mapping[str, Any]) -> Memory:
    return _fill(Memory, data)


def read_block(data: Mapping[str, Any]) -> Block:
    return _fill(Block, data)


def read_blocks(data: Mapping[str, Any]) -> list[Block]:
    return [read_block(each) for each in data["data"]]


def read_added(data: Mapping[str, Any]) -> Added:
    events = tuple(_fill(Change, each) for each in data.get("events") or ())
    return Added(_memories(data), data.get("pending", 0), events, data.get("warning"))


def read_page(data: Mapping[str, Any]) -> Page:
    return Page(_memories(data), data["has_more"], data["next_cursor"])


def read_results(data: Mapping[str, Any]) -> list[SearchResult]:
    return [SearchResult(read_memory(each), each["score"]) for each in data["data"]]


def read_history(data: Mapping[str, Any]) -> list[HistoryEvent]:
    return [_fill(HistoryEvent, each) for each in data["data"]]


def read_stats(data: Mapping[str, Any]) -> Stats:
    return _fill(Stats, data)


def read_deleted(data: Mapping[str, Any]) -> int:
    return int(data["deleted"])


def read_pending(data: Mapping[str, Any]) -> int:
    return int(data["pending"])


def read_enabled(data: Mapping[str, Any]) -> bool:
    return bool(data["enabled"])


def read_first_model(data: Mapping[str, Any]) -> str:
    return str(data["data"][0]["id"])


def read_memory_use(data: Mapping[str, Any]) -> MemoryUse | None:
    """Of an answer or a chunk of a stream."""
    use = data.get("memory")
    if use is None:
        return None
    facts = tuple(_fill(UsedFact, each) for each in use.get("facts", ()))
    return _fill(MemoryUse, {**use, "facts": facts, "blocks": tuple(use.get("blocks", ()))})


def read_reply(data: dict[str, Any]) -> ChatReply:
    choice = data["choices"][0]
    return ChatReply(
        choice["message"].get("content") or "", read_memory_use(data), choice.get("finish_reason"), data
    )


def _memories(data: Mapping[str, Any]) -> tuple[Memory, ...]:
    return tuple(read_memory(each) for each in data["data"])


def _fill(kind: type[T], data: Mapping[str, Any]) -> T:
    """`kind` with the values of `data` that it has a field for."""
    names = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in data.items() if name in names})
