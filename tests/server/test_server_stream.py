"""An answer on its way back: `memory` is in the last chunk of a stream, and nothing else changes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscale.facts import Scope
from inferscale.server import chat
from inferscale.server.ask import MemoryAsk
from inferscale.server.chat import Turn
from inferscale.server.keys import OPERATOR
from inferscale.server.metrics import Metrics
from inferscale.server.stream import AnswerWithMemory

SSE = "text/event-stream; charset=utf-8"
SERVICE: Any = SimpleNamespace(injects=True, metrics=Metrics())
DONE = b"data: [DONE]\n\n"
TRICKY = 'He said "finish_reason":"stop" and "choices":[] and "error": {"x"} and data: [DONE]\n\nok \\" é'


def event(data: Mapping[str, Any], end: bytes = b"\n\n") -> bytes:
    """As vLLM writes it."""
    return b"data: " + json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode() + end


def chunk(text: str | None = None, finish: str | None = None, index: int = 0, **rest: Any) -> dict[str, Any]:
    delta = {} if text is None else {"content": text}
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
    return {"id": "1", "object": "chat.completion.chunk", "choices": [choice], **rest}


USAGE = {"id": "1", "choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}
FIRST = chunk("")


class Passed(NamedTuple):
    """bodies: of each message, in order."""

    start: dict[str, Any]
    bodies: list[bytes]
    answer: AnswerWithMemory
    turn: Turn

    @property
    def raw(self) -> bytes:
        return b"".join(self.bodies)

    @property
    def events(self) -> list[Any]:
        parts = self.raw.replace(b"\r\n", b"\n").split(b"\n\n")
        assert parts.pop() == b""
        return [
            part if part == b"data: [DONE]" else json.loads(part.removeprefix(b"data: ")) for part in parts
        ]


def passed(
    parts: Sequence[bytes],
    *,
    status: int = 200,
    kind: str = SSE,
    store: bool = True,
    may_retry: bool = False,
    **headers: str,
) -> Passed:
    ask = MemoryAsk(Scope("ana"), 5, "none", 0, store)
    turn = Turn(ask, OPERATOR, [])
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> AnswerWithMemory:
        answer = AnswerWithMemory(SERVICE, turn, send, may_retry=may_retry)
        pairs = {"Content-Type": kind, **{name.replace("_", "-"): value for name, value in headers.items()}}
        raw = [(name.encode(), value.encode()) for name, value in pairs.items()]
        await answer({"type": "http.response.start", "status": status, "headers": raw})
        for part in parts:
            await answer({"type": "http.response.body", "body": part, "more_body": True})
        await answer({"type": "http.response.body", "body": b""})
        return answer

    answer = asyncio.run(run())
    if answer.wants_retry:
        assert may_retry
        assert sent == []
        return Passed({}, [], answer, turn)
    assert [message["type"] for message in sent] == ["http.response.start"] + ["http.response.body"] * (
        len(sent) - 1
    )
    assert [message.get("more_body", False) for message in sent[1:]] == [True] * (len(sent) - 2) + [False]
    return Passed(sent[0], [message.get("body", b"") for message in sent[1:]], answer, turn)


def stream(*data: Mapping[str, Any], end: bytes = b"\n\n") -> list[bytes]:
    return [*(event(one, end) for one in data), DONE]


def check_memory(found: Passed, chunks: Sequence[Mapping[str, Any]], num_prompt: int | None = None) -> None:
    """All chunks are there, the last one has memory, and the answer is complete."""
    *events, done = found.events
    assert done == b"data: [DONE]"
    memory = events[-1].pop("memory")
    assert events == list(chunks)
    assert memory["prompt_tokens"] == num_prompt
    assert found.answer.is_complete


def test_the_last_chunk_has_the_memory() -> None:
    chunks = [FIRST, chunk("Hi"), chunk("!"), chunk(None, "stop")]
    found = passed(stream(*chunks))
    check_memory(found, chunks)
    assert "".join(found.turn.answer) == "Hi!"


def test_chunks_go_out_as_they_come() -> None:
    chunks = [event(FIRST), event(chunk("Hi"))]
    assert passed(chunks).bodies[:2] == chunks
    held = passed([event(chunk("Hi", "stop"))])
    assert held.bodies == [event(chunk("Hi", "stop"))], "kept until it is known to be the last"


def test_the_usage_is_the_last_chunk_where_there_is_one() -> None:
    chunks = [FIRST, chunk("Hi"), chunk(None, "stop"), USAGE]
    found = passed(stream(*chunks))
    check_memory(found, chunks, num_prompt=7)


def test_usage_in_every_chunk() -> None:
    chunks = [chunk("Hi", usage={"prompt_tokens": 7}), chunk(None, "stop", usage={"prompt_tokens": 8})]
    check_memory(passed(stream(*chunks), store=False), chunks, num_prompt=8)


def test_several_choices() -> None:
    chunks = [
        FIRST, chunk("a"), chunk("b", index=1), chunk(None, "stop", index=1), chunk("c"),
        chunk("d", "length"), USAGE,
    ]  # fmt: skip
    for some in (chunks, chunks[:-1]):
        found = passed(stream(*some))
        check_memory(found, some, num_prompt=7 if USAGE in some else None)
        assert found.turn.answer == ["", "a", "c", "d"], "of the first choice"


def test_a_text_that_looks_like_the_protocol() -> None:
    chunks = [chunk(TRICKY), chunk(TRICKY), chunk(TRICKY, "stop")]
    found = passed(stream(*chunks))
    check_memory(found, chunks)
    assert found.turn.answer == [TRICKY] * 3
    assert found.bodies[0] == event(chunk(TRICKY)), "it was not held"


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_chunks_may_be_cut_anywhere(end: bytes) -> None:
    chunks = [FIRST, chunk("Hé \n\n"), chunk(TRICKY), chunk(None, "stop"), USAGE]
    whole = b"".join(stream(*chunks, end=end))
    expected = passed([whole]).raw
    check_memory(passed([whole]), chunks, 7)
    for place in range(len(whole) + 1):
        assert passed([whole[:place], whole[place:]]).raw == expected
    found = passed([whole[n : n + 1] for n in range(len(whole))])
    assert found.raw == expected
    assert found.answer.is_complete


@settings(deadline=None)
@given(st.lists(st.integers(0, 600), max_size=12), st.booleans())
def test_chunks_may_be_cut_and_joined_in_any_way(places: list[int], with_usage: bool) -> None:
    chunks = [FIRST, chunk("a", "stop"), chunk("b", "length", index=1), *([USAGE] if with_usage else [])]
    whole = b"".join(stream(*chunks))
    cuts = sorted({0, len(whole), *(place for place in places if place < len(whole))})
    found = passed([whole[a:b] for a, b in zip(cuts, cuts[1:], strict=False)])
    check_memory(found, chunks, 7 if with_usage else None)


def test_other_ways_to_write_the_same() -> None:
    spaced = [b": ping\n\n", b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n']
    found = passed([*spaced, b"data:[DONE]\n\n"])
    assert found.answer.is_complete
    assert found.raw.startswith(b": ping\n\n")
    assert b'"memory"' in found.raw


def test_what_the_connector_told_goes_no_further() -> None:
    last = chunk(None, "stop", kv_transfer_params={"inferscale": {"captured": 1}, "other": 1})
    found = passed(stream(last))
    assert found.events[0]["kv_transfer_params"] == {"other": 1}


# what is no whole good answer -------------------------------------------------------------------

ERROR = {"error": {"message": "the engine has died", "type": "InternalServerError", "code": 500}}


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b""],
        [event(FIRST), event(chunk("Hi"))],
        [event(FIRST), event(chunk("Hi", "stop"))],
        [event(FIRST), event(chunk("Hi", "stop")), event(USAGE), b"data: [DON"],
        [event(FIRST), event(ERROR), DONE],
        [event(FIRST), event(ERROR), event(chunk(None, "stop")), DONE],
        [event(chunk("Hi", "stop")), event(ERROR), DONE],
        [event(ERROR), DONE],
        [event(FIRST), DONE],
        [DONE],
        [b'data: {"choices":[],"usage', b"\n\n", DONE],
        [b'data: ["finish_reason":"stop"]\n\n', DONE],
        [b"data: \xff\xfe\n\n", DONE],
        [b"not a stream at all"],
    ],
)
def test_goes_out_as_it_is_and_is_not_complete(parts: list[bytes]) -> None:
    for split in (parts, [bytes([byte]) for byte in b"".join(parts)]):
        found = passed(split)
        assert found.raw == b"".join(parts)
        assert not found.answer.is_complete


def test_strange_chunks_do_not_end_the_stream() -> None:
    strange = [{"choices": [None]}, {"choices": 5}, {"choices": [{"index": 0, "delta": 5}]}, {"usage": 5}]
    chunks = [*strange, chunk("Hi"), chunk(None, "stop")]
    found = passed(stream(*chunks))
    assert found.turn.answer == ["Hi"]
    assert found.events[-2]["choices"] == chunks[-1]["choices"]


def test_memory_that_cannot_be_told_does_not_cost_the_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(*_: object) -> Any:
        raise RuntimeError("the password is plum")

    monkeypatch.setattr(chat, "use_of", fails)
    parts = stream(FIRST, chunk("Hi", "stop"))
    whole = json.dumps({"choices": [{"message": {"content": "Hi"}}]}).encode()
    with caplog.at_level(logging.ERROR):
        assert passed(parts).raw == b"".join(parts)
        assert passed([whole], kind="application/json").raw == whole
    assert len(caplog.records) == 2
    assert "the password is plum" not in caplog.records[0].getMessage().replace('RuntimeError("the', "")


# what may be asked again ------------------------------------------------------------------------


@pytest.mark.parametrize("part", [[event(FIRST), event(ERROR), DONE], [event(ERROR), DONE], [event(ERROR)]])
def test_an_error_before_the_first_token_is_kept_back(part: list[bytes]) -> None:
    whole = b"".join(part)
    for split in (part, [whole], [bytes([byte]) for byte in whole]):
        assert passed(split, may_retry=True).answer.wants_retry
    raw = json.dumps(ERROR).encode()
    assert passed([raw], status=500, kind="application/json", may_retry=True).answer.wants_retry
    assert not passed([raw], status=400, kind="application/json", may_retry=True).answer.wants_retry


@pytest.mark.parametrize(
    "begun",
    [
        [event(FIRST), event(chunk("Hi"))],
        [event(chunk("Hi"))],
        [b": ping\n\n"],
        [event(chunk("", "stop"))],
        [event(USAGE)],
    ],
)
def test_an_error_behind_what_went_out_is_told(begun: list[bytes]) -> None:
    parts = [*begun, event(ERROR), DONE]
    found = passed(parts, may_retry=True)
    assert not found.answer.wants_retry
    assert found.raw == b"".join(parts)


def test_a_good_stream_is_the_same_where_it_may_be_asked_again() -> None:
    chunks = [FIRST, chunk("Hi"), chunk("!"), chunk(None, "stop"), USAGE]
    for parts in (stream(*chunks), [b"".join(stream(*chunks))], stream(*chunks[:1]), stream(FIRST)[:1]):
        once, twice = passed(parts), passed(parts, may_retry=True)
        assert (twice.start, twice.raw) == (once.start, once.raw)
    assert passed(stream(*chunks), may_retry=True).bodies[0] == event(FIRST) + event(chunk("Hi"))


# whole answers ----------------------------------------------------------------------------------

WHOLE = {
    "id": "1",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": TRICKY}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 9},
    "kv_transfer_params": {"inferscale": {}},
}


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "Application/JSON"])
def test_an_answer_at_once(kind: str) -> None:
    raw = json.dumps(WHOLE).encode()
    for parts in ([raw], [raw[:10], raw[10:]], [raw[n : n + 1] for n in range(len(raw))]):
        found = passed(parts, kind=kind, content_length=str(len(raw)), x_request_id="7")
        body = json.loads(found.raw)
        assert body.pop("memory")["prompt_tokens"] == 9
        assert body == WHOLE | {"kv_transfer_params": None}
        assert dict(found.start["headers"])[b"content-length"] == str(len(found.raw)).encode()
        assert dict(found.start["headers"])[b"x-request-id"] == b"7"
        assert len([name for name, _ in found.start["headers"] if name.lower() == b"content-length"]) == 1
        assert found.answer.is_complete
        assert found.turn.answer == [TRICKY]


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"null", b"5", b"[]", b"{}", b'"choices"', b'{"choices": {}}', b'{"choices": null}', b"\xff",
        b'{"choices": [', json.dumps(ERROR).encode(), json.dumps({"choices": [], **ERROR}).encode(),
        b'{"choices": [5]}', b'{"choices": [{"message": 5}]}', b'{"choices": [], "usage": 5}',
        b'{"a":' * 3000,
    ],
)  # fmt: skip
def test_what_is_no_answer_goes_out_as_it_is(raw: bytes) -> None:
    found = passed([raw[:1], raw[1:]], kind="application/json", content_length=str(len(raw)))
    assert found.raw == raw
    assert dict(found.start["headers"])[b"content-length"] == str(len(raw)).encode()
    assert not found.answer.is_complete


@pytest.mark.parametrize("status", [400, 404, 500, 503])
@pytest.mark.parametrize("kind", ["application/json", SSE, "text/plain"])
def test_errors_pass(status: int, kind: str) -> None:
    raw = json.dumps(WHOLE).encode()
    found = passed([raw], status=status, kind=kind)
    assert (found.raw, found.start["status"]) == (raw, status)
    assert not found.answer.is_complete


def test_other_kinds_pass() -> None:
    found = passed([b"data: {}\n\n", b"x"], kind="text/html")
    assert found.bodies == [b"data: {}\n\n", b"x", b""]
    assert not found.answer.is_complete


def test_a_stream_has_no_length() -> None:
    found = passed(stream(FIRST, chunk("Hi", "stop")), content_length="10")
    assert [name for name, _ in found.start["headers"]] == [b"Content-Type"]
