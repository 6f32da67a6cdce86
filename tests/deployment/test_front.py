"""What the front does with a request: its replica, what it asks again, and what it answers by itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from inferscale.deployment.affinity import CHAT, MEMORIES, affinity_key
from inferscale.deployment.front import INJECTION, Front, NoReplica, ReplicaLost, may_repeat
from inferscale.server.http import Message
from inferscale.server.keys import OPERATOR, Caller, Keys

ANA = json.dumps({"memory": {"user_id": "ana"}}).encode()
STORING = json.dumps({"memory": {"user_id": "ana", "store": True}}).encode()


class Stub:
    """Replicas that answer 200, but for what is planned: one entry a call, an exception or `half`."""

    def __init__(self, *planned: Any) -> None:
        self.planned = list(planned)
        self.calls: list[tuple[str | None, dict[str, Any], bytes]] = []
        self.statuses: list[int] = []
        self.was_closed = False

    async def answer(
        self, key: str | None, scope: dict[str, Any], body: bytes
    ) -> AsyncIterator[list[Message]]:
        self.calls.append((key, scope, body))
        plan = self.planned.pop(0) if self.planned else None
        if isinstance(plan, Exception):
            raise plan
        try:
            yield [{"type": "http.response.start", "status": 200, "headers": []}]
            if plan == "half":
                raise ReplicaLost
            if plan == "endless":
                await asyncio.sleep(600)
            yield [{"type": "http.response.body", "body": b"done", "more_body": False}]
        finally:
            self.was_closed = True

    async def answers_of_all(self, scope: dict[str, Any], body: bytes) -> Sequence[list[Message]]:
        return [
            [
                {"type": "http.response.start", "status": status},
                {"type": "http.response.body", "body": b"%d" % status},
            ]
            for status in self.statuses
        ]


def ask(
    stub: Stub,
    method: str,
    path: str,
    body: bytes = b"",
    *,
    key: str | None = None,
    leaves: bool = False,
    root: str = "",
) -> tuple[int | None, bytes]:
    """Status and body; None where nothing was answered."""
    sent: list[Any] = []
    keys = Keys((), {"sk-acme": "acme"})
    headers: list[Any] = [] if key is None else [(b"authorization", b"Bearer " + key.encode())]
    scope: dict[str, Any] = {"type": "http", "method": method, "path": path, "root_path": root}
    scope |= {"query_string": b"", "headers": headers}

    async def play() -> None:
        inbox: asyncio.Queue[Any] = asyncio.Queue()
        inbox.put_nowait({"type": "http.request", "body": body, "more_body": False})

        async def send(message: Any) -> None:
            sent.append(message)
            if leaves:
                inbox.put_nowait({"type": "http.disconnect"})

        await asyncio.wait_for(Front(stub, keys, use_user_field=False)(scope, inbox.get, send), 10)

    asyncio.run(play())
    return (sent[0]["status"] if sent else None), b"".join(message.get("body", b"") for message in sent)


def test_a_request_goes_on_whole_with_the_key_of_its_user() -> None:
    stub = Stub()
    assert ask(stub, "POST", CHAT, ANA) == (200, b"done")
    key, scope, body = stub.calls[0]
    assert key == affinity_key("POST", CHAT, b"", ANA, OPERATOR, use_user_field=False)
    assert (scope["path"], body) == (CHAT, ANA)


def test_the_tenant_of_the_key_counts() -> None:
    stub = Stub()
    ask(stub, "POST", CHAT, ANA, key="sk-acme")
    ask(stub, "POST", CHAT, ANA, key="sk-nobody")  # the replica refuses it
    acme = affinity_key("POST", CHAT, b"", ANA, Caller("acme"), use_user_field=False)
    assert [call[0] == acme for call in stub.calls] == [True, False]


def test_below_a_prefix() -> None:
    stub = Stub()
    ask(stub, "POST", "/smol" + CHAT, ANA, root="/smol")
    assert stub.calls[0][0] is not None


def test_what_does_no_harm_twice_is_asked_again() -> None:
    stub = Stub(ReplicaLost(), ReplicaLost())
    assert ask(stub, "POST", CHAT, ANA) == (200, b"done")
    assert len(stub.calls) == 3


@pytest.mark.parametrize(("path", "body"), [(MEMORIES, ANA), (CHAT, STORING)])
def test_what_might_be_stored_twice_is_not(path: str, body: bytes) -> None:
    stub = Stub(ReplicaLost())
    status, answer = ask(stub, "POST", path, body)
    assert status == 503
    assert "not known" in json.loads(answer)["error"]["message"]
    assert len(stub.calls) == 1


def test_a_replica_that_never_answers_ends_the_attempts() -> None:
    stub = Stub(*[ReplicaLost()] * 5)
    assert ask(stub, "GET", "/v1/models")[0] == 503
    assert len(stub.calls) == 3


def test_half_an_answer_breaks_off_and_is_not_asked_again() -> None:
    stub = Stub("half")
    with pytest.raises(RuntimeError, match="middle of an answer"):
        ask(stub, "POST", CHAT, ANA)
    assert len(stub.calls) == 1


@pytest.mark.parametrize(("is_full", "word"), [(True, "as they take"), (False, "No replica")])
def test_no_replica(is_full: bool, word: str) -> None:
    status, answer = ask(Stub(NoReplica(is_full=is_full)), "GET", "/health")
    assert status == 503
    assert word in json.loads(answer)["error"]["message"]


def test_a_client_that_leaves_ends_the_request() -> None:
    stub = Stub("endless")
    assert ask(stub, "POST", CHAT, ANA, leaves=True)[0] == 200
    assert stub.was_closed


def test_the_switch_of_injection_is_thrown_everywhere() -> None:
    stub = Stub()
    stub.statuses = [200, 403, 200]
    assert ask(stub, "PUT", INJECTION, b"{}") == (403, b"403")
    assert not stub.calls
    stub.statuses = []
    assert ask(stub, "PUT", INJECTION, b"{}")[0] == 503


def test_websockets_are_refused() -> None:
    sent: list[Any] = []

    async def play() -> None:
        async def send(message: Any) -> None:
            sent.append(message)

        front = Front(Stub(), Keys((), {}), use_user_field=False)
        await front({"type": "websocket", "path": "/v1/realtime"}, asyncio.Queue[Any]().get, send)

    asyncio.run(play())
    assert sent[0]["type"] == "websocket.close"


@pytest.mark.parametrize(
    ("method", "path", "body", "may"),
    [
        ("GET", MEMORIES, b"", True),
        ("DELETE", f"{MEMORIES}/id", b"", True),
        ("POST", f"{MEMORIES}/search", b"{}", True),
        ("POST", "/v1/completions", b"{}", True),
        ("POST", "/v1/load_lora_adapter", b"{}", False),
        ("POST", CHAT, b'{"store": true, "memory": {"store": false}}', True),
        ("POST", CHAT, b'{"memory": {"\\u0073tore": true}}', False),
        ("POST", CHAT, b'{"memory": {"store": "infer"}}', False),
        ("POST", CHAT, '{"memory": {"store": true}}'.encode("utf-16"), False),
        ("POST", CHAT, b'"store"', True),
    ],
)
def test_what_may_be_repeated(method: str, path: str, body: bytes, may: bool) -> None:
    assert may_repeat(method, path, body) is may
