"""Filters, expiry and core blocks over HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
from asgi_server import FakeServer

from inferscale.errors import InvalidInput
from inferscale.filters import read_filter
from inferscale.server.ask import take_ask
from inferscale.server_config import ServerConfig

Serve = Callable[..., FakeServer]

PATH = "/v1/memories"
ACME = "sk-acme"


@pytest.fixture
def server(serve: Serve) -> FakeServer:
    made = serve()
    items = [{"text": f"Fact {n}.", "metadata": {"n": n, "odd": n % 2 == 1}} for n in range(6)]
    made.ask("POST", PATH, {"user_id": "ana", "items": items})
    return made


def found(server: FakeServer, filters: Any) -> list[str]:
    body = {"user_id": "ana", "query": "fact", "filters": filters}
    answer = server.ask("POST", f"{PATH}/search", body)
    assert answer.status == 200, answer.body
    return sorted(item["text"] for item in answer.json["data"])


def test_search_and_list_take_filters(server: FakeServer) -> None:
    assert found(server, {"odd": True, "n": {"gt": 1}}) == ["Fact 3.", "Fact 5."]
    assert len(found(server, None)) == len(found(server, {})) == 6
    asked = {"OR": [{"n": 0}, {"NOT": [{"n": {"lte": 4}}]}]}
    listed = server.ask("GET", f"{PATH}?user_id=ana&filters={quote(json.dumps(asked))}").json
    assert [item["text"] for item in listed["data"]] == ["Fact 0.", "Fact 5."]
    page = f"{PATH}?user_id=ana&limit=2&filters={quote(json.dumps({'odd': True}))}"
    first = server.ask("GET", page).json
    second = server.ask("GET", f"{page}&after={first['next_cursor']}").json
    assert [item["text"] for item in (*first["data"], *second["data"])] == ["Fact 1.", "Fact 3.", "Fact 5."]
    assert not second["has_more"]


@pytest.mark.parametrize(
    ("filters", "told"),
    [
        ({"n": {"like": 1}}, "operator 'like'"),
        ({"user_id": "ben"}, "no metadata"),
        ({"a": "\ud800"}, "allowed are texts"),
    ],
)
def test_bad_filters_are_the_callers_fault(server: FakeServer, filters: Any, told: str) -> None:
    body = {"user_id": "ana", "query": "fact", "filters": filters}
    for method, path, sent in (
        ("POST", f"{PATH}/search", body),
        ("GET", f"{PATH}?user_id=ana&filters={quote(json.dumps(filters))}", None),
    ):
        answer = server.ask(method, path, sent)
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
        assert told in answer.error["message"]


def test_filters_that_are_no_object(server: FakeServer) -> None:
    assert (
        server.ask("POST", f"{PATH}/search", {"user_id": "ana", "query": "x", "filters": [1]}).status == 400
    )
    for bad in ("{", "[1]", "7", "[" * 10_000):
        answer = server.ask("GET", f"{PATH}?user_id=ana&filters={quote(bad)}")
        assert answer.status == 400, bad


def test_chats_take_filters() -> None:
    asked = {"n": {"gte": 3}}
    ask = take_ask({"memory": {"user_id": "ana", "filters": asked}}, ServerConfig())
    assert ask is not None
    assert ask.within == read_filter(asked)
    with pytest.raises(InvalidInput, match="operator"):
        take_ask({"memory": {"user_id": "ana", "filters": {"n": {"over": 3}}}}, ServerConfig())


def test_what_expires_is_not_found(serve: Serve) -> None:
    server = serve()
    items = [{"text": "Stays."}, {"text": "Is gone.", "expires_at": 1}, {"text": "Goes.", "expires_at": 4e9}]
    answer = server.ask("POST", PATH, {"user_id": "ana", "items": items, "expires_at": "2100-01-01"})
    assert [item["expires_at"] for item in answer.json["data"]] == [4102444800.0, 1.0, 4e9]
    gone = answer.json["data"][1]["id"]
    listed = server.ask("GET", f"{PATH}?user_id=ana").json["data"]
    assert [item["text"] for item in listed] == ["Stays.", "Goes."]
    assert found(server, None) == ["Goes.", "Stays."]
    assert server.ask("GET", f"{PATH}/{gone}").status == 404
    for bad in ("soon", True, [1], -1e300):
        answer = server.ask("POST", PATH, {"user_id": "ana", "text": "x", "expires_at": bad})
        assert answer.status == 400, bad
        assert "expires_at" in answer.error["message"]


def test_blocks(server: FakeServer) -> None:
    path = f"{PATH}/blocks/persona"
    made = server.ask("PUT", path, {"user_id": "ana", "text": "Be brief."})
    assert made.status == 200
    block = made.json
    assert (block["object"], block["name"], block["text"]) == ("memory.block", "persona", "Be brief.")
    changed = server.ask("PUT", path, {"user_id": "ana", "text": "Be kind."}).json
    assert (changed["id"], changed["text"]) == (block["id"], "Be kind.")
    server.ask("PUT", f"{PATH}/blocks/house", {"user_id": "ana", "run_id": "1", "text": "Red."})
    listed = server.ask("GET", f"{PATH}/blocks?user_id=ana").json
    assert [item["name"] for item in listed["data"]] == ["house", "persona"]
    assert [item["text"] for item in server.ask("GET", f"{path}?user_id=ana").json["data"]] == ["Be kind."]
    assert len(server.ask("GET", f"{PATH}?user_id=ana").json["data"]) == 6
    assert server.ask("DELETE", f"{path}?user_id=ana").json == {
        "object": "memory.deleted",
        "id": None,
        "deleted": 1,
    }
    assert server.ask("DELETE", f"{path}?user_id=ana").status == 404
    assert server.ask("PUT", f"{PATH}/blocks/a%20b", {"user_id": "ana", "text": "x"}).status == 400
    assert server.ask("PUT", path, {"user_id": "ana", "text": " "}).status == 400
    assert server.ask("PUT", path, {"text": "x"}).status == 400
    assert server.ask("GET", f"{PATH}/blocks?agent_id=bot").status == 400


def test_tenants_have_blocks_of_their_own(serve: Serve) -> None:
    server = serve(api_keys=["sk-operator"], tenants={ACME: "acme", "sk-b": "b"})
    mine = [("authorization", f"Bearer {ACME}")]
    other = [("authorization", "Bearer sk-b")]
    body = {"user_id": "ana", "text": "Be brief."}
    made = server.ask("PUT", f"{PATH}/blocks/persona", body, headers=mine).json
    assert made["user_id"] == "ana"
    listed = f"{PATH}/blocks?user_id=ana"
    assert len(server.ask("GET", listed, headers=mine).json["data"]) == 1
    assert server.ask("GET", listed, headers=other).json["data"] == []
    assert server.ask("DELETE", f"{PATH}/blocks/persona?user_id=ana", headers=other).status == 404
    assert len(server.ask("GET", listed, headers=mine).json["data"]) == 1
