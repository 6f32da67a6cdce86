"""Loads KV from host memory and disk ahead of chats: of what a search found, and where a user begins.

A chat that comes later then finds it in the pool. Runs beside the answer, which never waits for it. Knows
nothing of how a load is carried out (`connector/tiering`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from inferscale.chat_plan import digest_of
from inferscale.encoder import Encoder
from inferscale.errors import EngineError
from inferscale.facts import Scope
from inferscale.plan import Order
from inferscale.prefetch_keys import prefetch_order
from inferscale.runtime.residency import ResidencyClient
from inferscale.server.engine import EngineSide, Front
from inferscale.server.threads import Threads

logger = logging.getLogger(__name__)

SESSION_PAUSE_S = 600.0
"""A user who was away for so long begins anew."""
MAX_SEEN = 10_000
"""Scopes whose last request is known; the one that was silent for longest is forgotten first."""


@dataclass
class _Asked:
    """What waits for one scope. fact_ids: what its last search found."""

    fact_ids: list[str] = field(default_factory=list)
    with_newest: bool = False


class Prefetch:
    """Methods are to be called in one event loop. Does nothing where no tier lies below the pool."""

    def __init__(
        self,
        front: Front,
        encoder: Encoder,
        residency: ResidencyClient,
        engine: EngineSide,
        threads: Threads,
    ) -> None:
        connector = front.connector
        self._is_on = bool(connector.host_bytes or connector.disk_bytes or connector.cold_location)
        self.encoder = encoder
        self._residency = residency
        self._engine = engine
        self._threads = threads
        self._seen: OrderedDict[str, float] = OrderedDict()  # last request by scope, the latest is the last
        self._asked: dict[Scope, _Asked] = {}
        self._running: dict[Scope, asyncio.Task[None]] = {}

    def put(self, scope: Scope, fact_ids: Sequence[str] = ()) -> None:
        """A chat or search of this stored scope was answered, or is about to be; fact_ids: what it found.

        One prefetch runs for a scope at a time; what comes meanwhile is next, of searches the last.
        """
        if not self._is_on:
            return
        begins = self._begins(digest_of(scope))
        if not fact_ids and not begins:
            return
        asked = self._asked.setdefault(scope, _Asked())
        asked.fact_ids = list(fact_ids) or asked.fact_ids
        asked.with_newest |= begins
        if scope not in self._running:
            work = self._work_off(scope)
            self._running[scope] = asyncio.get_running_loop().create_task(work, name="inferscale-prefetch")

    def _begins(self, digest: str) -> bool:
        """Whether this is the first request for a while."""
        now_s = time.monotonic()
        last_s = self._seen.get(digest)
        self._seen[digest] = now_s
        self._seen.move_to_end(digest)
        while len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return last_s is None or now_s - last_s > SESSION_PAUSE_S

    async def _work_off(self, scope: Scope) -> None:
        try:
            while (asked := self._asked.pop(scope, None)) is not None:
                await self._prefetch(scope, asked)
        finally:
            del self._running[scope]

    async def _prefetch(self, scope: Scope, asked: _Asked) -> None:
        def choose() -> Order | None:
            return prefetch_order(
                self.encoder, self._residency, scope, asked.fact_ids, with_newest=asked.with_newest
            )

        try:
            order = await self._threads.run(choose)
            if order is not None:
                await self._engine.order(order)
        except EngineError as error:
            logger.warning("KV was not loaded ahead of a chat: %s", error)
        except Exception:  # the root of this task: nobody waits for it
            logger.exception("KV was not loaded ahead of a chat")

    async def close(self) -> None:
        """What runs is given up; chats load what they need."""
        self._asked.clear()
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
