"""MemoryLLM: vLLM with long-term memory, offline, in one object.

    llm = MemoryLLM("HuggingFaceTB/SmolLM2-135M-Instruct")
    llm.add("My sister lives in Oslo.", user_id="ana")
    print(llm.chat("Where does my sister live?", user_id="ana").text)

Data flow of a chat: search → which facts are resident (socket) → `planner.choose` →
`PromptBuilder.build` → signed plan → engine → outcome from the connector. Text is the truth: facts
live in the `Memory`'s catalog; their KV is encoded through the same engine, lives in the
connector's pool and is rebuilt when it is missing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, get_args

from inferscale.catalog import Deletion
from inferscale.config import ConnectorConfig, EncodingConfig, MemoryConfig
from inferscale.encoder import EncodeJob, Encoder
from inferscale.errors import EngineError, InvalidInput, TextTooLong, UnknownScope
from inferscale.facts import Fact, Scope, SearchHit, Turn
from inferscale.memory import Memory
from inferscale.offline import Generation, GenerationRequest, OfflineEngine
from inferscale.plan import Order, Plan, Segment, scope_digest
from inferscale.planner import Candidate, Choice, choose
from inferscale.prompt import DEFAULT_SYSTEM, Prompt, PromptBuilder, question_of
from inferscale.retrieval import Embedder
from inferscale.turns import Content, read_scope, read_turns
from inferscale.windows import WindowPolicy

Mode = Literal["inject", "text", "none"]
Messages = str | Sequence[Mapping[str, Any]]
Progress = Callable[["EncodeProgress"], None]

_JOBS_AT_ONCE = 8


class EncodeProgress(NamedTuple):
    """How far encoding is. computed_tokens / stored_tokens is the cost of the window policy."""

    done_jobs: int
    jobs: int
    stored_tokens: int
    computed_tokens: int
    seconds: float


@dataclass(frozen=True)
class ChatResult:
    """An answer and what it cost.

    ttft_ms: from handing the request to the engine to the first token; e2e_ttft_ms: the same from
    the call of `chat`, so with search and planning. Prompt tokens are either injected (from the
    pool), cached (vLLM's own prefix cache) or prefilled. num_missing_tokens: tokens of facts that
    were prefilled because their KV was not in the pool. num_left_out: facts found that did not fit.
    """

    text: str
    mode: Mode
    ttft_ms: float
    e2e_ttft_ms: float
    num_prompt_tokens: int
    num_injected_tokens: int
    num_cached_tokens: int
    num_prefilled_tokens: int
    num_missing_tokens: int
    num_output_tokens: int
    num_left_out: int
    hits: tuple[SearchHit, ...]
    reason: str | None = None


class _Prepared(NamedTuple):
    prompt: Prompt
    choice: Choice
    hits: tuple[SearchHit, ...]
    plan: Plan | None


class MemoryLLM:
    """`vllm.LLM` with memory. Calls may come from several threads; the engine serves them in turn.

    model: a folder or hub name. memory: a folder's settings, or a `Memory` that is already open (it
    is then not closed here). encoding: window policy. pool_size_bytes: of the KV pool.
    repair_after_chat: encode missing facts after an answer, so that the next one finds them.
    engine_args: further arguments of `vllm.LLM`, such as `max_model_len` or `dtype`.
    """

    def __init__(
        self,
        model: str | Path,
        memory: MemoryConfig | Memory | None = None,
        *,
        encoding: EncodingConfig | None = None,
        pool_size_bytes: int | str = 2**30,
        embedder: Embedder | None = None,
        default_system: str = DEFAULT_SYSTEM,
        repair_after_chat: bool = True,
        engine_args: Mapping[str, Any] | None = None,
        connector: ConnectorConfig | None = None,
    ) -> None:
        from transformers import AutoTokenizer

        encoding = encoding or EncodingConfig()
        tokenizer = AutoTokenizer.from_pretrained(str(model))
        self.prompts = PromptBuilder(tokenizer, default_system=default_system)
        self._owns_memory = not isinstance(memory, Memory)
        self.memory = memory if isinstance(memory, Memory) else Memory(memory, embedder=embedder)
        self.repair_after_chat = repair_after_chat
        self.engine = OfflineEngine(
            model, connector or ConnectorConfig(pool_size_bytes=pool_size_bytes), engine_args
        )
        self.encoder = Encoder(
            self.memory.catalog,
            self.prompts,
            self.engine.fingerprint,
            WindowPolicy(encoding.window, encoding.stride),
            self.engine.max_model_len - 1,
        )
        self._lock = threading.RLock()

    # memory -----------------------------------------------------------------------------------

    def add(
        self,
        content: Content | Sequence[Content],
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        speaker: str | None = None,
        said_at: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> list[Fact]:
        """Store facts and encode them; see `Memory.add` for what `content` may be.

        Raises TextTooLong, before anything is stored, for a text that the model cannot hold.
        """
        for turn in read_turns(content, speaker, said_at, metadata):
            self._check_length(turn)
        with self._lock:
            facts = self.memory.add(
                content,
                user_id=user_id,
                agent_id=agent_id,
                run_id=run_id,
                speaker=speaker,
                said_at=said_at,
                metadata=metadata,
            )
            if facts:
                self._encode(self.encoder.new_jobs(facts[0].scope), progress)
        return facts

    def search(
        self,
        query: str,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        top_k: int = 10,
    ) -> list[SearchHit]:
        """See `Memory.search`."""
        return self.memory.search(query, user_id=user_id, agent_id=agent_id, run_id=run_id, top_k=top_k)

    def delete(self, fact_id: str) -> Deletion:
        """Remove a fact and every KV that attended to it, in the catalog and in the engine."""
        with self._lock:
            deletion = self.memory.delete(fact_id)
            epochs = tuple((_digest(item.scope), item.epoch) for item in deletion.epochs)
            self.engine.order(Order("forget", tuple(deletion.keys), epochs))
        return deletion

    def warm(
        self,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        progress: Progress | None = None,
    ) -> EncodeProgress:
        """Encode every fact of the scope (of all scopes without one) that is not resident.

        Stops when the pool is full: the rest would only push out what was encoded before.
        """
        scope = Scope(user_id, agent_id, run_id)
        with self._lock:
            jobs = self.encoder.new_jobs(scope)
            planned = {span.key for job in jobs for span in job.captures}
            facts = self.memory.catalog.facts(scope)
            keys = {
                id: key for id, key in self.encoder.keys(f.id for f in facts).items() if key not in planned
            }
            resident = self._resident(list(keys.values()))
            jobs += self.encoder.rebuild_jobs(id for id, key in keys.items() if key not in resident)
            return self._encode(self._fitting(jobs), progress)

    def _fitting(self, jobs: list[EncodeJob]) -> list[EncodeJob]:
        """The newest jobs that fit into the pool's free pages, in their order."""
        stats = self.engine.residency.stats()
        pages, size = stats["free_pages"], stats["page_size_tokens"]
        there = self._resident(list({span.key for job in jobs for span in job.captures}))
        kept = []
        for job in reversed(jobs):
            new = {span.key: span.end - span.start for span in job.captures if span.key not in there}
            pages -= sum(-(-num_tokens // size) for num_tokens in new.values())
            there.update(new)
            if pages < 0:
                break
            kept.append(job)
        return kept[::-1]

    # chat -------------------------------------------------------------------------------------

    def chat(
        self,
        messages: Messages,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        top_k: int = 50,
        mode: Mode = "inject",
        tail: int = 0,
        max_tokens: int = 256,
        temperature: float = 0.0,
        sampling: Mapping[str, Any] | None = None,
    ) -> ChatResult:
        """Answer the last message with the `top_k` most similar facts of the scope in the prompt.

        mode: `inject` takes their KV from the pool, `text` prefills the same text, `none` leaves
        memory out. tail: so many of the best facts are prefilled right before the question instead
        of injected; they then see all others. A scope without facts is answered without memory.
        Raises InvalidInput (EmptyText, TextTooLong, …) for what cannot be asked.
        """
        if mode not in get_args(Mode):
            raise InvalidInput(f"mode is {mode!r}; allowed are {', '.join(get_args(Mode))}.")
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise InvalidInput(f"max_tokens is {max_tokens!r}; allowed are whole numbers from 1.")
        start_s = time.perf_counter()
        scope = Scope() if mode == "none" else read_scope(user_id, agent_id, run_id)
        listed: list[Mapping[str, Any]]
        listed = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        with self._lock:
            prepared = self._prepare(listed, scope, top_k, mode, tail, max_tokens)
            request = GenerationRequest(
                prepared.prompt.token_ids, max_tokens, prepared.plan, temperature, sampling or {}
            )
            submitted_s = time.perf_counter()
            generation = self._generate(request)
            result = _result(mode, prepared, generation, submitted_s - start_s)
            if mode == "inject" and self.repair_after_chat and prepared.choice.missing:
                self._repair(scope, [candidate.fact for candidate in prepared.choice.missing])
        return result

    def _generate(self, request: GenerationRequest) -> Generation:
        """Run one request; where the worker could not write its memory, once more as text."""
        generation = self.engine.generate([request])[0]
        if generation.finish_reason == "error" and request.plan is not None:
            lost_s = generation.total_s
            generation = self.engine.generate([replace(request, plan=None)])[0]
            outcome = {"reason": "injecting its memory failed", "cached_tokens": generation.num_cached_tokens}
            generation = replace(generation, ttft_s=lost_s + generation.ttft_s, outcome=outcome)
        if generation.finish_reason == "error":
            raise EngineError("The engine failed the request; its log says why.")
        return generation

    def _prepare(
        self,
        messages: list[Mapping[str, Any]],
        scope: Scope,
        top_k: int,
        mode: Mode,
        tail: int,
        max_tokens: int,
    ) -> _Prepared:
        question = question_of(messages)
        hits = () if mode == "none" else self._hits(question, scope, top_k)
        candidates = self._candidates(hits, needs_keys=mode == "inject")
        room = self.engine.max_model_len - max_tokens - len(self.prompts.build(messages, [], []).token_ids)
        if room < 0:
            raise TextTooLong(
                f"The messages and max_tokens={max_tokens} need {-room} tokens more than the model's "
                f"max_model_len={self.engine.max_model_len}. Shorten the messages or lower max_tokens."
            )
        while True:
            choice = choose(candidates, tail=tail, budget_tokens=room, needs_residency=mode == "inject")
            prompt = self.prompts.build(messages, _facts(choice.front), _facts(choice.tail))
            excess = len(prompt.token_ids) + max_tokens - self.engine.max_model_len
            if excess <= 0 or not (choice.front or choice.tail):
                break
            room -= excess  # headings around the facts
        plan = self._plan(scope, choice, prompt) if mode == "inject" and choice.front else None
        return _Prepared(prompt, choice, tuple(hits), plan)

    def _hits(self, question: str, scope: Scope, top_k: int) -> list[SearchHit]:
        try:
            return self.memory.search(
                question, user_id=scope.user_id, agent_id=scope.agent_id, run_id=scope.run_id, top_k=top_k
            )
        except UnknownScope:
            return []

    def _candidates(self, hits: Sequence[SearchHit], *, needs_keys: bool) -> list[Candidate]:
        keys = self.encoder.keys(hit.fact.id for hit in hits) if needs_keys else {}
        resident = self._resident(list(keys.values()))
        return [
            Candidate(
                hit.fact,
                len(self.prompts.fact_ids(hit.fact)),
                key if (key := keys.get(hit.fact.id)) in resident else None,
            )
            for hit in hits
        ]

    def _resident(self, keys: list[str]) -> set[str]:
        return {key for key, yes in zip(keys, self.engine.residency.resident(keys), strict=True) if yes}

    def _plan(self, scope: Scope, choice: Choice, prompt: Prompt) -> Plan:
        """Head and front facts as segments; the head is encoded first where the pool lacks it."""
        head = tuple(prompt.head_ids)
        head_key = self.encoder.head_key(head)
        if not self._resident([head_key]):
            self._encode([self.encoder.head_job(head)], None)
        segments = [Segment(head_key, head, "text")]
        for candidate in choice.front:
            assert candidate.key is not None
            segments.append(Segment(candidate.key, tuple(self.prompts.fact_ids(candidate.fact)), "fact"))
        epoch = self.memory.catalog.epoch(scope)
        return Plan(self.engine.fingerprint, _digest(scope), epoch, segments=tuple(segments))

    # encoding ---------------------------------------------------------------------------------

    def _repair(self, scope: Scope, missing: Sequence[Fact]) -> None:
        """Encode what the last chat had to prefill, so that the next one can inject it."""
        jobs = self.encoder.new_jobs(scope)
        planned = {span.key for job in jobs for span in job.captures}
        keys = self.encoder.keys(fact.id for fact in missing)
        jobs += self.encoder.rebuild_jobs(id for id, key in keys.items() if key not in planned)
        self._encode(jobs, None)

    def _encode(self, jobs: Sequence[EncodeJob], progress: Progress | None) -> EncodeProgress:
        start_s = time.perf_counter()
        state = EncodeProgress(0, len(jobs), 0, 0, 0.0)
        for start in range(0, len(jobs), _JOBS_AT_ONCE):
            batch = jobs[start : start + _JOBS_AT_ONCE]
            self.engine.generate(
                [GenerationRequest(j.token_ids, plan=self.encoder.plan_of(j)) for j in batch]
            )
            state = EncodeProgress(
                start + len(batch),
                len(jobs),
                state.stored_tokens + sum(job.num_stored_tokens for job in batch),
                state.computed_tokens + sum(len(job.token_ids) for job in batch),
                time.perf_counter() - start_s,
            )
            if progress is not None:
                progress(state)
        return state

    def _check_length(self, turn: Turn) -> None:
        fact = Fact("", 0, Scope(), turn.text, turn.speaker, turn.said_at)
        num_tokens, anchor = len(self.prompts.fact_ids(fact)), len(self.prompts.anchor_ids)
        if num_tokens + anchor > self.encoder.max_tokens:
            raise TextTooLong(
                f"A text has {num_tokens} tokens; behind the {anchor} tokens of the anchor the model can "
                f"encode {self.encoder.max_tokens - anchor}. Split it. Nothing was stored."
            )

    def stats(self) -> dict[str, Any]:
        """The connector's counters and the pool's sizes."""
        return self.engine.residency.stats()

    def close(self) -> None:
        """Stop the engine and close the memory that was opened here."""
        self.engine.close()
        if self._owns_memory:
            self.memory.close()

    def __enter__(self) -> MemoryLLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _digest(scope: Scope) -> str:
    return scope_digest(scope.user_id, scope.agent_id, scope.run_id)


def _facts(candidates: Sequence[Candidate]) -> list[Fact]:
    return [candidate.fact for candidate in candidates]


def _result(mode: Mode, prepared: _Prepared, generation: Generation, before_s: float) -> ChatResult:
    outcome = generation.outcome or {}
    num_prompt = len(prepared.prompt.token_ids)
    num_injected = int(outcome.get("injected_tokens", 0))
    num_cached = int(outcome.get("cached_tokens", generation.num_cached_tokens))
    num_missing = sum(candidate.num_tokens for candidate in prepared.choice.missing)
    if prepared.plan is not None:
        planned = sum(len(segment.token_ids) for segment in prepared.plan.segments)
        num_missing += max(0, planned - num_injected - num_cached)
    return ChatResult(
        text=generation.text,
        mode=mode,
        ttft_ms=generation.ttft_s * 1e3,
        e2e_ttft_ms=(generation.ttft_s + before_s) * 1e3,
        num_prompt_tokens=num_prompt,
        num_injected_tokens=num_injected,
        num_cached_tokens=num_cached,
        num_prefilled_tokens=num_prompt - num_injected - num_cached,
        num_missing_tokens=num_missing,
        num_output_tokens=len(generation.token_ids),
        num_left_out=prepared.choice.num_left_out,
        hits=prepared.hits,
        reason=outcome.get("reason") or outcome.get("rejected"),
    )
