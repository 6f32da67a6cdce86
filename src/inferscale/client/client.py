"""`Client` and `AsyncClient`: the calls of the memory API, sent with httpx.

A method's signature and docstring are those of the function in `calls` that builds its request.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Self, TypeVar
from urllib.parse import urlencode

import httpx

from inferscale.client import calls
from inferscale.client.answers import StreamReader, connection_to, error_of, read_answer
from inferscale.client.calls import Call
from inferscale.client.results import ChatReply, Memory
from inferscale.client.streams import AsyncChatStream, ChatStream
from inferscale.errors import InvalidInput

P = ParamSpec("P")
T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_TIMEOUT_S = 600.0  # a long answer that is not streamed keeps silent while it is made
_CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class _Server:
    """Where the server is and what every request to it carries."""

    url: str
    headers: dict[str, str]

    @classmethod
    def read(cls, base_url: str, api_key: str | None) -> Self:
        return cls(_read_url(base_url), {} if api_key is None else {"Authorization": _read_key(api_key)})

    def request(self, http: httpx.Client | httpx.AsyncClient, call: Call[Any]) -> httpx.Request:
        headers, content = self.headers, None
        try:
            query = f"?{urlencode(call.query)}" if call.query else ""
            if call.body is not None:
                headers = {**headers, "Content-Type": "application/json"}
                content = json.dumps(call.body, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"an argument cannot be sent: {error}. Give what JSON can hold.") from error
        return http.build_request(
            call.method, f"{self.url}{call.path}{query}", content=content, headers=headers
        )


def _described(method: Callable[..., T], build: Callable[..., Any], result: str = "") -> Callable[..., T]:
    """`method` with the name, signature and docstring of what builds its call, for help()."""
    functools.update_wrapper(method, build)
    signature = inspect.signature(build)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    result = result or signature.return_annotation.removeprefix("Call[").removesuffix("]")
    method.__annotations__ = {**build.__annotations__, "return": result}
    method.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[itself, *signature.parameters.values()], return_annotation=result
    )
    return method


def _method(build: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._send(build(*args, **kwargs))

    return _described(method, build)


def _stream(build: Callable[P, Call[ChatReply]]) -> Callable[Concatenate[Client, P], ChatStream]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> ChatStream:
        reader = StreamReader()
        return ChatStream(self._pieces(build(*args, **kwargs), reader), reader)

    return _described(method, build, "ChatStream")


def _async_method(
    build: Callable[P, Call[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._send(build(*args, **kwargs))

    return _described(method, build)


def _async_stream(
    build: Callable[P, Call[ChatReply]],
) -> Callable[Concatenate[AsyncClient, P], AsyncChatStream]:
    def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncChatStream:
        reader = StreamReader()
        return AsyncChatStream(self._pieces(build(*args, **kwargs), reader), reader)

    return _described(method, build, "AsyncChatStream")


class Client:
    """The memory API of one server.

    base_url: of the server, with or without /v1. api_key: one of those that vLLM was started with. timeout_s:
    how long the server may keep silent. http_client: sends the requests instead of one made here, such as one
    with a proxy or a test transport; its own timeouts hold, and it is not closed. Use it from several threads
    if you like. Raises InvalidInput, and the errors of `inferscale.client.errors`.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        api_key: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        http_client: httpx.Client | None = None,
    ) -> None:
        self._server = _Server.read(base_url, api_key)
        self._http = httpx.Client(timeout=_timeout(timeout_s)) if http_client is None else http_client
        self._is_own = http_client is None
        self._model: str | None = None

    add = _method(calls.add)
    search = _method(calls.search)
    get = _method(calls.get)
    list = _method(calls.list_page)
    update = _method(calls.update)
    delete = _method(calls.delete)
    delete_all = _method(calls.delete_all)
    history = _method(calls.history)
    set_block = _method(calls.set_block)
    get_blocks = _method(calls.get_blocks)
    delete_block = _method(calls.delete_block)
    warm = _method(calls.warm)
    stats = _method(calls.stats)
    set_injection = _method(calls.set_injection)
    chat = _method(calls.chat)
    stream_chat = _stream(calls.chat)

    def iter_all(
        self,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        limit: int | None = None,
        filters: Mapping[str, Any] | None = None,
    ) -> Iterator[Memory]:
        """All memories of a scope in the order they were stored, read in pages of `limit`."""
        after = None
        while True:
            page = self.list(
                user_id=user_id, agent_id=agent_id, run_id=run_id, limit=limit, after=after, filters=filters
            )
            yield from page.memories
            after = page.next_cursor
            if not page.has_more or after is None:
                return

    def close(self) -> None:
        if self._is_own:
            self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self._server.url!r})"

    def _send(self, call: Call[T]) -> T:
        request = self._server.request(self._http, self._with_model(call))
        with connection_to(self._server.url):
            response = self._http.send(request)
        return read_answer(call, response)

    def _pieces(self, call: Call[ChatReply], reader: StreamReader) -> Generator[str, None, None]:
        request = self._server.request(self._http, self._with_model(call).with_body(stream=True))
        with connection_to(self._server.url), closing(self._http.send(request, stream=True)) as response:
            if not response.is_success:
                response.read()
                raise error_of(response)
            for data in response.iter_bytes():
                yield from reader.feed(data)
        reader.finish()

    def _with_model(self, call: Call[T]) -> Call[T]:
        if not call.lacks_model:
            return call
        if self._model is None:
            self._model = self._send(calls.first_model())
        return call.with_body(model=self._model)


class AsyncClient:
    """`Client` for asyncio and trio; http_client is a `httpx.AsyncClient`."""

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        api_key: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        http_client: httpx.AsyncClient | None = None,
    ) -> None:
        self._server = _Server.read(base_url, api_key)
        self._http = httpx.AsyncClient(timeout=_timeout(timeout_s)) if http_client is None else http_client
        self._is_own = http_client is None
        self._model: str | None = None

    add = _async_method(calls.add)
    search = _async_method(calls.search)
    get = _async_method(calls.get)
    list = _async_method(calls.list_page)
    update = _async_method(calls.update)
    delete = _async_method(calls.delete)
    delete_all = _async_method(calls.delete_all)
    history = _async_method(calls.history)
    set_block = _async_method(calls.set_block)
    get_blocks = _async_method(calls.get_blocks)
    delete_block = _async_method(calls.delete_block)
    warm = _async_method(calls.warm)
    stats = _async_method(calls.stats)
    set_injection = _async_method(calls.set_injection)
    chat = _async_method(calls.chat)
    stream_chat = _async_stream(calls.chat)

    async def iter_all(
        self,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        limit: int | None = None,
        filters: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[Memory]:
        """All memories of a scope in the order they were stored, read in pages of `limit`."""
        after = None
        while True:
            page = await self.list(
                user_id=user_id, agent_id=agent_id, run_id=run_id, limit=limit, after=after, filters=filters
            )
            for memory in page.memories:
                yield memory
            after = page.next_cursor
            if not page.has_more or after is None:
                return

    async def aclose(self) -> None:
        if self._is_own:
            await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"AsyncClient({self._server.url!r})"

    async def _send(self, call: Call[T]) -> T:
        request = self._server.request(self._http, await self._with_model(call))
        with connection_to(self._server.url):
            response = await self._http.send(request)
        return read_answer(call, response)

    async def _pieces(self, call: Call[ChatReply], reader: StreamReader) -> AsyncGenerator[str, None]:
        call = (await self._with_model(call)).with_body(stream=True)
        request = self._server.request(self._http, call)
        with connection_to(self._server.url):
            async with aclosing(await self._http.send(request, stream=True)) as response:
                if not response.is_success:
                    await response.aread()
                    raise error_of(response)
                async for data in response.aiter_bytes():
                    for piece in reader.feed(data):
                        yield piece
        reader.finish()

    async def _with_model(self, call: Call[T]) -> Call[T]:
        if not call.lacks_model:
            return call
        if self._model is None:
            self._model = await self._send(calls.first_model())
        return call.with_body(model=self._model)


def _read_url(base_url: str) -> str:
    try:
        url = httpx.URL(base_url)
    except (httpx.InvalidURL, TypeError) as error:
        raise InvalidInput(
            f"the server's URL is {base_url!r}: {error}. Give one such as {DEFAULT_URL}."
        ) from error
    if url.scheme not in ("http", "https") or not url.host:
        raise InvalidInput(f"the server's URL is {base_url!r}; give one such as {DEFAULT_URL}.")
    if url.userinfo or url.query or url.fragment:
        raise InvalidInput(
            f"the server's URL holds more than host and path; give one such as {DEFAULT_URL}, and "
            "the key as api_key."
        )
    return str(url).rstrip("/").removesuffix("/v1")


def _read_key(api_key: str) -> str:
    # Not in the message: the key itself.
    if not api_key.isascii() or not api_key.isprintable() or not api_key or " " in api_key:
        raise InvalidInput(
            f"api_key ({len(api_key)} characters) is blank or holds spaces, line breaks or characters beyond "
            "ASCII; give it as vLLM was started with, or None."
        )
    return f"Bearer {api_key}"


def _timeout(timeout_s: float) -> httpx.Timeout:
    return httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_TIMEOUT_S))
