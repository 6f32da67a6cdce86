"""What the clients send for filters, expiry and core blocks, and what they make of the answers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from fake_memory_api import Caller
from inferscale.client import Block
from inferscale.errors import InvalidInput
from inferscale.facts import Turn

BLOCK = {
    "object": "memory.block",
    "id": "b",
    "name": "persona",
    "text": "Be brief.",
    "user_id": "ana",
    "x": 1,
}
LIST = {"object": "list", "data": [], "pending": 0, "has_more": False, "next_cursor": None}


class Sent:
    """Answers what it is told to; `last` is what came in."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = answer
        self.last: httpx.Request | None = None

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.last = request
        return httpx.Response(200, json=self.answer)

    @property
    def line(self) -> str:
        assert self.last is not None
        return f"{self.last.method} {self.last.url.path}"

    @property
    def body(self) -> Any:
        assert self.last is not None
        return json.loads(self.last.content)


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_filters(kind: str) -> None:
    sent = Sent(LIST)
    client = Caller(kind, handler=sent)
    asked = {"topic": {"in": ["a&b", "é"]}}
    client.search("x", user_id="ana", filters=asked)
    assert sent.body["filters"] == asked
    client.search("x", user_id="ana")
    assert "filters" not in sent.body
    client.list(user_id="ana", filters=asked)
    assert sent.last is not None
    assert json.loads(sent.last.url.params["filters"]) == asked
    assert client.iter_all(user_id="ana", filters=asked) == []
    assert json.loads(sent.last.url.params["filters"]) == asked
    with pytest.raises(InvalidInput, match="filters cannot be sent"):
        client.list(user_id="ana", filters={"a": object()})


def test_a_chat_with_filters_and_blocks(kind: str) -> None:
    use = {"mode": "inject", "facts": [], "blocks": ["persona"]}
    choices = [{"message": {"content": "Hi."}, "finish_reason": "stop"}]
    sent = Sent({"choices": choices, "memory": use})
    reply = Caller(kind, handler=sent).chat("Hello", model="m", user_id="ana", filters={"n": 1})
    assert sent.body["memory"] == {"user_id": "ana", "filters": {"n": 1}}
    assert reply.memory.blocks == ("persona",)


def test_expiry(kind: str) -> None:
    memory = {"id": "m", "text": "x", "expires_at": 4e9}
    sent = Sent({**LIST, "data": [memory]})
    client = Caller(kind, handler=sent)
    added = client.add("x", user_id="ana", expires_at="2100-01-01")
    assert sent.body["expires_at"] == "2100-01-01"
    assert added.memories[0].expires_at == 4e9
    client.add(items=[Turn("a", expires_at=5.0), "b"], user_id="ana")
    assert sent.body["items"] == [{"text": "a", "expires_at": 5.0}, {"text": "b"}]


def test_blocks(kind: str) -> None:
    sent = Sent(BLOCK)
    client = Caller(kind, handler=sent)
    block = client.set_block("persona", "Be brief.", user_id="ana")
    assert (sent.line, sent.body) == (
        "PUT /v1/memories/blocks/persona",
        {"text": "Be brief.", "user_id": "ana"},
    )
    assert block == Block("b", "persona", "Be brief.", "ana")
    sent.answer = {**LIST, "data": [BLOCK]}
    assert client.get_blocks(user_id="ana") == [block]
    assert sent.line == "GET /v1/memories/blocks"
    sent.answer = {"object": "memory.deleted", "deleted": 1}
    assert client.delete_block("persona", user_id="ana", run_id="1") == 1
    assert sent.line == "DELETE /v1/memories/blocks/persona"
    assert sent.last is not None
    assert dict(sent.last.url.params) == {"user_id": "ana", "run_id": "1"}
    for bad in ("", " ", ".", ".."):
        with pytest.raises(InvalidInput):
            client.delete_block(bad, user_id="ana")
