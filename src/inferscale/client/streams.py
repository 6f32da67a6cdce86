"""A streamed chat answer: pieces of text while they come, the reply at the end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from typing import Self

from inferscale.client.answers import StreamReader
from inferscale.client.results import ChatReply, MemoryUse


class _Streamed:
    """What is known so far. `memory` comes with the last chunk."""

    def __init__(self, reader: StreamReader) -> None:
        self._reader = reader

    @property
    def text(self) -> str:
        return self._reader.text

    @property
    def memory(self) -> MemoryUse | None:
        return self._reader.memory

    @property
    def finish_reason(self) -> str | None:
        return self._reader.finish_reason


class ChatStream(_Streamed):
    """Iterate over it for the pieces of text. The request is sent when the first one is asked for.

    `close`, or leaving a `with` block, gives up the rest of the answer. A stream that is read to its end
    needs neither.
    """

    def __init__(self, pieces: Generator[str, None, None], reader: StreamReader) -> None:
        super().__init__(reader)
        self._pieces = pieces

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def reply(self) -> ChatReply:
        """Reads what is left. Of a stream that broke off or was closed: what had arrived."""
        for _ in self._pieces:
            pass
        return self._reader.reply

    def close(self) -> None:
        self._pieces.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncChatStream(_Streamed):
    """`ChatStream` for `async for`; use it in `async with` where it may not be read to its end."""

    def __init__(self, pieces: AsyncGenerator[str, None], reader: StreamReader) -> None:
        super().__init__(reader)
        self._pieces = pieces

    def __aiter__(self) -> AsyncIterator[str]:
        return self._pieces

    async def reply(self) -> ChatReply:
        """Reads what is left. Of a stream that broke off or was closed: what had arrived."""
        async for _ in self._pieces:
            pass
        return self._reader.reply

    async def aclose(self) -> None:
        await self._pieces.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
