"""Whatever a client sends, it is answered as the OpenAPI document says, and never with 5xx.

Schemathesis makes up requests of the memory API from the document, good ones and bad ones, and holds the
answers against it. Of chats, hypothesis makes up the `memory` object: it is all in them that is ours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import schemathesis
from asgi_server import Answer, FakeServer
from hypothesis import given, settings
from schemathesis import Case
from schemathesis.specs.openapi.checks import positive_data_acceptance

from inferscale.server import chat
from inferscale.server.api import memory_api
from inferscale.server.keys import check_readable
from inferscale.server.service import MemoryService
from memory_objects import bad_objects, good_objects

CHAT = "/v1/chat/completions"
KEY = "sk-fuzz"


class Running:
    """The application that is asked: the document is read when tests are collected, the server made later."""

    server: FakeServer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.server.app(scope, receive, send)


running = Running()
document = schemathesis.openapi.from_dict(memory_api(cast(MemoryService, None)).openapi())
document.app = running
document.config.generation.update(with_security_parameters=False)  # every request has the key
always_the_same = settings(derandomize=True, database=None, deadline=None)


@pytest.fixture(scope="module", autouse=True)
def _server(serve_once: Callable[..., FakeServer]) -> Iterator[None]:
    async def begin(service: Any, caller: Any, body: Any, ask: Any) -> chat.Turn:
        """Chats are prepared by an engine; here no facts stand in them."""
        check_readable(ask.scope, share_agents=False)
        return chat.Turn(ask, caller, chat.new_turns(body["messages"]))

    running.server = serve_once(api_keys=[KEY])
    running.server.vllm.answers[CHAT] = (200, {"content-type": "application/json"}, [b'{"choices": []}'])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat, "begin", begin)
        yield


@pytest.fixture(autouse=True)
def _nothing_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A mistake would be, whatever the client is told."""
    with caplog.at_level(logging.WARNING, "inferscale"):
        yield
    assert caplog.messages == []


def check(case: Case) -> None:
    """Send a request: the answer is one of the document, and an error has OpenAI's form.

    Not that all is accepted which the document allows: it cannot say that an id is not blank, or that one of
    three fields is needed.
    """
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = case.call_and_validate(headers=headers, excluded_checks=[positive_data_acceptance])
    if answer.status_code >= 400 and answer.content:  # HEAD has none
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@document.parametrize()
@settings(always_the_same, max_examples=50)
def test_the_memory_api_does_what_its_document_says(case: Case) -> None:
    check(case)


@document.include(path_regex="fact_id").parametrize()
@settings(always_the_same, max_examples=50)
def test_memories_that_are_there(case: Case) -> None:
    """No request that is made up would name one."""
    memory = running.server.service.memory
    there = memory.page(user_id="ana", limit=1).facts
    case.path_parameters = {"fact_id": there[0].id if there else running.server.add(key=KEY)["id"]}
    check(case)


def ask_chat(memory: Any) -> Answer:
    running.server.vllm.seen.clear()
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "memory": memory}
    return running.server.ask("POST", CHAT, body, key=KEY)


@settings(always_the_same, max_examples=150)
@given(good_objects())
def test_a_good_memory_object(memory: dict[str, Any]) -> None:
    answer = ask_chat(memory)
    assert (answer.status, len(running.server.vllm.seen)) == (200, 1)
    assert answer.json["memory"]["mode"] == memory.get("mode", "inject")
    assert b"memory" not in running.server.vllm.last_body


@settings(always_the_same, max_examples=300)
@given(bad_objects())
def test_a_bad_memory_object(memory: Any) -> None:
    answer = ask_chat(memory)
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
    assert running.server.vllm.seen == []
