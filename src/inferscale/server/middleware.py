"""`--middleware inferscale.server.MemoryMiddleware`: which part answers a request; see docs/server.md.

vLLM makes it without arguments around its whole application, outside of its own key check. It is ready when
the application is: the service is opened in the lifespan's start, and what keeps it from opening ends that.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Collection
from contextlib import nullcontext

from starlette.middleware.cors import CORSMiddleware

from inferscale.errors import InferScaleError
from inferscale.server import border, chat, page
from inferscale.server.api import PREFIX, memory_api
from inferscale.server.ask import take_ask
from inferscale.server.engine import front_of
from inferscale.server.http import (
    App,
    ClientLeft,
    Message,
    Receive,
    Scope,
    Send,
    TooLarge,
    answer_to,
    error_body,
    header,
    headers_of,
    headers_with,
    log_fault,
    read_body,
    replay,
    route_path,
    send_json,
    with_headers,
)
from inferscale.server.keys import OPERATOR, Caller, Forbidden, Keys, Unauthorized, check_near
from inferscale.server.service import MemoryService, open_service
from inferscale.server.stream import AnswerWithMemory
from inferscale.server_config import read_tenants

logger = logging.getLogger(__name__)

CHAT = "/v1/chat/completions"
PAGE = "/memory"
_GUARDED = ("/v1", "/v2", "/inference", "/cohere")
"""What vLLM itself asks a key for."""
_GENERATING = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/inference", "/cohere",
    "/invocations",
)  # fmt: skip
_NOT_PREPARED = "memory made a mistake; the server's log says more"
_MAX_BODY_BYTES = 64 * 2**20
"""Of the memory API. vLLM's routes have no limit."""


class MemoryMiddleware:
    """Pure ASGI; safe for streams."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.service: MemoryService | None = None
        self._keys = Keys((), {})
        self._api: App | None = None
        self._allow_remote = False
        self._origins: Collection[str] = ()
        self._opening = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, self._opening_send(scope, send))
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        elif scope["type"] != "http":
            await self.app(scope, receive, send)
        else:
            await self._http(scope, receive, send)

    def _opening_send(self, scope: Scope, send: Send) -> Send:
        has_failed = False

        async def send_when_open(message: Message) -> None:
            nonlocal has_failed
            if has_failed:
                return  # the server ends; that this ends the application says nothing new
            if message["type"] == "lifespan.startup.complete":
                try:
                    await self._open(scope)
                except InferScaleError as error:
                    has_failed = True
                    logger.error("Memory cannot be served: %s", error)
                    await send({"type": "lifespan.startup.failed", "message": str(error)})
                    return
            elif message["type"].startswith("lifespan.shutdown.") and self.service is not None:
                await self.service.close()
            await send(message)

        return send_when_open

    async def _open(self, scope: Scope) -> MemoryService:
        async with self._opening:
            if self.service is None:
                front = front_of(scope["app"].state)
                self._keys = Keys(front.api_keys, read_tenants(front.server.keys_file))
                self._allow_remote = front.server.allow_remote_without_key
                self._origins = [origin for origin in front.cors["allow_origins"] if origin != "*"]
                service = open_service(front)
                await service.check()
                self._api = CORSMiddleware(memory_api(service), **front.cors)
                service.load_embedder()
                service.begin()
                self.service = service
                logger.info("Memory is served from %s", service.memory.catalog.place)
            return self.service

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            service = self.service or await self._open(scope)
            path = route_path(scope)
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
        except (InferScaleError, Unauthorized, Forbidden, TooLarge) as error:
            await _refuse(send, error)

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """vLLM's, behind the same keys."""
        try:
            if self.service is None:
                await self._open(scope)
            _, scope = self._checked(scope, route_path(scope))
        except Unauthorized:
            await send({"type": "websocket.close", "code": 1008, "reason": "An API key is needed."})
            return
        await self.app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller:
        """Who asks. Raises Unauthorized, also where two keys are given: which one counts elsewhere?"""
        given = headers_of(scope, "authorization")
        return self._keys.caller(given[0] if len(given) == 1 else None)

    def _checked(self, scope: Scope, path: str) -> tuple[Caller, Scope]:
        """Who asks for a route of vLLM, and the request with a key that vLLM knows. Raises Unauthorized."""
        if not path.startswith(_GUARDED) or scope.get("method") == "OPTIONS":
            return OPERATOR, scope
        caller = self._caller(scope)
        key = self._keys.for_engine()
        return caller, scope if key is None else with_headers(scope, authorization=key)

    def _check_near(self, scope: Scope) -> None:
        """Raises Forbidden."""
        if self._keys.is_open:
            client = scope.get("client")
            check_near(
                client[0] if client else None,
                header(scope, "host"),
                header(scope, "origin"),
                anyone=self._allow_remote,
                origins=self._origins,
            )

    # own routes -------------------------------------------------------------------------------

    async def _memories(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._api is not None
        query = scope["query_string"]
        scope["query_string"] = b""  # the server writes it into its log, and it names users
        if scope["method"] == "OPTIONS":
            await self.app(scope, receive, send)  # vLLM's CORS settings
            return
        self._check_near(scope)
        state = {**scope.get("state", {}), "caller": self._caller(scope)}
        raw = await read_body(receive, _MAX_BODY_BYTES)
        given = {**scope, "query_string": query, "state": state, "app": None}
        try:
            await self._api(given, replay(raw, receive), send)
        except Exception as error:  # noqa: BLE001 - the HTTP edge: FastAPI answers and raises it again
            log_fault("The memory API failed", error)

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

        async def watch(message: Message) -> None:
            is_well = message["type"] == "http.response.start" and message["status"] == 200
            if is_well and not await service.is_healthy():
                message = {**message, "status": 503}
            await send(message)

        await self.app(scope, receive, watch)

    # vLLM's routes ----------------------------------------------------------------------------

    async def _engine(
        self, service: MemoryService, scope: Scope, path: str, receive: Receive, send: Send
    ) -> None:
        caller, scope = self._checked(scope, path)
        if path == "/metrics":
            await service.observe()
        if scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        raw = await read_body(receive)
        with service.gate.chatting() if path.startswith(_GENERATING) else nullcontext():
            if path == CHAT and (service.front.server.use_user_field or border.may_name(raw, '"memory"')):
                await self._chat(service, caller, scope, raw, receive, send)
            else:
                await self._forward(scope, border.cleaned(raw), receive, send)

    async def _chat(
        self, service: MemoryService, caller: Caller, scope: Scope, raw: bytes, receive: Receive, send: Send
    ) -> None:
        try:
            body = border.read_json(raw)
        except InferScaleError:
            raise
        except ValueError:
            body = None
        if not isinstance(body, dict):
            await self._forward(scope, raw, receive, send)  # vLLM says what is wrong with it
            return
        is_changed = border.clean(body) or "memory" in body
        ask = take_ask(body, service.front.server)
        if ask is None:
            await self._forward(scope, json.dumps(body).encode() if is_changed else raw, receive, send)
            return
        self._check_near(scope)
        changed = dict(body)
        try:
            turn = await chat.begin(service, caller, changed, ask)
        except InferScaleError:
            raise
        except Exception as error:  # noqa: BLE001 - the HTTP edge: as when a field is no chat's at all
            log_fault("A chat goes on without memory", error)
            said = chat.new_turns(body.get("messages"))
            turn, changed = chat.Turn(ask, caller, said, reason=_NOT_PREPARED), body
        answer = AnswerWithMemory(service, turn, send, may_retry=turn.plan_id is not None)
        await self._forward(scope, json.dumps(changed).encode(), receive, answer)
        if answer.wants_retry:
            changed = dict(body)
            chat.again_as_text(service, turn, changed)
            answer = AnswerWithMemory(service, turn, send)
            await self._forward(scope, json.dumps(changed).encode(), receive, answer)
        if answer.is_complete:
            await chat.finish(service, turn)

    async def _forward(self, scope: Scope, raw: bytes, receive: Receive, send: Send) -> None:
        changed = with_headers(scope, content_length=str(len(raw)), transfer_encoding=None)
        await self.app(changed, replay(raw, receive), send)


async def _refuse(send: Send, error: Exception) -> None:
    status, body = answer_to(error)
    headers = [(name.encode(), value.encode()) for name, value in headers_with(error)]
    await send_json(send, status, body, headers)
