"""The encode passes of one API process: what asks for them, and how one runs behind chats.

Nothing is chosen when it is asked for: what came meanwhile is in it when its turn comes (`gate`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence, Set
from functools import partial
from typing import NamedTuple

from inferscale.chat_plan import Residents, digest_of
from inferscale.conversation import Conversation
from inferscale.encode_jobs import JobChooser, TurnBook, in_pairs
from inferscale.encoder import EncodeJob, Encoder
from inferscale.errors import EngineError
from inferscale.facts import Fact, Scope
from inferscale.plan import Order
from inferscale.runtime.residency import ResidencyClient
from inferscale.server.engine import EngineSide, Front
from inferscale.server.gate import Gate
from inferscale.server.metrics import Metrics
from inferscale.server.threads import Threads

logger = logging.getLogger(__name__)

_PART_TOKENS = 128
"""Of a pass that chats may have to wait for."""
Jobs = tuple[EncodeJob, ...]
"""Of one pass, in the order in which they run one after the other (`in_pairs`)."""

_HEAD_IS_ENCODED = "the system text is being encoded"


class Pass(NamedTuple):
    """encode: of the `Encoding` whose pass it is."""

    encode: Callable[[Jobs], Awaitable[None]]
    jobs: Jobs


async def _run(one: Pass) -> None:
    await one.encode(one.jobs)


class Encoding:
    """Of one model. Methods are to be called in one event loop, but for those that say otherwise.

    gate: that of another one, so that passes of both run behind it.
    """

    def __init__(
        self,
        front: Front,
        encoder: Encoder,
        residency: ResidencyClient,
        engine: EngineSide,
        threads: Threads,
        metrics: Metrics,
        gate: Gate[Pass] | None = None,
    ) -> None:
        self.gate: Gate[Pass] = gate or Gate(_run)
        self.is_off = False
        """Nothing is encoded: no use is made of it."""
        self._front = front
        self._residency = residency
        self._of_adapters: list[Encoding] = []
        self._encoder = encoder
        self._engine = engine
        self._threads = threads
        self._metrics = metrics
        self._jobs = JobChooser(encoder, residency)
        self._turns = TurnBook()
        self._new: dict[Scope, set[str]] = {}  # facts that were stored or changed, by stored scope
        self._missing: dict[Scope, set[str]] = {}  # facts that chats missed, by stored scope
        self._loop = asyncio.get_running_loop()
        self._caches_prefixes = front.caches_prefixes
        self._part_tokens = -(-_PART_TOKENS // front.block_size) * front.block_size

    def renewed(self, encoder: Encoder, engine: EngineSide) -> Encoding:
        """In the place of this one, behind the same gate, for the same facts under another model."""
        given = (self._front, encoder, self._residency, engine, self._threads, self._metrics, self.gate)
        made = Encoding(*given)
        made.is_off = self.is_off
        return made

    def for_adapter(self, encoder: Encoder, engine: EngineSide) -> Encoding:
        """Beside this one: what this one forgets, that one does."""
        made = self.renewed(encoder, engine)
        self._of_adapters.append(made)
        return made

    def _put(
        self, name: str, choose: Callable[[], Awaitable[list[Jobs]]], *, is_urgent: bool = False
    ) -> None:
        async def passes() -> list[Pass]:
            return [Pass(self._encode, jobs) for jobs in await choose()]

        self.gate.put(f"{self._encoder.model} {name}", passes, is_urgent=is_urgent)

    # --- what is in the pool -----------------------------------------------------------------

    def injectable(self, facts: Sequence[Fact]) -> set[str]:
        """Ids of the facts whose KV is in the pool; none where the engine does not say. In a thread."""
        keys = self._encoder.keys(fact.id for fact in facts)
        try:
            there = self._jobs.resident(list(keys.values()))
        except EngineError as error:
            logger.warning("The pool could not be asked: %s", error)
            return set()
        return {fact_id for fact_id, key in keys.items() if key in there}

    def ask_resident(self, head: tuple[int, ...], head_key: str, keys: Sequence[str]) -> Residents:
        """As `AskResident`, in a thread. The head is encoded for the next chat where the pool lacks it."""
        try:
            there = self._jobs.resident([head_key, *keys])
        except EngineError as error:
            logger.warning("Facts are prefilled as text: %s", error)
            return Residents(frozenset(), "the engine did not say which facts are in the pool")
        if head_key in there or not there:
            return Residents(there)

        async def head_job() -> list[Jobs]:
            return [(self._encoder.head_job(head),)]

        self._loop.call_soon_threadsafe(partial(self._put, f"head {head_key}", head_job, is_urgent=True))
        return Residents(frozenset(), _HEAD_IS_ENCODED)

    def strays(self) -> list[str]:
        """Keys on disk that no fact has. In a thread. Raises EngineError."""
        of_everybody = {other._encoder.anchor_key for other in self._of_adapters}
        return [key for key in self._jobs.strays() if key not in of_everybody]

    def shared_strays(self) -> Iterator[list[str]]:
        """The same of the KV that servers share, in parts."""
        for keys in self._jobs.shared_strays():
            of_everybody = {other._encoder.anchor_key for other in self._of_adapters}
            yield [key for key in keys if key not in of_everybody]

    def forget_turns(self, scopes: Iterable[Scope]) -> list[str]:
        """Keys of the turns of these scopes, whose KV is to be forgotten; what waits of them does not run."""
        scopes = list(scopes)
        books = [self._turns, *(other._turns for other in self._of_adapters)]
        return [key for book in books for key in book.forget(scopes)]

    # --- what is to be encoded ---------------------------------------------------------------

    def put_new(self, scope: Scope, facts: Iterable[Fact]) -> None:
        """Facts that were stored or changed in it. Others without KV, as all are after a change of model, are
        encoded when a chat misses them."""
        if self.is_off:
            return
        self._new.setdefault(scope, set()).update(fact.id for fact in facts)
        self._put(f"new {digest_of(scope)}", lambda: self._new_jobs(scope))

    def put_missing(self, scope: Scope, fact_ids: Set[str]) -> None:
        """Facts that a chat of this scope found without KV."""
        if self.is_off:
            return
        self._missing.setdefault(scope, set()).update(fact_ids)
        self._put(f"repair {digest_of(scope)}", lambda: self._repair_jobs(scope))

    def put_turns(self, conversation: Conversation) -> None:
        if self.is_off:
            return
        self._turns.put(conversation)
        self._put("turns", self._turn_jobs)

    def put_all(self, scope: Scope) -> None:
        """What is not in the pool, as far as it has room."""
        if self.is_off:
            return
        self._put(f"warm {digest_of(scope)}", lambda: self._warm_jobs(scope))

    async def _warm_jobs(self, scope: Scope) -> list[Jobs]:
        return in_pairs(await self._threads.run(self._jobs.to_warm, scope))

    async def _new_jobs(self, scope: Scope) -> list[Jobs]:
        """For all that were stored or changed so far, and what was said right behind them."""
        fact_ids = self._new.pop(scope, set())
        plan = partial(self._encoder.new_jobs, scope, fact_ids, with_followers=True)
        return in_pairs(await self._threads.run(plan))

    async def _repair_jobs(self, scope: Scope) -> list[Jobs]:
        """For all that chats of this scope have missed so far."""
        missing = self._missing.pop(scope, set())
        return in_pairs(await self._threads.run(self._jobs.for_repair, scope, missing))

    async def _turn_jobs(self) -> list[Jobs]:
        """Of one conversation at a time, so that new facts do not wait for all of them."""
        conversation = self._turns.take()
        if self._turns.num_waiting:
            self._put("turns", self._turn_jobs)
        if conversation is None:
            return []
        return in_pairs(await self._threads.run(self._jobs.for_turns, conversation))

    async def _encode(self, jobs: Jobs) -> None:
        """One pass, in one direction after the other; in parts where chats come and go: each finds the one
        before in vLLM's prefix cache. Where a deletion has overtaken it, its facts are planned again."""
        in_parts = self.gate.has_company and self._caches_prefixes
        parts = [part for job in jobs for part in (job.in_parts(self._part_tokens) if in_parts else [job])]
        num_lost = 0
        for number, part in enumerate(parts):
            if number:
                await self.gate.give_way()
            if await self._threads.run(self._encoder.is_outdated, part):
                if part.fact_ids:
                    self.put_missing(part.scope, set(part.fact_ids))
                return
            outcome = await self._engine.run(part.token_ids, self._encoder.plan_of(part))
            num_lost += len(part.captures) - int(outcome.get("captured", 0))
        self._metrics.encoded.inc(0 if num_lost else sum(job.num_facts for job in jobs))
        if num_lost:
            logger.info(
                "%d of %d segments of a pass were not captured",
                num_lost,
                sum(len(job.captures) for job in jobs),
            )
            return
        await self._threads.run(self._jobs.note_done, jobs)
        if superseded := await self._threads.run(self._jobs.superseded, jobs):
            await self._engine.order(Order("forget", tuple(superseded)))
