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

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, get_args

from inferscale.catalog import Deletion
from inferscale.chat_result import ChatResult, ChatTimings, Mode, PreparedChat, chat_result
from inferscale.config import ConnectorConfig, EncodingConfig, MemoryConfig
from inferscale.encode_runner import EncodeProgress, EncodeRunner, Progress
from inferscale.encoder import Encoder
from inferscale.errors import (
    EngineError,
    EngineMissing,
    InvalidConfig,
    InvalidInput,
    TextTooLong,
    UnknownScope,
)
from inferscale.facts import Fact, Scope, SearchHit, Turn
from inferscale.memory import Memory, Recall
from inferscale.offline import Generation, GenerationRequest, OfflineEngine
from inferscale.plan import Order, Plan, Segment, scope_digest
from inferscale.planner import Candidate, Choice, choose
from inferscale.prompt import DEFAULT_SYSTEM, Draft, Prompt, PromptBuilder
from inferscale.retrieval import Embedder
from inferscale.turns import Content, read_scope
from inferscale.windows import WindowPolicy

__all__ = ["ChatResult", "ChatTimings", "EncodeProgress", "MemoryLLM", "Mode", "Progress"]

logger = logging.getLogger(__name__)

Messages = str | Sequence[Mapping[str, Any]]


class MemoryLLM:
    """`vllm.LLM` with memory. Calls may come from several threads; the engine serves them in turn.

    model: a folder or hub name. memory: a folder's settings, or a `Memory` that is already open (it
    is then not closed here). encoding: window policy. pool_size_bytes: of the KV pool, such as '2GB'; left
    out, a quarter of what the model leaves on a GPU and 1 GiB elsewhere (`ConnectorConfig`).
    connector: all settings of the connector instead. repair_after_chat: once an
    answer is there, encode the facts that had to be prefilled for it, before `chat` returns; the next
    one injects them.
    engine_args: further arguments of `vllm.LLM`, such as `max_model_len` or `dtype`.
    """

    def __init__(
        self,
        model: str | Path,
        memory: MemoryConfig | Memory | None = None,
        *,
        encoding: EncodingConfig | None = None,
        pool_size_bytes: int | str | None = None,
        embedder: Embedder | None = None,
        default_system: str = DEFAULT_SYSTEM,
        repair_after_chat: bool = True,
        engine_args: Mapping[str, Any] | None = None,
        connector: ConnectorConfig | None = None,
    ) -> None:
        encoding = encoding or EncodingConfig()
        if connector is None:
            connector = ConnectorConfig()
            if pool_size_bytes is not None:
                connector = replace(connector, pool_size_bytes=pool_size_bytes)
        elif pool_size_bytes is not None:
            raise InvalidConfig("pool_size_bytes and connector were given; set the size in one of them.")
        self.prompts = PromptBuilder(_tokenizer(str(model), engine_args or {}), default_system=default_system)
        self._owns_memory = not isinstance(memory, Memory)
        self.memory = memory if isinstance(memory, Memory) else Memory(memory, embedder=embedder)
        self.memory.check_text = self._check_length
        self.repair_after_chat = repair_after_chat
        self.engine = OfflineEngine(model, connector, engine_args)
        self.encoder = Encoder(
            self.memory.catalog,
            self.prompts,
            self.engine.fingerprint,
            WindowPolicy(encoding.window, encoding.stride),
            self.engine.max_model_len - 1,
        )
        self.runner = EncodeRunner(self.engine, self.encoder)
        self._head_key = lru_cache(maxsize=64)(self.encoder.head_key)
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
                with _only_logged("Encoding new facts"):
                    self.runner.encode_new(facts[0].scope, progress)
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

        Stops when the pool is full: the rest would only push out what was encoded before. Raises
        UnknownScope for a scope without facts, InvalidInput for ids that cannot be.
        """
        scope = Scope(user_id, agent_id, run_id)
        if not scope.is_empty():
            self.memory.get_all(user_id=user_id, agent_id=agent_id, run_id=run_id, limit=1)
        with self._lock:
            return self.runner.warm(scope, progress)

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
        listed = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        with self._lock:
            prepared = self._prepare(listed, scope, top_k, mode, tail, max_tokens)
            request = GenerationRequest(
                prepared.prompt.token_ids, max_tokens, prepared.plan, temperature, sampling or {}
            )
            submitted_s = time.perf_counter()
            generation = self._generate(request)
            result = chat_result(mode, prepared, generation, submitted_s - start_s)
            if mode == "inject" and self.repair_after_chat and prepared.choice.missing:
                with _only_logged("Encoding missing facts"):
                    self.runner.repair(scope, _facts(prepared.choice.missing))
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
        messages: Sequence[Mapping[str, Any]],
        scope: Scope,
        top_k: int,
        mode: Mode,
        tail: int,
        max_tokens: int,
    ) -> PreparedChat:
        start_s = time.perf_counter()
        draft = self.prompts.draft(messages)
        recall = _NOTHING if mode == "none" else self._recall(draft.question, scope, top_k, mode)
        there, reason, residency_ms = set[str](), None, 0.0
        if mode == "inject" and recall.hits:
            head = draft.head_ids
            asked_s = time.perf_counter()
            there, reason = self._resident(head, list(recall.keys.values()))
            residency_ms = (time.perf_counter() - asked_s) * 1e3
        candidates = [self._candidate(hit, recall.keys, there) for hit in recall.hits]
        limit = self.engine.max_model_len - max_tokens
        choice, prompt = self._fitted(draft, candidates, tail, limit, needs_residency=mode == "inject")
        plan = None
        if mode == "inject" and choice.front:
            plan = self._plan(scope, recall.epoch, choice, prompt)
        timings = ChatTimings(recall.embed_ms, recall.search_ms, residency_ms)
        prompt_ms = (time.perf_counter() - start_s) * 1e3 - timings.front_ms
        return PreparedChat(prompt, choice, recall.hits, plan, reason, timings._replace(prompt_ms=prompt_ms))

    def _recall(self, question: str, scope: Scope, top_k: int, mode: Mode) -> Recall:
        """The facts found, with the keys of their KV where it shall be injected."""
        try:
            model = self.encoder.encodings_of if mode == "inject" else None
            return self.memory.recall(question, scope, top_k, model)
        except UnknownScope:
            return _NOTHING

    def _candidate(self, hit: SearchHit, keys: Mapping[str, str], there: Set[str]) -> Candidate:
        key = keys.get(hit.fact.id)
        return Candidate(hit.fact, len(self.prompts.fact_ids(hit.fact)), key if key in there else None)

    def _resident(self, head: tuple[int, ...], keys: list[str]) -> tuple[set[str], str | None]:
        """Which of the keys can be injected; why none can, where that is unusual."""
        try:
            return self._resident_behind_head(head, keys), None
        except EngineError as error:
            logger.warning("Facts are prefilled as text: %s", error)
            return set(), "the engine did not say which facts are in the pool"

    def _resident_behind_head(self, head: tuple[int, ...], keys: list[str]) -> set[str]:
        """Resident keys, once the text in front of all facts is resident as well.

        That text is encoded first where the pool lacks it, and only then are the facts asked for:
        its capture may have pushed one out.
        """
        head_key = self._head_key(head)
        there = self.runner.resident([head_key, *keys])
        if head_key not in there and there:
            self.runner.run([self.encoder.head_job(head)])
            there = self.runner.resident([head_key, *keys])
        return there if head_key in there else set()

    def _fitted(
        self, draft: Draft, candidates: Sequence[Candidate], tail: int, limit: int, *, needs_residency: bool
    ) -> tuple[Choice, Prompt]:
        """The facts that fit into `limit` tokens together with the messages, and their prompt.

        As a rule all of them fit beside what the template was rendered to; only else is the prompt
        without facts rendered to learn how much room there is. Raises TextTooLong.
        """
        if candidates:
            room = limit - draft.num_tokens
            choice = choose(candidates, tail=tail, budget_tokens=room, needs_residency=needs_residency)
            if not choice.num_left_out:
                prompt = draft.build(_facts(choice.front), _facts(choice.tail))
                if len(prompt.token_ids) <= limit:
                    return choice, prompt
        without_facts = draft.build()
        room = limit - len(without_facts.token_ids)
        if room < 0:
            raise TextTooLong(
                f"The messages and max_tokens={self.engine.max_model_len - limit} need {-room} tokens more "
                f"than the model's max_model_len={self.engine.max_model_len}. Shorten the messages or lower "
                "max_tokens."
            )
        while True:
            choice = choose(candidates, tail=tail, budget_tokens=room, needs_residency=needs_residency)
            if not (choice.front or choice.tail):
                return choice, without_facts
            prompt = draft.build(_facts(choice.front), _facts(choice.tail))
            excess = len(prompt.token_ids) - limit
            if excess <= 0:
                return choice, prompt
            room -= excess  # headings around the facts

    def _plan(self, scope: Scope, epoch: int, choice: Choice, prompt: Prompt) -> Plan:
        """Head and front facts as segments."""
        head = prompt.head_ids
        segments = [Segment(self._head_key(head), head, "text")]
        for candidate in choice.front:
            assert candidate.key is not None
            segments.append(Segment(candidate.key, self.prompts.fact_ids(candidate.fact), "fact"))
        return Plan(self.engine.fingerprint, _digest(scope), epoch, segments=tuple(segments))

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


_NOTHING = Recall((), {}, 0, 0.0, 0.0)


@contextmanager
def _only_logged(what: str) -> Iterator[None]:
    """Encoding makes later chats faster: its failure must not take away what was stored or answered."""
    try:
        yield
    except Exception:
        logger.exception("%s failed; they are prefilled as text until they are encoded", what)


def _tokenizer(model: str, engine_args: Mapping[str, Any]) -> Any:
    """The tokenizer that vLLM uses for these arguments. Raises EngineMissing."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(engine_args.get("tokenizer") or model),
            revision=engine_args.get("tokenizer_revision") or engine_args.get("revision"),
            trust_remote_code=bool(engine_args.get("trust_remote_code", False)),
        )
    except (OSError, ValueError) as error:
        raise EngineMissing(
            f"The tokenizer of {model!r} cannot be loaded; give a folder with a model and its tokenizer, "
            f"or the name of one on a hub that can be reached. ({str(error).splitlines()[0]})"
        ) from error


def _digest(scope: Scope) -> str:
    return scope_digest(scope.user_id, scope.agent_id, scope.run_id)


def _facts(candidates: Sequence[Candidate]) -> list[Fact]:
    return [candidate.fact for candidate in candidates]
