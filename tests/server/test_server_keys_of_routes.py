"""Which routes want a key, and what vLLM gets to see of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from asgi_server import AWAY, FakeServer

Serve = Callable[..., FakeServer]

OPERATOR, ACME = "sk-operator", "sk-acme"


def routes(text: str) -> list[tuple[str, str]]:
    """`GET /a, PUT /b` → method and path of each."""
    pairs = [item.strip().partition(" ") for item in text.split(",") if item.strip()]
    return [(method, path) for method, _, path in pairs]


OWN = routes(
    "POST /v1/memories, GET /v1/memories, DELETE /v1/memories, POST /v1/memories/search, "
    "GET /v1/memories/x, PUT /v1/memories/x, DELETE /v1/memories/x, GET /v1/memories/x/history, "
    "POST /v1/memories/warm, GET /v1/memories/stats, PUT /v1/memories/injection, "
    "GET /v1/memories/openapi.json, GET /v1/memories/docs, GET /v1/memories/docs/oauth2-redirect, "
    "HEAD /v1/memories, PATCH /v1/memories, GET /v1/memories/, GET /v1/memories/no/such, "
)
VLLMS = routes(
    "GET /v1/models, POST /v1/chat/completions, POST /v1/completions, POST /v1/responses, "
    "POST /v1/messages, POST /inference/v1/generate, POST /cohere/v2/chat, POST /v2/embed, "
    "HEAD /v1/models, DELETE /v1/x, GET /v1/memories.json, GET /v1memories, GET /v1, "
    "POST /v1/chat/completions/, GET /v10/x, GET /v1%2Fmodels, GET /v1/../metrics, "
)
OPEN = [("GET", "/health"), ("GET", "/metrics"), ("GET", "/version"), ("POST", "/tokenize"), ("GET", "/docs")]


@pytest.fixture(scope="module")
def with_keys(serve_once: Serve) -> FakeServer:
    return serve_once(api_keys=[OPERATOR, "sk-other"], tenants={ACME: "acme"})


@pytest.fixture
def server(with_keys: FakeServer) -> FakeServer:
    with_keys.vllm.seen.clear()
    return with_keys


@pytest.mark.parametrize(("method", "path"), OWN + VLLMS)
def test_no_key_and_wrong_keys(server: FakeServer, method: str, path: str) -> None:
    for headers in (
        [],
        [("Authorization", "Bearer sk-wrong")],
        [("Authorization", OPERATOR)],
        [("Authorization", f"Basic {OPERATOR}")],
        [("Authorization", f"Bearer {OPERATOR}"), ("Authorization", "Bearer sk-wrong")],
        [("authorization", "Bearer sk-wrong"), ("AUTHORIZATION", f"Bearer {OPERATOR}")],
        [("X-Authorization", f"Bearer {OPERATOR}"), ("Cookie", f"Authorization=Bearer {OPERATOR}")],
    ):
        answer = server.ask(method, path, {}, headers=headers)
        assert answer.status == 401
        assert answer.error["type"] == "authentication_error"
        assert answer.header("www-authenticate") == "Bearer"
    assert server.vllm.seen == [], "vLLM has not seen it, and no body was read"


@pytest.mark.parametrize(("method", "path"), OWN)
def test_own_routes_take_every_key(server: FakeServer, method: str, path: str) -> None:
    for key in (OPERATOR, "sk-other", ACME):
        assert server.ask(method, path, {}, key=key).status != 401
    assert server.vllm.seen == []


@pytest.mark.parametrize(("method", "path"), VLLMS)
def test_vllm_sees_a_key_that_it_knows(server: FakeServer, method: str, path: str) -> None:
    for key in (OPERATOR, "sk-other", ACME):
        assert server.ask(method, path, {}, key=key).status == 200
        assert server.vllm.last_headers("authorization") == [f"Bearer {OPERATOR}"]


@pytest.mark.parametrize(("method", "path"), OPEN)
def test_what_vllm_leaves_open_stays_open(server: FakeServer, method: str, path: str) -> None:
    assert server.ask(method, path).status == 200
    assert server.ask(method, path, key="sk-wrong").status == 200
    assert server.vllm.last_headers("authorization") == ["Bearer sk-wrong"], "it is nobody's business"


@pytest.mark.parametrize(("method", "path"), [("OPTIONS", path) for _, path in OWN + VLLMS])
def test_preflights_of_browsers_are_vllms(server: FakeServer, method: str, path: str) -> None:
    assert server.ask(method, path).status == 200
    assert len(server.vllm.seen) == 1


@pytest.mark.parametrize(
    "path", ["//v1/memories", "/V1/memories", "/v1//memories", "/./v1/memories", "/v1/memories "]
)
def test_other_spellings_of_a_path_are_no_way_around_the_key(server: FakeServer, path: str) -> None:
    """They are no routes of ours: vLLM answers, behind its own key where it asks for one."""
    server.add("The password is plum.", key=OPERATOR)
    answer = server.ask("GET", f"{path}?user_id=ana")
    assert b"plum" not in answer.body
    assert answer.status == 401 or len(server.vllm.seen) == 1


@pytest.mark.parametrize("root", ["/", "/v", "/v1", "/api"])
def test_root_paths_do_not_uncover_routes(serve: Serve, root: str) -> None:
    """vLLM takes the root off as text; its router does not."""
    server = serve(api_keys=[OPERATOR])
    for path in ("/v1/models", "/v1/memories?user_id=ana", f"{root}/v1/models".replace("//", "/")):
        is_route = (path.startswith("/v1") and root != "/v1") or path.startswith(f"{root}/v1/")
        assert server.ask("GET", path, root_path=root).status == (401 if is_route else 200), path
    if root == "/api":
        server.add(key=OPERATOR, root_path=root)
        answer = server.ask("GET", "/api/v1/memories?user_id=ana", key=OPERATOR, root_path=root)
        assert len(answer.json["data"]) == 1
        assert server.ask("GET", "/api/memory", root_path=root).status == 200
        assert server.ask("GET", "/api/health", root_path=root).status == 200


def test_tenants_alone_guard_vllms_routes_as_well(serve: Serve) -> None:
    server = serve(tenants={ACME: "acme"})
    for method, path in VLLMS:
        assert server.ask(method, path, {}).status == 401
    assert server.ask("POST", "/v1/completions", {}, key=ACME).status == 200
    assert server.vllm.last_headers("authorization") == [f"Bearer {ACME}"], "vLLM asks for none"


def test_tenants_do_not_see_each_others_memory(serve: Serve) -> None:
    server = serve(api_keys=[OPERATOR], tenants={ACME: "acme", "sk-b": "b"})
    fact = server.add("The password is plum.", key=ACME)
    assert fact["user_id"] == "ana"
    for user in ("ana", "acme/ana", "../acme/ana", "%2e%2e/acme/ana"):
        assert server.ask("GET", f"/v1/memories?user_id={user}", key="sk-b").json["data"] == []
    for method, path, body in (
        ("GET", f"/v1/memories/{fact['id']}", None),
        ("PUT", f"/v1/memories/{fact['id']}", {"text": "x"}),
        ("DELETE", f"/v1/memories/{fact['id']}", None),
        ("GET", f"/v1/memories/{fact['id']}/history", None),
    ):
        assert server.ask(method, path, body, key="sk-b").error["type"] == "not_found_error"
    assert (
        server.ask("GET", "/v1/memories?user_id=acme/ana", key=OPERATOR).json["data"][0]["id"] == fact["id"]
    )
    for path, method, body in (
        ("/v1/memories/stats", "GET", None),
        ("/v1/memories/warm", "POST", {}),
        ("/v1/memories/injection", "PUT", {"enabled": False}),
    ):
        assert server.ask(method, path, body, key=ACME).error["type"] == "permission_error"
    assert server.service.injects


# without keys -----------------------------------------------------------------------------------

CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "memory": {"user_id": "ana", "mode": "none"},
}


def test_without_keys_memory_is_for_this_machine(serve: Serve) -> None:
    server = serve()
    for method, path in [*OWN, ("GET", "/memory"), ("GET", "/memory/page.js")]:
        answer = server.ask(method, path, {}, client=AWAY)
        assert answer.status == 403
        assert method == "HEAD" or answer.error["type"] == "permission_error"
        assert server.ask(method, path, {}).status != 403
        assert server.ask(method, path, {}, client=None).status != 403, "a Unix socket"
    assert server.ask("POST", "/v1/chat/completions", CHAT, client=AWAY).status == 403
    assert server.vllm.seen == []
    assert server.ask("POST", "/v1/chat/completions", CHAT).status == 200
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert server.ask("POST", path, {"model": "m"}, client=AWAY).status == 200, (
            "vLLM is as open as it was"
        )


def test_without_keys_web_pages_from_elsewhere_have_no_memory(serve: Serve) -> None:
    server = serve(allowed_origins=["*", "https://known.example"])
    for headers in ([("Origin", "https://evil.example")], [("Host", "evil.example:8000")]):
        for method, path in [*OWN, ("GET", "/memory")]:
            assert server.ask(method, path, {}, headers=headers).status == 403
        assert server.ask("POST", "/v1/chat/completions", CHAT, headers=headers).status == 403
    known = [("Origin", "https://known.example"), ("Host", "localhost:8000")]
    answer = server.ask("GET", "/v1/memories?user_id=ana", headers=known)
    assert answer.status == 200
    assert answer.header("access-control-allow-origin") is not None, "the page can read it, as vLLM's answers"


def test_without_keys_others_are_welcome_where_the_operator_says_so(serve: Serve) -> None:
    server = serve(allow_remote_without_key=True)
    assert (
        server.ask(
            "GET", "/v1/memories?user_id=ana", client=AWAY, headers=[("Host", "memory.example")]
        ).status
        == 200
    )
    assert server.ask("GET", "/memory", client=AWAY).status == 200
    assert server.ask("POST", "/v1/chat/completions", CHAT, client=AWAY).status == 200


def test_with_keys_it_does_not_matter_from_where(server: FakeServer) -> None:
    headers = [("Origin", "https://evil.example"), ("Host", "memory.example")]
    assert server.ask("GET", "/memory", client=AWAY, headers=headers).status == 200
    assert server.ask("GET", "/v1/memories?user_id=ana", client=AWAY, headers=headers, key=ACME).status == 200


# websockets -------------------------------------------------------------------------------------


def connect(server: FakeServer, path: str, *headers: tuple[bytes, bytes]) -> list[Any]:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "websocket", "path": path, "root_path": "", "headers": list(headers), "client": AWAY,
        "app": SimpleNamespace(state=None),
    }  # fmt: skip
    asyncio.run(server.app(scope, receive, send))
    return sent


@pytest.mark.parametrize("api_keys", [[OPERATOR], []])
def test_websockets_want_a_key_too(serve: Serve, api_keys: list[str]) -> None:
    server = serve(api_keys=api_keys, tenants={ACME: "acme"})
    for headers in ([], [(b"authorization", b"Bearer sk-wrong")]):
        [closed] = connect(server, "/v1/realtime", *headers)
        assert (closed["type"], closed["code"]) == ("websocket.close", 1008)
    assert server.vllm.seen == []
    assert connect(server, "/v1/realtime", (b"authorization", b"Bearer sk-acme")) == [
        {"type": "websocket.accept"}
    ]
    assert server.vllm.last_headers("authorization") == [f"Bearer {OPERATOR if api_keys else ACME}"]
    assert connect(server, "/elsewhere") == [{"type": "websocket.accept"}]


def test_websockets_without_keys_are_vllms(serve: Serve) -> None:
    assert connect(serve(), "/v1/realtime") == [{"type": "websocket.accept"}]
