"""The MCP tools through the SDK's own client: in memory, and over the stdio of `inferscale mcp`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from fake_memory_api import FakeMemoryApi, served
from inferscale.cli.app import main
from inferscale.client import AsyncClient
from inferscale.facts import Scope

mcp = pytest.importorskip("mcp")
from mcp import StdioServerParameters  # noqa: E402

from inferscale.mcp_server import build_server  # noqa: E402

Use = Callable[[Any], Awaitable[None]]


@pytest.fixture
def api() -> FakeMemoryApi:
    return FakeMemoryApi()


def connected(api: FakeMemoryApi, use: Use, scope: Scope = Scope("ana")) -> None:  # noqa: B008
    """`use` with an MCP session of a server that has the memory of `scope`."""

    async def run() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(api)) as http:
            server = build_server(AsyncClient(http_client=http), scope)
            async with mcp.Client(server) as session:
                await use(session)

    asyncio.run(run())


async def result_of(session: Any, tool: str, **arguments: Any) -> Any:
    answer = await session.call_tool(tool, arguments)
    assert not answer.is_error, answer.content
    content = answer.structured_content
    return content["result"] if set(content) == {"result"} else content


async def error_of(session: Any, tool: str, **arguments: Any) -> str:
    answer = await session.call_tool(tool, arguments)
    assert answer.is_error
    return str(answer.content[0].text)


def test_the_tools_are_described_and_take_no_scope(api: FakeMemoryApi) -> None:
    async def use(session: Any) -> None:
        tools = {tool.name: tool for tool in (await session.list_tools()).tools}
        assert set(tools) == {"add_memory", "search_memory", "list_memories", "delete_memory"}
        for tool in tools.values():
            properties = tool.input_schema["properties"]
            assert not {"user_id", "agent_id", "run_id"} & set(properties)
            assert tool.description
            assert all(each["description"] for each in properties.values())
        assert tools["search_memory"].annotations.read_only_hint is True
        assert tools["add_memory"].annotations.destructive_hint is False
        assert tools["delete_memory"].annotations.destructive_hint is True

    connected(api, use)


def test_memories_are_added_found_listed_and_deleted(api: FakeMemoryApi) -> None:
    async def use(session: Any) -> None:
        (added,) = await result_of(session, "add_memory", text="a red cat", speaker="Ana", said_at="today")
        assert added == {"id": "m0", "text": "a red cat", "speaker": "Ana", "said_at": "today"}
        await result_of(session, "add_memory", text="a blue dog")

        (found,) = await result_of(session, "search_memory", query="blue dog", top_k=1)
        assert (found["id"], found["text"], found["score"]) == ("m1", "a blue dog", 1.0)

        first = await result_of(session, "list_memories", limit=1)
        assert [each["id"] for each in first["memories"]] == ["m0"]
        rest = await result_of(session, "list_memories", after=first["next_cursor"])
        assert ([each["id"] for each in rest["memories"]], rest["next_cursor"]) == (["m1"], None)

        assert await result_of(session, "delete_memory", memory_id="m0") == "Deleted m0."
        assert await result_of(session, "search_memory", query="cat", top_k=5) == [{**found, "score": 0.0}]

    connected(api, use)
    assert [memory["user_id"] for memory in api.memories.values()] == ["ana"]


def test_filters_go_to_the_memory_api(api: FakeMemoryApi) -> None:
    filters = {"topic": "travel", "rating": {"gte": 3}}

    async def use(session: Any) -> None:
        await result_of(session, "search_memory", query="cat", filters=filters)
        await result_of(session, "list_memories", filters=filters)
        await result_of(session, "search_memory", query="cat")

    connected(api, use)
    (_, _, _, searched), (_, _, listed, _), (_, _, _, plain) = api.requests
    assert searched["filters"] == filters
    assert json.loads(listed["filters"]) == filters
    assert "filters" not in plain


def test_memories_of_others_are_not_reached(api: FakeMemoryApi) -> None:
    api.store({"user_id": "bo", "agent_id": "bot"}, {}, {"text": "a secret of Bo"})
    api.store({"user_id": "ana", "agent_id": "bot"}, {}, {"text": "of Ana and the bot"})

    async def use(session: Any) -> None:
        assert [each["id"] for each in await result_of(session, "search_memory", query="secret")] == ["m1"]
        message = await error_of(session, "delete_memory", memory_id="m0")
        assert "no memory has the id 'm0'" in message
        assert "Bo" not in message
        await session.call_tool("add_memory", {"text": "hello", "user_id": "bo"})

    connected(api, use)
    assert {memory["id"]: memory["user_id"] for memory in api.memories.values()} == {
        "m0": "bo",
        "m1": "ana",
        "m2": "ana",
    }


def test_errors_are_told_to_the_model(api: FakeMemoryApi) -> None:
    async def use(session: Any) -> None:
        assert "the text is blank" in await error_of(session, "add_memory", text=" ")
        assert "no memory has the id 'x/y'" in await error_of(session, "delete_memory", memory_id="x/y")
        assert "is not the id of a memory" in await error_of(session, "delete_memory", memory_id="")
        assert "top_k" in await error_of(session, "search_memory", query="a", top_k=0)

    connected(api, use)
    api.api_key = "secret"

    async def use_without_key(session: Any) -> None:
        assert "Unauthorized (HTTP 401)" in await error_of(session, "list_memories")

    connected(api, use_without_key)


def test_the_command_speaks_mcp_over_stdio() -> None:
    api = FakeMemoryApi(api_key="secret")

    async def run(url: str) -> None:
        command = ["-m", "inferscale.cli", "mcp", "--url", url, "--api-key-env", "A_KEY", "--run-id", "7"]
        environment = {**os.environ, "A_KEY": "secret\n"}
        async with mcp.Client(
            StdioServerParameters(command=sys.executable, args=command, env=environment)
        ) as session:
            await result_of(session, "add_memory", text="It rains – 雨.")
            (found,) = await result_of(session, "search_memory", query="rains")
            assert found["text"] == "It rains – 雨."

    with served(api) as url:
        asyncio.run(run(url))
    assert [memory["run_id"] for memory in api.memories.values()] == ["7"]


def test_what_the_command_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def error(*arguments: str) -> str:
        result = CliRunner().invoke(main, ["mcp", *arguments])
        assert result.exit_code == 1
        assert result.stderr.count("\n") == 1
        return result.stderr

    monkeypatch.delenv("A_KEY", raising=False)
    assert "no scope was given" in error()
    assert "A_KEY, named by --api-key-env, is not set" in error("--user-id", "ana", "--api-key-env", "A_KEY")
    assert "the server's URL is 'nowhere'" in error("--user-id", "ana", "--url", "nowhere")
    monkeypatch.delitem(sys.modules, "inferscale.mcp_server")
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    assert 'Install it: pip install "inferscale[mcp]"' in error("--user-id", "ana")
