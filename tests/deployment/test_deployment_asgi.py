"""An application that runs without a socket: its start and end, streams, and callers that leave."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from inferscale.deployment.asgi import answer_of, plain_scope, running
from inferscale.errors import EngineError
from inferscale.server.keys import Forbidden, check_near

SCOPE = {"type": "http", "method": "GET", "path": "/"}
START = {"type": "http.response.start", "status": 200, "headers": []}


def part(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def whole(app: Any, body: bytes = b"") -> list[dict[str, Any]]:
    return [dict(message) async for messages in answer_of(app, SCOPE, body) for message in messages]


def test_the_body_goes_in_and_the_answer_comes_out() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        given = await receive()
        await send(START)
        await send(part(given["body"].upper(), more=False))

    assert asyncio.run(whole(app, b"ana")) == [START, part(b"ANA", more=False)]


def test_a_stream_is_not_held_back() -> None:
    async def play() -> None:
        go_on = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send(START)
            await send(part(b"1"))
            await go_on.wait()
            await send(part(b"2", more=False))

        answer = answer_of(app, SCOPE, b"")
        first = list(await anext(answer))
        if part(b"1") not in first:
            first += await anext(answer)
        assert part(b"1") in first
        go_on.set()  # the second part is made only now
        assert [m async for messages in answer for m in messages] == [part(b"2", more=False)]

    asyncio.run(play())


def test_the_application_sees_its_caller_leave_and_may_finish() -> None:
    async def play() -> None:
        seen: list[str] = []
        done = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await send(START)
            seen.append((await receive())["type"])
            done.set()

        answer = answer_of(app, SCOPE, b"")
        await anext(answer)
        await answer.aclose()  # type: ignore[attr-defined]
        await asyncio.wait_for(done.wait(), 5)
        assert seen == ["http.disconnect"]

    asyncio.run(play())


def test_a_failure_before_the_answer_is_an_error_and_one_behind_it_is_not() -> None:
    async def fails(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("a user's text")

    async def answers_and_fails(scope: Any, receive: Any, send: Any) -> None:
        await send({**START, "status": 500})
        await send(part(b"", more=False))
        raise ValueError("a user's text")

    with pytest.raises(RuntimeError, match="ValueError") as caught:
        asyncio.run(whole(fails))
    assert "text" not in str(caught.value)
    assert asyncio.run(whole(answers_and_fails))[0]["status"] == 500


def lifespan_app(log: list[str], *, refuse: bool = False) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        while True:
            what = (await receive())["type"]
            log.append(what)
            if refuse:
                await send({"type": f"{what}.failed", "message": "no connector"})
                return
            await send({"type": f"{what}.complete"})
            if what == "lifespan.shutdown":
                return

    return app


def test_start_and_end() -> None:
    async def play() -> None:
        log: list[str] = []
        async with running(lifespan_app(log)):
            assert log == ["lifespan.startup"]
        assert log == ["lifespan.startup", "lifespan.shutdown"]

    asyncio.run(play())


@pytest.mark.parametrize("is_raised", [False, True])
def test_a_start_that_fails_says_why(is_raised: bool) -> None:
    async def raises(scope: Any, receive: Any, send: Any) -> None:
        raise OSError("no connector")

    async def play() -> None:
        with contextlib.suppress(AssertionError):
            async with running(raises if is_raised else lifespan_app([], refuse=True)):
                pytest.fail("it started")

    with pytest.raises(EngineError, match="no connector"):
        asyncio.run(play())


def test_a_scope_keeps_what_can_be_sent() -> None:
    scope = {
        **SCOPE,
        "headers": [(b"a", memoryview(b"b"))],
        "app": object(),
        "state": {},
        "client": ("::1", 5),
    }
    assert plain_scope(scope) == {**SCOPE, "headers": [(b"a", b"b")], "client": ("::1", 5)}


def test_a_client_that_is_not_named_is_not_taken_for_one_of_this_machine() -> None:
    for client in ({}, {"client": None}):
        host = plain_scope({**SCOPE, **client})["client"][0]
        with pytest.raises(Forbidden):
            check_near(host, "localhost", None, anyone=False, origins=())
