"""From a chat's messages to a prompt with memory and the plan that injects it.

search → which of the facts found are in the pool → `planner.choose` → `Draft.build` → `Plan`. Both front
ends go this way, `MemoryLLM` and the server; they differ in how they ask the engine (`AskResident`). Runs no
request.

A plan's segments are the head, the facts in front, and (with `keeps_turns`) the earlier turns, see
`conversation`. Whether those are in the pool need not be asked: the connector claims the leading run that is,
and the rest is text. Without facts in front there is no plan: then the prompt is vLLM's own, and its prefix
cache finds the earlier turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from functools import lru_cache
from typing import Literal, NamedTuple

from inferscale.catalog import FoundBlocks
from inferscale.config import DEFAULT_ORDER
from inferscale.conversation import Conversation, turn_segments
from inferscale.encoder import Encoder
from inferscale.errors import TextTooLong, UnknownScope
from inferscale.fact_order import FactOrder
from inferscale.facts import Fact, Scope, SearchHit, Turn
from inferscale.filters import Filter
from inferscale.memory import Memory
from inferscale.plan import Plan, Segment, scope_digest
from inferscale.planner import Candidate, Choice, choose
from inferscale.prompt import Draft, Prompt
from inferscale.search import Recall
from inferscale.tail import NO_TAIL, Tail

Mode = Literal["inject", "text", "none"]


class ChatTimings(NamedTuple):
    """Where the time to the first token went, in milliseconds; waiting for other calls is in none of them.

    embed_ms: the question's vector. search_ms: the best facts, their texts and keys. residency_ms:
    asking the engine which of them are in the pool, and encoding the system text where it was not.
    prompt_ms: all else before the submission: rendering, tokenization, choice and order of the facts,
    the plan. engine_ms: from the submission to the first token (`ChatResult.ttft_ms`).
    """

    embed_ms: float = 0.0
    search_ms: float = 0.0
    residency_ms: float = 0.0
    prompt_ms: float = 0.0
    engine_ms: float = 0.0

    @property
    def front_ms(self) -> float:
        """All that comes before the engine."""
        return self.embed_ms + self.search_ms + self.residency_ms + self.prompt_ms

    @property
    def total_ms(self) -> float:
        """From the question to the first token."""
        return self.front_ms + self.engine_ms


class PreparedChat(NamedTuple):
    """A chat that is ready to run.

    epoch: of the scope when its facts were read. reason: why nothing is injected, where that is unusual.
    timings: of all but the engine. blocks: core blocks of the scope.
    """

    prompt: Prompt
    choice: Choice
    hits: tuple[SearchHit, ...]
    plan: Plan | None
    epoch: int
    reason: str | None
    timings: ChatTimings
    blocks: tuple[Fact, ...] = ()

    @property
    def num_missing_tokens(self) -> int:
        """Tokens of facts that are prefilled because their KV is not in the pool."""
        return sum(candidate.num_tokens for candidate in self.choice.missing)

    def num_lost_tokens(self, num_supplied: int) -> int:
        """Tokens of the head and the facts in front that were prefilled all the same, as after an eviction.

        num_supplied: leading tokens of the prompt that were injected or cached. Earlier turns do not count:
        they are encoded after an answer, and nobody has looked whether they are there.
        """
        if self.plan is None:
            return 0
        table = self.plan.table
        planned = sum(n for n, kind in zip(table.lengths, table.kinds, strict=True) if kind != "t")
        return max(0, planned - num_supplied)


class Residents(NamedTuple):
    """keys: which can be injected. reason: why none can, where that is unusual."""

    keys: Set[str]
    reason: str | None = None


AskResident = Callable[[tuple[int, ...], str, Sequence[str]], Residents]
"""(head ids, key of the head, keys of facts) → those that can be injected behind this head."""

NO_RECALL = Recall((), {}, 0, 0.0, 0.0)
NO_BLOCKS = FoundBlocks((), {}, 0)

_ALL_RECOMPUTED = "all facts found are recomputed (tail)"


class _Found(NamedTuple):
    """What may stand in a prompt: facts, best first, and core blocks. order: in which facts shall stand."""

    facts: list[Candidate]
    blocks: list[Candidate]
    order: FactOrder

    def choose(self, tail: Tail, budget_tokens: int, needs_residency: bool, in_place: bool) -> Choice:
        return choose(
            self.facts,
            tail=tail,
            budget_tokens=budget_tokens,
            needs_residency=needs_residency,
            in_place=in_place,
            blocks=self.blocks,
            order=self.order,
        )


class ChatPlanner:
    """Prepares chats on one memory for one engine. Safe from several threads as far as `ask_resident` is.

    keeps_turns: earlier turns are segments too; for a front end that has them encoded (`conversation`).
    tail: of questions without earlier turns that do not name one. Where turns follow the facts, what is
    recomputed stands behind these, in another place than in text memory, so there it has to be asked for.
    order: of the facts, of chats that do not name one.
    """

    def __init__(
        self,
        memory: Memory,
        encoder: Encoder,
        max_model_len: int,
        ask_resident: AskResident,
        *,
        keeps_turns: bool = False,
        tail: Tail = NO_TAIL,
        order: FactOrder = DEFAULT_ORDER,
    ) -> None:
        self.memory = memory
        self.encoder = encoder
        self.prompts = encoder.prompts
        self.max_model_len = max_model_len
        self.keeps_turns = keeps_turns
        self.tail = tail
        self.order = order
        self._ask_resident = ask_resident
        self._head_key = lru_cache(maxsize=64)(encoder.head_key)

    def prepare(
        self,
        draft: Draft,
        scope: Scope,
        top_k: int,
        mode: Mode,
        tail: Tail | None,
        max_tokens: int,
        caller_salt: str = "",
        within: Filter | None = None,
        order: FactOrder | None = None,
    ) -> PreparedChat:
        """The scope's core blocks and the `top_k` best of its facts that pass the filter for the draft's
        question, in a prompt that leaves room for an answer of `max_tokens`.

        mode: `inject` plans their injection, `text` has the same text, `none` no facts. tail, order: None for
        the setting. An unknown scope has no facts. Raises InvalidInput and TextTooLong.
        """
        if tail is None:
            tail = NO_TAIL if draft.follows_turns else self.tail
        start_s = time.perf_counter()
        recall, blocks = NO_RECALL, NO_BLOCKS
        if mode != "none":
            recall, blocks = self._recall(draft.question, scope, top_k, mode, within)
        residents, residency_ms = Residents(frozenset()), 0.0
        if mode == "inject" and (recall.hits or blocks.blocks):
            head = draft.head_ids
            asked_s = time.perf_counter()
            keys = [*blocks.keys.values(), *recall.keys.values()]
            residents = self._ask_resident(head, self._head_key(head), keys)
            residency_ms = (time.perf_counter() - asked_s) * 1e3
        found = _Found(
            [self._candidate(hit.fact, recall.keys, residents.keys) for hit in recall.hits],
            [self._candidate(block, blocks.keys, residents.keys) for block in blocks.blocks],
            order or self.order,
        )
        choice, prompt = self._fitted(draft, found, tail, max_tokens, needs_residency=mode == "inject")
        plan = None
        if mode == "inject" and choice.injected:
            plan = self._plan(scope, recall.epoch, choice, prompt, caller_salt)
        reason = residents.reason
        if mode == "inject" and plan is None and (choice.front or choice.tail) and not choice.missing:
            reason = reason or _ALL_RECOMPUTED
        timings = ChatTimings(recall.embed_ms, recall.search_ms, residency_ms)
        prompt_ms = (time.perf_counter() - start_s) * 1e3 - timings.front_ms
        return PreparedChat(
            prompt,
            choice,
            recall.hits,
            plan,
            recall.epoch,
            reason,
            timings._replace(prompt_ms=prompt_ms),
            blocks.blocks,
        )

    def conversation(self, draft: Draft, plan: Plan, scope: Scope, answer: str | None) -> Conversation:
        """What of a chat with this plan can be injected for its next question, whatever facts that finds.

        scope: of the plan. answer: as the client will send it back; None where it cannot be foretold, as
        with tool calls: then it ends before this question. Raises what `PromptBuilder.build` raises.
        """
        if answer is not None:
            draft = draft.continued(answer)
        head = draft.head_ids
        opening = Segment(self._head_key(head), head, "text")
        turns = turn_segments(plan.model, plan.scope, plan.caller_salt, head, draft.turns)
        return Conversation(scope, (opening, *turns), plan.epoch)

    def check_length(self, turn: Turn) -> None:
        """Raise TextTooLong for a turn that the model cannot encode."""
        fact = Fact("", 0, Scope(), turn.text, turn.speaker, turn.said_at)
        num_tokens, anchor = len(self.prompts.fact_ids(fact)), len(self.prompts.anchor_ids)
        if num_tokens + anchor > self.encoder.max_tokens:
            raise TextTooLong(
                f"A text has {num_tokens} tokens; behind the {anchor} tokens of the anchor the model can "
                f"encode {self.encoder.max_tokens - anchor}. Split it. Nothing was stored."
            )

    def _recall(
        self, question: str, scope: Scope, top_k: int, mode: Mode, within: Filter | None
    ) -> tuple[Recall, FoundBlocks]:
        """Facts and core blocks, with the keys of their KV where it shall be injected. The recall's epoch is
        the older one of both reads: what was deleted in between is then not injected."""
        model = self.encoder.encodings_of if mode == "inject" else None
        try:
            recall = self.memory.recall(question, scope, top_k, model, within)
        except UnknownScope:
            return NO_RECALL, NO_BLOCKS
        blocks = self.memory.blocks(scope, model)
        return recall._replace(epoch=min(recall.epoch, blocks.epoch)), blocks

    def _candidate(self, fact: Fact, keys: Mapping[str, str], there: Set[str]) -> Candidate:
        key = keys.get(fact.id)
        return Candidate(fact, len(self.prompts.fact_ids(fact)), key if key in there else None)

    def _fitted(
        self,
        draft: Draft,
        found: _Found,
        tail: Tail,
        max_tokens: int,
        *,
        needs_residency: bool,
    ) -> tuple[Choice, Prompt]:
        """The facts that fit into the context together with messages and answer, and their prompt.

        As a rule all of them fit beside what the template was rendered to; only else is the prompt
        without facts rendered to learn how much room there is. Raises TextTooLong.
        """
        limit = self.max_model_len - max_tokens
        in_place = not draft.follows_turns
        if found.facts or found.blocks:
            room = limit - draft.num_tokens
            choice = found.choose(tail, room, needs_residency, in_place)
            if not choice.num_left_out:
                prompt = draft.build(facts_of(choice.front), facts_of(choice.tail))
                if len(prompt.token_ids) <= limit:
                    return choice, prompt
        without_facts = draft.build()
        room = limit - len(without_facts.token_ids)
        if room < 0:
            raise TextTooLong(
                f"The messages and max_tokens={max_tokens} need {-room} tokens more than the model's "
                f"max_model_len={self.max_model_len}. Shorten the messages or lower max_tokens."
            )
        while True:
            choice = found.choose(tail, room, needs_residency, in_place)
            if not (choice.front or choice.tail):
                return choice, without_facts
            prompt = draft.build(facts_of(choice.front), facts_of(choice.tail))
            excess = len(prompt.token_ids) - limit
            if excess <= 0:
                return choice, prompt
            room -= excess  # headings around the facts

    def _plan(self, scope: Scope, epoch: int, choice: Choice, prompt: Prompt, caller_salt: str) -> Plan:
        """Head, front facts and earlier turns as segments."""
        head = prompt.head_ids
        segments = [Segment(self._head_key(head), head, "text")]
        for candidate in choice.injected:
            assert candidate.key is not None
            segments.append(Segment(candidate.key, self.prompts.fact_ids(candidate.fact), "fact"))
        model, digest = self.encoder.model, digest_of(scope)
        if self.keeps_turns and not choice.num_recomputed:
            segments += turn_segments(model, digest, caller_salt, head, prompt.turns)
        return Plan(model, digest, epoch, segments=tuple(segments), caller_salt=caller_salt)


def digest_of(scope: Scope) -> str:
    return scope_digest(scope.user_id, scope.agent_id, scope.run_id)


def facts_of(candidates: Sequence[Candidate]) -> list[Fact]:
    return [candidate.fact for candidate in candidates]
