"""`--middleware inferscale.server.MemoryMiddleware`: which part answers a request; see docs/server.md.

vLLM makes it without arguments around its whole application, outside of its own key check. It is ready when
the application is: the service is opened in the lifespan's start, and what keeps it from opening ends that.
"""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import nullcontext
from typing import Any

from inferscale.config import read_tenants
from inferscale.errors import InferScaleError
from inferscale.server import border, chat, page
from inferscale.server.api import PREFIX, memory_api
from inferscale.server.ask import take_ask
from inferscale.server.engine import front_of, is_loopback
from inferscale.server.http import (
    App,
    ClientLeft,
    Message,
    Receive,
    Scope,
    Send,
    answer_to,
    error_body,
    header,
    read_body,
    replay,
    send_json,
    with_headers,
)
from inferscale.server.keys import OPERATOR, Caller, Forbidden, Keys, Unauthorized
from inferscale.server.service import MemoryService, open_service
from inferscale.server.stream import AnswerWithMemory

logger = logging.getLogger(__name__)

CHAT = "/v1/chat/completions"
PAGE = "/memory"
_GUARDED = ("/v1", "/v2", "/inference", "/cohere")
"""What vLLM itself asks a key for."""
_GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/inference")


class MemoryMiddleware:
    """Pure ASGI; safe for streams."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.service: MemoryService | None = None
        self._keys = Keys((), {})
        self._api: App | None = None
        self._allow_remote = False
        self._opening = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, self._opening_send(scope, send))
        elif scope["type"] != "http":
            await self.app(scope, receive, send)
        else:
            await self._http(scope, receive, send)

    def _opening_send(self, scope: Scope, send: Send) -> Send:
        async def send_when_open(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                try:
                    await self._open(scope)
                except InferScaleError as error:
                    logger.error("Memory cannot be served: %s", error)
                    await send({"type": "lifespan.startup.failed", "message": str(error)})
                    return
            elif message["type"] == "lifespan.shutdown.complete" and self.service is not None:
                await self.service.close()
            await send(message)

        return send_when_open

    async def _open(self, scope: Scope) -> MemoryService:
        async with self._opening:
            if self.service is None:
                front = front_of(scope["app"].state)
                self._keys = Keys(front.api_keys, read_tenants(front.server.keys_file))
                self._allow_remote = front.server.allow_remote_without_key
                service = open_service(front)
                self._api = memory_api(service)
                service.load_embedder()
                self.service = service
                logger.info("Memory is served from %s", service.memory.catalog.path.parent)
            return self.service

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            service = self.service or await self._open(scope)
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            if path == "/health" and scope["method"] == "GET":
                await self._health(service, scope, receive, send)
            elif path == PAGE or path.startswith(f"{PAGE}/"):
                await self._page(scope, path, send)
            elif path == PREFIX or path.startswith(f"{PREFIX}/"):
                await self._memories(scope, receive, send)
            else:
                await self._engine(service, scope, path, receive, send)
        except ClientLeft:
            return
        except (InferScaleError, Unauthorized, Forbidden) as error:
            status, body = answer_to(error)
            challenge = [(b"www-authenticate", b"Bearer")] if status == 401 else []
            await send_json(send, status, body, challenge)

    def _caller(self, scope: Scope) -> Caller:
        """Who asks. Raises Unauthorized."""
        return self._keys.caller(header(scope, "authorization"))

    def _check_near(self, scope: Scope) -> None:
        """Without keys everybody who reaches the port is the operator: only this machine may be near it."""
        client = scope.get("client")
        if self._keys.is_open and not self._allow_remote and not is_loopback(client and client[0]):
            raise Forbidden(
                "This server has no API key, so memory is for this machine only. Start it with --api-key (or "
                "VLLM_API_KEY), or allow it with --allow-remote-without-key."
            )

    # own routes -------------------------------------------------------------------------------

    async def _memories(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._api is not None
        if scope["method"] == "OPTIONS":
            await self.app(scope, receive, send)  # vLLM's CORS settings
            return
        self._check_near(scope)
        state = {**scope.get("state", {}), "caller": self._caller(scope)}
        await self._api({**scope, "state": state, "app": None}, receive, send)

    async def _page(self, scope: Scope, path: str, send: Send) -> None:
        """Nobody's data is in these files; the page asks for a key where one is needed."""
        self._check_near(scope)
        found = page.page_answer(scope["method"], path, header(scope, "if-none-match"))
        if found is None:
            await send_json(send, 404, error_body(404, f"There is no {path}."))
            return
        headers = [(name.encode(), value.encode()) for name, value in found.headers.items()]
        await send({"type": "http.response.start", "status": found.status, "headers": headers})
        await send({"type": "http.response.body", "body": found.body, "more_body": False})

    async def _health(self, service: MemoryService, scope: Scope, receive: Receive, send: Send) -> None:
        """vLLM's own answer; 503 where the connector does not answer although the engine does."""
        statuses: list[int] = []

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
                if message["status"] == 200 and not await service.is_healthy():
                    message = {**message, "status": 503}
            await send(message)

        await self.app(scope, receive, watch)

    # vLLM's routes ----------------------------------------------------------------------------

    async def _engine(
        self, service: MemoryService, scope: Scope, path: str, receive: Receive, send: Send
    ) -> None:
        caller = OPERATOR
        if path.startswith(_GUARDED) and scope["method"] != "OPTIONS":
            caller = self._caller(scope)
            if (key := self._keys.for_engine()) is not None:
                scope = with_headers(scope, authorization=key)
        if path == "/metrics":
            await service.observe()
        if scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        raw = await read_body(receive)
        with service.gate.chatting() if path.startswith(_GENERATING) else nullcontext():
            if path == CHAT and (b'"memory"' in raw or b"\\u" in raw or service.front.server.use_user_field):
                await self._chat(service, caller, scope, raw, receive, send)
            else:
                await self._forward(scope, border.cleaned(raw), receive, send)

    async def _chat(
        self, service: MemoryService, caller: Caller, scope: Scope, raw: bytes, receive: Receive, send: Send
    ) -> None:
        try:
            body: Any = json.loads(raw)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            await self._forward(scope, raw, receive, send)  # vLLM says what is wrong with it
            return
        border.clean(body)
        ask = take_ask(body, service.front.server)
        if ask is None:
            await self._forward(scope, json.dumps(body).encode(), receive, send)
            return
        self._check_near(scope)
        turn = await chat.begin(service, caller, body, ask)
        answer = AnswerWithMemory(service, turn, send)
        await self._forward(scope, json.dumps(body).encode(), receive, answer)
        if answer.is_complete:
            await chat.finish(service, turn)

    async def _forward(self, scope: Scope, raw: bytes, receive: Receive, send: Send) -> None:
        changed = with_headers(scope, content_length=str(len(raw)), transfer_encoding=None)
        await self.app(changed, replay(raw, receive), send)
