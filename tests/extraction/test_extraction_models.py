"""Models for extraction: over HTTP and over an offline engine, with stand-ins for both."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from inferscale import extract_runner
from inferscale.errors import EngineError, ExtractionError, InvalidConfig, InvalidInput
from inferscale.extract_runner import EngineExtraction
from inferscale.extraction import OpenAIModel, read_object, with_schema
from inferscale.offline import Generation, GenerationRequest

MESSAGES = [{"role": "system", "content": "Be exact."}, {"role": "user", "content": "What?"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    "text", ['{"a": 1}', 'Sure:\n```json\n{"a": 1}\n```', ' {"a": 1} and {"b": 2}', '{"a": 1}}']
)
def test_an_object_is_read(text: str) -> None:
    assert read_object(text) == {"a": 1}


@pytest.mark.parametrize("text", ["", "no", "[1]", '{"a": ', '{"a": 1', "{a: 1}", '{"a":' * 100_000])
def test_what_is_no_object(text: str) -> None:
    with pytest.raises(ExtractionError):
        read_object(text)


# HTTP ---------------------------------------------------------------------------------------------


def completion(text: Any) -> httpx.Response:
    return httpx.Response(200, json={"choices": [{"message": {"content": text}}]})


def over_http(answer: Callable[[dict[str, Any]], httpx.Response]) -> tuple[OpenAIModel, list[Any]]:
    seen: list[Any] = []

    def handle(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        seen.append((str(request.url), request.headers.get("authorization"), body))
        return answer(body)

    client = httpx.Client(transport=httpx.MockTransport(handle))
    return OpenAIModel("http://there/v1/", "tiny", api_key="k", http_client=client), seen


def test_a_server_holds_the_answer_to_the_schema() -> None:
    model, seen = over_http(lambda body: completion('{"a": 1}'))
    assert model.complete(MESSAGES, SCHEMA, 9, 0.5) == {"a": 1}
    [(url, key, body)] = seen
    assert (url, key) == ("http://there/v1/chat/completions", "Bearer k")
    assert body["response_format"]["json_schema"]["schema"] == SCHEMA
    assert (body["model"], body["messages"], body["max_tokens"], body["temperature"]) == (
        "tiny",
        MESSAGES,
        9,
        0.5,
    )


def test_a_server_without_schemas_is_shown_the_schema() -> None:
    model, seen = over_http(
        lambda body: httpx.Response(400) if "response_format" in body else completion('Well: {"a": 1}')
    )
    assert model.complete(MESSAGES, SCHEMA, 99) == {"a": 1}
    assert model.complete(MESSAGES, SCHEMA, 99) == {"a": 1}
    assert ["response_format" in body for _, _, body in seen] == [True, False, False]
    assert seen[1][2]["messages"] == with_schema(MESSAGES, SCHEMA)
    assert json.dumps(SCHEMA) in seen[1][2]["messages"][1]["content"]


def test_an_answer_without_an_end_is_given_up() -> None:
    pieces = 0

    def drip() -> Iterator[bytes]:
        nonlocal pieces
        while True:
            pieces += 1
            yield b" " * 2**16

    model, _ = over_http(lambda body: httpx.Response(200, content=drip()))
    with pytest.raises(ExtractionError, match="too slowly or too much"):
        model.complete(MESSAGES, SCHEMA, 9)
    assert pieces < 20


def test_a_slow_answer_is_given_up() -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=iter([b"{", b"}"]))

    client = httpx.Client(transport=httpx.MockTransport(handle))
    model = OpenAIModel("http://there/v1", "m", timeout_s=-1.0, http_client=client)
    with pytest.raises(ExtractionError, match="too slowly"):
        model.complete(MESSAGES, SCHEMA, 9)


def test_a_server_that_refuses_everything_is_asked_with_a_schema_again() -> None:
    model, seen = over_http(lambda body: httpx.Response(400, text="secret"))
    for _ in range(2):
        with pytest.raises(ExtractionError, match="HTTP 400") as failed:
            model.complete(MESSAGES, SCHEMA, 99)
        assert "secret" not in str(failed.value)
    assert ["response_format" in body for _, _, body in seen] == [True, False] * 2


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(500),
        httpx.Response(401),
        httpx.Response(200, text="no JSON"),
        httpx.Response(200, json=[]),
        httpx.Response(200, json={"choices": []}),
        completion(None),
        completion("no object"),
    ],
)
def test_an_answer_that_cannot_be_used(answer: httpx.Response) -> None:
    model, _ = over_http(lambda body: answer)
    with pytest.raises(ExtractionError):
        model.complete(MESSAGES, SCHEMA, 99)


def test_a_server_that_does_not_answer() -> None:
    def fail(body: Any) -> httpx.Response:
        raise httpx.ReadTimeout("slow")

    model, _ = over_http(fail)
    with pytest.raises(ExtractionError, match="did not answer: ReadTimeout"):
        model.complete(MESSAGES, SCHEMA, 99)
    with pytest.raises(InvalidConfig, match="base_url is 'there'"):
        OpenAIModel("there", "tiny")


# the offline engine -------------------------------------------------------------------------------


def over_engine(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[GenerationRequest], str], num_tokens: int = 10
) -> tuple[EngineExtraction, list[GenerationRequest], list[Sequence[Any]]]:
    monkeypatch.setattr(extract_runner, "schema_sampling", lambda schema: {"structured_outputs": schema})
    sent: list[GenerationRequest] = []
    built: list[Sequence[Any]] = []

    def build(messages: Sequence[Any], template_kwargs: Any) -> Any:
        built.append(messages)
        return SimpleNamespace(token_ids=tuple(range(num_tokens)))

    def generate(request: GenerationRequest) -> Generation:
        sent.append(request)
        text = answer(request)
        return Generation(text, (1,), 0.0, 0.0, 0, None, "error" if text == "error" else "stop")

    model = EngineExtraction(SimpleNamespace(build=build), generate, 200)  # type: ignore[arg-type]
    return model, sent, built


def test_the_engine_holds_the_answer_to_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sent, built = over_engine(monkeypatch, lambda request: '{"a": 1}')
    assert model.complete(MESSAGES, SCHEMA, 1024, 0.5) == {"a": 1}
    assert built == [MESSAGES]
    assert sent == [GenerationRequest(tuple(range(10)), 190, None, 0.5, {"structured_outputs": SCHEMA})]


def test_an_engine_without_schemas_is_shown_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: GenerationRequest) -> str:
        if request.sampling:
            raise InvalidInput("vLLM does not take these sampling settings: no backend")
        return '{"a": 1}'

    model, sent, built = over_engine(monkeypatch, answer)
    assert [model.complete(MESSAGES, SCHEMA, 99) for _ in range(2)] == [{"a": 1}] * 2
    assert [bool(request.sampling) for request in sent] == [True, False, False]
    assert built[1:] == [with_schema(MESSAGES, SCHEMA)] * 2
    monkeypatch.setattr(extract_runner, "schema_sampling", lambda schema: {})  # an older vLLM
    older, sent, built = over_engine(monkeypatch, answer)
    monkeypatch.setattr(extract_runner, "schema_sampling", lambda schema: {})
    assert older.complete(MESSAGES, SCHEMA, 99) == {"a": 1}
    assert built == [with_schema(MESSAGES, SCHEMA)]


def test_an_engine_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(error: Exception) -> Callable[[GenerationRequest], str]:
        def answer(request: GenerationRequest) -> str:
            raise error

        return answer

    for answer in (fail(EngineError("gone")), fail(InvalidInput("no")), lambda request: "error"):
        model, _, _ = over_engine(monkeypatch, answer)
        with pytest.raises(ExtractionError):
            model.complete(MESSAGES, SCHEMA, 99)
    model, sent, _ = over_engine(monkeypatch, lambda request: "{}", num_tokens=150)
    with pytest.raises(ExtractionError, match="the prompt has 150 tokens"):
        model.complete(MESSAGES, SCHEMA, 99)
    assert sent == []
