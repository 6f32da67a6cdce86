"""Small pieces of ASGI."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from starlette._utils import get_route_path

from inferscale.errors import (
    CatalogError,
    EngineError,
    EngineMissing,
    InferScaleError,
    PlanRejected,
    TextTooLong,
    UnknownFact,
)
from inferscale.server.http import (
    ClientLeft,
    TooLarge,
    answer_to,
    error_body,
    header,
    headers_of,
    log_fault,
    read_body,
    replay,
    route_path,
    send_json,
    with_headers,
)
from inferscale.server.keys import Forbidden, Unauthorized


def receive_of(*messages: Any) -> Any:
    waiting = iter(messages)

    async def receive() -> Any:
        return next(waiting)

    return receive


def part(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def read(*messages: Any, limit_bytes: int | None = None) -> bytes:
    return asyncio.run(read_body(receive_of(*messages), limit_bytes))


def test_a_body_in_pieces() -> None:
    assert read(part(b"ab"), part(b""), part(b"c"), part(b"d", False)) == b"abcd"
    assert read({"type": "http.request"}) == b""
    assert read(part(b"x"), {"type": "http.request", "more_body": False}) == b"x"


def test_a_client_that_leaves() -> None:
    for before in ((), (part(b"ab"),)):
        with pytest.raises(ClientLeft):
            read(*before, {"type": "http.disconnect"})


def test_a_body_that_is_too_large() -> None:
    assert read(part(b"ab"), part(b"cd", False), limit_bytes=4) == b"abcd"
    for rest in ((part(b"cd", False),), (part(b"cd"), part(b"x"), part(b"", False))):
        with pytest.raises(TooLarge, match="allowed are 3 bytes"):
            read(part(b"ab"), *rest, limit_bytes=3)


def test_a_body_that_is_given_again() -> None:
    async def run() -> list[Any]:
        receive = replay(b"again", receive_of({"type": "http.disconnect"}))
        return [await receive(), await receive()]

    first, second = asyncio.run(run())
    assert first == {"type": "http.request", "body": b"again", "more_body": False}
    assert second == {"type": "http.disconnect"}


# headers and paths ------------------------------------------------------------------------------

SCOPE: dict[str, Any] = {
    "headers": [(b"authorization", b"one"), (b"X-Name", b"\xe9"), (b"authorization", b"two"), (b"host", b"h")]
}


def test_reading_headers() -> None:
    assert header(SCOPE, "Authorization") == "one"
    assert headers_of(SCOPE, "authorization") == ["one", "two"]
    assert header(SCOPE, "x-name") == "é"
    assert header(SCOPE, "missing") is None
    assert headers_of({}, "any") == []


def test_changing_headers() -> None:
    changed = with_headers(SCOPE, authorization="Bearer ü", x_name=None, content_length="3")
    assert changed["headers"] == [
        (b"host", b"h"),
        (b"authorization", b"Bearer \xfc"),
        (b"content-length", b"3"),
    ]
    assert header(SCOPE, "authorization") == "one", "the scope itself is as it was"


@pytest.mark.parametrize("root", ["", "/", "/api", "/v", "/v1", "/v1/memories", "/api/"])
@pytest.mark.parametrize(
    "path",
    ["/v1/memories", "/api/v1/memories", "/v1/v1/memories", "/api", "/", "/apiv1/memories", "//v1", ""],
)
def test_paths_are_those_of_the_router(root: str, path: str) -> None:
    """Else a route could be reached under a path that is not guarded."""
    scope = {"path": path, "root_path": root}
    assert route_path(scope) == get_route_path(scope)
    assert route_path({"path": path}) == path


# errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "kind", "message"),
    [
        (Unauthorized(), 401, "authentication_error", "An API key is needed"),
        (Forbidden("no"), 403, "permission_error", "no"),
        (UnknownFact("which"), 404, "not_found_error", "which"),
        (TextTooLong("long"), 400, "invalid_request_error", "long"),
        (TooLarge("large"), 413, "invalid_request_error", "large"),
        (EngineError("gone"), 503, "server_error", "gone"),
        (EngineMissing("gone"), 503, "server_error", "gone"),
        (CatalogError("full"), 503, "server_error", "full"),
        (PlanRejected("secret"), 500, "server_error", "The server made a mistake"),
        (InferScaleError("secret"), 500, "server_error", "The server made a mistake"),
        (ValueError("secret"), 500, "server_error", "The server made a mistake"),
    ],
)
def test_answers_to_errors(error: Exception, status: int, kind: str, message: str) -> None:
    found, body = answer_to(error)
    assert found == status
    assert (body["error"]["type"], body["error"]["code"], body["error"]["param"]) == (kind, str(status), None)
    assert body["error"]["message"].startswith(message)
    assert status != 500 or "secret" not in json.dumps(body)


def test_the_form_of_an_error() -> None:
    assert error_body(418, "tea", "teapot", "pot") == {
        "error": {"message": "tea", "type": "invalid_request_error", "param": "pot", "code": "teapot"}
    }


def test_an_answer_says_how_long_it_is() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(send_json(send, 401, {"a": "é\ud800"}, [(b"www-authenticate", b"Bearer")]))
    start, body = sent
    assert (start["status"], body["more_body"]) == (401, False)
    assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()
    assert dict(start["headers"])[b"www-authenticate"] == b"Bearer"
    assert json.loads(body["body"]) == {"a": "é\ud800"}


def test_a_fault_is_logged_without_what_it_says(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise ValueError("the password is plum")

    with caplog.at_level(logging.ERROR):
        try:
            fails()
        except ValueError as error:
            log_fault("A thing failed", error)
    assert "A thing failed: ValueError" in caplog.text
    assert "in fails" in caplog.text
    assert "the password is plum" not in caplog.text.replace('raise ValueError("the password is plum")', "")
