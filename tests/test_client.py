"""Both clients against the contract of docs/server.md: every method, streams, paging, quoting."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import inferscale
from fake_memory_api import Caller, FakeMemoryApi, served, stream_of
from inferscale import AsyncClient, Client, Tail, Turn
from inferscale.client import (
    BadRequest,
    Change,
    ChatReply,
    ConnectionFailed,
    HistoryEvent,
    Memory,
    MemoryUse,
    NotFound,
    UsedFact,
)
from inferscale.client.answers import StreamReader
from inferscale.errors import InvalidInput


@pytest.fixture
def api() -> FakeMemoryApi:
    return FakeMemoryApi()


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(kind: str, api: FakeMemoryApi) -> Any:
    return Caller(kind, handler=api)


def test_a_text_is_added_with_all_that_belongs_to_it(client: Any, api: FakeMemoryApi) -> None:
    added = client.add(
        "My sister lives in Oslo.",
        user_id="ana",
        run_id="7",
        speaker="Ana",
        said_at="3 May",
        metadata={"source": "chat"},
    )
    assert added.pending == 3
    assert added.memories == (
        Memory(
            id="m0",
            text="My sister lives in Oslo.",
            user_id="ana",
            run_id="7",
            speaker="Ana",
            said_at="3 May",
            metadata={"source": "chat"},
            created_at=1.5,
            updated_at=1.5,
            injectable=False,
        ),
    )
    assert api.requests[0][:3] == ("POST", "/v1/memories", {})
    assert set(api.requests[0][3]) == {"text", "user_id", "run_id", "speaker", "said_at", "metadata"}


def test_messages_and_items_are_added(client: Any, api: FakeMemoryApi) -> None:
    messages = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi."}]
    added = client.add(messages=messages, agent_id="bot")
    assert [memory.speaker for memory in added.memories] == ["user", "assistant"]

    turn = Turn("It rains.", "Bo", "today", {"n": 1})
    added = client.add(items=["Plain.", turn, {"text": "As is.", "speaker": "Cy"}], user_id="ana")
    assert [(each.text, each.speaker) for each in added.memories] == [
        ("Plain.", None),
        ("It rains.", "Bo"),
        ("As is.", "Cy"),
    ]
    assert api.requests[-1][3]["items"][1] == {
        "text": "It rains.",
        "speaker": "Bo",
        "said_at": "today",
        "metadata": {"n": 1},
    }


@pytest.mark.parametrize("given", [{}, {"text": "a", "items": ["b"]}])
def test_add_takes_exactly_one_content(client: Any, api: FakeMemoryApi, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="one of text, messages and items"):
        client.add(**given, user_id="ana")
    assert not api.requests


def test_extraction_says_what_became_of_each_fact(client: Any, api: FakeMemoryApi) -> None:
    added = client.add(messages=[{"role": "user", "content": "It is so."}], user_id="ana", infer=True)
    assert api.requests[-1][3]["infer"] is True
    assert added.events == (Change("UPDATE", "m0", "It is so.", "It was so.", None, "old"),)
    assert added.warning is None
    plain = client.add("It is so.", user_id="ana")
    assert "infer" not in api.requests[-1][3]
    assert plain.events == ()


def test_search_gives_memories_with_scores(client: Any, api: FakeMemoryApi) -> None:
    client.add(items=["a red cat", "a red dog", "the sea"], user_id="ana")
    (best,) = client.search("red dog", user_id="ana", top_k=1)
    assert (best.memory.text, best.score) == ("a red dog", 1.0)
    assert client.search("red", agent_id="nobody") == []
    assert api.requests[-1][3] == {"query": "red", "top_k": 10, "agent_id": "nobody"}


def test_one_memory_is_read_changed_and_deleted(client: Any, api: FakeMemoryApi) -> None:
    client.add("It rains.", user_id="ana", speaker="Ana")
    assert client.get("m0").text == "It rains."
    updated = client.update("m0", text="It snows.", metadata={})
    assert (updated.text, updated.speaker) == ("It snows.", "Ana")
    assert api.requests[-1][3] == {"text": "It snows.", "metadata": {}}
    assert client.update("m0", speaker=None, said_at="today").speaker is None
    assert api.requests[-1][3] == {"speaker": None, "said_at": "today"}
    assert client.history("m0") == [
        HistoryEvent("ADD", "It rains.", None, 1.5),
        HistoryEvent("UPDATE", "It snows.", "It rains.", 2.5),
        HistoryEvent("UPDATE", "It snows.", "It snows.", 2.5),
    ]
    assert client.delete("m0") == 1
    for method in (client.get, client.delete, client.history):
        with pytest.raises(NotFound, match=r"no memory has the id 'm0' \(HTTP 404\)$"):
            method("m0")


def test_an_update_of_nothing_is_refused(client: Any, api: FakeMemoryApi) -> None:
    with pytest.raises(InvalidInput, match="changes nothing"):
        client.update("m0")
    assert not api.requests


def test_pages_and_the_iterator_over_all(client: Any, api: FakeMemoryApi) -> None:
    client.add(items=[str(number) for number in range(5)], user_id="ana")
    page = client.list(user_id="ana", limit=2)
    assert ([each.text for each in page.memories], page.has_more, page.next_cursor) == (
        ["0", "1"],
        True,
        "c2",
    )
    page = client.list(user_id="ana", limit=2, after="c4")
    assert ([each.text for each in page.memories], page.has_more, page.next_cursor) == (["4"], False, None)

    del api.requests[:]
    assert [each.text for each in client.iter_all(user_id="ana", limit=2)] == ["0", "1", "2", "3", "4"]
    assert [query.get("after") for _, _, query, _ in api.requests] == [None, "c2", "c4"]
    assert client.iter_all(user_id="nobody") == []


def test_a_scope_is_deleted(client: Any, api: FakeMemoryApi) -> None:
    client.add(items=["a", "b"], user_id="ana")
    client.add("c", user_id="bo")
    assert client.delete_all(user_id="ana") == 2
    assert [memory["text"] for memory in api.memories.values()] == ["c"]
    with pytest.raises(BadRequest, match="no scope"):
        client.delete_all()


def test_warm_stats_and_injection(client: Any, api: FakeMemoryApi) -> None:
    client.add(items=["a", "b"], user_id="ana")
    assert client.warm() == 2
    assert client.warm(user_id="bo") == 0
    assert client.set_injection(False) is False
    stats = client.stats(user_id="ana")
    assert (stats.facts, stats.injectable, stats.injection, stats.pool) == (2, None, False, {"pages": 8})
    assert client.stats(run_id="none").facts == 0
    assert client.set_injection(enabled=True) is True


def test_a_chat_with_memory(client: Any, api: FakeMemoryApi) -> None:
    client.add("It rains.", user_id="ana")
    reply = client.chat(
        "Hello", user_id="ana", top_k=5, mode="text", tail=1, store=True, extra={"max_tokens": 4}
    )
    assert isinstance(reply, ChatReply)
    assert (reply.text, reply.finish_reason, reply.raw["id"]) == ("You said: Hello", "stop", "chat-1")
    assert reply.memory == MemoryUse(
        mode="text",
        facts=(UsedFact("m0", "It rains.", score=0.5),),
        prompt_tokens=20,
        injected_tokens=12,
        prefilled_tokens=8,
        missing_tokens=2,
        stored=True,
        timings_ms={"embed": 0.9},
    )
    assert api.requests[-1][3] == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hello"}],
        "memory": {"user_id": "ana", "top_k": 5, "mode": "text", "tail": 1, "store": True},
        "max_tokens": 4,
    }


def test_a_tail_goes_as_a_number_or_as_text(client: Any, api: FakeMemoryApi) -> None:
    for tail, sent in ((0, 0), ("10%", "10%"), (Tail(5, share=0.1), "5,10%")):
        client.chat("Hello", user_id="ana", tail=tail)
        assert api.requests[-1][3]["memory"] == {"user_id": "ana", "tail": sent}


def test_an_order_goes_along(client: Any, api: FakeMemoryApi) -> None:
    client.chat("Hello", user_id="ana", order="session")
    assert api.requests[-1][3]["memory"] == {"user_id": "ana", "order": "session"}


def test_a_chat_without_memory_and_with_a_model_by_name(client: Any, api: FakeMemoryApi) -> None:
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"})
    assert client.chat(messages, model="tiny").memory is None
    assert [path for _, path, _, _ in api.requests] == ["/v1/chat/completions"]
    assert api.requests[0][3] == {"model": "tiny", "messages": list(messages)}
    with pytest.raises(NotFound) as caught:
        client.chat("Hello", model="other")
    assert caught.value.type == "NotFoundError"
    assert "memory API" not in str(caught.value)


def test_the_model_is_asked_for_once(api: FakeMemoryApi) -> None:
    http = httpx.Client(transport=httpx.MockTransport(api))
    with http, Client(http_client=http) as client:
        client.chat("a")
        client.chat("b", user_id="ana")
        list(client.stream_chat("c"))
    assert [path for _, path, _, _ in api.requests].count("/v1/models") == 1


@pytest.mark.parametrize("name", ["messages", "model", "memory", "stream"])
def test_extra_holds_no_arguments(client: Any, name: str) -> None:
    with pytest.raises(InvalidInput, match=f"extra holds {name}"):
        client.chat("Hello", extra={name: None})


def test_a_stream_gives_pieces_and_then_the_reply(client: Any, api: FakeMemoryApi) -> None:
    client.add("It rains.", user_id="ana")
    # U+2028 and U+0085 are line breaks for str.splitlines and none for a stream of events.
    pieces, reply = client.stream_chat("så\u2028dan\u0085 – 雨", user_id="ana", extra={"temperature": 0})
    assert pieces == ["You", " said:", " så\u2028dan\u0085", " –", " 雨"]
    assert (reply.text, reply.finish_reason) == ("You said: så\u2028dan\u0085 – 雨", "stop")
    assert (reply.memory.mode, reply.memory.facts[0].text) == ("inject", "It rains.")
    assert reply.raw["memory"]["mode"] == "inject"
    assert api.requests[-1][3]["stream"] is True


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_stream_may_be_cut_anywhere(size: int, end: str) -> None:
    data = stream_of({"id": "x"}, "You said: så – 雨", {"mode": "inject"})
    data = data.replace(b"\n", end.encode())
    reader = StreamReader()
    pieces = [
        piece for first in range(0, len(data), size) for piece in reader.feed(data[first : first + size])
    ]
    reader.finish()
    assert pieces == ["You", " said:", " så", " –", " 雨"]
    assert reader.memory == MemoryUse("inject")


def test_a_stream_is_closed_before_its_end(api: FakeMemoryApi) -> None:
    closed = []

    class Stream(httpx.SyncByteStream, httpx.AsyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield stream_of({"id": "x"}, "You said", None)[:-60]
            raise AssertionError("more was read than asked for")

        async def __aiter__(self) -> Any:
            for each in self:
                yield each

        def close(self) -> None:
            closed.append("sync")

        async def aclose(self) -> None:
            closed.append("async")

    transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=Stream()))

    with httpx.Client(transport=transport) as http:
        client = Client(http_client=http)
        with client.stream_chat("Hello", model="tiny") as stream:
            assert next(iter(stream)) == "You"
        assert (stream.text, stream.memory, stream.finish_reason) == ("You", None, None)
        assert stream.reply().text == "You"

    async def give_up() -> None:
        async with httpx.AsyncClient(transport=transport) as http:
            async with AsyncClient(http_client=http).stream_chat("Hello", model="tiny") as stream:
                assert await anext(aiter(stream)) == "You"
            assert (await stream.reply()).text == "You"

    asyncio.run(give_up())
    assert closed == ["sync", "async"]


@pytest.mark.parametrize("memory_id", ["a/b", "../x", "a b?c#d", "naïve – 雨", "100%", "%2F", "a+b", "..."])
def test_ids_are_quoted_in_paths(client: Any, api: FakeMemoryApi, memory_id: str) -> None:
    api.store({"user_id": "ana"}, {}, {"text": "It rains."}, id=memory_id)
    assert client.get(memory_id).id == memory_id
    assert client.history(memory_id)[0].text == "It rains."
    assert client.update(memory_id, text="It snows.").text == "It snows."
    assert client.delete(memory_id) == 1
    assert all(path.isascii() and path.count("/") <= 4 for _, path, _, _ in api.requests)


def test_scopes_and_cursors_are_quoted_in_queries(client: Any, api: FakeMemoryApi) -> None:
    user = "a&b=c d/é+%20#雨"
    client.add("It rains.", user_id=user)
    assert client.list(user_id=user, after="c0").memories[0].user_id == user
    assert client.delete_all(user_id=user) == 1


def test_half_a_surrogate_pair_reaches_the_server(client: Any, api: FakeMemoryApi) -> None:
    client.add("half \ud83d", user_id="ana")  # which says what it makes of it
    assert api.requests[0][3]["text"] == "half \ud83d"


def test_over_a_socket(kind: str, api: FakeMemoryApi) -> None:
    with served(api) as url:
        client = Caller(kind, base_url=url)
        client.add("It rains.", user_id="ana")
        pieces, reply = client.stream_chat("så – 雨", user_id="ana")
        assert ("".join(pieces), reply.memory.facts[0].text) == ("You said: så – 雨", "It rains.")
    with pytest.raises(ConnectionFailed, match="no connection"):
        client.stats()


def test_clients_of_their_own_are_closed_and_others_are_not() -> None:
    client = Client(timeout_s=5)
    assert repr(client) == "Client('http://127.0.0.1:8000')"
    with client:
        assert client._http.timeout == httpx.Timeout(5)
    assert client._http.is_closed
    with httpx.Client() as http:
        Client(http_client=http).close()
        assert not http.is_closed

    async def run() -> None:
        client = AsyncClient()
        assert repr(client) == "AsyncClient('http://127.0.0.1:8000')"
        async with client:
            assert client._http.timeout == httpx.Timeout(600, connect=10)
        assert client._http.is_closed

    asyncio.run(run())


def test_both_clients_have_the_same_methods() -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        found = inspect.getmembers(kind, inspect.isfunction)
        return {name: list(inspect.signature(each).parameters) for name, each in found if name[0] != "_"}

    sync, both = methods(Client), methods(AsyncClient)
    assert both.pop("aclose") == sync.pop("close")
    assert sync == both
    assert next(iter(inspect.signature(Client().search).parameters)) == "query"
    assert inspect.signature(Client.get).return_annotation == "Memory"
    assert inspect.signature(AsyncClient.stream_chat).return_annotation == "AsyncChatStream"
    for name in sync:
        assert getattr(Client, name).__doc__


def test_importing_the_package_loads_no_http_client() -> None:
    code = (
        "import sys, inferscale; first = 'httpx' in sys.modules; inferscale.Client; "
        "print(first, [name for name in ('torch', 'vllm', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False []"
    assert inferscale.Client is Client
