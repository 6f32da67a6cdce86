"""A server with the contract of docs/server.md in memory, for tests of the page. No model, no vLLM.

It is strict: a field or a parameter that the contract does not name is answered with 400, so that the
page cannot lean on more than the contract. What goes wrong is chosen by the attributes of `Stub`.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from inferscale.server.page import page_answer

SCOPE = ("user_id", "agent_id", "run_id")
ABOUT = ("speaker", "said_at", "metadata")
KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error"}
TOKENS_PER_FACT = 34


class Refusal(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Stub:
    """The server's memory and its moods. keys: key → whether it is a tenant's; empty: none is needed."""

    keys: dict[str, bool] = field(default_factory=dict)
    injection: bool = True
    self_check: str = "exact"
    injectable: bool = True
    """Of memories that are stored from now on; `warm` makes all of them so."""
    ttft_s: dict[str, float] = field(default_factory=lambda: {"inject": 0.02, "text": 0.15})
    model: str = "tiny-model"
    answer: str = "You told me this."
    broken: str | None = None
    """How chats fail: "cut" (the stream ends), "error" (an error within the stream) or "refused" (400)."""
    has_memory_api: bool = True
    prefix: str = ""
    """Of all paths, as behind a proxy."""
    memories: dict[str, dict[str, Any]] = field(default_factory=dict)
    events: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    chats: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    counter: int = 0
    now: float = 1764442800.0

    def store(self, text: str, **about: Any) -> dict[str, Any]:
        """Keep one memory. about: scope, speaker, said_at, metadata."""
        self.counter += 1
        self.now += 60
        memory = {
            "id": f"m{self.counter:04d}", "object": "memory", **dict.fromkeys(SCOPE), "text": text,
            "speaker": None, "said_at": None, "metadata": {}, "created_at": self.now, "updated_at": self.now,
            "injectable": self.injectable,
        } | about  # fmt: skip
        self.memories[memory["id"]] = memory
        self.events[memory["id"]] = [{"event": "ADD", "text": text, "previous_text": None, "at": self.now}]
        return memory

    def of(self, scope: dict[str, Any]) -> list[dict[str, Any]]:
        given = {name: scope[name] for name in SCOPE if scope.get(name)}
        return [m for m in list(self.memories.values()) if all(m[k] == v for k, v in given.items())]

    def pending(self) -> int:
        return sum(not memory["injectable"] for memory in self.memories.values())

    def found(self, scope: dict[str, Any], query: str, top_k: int) -> list[dict[str, Any]]:
        words = set(re.findall(r"\w+", query.lower()))
        hits = []
        for memory in self.of(scope):
            own = set(re.findall(r"\w+", memory["text"].lower()))
            hits.append(memory | {"score": round(len(words & own) / max(1, len(words)), 3)})
        return sorted(hits, key=lambda hit: -hit["score"])[:top_k]


def only(given: dict[str, Any], *names: str) -> None:
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise Refusal(400, f"unknown fields: {', '.join(unknown)}")


def required_scope(given: dict[str, Any]) -> dict[str, Any]:
    if not any(given.get(name) for name in SCOPE):
        raise Refusal(400, "Give at least one of user_id, agent_id and run_id.")
    return given


class MemoryApi:
    """The routes; each takes the query and the body and returns a status and an answer."""

    def __init__(self, stub: Stub) -> None:
        self.stub = stub

    def answer(
        self, method: str, path: str, query: dict[str, str], body: Any, key: str | None
    ) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": self.stub.model, "object": "model"}]}
        if not path.startswith("/v1/memories") or not self.stub.has_memory_api:
            raise Refusal(404, "Not Found")
        name = path.removeprefix("/v1/memories").strip("/")
        is_tenant = self.stub.keys.get(key or "", False)
        if is_tenant and (name == "injection" or (name == "stats" and not query)):
            raise Refusal(403, "This key belongs to a tenant.")
        if name == "injection":
            return self.switch(body)
        if name in ("", "search", "stats", "warm"):
            return getattr(self, f"{method.lower()}_{name or 'all'}")(query, body)
        memory_id, _, rest = name.partition("/")
        memory = self.stub.memories.get(unquote(memory_id))
        if memory is None:
            raise Refusal(404, f"There is no memory {memory_id!r}.")
        if rest == "history":
            return 200, {"object": "list", "data": self.stub.events[memory["id"]]}
        return getattr(self, f"{method.lower()}_one")(memory, body)

    def post_all(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        only(body, *SCOPE, *ABOUT, "text", "items", "messages")
        scope = {name: body.get(name) for name in SCOPE}
        required_scope(scope)
        about = {name: body[name] for name in ABOUT if name in body}
        items = body.get("items") or [{"text": body.get("text", "")}]
        if not all(item["text"].strip() for item in items):
            raise Refusal(400, "A memory needs a text.")
        data = [self.stub.store(**(scope | about | item)) for item in items]
        return 201, {"object": "list", "data": data, "pending": self.stub.pending()}

    def get_all(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        only(query, *SCOPE, "limit", "after")
        memories = [m for m in self.stub.of(required_scope(query)) if m["id"] > query.get("after", "")]
        limit = int(query.get("limit", 100))
        has_more = len(memories) > limit
        cursor = memories[limit - 1]["id"] if has_more else None
        return 200, {"object": "list", "data": memories[:limit], "has_more": has_more, "next_cursor": cursor}

    def delete_all(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        only(query, *SCOPE)
        gone = self.stub.of(required_scope(query))
        for memory in gone:
            del self.stub.memories[memory["id"]]
        return 200, {"object": "memory.deleted", "deleted": len(gone)}

    def post_search(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        only(body, *SCOPE, "query", "top_k")
        hits = self.stub.found(required_scope(body), body["query"], body.get("top_k", 10))
        return 200, {"object": "list", "data": [hit for hit in hits if hit["score"]]}

    def get_stats(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        only(query, *SCOPE)
        memories = self.stub.of(query)
        num_injectable = sum(memory["injectable"] for memory in memories) if query else None
        pool = {
            "pages": 4096,
            "free_pages": 4096 - 40 * len(memories),
            "evictions": 0,
            "page_size_tokens": 16,
        }
        return 200, {
            "object": "memory.stats", "facts": len(memories), "injection": self.stub.injection,
            "injectable": num_injectable, "pending": self.stub.pending(),
            "pool": pool, "counters": {}, "self_check": {"state": self.stub.self_check, "detail": "…"},
        }  # fmt: skip

    def post_warm(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        only(body, *SCOPE)
        pending = self.stub.pending()
        for memory in self.stub.of(body):
            memory["injectable"] = True
        return 202, {"object": "memory.warm", "pending": pending}

    def switch(self, body: Any) -> tuple[int, Any]:
        only(body, "enabled")
        self.stub.injection = body["enabled"]
        return 200, {"object": "memory.injection", "enabled": self.stub.injection}

    def get_one(self, memory: dict[str, Any], body: Any) -> tuple[int, Any]:
        return 200, memory

    def put_one(self, memory: dict[str, Any], body: Any) -> tuple[int, Any]:
        only(body, "text", *ABOUT)
        if not body.get("text", "x").strip():
            raise Refusal(400, "A memory needs a text.")
        self.stub.now += 60
        event = {"event": "UPDATE", "text": body.get("text", memory["text"]), "previous_text": memory["text"]}
        self.stub.events[memory["id"]].append(event | {"at": self.stub.now})
        memory.update(body, updated_at=self.stub.now)
        return 200, memory

    def delete_one(self, memory: dict[str, Any], body: Any) -> tuple[int, Any]:
        del self.stub.memories[memory["id"]]
        return 200, {"id": memory["id"], "object": "memory.deleted", "deleted": 1}


def chunks(stub: Stub, body: dict[str, Any]) -> Iterator[dict[str, Any] | str]:
    """What a streamed chat sends, up to where it breaks."""
    memory = body["memory"]
    mode = memory["mode"]
    hits = stub.found(required_scope(memory), body["messages"][-1]["content"], memory["top_k"])
    yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    time.sleep(stub.ttft_s[mode])
    for number, word in enumerate(re.findall(r"\S+\s*", stub.answer)):
        if stub.broken and number == 2:
            if stub.broken == "error":
                yield {"error": {"message": "The engine died.", "type": "server_error", "code": 500}}
            return
        yield {"choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]}
    num_tokens = TOKENS_PER_FACT * len(hits)
    fields = ("id", "text", "speaker", "said_at", "score")
    yield {
        "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}],
        "memory": {
            "mode": mode, "facts": [{name: hit[name] for name in fields} for hit in hits],
            "prompt_tokens": num_tokens + 21, "injected_tokens": num_tokens if mode == "inject" else 0,
            "cached_tokens": 0, "prefilled_tokens": 21 + (0 if mode == "inject" else num_tokens),
            "missing_tokens": 0, "left_out": 0, "reason": None, "stored": bool(memory.get("store")),
            "timings_ms": {"embed": 0.9, "search": 1.6, "residency": 0.3, "prompt": 1.1},
        },
    }  # fmt: skip
    yield "[DONE]"


class Handler(BaseHTTPRequestHandler):
    stub: Stub

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True  # the browser left

    def respond(self) -> None:
        url = urlsplit(self.path.removeprefix(self.stub.prefix))
        self.stub.paths.append(f"{self.command} {url.path}")
        page = page_answer(self.command, unquote(url.path), self.headers.get("if-none-match"))
        if page is not None:
            self.send(page.status, page.headers, page.body)
            return
        try:
            key = self.authorized_key()
            length = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(length)) if length else {}
            if url.path == "/v1/chat/completions":
                self.stream(body)
                return
            query = dict(parse_qsl(url.query))
            status, answer = MemoryApi(self.stub).answer(self.command, url.path, query, body, key)
        except Refusal as refusal:
            status = refusal.status
            kind = KINDS.get(status, "not_found_error")
            answer = {"error": {"message": str(refusal), "type": kind, "param": None, "code": status}}
        self.send(status, {"content-type": "application/json"}, json.dumps(answer).encode())

    do_GET = do_POST = do_PUT = do_DELETE = respond

    def authorized_key(self) -> str | None:
        key = self.headers.get("authorization", "").removeprefix("Bearer ") or None
        if self.stub.keys and key not in self.stub.keys:
            raise Refusal(401, "Unauthorized")
        return key

    def stream(self, body: dict[str, Any]) -> None:
        only(body, "model", "messages", "max_tokens", "temperature", "memory", "stream")
        only(body["memory"], *SCOPE, "top_k", "mode", "tail", "store")
        if self.stub.broken == "refused":
            raise Refusal(400, "top_k is at most 1000.")
        self.stub.chats.append(body)
        self.send(200, {"content-type": "text/event-stream"}, b"")
        for chunk in chunks(self.stub, body):
            data = (
                chunk if isinstance(chunk, str) else json.dumps({"object": "chat.completion.chunk"} | chunk)
            )
            self.wfile.write(f"data: {data}\n\n".encode())

    def send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


class Running:
    """The stub behind a port of this machine, in threads of this process."""

    def __init__(self, stub: Stub, port: int = 0) -> None:
        self.stub = stub
        self._start(port)

    def _start(self, port: int) -> None:
        handler = type("BoundHandler", (Handler,), {"stub": self.stub})
        self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{self.stub.prefix}/memory"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def start_again(self) -> None:
        """On the same port."""
        self._start(self.port)
