"""Bodies and answers of the memory API, as its OpenAPI page shows them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from inferscale.facts import HistoryEvent, Scope
from inferscale.self_check import State, Verdict
from inferscale.server.results import ShownFact
from inferscale.turns import MAX_METADATA_LEVELS, is_deeper

_MAX_BATCH = 10_000
_MAX_TEXT = 10_000_000


def _whole(value: Any) -> Any:
    """A text with halves of surrogate pairs made U+FFFD, as `Memory.add` does: they cannot be sent."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return value


def _whole_inside(value: Any) -> Any:
    """The same for every text of a value that is not too deep."""
    if isinstance(value, list):
        return [_whole_inside(item) for item in value]
    if isinstance(value, dict):
        return {_whole(name): _whole_inside(item) for name, item in value.items()}
    return _whole(value)


def _check_depth(value: Any) -> Any:
    if is_deeper(value, MAX_METADATA_LEVELS):
        raise ValueError(f"it has more than {MAX_METADATA_LEVELS} levels")
    return value


# Ids are compared exactly: `turns.read_scope` refuses what would have to be repaired.
_Text = Annotated[str, BeforeValidator(_whole)]
_Metadata = Annotated[dict[str, Any], BeforeValidator(lambda value: _whole_inside(_check_depth(value)))]
_Filters = Annotated[
    dict[str, Any],
    Field(
        description="On metadata, times and speaker.", examples=[{"topic": "travel", "rating": {"gte": 3}}]
    ),
]
# A time as `turns.read_expiry` reads it, which says what is wrong with another.
_Expiry = Annotated[float | str, Field(description="Unix time or a date.", examples=["2030-05-08T12:00:00Z"])]
_Messages = Annotated[list[dict[str, Any]], BeforeValidator(_check_depth)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ScopeBody(_Body):
    """Whose memory; at least one."""

    user_id: str | None = Field(None, examples=["ana"])
    agent_id: str | None = None
    run_id: str | None = None

    def scope(self) -> Scope:
        return Scope(self.user_id, self.agent_id, self.run_id)


class Item(_Body):
    text: _Text = Field(max_length=_MAX_TEXT)
    speaker: _Text | None = None
    said_at: _Text | None = None
    metadata: _Metadata | None = None
    expires_at: _Expiry | None = None


def _no_bare_text(value: Any) -> Any:
    if isinstance(value, str):
        raise PydanticCustomError("bare_text", 'It is a text; give {"text": …}')
    return value


class AddBody(ScopeBody):
    """One of `text`, `messages` and `items`."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "examples": [
                {"user_id": "ana", "text": "My sister lives in Oslo."},
                {"user_id": "ana", "messages": [{"role": "user", "content": "I moved to Bergen."}]},
                {"user_id": "ana", "items": [{"text": "Likes tea.", "said_at": "8 May 2023"}]},
            ]
        },
    )
    text: _Text | None = Field(None, max_length=_MAX_TEXT)
    messages: _Messages | None = Field(None, max_length=_MAX_BATCH)
    items: list[Annotated[Item, BeforeValidator(_no_bare_text)]] | None = Field(None, max_length=_MAX_BATCH)
    speaker: _Text | None = None
    said_at: _Text | None = None
    metadata: _Metadata | None = None
    expires_at: _Expiry | None = None
    infer: bool = Field(False, description="Extract short facts, and store these. The answer waits for it.")


class SearchBody(ScopeBody):
    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={"examples": [{"user_id": "ana", "query": "Where does my sister live?"}]},
    )
    query: _Text = Field(max_length=_MAX_TEXT)
    top_k: int = Field(10, ge=0, le=1000)
    filters: _Filters | None = None


class ChangeBody(_Body):
    """What is left out stays as it is."""

    text: _Text | None = Field(None, max_length=_MAX_TEXT, examples=["My sister lives in Bergen now."])
    speaker: _Text | None = None
    said_at: _Text | None = None
    metadata: _Metadata | None = None


class InjectionBody(_Body):
    enabled: bool


class BlockBody(ScopeBody):
    """The text of a core block, and whose it is."""

    text: _Text = Field(max_length=_MAX_TEXT, examples=["Ana is a baker in Bergen. She likes short answers."])


class Memory(BaseModel):
    """`injectable`: its KV is in the pool now. Times are Unix times in seconds."""

    id: str
    object: Literal["memory"] = "memory"
    user_id: str | None
    agent_id: str | None
    run_id: str | None
    text: str
    speaker: str | None
    said_at: str | None
    metadata: dict[str, Any]
    created_at: float
    updated_at: float
    expires_at: float | None
    injectable: bool


class FoundMemory(Memory):
    score: float


class Block(BaseModel):
    """A core block: it stands in front of every chat whose scope covers its own."""

    object: Literal["memory.block"] = "memory.block"
    id: str
    name: str
    user_id: str | None
    agent_id: str | None
    run_id: str | None
    text: str
    created_at: float
    updated_at: float
    injectable: bool


class BlockList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Block]


class MemoryList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Memory]


class Change(BaseModel):
    """What became of a fact that was extracted, or of a turn that none could be made of.

    ADD: stored under `id`. UPDATE: stored, and supersedes `previous_id`. DELETE: ended the memory `id`.
    NONE: the memory `id` says it already.
    """

    event: Literal["ADD", "UPDATE", "DELETE", "NONE"]
    id: str
    text: str
    previous_text: str | None
    reason: str | None
    previous_id: str | None


class AddedList(MemoryList):
    """pending: encode passes of this server that wait or run. With `infer`, events: what became of each fact,
    and warning: why turns are stored as they were said; else both are null."""

    pending: int
    events: list[Change] | None = None
    warning: str | None = None


class FoundList(BaseModel):
    object: Literal["list"] = "list"
    data: list[FoundMemory]


class MemoryPage(MemoryList):
    has_more: bool
    next_cursor: str | None


class Event(BaseModel):
    event: Literal["ADD", "UPDATE", "SUPERSEDE", "END"]
    text: str
    previous_text: str | None
    at: float
    reason: str | None = None


class History(BaseModel):
    object: Literal["list"] = "list"
    data: list[Event]


class Deleted(BaseModel):
    object: Literal["memory.deleted"] = "memory.deleted"
    id: str | None = None
    deleted: int


class Warming(BaseModel):
    object: Literal["memory.warm"] = "memory.warm"
    pending: int


class SelfCheck(BaseModel):
    """What the check at the start found of moving KV in this model; where it is `refused` or
    `off`, nothing is injected."""

    state: State
    detail: str


class StatsAnswer(BaseModel):
    """injectable: of the scope's facts; null without a scope. pool: pages, and bytes on each worker.
    counters: of the connector."""

    object: Literal["memory.stats"] = "memory.stats"
    facts: int
    injectable: int | None
    pending: int
    injection: bool
    self_check: SelfCheck
    pool: dict[str, int]
    counters: dict[str, int]


class Injection(BaseModel):
    """reason: why it stays off, where it was to be switched on."""

    object: Literal["memory.injection"] = "memory.injection"
    enabled: bool
    reason: str | None = None


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    error: ErrorDetail


def memory_of(shown: ShownFact) -> Memory:
    return Memory(**_fields(shown))


def found_memory(shown: ShownFact, score: float) -> FoundMemory:
    return FoundMemory(**_fields(shown), score=score)


def block_of(shown: ShownFact) -> Block:
    fields = {name: value for name, value in _fields(shown).items() if name in Block.model_fields}
    return Block(name=shown.fact.block or "", **fields)


def self_check_of(verdict: Verdict) -> SelfCheck:
    return SelfCheck(state=verdict.state, detail=str(verdict))


def event_of(event: HistoryEvent) -> Event:
    return Event(**event._asdict())


def _fields(shown: ShownFact) -> dict[str, Any]:
    fact = shown.fact
    return {
        "id": fact.id,
        "user_id": fact.scope.user_id,
        "agent_id": fact.scope.agent_id,
        "run_id": fact.scope.run_id,
        "text": fact.text,
        "speaker": fact.speaker,
        "said_at": fact.said_at,
        "metadata": _whole_inside(fact.metadata),  # earlier versions stored halves
        "created_at": fact.created_at,
        "updated_at": fact.updated_at,
        "expires_at": fact.expires_at,
        "injectable": shown.injectable,
    }
