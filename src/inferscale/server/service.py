"""The memory of one API process: what is stored, found, planned, encoded and forgotten. Knows no HTTP.

Text is the truth and lives in the catalog, which other processes may write as well. What blocks (SQLite, the
embedder, rendering) runs in a few threads; the engine is asked from the event loop. Storing a fact returns
at once, and its KV is encoded behind the gate; deleting one returns when the engine has forgotten it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

from inferscale.catalog.results import Added, ScopeEpoch
from inferscale.chat_plan import ChatPlanner, Mode, PreparedChat, Residents, digest_of
from inferscale.encode_jobs import JobChooser, TurnBook
from inferscale.encoder import EncodeJob, Encoder
from inferscale.errors import EngineError, InferScaleError, UnknownFact, UnknownScope
from inferscale.facts import ChangeEvent, Fact, HistoryEvent, Scope, SearchHit
from inferscale.filters import Filter
from inferscale.memory import Memory
from inferscale.plan import Order, Plan, cache_salt
from inferscale.prompt import Draft
from inferscale.runtime.folder_lock import remove_runtime_dir
from inferscale.runtime.residency import ResidencyClient
from inferscale.runtime.secret import load_secret, open_runtime_dir
from inferscale.server.engine import EngineSide, Front, prompt_builder
from inferscale.server.extraction import Extractions, ServerExtraction
from inferscale.server.gate import Gate
from inferscale.server.keys import Caller, check_readable
from inferscale.server.metrics import Metrics
from inferscale.turns import Content
from inferscale.windows import WindowPolicy

logger = logging.getLogger(__name__)

_THREADS = 8
_ORDERED_AT_ONCE = 2000
_PART_TOKENS = 128
"""Of a pass that chats may have to wait for."""
_STOP_S = 5.0
_STRAYS_EVERY_S = 60.0
"""How often KV on disk is compared with the facts, where another process has written to the catalog."""
_HEAD_IS_ENCODED = "the system text is being encoded"
_NOT_ENCODED = "the facts found are being encoded"
_TOO_FEW = "so few tokens are prefilled as fast"
_GPU_MIN_INJECTED_TOKENS = 128

_A = TypeVar("_A")
_P = ParamSpec("_P")


class ShownFact(NamedTuple):
    """A fact for its owner. injectable: its KV is in the pool."""

    fact: Fact
    injectable: bool


class InferredFacts(NamedTuple):
    """What was stored of a conversation, and what became of each of its facts; see `catalog.Added`."""

    facts: list[ShownFact]
    events: tuple[ChangeEvent, ...]
    warning: str | None


class FactPage(NamedTuple):
    """As `facts.Page`, for its owner."""

    facts: list[ShownFact]
    next_cursor: str | None


class Stats(NamedTuple):
    """num_injectable: None where it was not asked for a scope. counters: the connector's and the pool's."""

    num_facts: int
    num_injectable: int | None
    num_pending: int
    injection: bool
    counters: Mapping[str, Any]


class MemoryService:
    """Made by `open_service`. Methods are to be called in one event loop."""

    def __init__(
        self, front: Front, memory: Memory, encoder: Encoder, residency: ResidencyClient, engine: EngineSide
    ) -> None:
        self.front = front
        self.memory = memory
        self.encoder = encoder
        self.residency = residency
        self.engine = engine
        self.metrics = Metrics()
        self.injects = True
        """Switched by an operator; else every chat has its facts as text."""
        self.planner = ChatPlanner(memory, encoder, front.max_model_len, self._ask_resident, keeps_turns=True)
        memory.check_text = self.planner.check_length
        self.gate: Gate[EncodeJob] = Gate(self._encode)
        model = ServerExtraction(engine, self.planner.prompts, front.max_model_len, self.gate.give_way)
        self._extractions = Extractions(memory, model, front.max_model_len)
        self._jobs = JobChooser(encoder, residency)
        self._turns = TurnBook()
        self._missing: dict[Scope, set[str]] = {}  # facts that chats missed, by stored scope
        self._threads = ThreadPoolExecutor(_THREADS, "inferscale-memory")
        self._loop = asyncio.get_running_loop()
        self._watching: asyncio.Task[None] | None = None
        self._part_tokens = -(-_PART_TOKENS // front.block_size) * front.block_size
        given = front.server.min_injected_tokens
        default = _GPU_MIN_INJECTED_TOKENS if front.is_on_gpu else 0
        self._min_injected_tokens = default if given is None else given

    async def _run(self, work: Callable[_P, _A], *args: _P.args, **kwargs: _P.kwargs) -> _A:
        return await self._loop.run_in_executor(self._threads, partial(work, *args, **kwargs))

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
            **_ids(stored),
            speaker=speaker,
            said_at=said_at,
            metadata=metadata,
            expires_at=expires_at,
            infer=False,
        )
        if facts:
            self.metrics.added.inc(len(facts))
            self._encode_later(stored)
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
                self._encode_later(stored)

        added = await self._extractions.add(content, follow, **_ids(stored), **given)
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
                return self.memory.search(query, **_ids(stored), top_k=top_k, filters=filters)
            except UnknownScope:
                return []

        hits = await self._run_purged(find)
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
        page = await self._run(self.memory.page, **_ids(stored), limit=limit, after=after, filters=filters)
        return FactPage(await self._with_state(caller, page.facts), page.next_cursor)

    async def set_block(self, caller: Caller, scope: Scope, name: str, text: str) -> ShownFact:
        """As `Memory.set_block`; encoding follows."""
        stored = caller.stored(scope)
        update = await self._run(self.memory.set_block, name, text, **_ids(stored))
        await self._forget(update.keys, update.epochs)
        self._encode_later(stored)
        return (await self._with_state(caller, [update.fact]))[0]

    async def blocks(self, caller: Caller, scope: Scope) -> list[ShownFact]:
        """The core blocks of a chat with this scope, by name."""
        found = await self._run(self.memory.blocks, self._readable(caller, scope))
        return await self._with_state(caller, found.blocks)

    async def delete_block(self, caller: Caller, scope: Scope, name: str) -> None:
        deletion = await self._run(self.memory.delete_block, name, **_ids(caller.stored(scope)))
        self.metrics.deleted.inc()
        await self._forget(deletion.keys, deletion.epochs)

    async def _purge(self) -> None:
        """Delete what has expired, of everybody."""
        deletion = await self._run(self.memory.purge_expired)
        self.metrics.deleted.inc(deletion.num_facts)
        await self._forget(deletion.keys, deletion.epochs)

    async def _run_purged(self, find: Callable[[], _A]) -> _A:
        """What `find` finds once nothing is there that has expired. One visit to a thread, as a rule."""

        def find_unless_due() -> tuple[_A] | None:
            return None if self.memory.is_purge_due() else (find(),)

        found = await self._run(find_unless_due)
        if found is None:
            await self._purge()
            return await self._run(find)
        return found[0]

    async def get(self, caller: Caller, fact_id: str) -> ShownFact:
        fact = await self._run(self._own, caller, fact_id)
        return (await self._with_state(caller, [fact]))[0]

    async def update(self, caller: Caller, fact_id: str, changes: Mapping[str, Any]) -> ShownFact:
        """changes: of text, speaker, said_at and metadata, those that are given."""
        await self._run(self._own, caller, fact_id)
        update = await self._run(self.memory.update, fact_id, **changes)
        await self._forget(update.keys, update.epochs)
        if update.keys or update.epochs:
            self._encode_later(update.fact.scope)
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
        deletion = await self._run(self.memory.delete_all, **_ids(caller.stored(scope)))
        self.metrics.deleted.inc(deletion.num_facts)
        await self._forget(deletion.keys, deletion.epochs)
        return deletion.num_facts

    async def warm(self, caller: Caller, scope: Scope) -> int:
        """Encode what is not in the pool, as far as it has room; returns how many passes wait already."""
        stored = scope if scope.is_empty() else caller.stored(scope)
        if scope.is_empty():
            caller.check_operator()
        self.gate.put(f"warm {digest_of(stored)}", lambda: self._run(self._jobs.to_warm, stored))
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
            num_facts, num_injectable = len(facts), len(self._injectable(facts))
        return Stats(num_facts, num_injectable, self.gate.num_waiting, self.injects, counters)

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
        there = await self._run(self._injectable, facts)
        return [ShownFact(_shown(caller, fact), fact.id in there) for fact in facts]

    def _injectable(self, facts: Sequence[Fact]) -> set[str]:
        """Ids of the facts whose KV is in the pool; none where the engine does not say."""
        keys = self.encoder.keys(fact.id for fact in facts)
        try:
            there = self._jobs.resident(list(keys.values()))
        except EngineError as error:
            logger.warning("The pool could not be asked: %s", error)
            return set()
        return {fact_id for fact_id, key in keys.items() if key in there}

    async def _forget(self, keys: Sequence[str], epochs: Sequence[ScopeEpoch]) -> None:
        """The engine drops this KV, and refuses plans that are older. Goes on where the caller has left.

        Earlier turns go too: what was deleted may have been said in them, or be quoted in an answer.
        """
        keys = [*keys, *self._turns.forget(item.scope for item in epochs)]
        if not keys and not epochs:
            return
        try:
            await asyncio.shield(self._order_forget(keys, epochs))
        except EngineError:
            # No new plan names these keys or this epoch, so nothing of it can be reached any more.
            logger.exception("The engine was not told of a deletion; the KV stays until it is evicted")

    async def _order_forget(self, keys: Sequence[str], epochs: Sequence[ScopeEpoch]) -> None:
        """The epochs first: with them no request injects any of it. In orders of bounded size."""
        told = tuple((digest_of(item.scope), item.epoch) for item in epochs)
        if len(keys) + len(told) <= _ORDERED_AT_ONCE:  # as nearly always
            await self.engine.order(Order("forget", tuple(keys), told))
            return
        for start in range(0, len(told), _ORDERED_AT_ONCE):
            await self.engine.order(Order("forget", epochs=told[start : start + _ORDERED_AT_ONCE]))
        for start in range(0, len(keys), _ORDERED_AT_ONCE):
            await self.engine.order(Order("forget", tuple(keys[start : start + _ORDERED_AT_ONCE])))

    # chat -------------------------------------------------------------------------------------

    async def prepare(
        self,
        draft: Draft,
        caller: Caller,
        scope: Scope,
        top_k: int,
        mode: Mode,
        tail: int,
        max_tokens: int,
        caller_salt: str = "",
        within: Filter | None = None,
    ) -> PreparedChat:
        """A chat with the best facts; what has to be encoded for the next one is. Raises InvalidInput."""
        stored = self._readable(caller, scope)
        chat = (draft, stored, top_k, mode, tail, max_tokens, caller_salt, within)
        prepared = await self._run_purged(lambda: self.planner.prepare(*chat))
        missing = {candidate.fact.id for candidate in prepared.choice.missing}
        if missing:
            self._missing.setdefault(stored, set()).update(missing)
            self.gate.put(f"repair {digest_of(stored)}", lambda: self._repair_jobs(stored))
        if missing and prepared.plan is None and prepared.reason is None:
            prepared = prepared._replace(reason=_NOT_ENCODED)
        if prepared.plan is not None and sum(prepared.plan.table.lengths) < self._min_injected_tokens:
            prepared = prepared._replace(plan=None, reason=_TOO_FEW)
        self.metrics.prepared(mode, prepared)
        return prepared

    async def _repair_jobs(self, scope: Scope) -> list[EncodeJob]:
        """For all that chats of this scope have missed so far."""
        return await self._run(self._jobs.for_repair, scope, self._missing.pop(scope, set()))

    async def keep_turn(
        self, draft: Draft, plan: Plan, caller: Caller, scope: Scope, answer: str | None
    ) -> None:
        """Encode a chat's turns for its next question. answer: see `ChatPlanner.conversation`."""
        stored = caller.stored(scope)
        self._turns.put(await self._run(self.planner.conversation, draft, plan, stored, answer))
        self.gate.put("turns", self._turn_jobs)

    async def _turn_jobs(self) -> list[EncodeJob]:
        """Of one conversation at a time, so that new facts do not wait for all of them."""
        conversation = self._turns.take()
        if self._turns.num_waiting:
            self.gate.put("turns", self._turn_jobs)
        return await self._run(self._jobs.for_turns, conversation) if conversation is not None else []

    def text_salt(self, caller: Caller, scope: Scope, epoch: int, caller_salt: str) -> str:
        """Salt of vLLM's prefix cache for facts that stand in a prompt as text."""
        digest = digest_of(caller.stored(scope))
        return cache_salt(self.engine.secret, self.engine.model, digest, epoch, "text", caller_salt)

    async def outcome(self, plan_id: str) -> dict[str, Any]:
        """What the connector says of a plan; empty where it says nothing."""
        try:
            return await self._run(self.residency.outcome, plan_id) or {}
        except EngineError as error:
            logger.warning("The outcome of a chat is not known: %s", error)
            return {}

    def _ask_resident(self, head: tuple[int, ...], head_key: str, keys: Sequence[str]) -> Residents:
        """As `AskResident`, in a thread. The head is encoded for the next chat where the pool lacks it."""
        try:
            there = self._jobs.resident([head_key, *keys])
        except EngineError as error:
            logger.warning("Facts are prefilled as text: %s", error)
            return Residents(frozenset(), "the engine did not say which facts are in the pool")
        if head_key in there or not there:
            return Residents(there)

        async def head_job() -> list[EncodeJob]:
            return [self.encoder.head_job(head)]

        self._loop.call_soon_threadsafe(partial(self.gate.put, f"head {head_key}", head_job, is_urgent=True))
        return Residents(frozenset(), _HEAD_IS_ENCODED)

    async def forget_strays(self) -> None:
        """After a start: remove KV on disk that no fact has any more. Nothing of it can be reached."""
        try:
            strays = await self._run(self._jobs.strays)
            if strays:
                logger.info("%d segments on disk belong to no fact and are removed", len(strays))
                await self._order_forget(strays, ())
        except InferScaleError:
            logger.exception("What lies on disk could not be compared with the facts")

    # encoding ---------------------------------------------------------------------------------

    def _encode_later(self, scope: Scope) -> None:
        self.gate.put(f"new {digest_of(scope)}", lambda: self._run(self.encoder.new_jobs, scope))

    async def _encode(self, job: EncodeJob) -> None:
        """One pass; in parts where chats come and go: each finds the one before in vLLM's prefix cache."""
        in_parts = self.gate.has_company and self.front.caches_prefixes
        parts = job.in_parts(self._part_tokens) if in_parts else [job]
        num_lost = 0
        for number, part in enumerate(parts):
            if number:
                await self.gate.give_way()
            if await self._run(self.encoder.is_outdated, part):
                return
            outcome = await self.engine.run(part.token_ids, self.encoder.plan_of(part))
            num_lost += len(part.captures) - int(outcome.get("captured", 0))
        self.metrics.encoded.inc(0 if num_lost else job.num_facts)
        if num_lost:
            logger.info("%d of %d segments of a pass were not captured", num_lost, len(job.captures))

    # seen from outside ------------------------------------------------------------------------

    async def is_healthy(self) -> bool:
        """Whether the connector answers: without it every chat would have its memory as text."""
        try:
            return await self._run(self.residency.model) == self.engine.model
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
            self._watching = self._loop.create_task(self._watch_strays(), name="inferscale-strays")

    async def _watch_strays(self) -> None:
        """At the start, and where another process may have deleted something since."""
        known = None
        while True:
            token = await self._run(self.memory.catalog.change_token)
            if known is None or token.data_version != known.data_version:
                await self.forget_strays()
            known = token
            await asyncio.sleep(_STRAYS_EVERY_S)

    def load_embedder(self) -> None:
        """Begin to load it: the first chat need not wait for it."""
        self._threads.submit(self._embed_something)

    def _embed_something(self) -> None:
        try:
            self.memory.load()
        except Exception:  # the first use says it to its caller
            logger.exception("The embedder could not be loaded")

    async def close(self) -> None:
        """What is encoded no further is encoded when a chat misses it. Takes the runtime folder away."""
        if self._watching is not None:
            self._watching.cancel()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._extractions.close(), _STOP_S)
        await self.gate.close()
        stopping = asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)
        with suppress(TimeoutError):  # they may use what is closed next, but not for ever
            await asyncio.wait_for(stopping, _STOP_S)
        self.residency.close()
        self.memory.close()
        remove_runtime_dir(self.front.runtime_dir)


def open_service(front: Front) -> MemoryService:
    """For the engine of this process. To be called in its event loop; blocks while it loads a tokenizer.

    Raises InferScaleError.
    """
    folder = open_runtime_dir(str(front.runtime_dir))
    residency = ResidencyClient(folder)
    engine = EngineSide(front.client, residency.model(), load_secret(folder))
    memory = Memory(front.server.memory)
    encoding = front.server.encoding
    encoder = Encoder(
        memory.catalog,
        prompt_builder(front),
        engine.model,
        WindowPolicy(encoding.window, encoding.stride),
        front.max_model_len - 1,
    )
    return MemoryService(front, memory, encoder, residency, engine)


def _ids(scope: Scope) -> dict[str, str | None]:
    return {"user_id": scope.user_id, "agent_id": scope.agent_id, "run_id": scope.run_id}


def _shown(caller: Caller, fact: Fact) -> Fact:
    from dataclasses import replace

    return replace(fact, scope=caller.shown(fact.scope))


__all__ = [
    "FactPage",
    "InferScaleError",
    "InferredFacts",
    "MemoryService",
    "ShownFact",
    "Stats",
    "open_service",
]
