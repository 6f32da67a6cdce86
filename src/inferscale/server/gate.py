"""When encode passes run: one after the other through the engine that also answers, giving way to chats.

A pass is one request of up to some thousand tokens, so each one that runs beside a chat delays its tokens.
While chats are running a pass waits for them, but not for ever: after `HOLD_S` one runs all the same, so that
encoding never stands still. While chats come and go passes run alone, and in parts with a `give_way` between
them, since a chat that comes then waits for what is in the engine. Where nobody chats, several run at once
and fill the engine's steps.

Knows nothing of what a pass holds. One event loop only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

RECENT_S = 10.0
"""So long after the last chat the next one is still expected: passes run alone and in parts."""
HOLD_S = 0.5
"""How long a pass waits for running chats."""
AT_ONCE = 4
"""Passes in flight while no chat runs."""

_J = TypeVar("_J")

Choose = Callable[[], Awaitable[Sequence[_J]]]
"""What is to run, chosen when its turn comes: what came meanwhile is then in it."""


class Gate(Generic[_J]):
    """run: carries out one job; its errors are logged, and the next one runs."""

    def __init__(self, run: Callable[[_J], Awaitable[None]]) -> None:
        self._run = run
        self._chosen: deque[_J] = deque()
        self._waiting: dict[str, Choose[_J]] = {}
        self._urgent: dict[str, Choose[_J]] = {}
        self._num_running = 0
        self._num_choosing = 0
        self._num_chats = 0
        self._last_chat_s = float("-inf")
        self._wake = asyncio.Event()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._task: asyncio.Task[None] | None = None
        self._is_busy = False
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Passes that are chosen and not done, and work of which they are not chosen yet."""
        waiting = len(self._waiting) + len(self._urgent) + self._num_choosing
        return len(self._chosen) + self._num_running + waiting

    @property
    def is_idle(self) -> bool:
        return not (self._chosen or self._waiting or self._urgent or self._num_running or self._is_busy)

    def put(self, name: str, choose: Choose[_J], *, is_urgent: bool = False) -> None:
        """Ask for work; what waits under the same name already is the same work. urgent: before all else.
        Once the gate is closed, nothing is done."""
        if self._is_closed:
            return
        waiting = self._urgent if is_urgent else self._waiting
        waiting.setdefault(name, choose)
        self._wake.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._work(), name="inferscale-encode")

    @property
    def has_company(self) -> bool:
        """Whether a chat runs, or one may come at any moment."""
        return bool(self._num_chats) or time.monotonic() - self._last_chat_s < RECENT_S

    @contextmanager
    def chatting(self) -> Iterator[None]:
        """A chat runs inside."""
        self._num_chats += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._num_chats -= 1
            self._last_chat_s = time.monotonic()
            if not self._num_chats:
                self._quiet.set()

    async def drained(self) -> None:
        """Wait until all that was asked for is done; for tests and the end of a script."""
        while not self.is_idle:
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Stop; what has not run yet does not run."""
        self._is_closed = True
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._chosen.clear()
        self._waiting.clear()
        self._urgent.clear()
        self._is_busy = False

    async def _work(self) -> None:
        while True:
            self._wake.clear()
            await self._choose_next()
            if not self._chosen:
                self._is_busy = False
                if not (self._urgent or self._waiting):
                    await self._wake.wait()
                continue
            await self.give_way()
            while self._urgent:  # came meanwhile
                await self._choose_next()
            jobs = [self._chosen.popleft()]
            while self._chosen and not self.has_company and len(jobs) < AT_ONCE:
                jobs.append(self._chosen.popleft())
            self._num_running = len(jobs)
            try:
                await asyncio.gather(*(self._carry_out(job) for job in jobs))
            finally:
                self._num_running = 0

    async def _choose_next(self) -> None:
        """Urgent work goes in front of what was chosen; other work is chosen once that has run."""
        waiting = self._urgent or (self._waiting if not self._chosen else {})
        if not waiting:
            return
        is_urgent = waiting is self._urgent
        self._is_busy = True
        name = next(iter(waiting))
        choose = waiting.pop(name)
        self._num_choosing = 1
        try:
            jobs = await choose()
        except Exception:  # this task is its root
            logger.exception("Facts could not be prepared for encoding; they stay text")
            return
        finally:
            self._num_choosing = 0
        if is_urgent:
            self._chosen.extendleft(reversed(jobs))
        else:
            self._chosen.extend(jobs)

    async def give_way(self) -> None:
        """Wait for running chats, `HOLD_S` at most; also for jobs between two of their parts."""
        end_s = time.monotonic() + HOLD_S
        while self._num_chats and time.monotonic() < end_s:
            try:
                await asyncio.wait_for(self._quiet.wait(), end_s - time.monotonic())
            except TimeoutError:
                return

    async def _carry_out(self, job: _J) -> None:
        try:
            await self._run(job)
        except Exception:  # this task is its root
            logger.exception("A pass failed; its facts stay text")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # the gate is closed
                raise
            logger.error("A pass was aborted by the engine; its facts stay text")
