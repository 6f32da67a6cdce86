"""The memory of one scope as tools of the Model Context Protocol, through a client of the memory API.

The model chooses texts, queries and ids, never whose memory it is: the scope is given to `build_server`, and
an id of another scope is not found. Needs the official SDK (`pip install "inferscale[mcp]"`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import anyio
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import BaseModel, Field

from inferscale.client import AsyncClient, Memory
from inferscale.errors import InferScaleError
from inferscale.facts import Scope

_INSTRUCTIONS = (
    "Long-term memory of this user. Search it before you answer what may depend on earlier conversations; "
    "add what will be worth knowing later, one self-contained statement at a time."
)

_FILTERS = (
    "Only memories that pass, by metadata, speaker, created_at, updated_at or happened_at, such as "
    '{"topic": "travel"} or {"rating": {"gte": 3}, "happened_at": {"lt": "2023-06-01"}}. '
    "Tests: eq, ne, in, nin, gt, gte, lt, lte, contains, icontains; joined by AND, OR, NOT."
)

_READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
_ADDS = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=False)
_DELETES = ToolAnnotations(read_only_hint=False, destructive_hint=True, open_world_hint=False)


class Shown(BaseModel):
    """A memory as the model sees it."""

    id: str
    text: str
    speaker: str | None
    said_at: str | None


class Found(Shown):
    score: float


class Listed(BaseModel):
    memories: list[Shown]
    next_cursor: str | None


def serve(client: AsyncClient, scope: Scope) -> None:
    """Speak MCP on stdin and stdout until stdin ends."""

    async def run() -> None:
        async with client:
            await build_server(client, scope).run_stdio_async()

    anyio.run(run)


def build_server(client: AsyncClient, scope: Scope) -> MCPServer:
    """An MCP server with the tools add_memory, search_memory, list_memories and delete_memory."""
    # Its log goes to stderr; below warnings there is a line for every request.
    server = MCPServer("inferscale", instructions=_INSTRUCTIONS, log_level="WARNING")
    user, agent, run = scope.user_id, scope.agent_id, scope.run_id

    @server.tool(annotations=_ADDS)
    async def add_memory(
        text: Annotated[str, Field(description="One statement that is understood without its context.")],
        speaker: Annotated[str | None, Field(description="Who said it, if it was said.")] = None,
        said_at: Annotated[str | None, Field(description="When it was said, in words.")] = None,
    ) -> list[Shown]:
        """Remember something for later conversations."""
        with _told():
            added = await client.add(
                text, user_id=user, agent_id=agent, run_id=run, speaker=speaker, said_at=said_at
            )
        return [_shown(memory) for memory in added.memories]

    @server.tool(annotations=_READS)
    async def search_memory(
        query: Annotated[str, Field(description="What to look for, in words.")],
        top_k: Annotated[int, Field(ge=1, le=200, description="How many memories to find.")] = 10,
        filters: Annotated[dict[str, Any] | None, Field(description=_FILTERS)] = None,
    ) -> list[Found]:
        """Find the memories most similar to a query, best first."""
        with _told():
            results = await client.search(
                query, user_id=user, agent_id=agent, run_id=run, top_k=top_k, filters=filters
            )
        return [Found(**_shown(result.memory).model_dump(), score=result.score) for result in results]

    @server.tool(annotations=_READS)
    async def list_memories(
        limit: Annotated[int, Field(ge=1, le=1000, description="How many memories to give.")] = 100,
        after: Annotated[str | None, Field(description="next_cursor of the list before.")] = None,
        filters: Annotated[dict[str, Any] | None, Field(description=_FILTERS)] = None,
    ) -> Listed:
        """List the memories in the order they were stored."""
        with _told():
            page = await client.list(
                user_id=user, agent_id=agent, run_id=run, limit=limit, after=after, filters=filters
            )
        return Listed(memories=[_shown(memory) for memory in page.memories], next_cursor=page.next_cursor)

    @server.tool(annotations=_DELETES)
    async def delete_memory(
        memory_id: Annotated[str, Field(description="The id of a memory that was found or listed.")],
    ) -> str:
        """Forget one memory for good."""
        with _told():
            memory = await client.get(memory_id)
            if not scope.covers(Scope(memory.user_id, memory.agent_id, memory.run_id)):
                raise ToolError(
                    f"no memory has the id {memory_id!r}; search_memory and list_memories give ids."
                )
            await client.delete(memory_id)
        return f"Deleted {memory_id}."

    return server


@contextmanager
def _told() -> Iterator[None]:
    """Our errors become text that the model reads."""
    try:
        yield
    except InferScaleError as error:
        raise ToolError(str(error)) from error


def _shown(memory: Memory) -> Shown:
    return Shown(id=memory.id, text=memory.text, speaker=memory.speaker, said_at=memory.said_at)
