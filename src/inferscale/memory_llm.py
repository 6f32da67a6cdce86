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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, get_args

from inferscale.catalog import Added, Deletion, ScopeEpoch
from inferscale.chat_plan import ChatPlanner, ChatTimings, Mode, Residents, digest_of, facts_of
from inferscale.chat_result import ChatResult, chat_result
from inferscale.check_runner import check_engine
from inferscale.config import (
    DEFAULT_ORDER,
    DEFAULT_TAIL,
    ConnectorConfig,
    EncodingConfig,
    ExtractionConfig,
    MemoryConfig,
)
from inferscale.encode_runner import EncodeProgress, EncodeRunner, Progress
from inferscale.encoder import Encoder
from inferscale.errors import (
    EngineError,
    InvalidConfig,
    InvalidInput,
)
from inferscale.extract_runner import EngineExtraction
from inferscale.extraction import ExtractionModel, Inference
from inferscale.fact_order import FactOrder, parse_order
from inferscale.facts import Fact, Scope, SearchHit
from inferscale.filters import read_filter
from inferscale.memory import Memory
from inferscale.offline import Generation, GenerationRequest, OfflineEngine
from inferscale.plan import Order
from inferscale.prefetch_keys import prefetch_order
from inferscale.prompt import DEFAULT_SYSTEM, PromptBuilder
from inferscale.retrieval import Embedder
from inferscale.tail import Tail, TailLike
from inferscale.tokenization import load_tokenizer
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
    one injects them. tail: best facts that are recomputed in chats that do not say how many (`chat`).
    order: of the facts, in chats that do not name one.
    engine_args: further arguments of `vllm.LLM`, such as `max_model_len` or `dtype`.
    extraction: makes facts of conversations (`add(…, infer=True)`); left out, the memory's own, or this
    engine.
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
        extraction: ExtractionModel | Inference | None = None,
        tail: TailLike = DEFAULT_TAIL,
        order: FactOrder = DEFAULT_ORDER,
    ) -> None:
        default_tail, default_order = Tail.parse(tail), parse_order(order)
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
        self.repair_after_chat = repair_after_chat
        key_file = self.memory.config.encryption_key_file
        if connector.encryption_key_file is None and key_file is not None:
            connector = replace(connector, encryption_key_file=str(Path(key_file).absolute()))
        self.engine = OfflineEngine(model, connector, engine_args)
        self.encoder = Encoder(
            self.memory.catalog,
            self.prompts,
            self.engine.fingerprint,
            WindowPolicy.of(encoding),
            self.engine.max_model_len - 1,
        )
        self.runner = EncodeRunner(self.engine, self.encoder)
        self._check_engine()
        self.planner = ChatPlanner(
            self.memory,
            self.encoder,
            self.engine.max_model_len,
            self._ask_resident,
            tail=default_tail,
            order=default_order,
        )
        self.memory.check_text = self.planner.check_length
        self._lock = threading.RLock()
        if extraction is not None or self.memory.extraction is None:
            self.memory.extraction = extraction or self._own_extraction()
        if connector.disk_bytes:
            self._forget_strays()
        if connector.cold_location is not None:
            self._forget_shared_strays()

    def _check_engine(self) -> None:
        """`verdict`: of the self-check. Where it refuses injection, facts are text, and none is encoded."""
        self.verdict = check_engine(self.engine, self.prompts, self.memory.data_dir)
        self.runner.is_off = self.verdict.is_refusal

    def _forget_strays(self) -> None:
        """Remove KV on disk that no fact has any more, such as after a deletion without an engine."""
        with _only_logged("Comparing KV on disk with the facts"):
            strays = self.runner.jobs.strays()
            if strays:
                self.engine.order(Order("forget", tuple(strays)))

    def _forget_shared_strays(self) -> None:
        """The same of KV that servers share."""
        with _only_logged("Comparing shared KV with the facts"):
            for strays in self.runner.jobs.shared_strays():
                self.engine.order(Order("forget", tuple(strays)))

    def _own_extraction(self) -> Inference:
        config = ExtractionConfig()  # so many characters are less than half as many tokens
        room = max(100, min(config.max_chars, self.engine.max_model_len))
        model = EngineExtraction(self.prompts, self._extract, self.engine.max_model_len)
        return Inference(model, replace(config, max_chars=room))

    def _extract(self, request: GenerationRequest) -> Generation:
        with self._lock:
            return self.engine.generate([request])[0]

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
        infer: bool = False,
        progress: Progress | None = None,
    ) -> Added:
        """Store facts and encode them; see `Memory.add` for what `content` and `infer` may be.

        Raises TextTooLong, before anything is stored, for a text that the model cannot hold.
        """
        facts = self.memory.add(
            content,
            user_id=user_id,
            agent_id=agent_id,
            run_id=run_id,
            speaker=speaker,
            said_at=said_at,
            metadata=metadata,
            infer=infer,
        )
        with self._lock:
            if facts.epochs:
                self._forget(facts.keys, facts.epochs)
            if facts:
                with _only_logged("Encoding new facts"):
                    self.runner.encode_new(facts[0].scope, progress, {fact.id for fact in facts})
        return facts

    def search(
        self,
        query: str,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        top_k: int = 10,
        filters: Mapping[str, Any] | None = None,
    ) -> list[SearchHit]:
        """See `Memory.search`."""
        self._purge()
        return self.memory.search(
            query, user_id=user_id, agent_id=agent_id, run_id=run_id, top_k=top_k, filters=filters
        )

    def set_block(
        self,
        name: str,
        text: str,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
    ) -> Fact:
        """Store a core block and encode it; see `Memory.set_block`."""
        with self._lock:
            update = self.memory.set_block(name, text, user_id=user_id, agent_id=agent_id, run_id=run_id)
            self._forget(update.keys, update.epochs)
            with _only_logged("Encoding a core block"):
                self.runner.encode_new(update.fact.scope, only={update.fact.id})
        return update.fact

    def get_blocks(
        self, *, user_id: str | None = None, agent_id: str | None = None, run_id: str | None = None
    ) -> list[Fact]:
        """See `Memory.get_blocks`."""
        return self.memory.get_blocks(user_id=user_id, agent_id=agent_id, run_id=run_id)

    def delete_block(
        self,
        name: str,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
    ) -> Deletion:
        """Remove a core block as `delete` does."""
        with self._lock:
            deletion = self.memory.delete_block(name, user_id=user_id, agent_id=agent_id, run_id=run_id)
            self._forget(deletion.keys, deletion.epochs)
        return deletion

    def _forget(self, keys: Sequence[str], epochs: Sequence[ScopeEpoch]) -> None:
        """The engine drops this KV, and refuses plans that are older."""
        if keys or epochs:
            told = tuple((digest_of(item.scope), item.epoch) for item in epochs)
            self.engine.order(Order("forget", tuple(keys), told))

    def _purge(self) -> None:
        """Delete what has expired, before anything is found."""
        if self.memory.is_purge_due():
            with self._lock:
                deletion = self.memory.purge_expired()
                self._forget(deletion.keys, deletion.epochs)

    def delete(self, fact_id: str) -> Deletion:
        """Remove a fact and every KV that attended to it, in the catalog and in the engine."""
        with self._lock:
            deletion = self.memory.delete(fact_id)
            self._forget(deletion.keys, deletion.epochs)
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

    def prefetch(
        self, *, user_id: str | None = None, agent_id: str | None = None, run_id: str | None = None
    ) -> int:
        """Load the KV of the scope's core blocks and newest facts from host memory or disk into the pool; how
        many came.

        For when a user is about to ask: a chat loads what it needs by itself. At most 200 facts, and at most
        a quarter of the pool; 0 without lower tiers (`ConnectorConfig`), for a scope without facts, and where
        all is in the pool. Returns when it is done. Raises InvalidInput for ids that cannot be, EngineError.
        """
        scope = read_scope(user_id, agent_id, run_id)
        with self._lock:
            order = prefetch_order(self.encoder, self.engine.residency, scope, with_newest=True)
            return 0 if order is None else int(self.engine.order(order)["resident"])

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
        tail: TailLike | None = None,
        order: FactOrder | None = None,
        max_tokens: int = 256,
        temperature: float = 0.0,
        sampling: Mapping[str, Any] | None = None,
        filters: Mapping[str, Any] | None = None,
    ) -> ChatResult:
        """Answer the last message with the core blocks and the `top_k` best facts of the scope in the prompt.

        mode: `inject` takes their KV from the pool, `text` prefills the same text, `none` leaves
        memory out. tail: so many of the best facts, which stand last, are prefilled instead of
        injected; they then see all others. `5` facts, `"10%"` of the facts' tokens, `"300t"` tokens, the
        smallest of several as in `"6,12%"`, 0 for none (`Tail`). None: as `MemoryLLM` was told, `"6,12%"` by
        default, where nothing was said before the question, else none. order: of the facts, `best-last`,
        `chronological` or `session` (`fact_order`); those that are recomputed stand behind the others. None:
        as `MemoryLLM` was told, `best-last` by default. filters: as in `Memory.search`. A scope without facts
        is answered without memory.
        Raises InvalidInput (EmptyText, TextTooLong, …) for what cannot be asked.
        """
        if mode not in get_args(Mode):
            raise InvalidInput(f"mode is {mode!r}; allowed are {', '.join(get_args(Mode))}.")
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise InvalidInput(f"max_tokens is {max_tokens!r}; allowed are whole numbers from 1.")
        start_s = time.perf_counter()
        scope = Scope() if mode == "none" else read_scope(user_id, agent_id, run_id)
        within = read_filter(filters)
        asked_tail = None if tail is None else Tail.parse(tail)
        asked_order = None if order is None else parse_order(order)
        refusal = self.verdict.refusal if mode == "inject" else None
        mode = "text" if refusal else mode
        listed = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        with self._lock:
            self._purge()
            draft = self.prompts.draft(listed)
            prepared = self.planner.prepare(
                draft, scope, top_k, mode, asked_tail, max_tokens, within=within, order=asked_order
            )
            prepared = prepared._replace(reason=refusal or prepared.reason)
            request = GenerationRequest(
                prepared.prompt.token_ids, max_tokens, prepared.plan, temperature, sampling or {}
            )
            submitted_s = time.perf_counter()
            generation = self._generate(request)
            result = chat_result(mode, prepared, generation, submitted_s - start_s)
            if mode == "inject" and self.repair_after_chat and prepared.choice.unencoded:
                with _only_logged("Encoding missing facts"):
                    self.runner.repair(scope, facts_of(prepared.choice.unencoded))
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

    def _ask_resident(self, head: tuple[int, ...], head_key: str, keys: Sequence[str]) -> Residents:
        """The resident keys, once the text in front of all facts is resident as well.

        That text is encoded first where the pool lacks it, and only then are the facts asked for:
        its capture may have pushed one out.
        """
        try:
            there = self.runner.jobs.resident([head_key, *keys])
            if head_key not in there and there:
                self.runner.run([self.encoder.head_job(head)])
                there = self.runner.jobs.resident([head_key, *keys])
            return Residents(there if head_key in there else frozenset())
        except EngineError as error:
            logger.warning("Facts are prefilled as text: %s", error)
            return Residents(frozenset(), "the engine did not say which facts are in the pool")

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


@contextmanager
def _only_logged(what: str) -> Iterator[None]:
    """Encoding makes later chats faster: its failure must not take away what was stored or answered."""
    try:
        yield
    except Exception:
        logger.exception("%s failed; they are prefilled as text until they are encoded", what)


def _tokenizer(model: str, engine_args: Mapping[str, Any]) -> Any:
    """The tokenizer that vLLM uses for these arguments. Raises EngineMissing."""
    return load_tokenizer(
        str(engine_args.get("tokenizer") or model),
        engine_args.get("tokenizer_revision") or engine_args.get("revision"),
        trust_remote_code=bool(engine_args.get("trust_remote_code", False)),
    )
