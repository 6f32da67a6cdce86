"""Extraction by the engine of this server: requests of its own, behind running chats. Knows no HTTP.

`Memory.add(…, infer=True)` waits for a model several times, so it runs in threads of its own and asks the
engine from the event loop. Like an encode pass, a request waits for running chats, but not for ever
(`Gate.give_way`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from inferscale.catalog import Added
from inferscale.config import ExtractionConfig
from inferscale.errors import EngineError, ExtractionError
from inferscale.extraction import Inference, read_object
from inferscale.extraction.engines import Question, SchemaOrText, question_of
from inferscale.extraction.llm import Message
from inferscale.memory import Memory
from inferscale.prompt import PromptBuilder
from inferscale.server.engine import EngineSide
from inferscale.turns import Content

TIMEOUT_S = 300.0
"""For one answer, the time before its turn included."""
_STOPPED = "the server is being stopped."
_THREADS = 4
_AT_ONCE = 2
"""Requests in the engine; more would leave chats fewer places."""


class ServerExtraction:
    """An `ExtractionModel`; `complete` is to be called in threads, and is made in the event loop."""

    def __init__(
        self,
        engine: EngineSide,
        prompts: PromptBuilder,
        max_model_len: int,
        give_way: Callable[[], Awaitable[None]],
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._max_model_len = max_model_len
        self._give_way = give_way
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._loop = asyncio.get_running_loop()
        self._schemas = SchemaOrText(self._ask)
        self._asked: set[Future[str]] = set()
        self._closed = threading.Event()

    def close(self) -> None:
        """Nothing more is asked, and who waits for an answer gets none: no thread outlives the loop."""
        self._closed.set()
        for future in list(self._asked):
            future.cancel()

    def complete(
        self,
        messages: Sequence[Message],
        schema: Mapping[str, Any],
        max_tokens: int,
        temperature: float = 0.0,
    ) -> dict[str, Any]:
        """See `ExtractionModel`."""
        return self._schemas.complete(messages, schema, max_tokens, temperature)

    def _ask(
        self,
        messages: Sequence[Message],
        schema: Mapping[str, Any] | None,
        max_tokens: int,
        temperature: float,
    ) -> dict[str, Any]:
        question = question_of(self._prompts, messages, max_tokens, self._max_model_len)
        if self._closed.is_set():
            raise ExtractionError(_STOPPED)
        future = asyncio.run_coroutine_threadsafe(self._answer(question, schema, temperature), self._loop)
        self._asked.add(future)
        if self._closed.is_set():  # meanwhile
            future.cancel()
        try:
            return read_object(future.result(TIMEOUT_S))
        except TimeoutError as error:
            future.cancel()
            raise ExtractionError(f"the engine did not answer in {TIMEOUT_S:.0f} s.") from error
        except CancelledError as error:
            raise ExtractionError(_STOPPED) from error
        except EngineError as error:
            raise ExtractionError(f"the engine failed: {error}") from error
        finally:
            self._asked.discard(future)

    async def _answer(self, question: Question, schema: Mapping[str, Any] | None, temperature: float) -> str:
        async with self._places:
            await self._give_way()
            return await self._engine.complete(question.token_ids, schema, question.max_tokens, temperature)


class Extractions:
    """`Memory.add(…, infer=True)` of this process: a few at a time, to their end where a client leaves."""

    def __init__(self, memory: Memory, model: ServerExtraction, max_model_len: int) -> None:
        default = ExtractionConfig()  # so many characters are less than half as many tokens
        config = replace(default, max_chars=max(100, min(default.max_chars, max_model_len)))
        memory.extraction = Inference(model, config)
        self._memory = memory
        self._model = model
        self._threads = ThreadPoolExecutor(_THREADS, "inferscale-extraction")
        self._tasks: set[asyncio.Task[Added]] = set()

    async def add(
        self, content: Content | Sequence[Content], then: Callable[[Added], Awaitable[None]], **given: Any
    ) -> Added:
        """What `Memory.add` stores and raises. then: what follows, also where the caller has left."""

        async def carry_out() -> Added:
            work = partial(self._memory.add, content, infer=True, **given)
            added = await asyncio.get_running_loop().run_in_executor(self._threads, work)
            await then(added)
            return added

        task = asyncio.get_running_loop().create_task(carry_out(), name="inferscale-extraction")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Nothing more is asked; what runs ends with the turns as they were said."""
        self._model.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)
