"""`MemoryMiddleware` around a stand-in for vLLM's application, with a service that has no engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import unquote

import pytest

from fakes import open_memory
from inferscale.errors import UnknownFact, UnknownScope
from inferscale.facts import Fact, Scope
from inferscale.self_check import Verdict
from inferscale.server import middleware
from inferscale.server.gate import Gate
from inferscale.server.keys import Caller, check_readable
from inferscale.server.metrics import Metrics
from inferscale.server.middleware import MemoryMiddleware
from inferscale.server.results import FactPage, InferredFacts, ShownFact, Stats
from inferscale.server_config import ServerConfig

HERE = ("127.0.0.1", 40000)
AWAY = ("192.0.2.7", 40000)

App = Callable[[Any, Any, Any], Awaitable[None]]


class Answer(NamedTuple):
    status: int
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        return dict(self.headers).get(name)

    @property
    def error(self) -> dict[str, Any]:
        """The error, which has OpenAI's form."""
        body = self.json
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        return dict(body["error"])


async def ask(
    app: App,
    method: str,
    path: str,
    body: Any = None,
    *,
    key: str | None = None,
    headers: Sequence[tuple[str, str]] = (),
    parts: Sequence[bytes] | None = None,
    leaves: bool = False,
    client: tuple[str, int] | None = HERE,
    root_path: str = "",
) -> Answer | None:
    """One request as a server hands it over. path: as in the URL. body: bytes, or an object for JSON. parts:
    the body in pieces. leaves: the client does before its request is whole, and gets nothing. Checks that
    the answer is whole and as long as it says."""
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    pieces = [content] if parts is None else list(parts)
    given = [*headers, *([("Authorization", f"Bearer {key}")] if key is not None else [])]
    if not isinstance(body, bytes) and body is not None:
        given.append(("content-type", "application/json"))
    raw_path, _, query = path.partition("?")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": unquote(raw_path), "raw_path": raw_path.encode(), "query_string": query.encode(),
        "root_path": root_path, "headers": [(n.lower().encode(), v.encode("latin-1")) for n, v in given],
        "client": client, "server": ("127.0.0.1", 8000), "state": {}, "app": SimpleNamespace(state=None),
    }  # fmt: skip
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    if leaves:
        messages.append({"type": "http.disconnect"})
    else:
        messages[-1]["more_body"] = False
    waiting = iter(messages)
    sent: list[Any] = []

    async def receive() -> Any:
        return next(waiting, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return None if leaves and not sent else _whole(method, sent)


def _whole(method: str, sent: list[Any]) -> Answer:
    assert [message["type"] for message in sent[:1]] == ["http.response.start"]
    assert {message["type"] for message in sent[1:]} == {"http.response.body"}
    assert [message.get("more_body", False) for message in sent[1:]] == [True] * (len(sent) - 2) + [False]
    headers = [(name.decode(), value.decode("latin-1")) for name, value in sent[0].get("headers", ())]
    body = b"".join(message.get("body", b"") for message in sent[1:])
    lengths = [int(value) for name, value in headers if name == "content-length"]
    if method != "HEAD" and sent[0]["status"] != 304:
        assert lengths in ([], [len(body)])
    return Answer(sent[0]["status"], headers, body)


class Downstream:
    """vLLM's application. seen: scope and body of what came. answers: path → status, headers, body."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, Any], bytes]] = []
        self.answers: dict[str, tuple[int, Mapping[str, str], Sequence[bytes]]] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        body = b""
        while scope["type"] == "http":
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        self.seen.append((scope, body))
        if scope["type"] == "websocket":
            await send({"type": "websocket.accept"})
            return
        status, headers, parts = self.answers.get(scope["path"], (200, {"content-type": "text/plain"}, [b""]))
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        for number, part in enumerate(parts, start=1):
            await send({"type": "http.response.body", "body": part, "more_body": number < len(parts)})

    async def _live(self, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})

    @property
    def last_body(self) -> bytes:
        return self.seen[-1][1]

    def last_headers(self, name: str) -> list[str]:
        raw = name.encode()
        return [value.decode() for key, value in self.seen[-1][0]["headers"] if key == raw]


class FakeService:
    """`MemoryService` without an engine: what it stores is real, and nothing is encoded."""

    def __init__(self, folder: Path, config: ServerConfig) -> None:
        self.memory = open_memory(folder)
        self.front = SimpleNamespace(server=config)
        self.metrics = Metrics()
        self.injects = True
        self.verdict = Verdict("exact")
        self.num_checks = 0
        self.gate: Gate[None] = Gate(self._run)
        self.is_well = True
        self.fails_with: Exception | None = None
        self.log: list[Any] = []

    async def _run(self, job: None) -> None: ...

    def _shown(self, caller: Caller, fact: Fact) -> ShownFact:
        return ShownFact(replace(fact, scope=caller.shown(fact.scope)), False)

    def _ids(self, caller: Caller, scope: Scope) -> dict[str, str | None]:
        if self.fails_with is not None:
            raise self.fails_with
        stored = caller.stored(scope)
        return {"user_id": stored.user_id, "agent_id": stored.agent_id, "run_id": stored.run_id}

    async def add(self, caller: Caller, scope: Scope, content: Any, **rest: Any) -> list[ShownFact]:
        facts = self.memory.add(content, **self._ids(caller, scope), **rest)
        return [self._shown(caller, fact) for fact in facts]

    async def infer(self, caller: Caller, scope: Scope, content: Any, **given: Any) -> InferredFacts:
        """As what no fact could be made of."""
        facts = await self.add(caller, scope, content, **given)
        return InferredFacts(facts, (), "stored as said")

    async def search(
        self, caller: Caller, scope: Scope, query: str, top_k: int, filters: Mapping[str, Any] | None = None
    ) -> Any:
        check_readable(scope, self.front.server.share_agents)
        ids = self._ids(caller, scope)
        try:
            hits = self.memory.search(query, **ids, top_k=top_k, filters=filters)
        except UnknownScope:
            hits = []
        return [(self._shown(caller, hit.fact), hit.score) for hit in hits]

    async def page(
        self,
        caller: Caller,
        scope: Scope,
        limit: int,
        after: str | None,
        filters: Mapping[str, Any] | None = None,
    ) -> FactPage:
        check_readable(scope, self.front.server.share_agents)
        page = self.memory.page(**self._ids(caller, scope), limit=limit, after=after, filters=filters)
        return FactPage([self._shown(caller, fact) for fact in page.facts], page.next_cursor)

    async def set_block(self, caller: Caller, scope: Scope, name: str, text: str) -> ShownFact:
        return self._shown(caller, self.memory.set_block(name, text, **self._ids(caller, scope)).fact)

    async def blocks(self, caller: Caller, scope: Scope) -> list[ShownFact]:
        check_readable(scope, self.front.server.share_agents)
        return [self._shown(caller, block) for block in self.memory.get_blocks(**self._ids(caller, scope))]

    async def delete_block(self, caller: Caller, scope: Scope, name: str) -> None:
        self.memory.delete_block(name, **self._ids(caller, scope))

    async def get(self, caller: Caller, fact_id: str) -> ShownFact:
        fact = self.memory.get(fact_id)
        if not caller.may_see(fact.scope):
            raise UnknownFact("no memory has this id.")
        return self._shown(caller, fact)

    async def update(self, caller: Caller, fact_id: str, changes: Mapping[str, Any]) -> ShownFact:
        await self.get(caller, fact_id)
        return self._shown(caller, self.memory.update(fact_id, **changes).fact)

    async def history(self, caller: Caller, fact_id: str) -> Any:
        await self.get(caller, fact_id)
        return self.memory.history(fact_id)

    async def delete(self, caller: Caller, fact_id: str) -> None:
        await self.get(caller, fact_id)
        self.memory.delete(fact_id)

    async def delete_all(self, caller: Caller, scope: Scope) -> int:
        return self.memory.delete_all(**self._ids(caller, scope)).num_facts

    async def warm(self, caller: Caller, scope: Scope) -> int:
        if scope.is_empty():
            caller.check_operator()
        self.log.append(("warm", scope))
        return 3

    async def stats(self, caller: Caller, scope: Scope) -> Stats:
        if scope.is_empty():
            caller.check_operator()
        num_injectable = None if scope.is_empty() else 1
        return Stats(2, num_injectable, 0, self.injects, {"pages": 9, "captures": 4}, self.verdict)

    async def is_healthy(self) -> bool:
        return self.is_well

    async def observe(self) -> None:
        self.log.append("observe")

    def load_embedder(self) -> None: ...

    async def check(self) -> None:
        self.num_checks += 1

    def begin(self) -> None: ...

    async def close(self) -> None:
        self.log.append("close")
        await self.gate.close()


class FakeServer:
    """The middleware, opened as it is for vLLM, with `FakeService` in place of the real one."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        api_keys: Sequence[str] = (),
        tenants: Mapping[str, str] | None = None,
        allowed_origins: Sequence[str] = (),
        **config: Any,
    ) -> None:
        folder.mkdir()
        if tenants is not None:
            (folder / "keys.json").write_text(json.dumps(tenants))
            config["keys_file"] = str(folder / "keys.json")
        server = ServerConfig(**config)
        self.service = FakeService(folder / "memory", server)
        cors = {"allow_origins": list(allowed_origins), "allow_methods": ["*"], "allow_headers": ["*"]}
        self.front = SimpleNamespace(server=server, api_keys=tuple(api_keys), cors=cors)
        monkeypatch.setattr(middleware, "front_of", lambda state: self.front)
        monkeypatch.setattr(middleware, "open_service", lambda front: self.service)
        self.vllm = Downstream()
        self.app = MemoryMiddleware(self.vllm)

    def ask(self, method: str, path: str, body: Any = None, **options: Any) -> Answer:
        answer = asyncio.run(ask(self.app, method, path, body, **options))
        assert answer is not None
        return answer

    def add(
        self, text: str = "My sister lives in Oslo.", user: str = "ana", **options: Any
    ) -> dict[str, Any]:
        answer = self.ask("POST", "/v1/memories", {"user_id": user, "text": text}, **options)
        assert answer.status == 201, answer.body
        return dict(answer.json["data"][0])
