"""Extraction in the server: requests behind chats, additions that end although the client left, the route."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from asgi_server import FakeServer

from fakes import open_memory
from inferscale.catalog import Added
from inferscale.errors import EngineError, ExtractionError, InvalidInput
from inferscale.extraction import with_schema
from inferscale.facts import ChangeEvent, Scope
from inferscale.server import chat, extraction
from inferscale.server.ask import MemoryAsk
from inferscale.server.engine import EngineSide
from inferscale.server.extraction import Extractions, ServerExtraction
from inferscale.server.keys import Caller
from inferscale.server.results import InferredFacts, ShownFact

MESSAGES = [{"role": "user", "content": "What?"}]
SCHEMA = {"type": "object"}
PATH = "/v1/memories"


class Side:
    """`EngineSide` for extraction. answers: texts, or errors."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[Any] = []
        self.num_running = self.most_running = 0

    async def complete(self, ids: Any, schema: Any, max_tokens: int, temperature: float) -> str:
        self.asked.append((ids, schema, max_tokens, temperature))
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(0)
        self.num_running -= 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return str(answer)


class Prompts:
    def __init__(self, num_tokens: int = 10) -> None:
        self.built: list[Any] = []
        self.num_tokens = num_tokens

    def build(self, messages: Any, template_kwargs: Any) -> Any:
        self.built.append(messages)
        return SimpleNamespace(token_ids=tuple(range(self.num_tokens)))


async def nobody_chats() -> None: ...


def asked(side: Side, prompts: Prompts | None = None, times: int = 1) -> list[Any]:
    """What `complete` gives in threads, results and errors."""

    async def run() -> list[Any]:
        model = ServerExtraction(side, prompts or Prompts(), 200, nobody_chats)  # type: ignore[arg-type]
        calls = (asyncio.to_thread(model.complete, MESSAGES, SCHEMA, 1024, 0.5) for _ in range(times))
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(run())


def test_an_answer_is_held_to_the_schema() -> None:
    side = Side('{"a": 1}')
    assert asked(side) == [{"a": 1}]
    assert side.asked == [(tuple(range(10)), SCHEMA, 190, 0.5)]


def test_few_at_a_time() -> None:
    side = Side('{"a": 1}')
    assert asked(side, times=6) == [{"a": 1}] * 6
    assert side.most_running <= 2


def test_an_engine_without_schemas() -> None:
    side, prompts = Side(InvalidInput("no backend"), '{"a": 1}'), Prompts()
    assert asked(side, prompts) == [{"a": 1}]
    assert [schema for _, schema, _, _ in side.asked] == [SCHEMA, None]
    assert prompts.built == [MESSAGES, with_schema(MESSAGES, SCHEMA)]


@pytest.mark.parametrize("answer", [EngineError("gone"), InvalidInput("no"), "no object", '{"a": '])
def test_what_cannot_be_used(answer: Any) -> None:
    [error] = asked(Side(answer))
    assert isinstance(error, ExtractionError)


def test_no_room_for_an_answer() -> None:
    side = Side("{}")
    [error] = asked(side, Prompts(150))
    assert isinstance(error, ExtractionError)
    assert side.asked == []


def test_an_engine_that_does_not_answer_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "TIMEOUT_S", 0.05)
    side = Side("{}")

    async def hang(*given: Any) -> str:
        await asyncio.Event().wait()
        return ""

    side.complete = hang  # type: ignore[method-assign, assignment]
    [error] = asked(side)
    assert isinstance(error, ExtractionError)
    assert "did not answer" in str(error)


def test_requests_wait_for_chats() -> None:
    side = Side('{"a": 1}')

    async def run() -> None:
        is_quiet = asyncio.Event()
        waiting = asyncio.Event()

        async def give_way() -> None:
            waiting.set()
            await is_quiet.wait()

        model = ServerExtraction(side, Prompts(), 200, give_way)  # type: ignore[arg-type]
        task = asyncio.create_task(asyncio.to_thread(model.complete, MESSAGES, SCHEMA, 99))
        await waiting.wait()
        assert side.asked == []
        is_quiet.set()
        assert await task == {"a": 1}

    asyncio.run(run())


# additions ----------------------------------------------------------------------------------------

FACT = '{"facts": [{"line": 1, "text": "Ana lives in Oslo."}], "nothing": false}'


def test_an_addition_ends_although_the_client_left(tmp_path: Path) -> None:
    memory = open_memory(tmp_path)
    followed: list[Added] = []

    async def run() -> None:
        can_answer = asyncio.Event()
        has_asked = asyncio.Event()
        done = asyncio.Event()

        async def give_way() -> None:
            has_asked.set()
            await can_answer.wait()

        async def follow(added: Added) -> None:
            followed.append(added)
            done.set()

        model = ServerExtraction(Side(FACT), Prompts(), 4000, give_way)  # type: ignore[arg-type]
        extractions = Extractions(memory, model, 4000)
        task = asyncio.create_task(extractions.add("I live in Oslo.", follow, user_id="ana"))
        await has_asked.wait()
        task.cancel()
        can_answer.set()
        await done.wait()
        await extractions.close()

    asyncio.run(run())
    assert [fact.text for added in followed for fact in added] == ["Ana lives in Oslo."]
    assert memory.count(user_id="ana") == 1


@pytest.mark.parametrize("is_early", [True, False])
def test_a_server_that_is_stopped_stores_what_was_said(tmp_path: Path, is_early: bool) -> None:
    """Whether it is stopped before the model is asked or while it answers."""
    memory = open_memory(tmp_path)
    followed: list[Added] = []

    async def follow(added: Added) -> None:
        followed.append(added)

    async def run() -> None:
        has_asked = asyncio.Event()

        async def give_way() -> None:
            has_asked.set()
            await asyncio.Event().wait()

        model = ServerExtraction(Side(FACT), Prompts(), 4000, give_way)  # type: ignore[arg-type]
        extractions = Extractions(memory, model, 4000)
        if is_early:
            model.close()
        task = asyncio.create_task(extractions.add("I live in Oslo.", follow, user_id="ana"))
        if not is_early:
            await has_asked.wait()
            await extractions.close()
        await task

    asyncio.run(run())
    [added] = followed
    assert [fact.text for fact in added] == ["I live in Oslo."]
    assert added.warning is not None
    assert "being stopped" in added.warning


# the engine client --------------------------------------------------------------------------------


class Client:
    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome
        self.requests: list[Any] = []

    async def generate(self, prompt: Any, params: Any, name: str) -> Any:
        self.requests.append((prompt, params))
        if isinstance(self.outcome, Exception):
            raise self.outcome
        for text in ("{", self.outcome):
            output = SimpleNamespace(text=text, finish_reason="error" if text == "error" else "stop")
            yield SimpleNamespace(finished=text != "{", outputs=[output])


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], tuple[EngineSide, Client]]:
    made = lambda **settings: SimpleNamespace(**settings)  # noqa: E731
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=made))  # type: ignore[arg-type]
    params = SimpleNamespace(StructuredOutputsParams=made)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)  # type: ignore[arg-type]

    def make(outcome: Any) -> tuple[EngineSide, Client]:
        client = Client(outcome)
        return EngineSide(client, "model", b"secret"), client

    return make


def test_a_request_has_a_prefix_cache_of_its_own(side: Callable[[Any], tuple[EngineSide, Client]]) -> None:
    engine, client = side('{"a": 1}')
    for _ in range(2):
        assert asyncio.run(engine.complete((1, 2), SCHEMA, 9, 0.5)) == '{"a": 1}'
    (prompt, params), (other, _) = client.requests
    assert prompt["prompt_token_ids"] == [1, 2]
    assert prompt["cache_salt"] != other["cache_salt"]
    assert (params.structured_outputs.json, params.max_tokens, params.temperature) == (SCHEMA, 9, 0.5)
    asyncio.run(engine.complete((1,), None, 9, 0.0))
    assert not hasattr(client.requests[-1][1], "structured_outputs")


def test_refused_and_failed_requests(side: Callable[[Any], tuple[EngineSide, Client]]) -> None:
    class VLLMValidationError(Exception): ...

    for error in (ValueError("no"), VLLMValidationError("no")):
        with pytest.raises(InvalidInput, match="vLLM does not take this request: no"):
            asyncio.run(side(error)[0].complete((1,), SCHEMA, 9, 0.0))
    with pytest.raises(EngineError, match="failed a request"):
        asyncio.run(side("error")[0].complete((1,), SCHEMA, 9, 0.0))
    with pytest.raises(RuntimeError):
        asyncio.run(side(RuntimeError("gone"))[0].complete((1,), SCHEMA, 9, 0.0))


# the route ----------------------------------------------------------------------------------------


def test_the_route_says_what_became_of_each_fact(serve: Callable[..., FakeServer]) -> None:
    server = serve()
    given: list[Any] = []

    async def infer(caller: Any, scope: Any, content: Any, **rest: Any) -> InferredFacts:
        given.append((content, rest))
        [fact] = server.service.memory.add("Ana lives in Bergen.", user_id="ana")
        event = ChangeEvent("UPDATE", fact.id, fact.text, "Ana lives in Oslo.", "She moved.", "old")
        return InferredFacts([ShownFact(fact, False)], (event,), "one turn is stored as it was said")

    server.service.infer = infer  # type: ignore[attr-defined]
    body = {"user_id": "ana", "messages": [{"role": "user", "content": "I moved."}], "infer": True}
    answer = server.ask("POST", PATH, {**body, "said_at": "7 May 2023"})
    assert answer.status == 201
    [memory] = answer.json["data"]
    assert answer.json["events"] == [
        {"event": "UPDATE", "id": memory["id"], "text": "Ana lives in Bergen.",
         "previous_text": "Ana lives in Oslo.", "reason": "She moved.", "previous_id": "old"}
    ]  # fmt: skip
    assert answer.json["warning"] == "one turn is stored as it was said"
    assert given[0][0] == body["messages"]
    assert given[0][1]["said_at"] == "7 May 2023"
    plain = server.ask("POST", PATH, {"user_id": "ana", "text": "I moved.", "infer": False})
    assert (plain.json["events"], plain.json["warning"], len(given)) == (None, None, 1)
    assert server.ask("POST", PATH, {**body, "infer": "yes"}).status == 400


# chats --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("infers", "called"), [(True, "infer"), (False, "add")])
def test_facts_of_a_chat_are_extracted_where_it_asks_for_that(infers: bool, called: str) -> None:
    calls: list[Any] = []

    def noting(name: str) -> Any:
        async def note(caller: Any, scope: Any, said: Any) -> None:
            calls.append((name, scope, said))

        return note

    service: Any = SimpleNamespace(infer=noting("infer"), add=noting("add"))
    wanted = MemoryAsk(Scope("ana"), 5, "none", 0, True, infers=infers)
    said = [{"role": "user", "content": "I live in Oslo."}]
    turn = chat.Turn(wanted, Caller(), said, answer=["Fine."])
    asyncio.run(chat.finish(service, turn))
    assert calls == [(called, Scope("ana"), [*said, {"role": "assistant", "content": "Fine."}])]
