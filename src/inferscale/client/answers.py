"""The server's answers → results or one clear error, whole and as a stream. Reads no socket by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx

from inferscale.client.calls import MEMORIES, Call
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
from inferscale.client.results import ChatReply, MemoryUse, read_memory_use

T = TypeVar("T")

_KINDS: dict[int, type[ApiError]] = {401: AuthenticationError, 403: PermissionDenied, 404: NotFound}
_OTHER_SHAPES = (ValueError, KeyError, TypeError, IndexError, AttributeError)  # how reading other JSON fails


def read_answer(call: Call[T], response: httpx.Response) -> T:
    """The call's result. Raises ApiError."""
    if not response.is_success:
        raise error_of(response)
    try:
        return call.read(response.json())
    except _OTHER_SHAPES as error:
        raise _unexpected(response.status_code, response.text) from error


def error_of(response: httpx.Response) -> ApiError:
    """The error that an answer stands for, once its body was read."""
    status = response.status_code
    try:
        error = response.json()["error"]
    except _OTHER_SHAPES:
        error = None
    if isinstance(error, str):  # vLLM's own check of keys
        error = {"message": error}
    if not isinstance(error, dict):
        error = {"message": response.reason_phrase or "an error without a message"}
    if status < 400:
        return _unexpected(status, response.text)
    return _api_error(status, error, _advice(status, error, response.request))


def _api_error(status: int, error: dict[str, Any], advice: str = "") -> ApiError:
    kind = _KINDS.get(status) or (ServerError if status >= 500 else BadRequest)
    return kind(
        str(error.get("message") or "an error without a message"),
        status=status,
        type=error.get("type"),
        code=error.get("code"),
        param=error.get("param"),
        advice=advice,
    )


def _advice(status: int, error: dict[str, Any], request: httpx.Request) -> str:
    if status == 401:
        given = "api_key is not" if "authorization" in request.headers else "Give as api_key"
        return f"{given} one of the keys that vLLM was started with."
    if status == 404 and error.get("type") != "not_found_error" and MEMORIES in request.url.path:
        return (
            f"What answers at {request.url.netloc.decode()} has no memory API: start vLLM with InferScale's "
            "middleware (docs/server.md), or give another URL."
        )
    return ""


def _unexpected(status: int, text: str) -> UnexpectedAnswer:
    start = " ".join(text[:200].split())
    return UnexpectedAnswer(
        f"the answer is not one of the memory API: {start!r}",
        status=status,
        advice="Check the URL, and that client and server are of the same version.",
    )


@contextmanager
def connection_to(url: str) -> Iterator[None]:
    """What goes wrong on the way becomes ConnectionFailed."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise ConnectionFailed(
            f"no connection to {url}: {_reason(error)}. Check that the server runs and that the URL is right."
        ) from error
    except httpx.TimeoutException as error:
        raise ConnectionFailed(
            f"{url} did not answer in time: {_reason(error)}. Give a greater timeout_s, or see in the "
            "server's log what it is busy with."
        ) from error
    except httpx.RequestError as error:
        raise ConnectionFailed(
            f"the connection to {url} broke off: {_reason(error)}. See the server's log."
        ) from error


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


class StreamReader:
    """The bytes of a streamed chat → pieces of text, and what is known of the reply.

    Lines are split at line feeds only: JSON text may hold other characters that Unicode calls line breaks.
    """

    def __init__(self) -> None:
        self.memory: MemoryUse | None = None
        self.finish_reason: str | None = None
        self._raw: dict[str, Any] = {}
        self._pieces: list[str] = []
        self._rest = b""
        self._done = False

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def reply(self) -> ChatReply:
        """What has arrived."""
        return ChatReply(self.text, self.memory, self.finish_reason, self._raw)

    def feed(self, data: bytes) -> Iterator[str]:
        """New pieces of text. Raises ApiError for an error that the server streams."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (piece := self._read(line[5:].strip())):
                yield piece

    def finish(self) -> None:
        """The server closed the stream. Raises ConnectionFailed where more should have come."""
        if not self._done:
            raise ConnectionFailed("the streamed answer ended before it was complete. See the server's log.")

    def _read(self, data: bytes) -> str:
        if data == b"[DONE]":
            self._done = True
            return ""
        try:
            chunk = json.loads(data)
            error = chunk.get("error")
            if error is None:
                return self._take(chunk)
            code = error.get("code")
        except _OTHER_SHAPES as mismatch:
            raise _unexpected(200, data.decode("utf-8", "replace")) from mismatch
        raise _api_error(code if isinstance(code, int) and code >= 400 else 500, error)

    def _take(self, chunk: dict[str, Any]) -> str:
        memory = read_memory_use(chunk)
        if memory is not None or self.memory is None:
            self._raw = chunk
        self.memory = memory or self.memory
        piece = ""
        for choice in chunk.get("choices") or ():
            if choice.get("index", 0) == 0:
                self.finish_reason = choice.get("finish_reason") or self.finish_reason
                piece += choice["delta"].get("content") or ""
        self._pieces.append(piece)
        return piece
