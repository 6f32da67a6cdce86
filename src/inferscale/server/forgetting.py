"""What a deletion means for the engine: its KV goes too. Of facts that were deleted, expired, or are gone
from the catalog without an order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from inferscale.catalog.results import ScopeEpoch
from inferscale.chat_plan import digest_of
from inferscale.errors import EngineError, InferScaleError
from inferscale.memory import Memory
from inferscale.plan import Order
from inferscale.server.encoding import Encoding
from inferscale.server.engine import EngineSide
from inferscale.server.metrics import Metrics
from inferscale.server.threads import Threads

logger = logging.getLogger(__name__)

_ORDERED_AT_ONCE = 2000
_STRAYS_EVERY_S = 60.0
"""How often KV on disk is compared with the facts, where another process has written to the catalog."""
_SHARED_STRAYS_EVERY_S = 6 * 3600.0
"""The same for the KV that servers share, which takes a listing of all of it."""

_A = TypeVar("_A")


class Forgetting:
    """Methods are to be called in one event loop."""

    def __init__(
        self, memory: Memory, engine: EngineSide, encoding: Encoding, threads: Threads, metrics: Metrics
    ) -> None:
        self._memory = memory
        self._engine = engine
        self.encoding = encoding
        self._threads = threads
        self._metrics = metrics
        self._watching: asyncio.Task[None] | None = None
        self._watching_shared: asyncio.Task[None] | None = None
        self._is_compared = False

    async def forget(self, keys: Sequence[str], epochs: Sequence[ScopeEpoch]) -> None:
        """The engine drops this KV, and refuses plans that are older. Goes on where the caller has left.

        Earlier turns go too: what was deleted may have been said in them, or be quoted in an answer.
        """
        keys = [*keys, *self.encoding.forget_turns(item.scope for item in epochs)]
        if not keys and not epochs:
            return
        await asyncio.shield(self._tell(keys, epochs))

    async def _tell(self, keys: Sequence[str], epochs: Sequence[ScopeEpoch]) -> None:
        try:
            await self._order(keys, epochs)
        except EngineError:
            # No new plan names these keys or this epoch, so nothing of it can be reached any more.
            self._is_compared = False
            logger.exception("The engine was not told of a deletion; the KV stays until it is evicted")

    async def _order(self, keys: Sequence[str], epochs: Sequence[ScopeEpoch]) -> None:
        """The epochs first: with them no request injects any of it. In orders of bounded size."""
        told = tuple((digest_of(item.scope), item.epoch) for item in epochs)
        if len(keys) + len(told) <= _ORDERED_AT_ONCE:  # as nearly always
            await self._engine.order(Order("forget", tuple(keys), told))
            return
        for start in range(0, len(told), _ORDERED_AT_ONCE):
            await self._engine.order(Order("forget", epochs=told[start : start + _ORDERED_AT_ONCE]))
        for start in range(0, len(keys), _ORDERED_AT_ONCE):
            await self._engine.order(Order("forget", tuple(keys[start : start + _ORDERED_AT_ONCE])))

    # --- what has expired --------------------------------------------------------------------

    async def run_purged(self, find: Callable[[], _A]) -> _A:
        """What `find` finds once nothing is there that has expired. One visit to a thread, as a rule."""

        def find_unless_due() -> tuple[_A] | None:
            return None if self._memory.is_purge_due() else (find(),)

        found = await self._threads.run(find_unless_due)
        if found is None:
            await self._purge()
            return await self._threads.run(find)
        return found[0]

    async def _purge(self) -> None:
        """Delete what has expired, of everybody."""
        deletion = await self._threads.run(self._memory.purge_expired)
        self._metrics.deleted.inc(deletion.num_facts)
        await self.forget(deletion.keys, deletion.epochs)

    # --- KV on disk that no fact has ---------------------------------------------------------

    def watch_strays(self) -> None:
        """Remove it at the start, where another process may have deleted something since, and where the
        engine was not told of a deletion."""
        self._watching = asyncio.get_running_loop().create_task(self._watch(), name="inferscale-strays")

    async def _watch(self) -> None:
        version = None
        while True:
            try:
                token = await self._threads.run(self._memory.catalog.change_token)
                if not self._is_compared or token.data_version != version:
                    await self._forget_strays()
                version = token.data_version
            except InferScaleError:
                self._is_compared = False
                logger.exception("What lies on disk could not be compared with the facts")
            await asyncio.sleep(_STRAYS_EVERY_S)

    def watch_shared_strays(self) -> None:
        """The same of the KV that servers share: at the start, and every few hours."""
        self._watching_shared = asyncio.get_running_loop().create_task(
            self._watch_shared(), name="inferscale-shared-strays"
        )

    async def _watch_shared(self) -> None:
        while True:
            try:
                parts = self.encoding.shared_strays()
                while (strays := await self._threads.run(next, parts, None)) is not None:
                    logger.info("%d shared segments belong to no fact and are removed", len(strays))
                    await self._order(strays, ())
            except InferScaleError:
                logger.exception("Shared KV could not be compared with the facts")
            await asyncio.sleep(_SHARED_STRAYS_EVERY_S)

    async def _forget_strays(self) -> None:
        """Nothing of it can be reached."""
        self._is_compared = True
        strays = await self._threads.run(self.encoding.strays)
        if strays:
            logger.info("%d segments on disk belong to no fact and are removed", len(strays))
            await self._order(strays, ())

    def close(self) -> None:
        for task in (self._watching, self._watching_shared):
            if task is not None:
                task.cancel()
