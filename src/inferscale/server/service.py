"""The memory of one API process: what is stored, found, planned, encoded and forgotten. Knows no HTTP.

Text is the truth and lives in the catalog, which other processes may write as well. What blocks (SQLite, the
embedder, rendering) runs in a few threads; the engine is asked from the event loop. Storing a fact returns
at once, and its KV is encoded behind the gate; deleting one returns when the engine has forgotten it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from inferscale.catalog.results import Added
from inferscale.chat_plan import Mode, PreparedChat, digest_of
from inferscale.encoder import Encoder
from inferscale.errors import EngineError, UnknownFact, UnknownScope
from inferscale.fact_order import FactOrder
from inferscale.facts import Fact, HistoryEvent, Scope, SearchHit
from inferscale.filters import Filter
from inferscale.memory import Memory
from inferscale.plan import OTHER_MODEL, Plan, cache_salt
from inferscale.prompt import Draft
from inferscale.runtime.engine_log import share_engine_log
from inferscale.runtime.folder_lock import remove_runtime_dir
from inferscale.runtime.residency import ResidencyClient
from inferscale.runtime.secret import load_secret, open_runtime_dir
from inferscale.self_check import passed_over
from inferscale.server.engine import EngineSide, Front, prompt_builder
from inferscale.server.extraction import Extractions, ServerExtraction
from inferscale.server.forgetting import Forgetting
from inferscale.server.keys import Caller, check_readable
from inferscale.server.metrics import Metrics
from inferscale.server.prefetch import Prefetch
from inferscale.server.results import FactPage, InferredFacts, ShownFact, Stats
from inferscale.server.self_check import check_engine
from inferscale.server.sides import Side, Sides
from inferscale.server.threads import Threads
from inferscale.tail import Tail
from inferscale.turns import Content
from inferscale.windows import WindowPolicy

logger = logging.getLogger(__name__)

_STOP_S = 5.0
_NOT_ENCODED = "the facts found are being encoded"
_TOO_FEW = "so few tokens are prefilled as fast"
_GPU_MIN_INJECTED_TOKENS = 128


class MemoryService:
    """Made by `open_service`. Methods are to be called in one event loop."""

    def __init__(
        self, front: Front, memory: Memory, encoder: Encoder, residency: ResidencyClient, engine: EngineSide
    ) -> None:
        self.front = front
        self.memory = memory
        self.residency = residency
        self.metrics = Metrics()
        self.verdict = passed_over("it has not run yet")
        """Of the self-check."""
        self._is_switched_on = True
        self._threads = Threads()
        self._run = self._threads.run
        self.sides = Sides(front, memory, encoder, residency, engine, self._threads, self.metrics)
        self._encoding = self.sides.base.encoding
        self.gate = self._encoding.gate
        self._forgetting = Forgetting(memory, engine, self._encoding, self._threads, self.metrics)
        self._forget = self._forgetting.forget
        self._prefetch = Prefetch(front, encoder, residency, engine, self._threads)
        planner = self.sides.base.planner
        memory.check_text = planner.check_length
        model = ServerExtraction(engine, planner.prompts, front.max_model_len, self.gate.give_way)
        self._extractions = Extractions(memory, model, front.max_model_len)
        given = front.server.min_injected_tokens
        default = _GPU_MIN_INJECTED_TOKENS if front.is_on_gpu else 0
        self._min_injected_tokens = default if given is None else given

    @property
    def injects(self) -> bool:
        """As an operator switches; never where the self-check refused it. Else facts are text in chats."""
        return self._is_switched_on and not self.verdict.is_refusal

    @injects.setter
    def injects(self, wanted: bool) -> None:
        self._is_switched_on = wanted

    async def check(self) -> None:
        """The self-check; before anything is encoded. Where it refuses injection, nothing is."""
        base = self.sides.base
        self.verdict = await check_engine(self.front, base.engine, base.encoder, self.memory)
        self._encoding.is_off = self.verdict.is_refusal
        self.metrics.refused.set(self.verdict.is_refusal)

    # memory -----------------------------------------------------------------------------------

    async def add(
        self,
        caller: Caller,
        scope: Scope,
        content: Content | Sequence[Content],
        *,
        speaker: str | None = None,
        said_at: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        expires_at: float | str | None = None,
    ) -> list[ShownFact]:
        """Store and return; encoding follows. Raises what `Memory.add` raises."""
        stored = caller.stored(scope)
        facts = await self._run(
            self.memory.add,
            content,
            **stored.ids(),
            speaker=speaker,
            said_at=said_at,
            metadata=metadata,
            expires_at=expires_at,
            infer=False,
        )
        if facts:
            self.metrics.added.inc(len(facts))
            self._encoding.put_new(stored, facts)
        return [ShownFact(_shown(caller, fact), False) for fact in facts]

    async def infer(
        self, caller: Caller, scope: Scope, content: Content | Sequence[Content], **given: Any
    ) -> InferredFacts:
        """Store facts that are extracted of a conversation, done when it returns; see `Memory.add`.

        given: speaker, said_at, metadata and expires_at. What a fact supersedes is forgotten by the engine.
        """
        stored = caller.stored(scope)

        async def follow(added: Added) -> None:
            await self._forget(added.keys, added.epochs)
            if added:
                self.metrics.added.inc(len(added))
                self._encoding.put_new(stored, added)

        added = await self._extractions.add(content, follow, **stored.ids(), **given)
        facts = [ShownFact(_shown(caller, fact), False) for fact in added]
        return InferredFacts(facts, added.events, added.warning)

    async def search(
        self,
        caller: Caller,
        scope: Scope,
        query: str,
        top_k: int,
        filters: Mapping[str, Any] | None = None,
    ) -> list[tuple[ShownFact, float]]:
        """An unknown scope has no facts: whether others exist is not told."""
        stored = self._readable(caller, scope)

        def find() -> list[SearchHit]:
            try:
                return self.memory.search(query, **stored.ids(), top_k=top_k, filters=filters)
            except UnknownScope:
                return []

        hits = await self._forgetting.run_purged(find)
        if self.injects:
            self._prefetch.put(stored, [hit.fact.id for hit in hits])
        shown = await self._with_state(caller, [hit.fact for hit in hits])
        return list(zip(shown, [hit.score for hit in hits], strict=True))

    async def page(
        self,
        caller: Caller,
        scope: Scope,
        limit: int,
        after: str | None,
        filters: Mapping[str, Any] | None = None,
    ) -> FactPage:
        stored = self._readable(caller, scope)
        page = await self._run(self.memory.page, **stored.ids(), limit=limit, after=after, filters=filters)
        return FactPage(await self._with_state(caller, page.facts), page.next_cursor)

    async def set_block(self, caller: Caller, scope: Scope, name: str, text: str) -> ShownFact:
        """As `Memory.set_block`; encoding follows."""
        stored = caller.stored(scope)
        update = await self._run(self.memory.set_block, name, text, **stored.ids())
        await self._forget(update.keys, update.epochs)
        self._encoding.put_new(stored, [update.fact])
        return (await self._with_state(caller, [update.fact]))[0]

    async def blocks(self, caller: Caller, scope: Scope) -> list[ShownFact]:
        """The core blocks of a chat with this scope, by name."""
        found = await self._run(self.memory.blocks, self._readable(caller, scope))
        return await self._with_state(caller, found.blocks)

    async def delete_block(self, caller: Caller, scope: Scope, name: str) -> None:
        deletion = await self._run(self.memory.delete_block, name, **caller.stored(scope).ids())
        self.metrics.deleted.inc()
        await self._forget(deletion.keys, deletion.epochs)

    async def get(self, caller: Caller, fact_id: str) -> ShownFact:
        fact = await self._run(self._own, caller, fact_id)
        return (await self._with_state(caller, [fact]))[0]

    async def update(self, caller: Caller, fact_id: str, changes: Mapping[str, Any]) -> ShownFact:
        """changes: of text, speaker, said_at and metadata, those that are given."""
        await self._run(self._own, caller, fact_id)
        update = await self._run(self.memory.update, fact_id, **changes)
        await self._forget(update.keys, update.epochs)
        if update.keys or update.epochs:
            self._encoding.put_new(update.fact.scope, [update.fact])
        return (await self._with_state(caller, [update.fact]))[0]

    async def history(self, caller: Caller, fact_id: str) -> list[HistoryEvent]:
        await self._run(self._own, caller, fact_id)
        return await self._run(self.memory.history, fact_id)

    async def delete(self, caller: Caller, fact_id: str) -> None:
        """Done when it returns: in the catalog, the index, the pool, and for requests that wait."""
        await self._run(self._own, caller, fact_id)
        deletion = await self._run(self.memory.delete, fact_id)
        self.metrics.deleted.inc()
        await self._forget(deletion.keys, deletion.epochs)

    async def delete_all(self, caller: Caller, scope: Scope) -> int:
        deletion = await self._run(self.memory.delete_all, **caller.stored(scope).ids())
        self.metrics.deleted.inc(deletion.num_facts)
        await self._forget(deletion.keys, deletion.epochs)
        return deletion.num_facts

    async def warm(self, caller: Caller, scope: Scope) -> int:
        """Encode what is not in the pool, as far as it has room; returns how many passes wait already."""
        stored = scope if scope.is_empty() else caller.stored(scope)
        if scope.is_empty():
            caller.check_operator()
        self._encoding.put_all(stored)
        return self.gate.num_waiting

    async def stats(self, caller: Caller, scope: Scope) -> Stats:
        stored = scope
        if scope.is_empty():
            caller.check_operator()
        else:
            stored = caller.stored(scope)
        found = await self._run(self._stats, stored)
        if caller.tenant is None:
            return found
        # What others do shows in the numbers of the whole server: a tenant gets those of its scope.
        waiting = max(0, found.num_facts - (found.num_injectable or 0))
        return found._replace(num_pending=waiting, counters={})

    def _stats(self, scope: Scope) -> Stats:
        counters = self.residency.stats()
        num_injectable = None
        if scope.is_empty():
            num_facts = self.memory.catalog.count(scope)
        else:
            facts = self.memory.catalog.facts(scope)
            num_facts, num_injectable = len(facts), len(self._encoding.injectable(facts))
        return Stats(num_facts, num_injectable, self.gate.num_waiting, self.injects, counters, self.verdict)

    def check_readable(self, caller: Caller, scope: Scope) -> None:
        """Raise InvalidInput for a scope that may not be read as it is."""
        self._readable(caller, scope)

    def _readable(self, caller: Caller, scope: Scope) -> Scope:
        """The stored scope of one that may be read as it is. Raises InvalidInput."""
        check_readable(scope, self.front.server.share_agents)
        return caller.stored(scope)

    def _own(self, caller: Caller, fact_id: str) -> Fact:
        """The fact. One of another tenant is as unknown as one that does not exist."""
        fact = self.memory.catalog.get(fact_id)
        if fact is None or not caller.may_see(fact.scope):
            raise UnknownFact(f"no memory has the id {fact_id!r}; it may have been deleted.")
        return fact

    async def _with_state(self, caller: Caller, facts: Sequence[Fact]) -> list[ShownFact]:
        there = await self._run(self._encoding.injectable, facts)
        return [ShownFact(_shown(caller, fact), fact.id in there) for fact in facts]

    # chat -------------------------------------------------------------------------------------

    async def prepare(
        self,
        draft: Draft,
        caller: Caller,
        scope: Scope,
        top_k: int,
        mode: Mode,
        tail: Tail | None,
        max_tokens: int,
        caller_salt: str = "",
        within: Filter | None = None,
        order: FactOrder | None = None,
        side: Side | None = None,
    ) -> PreparedChat:
        """A chat with the best facts; what has to be encoded for the next one is. side: of the model that it
        names, the one without an adapter where that is left out. Raises InvalidInput."""
        side = side or self.sides.base
        stored = self._readable(caller, scope)
        chat = (draft, stored, top_k, mode, tail, max_tokens, caller_salt, within, order)
        prepared = await self._forgetting.run_purged(lambda: side.planner.prepare(*chat))
        unencoded = {candidate.fact.id for candidate in prepared.choice.unencoded}
        if unencoded:
            side.encoding.put_missing(stored, unencoded)
        if prepared.choice.missing and prepared.plan is None and prepared.reason is None:
            prepared = prepared._replace(reason=_NOT_ENCODED)
        if prepared.plan is not None and sum(prepared.plan.table.lengths) < self._min_injected_tokens:
            prepared = prepared._replace(plan=None, reason=_TOO_FEW)
        if mode == "inject" and side is self.sides.base:
            self._prefetch.put(stored)
        self.metrics.prepared(mode, prepared)
        return prepared

    async def keep_turn(
        self, side: Side, draft: Draft, plan: Plan, caller: Caller, scope: Scope, answer: str | None
    ) -> None:
        """Encode a chat's turns for its next question. answer: see `ChatPlanner.conversation`."""
        stored = caller.stored(scope)
        conversation = await self._run(side.planner.conversation, draft, plan, stored, answer)
        side.encoding.put_turns(conversation)

    def text_salt(self, side: Side, caller: Caller, scope: Scope, epoch: int, caller_salt: str) -> str:
        """Salt of vLLM's prefix cache for facts that stand in a prompt as text."""
        digest, engine = digest_of(caller.stored(scope)), side.engine
        return cache_salt(engine.secret, engine.model, digest, epoch, "text", caller_salt)

    async def outcome(self, plan_id: str) -> dict[str, Any]:
        """What the connector says of a plan; empty where it says nothing."""
        try:
            found = await self._run(self.residency.outcome, plan_id) or {}
            if found.get("reason") == OTHER_MODEL:
                await self._renew()
            return found
        except EngineError as error:
            logger.warning("The outcome of a chat is not known: %s", error)
            return {}

    async def _renew(self) -> None:
        """Where the engine has got other weights, chats and passes name them from now on. Raises
        EngineError."""
        model = await self._run(self.residency.model)
        if model == self.sides.base.engine.model:
            return
        logger.warning("The engine has got other weights; facts are encoded anew as chats need them")
        self.sides.renew(model)
        base = self.sides.base
        self._encoding = self._forgetting.encoding = base.encoding
        self._prefetch.encoder = base.encoder

    # seen from outside ------------------------------------------------------------------------

    async def is_healthy(self) -> bool:
        """Whether the connector answers: without it every chat would have its memory as text."""
        try:
            await self._renew()
            return True
        except EngineError as error:
            logger.error("The connector does not answer: %s", error)
            return False

    async def observe(self) -> None:
        """Bring the metrics that are not counted up to date."""
        try:
            self.metrics.observe(self.gate.num_waiting, await self._run(self.residency.stats))
        except EngineError as error:
            logger.warning("The pool could not be asked: %s", error)

    def begin(self) -> None:
        """What a start has to do besides, in the background."""
        if self.front.connector.disk_bytes:
            self._forgetting.watch_strays()
        if self.front.connector.cold_location is not None:
            self._forgetting.watch_shared_strays()

    def load_embedder(self) -> None:
        """Begin to load it: the first chat need not wait for it."""
        self._threads.start(self._embed_something)

    def _embed_something(self) -> None:
        try:
            self.memory.load()
        except Exception:  # the first use says it to its caller
            logger.exception("The embedder could not be loaded")

    async def close(self) -> None:
        """What is encoded no further is encoded when a chat misses it. Takes the runtime folder away."""
        self._forgetting.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._extractions.close(), _STOP_S)
        await self._prefetch.close()
        await self.gate.close()
        await self._threads.close()
        self.residency.close()
        self.memory.close()
        remove_runtime_dir(self.front.runtime_dir)


def open_service(front: Front) -> MemoryService:
    """For the engine of this process. To be called in its event loop; blocks while it loads a tokenizer.

    Raises InferScaleError.
    """
    share_engine_log()
    folder = open_runtime_dir(str(front.runtime_dir))
    residency = ResidencyClient(folder)
    engine = EngineSide(front.client, residency.model(), load_secret(folder))
    memory = Memory(front.server.memory)
    encoding = front.server.encoding
    encoder = Encoder(
        memory.catalog,
        prompt_builder(front),
        engine.model,
        WindowPolicy.of(encoding),
        front.max_model_len - 1,
    )
    return MemoryService(front, memory, encoder, residency, engine)


def _shown(caller: Caller, fact: Fact) -> Fact:
    return replace(fact, scope=caller.shown(fact.scope))
