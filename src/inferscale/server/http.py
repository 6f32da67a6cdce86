"""Small pieces of ASGI that the middleware needs: whole bodies, JSON answers, errors in OpenAI's form."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

from inferscale.errors import (
    CatalogError,
    CatalogUnreachable,
    EngineError,
    InvalidInput,
    QuotaExceeded,
    UnknownFact,
)
from inferscale.server.keys import Forbidden, Unauthorized

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

logger = logging.getLogger(__name__)

_QUOTA = "insufficient_quota"  # OpenAI's word for it, as type and as code
_RETRY_AFTER_S = "5"
_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: _QUOTA,
}


class ClientLeft(Exception):
    """The client closed the connection before its request was whole."""


class TooLarge(Exception):
    """The body is larger than what is read; the message says how large it may be."""


async def read_body(receive: Receive, limit_bytes: int | None = None) -> bytes:
    """The whole body of a request. Raises ClientLeft, and TooLarge for one of more than limit_bytes, once it
    is read, and not kept: who is answered while he sends may not listen."""
    parts: list[bytes] = []
    size_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        part = message.get("body", b"")
        size_bytes += len(part)
        is_too_large = limit_bytes is not None and size_bytes > limit_bytes
        if is_too_large:
            parts.clear()
        else:
            parts.append(part)
        if not message.get("more_body", False):
            break
    if is_too_large:
        raise TooLarge(f"The body is too large; allowed are {limit_bytes} bytes. Send it in parts.")
    return b"".join(parts)


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives this body first, then whatever comes."""
    sent = False

    async def receive_again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


def route_path(scope: Scope) -> str:
    """The path below `root_path`, as Starlette's router finds it."""
    path: str = scope["path"]
    root = scope.get("root_path", "")
    is_below = bool(root) and path.startswith(root) and path[len(root) :][:1] in ("", "/")
    return path[len(root) :] if is_below else path


def header(scope: Scope, name: str) -> str | None:
    """The first header of this name."""
    return next(iter(headers_of(scope, name)), None)


def headers_of(scope: Scope, name: str) -> list[str]:
    wanted = name.lower().encode()
    found = [value for key, value in scope.get("headers", ()) if key.lower() == wanted]
    return [bytes(value).decode("latin-1") for value in found]


def with_headers(scope: Scope, **values: str | None) -> Scope:
    """A copy of the scope with these headers replaced, or removed where None; `_` stands for `-`."""
    names = {name.replace("_", "-").encode(): value for name, value in values.items()}
    kept = [(key, value) for key, value in scope.get("headers", ()) if key.lower() not in names]
    added = [(name, value.encode("latin-1")) for name, value in names.items() if value is not None]
    return {**scope, "headers": [*kept, *added]}


def error_body(
    status: int, message: str, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """OpenAI's form of an error."""
    kind = _TYPES.get(HTTPStatus(status), "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or str(status)}}


def answer_to(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body for an error that is raised on purpose; any other is 500, without its text."""
    if isinstance(error, Unauthorized):
        needed = "An API key is needed: send it as `Authorization: Bearer KEY`."
        return 401, error_body(401, str(error) or needed)
    if isinstance(error, Forbidden):
        return 403, error_body(403, str(error))
    if isinstance(error, TooLarge):
        return 413, error_body(413, str(error))
    if isinstance(error, UnknownFact):
        return 404, error_body(404, str(error))
    if isinstance(error, QuotaExceeded):
        return 429, error_body(429, str(error), _QUOTA)
    if isinstance(error, InvalidInput):
        return 400, error_body(400, str(error))
    if isinstance(error, (EngineError, CatalogError)):
        return 503, error_body(503, str(error))
    return 500, error_body(500, "The server made a mistake; its log says more.")


def headers_with(error: Exception) -> list[tuple[str, str]]:
    """Of the answer to an error."""
    if isinstance(error, Unauthorized):
        return [("www-authenticate", "Bearer")]
    return [("retry-after", _RETRY_AFTER_S)] if isinstance(error, CatalogUnreachable) else []


def log_fault(what: str, error: Exception) -> None:
    """Where an error came from that nobody meant. Without its message, which may hold a user's text."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s: %s\n%s", what, type(error).__name__, frames)


async def send_json(
    send: Send, status: int, body: Any, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    raw = json.dumps(body).encode()
    await send_bytes(send, status, raw, [(b"content-type", b"application/json"), *(headers or [])])


async def send_bytes(send: Send, status: int, raw: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    length = (b"content-length", str(len(raw)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": raw, "more_body": False})
