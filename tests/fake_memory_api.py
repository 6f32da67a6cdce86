"""The memory API of docs/server.md in memory, without an engine, and how both clients are called on it."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import httpx

from inferscale.client import AsyncChatStream, AsyncClient, ChatStream, Client

MODEL = "tiny"
SCOPE = ("user_id", "agent_id", "run_id")


class ApiFailure(Exception):
    def __init__(self, status: int, type: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": type, "param": None, "code": None}}


class FakeMemoryApi:
    """`requests` holds what came in: method, path as sent, query, body. Words in common are the score."""

    def __init__(self, api_key: str | None = None) -> None:
        self.api_key = api_key
        self.memories: dict[str, dict[str, Any]] = {}
        self.history: dict[str, list[dict[str, Any]]] = {}
        self.injection = True
        self.requests: list[tuple[str, str, dict[str, str], Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        """As the handler of `httpx.MockTransport`."""
        target = request.url.raw_path.decode()
        status, answer = self.answer(request.method, target, dict(request.headers), request.content)
        if isinstance(answer, bytes):
            return httpx.Response(status, content=answer, headers={"content-type": "text/event-stream"})
        content = json.dumps(answer)  # escapes all that is not ASCII, half a surrogate pair too
        return httpx.Response(status, content=content, headers={"content-type": "application/json"})

    def answer(self, method: str, target: str, headers: dict[str, str], content: bytes) -> tuple[int, Any]:
        """Status and JSON, or the bytes of a stream."""
        url = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        body = json.loads(content) if content else None
        self.requests.append((method, url.path, query, body))
        if self.api_key and headers.get("authorization") != f"Bearer {self.api_key}":
            return 401, {"error": "Unauthorized"}
        try:
            return self._route(method, url.path, query, body or {})
        except ApiFailure as failure:
            return failure.status, failure.body

    def _route(self, method: str, path: str, query: dict[str, str], body: dict[str, Any]) -> tuple[int, Any]:
        match (method, path.split("/")[2:]):
            case "GET", ["models"]:
                return 200, {"object": "list", "data": [{"id": MODEL}, {"id": "adapter"}]}
            case "POST", ["chat", "completions"]:
                return 200, self._chat(body)
            case "POST", ["memories"]:
                return 201, self._add(body)
            case "GET", ["memories"]:
                return 200, self._page(query)
            case "DELETE", ["memories"]:
                found = self._in_scope(_scope(query))
                for memory in found:
                    del self.memories[memory["id"]]
                return 200, {"object": "memory.deleted", "deleted": len(found)}
            case "POST", ["memories", "search"]:
                return 200, {"object": "list", "data": self._search(body)}
            case "POST", ["memories", "warm"]:
                return 202, {"object": "memory.warm", "pending": len(self._in_scope(body))}
            case "GET", ["memories", "stats"]:
                facts = len(self._in_scope(query))
                stats = {"facts": facts, "injectable": None, "pending": facts, "injection": self.injection}
                return 200, {"object": "memory.stats", **stats, "pool": {"pages": 8}, "counters": {}}
            case "PUT", ["memories", "injection"]:
                self.injection = body["enabled"]
                return 200, {"object": "memory.injection", "enabled": self.injection}
            case "GET", ["memories", quoted]:
                return 200, self._memory(quoted)
            case "PUT", ["memories", quoted]:
                return 200, self._update(self._memory(quoted), body)
            case "DELETE", ["memories", quoted]:
                memory = self._memory(quoted)
                del self.memories[memory["id"]]
                return 200, {"id": memory["id"], "object": "memory.deleted", "deleted": 1}
            case "GET", ["memories", quoted, "history"]:
                return 200, {"object": "list", "data": self.history[self._memory(quoted)["id"]]}
        return 404, {"detail": "Not Found"}

    def _add(self, body: dict[str, Any]) -> dict[str, Any]:
        scope = _scope(body)
        items = body.get("items") or [{"text": body["text"]}] if "messages" not in body else []
        for message in body.get("messages", ()):
            items.append({"text": message["content"], "speaker": message["role"]})
        stored = [self.store(scope, body, each) for each in items]
        added = {"object": "list", "data": stored, "pending": 3, "events": None, "warning": None}
        if body.get("infer"):
            added["events"] = [
                {"event": "UPDATE", "id": each["id"], "text": each["text"], "previous_text": "It was so.",
                 "reason": None, "previous_id": "old", "newer": 1}
                for each in stored
            ]  # fmt: skip
        return added

    def store(
        self, scope: dict[str, Any], body: dict[str, Any], item: dict[str, Any], id: str | None = None
    ) -> dict[str, Any]:
        if not item["text"].strip():
            raise ApiFailure(400, "invalid_request_error", "the text is blank")
        memory: dict[str, Any] = {
            **dict.fromkeys(SCOPE),
            **scope,
            "id": id or f"m{len(self.history)}",
            "object": "memory",
            "text": item["text"],
            "speaker": item.get("speaker", body.get("speaker")),
            "said_at": item.get("said_at", body.get("said_at")),
            "metadata": {**body.get("metadata", {}), **item.get("metadata", {})},
            "created_at": 1.5,
            "updated_at": 1.5,
            "injectable": False,
            "a_field_of_the_future": [1],
        }
        self.memories[memory["id"]] = memory
        event = {"event": "ADD", "text": memory["text"], "previous_text": None, "at": 1.5, "by": "future"}
        self.history[memory["id"]] = [event]
        return memory

    def _memory(self, quoted: str) -> dict[str, Any]:
        try:
            return self.memories[unquote(quoted)]
        except KeyError:
            raise ApiFailure(404, "not_found_error", f"no memory has the id {unquote(quoted)!r}") from None

    def _update(self, memory: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
        event = {"event": "UPDATE", "text": body.get("text", memory["text"]), "previous_text": memory["text"]}
        self.history[memory["id"]].append({**event, "at": 2.5})
        memory.update(body)
        return memory

    def _in_scope(self, scope: dict[str, Any]) -> list[dict[str, Any]]:
        wanted = {name: scope[name] for name in SCOPE if name in scope}
        return [memory for memory in self.memories.values() if wanted.items() <= memory.items()]

    def _page(self, query: dict[str, str]) -> dict[str, Any]:
        found = self._in_scope(_scope(query))
        first = int(query.get("after", "c0")[1:])
        end = first + int(query.get("limit", 100))
        more = end < len(found)
        page = {"object": "list", "data": found[first:end], "has_more": more}
        return {**page, "next_cursor": f"c{end}" if more else None}

    def _search(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        words = set(body["query"].lower().split())
        hits = [
            {**memory, "score": len(words & set(memory["text"].lower().split())) / len(words)}
            for memory in self._in_scope(_scope(body))
        ]
        return sorted(hits, key=lambda hit: -hit["score"])[: body.get("top_k", 10)]

    def _chat(self, body: dict[str, Any]) -> Any:
        if body["model"] != MODEL:
            raise ApiFailure(404, "NotFoundError", f"The model `{body['model']}` does not exist.")
        text = f"You said: {body['messages'][-1]['content']}"
        answer: dict[str, Any] = {"id": "chat-1", "model": MODEL}
        memory = self._use(body["memory"]) if "memory" in body else None
        if body.get("stream"):
            return stream_of(answer, text, memory)
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return {**answer, "choices": [choice], **({"memory": memory} if memory else {})}

    def _use(self, asked: dict[str, Any]) -> dict[str, Any]:
        facts = [
            {name: memory[name] for name in ("id", "text", "speaker", "said_at")} | {"score": 0.5}
            for memory in self._in_scope(_scope(asked))
        ]
        return {
            "mode": asked.get("mode", "inject"),
            "facts": facts,
            "prompt_tokens": 20,
            "injected_tokens": 12,
            "cached_tokens": 0,
            "prefilled_tokens": 8,
            "missing_tokens": 2,
            "left_out": 0,
            "reason": None,
            "stored": asked.get("store", False),
            "timings_ms": {"embed": 0.9},
            "of_the_future": {},
        }


def stream_of(answer: dict[str, Any], text: str, memory: dict[str, Any] | None) -> bytes:
    """A chunk a word, as vLLM sends them: text as it is, not escaped; the memory object in the last chunk."""
    first = {"delta": {"role": "assistant", "content": ""}, "index": 0, "finish_reason": None}
    chunks = [{**answer, "choices": [first]}]
    for word in text.split(" "):
        piece = word if word == "You" else f" {word}"
        chunks.append({**answer, "choices": [{"delta": {"content": piece}, "index": 0}]})
    last = {**answer, "choices": [{"delta": {}, "index": 0, "finish_reason": "stop"}]}
    chunks.append({**last, "memory": memory} if memory else last)
    events = [json.dumps(chunk, ensure_ascii=False) for chunk in chunks] + ["[DONE]"]
    return b": a comment\n\n" + b"".join(f"data: {event}\n\n".encode() for event in events)


class Caller:
    """Calls a method of either client and gives what it gives; pages and streams as lists."""

    def __init__(self, kind: str, **options: Any) -> None:
        self._kind = kind
        self._options = options

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self._sync(name) if self._kind == "sync" else self._async(name)

    def _sync(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            options = dict(self._options)
            handler = options.pop("handler", None)
            http = httpx.Client(transport=httpx.MockTransport(handler)) if handler else httpx.Client()
            with http, Client(http_client=http, **options) as client:
                result = getattr(client, name)(*args, **kwargs)
                if isinstance(result, ChatStream):
                    return list(result), result.reply()
                return list(result) if isinstance(result, Iterator) else result

        return call

    def _async(self, name: str) -> Callable[..., Any]:
        async def run(args: Any, kwargs: Any) -> Any:
            options = dict(self._options)
            handler = options.pop("handler", None)
            http = httpx.AsyncClient(transport=httpx.MockTransport(handler) if handler else None)
            async with http, AsyncClient(http_client=http, **options) as client:
                result = getattr(client, name)(*args, **kwargs)
                if isinstance(result, AsyncChatStream):
                    return [piece async for piece in result], await result.reply()
                if inspect.isasyncgen(result):
                    return [each async for each in result]
                return await result

        return lambda *args, **kwargs: asyncio.run(run(args, kwargs))


def answering(kind: str, status: int, **content: Any) -> Any:
    return Caller(kind, handler=lambda _: httpx.Response(status, **content))


@contextmanager
def served(api: FakeMemoryApi) -> Iterator[str]:
    """`api` behind a socket of this machine; gives its URL. A stream comes in three parts."""

    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, answer = api.answer(self.command, self.path, headers, content)
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            third = len(data) // 3
            for part in (data[:third], data[third : 2 * third], data[2 * third :]):
                self.wfile.write(part)
                self.wfile.flush()

        do_GET = do_POST = do_PUT = do_DELETE = _do

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _scope(values: dict[str, Any]) -> dict[str, Any]:
    scope = {name: values[name] for name in SCOPE if values.get(name)}
    if not scope:
        raise ApiFailure(400, "invalid_request_error", "no scope was given")
    return scope
