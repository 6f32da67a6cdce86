"""In front of the replicas: reads whose memory a request names, and sends it to the replica that has it hot.

An ASGI application that keeps no state. What cannot be reached is asked again, where asking twice does no
harm; where it may, the answer is 503 and says so. All else, keys and errors included, is the replicas'.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from inferscale.deployment.affinity import CHAT, MEMORIES, affinity_key
from inferscale.deployment.asgi import plain_scope
from inferscale.server.border import may_name
from inferscale.server.http import (
    ClientLeft,
    Message,
    Receive,
    Scope,
    Send,
    error_body,
    header,
    read_body,
    route_path,
    send_json,
)
from inferscale.server.keys import OPERATOR, Caller, Keys, Unauthorized

logger = logging.getLogger(__name__)

INJECTION = f"{MEMORIES}/injection"
_ATTEMPTS = 3
_REPEATABLE = ("GET", "HEAD", "OPTIONS", "PUT", "DELETE")
_REPEATABLE_POSTS = (
    CHAT, f"{MEMORIES}/search", f"{MEMORIES}/warm", "/v1/completions", "/v1/embeddings", "/tokenize",
    "/detokenize",
)  # fmt: skip
_LOST = (
    "The replica that had this request ended before it answered. Whether anything was stored is not known: "
    "look, and send it again."
)
_FULL = "All replicas have as many requests as they take. Try again."
_NONE = "No replica answers. Try again; the operator's `serve status` says more."


class ReplicaLost(Exception):
    """The replica ended, or could not be reached, while it had a request."""


class NoReplica(Exception):
    """The request was given to nobody. is_full: all have as many as they take."""

    def __init__(self, *, is_full: bool) -> None:
        super().__init__()
        self.is_full = is_full


class Replicas(Protocol):
    """How requests reach the replicas."""

    def answer(self, key: str | None, scope: dict[str, Any], body: bytes) -> AsyncIterator[list[Message]]:
        """From the replica of this key, from any without one. Raises ReplicaLost and NoReplica."""
        ...

    async def answers_of_all(self, scope: dict[str, Any], body: bytes) -> Sequence[list[Message]]:
        """Whole answers, of every replica that runs. Raises ReplicaLost and NoReplica."""
        ...


class Front:
    """tenants: API key → tenant, as the replicas have them."""

    def __init__(self, replicas: Replicas, keys: Keys, *, use_user_field: bool) -> None:
        self._replicas = replicas
        self._keys = keys
        self._use_user_field = use_user_field

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "Replicas take no websockets."})
        else:
            await self._http(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(receive)
        except ClientLeft:
            return
        work = asyncio.create_task(self._answer(scope, body, send))
        watch = asyncio.create_task(_until_left(receive))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            if not work.done():
                work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        path, method = route_path(scope), scope["method"]
        plain = plain_scope(scope)
        try:
            if path == INJECTION and method == "PUT":
                answers = await self._replicas.answers_of_all(plain, body)
                if not answers:  # while the last one is replaced
                    raise NoReplica(is_full=False)
                for message in _worst(answers):
                    await send(message)
                return
            key = affinity_key(
                method,
                path,
                scope["query_string"],
                body,
                self._caller(scope),
                use_user_field=self._use_user_field,
            )
            await self._send_on(
                key, plain, body, send, attempts=_ATTEMPTS if may_repeat(method, path, body) else 1
            )
        except ReplicaLost:
            await _send_unavailable(send, _LOST)
        except NoReplica as error:
            await _send_unavailable(send, _FULL if error.is_full else _NONE)

    async def _send_on(
        self, key: str | None, scope: dict[str, Any], body: bytes, send: Send, attempts: int
    ) -> None:
        has_begun = False
        for attempt in range(1, attempts + 1):
            try:
                async with contextlib.aclosing(self._replicas.answer(key, scope, body)) as answer:  # type: ignore[type-var]
                    async for messages in answer:
                        for message in messages:
                            has_begun = True
                            await send(message)
                return
            except ReplicaLost as error:
                if has_begun:  # the connection breaks off: half an answer must not look whole
                    raise RuntimeError("a replica ended in the middle of an answer") from error
                if attempt == attempts:
                    raise
                logger.warning("A replica ended before it answered; its request is sent to another")
                await asyncio.sleep(0.1 * attempt)

    def _caller(self, scope: Scope) -> Caller:
        """Whose ids these are. The replica refuses keys that nobody has."""
        try:
            return self._keys.caller(header(scope, "authorization"))
        except Unauthorized:
            return OPERATOR


def may_repeat(method: str, path: str, body: bytes) -> bool:
    """Whether a request that may have been carried out can be sent once more."""
    if method in _REPEATABLE:
        return True
    if path not in _REPEATABLE_POSTS:
        return False
    return path != CHAT or not _stores(body)


def _stores(body: bytes) -> bool:
    if not may_name(body, '"store"'):
        return False
    try:
        memory = json.loads(body).get("memory")
    except (ValueError, AttributeError, RecursionError):
        return False  # no replica takes it either
    return isinstance(memory, dict) and bool(memory.get("store"))


def _worst(answers: Sequence[list[Message]]) -> list[Message]:
    """That with the highest status: done is what all have done."""
    return max(answers, key=lambda messages: int(messages[0]["status"]))


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _live(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def _send_unavailable(send: Send, text: str) -> None:
    await send_json(send, 503, error_body(503, text), [(b"retry-after", b"1")])
