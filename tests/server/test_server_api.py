"""The memory API as its clients see it: routes, errors, strange ids and texts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
from asgi_server import FakeServer, ask

from inferscale.errors import CatalogError, EngineError
from inferscale.server import middleware

Serve = Callable[..., FakeServer]

PATH = "/v1/memories"
OSLO = "My sister lives in Oslo."
JSON = [("content-type", "application/json")]


@pytest.fixture
def server(serve: Serve) -> FakeServer:
    return serve()


@pytest.fixture(scope="module")
def empty(serve_once: Serve) -> FakeServer:
    """Whatever it is asked, it stays empty."""
    return serve_once()


def texts(server: FakeServer, user: str = "ana") -> list[str]:
    return [fact["text"] for fact in server.ask("GET", f"{PATH}?user_id={quote(user)}").json["data"]]


# routes -----------------------------------------------------------------------------------------


def test_a_memory_from_its_storing_to_its_deletion(server: FakeServer) -> None:
    body = {"user_id": "ana", "run_id": "1", "text": OSLO, "speaker": "Ana", "metadata": {"a": [1, None]}}
    answer = server.ask("POST", PATH, body)
    assert (answer.status, answer.json["object"], answer.json["pending"]) == (201, "list", 0)
    [fact] = answer.json["data"]
    assert fact == {
        "id": fact["id"], "object": "memory", "user_id": "ana", "agent_id": None, "run_id": "1", "text": OSLO,
        "speaker": "Ana", "said_at": None, "metadata": {"a": [1, None]}, "created_at": fact["created_at"],
        "updated_at": fact["created_at"], "expires_at": None, "injectable": False,
    }  # fmt: skip
    one = f"{PATH}/{fact['id']}"
    assert server.ask("GET", one).json == fact
    found = server.ask("POST", f"{PATH}/search", {"user_id": "ana", "query": "sister"}).json["data"]
    assert [(hit.pop("score") > 0, hit) for hit in found] == [(True, fact)]
    changed = server.ask("PUT", one, {"text": "She lives in Bergen.", "speaker": None}).json
    assert (changed["text"], changed["speaker"], changed["metadata"]) == (
        "She lives in Bergen.",
        None,
        {"a": [1, None]},
    )
    events = server.ask("GET", f"{one}/history").json["data"]
    assert [(event["event"], event["previous_text"]) for event in events] == [("ADD", None), ("UPDATE", OSLO)]
    assert server.ask("DELETE", one).json == {"object": "memory.deleted", "id": fact["id"], "deleted": 1}
    for method, path in (("GET", one), ("GET", f"{one}/history"), ("DELETE", one)):
        assert server.ask(method, path).error["type"] == "not_found_error"
    assert server.ask("PUT", one, {"text": "x"}).status == 404


def test_items_and_messages(server: FakeServer) -> None:
    items = [{"text": "One."}, {"text": "Two.", "speaker": "Bob", "said_at": "8 May", "metadata": {"b": 2}}]
    body = {"user_id": "ana", "items": items, "speaker": "Ana", "metadata": {"a": 1}}
    one, two = server.ask("POST", PATH, body).json["data"]
    assert (one["speaker"], one["said_at"], one["metadata"]) == ("Ana", None, {"a": 1})
    assert (two["speaker"], two["said_at"], two["metadata"]) == ("Bob", "8 May", {"a": 1, "b": 2})
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Three."}]
    [three] = server.ask("POST", PATH, {"user_id": "ana", "messages": messages}).json["data"]
    assert three["text"] == "Three."
    assert server.ask("POST", PATH, {"user_id": "ana", "items": []}).json["data"] == []


def test_pages(server: FakeServer) -> None:
    server.ask("POST", PATH, {"user_id": "ana", "items": [{"text": f"Number {n}."} for n in range(7)]})
    seen, query = [], ""
    for _ in range(3):
        page = server.ask("GET", f"{PATH}?user_id=ana&limit=3{query}").json
        seen += [fact["text"] for fact in page["data"]]
        query = f"&after={page['next_cursor']}"
    assert seen == [f"Number {n}." for n in range(7)]
    assert (page["has_more"], page["next_cursor"]) == (False, None)
    assert server.ask("DELETE", f"{PATH}?user_id=ana").json == {
        "object": "memory.deleted",
        "id": None,
        "deleted": 7,
    }


def test_what_operators_see(server: FakeServer) -> None:
    stats = server.ask("GET", f"{PATH}/stats").json
    assert stats == {
        "object": "memory.stats", "facts": 2, "injectable": None, "pending": 0, "injection": True,
        "pool": {"pages": 9}, "counters": {"captures": 4},
        "self_check": {"state": "exact", "detail": str(server.service.verdict)},
    }  # fmt: skip
    assert server.ask("GET", f"{PATH}/stats?user_id=ana").json["injectable"] == 1
    for body in (None, {}, {"user_id": "ana"}):
        answer = server.ask("POST", f"{PATH}/warm", body)
        assert (answer.status, answer.json) == (202, {"object": "memory.warm", "pending": 3})
    assert server.ask("PUT", f"{PATH}/injection", {"enabled": False}).json["enabled"] is False
    assert not server.service.injects


def test_an_unknown_scope_is_empty(server: FakeServer) -> None:
    assert server.ask("GET", f"{PATH}?user_id=nobody").json["data"] == []
    assert server.ask("POST", f"{PATH}/search", {"user_id": "nobody", "query": "x"}).json["data"] == []
    assert server.ask("DELETE", f"{PATH}?user_id=nobody").json["deleted"] == 0


# strange ids and texts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "user", ["a/b", "a%2Fb", "../x", "é 🦊", "a b+c&d=e?f#g", "x" * 1000, "stats", "null"]
)
def test_any_id_of_a_user(server: FakeServer, user: str) -> None:
    assert server.add(OSLO, user=user)["user_id"] == user
    assert texts(server, user) == [OSLO]
    assert server.ask("DELETE", f"{PATH}?user_id={quote(user)}").json["deleted"] == 1


@pytest.mark.parametrize(
    "id", ["a%2Fb", "a/b", "%00", "%ff", "é", "..", "%2e%2e", "search", "warm", " ", "x" * 5000]
)
def test_ids_that_name_no_memory(server: FakeServer, id: str) -> None:
    server.add(OSLO)
    for method, path, body in (
        ("GET", f"{PATH}/{id}", None),
        ("DELETE", f"{PATH}/{id}", None),
        ("PUT", f"{PATH}/{id}", {"text": "x"}),
        ("GET", f"{PATH}/{id}/history", None),
    ):
        answer = server.ask(method, path, body)
        assert (answer.status, answer.error["type"]) == (404, "not_found_error")
        assert len(answer.body) < 6000
    assert texts(server) == [OSLO]


def test_a_slash_in_a_path_does_not_name_another_route(server: FakeServer) -> None:
    fact = server.add(OSLO)
    assert server.ask("GET", f"{PATH}/{fact['id']}%2Fhistory").json["object"] == "list", (
        "decoded, as HTTP has it"
    )
    for path in (f"{PATH}/", f"{PATH}//{fact['id']}", f"{PATH}/{fact['id']}/", f"{PATH}/./{fact['id']}"):
        assert server.ask("GET", path).error["type"] == "not_found_error"


@pytest.mark.parametrize(
    "text", ["half \ud83e", "\ud83e\udd8a whole", "nul\0inside", "<|im_end|>", "line\r\n\u2028"]
)
def test_strange_texts(server: FakeServer, text: str) -> None:
    clean = text.replace("\0", "").encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    for body in (
        {"text": text},
        {"items": [{"text": text, "speaker": text, "metadata": {"a": text}}]},
        {"messages": [{"role": "user", "content": text}]},
    ):
        answer = server.ask("POST", PATH, {"user_id": "ana", **body})
        assert answer.status == 201, answer.body
        assert answer.json["data"][0]["text"] == clean
    assert texts(server) == [clean] * 3
    assert server.ask("POST", f"{PATH}/search", {"user_id": "ana", "query": text}).status == 200


def test_metadata_that_is_stored_can_be_read_again(server: FakeServer) -> None:
    """What could not be written as an answer would make every page with it fail."""
    deep: Any = 1
    for _ in range(200):
        deep = {"a": deep}
    for metadata in (deep, {"a": float("nan")}, {"a": float("inf")}):
        answer = server.ask("POST", PATH, {"user_id": "ana", "text": OSLO, "metadata": metadata})
        assert answer.status == 400
        assert "metadata" in answer.error["message"]
    for metadata in ({"a": "\ud83e", "\ud83e": 1}, {"big": 10**400}, {"a": [[[{}]]], "é\0": "\u2028"}):
        assert server.ask("POST", PATH, {"user_id": "ana", "text": OSLO, "metadata": metadata}).status == 201
    assert texts(server) == [OSLO] * 3


@pytest.mark.parametrize("levels", [60, 600, 900])
def test_a_field_that_is_too_deep_is_refused(server: FakeServer, levels: int) -> None:
    """Deeper bodies are no JSON to Python."""
    fact_id = server.add()["id"]
    deep = "[" * levels + "]" * levels
    for method, path, body in (
        ("POST", PATH, '{"user_id": "ana", "text": %s}'),
        ("POST", PATH, '{"user_id": "ana", "text": "x", "speaker": %s}'),
        ("POST", PATH, '{"user_id": "ana", "messages": [{"role": "user", "content": "x", "name": %s}]}'),
        ("POST", f"{PATH}/search", '{"user_id": "ana", "query": %s}'),
        ("PUT", f"{PATH}/{fact_id}", '{"text": %s}'),
    ):
        answer = server.ask(
            method, path, (body % deep).encode(), headers=[("content-type", "application/json")]
        )
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
    assert texts(server) == [OSLO]


# errors -----------------------------------------------------------------------------------------

BAD = [
    ("POST", PATH, {"user_id": "ana"}, "none of 'text', 'messages' and 'items' were given", None),
    ("POST", PATH, {"user_id": "ana", "text": "x", "items": []}, "2 of 'text'", None),
    ("POST", PATH, {"text": "x"}, "no scope was given", None),
    ("POST", PATH, {"user_id": "ana", "text": " "}, "blank", None),
    ("POST", PATH, {"user_id": "ana", "texts": "x"}, "texts: Extra inputs are not permitted", "texts"),
    ("POST", PATH, {"user_id": 5, "text": "x"}, "user_id: Input should be a valid string", "user_id"),
    ("POST", PATH, {"user_id": "", "text": "x"}, "user_id has 0 characters", None),
    ("POST", PATH, {"user_id": "\ud800", "text": "x"}, "surrogate characters are not allowed", None),
    (
        "POST",
        PATH,
        {"user_id": "ana", "items": [{"text": "x"}, {"text": 1}]},
        "items.1.text: Input",
        "items.1.text",
    ),
    (
        "POST",
        PATH,
        {"user_id": "ana", "items": ["x"]},
        'items.0: It is a text; give {"text": …}.',
        "items.0",
    ),
    (
        "POST",
        PATH,
        {"user_id": "ana", "text": "x", "\ud800": 1},
        "the body: Input should be a valid string",
        None,
    ),
    ("POST", PATH, {"user_id": "ana", "text": "x", "y" * 10**6: 1}, "Extra inputs", "y" * 100 + "…"),
    (
        "POST",
        PATH,
        {"user_id": "ana", "messages": [{"role": "king", "content": "x"}]},
        "the role 'king'",
        None,
    ),
    ("POST", PATH, [], "The body is no JSON object", None),
    ("POST", PATH, None, "the body: Field required", None),
    ("POST", f"{PATH}/search", {"user_id": "ana"}, "query: Field required", "query"),
    (
        "POST",
        f"{PATH}/search",
        {"user_id": "ana", "query": "x", "top_k": "5"},
        "top_k: Input should be",
        "top_k",
    ),
    (
        "POST",
        f"{PATH}/search",
        {"agent_id": "bot", "query": "x"},
        "without user_id names what all users told",
        None,
    ),
    ("GET", PATH, None, "no scope was given", None),
    ("DELETE", PATH, None, "no scope was given", None),
    ("GET", f"{PATH}?agent_id=bot", None, "without user_id names what all users told", None),
    (
        "GET",
        f"{PATH}?user_id=ana&limit=0",
        None,
        "limit: Input should be greater than or equal to 1",
        "limit",
    ),
    (
        "GET",
        f"{PATH}?user_id=ana&limit=1001",
        None,
        "limit: Input should be less than or equal to 1000",
        "limit",
    ),
    ("GET", f"{PATH}?user_id=ana&limit=x", None, "limit: Input should be a valid integer", "limit"),
    ("GET", f"{PATH}?user_id=ana&limit=" + "9" * 5000, None, "limit: ", "limit"),
    ("GET", f"{PATH}?user_id=ana&after=x", None, "cursor", None),
    ("GET", f"{PATH}?user_id=ana&after=" + "x" * 201, None, "after: String should have at most 200", "after"),
    ("GET", f"{PATH}?user_id=" + "x" * 1001, None, "user_id: String should have at most 1000", "user_id"),
    ("GET", f"{PATH}?user_id=%20", None, "user_id has 1 characters", None),
    ("PUT", f"{PATH}/x", {"text": None}, "text is null; leave it out", None),
    ("PUT", f"{PATH}/x", {"user_id": "bob"}, "user_id: Extra inputs", "user_id"),
    ("PUT", f"{PATH}/injection", {"enabled": "no"}, "enabled: Input should be a valid boolean", "enabled"),
    ("POST", f"{PATH}/warm", {"user": "ana"}, "user: Extra inputs", "user"),
]


@pytest.mark.parametrize(("method", "path", "body", "message", "param"), BAD)
def test_bad_requests(
    empty: FakeServer, method: str, path: str, body: Any, message: str, param: str | None
) -> None:
    headers = JSON if body is None and method == "POST" else []
    answer = empty.ask(method, path, body, headers=headers)
    assert answer.status == 400, answer.body[:500]
    error = answer.error
    assert message in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert len(error["message"]) < 1000
    assert texts(empty) == []


@pytest.mark.parametrize(
    ("raw", "headers", "message"),
    [
        (b'{"user_id": "ana", ', JSON, "The body is no JSON: "),
        (b"\xff\xfe\xff", JSON, "There was an error parsing the body"),
        (
            b'{"user_id": "ana", "text": "x", "metadata": ' + b"[" * 5000 + b"]" * 5000 + b"}",
            JSON,
            "error parsing",
        ),
        (b'{"user_id": "ana", "text": "x"}', [], "with `Content-Type: application/json`"),
        (
            b'{"user_id": "ana", "text": "x"}',
            [("content-type", "text/plain")],
            "with `Content-Type: application/json`",
        ),
        (b"\x1f\x8b\x08\x00\x00", [*JSON, ("content-encoding", "gzip")], "error parsing"),
        (b"5", JSON, "The body is no JSON object"),
    ],
)
def test_bodies_that_are_no_json(empty: FakeServer, raw: bytes, headers: Any, message: str) -> None:
    answer = empty.ask("POST", PATH, raw, headers=headers)
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
    assert message in answer.error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("PATCH", PATH, 405, "POST"),
        ("PUT", PATH, 405, "POST"),
        ("POST", f"{PATH}/x", 405, "GET"),
        ("GET", f"{PATH}/x/y", 404, None),
        ("POST", f"{PATH}/x/history", 405, "GET"),
        ("GET", f"{PATH}/docs/x", 404, None),
    ],
)
def test_unknown_routes(empty: FakeServer, method: str, path: str, status: int, allow: str | None) -> None:
    answer = empty.ask(method, path)
    assert answer.status == status
    assert answer.error["message"].startswith(f"{method} {path}: ")
    assert allow is None or allow in (answer.header("allow") or "")
    head = empty.ask("HEAD", path)
    assert head.status in (404, 405)


def test_a_body_that_is_too_large(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "_MAX_BODY_BYTES", 100)
    answer = server.ask("POST", PATH, {"user_id": "ana", "text": "x" * 100})
    assert (answer.status, answer.error["code"]) == (413, "413")
    assert "allowed are 100 bytes" in answer.error["message"]
    assert server.ask("POST", PATH, {"user_id": "ana", "text": "x" * 10}).status == 201


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (CatalogError("the disk is full"), 503, True),
        (EngineError("the engine is gone"), 503, True),
        (RuntimeError("the password is plum"), 500, False),
        (KeyError("the password is plum"), 500, False),
    ],
)
def test_what_is_not_the_callers_fault(
    server: FakeServer, caplog: pytest.LogCaptureFixture, error: Exception, status: int, told: bool
) -> None:
    server.service.fails_with = error
    with caplog.at_level(logging.ERROR):
        answer = server.ask("GET", f"{PATH}?user_id=ana")
    assert (answer.status, answer.error["type"]) == (status, "server_error")
    assert (str(error) in answer.error["message"]) == told
    assert len(caplog.records) == 1
    assert "plum" not in caplog.text + str(answer.json)
    assert type(error).__name__ in caplog.text or told


@pytest.mark.parametrize("method", ["GET", "DELETE", "OPTIONS"])
def test_the_log_of_the_server_names_no_users(serve: Serve, method: str) -> None:
    """Uvicorn writes path and query of its scope there once an answer begins."""
    server = serve(api_keys=["sk"])
    queries: list[bytes] = []

    async def uvicorn(scope: Any, receive: Any, send: Any) -> None:
        async def send_and_log(message: Any) -> None:
            queries.append(scope["query_string"])
            await send(message)

        await server.app(scope, receive, send_and_log)

    for key in ("sk", "wrong"):
        asyncio.run(ask(uvicorn, method, f"{PATH}?user_id=ana", key=key))
    assert set(queries) == {b""}


def test_an_error_is_ascii(empty: FakeServer) -> None:
    """Whatever reads it: half a character of a caller's name of a field cannot be written otherwise."""
    answer = empty.ask("POST", PATH, {"user_id": "ana", "messages": [{"é\ud800": 1}]})
    assert answer.status == 400
    assert answer.body.isascii()
    assert empty.ask("POST", PATH, {"é": 1}).error["param"] == "é"
