"""The threads in which the memory of an API process does what blocks: SQLite, the embedder, rendering."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import ParamSpec, TypeVar

_THREADS = 8
_STOP_S = 5.0

_A = TypeVar("_A")
_P = ParamSpec("_P")


class Threads:
    """To be asked from one event loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, "inferscale-memory")

    async def run(self, work: Callable[_P, _A], *args: _P.args, **kwargs: _P.kwargs) -> _A:
        """What `work` returns or raises."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, partial(work, *args, **kwargs))

    def start(self, work: Callable[[], None]) -> None:
        """Do it; nobody waits for it."""
        self._pool.submit(work)

    async def close(self) -> None:
        """What runs may use what is closed next, so it is waited for, but not for ever."""
        stopping = asyncio.to_thread(self._pool.shutdown, wait=True, cancel_futures=True)
        with suppress(TimeoutError):
            await asyncio.wait_for(stopping, _STOP_S)
