"""What goes wrong between client and server, and what is refused before anything is sent."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import pytest

from fake_memory_api import Caller, FakeMemoryApi, answering, stream_of
from inferscale.client import (
    ApiError,
    AuthenticationError,
    BadRequest,
    ConnectionFailed,
    Memory,
    NotFound,
    PermissionDenied,
    ServerError,
    UnexpectedAnswer,
)
from inferscale.errors import InferScaleError, InvalidInput


@pytest.fixture
def api() -> FakeMemoryApi:
    return FakeMemoryApi()


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(kind: str, api: FakeMemoryApi) -> Any:
    return Caller(kind, handler=api)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, BadRequest),
        (401, AuthenticationError),
        (403, PermissionDenied),
        (404, NotFound),
        (413, BadRequest),
        (500, ServerError),
        (503, ServerError),
    ],
)
def test_errors_have_all_that_the_server_says(kind: str, status: int, error: type[ApiError]) -> None:
    said = {"message": "Not so.", "type": "not_found_error", "param": "text", "code": "c1", "new": 1}
    with pytest.raises(error, match=rf"^Not so\. \(HTTP {status}\)") as caught:
        answering(kind, status, json={"error": said}).get("m0")
    found = caught.value
    assert type(found) is error
    assert isinstance(found, InferScaleError)
    assert (found.message, found.status, found.type, found.param, found.code) == (
        "Not so.",
        status,
        "not_found_error",
        "text",
        "c1",
    )


def test_api_keys(kind: str) -> None:
    api = FakeMemoryApi(api_key="secret")
    assert Caller(kind, handler=api, api_key="secret").warm() == 0
    with pytest.raises(
        AuthenticationError, match=r"Unauthorized \(HTTP 401\)\. Give as api_key one of the keys"
    ):
        Caller(kind, handler=api).warm()
    with pytest.raises(AuthenticationError, match="api_key is not one of the keys"):
        Caller(kind, handler=api, api_key="other").warm()
    for key in ("", "two words", "line\n", "schlüssel"):
        with pytest.raises(InvalidInput, match="api_key") as caught:
            Caller(kind, handler=api, api_key=key).warm()
        assert not key or key not in str(caught.value)


def test_a_server_without_the_memory_api_is_named(kind: str) -> None:
    stock = answering(kind, 404, json={"detail": "Not Found"})
    with pytest.raises(NotFound, match=r"answers at 127\.0\.0\.1:8000 has no memory API"):
        stock.search("a", user_id="ana")


@pytest.mark.parametrize(
    "content",
    [{"content": b"<html>hello</html>"}, {"json": []}, {"json": {"data": [{}]}}, {"json": {"data": 1}}],
)
def test_other_answers_are_named(kind: str, content: dict[str, Any]) -> None:
    for name, arguments in (("search", ("a",)), ("list", ()), ("stats", ()), ("chat", ("a",))):
        with pytest.raises(UnexpectedAnswer, match=r"not one of the memory API.*Check the URL"):
            getattr(answering(kind, 200, **content), name)(*arguments)
    with pytest.raises(UnexpectedAnswer):
        answering(kind, 307, headers={"location": "/elsewhere"}).stats()
    with pytest.raises(ServerError, match=r"^Bad Gateway \(HTTP 502\)"):
        answering(kind, 502, **content).stats()


def test_an_answer_without_text_and_one_of_an_old_server(kind: str) -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": None, "tool_calls": [{}]}}
    reply = answering(kind, 200, json={"choices": [choice]}).chat("a", model="tiny")
    assert (reply.text, reply.memory, reply.finish_reason) == ("", None, None)
    old = answering(kind, 200, json={"id": "m0", "text": "It rains."})
    assert old.get("m0") == Memory("m0", "It rains.")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (httpx.ConnectError("refused"), "no connection to http://127.0.0.1:8000: refused. Check that"),
        (httpx.ConnectTimeout(""), "no connection to http://127.0.0.1:8000: ConnectTimeout"),
        (httpx.ReadTimeout("slow"), "did not answer in time: slow. Give a greater timeout_s"),
        (httpx.RemoteProtocolError("gone"), "broke off: gone. See the server's log"),
        (httpx.ReadError(""), "broke off: ReadError"),
    ],
)
def test_what_goes_wrong_on_the_way(kind: str, error: Exception, message: str) -> None:
    def fail(_: httpx.Request) -> httpx.Response:
        raise error

    with pytest.raises(ConnectionFailed, match=message):
        Caller(kind, handler=fail).stats()
    with pytest.raises(ConnectionFailed, match=message):
        Caller(kind, handler=fail).stream_chat("a", model="tiny")


@pytest.mark.parametrize(
    "base_url", ["localhost:8000", "ftp://a", "", "http://", "http://u:p@a", "http://a/?q=1", "http://a:b", 5]
)
def test_urls_that_are_none(kind: str, base_url: Any) -> None:
    with pytest.raises(InvalidInput, match="the server's URL"):
        Caller(kind, base_url=base_url).stats()


@pytest.mark.parametrize("base_url", ["http://a/sub", "http://a/sub/", "http://a/sub/v1", "http://a/sub/v1/"])
def test_the_base_url_may_have_a_path(kind: str, base_url: str) -> None:
    seen = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(str(request.url))
        return httpx.Response(200, json={"facts": 0})

    Caller(kind, handler=handler, base_url=base_url).stats(user_id="a b")
    assert seen == ["http://a/sub/v1/memories/stats?user_id=a+b"]


def test_a_stream_that_breaks_off_or_holds_an_error(kind: str) -> None:
    whole = stream_of({"id": "x"}, "You said", None)
    with pytest.raises(ConnectionFailed, match="before it was complete"):
        answering(kind, 200, content=whole[:-20]).stream_chat("Hello", model="tiny")

    error = {"error": {"message": "boom", "type": "InternalServerError", "code": 500}}
    content = f"data: {json.dumps(error)}\n\ndata: [DONE]\n\n".encode()
    with pytest.raises(ServerError, match="boom") as caught:
        answering(kind, 200, content=content).stream_chat("Hello", model="tiny")
    assert (caught.value.status, caught.value.code) == (500, 500)
    content = b'data: {"error": {"message": "boom", "code": "engine_dead"}}\n\n'
    with pytest.raises(ServerError, match=r"boom \(HTTP 500\)") as caught:
        answering(kind, 200, content=content).stream_chat("Hello", model="tiny")
    assert caught.value.code == "engine_dead"

    with pytest.raises(UnexpectedAnswer, match="not JSON"):
        answering(kind, 200, content=b"data: not JSON\n\n").stream_chat("Hello", model="tiny")
    with pytest.raises(BadRequest, match="blank"):
        answering(kind, 400, json={"error": {"message": "blank"}}).stream_chat("Hello", model="tiny")


@pytest.mark.parametrize("memory_id", ["", "  ", ".", "..", None, "\ud800"])
def test_what_names_another_route_is_no_id(client: Any, api: FakeMemoryApi, memory_id: Any) -> None:
    for method in (client.get, client.delete, client.history):
        with pytest.raises(InvalidInput, match="is not the id of a memory"):
            method(memory_id)
    assert not api.requests


@pytest.mark.parametrize("value", [math.nan, object(), {1, 2}])
def test_what_json_cannot_hold_is_refused(client: Any, api: FakeMemoryApi, value: Any) -> None:
    with pytest.raises(InvalidInput, match="cannot be sent"):
        client.add("It rains.", user_id="ana", metadata={"value": value})
    with pytest.raises(InvalidInput, match="cannot be sent"):
        client.list(user_id="\ud800")
    assert not api.requests


@pytest.mark.parametrize("text", [[{"role": "user", "content": "a"}], {"role": "user", "content": "a"}])
def test_chat_messages_given_as_text(client: Any, text: Any) -> None:
    with pytest.raises(InvalidInput, match=r"text is a (list|dict).*messages=\[…\]"):
        client.add(text, user_id="ana")
