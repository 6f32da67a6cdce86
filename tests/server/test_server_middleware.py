"""Which part answers a request, and what comes to vLLM of it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from asgi_server import Downstream, FakeServer, ask

from inferscale.chat_plan import ChatTimings, PreparedChat
from inferscale.errors import EngineError, InvalidInput
from inferscale.plan import Order, Plan, Segment, to_wire
from inferscale.planner import Choice
from inferscale.server import MemoryMiddleware, chat, middleware

Serve = Callable[..., FakeServer]

CHAT = "/v1/chat/completions"
HI = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
WITH_MEMORY = {**HI, "memory": {"user_id": "ana", "mode": "none"}}
ANSWER = {
    "id": "1",
    "choices": [{"index": 0, "message": {"content": "Hello."}}],
    "usage": {"prompt_tokens": 5},
}
PLAN = {"kv_transfer_params": to_wire(Plan("m", "s", order=Order("stats")), b"s" * 32)}
JSON = {"content-type": "application/json"}


@pytest.fixture
def server(serve: Serve) -> FakeServer:
    server = serve()
    server.vllm.answers[CHAT] = (200, JSON, [json.dumps(ANSWER).encode()])
    return server


# routing ----------------------------------------------------------------------------------------


def test_own_routes(server: FakeServer) -> None:
    assert server.ask("GET", "/v1/memories?user_id=ana").json["object"] == "list"
    page = server.ask("GET", "/memory")
    assert (page.status, b"<html" in page.body) == (200, True)
    assert server.ask("HEAD", "/memory").body == b""
    assert server.ask("GET", "/memory", headers=[("If-None-Match", page.header("etag") or "")]).status == 304
    assert server.ask("GET", "/memory/").header("location") == "../memory"
    assert server.ask("POST", "/memory", {}).status == 405
    for path in ("/memory/none.js", "/memory/../keys.json", "/memory/%2e%2e%2fpage.py", "/memory//page.js"):
        assert server.ask("GET", path).error["type"] == "not_found_error"
    assert server.vllm.seen == []


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"), ("GET", "/memoryx"), ("GET", "/memories"), ("GET", "/v1/memoriesx"), ("GET", "/Memory"),
        ("GET", "/docs"), ("GET", CHAT), ("GET", "/v1/models"), ("PUT", "/x"), ("POST", "/tokenize"),
    ],
)  # fmt: skip
def test_all_else_is_vllms(server: FakeServer, method: str, path: str) -> None:
    assert server.ask(method, path, b"any body").status == 200
    assert server.vllm.last_body == b"any body"


def test_metrics_are_brought_up_to_date(server: FakeServer) -> None:
    assert server.ask("GET", "/metrics").status == 200
    assert server.service.log == ["observe"]


@pytest.mark.parametrize(
    ("engine", "is_well", "status"), [(200, True, 200), (200, False, 503), (500, False, 500)]
)
def test_health(server: FakeServer, engine: int, is_well: bool, status: int) -> None:
    server.vllm.answers["/health"] = (engine, {}, [b""])
    server.service.is_well = is_well
    assert server.ask("GET", "/health").status == status
    assert server.ask("POST", "/health").status == engine, "that is none"


# bodies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", [CHAT, "/v1/completions", "/v1/chat/completions/batch", "/invocations", "/any"]
)
def test_a_body_without_anything_of_ours_comes_as_it_was(server: FakeServer, path: str) -> None:
    for raw in (
        b"",
        b"not json",
        json.dumps(HI, indent=3).encode(),
        b'{"text": "my \\"memory\\" \\u00e9"}',
        b"[1]",
    ):
        server.ask("POST", path, raw)
        assert server.vllm.last_body == raw
        assert server.vllm.last_headers("content-length") == [str(len(raw))]


def test_a_body_in_pieces(server: FakeServer) -> None:
    raw = json.dumps({**HI, "prompt": "x" * 200_000}).encode()
    parts = [raw[n : n + 65_536] for n in range(0, len(raw), 65_536)]
    headers = [("Transfer-Encoding", "chunked")]
    assert server.ask("POST", "/v1/completions", parts=[b"", *parts, b""], headers=headers).status == 200
    assert server.vllm.last_body == raw
    assert server.vllm.last_headers("content-length") == [str(len(raw))]
    assert server.vllm.last_headers("transfer-encoding") == []


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/memories", "/v1/memories/search"])
def test_a_client_that_leaves_before_its_request_is_whole(server: FakeServer, path: str) -> None:
    raw = json.dumps({"user_id": "ana", "text": "x"}).encode()
    assert asyncio.run(ask(server.app, "POST", path, parts=[raw], leaves=True)) is None
    assert server.vllm.seen == []
    assert server.ask("GET", "/v1/memories?user_id=ana").json["data"] == []
    assert server.service.gate.num_waiting == 0


@pytest.mark.parametrize(
    "path", [CHAT, "/v1/completions", "/v1/responses", "/inference/v1/generate", "/invocations"]
)
def test_what_only_this_server_may_say_is_taken_out(server: FakeServer, path: str) -> None:
    for memory in ({}, {"memory": None}, {"memory": {"user_id": "ana", "mode": "none"}}):
        for encoding in ("utf-8", "utf-16"):
            raw = json.dumps({**HI, **memory, **PLAN}).encode(encoding)
            server.ask("POST", path, raw)
            body = json.loads(server.vllm.last_body)
            assert "kv_transfer_params" not in body
            assert server.vllm.last_headers("content-length") == [str(len(server.vllm.last_body))]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_a_body_that_is_too_deep(server: FakeServer, path: str) -> None:
    for extra in (b'"cache_salt": "x"', *([b'"memory": {}'] if path == CHAT else [])):
        answer = server.ask("POST", path, b'{%s, "a": ' % extra + b"[" * 5000 + b"]" * 5000 + b"}")
        assert (answer.status, "nested too deeply" in answer.error["message"]) == (400, True)
    assert server.vllm.seen == []


def test_a_chat_is_counted_while_it_runs(server: FakeServer) -> None:
    seen: list[int] = []

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        seen.append(server.service.gate._num_chats)
        await server.vllm(scope, receive, send)

    server.app.app = vllm
    for path in (
        CHAT,
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/cohere/v2/chat",
        "/tokenize",
        "/v1/score",
    ):
        server.ask("POST", path, HI)
    server.ask("GET", CHAT)
    assert seen == [1, 1, 1, 1, 1, 0, 0, 0]
    assert server.service.gate._num_chats == 0


# chats with memory ------------------------------------------------------------------------------


def test_a_chat_with_memory(server: FakeServer) -> None:
    answer = server.ask("POST", CHAT, WITH_MEMORY)
    assert answer.status == 200
    memory = answer.json.pop("memory")
    assert (memory["mode"], memory["facts"], memory["prompt_tokens"]) == ("none", [], 5)
    assert {**answer.json, "memory": None} == {**ANSWER, "memory": None}
    assert json.loads(server.vllm.last_body) == HI


@pytest.mark.parametrize(
    "raw",
    [
        json.dumps(WITH_MEMORY).encode("utf-16"),
        json.dumps(WITH_MEMORY).replace("memory", "m\\u0065mory").encode(),
        b"\xef\xbb\xbf" + json.dumps(WITH_MEMORY).encode(),
    ],
)
def test_memory_in_other_spellings(server: FakeServer, raw: bytes) -> None:
    assert "memory" in server.ask("POST", CHAT, raw).json
    assert json.loads(server.vllm.last_body) == HI


def test_a_stream_with_memory(server: FakeServer) -> None:
    parts = [
        b'data: {"choices":[{"index":0,"delta":{"content":"Hi"},"finish_reason":"stop"}]}\n\n',
        b"data: [DONE]\n\n",
    ]
    server.vllm.answers[CHAT] = (200, {"content-type": "text/event-stream"}, parts)
    answer = server.ask("POST", CHAT, {**WITH_MEMORY, "stream": True})
    first, done, _ = answer.body.split(b"\n\n")
    assert json.loads(first.removeprefix(b"data: "))["memory"]["mode"] == "none"
    assert done == b"data: [DONE]"


def test_bad_memory_objects_do_not_come_to_vllm(server: FakeServer) -> None:
    for memory in ([], {}, {"user_id": 5}, {"user_id": "x", "other": 1}):
        answer = server.ask("POST", CHAT, {**HI, "memory": memory})
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
    assert server.vllm.seen == []


def test_what_is_stored_after_a_whole_answer(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    finished: list[Any] = []

    async def finish(service: Any, turn: chat.Turn) -> None:
        finished.append(turn.ask.scope.user_id)

    monkeypatch.setattr(chat, "finish", finish)
    server.ask("POST", CHAT, WITH_MEMORY)
    assert finished == ["ana"]
    server.vllm.answers[CHAT] = (400, JSON, [b"{}"])
    assert server.ask("POST", CHAT, WITH_MEMORY).body == b"{}"
    assert finished == ["ana"], "an error is no answer"


STREAM_ERROR = [
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n',
    b'data: {"error": {"message": "Internal server error"}}\n\n',
    b"data: [DONE]\n\n",
]


@pytest.mark.parametrize(
    "failure",
    [
        (500, JSON, [b'{"error": {"message": "x"}}']),
        (200, {"content-type": "text/event-stream"}, STREAM_ERROR),
    ],
    ids=["whole", "stream"],
)
def test_a_chat_whose_injection_fails_is_answered_from_text(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, failure: Any
) -> None:
    service = server.service

    async def planned(given: Any, caller: Any, body: Any, ask: Any) -> Any:
        turn = chat.Turn(ask, caller, [])
        choice: Any = Choice((), (), (), 0)
        prompt: Any = SimpleNamespace(token_ids=(1, 2))
        plan = Plan("m", "s", segments=(Segment("k", (1,)),))
        turn.prepared = PreparedChat(prompt, choice, (), plan, 3, None, ChatTimings())
        turn.draft = Rewriter()  # type: ignore[assignment]
        turn.side = SimpleNamespace(engine=SimpleNamespace(secret=b"s" * 32))  # type: ignore[assignment]
        chat._write(given, turn, body)
        server.vllm.answers[CHAT] = failure
        return turn

    async def outcome(plan_id: str) -> dict[str, Any]:
        raise AssertionError("there is no plan any more")

    def salt(side: Any, caller: Any, scope: Any, epoch: int, caller_salt: str) -> str:
        server.vllm.answers[CHAT] = (200, JSON, [json.dumps(ANSWER).encode()])  # it is asked as text now
        return f"text {epoch}"

    monkeypatch.setattr(chat, "begin", planned)
    service.front.accepts_ids = True  # type: ignore[attr-defined]
    service.text_salt, service.outcome = salt, outcome  # type: ignore[attr-defined]
    before = service.metrics.failed_injections._value.get()
    answer = server.ask("POST", CHAT, WITH_MEMORY)
    assert answer.json["choices"] == ANSWER["choices"]
    assert answer.json["memory"]["reason"] == chat._FAILED
    assert answer.json["memory"]["injected_tokens"] == 0
    first, second = (json.loads(body) for _, body in server.vllm.seen)
    assert "inferscale" in first["kv_transfer_params"]
    assert second["kv_transfer_params"] == {"prompt_token_ids": [1, 2]}
    assert second["cache_salt"] == "text 3"
    assert first["messages"] == second["messages"] == [{"role": "user", "content": "hi, with facts"}]
    assert service.metrics.failed_injections._value.get() == before + 1


class Rewriter:
    def rewritten(self, messages: list[dict[str, Any]], front: Any, tail: Any) -> list[dict[str, Any]]:
        return [{**message, "content": f"{message['content']}, with facts"} for message in messages]


def test_a_chat_of_a_tenant(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    callers: list[str | None] = []
    begin = chat.begin

    async def watched(service: Any, caller: Any, body: Any, ask: Any) -> Any:
        callers.append(caller.tenant)
        return await begin(service, caller, body, ask)

    monkeypatch.setattr(chat, "begin", watched)
    server = serve(api_keys=["sk"], tenants={"sk-acme": "acme"})
    for key in ("sk", "sk-acme"):
        server.ask("POST", CHAT, WITH_MEMORY, key=key)
    assert callers == [None, "acme"]


def test_the_user_field(serve: Serve) -> None:
    server = serve(use_user_field=True)
    server.vllm.answers[CHAT] = (200, JSON, [json.dumps(ANSWER).encode()])
    raw = json.dumps(HI, indent=2).encode()
    assert "memory" not in server.ask("POST", CHAT, raw).json
    assert server.vllm.last_body == raw
    answer = server.ask("POST", CHAT, {**HI, "user": "ana", "memory": {"mode": "none"}})
    assert answer.json["memory"]["mode"] == "none"


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], None]:
    """Makes chats fail with an error in the middle of their preparation."""

    def fail(error: Exception) -> None:
        async def begin(service: Any, caller: Any, body: Any, ask: Any) -> Any:
            body["messages"] = []
            raise error

        monkeypatch.setattr(chat, "begin", begin)

    return fail


@pytest.mark.parametrize(("error", "status"), [(EngineError("gone"), 503), (InvalidInput("bad"), 400)])
def test_a_chat_that_is_refused(
    server: FakeServer, failing: Callable[[Exception], None], error: Exception, status: int
) -> None:
    failing(error)
    answer = server.ask("POST", CHAT, WITH_MEMORY)
    assert (answer.status, answer.error["message"]) == (status, str(error))
    assert server.vllm.seen == []
    assert server.service.gate._num_chats == 0


def test_a_mistake_of_memory_does_not_cost_the_chat(
    server: FakeServer, failing: Callable[[Exception], None], caplog: pytest.LogCaptureFixture
) -> None:
    """As a rule the body has a field that vLLM refuses, and it says so better."""
    failing(TypeError("the password is plum"))
    with caplog.at_level(logging.ERROR):
        answer = server.ask("POST", CHAT, WITH_MEMORY)
    assert answer.status == 200
    assert answer.json["memory"]["reason"] == "memory made a mistake; the server's log says more"
    assert json.loads(server.vllm.last_body) == HI
    assert "A chat goes on without memory: TypeError" in caplog.text
    assert "plum" not in str(answer.json) + caplog.text


# start and end ----------------------------------------------------------------------------------


def live(app: Any, *events: str) -> list[Any]:
    """What a server hears of a lifespan."""
    sent: list[Any] = []
    waiting = iter(events or ("lifespan.startup", "lifespan.shutdown"))

    async def run() -> None:
        gone = asyncio.Event()

        async def receive() -> Any:
            event = next(waiting, None)
            if event is None:
                await gone.wait()
            return {"type": event}

        async def send(message: Any) -> None:
            sent.append(message)
            if message["type"] == "lifespan.startup.failed":
                raise asyncio.CancelledError  # the server ends

        try:
            await app({"type": "lifespan", "app": SimpleNamespace(state=None)}, receive, send)
        except asyncio.CancelledError:
            pass

    asyncio.run(run())
    return sent


def test_a_server_starts_with_its_memory_and_closes_it(server: FakeServer) -> None:
    app = MemoryMiddleware(server.vllm)
    num_checks = server.service.num_checks
    sent = live(app)
    assert [message["type"] for message in sent] == [
        "lifespan.startup.complete",
        "lifespan.shutdown.complete",
    ]
    assert app.service is server.service  # type: ignore[comparison-overlap]
    assert server.service.log == ["close"]
    assert server.service.num_checks == num_checks + 1


def test_a_start_that_fails_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(state: Any) -> Any:
        raise EngineError("MemoryMiddleware needs the KV connector.")

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        """Starlette tells what ended it."""
        try:
            await Downstream()(scope, receive, send)
        except asyncio.CancelledError:
            await send({"type": "lifespan.shutdown.failed", "message": "a long traceback"})
            raise

    monkeypatch.setattr(middleware, "front_of", fails)
    app = MemoryMiddleware(vllm)
    with caplog.at_level(logging.ERROR):
        assert live(app) == [
            {"type": "lifespan.startup.failed", "message": "MemoryMiddleware needs the KV connector."}
        ]
    assert "Memory cannot be served: MemoryMiddleware needs the KV connector." in caplog.text
    answer = asyncio.run(ask(app, "GET", "/v1/models"))
    assert answer is not None
    assert (answer.status, answer.error["type"]) == (503, "server_error")


def test_tenants_whose_names_cannot_be(serve: Serve) -> None:
    [failed] = live(serve(tenants={"sk-secret": "a/b"}).app)
    assert failed["type"] == "lifespan.startup.failed"
    assert "a tenant is called 'a/b'" in failed["message"]
    assert "sk-secret" not in failed["message"]


def test_a_server_without_a_lifespan_opens_once(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    opened: list[Any] = []
    monkeypatch.setattr(middleware, "open_service", lambda front: opened.append(front) or server.service)

    async def run() -> None:
        app = MemoryMiddleware(server.vllm)
        await asyncio.gather(*(ask(app, "GET", "/v1/models") for _ in range(5)))

    asyncio.run(run())
    assert len(opened) == 1
