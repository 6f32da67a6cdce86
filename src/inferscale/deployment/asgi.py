"""Runs an ASGI application without a socket: its lifespan, and one request at a time as a stream of messages.

Knows neither Ray nor vLLM.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

from inferscale.errors import EngineError
from inferscale.server.http import App, Message, Scope

logger = logging.getLogger(__name__)

_PLAIN = (
    "type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path",
    "headers", "client", "server",
)  # fmt: skip
_SOMEBODY = ("unknown", 0)
_running: set[asyncio.Task[None]] = set()
"""Requests whose caller may have left: what follows an answer, such as remembering it, goes on."""


def plain_scope(scope: Scope) -> dict[str, Any]:
    """What of a request's scope another process understands.

    Who is not named comes from elsewhere: without keys, the application lets in whom it finds on its machine.
    """
    found = {name: scope[name] for name in _PLAIN if name in scope}
    found["client"] = found.get("client") or _SOMEBODY
    found["headers"] = [(bytes(name), bytes(value)) for name, value in scope.get("headers", ())]
    return found


@asynccontextmanager
async def running(app: App) -> AsyncIterator[None]:
    """The application between its start and its end. Raises EngineError where it does not start."""
    inbox: asyncio.Queue[Message] = asyncio.Queue()
    outbox: asyncio.Queue[Message] = asyncio.Queue()
    scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": {}}
    task = asyncio.create_task(_whole(app(scope, inbox.get, outbox.put)))
    try:
        answer = await _said(task, inbox, outbox, "startup")
        if answer["type"] != "lifespan.startup.complete":
            raise EngineError(f"The server does not start: {answer.get('message') or 'it gave no reason'}")
        yield
        await _said(task, inbox, outbox, "shutdown")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _whole(work: Awaitable[None]) -> None:
    await work


async def _said(
    task: asyncio.Task[None], inbox: asyncio.Queue[Message], outbox: asyncio.Queue[Message], what: str
) -> Message:
    await inbox.put({"type": f"lifespan.{what}"})
    answer = asyncio.create_task(outbox.get())
    await asyncio.wait({task, answer}, return_when=asyncio.FIRST_COMPLETED)
    if answer.done():
        return answer.result()
    answer.cancel()
    failed = task.exception()
    return {"type": f"lifespan.{what}.failed", "message": str(failed or "the application ended")}


async def answer_of(app: App, scope: dict[str, Any], body: bytes) -> AsyncIterator[list[Message]]:
    """The messages of an answer, those that wait together. Closed early, the application sees its client
    leave.

    Raises RuntimeError where the application fails before it begins to answer.
    """
    waiting: asyncio.Queue[Message | Exception | None] = asyncio.Queue()
    left = asyncio.Event()
    is_read = False

    async def receive() -> Message:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        waiting.put_nowait(message)

    async def run() -> None:
        try:
            await app(dict(scope), receive, send)
        except Exception as error:  # noqa: BLE001 - a task's root; Starlette logs and answers, then raises again
            waiting.put_nowait(error)
        finally:
            waiting.put_nowait(None)

    task = asyncio.create_task(run())
    _running.add(task)
    task.add_done_callback(_running.discard)
    has_begun = False
    try:
        while True:
            batch = [await waiting.get()]
            while not waiting.empty():
                batch.append(waiting.get_nowait())
            messages: list[Message] = [part for part in batch if isinstance(part, dict)]
            if messages:
                has_begun = True
                yield messages
            for part in batch:
                if isinstance(part, Exception) and not has_begun:
                    raise RuntimeError(f"the application failed: {type(part).__name__}") from part
            if batch[-1] is None:
                return
    finally:
        left.set()
